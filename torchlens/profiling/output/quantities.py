"""What can be asked of a profile by name: to sort by, to colour by."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from torchlens.history.vocabulary import short_word
from torchlens.profiling.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    TypicalSteps,
)
from torchlens.wording import did_you_mean, got, one_of

__all__ = [
    "QUANTITIES",
    "Quantity",
    "call_values",
    "checked_quantity",
    "full_name",
    "last_operations",
    "module_value",
    "operation_values",
    "own_value",
]


class Quantity(NamedTuple):
    """Where a quantity is found in the records. None: it is not known of such a thing."""

    title: str
    unit: str  # 'seconds', 'bytes', 'FLOPs' or '' for a count
    call: str | None = None  # a field of CallRecord
    own_call: str | None = None  # the same without the modules inside
    module: str | None = None  # a field of ModuleRecord
    operation: str | None = None  # a field of OperationRecord
    is_sum: bool = True  # whether several add up to one
    parts: tuple[str, ...] = ()  # the quantities that it is the sum of
    ratio: tuple[str, str] | None = None  # the fields of CallRecord or OperationRecord that it is the ratio of


QUANTITIES: dict[str, Quantity] = {
    "forward_time": Quantity("forward time", "seconds", "forward_seconds", "forward_self_seconds", None, "forward_seconds"),
    "forward_self_time": Quantity("own forward time", "seconds", "forward_self_seconds", None, None, "forward_seconds"),
    "backward_time": Quantity(
        "backward time", "seconds", "backward_seconds", "backward_self_seconds", None, "backward_seconds"
    ),
    "backward_self_time": Quantity("own backward time", "seconds", "backward_self_seconds", None, None, "backward_seconds"),
    "total_time": Quantity(
        "forward + backward time", "seconds", "total_seconds", "total_self_seconds", None, "total_seconds",
        parts=("forward_time", "backward_time"),
    ),
    "total_self_time": Quantity(
        "own time, forward + backward", "seconds", "total_self_seconds", None, None, "total_seconds",
        parts=("forward_self_time", "backward_self_time"),
    ),
    "flops": Quantity("FLOPs", "FLOPs", "flops", None, None, "flops"),
    "flops_per_second": Quantity(
        "FLOP/s", "FLOPs", "flops_per_second", None, None, "flops_per_second", is_sum=False,
        ratio=("flops", "forward_seconds"),
    ),
    "flops_backward": Quantity("backward FLOPs", "FLOPs", "flops_backward", None, None, "flops_backward"),
    "parameters": Quantity("parameters", "", module="num_parameters"),
    "param_bytes": Quantity("parameter memory", "bytes", module="param_bytes"),
    "gradient_bytes": Quantity("gradient memory", "bytes", module="gradient_bytes"),
    "output_bytes": Quantity("output memory", "bytes", "output_bytes", None, None, "num_bytes", is_sum=False),
    "saved_bytes": Quantity("memory kept for backward", "bytes", "saved_bytes"),
    "peak_bytes": Quantity("peak memory", "bytes", "peak_bytes", None, None, "peak_bytes", is_sum=False),
    "added_bytes": Quantity("memory added", "bytes", "added_bytes", None, None, "added_bytes"),
    "peak_bytes_backward": Quantity("backward peak memory", "bytes", "peak_bytes_backward", is_sum=False),
    "added_bytes_backward": Quantity("memory added in backward", "bytes", "added_bytes_backward"),
    "calls": Quantity("calls", "", module="num_calls"),
}  # fmt: skip
# The shorter words, which also sort a history and colour a diagram.
_SHORT = {short_word(name): name for name in QUANTITIES if short_word(name) != name}


def full_name(name: object) -> object:
    """`forward_time` for `time`."""
    return _SHORT.get(name, name) if isinstance(name, str) else name


def checked_quantity(name: object, option: str) -> Quantity:
    """The quantity of that name, or an error that lists them."""
    full = full_name(name)
    if isinstance(full, str) and full in QUANTITIES:
        return QUANTITIES[full]
    raise ValueError(f"{option} must be {one_of(QUANTITIES)}, got {got(name)}. {did_you_mean(name, QUANTITIES)}".rstrip())


def module_value(record: ModuleRecord, quantity: Quantity, times: str = "typical") -> float | None:
    """Of a module in a step: times of a typical one, of anything else the median; None if it was not measured.

    `times` may ask for another number than the typical one: 'minimum', 'median' or 'p95' of the measured steps. A module
    that is not called itself, but holds others (`ModuleList`), has the sum of what those have, of peaks the highest.
    """
    if quantity.module is not None:
        return float(getattr(record, quantity.module))
    if not record.calls and record.children and quantity.ratio is None:
        inside = [module_value(child, quantity, times) for child in record.children]
        known = [value for value in inside if value is not None]
        return None if not known else sum(known) if quantity.is_sum else max(known)
    if quantity.ratio is not None:
        return _ratio(record.measured_calls, quantity.ratio)
    if quantity.parts and times == "typical":
        parts = [module_value(record, QUANTITIES[name]) for name in quantity.parts]
        return None if parts[0] is None else sum(part for part in parts if part is not None)
    if quantity.unit == "seconds" and times != "typical":
        statistic = record.statistic(quantity.call or "")
        return None if statistic is None else float(getattr(statistic, times))
    return _over_steps(record, record.measured_calls, quantity.call or "", quantity)


def _ratio(records: Sequence[Any], fields: tuple[str, str]) -> float | None:
    """The sum of one field over that of another, of the records that know both."""
    pairs = [(getattr(record, fields[0]), getattr(record, fields[1])) for record in records]
    known = [(above, below) for above, below in pairs if above is not None and below is not None]
    total = sum(below for _, below in known)
    return sum(above for above, _ in known) / total if total else None


def own_value(record: ModuleRecord, quantity: Quantity) -> float | None:
    """Of a module without the modules inside: what is measured so, or what those leave over."""
    value = module_value(record, quantity if quantity.own_call is None else replace_call(quantity))
    if value is None or quantity.own_call is not None or not quantity.is_sum or not record.calls:
        return value if record.calls else None
    inside = [module_value(child, quantity) for child in record.children]
    return max(0.0, value - sum(part for part in inside if part is not None))


def replace_call(quantity: Quantity) -> Quantity:
    """The same quantity without the modules inside."""
    parts = tuple(name.replace("_time", "_self_time") for name in quantity.parts)
    return quantity._replace(call=quantity.own_call, own_call=None, parts=parts)


def call_values(record: ModuleRecord, quantity: Quantity, field: str) -> dict[str, float]:
    """A field of CallRecord by `address`, or by `address:pass` where a step calls the module more than once."""
    calls = record.measured_calls
    by_pass: dict[int, list[CallRecord]] = {}
    for call in calls:
        by_pass.setdefault(call.pass_num, []).append(call)
    found: dict[str, float] = {}
    for number, own in by_pass.items():
        value = _over_steps(record, own, field, quantity)
        if value is not None:
            found[record.address if len(by_pass) == 1 else f"{record.address}:{number}"] = value
    return found


def operation_values(measurements: Measurements, quantity: Quantity) -> dict[str, float]:
    """Of each operation that has a label: times of a typical step, of anything else the median."""
    if quantity.operation is None:
        return {}
    steps = {step.number for step in measurements.measured_steps}
    found: dict[str, dict[int, list[float]]] = {}
    for record in measurements.operations:
        value = getattr(record, quantity.operation)
        if record.label is not None and value is not None and record.step in steps:
            found.setdefault(record.label, {}).setdefault(record.step, []).append(value)
    typical = measurements.root.typical_steps
    values = {label: _typical(typical, own, quantity.operation, quantity) for label, own in found.items()}
    return {label: value for label, value in values.items() if value is not None}


def _over_steps(record: ModuleRecord, calls: list[CallRecord], field: str, quantity: Quantity) -> float | None:
    """A field of some calls: those of one step added up, or the largest of them, and then what is typical of the steps."""
    steps: dict[int, list[float]] = {}
    for call in calls:
        value = getattr(call, field)
        if value is not None:
            steps.setdefault(call.step, []).append(sum(value) if isinstance(value, list) else value)
    return _typical(record.typical_steps, steps, field, quantity)


def _typical(typical: TypicalSteps, steps: dict[int, list[float]], field: str, quantity: Quantity) -> float | None:
    values = {step: sum(own) if quantity.is_sum else max(own) for step, own in steps.items()}
    if quantity.unit == "seconds":
        return typical.mean(field, values)
    return median(values.values()) if values else None


def last_operations(measurements: Measurements) -> list[OperationRecord]:
    """The operations of the last measured step, those that have a label."""
    numbers = [step.number for step in measurements.measured_steps]
    return [record for record in measurements.operations if record.label is not None and record.step == numbers[-1]]
