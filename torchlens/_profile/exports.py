"""A profile as pandas tables and as nested JSON.

JSON is `{model: {"info": {...}, "children": {name: {"info": ..., "children": ...}}}}`. Memory is in
bytes, latency in seconds; null means not measured. docs/profile.md describes the fields.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torchlens._profile.quantities import QUANTITIES, Quantity, module_value
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
    ProfiledStep,
)
from torchlens._text.error_wording import check_choice
from torchlens._text.json_text import write_json

if TYPE_CHECKING:
    import pandas


_RECORDS: dict[str, Any] = {
    "call": CallRecord,
    "operation": OperationRecord,
    "step": ProfiledStep,
    "parameter": ParameterRecord,
}
_COUNTS = (
    "num_learnable", "own_num_parameters", "own_num_learnable", "own_param_bytes",
    "own_gradient_bytes",
)  # fmt: skip
_STATISTICS = ("spread", "minimum", "median", "p95")
_STEP_PARTS = (
    "wall_seconds", "loss_seconds", "backward_call_seconds", "optimizer_seconds", "data_seconds",
    "other_seconds",
)  # fmt: skip
_UNITS = {
    "memory": "bytes",
    "latency": "seconds",
    "flops": "floating-point operations, a multiply-add is two",
}
RowsBy: TypeAlias = Literal["module", "call", "operation", "step", "parameter"]


# -- pandas


def to_pandas(measurements: Measurements, by: RowsBy = "module") -> "pandas.DataFrame":
    """One row for each module, call of a module, operation, step or parameter.

    Times of modules are those of a typical step, with the width of the middle half of the steps as
    `_spread` and with `_minimum`, `_median` and `_p95`; bytes are medians. Each kind of step
    (training, evaluation, ...) has rows of its own. Calls and operations have their own times.

    >>> profile.to_pandas().sort_values('forward_self_seconds').tail()
    """
    check_choice("by", by, get_args(RowsBy))
    import pandas  # slow to import

    if by == "module":
        modules = [
            {"step_kind": kind, **_module_row(record, own.root)}
            for kind, own in measurements.by_kind().items()
            for record in own.root.walk()
        ]
        return pandas.DataFrame(modules)
    columns = [field.name for field in dataclasses.fields(_RECORDS[by])]
    columns += _STEP_PARTS if by == "step" else ()
    records = getattr(measurements, f"{by}s")
    rows = [[getattr(record, column) for column in columns] for record in records]
    return pandas.DataFrame(rows, columns=columns)


def _module_row(record: ModuleRecord, root: ModuleRecord) -> dict[str, Any]:
    calls = record.measured_calls
    total, whole = (module_value(each, QUANTITIES["total_time"]) for each in (record, root))
    row: dict[str, Any] = {
        "address": record.address,
        "aliases": record.aliases,
        "module_type": record.module_type,
        "depth": record.depth,
        "num_steps": len({call.step for call in calls}),
        **{f"{name}_shapes": _last(record, f"{name}_shapes") for name in _TENSORS},
        "input_bytes": sum(_last(record, "input_bytes")),
        "share": total / whole if total is not None and whole else None,
        **{name: getattr(record, name) for name in _COUNTS},
    }
    for quantity in QUANTITIES.values():
        row |= _cells(record, quantity)
    for name in _FLAGS.values():
        row[name] = _any_known(getattr(call, name) for call in record.calls)
    return row


def _cells(record: ModuleRecord, quantity: Quantity) -> dict[str, Any]:
    """The columns of a quantity: its number and, for times, statistics."""
    value = module_value(record, quantity)
    if quantity.module and value is not None:  # a count
        return {quantity.column: int(value)}
    cells: dict[str, Any] = {quantity.column: value}
    if quantity.unit == "seconds" and not quantity.parts:
        phase = quantity.call.removesuffix("_seconds")
        for name, number in _statistics(record, quantity.call).items():
            cells[f"{phase}_{name}"] = number
    return cells


# -- JSON


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
        "units": _UNITS,
        "level": measurements.level,
        "steps": len(measurements.measured_steps),
        "warmup_steps": len(measurements.steps) - len(measurements.measured_steps),
        "flops_not_counted": measurements.flops_not_counted,
        "problems": measurements.problems,
    }
    kinds = measurements.by_kind()
    if len(kinds) > 1:  # the same for each kind of step, and how many there were
        tree["info"]["step_kind"] = usual
        tree["info"]["kinds"] = {
            name: {"steps": len(own.measured_steps), **_node(own.root, own.modules)}
            for name, own in kinds.items()
        }
    return {measurements.model_name: tree}


def _node(record: ModuleRecord, in_all_steps: dict[str, ModuleRecord]) -> dict[str, Any]:
    """A module with those inside. Flags of NaN and Inf are of all steps."""
    prefix = f"{record.address}." if record.address else ""
    children = {
        child.address.removeprefix(prefix): _node(child, in_all_steps) for child in record.children
    }
    return {"info": _info(record, in_all_steps[record.address]), "children": children}


def _info(record: ModuleRecord, in_all_steps: ModuleRecord) -> dict[str, Any]:
    input_bytes = _last(record, "input_bytes")
    info: dict[str, Any] = {
        "type": record.module_type,
        "address": record.address,
        "aliases": record.aliases,
        **{json: _last(record, f"{name}_shapes") for name, json in _TENSORS.items()},
        "num_learnable_parameters": record.num_learnable,
        "input_memory_usage": input_bytes,
        "output_memory_usage": _last(record, "output_bytes"),
        "total_memory": record.param_bytes + record.gradient_bytes + sum(input_bytes),
    }
    for json, name in _FLAGS.items():
        info[json] = _any_known(getattr(call, name) for call in in_all_steps.calls)
    for quantity in QUANTITIES.values():
        if quantity.json:
            info[quantity.json] = _json_number(module_value(record, quantity), quantity.unit)
    for phase in ("forward", "backward"):
        for name, value in _statistics(record, f"{phase}_seconds").items():
            info[f"{phase}_latency_{name}"] = value
    return info


def _json_number(value: float | None, unit: str) -> float | None:
    """Bytes and counts without a decimal point, unless they are a median between two."""
    if value is None or unit == "seconds" or value != int(value):
        return value
    return int(value)


# -- shared

# Fields of CallRecord, without `_shapes`, and their names in JSON.
_TENSORS = {
    "input": "input_shapes",
    "output": "output_shapes",
    "grad_in": "grad_in_shape",
    "grad_out": "grad_out_shape",
}
_FLAGS = {
    "forward_nan": "forward_nonfinite",
    "grad_in_nan": "grad_in_nonfinite",
    "grad_out_nan": "grad_out_nonfinite",
}


def _last(record: ModuleRecord, field: str) -> list[Any]:
    """A field of the last measured call."""
    calls = record.measured_calls
    found: list[Any] = getattr(calls[-1], field) if calls else []
    return found


def _statistics(record: ModuleRecord, field: str) -> dict[str, float | None]:
    statistic = record.statistic(field)
    return {
        name: None if statistic is None else float(getattr(statistic, name)) for name in _STATISTICS
    }


def _any_known(flags: Iterable[bool | None]) -> bool | None:
    """Whether any is true; None if none is known."""
    known = [flag for flag in flags if flag is not None]
    return any(known) if known else None


# -- a timeline

_PROCESS = 1
# The tracks from the top: the category of their events, and their names.
_TRACKS = {
    "step": "steps",
    "forward": "modules, forward",
    "operation": "operations",
    "outside": "outside the model",
    "backward": "modules, backward",
}
# Times are multiples of this, which a float of microseconds holds exactly, so that a viewer that
# cuts off fractions still nests events correctly.
_TICK_NS = 125
_Event: TypeAlias = dict[str, Any]


def to_chrome_trace(measurements: Measurements, path: str | os.PathLike[str] | None) -> str | None:
    """The trace as JSON text, or, with a path, in that file."""
    events = sorted(_events(measurements), key=lambda event: (event["ts"], -event["dur"]))
    process = _metadata("process_name", 0, "name", f"Profile of {measurements.model_name}")
    data = {"traceEvents": [process, *_with_tracks(events), *events], "displayTimeUnit": "ms"}
    return write_json(data, path, None)


def _events(measurements: Measurements) -> Iterator[_Event]:
    """Complete events (`ph: X`), times in microseconds from the beginning of the profile."""
    for step in measurements.steps:
        about = {"phase": step.phase, "gradients": step.has_grad, "warm-up": step.is_warmup}
        yield _event("step", f"step {step.number}", step.start_ns, step.end_ns, about)
        for kind, start, end in step.outside_spans:
            yield _event("outside", kind, start, end, {"step": step.number})
    for call in measurements.calls:
        name, about = (
            call.address or measurements.model_name,
            {
                "type": call.module_type,
                "step": call.step,
            },
        )
        if call.end_ns > call.start_ns:
            yield _event("forward", name, call.start_ns, call.end_ns, about | _results(call))
        for start, end in call.backward_spans:
            yield _event("backward", name, start, end, about)
    for operation in measurements.operations:
        about = {
            "type": operation.layer_type,
            "shape": list(operation.shape),
            "module": operation.address,
        }
        name = operation.label or operation.layer_type
        yield _event("operation", name, operation.start_ns, operation.end_ns, about)


def _results(call: CallRecord) -> dict[str, Any]:
    known = {"FLOPs": call.flops, "peak bytes": call.peak_bytes, "raised": call.raised}
    shapes = [list(shape) for shape in call.output_shapes]
    return {"output": shapes, **{name: value for name, value in known.items() if value is not None}}


def _event(category: str, name: str, start_ns: int, end_ns: int, about: dict[str, Any]) -> _Event:
    start, end = start_ns // _TICK_NS, max(start_ns, end_ns) // _TICK_NS
    times = {"ts": start * _TICK_NS / 1000, "dur": (end - start) * _TICK_NS / 1000}
    return {"name": name, "cat": category, "ph": "X", "pid": _PROCESS, "args": about, **times}


def _with_tracks(events: list[_Event]) -> list[_Event]:
    """Gives each event a track, and returns the events that name the tracks.

    Viewers drop events that overlap others of their track in part: these go to a further track of
    their category. In a backward pass, a module may begin while another runs and end after it: the
    gradient of a weight that a second module borrows belongs to the module that owns the weight.
    """
    ends: dict[tuple[int, int], list[float]] = {}  # track → when the events that are open end
    places, order = [], [*_TRACKS]
    for event in events:
        track, lane = order.index(event["cat"]), 0
        while not _has_room(ends.setdefault((track, lane), []), event):
            lane += 1
        places.append((track, lane))
    numbers = {place: number for number, place in enumerate(sorted(ends), 1)}
    for event, place in zip(events, places, strict=True):
        event["tid"] = numbers[place]
    named = []
    for (track, lane), number in numbers.items():
        name = _TRACKS[order[track]] + (f" ({lane + 1})" if lane else "")
        named.append(_metadata("thread_name", number, "name", name))
        named.append(_metadata("thread_sort_index", number, "sort_index", number))
    return named


def _has_room(ends: list[float], event: _Event) -> bool:
    """Whether an event lies inside those that are open; opens it, if so."""
    start, end = event["ts"], event["ts"] + event["dur"]
    while ends and ends[-1] <= start:
        ends.pop()
    if ends and end > ends[-1]:
        return False
    ends.append(end)
    return True


def _metadata(kind: str, track: int, key: str, value: str | int) -> _Event:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {key: value}}
