"""What can be asked of a profile by name: to sort by, to colour by."""

from statistics import median
from typing import NamedTuple

from torchlens.profiling.records import CallRecord, Measurements, ModuleRecord, OperationRecord, TypicalSteps
from torchlens.wording import did_you_mean, got, one_of

__all__ = ["QUANTITIES", "Quantity", "call_values", "checked_quantity", "module_value", "operation_values"]


class Quantity(NamedTuple):
    """Where a quantity is found in the records. None: it is not known of such a thing."""

    title: str
    unit: str  # 'seconds', 'bytes', 'FLOPs' or '' for a count
    call: str | None = None  # a field of CallRecord
    own_call: str | None = None  # the same without the modules inside
    module: str | None = None  # a field of ModuleRecord
    operation: str | None = None  # a field of OperationRecord
    is_sum: bool = True  # whether several add up to one


QUANTITIES: dict[str, Quantity] = {
    "forward_time": Quantity("forward time", "seconds", "forward_seconds", "forward_self_seconds", None, "forward_seconds"),
    "forward_self_time": Quantity("own forward time", "seconds", "forward_self_seconds", None, None, "forward_seconds"),
    "backward_time": Quantity(
        "backward time", "seconds", "backward_seconds", "backward_self_seconds", None, "backward_seconds"
    ),
    "backward_self_time": Quantity("own backward time", "seconds", "backward_self_seconds", None, None, "backward_seconds"),
    "flops": Quantity("FLOPs", "FLOPs", "flops", None, None, "flops"),
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
}


def checked_quantity(name: object, option: str) -> Quantity:
    """The quantity of that name, or an error that lists them."""
    if isinstance(name, str) and name in QUANTITIES:
        return QUANTITIES[name]
    raise ValueError(f"{option} must be {one_of(QUANTITIES)}, got {got(name)}. {did_you_mean(name, QUANTITIES)}".rstrip())


def module_value(record: ModuleRecord, quantity: Quantity) -> float | None:
    """Of a module in a step: times of a typical one, of anything else the median; None if it was not measured."""
    if quantity.module is not None:
        return float(getattr(record, quantity.module))
    return _over_steps(record, record.measured_calls, quantity.call or "", quantity)


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
