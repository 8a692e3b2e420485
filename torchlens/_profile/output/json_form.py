"""A profile as nested JSON: `{model: {"info": {...}, "children": {name: {"info": ..., "children":
...}}}}`.

Memory is in bytes, latency in seconds; null says that something was not measured. The fields are
described in docs/profile.md.
"""

import os
from typing import Any

from torchlens._profile.output.data_frames import any_known
from torchlens._profile.records import Measurements, ModuleRecord
from torchlens._text.json_text import write_json


def to_json(
    measurements: Measurements,
    path: str | os.PathLike[str] | None = None,
    indent: int | None = None,
) -> str | None:
    """The profile as JSON text, or, with a path, in that file.

    >>> json.loads(profile.to_json())['Net']['children']['fc1']['info']['forward_latency']
    """
    return write_json(profile_data(measurements), path, indent)


def profile_data(measurements: Measurements) -> dict[str, Any]:
    """The profile as dicts, lists, strings and numbers."""
    usual, shown = measurements.usual_first()[0]
    tree = _node(shown.root, measurements.modules)
    tree["info"] |= {
        "units": {
            "memory": "bytes",
            "latency": "seconds",
            "flops": "floating-point operations, a multiply-add is two",
        },
        "level": measurements.level,
        "steps": len(measurements.measured_steps),
        "warmup_steps": len(measurements.steps) - len(measurements.measured_steps),
        "flops_not_counted": measurements.flops_not_counted,
        "problems": measurements.problems,
    }
    kinds = measurements.by_kind() if measurements.steps else {}
    if len(kinds) > 1:  # the same for each kind of step, and how many there were
        tree["info"]["step_kind"] = usual
        tree["info"]["kinds"] = {
            name: {"steps": len(own.measured_steps), **_node(own.root, own.modules)}
            for name, own in kinds.items()
        }
    return {measurements.model_name: tree}


def _node(record: ModuleRecord, in_all_steps: dict[str, ModuleRecord]) -> dict[str, Any]:
    """Depth-first without recursion: models may be nested deeper than Python likes.

    Whether anything was not finite is a matter of all steps.
    """
    root: dict[str, Any] = {"info": _info(record, in_all_steps[record.address]), "children": {}}
    pending = [(record, root)]
    while pending:
        above, node = pending.pop()
        for child in above.children:
            inner: dict[str, Any] = {
                "info": _info(child, in_all_steps[child.address]),
                "children": {},
            }
            node["children"][_name_below(child, above)] = inner
            pending.append((child, inner))
    return root


def _whole(value: float) -> float:
    """Bytes and operations without a decimal point."""
    return int(value) if value == int(value) else value


def _name_below(child: ModuleRecord, above: ModuleRecord) -> str:
    return child.address.removeprefix(f"{above.address}.") if above.address else child.address


def _info(record: ModuleRecord, in_all_steps: ModuleRecord) -> dict[str, Any]:
    calls = record.measured_calls
    last = calls[-1] if calls else None

    def middle(name: str) -> float | None:
        value = record.typical(name)
        return value if value is None or name.endswith("_seconds") else _whole(value)

    def of_steps(name: str, number: str) -> float | None:
        statistic = record.statistic(name)
        return None if statistic is None else float(getattr(statistic, number))

    def found(name: str) -> bool | None:
        return any_known(getattr(call, name) for call in in_all_steps.calls)

    input_bytes = last.input_bytes if last else []
    return {
        "type": record.module_type,
        "input_shapes": last.input_shapes if last else [],
        "output_shapes": last.output_shapes if last else [],
        "grad_in_shape": last.grad_in_shapes if last else [],
        "grad_out_shape": last.grad_out_shapes if last else [],
        "num_parameters": record.num_parameters,
        "num_learnable_parameters": record.num_learnable,
        "param_memory_usage": record.param_bytes,
        "gradient_memory_usage": record.gradient_bytes,
        "input_memory_usage": input_bytes,
        "output_memory_usage": last.output_bytes if last else [],
        "effective_additional_memory_fwd": middle("added_bytes"),
        "effective_additional_memory_bwd": middle("added_bytes_backward"),
        "forward_nan": found("forward_nonfinite"),
        "grad_in_nan": found("grad_in_nonfinite"),
        "grad_out_nan": found("grad_out_nonfinite"),
        "total_memory": record.param_bytes + record.gradient_bytes + sum(input_bytes),
        "forward_latency": middle("forward_seconds"),
        "backward_latency": middle("backward_seconds"),
        # Beyond the classic fields:
        "address": record.address,
        "aliases": record.aliases,
        "num_calls": record.num_calls,
        "forward_latency_self": middle("forward_self_seconds"),
        "backward_latency_self": middle("backward_self_seconds"),
        **{
            f"{name}_latency_{number}": of_steps(f"{name}_seconds", number)
            for name in ("forward", "backward")
            for number in ("spread", "minimum", "median", "p95")
        },
        "flops": middle("flops"),
        "flops_backward": middle("flops_backward"),
        "saved_memory": middle("saved_bytes"),
        "peak_memory_fwd": middle("peak_bytes"),
        "peak_memory_bwd": middle("peak_bytes_backward"),
    }
