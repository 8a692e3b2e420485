"""A profile as pandas tables."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torchlens._profile.output.quantities import QUANTITIES, module_value
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ParameterRecord,
)
from torchlens._profile.steps import StepRecord
from torchlens._text.wording import check_choice

if TYPE_CHECKING:
    import pandas


_TIMES = ("forward_seconds", "forward_self_seconds", "backward_seconds", "backward_self_seconds")
_PER_STEP = (
    "flops", "flops_backward", "saved_bytes", "peak_bytes", "added_bytes", "peak_bytes_backward",
    "added_bytes_backward",
)  # fmt: skip
_COUNTS = (
    "num_parameters", "num_learnable", "param_bytes", "gradient_bytes", "own_num_parameters",
    "own_num_learnable",
    "own_param_bytes", "own_gradient_bytes",
)  # fmt: skip
_STEP_PARTS = (
    "wall_seconds", "loss_seconds", "backward_call_seconds", "optimizer_seconds", "data_seconds",
    "other_seconds",
)  # fmt: skip
RowsBy: TypeAlias = Literal["module", "call", "operation", "step", "parameter"]


def to_pandas(measurements: Measurements, by: RowsBy = "module") -> "pandas.DataFrame":
    """One row for each module, call of a module, operation, step or parameter.

    Of modules, times are those of a typical step, with the width of the middle half of the steps as
    `_spread` and with `_minimum`, `_median` and `_p95`; bytes are medians. Each kind of step
    (training, evaluation, ...) has rows of its own. Of calls and operations, times are what was
    measured that time.

    >>> profile.to_pandas().sort_values('forward_self_seconds').tail()
    """
    check_choice("by", by, get_args(RowsBy))
    import pandas  # slow to import, so imported by those who want a table

    if by == "module":
        kinds = measurements.by_kind() if measurements.steps else {"": measurements}
        found = [
            (kind, own.root, record) for kind, own in kinds.items() for record in own.root.walk()
        ]
        rows = [{"step_kind": kind, **_module_row(record, root)} for kind, root, record in found]
        return pandas.DataFrame(rows)
    records: Any = getattr(measurements, f"{by}s")
    types = {
        "call": CallRecord,
        "operation": OperationRecord,
        "step": StepRecord,
        "parameter": ParameterRecord,
    }
    columns = [field.name for field in dataclasses.fields(types[by])]  # also where there is no row
    if by == "step":
        columns += _STEP_PARTS
    return pandas.DataFrame(
        [[getattr(record, column) for column in columns] for record in records], columns=columns
    )


def _module_row(record: ModuleRecord, root: ModuleRecord) -> dict[str, Any]:
    calls = record.measured_calls
    total, whole = (module_value(each, QUANTITIES["total_time"]) for each in (record, root))
    last = calls[-1] if calls else None
    row: dict[str, Any] = {
        "address": record.address,
        "aliases": record.aliases,
        "module_type": record.module_type,
        "depth": record.depth,
        "num_calls": record.num_calls,
        "num_steps": len({call.step for call in calls}),
        "input_shapes": last.input_shapes if last else [],
        "output_shapes": last.output_shapes if last else [],
        "grad_in_shapes": last.grad_in_shapes if last else [],
        "grad_out_shapes": last.grad_out_shapes if last else [],
        **{name: getattr(record, name) for name in _COUNTS},
        "input_bytes": sum(last.input_bytes) if last else 0,
        "output_bytes": module_value(record, QUANTITIES["output_bytes"]),
    }
    for name in _TIMES:
        statistic = record.statistic(name)
        row[name] = record.typical(name)
        for number in ("spread", "minimum", "median", "p95"):
            row[name.replace("_seconds", f"_{number}")] = (
                None if statistic is None else getattr(statistic, number)
            )
    row["total_seconds"] = total
    row["share"] = total / whole if total is not None and whole else None
    row["flops_per_second"] = module_value(record, QUANTITIES["flops_per_second"])
    for name in _PER_STEP:
        row[name] = record.typical(name)
    for name in ("forward_nonfinite", "grad_in_nonfinite", "grad_out_nonfinite"):
        row[name] = any_known(getattr(call, name) for call in record.calls)
    return row


def any_known(facts: Any) -> bool | None:
    """Whether any is true; None if none is known."""
    known = [fact for fact in facts if fact is not None]
    return any(known) if known else None
