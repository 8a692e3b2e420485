"""What can be asked of a profile by name: to sort by, to colour by."""

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from torchlens._profile.records import CallRecord, Measurements, ModuleRecord, OperationRecord
from torchlens._profile.steps import StepRecord, TypicalSteps
from torchlens._text.measures import Measure, short_word
from torchlens._text.wording import did_you_mean, got, one_of

# The names of QUANTITIES, and the shorter words for some of them.
QuantityName: TypeAlias = (
    Measure
    | Literal[
        "forward_self_time", "backward_self_time", "total_self_time", "flops_per_second",
        "param_bytes", "gradient_bytes",
        "saved_bytes", "peak_bytes", "added_bytes", "peak_bytes_backward", "added_bytes_backward",
    ]
)  # fmt: skip


CallsInside: TypeAlias = dict[int, list[CallRecord]]  # by the index of the call around them


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
    ratio: tuple[str, str] | None = (
        None  # the fields of CallRecord or OperationRecord that it is the ratio of
    )
    own_module: str | None = None  # a field of ModuleRecord: the same without the modules inside


QUANTITIES: dict[str, Quantity] = {
    "forward_time": Quantity("forward time", "seconds", "forward_seconds", "forward_self_seconds",
    None, "forward_seconds"),
    "forward_self_time": Quantity(
        "own forward time", "seconds", "forward_self_seconds", "forward_self_seconds", None,
        "forward_seconds"
    ),
    "backward_time": Quantity(
        "backward time", "seconds", "backward_seconds", "backward_self_seconds", None,
        "backward_seconds"
    ),
    "backward_self_time": Quantity(
        "own backward time", "seconds", "backward_self_seconds", "backward_self_seconds", None,
        "backward_seconds"
    ),
    "total_time": Quantity(
        "forward + backward time", "seconds", "total_seconds", "total_self_seconds", None,
        "total_seconds",
        parts=("forward_time", "backward_time"),
    ),
    "total_self_time": Quantity(
        "own time, forward + backward", "seconds", "total_self_seconds", "total_self_seconds", None,
        "total_seconds",
        parts=("forward_self_time", "backward_self_time"),
    ),
    "flops": Quantity("FLOPs", "FLOPs", "flops", None, None, "flops"),
    "flops_per_second": Quantity(
        "FLOP/s", "FLOPs", "flops_per_second", None, None, "flops_per_second", is_sum=False,
        ratio=("flops", "forward_seconds"),
    ),
    "flops_backward": Quantity("backward FLOPs", "FLOPs", "flops_backward", None, None,
    "flops_backward"),
    "parameters": Quantity("parameters", "", module="num_parameters",
    own_module="own_num_parameters"),
    "param_bytes": Quantity("parameter memory", "bytes", module="param_bytes",
    own_module="own_param_bytes"),
    "gradient_bytes": Quantity("gradient memory", "bytes", module="gradient_bytes",
    own_module="own_gradient_bytes"),
    "output_bytes": Quantity("output memory", "bytes", "output_bytes", None, None, "num_bytes",
    is_sum=False),
    "saved_bytes": Quantity("memory kept for backward", "bytes", "saved_bytes"),
    "peak_bytes": Quantity("peak memory", "bytes", "peak_bytes", None, None, "peak_bytes",
    is_sum=False),
    "added_bytes": Quantity("memory added", "bytes", "added_bytes", None, None, "added_bytes"),
    "peak_bytes_backward": Quantity("backward peak memory", "bytes", "peak_bytes_backward",
    is_sum=False),
    "added_bytes_backward": Quantity("memory added in backward", "bytes", "added_bytes_backward"),
    "calls": Quantity("calls", "", module="num_calls", own_module="num_calls"),
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
    words = [*QUANTITIES, *_SHORT]
    raise ValueError(
        f"{option} must be {one_of(words)}, got {got(name)}. {did_you_mean(name, words)}".rstrip()
    )


def module_value(record: ModuleRecord, quantity: Quantity, times: str = "typical") -> float | None:
    """Of a module in a step: times of a typical one, of anything else the median; None if it was
    not measured.

    `times` may ask for another number than the typical one: 'minimum', 'median' or 'p95' of the
    measured steps.
    """
    if quantity.module is not None:
        return float(getattr(record, quantity.module))
    if quantity.ratio is not None:
        above, below = quantity.ratio
        return _rate(record.by_step(above), record.by_step(below), record.typical_steps, times)
    if quantity.parts and times == "typical":
        parts = [module_value(record, QUANTITIES[name]) for name in quantity.parts]
        return None if parts[0] is None else sum(part for part in parts if part is not None)
    field = quantity.call or ""
    return _of_steps(record.typical_steps, record.by_step(field), field, quantity, times)


def _rate(
    counts: dict[int, float],
    seconds: dict[int, float],
    typical: TypicalSteps,
    times: str = "typical",
) -> float | None:
    """How much in a second: over the time that is printed beside it, which is that of many steps.

    Where steps differ in how much they do, only the time of those counts in which it was counted.
    """
    if len(set(counts.values())) > 1:
        seconds = {step: seconds[step] for step in counts if step in seconds}
        return (
            sum(counts[step] for step in seconds) / sum(seconds.values())
            if any(seconds.values())
            else None
        )
    below = _of_steps(typical, seconds, "forward_seconds", QUANTITIES["forward_time"], times)
    return next(iter(counts.values())) / below if counts and below else None


def calls_inside(measurements: Measurements) -> CallsInside:
    """The calls that each call made."""
    found: CallsInside = {}
    for call in measurements.calls:
        if call.parent is not None and not call.is_recomputed:
            found.setdefault(call.parent, []).append(call)
    return found


def own_value(
    records: Sequence[ModuleRecord], quantity: Quantity, inside: CallsInside, times: str = "typical"
) -> float | None:
    """Of modules added up, each without the modules inside: what is measured so, or what those
    leave over.

    Peaks do not add up, and have no part that is a module's own: the highest of them stands for
    all.
    """
    if quantity.own_module is not None:
        return float(sum(getattr(record, quantity.own_module) for record in records))
    typical = records[0].typical_steps
    if quantity.ratio is not None:
        above, below = (_own_steps(records, field, inside) for field in quantity.ratio)
        return _rate(above, below, typical, times)
    if not quantity.is_sum:
        values = [module_value(record, quantity) for record in records]
        return max((value for value in values if value is not None), default=None)
    if quantity.parts and times == "typical":
        parts = [own_value(records, QUANTITIES[name], inside) for name in quantity.parts]
        return None if parts[0] is None else sum(part for part in parts if part is not None)
    if quantity.own_call is not None:
        return _of_steps(
            typical, _steps_of(records, quantity.own_call), quantity.own_call, quantity, times
        )
    return _of_steps(
        typical,
        _own_steps(records, quantity.call or "", inside),
        quantity.call or "",
        quantity,
        times,
    )


def _steps_of(records: Sequence[ModuleRecord], field: str) -> dict[int, float]:
    steps: dict[int, float] = {}
    for record in records:
        for step, value in record.by_step(field).items():
            steps[step] = steps.get(step, 0.0) + value
    return steps


def _own_steps(
    records: Sequence[ModuleRecord], field: str, inside: CallsInside
) -> dict[int, float]:
    """What calls leave over of a field of CallRecord, in each step. A module inside may be called
    by others, too.
    """
    steps: dict[int, float] = {}
    for call in (call for record in records for call in record.measured_calls):
        value = getattr(call, field)
        if value is not None:
            inner = sum(getattr(other, field) or 0 for other in inside.get(call.index, ()))
            steps[call.step] = steps.get(call.step, 0.0) + max(0.0, value - inner)
    return steps


def call_values(record: ModuleRecord, quantity: Quantity, field: str) -> dict[str, float]:
    """A field of CallRecord by `address`, or by `address:pass` where a step calls the module more
    than once.
    """
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


def operation_values(
    measurements: Measurements, quantity: Quantity, times: str = "typical"
) -> dict[str, float]:
    """Of each operation that has a label: times of a typical step, of anything else the median."""
    typical = TypicalSteps.of(_logged_steps(measurements))
    if quantity.ratio is not None:
        above, below = (_operation_steps(measurements, name, quantity) for name in quantity.ratio)
        values = {
            label: _rate(own, below.get(label, {}), typical, times) for label, own in above.items()
        }
    elif quantity.operation is not None:
        found = _operation_steps(measurements, quantity.operation, quantity)
        values = {
            label: _of_steps(typical, own, quantity.operation, quantity, times)
            for label, own in found.items()
        }
    else:
        return {}
    return {label: value for label, value in values.items() if value is not None}


def _operation_steps(
    measurements: Measurements, field: str, quantity: Quantity
) -> dict[str, dict[int, float]]:
    """A field of the operations that have a label, in each measured step."""
    steps = {step.number for step in measurements.measured_steps}
    found: dict[str, dict[int, list[float]]] = {}
    for record in measurements.operations:
        value = getattr(record, field)
        if record.label is not None and value is not None and record.step in steps:
            found.setdefault(record.label, {}).setdefault(record.step, []).append(value)
    return {
        label: {step: _together(own, quantity) for step, own in of_steps.items()}
        for label, of_steps in found.items()
    }


def _together(values: list[float], quantity: Quantity) -> float:
    return sum(values) if quantity.is_sum or quantity.ratio is not None else max(values)


def _over_steps(
    record: ModuleRecord, calls: list[CallRecord], field: str, quantity: Quantity
) -> float | None:
    """A field of some calls: those of one step added up, or the largest of them, and then what is
    typical of the steps.
    """
    steps: dict[int, list[float]] = {}
    for call in calls:
        value = getattr(call, field)
        if value is not None:
            steps.setdefault(call.step, []).append(sum(value) if isinstance(value, list) else value)
    values = {step: _together(own, quantity) for step, own in steps.items()}
    return _of_steps(record.typical_steps, values, field, quantity)


def _of_steps(
    typical: TypicalSteps,
    values: dict[int, float],
    field: str,
    quantity: Quantity,
    times: str = "typical",
) -> float | None:
    """What stands for all steps: of times what was asked for, of anything else the median."""
    if quantity.unit != "seconds":
        return median(values.values()) if values else None
    if times == "typical":
        return typical.mean(field, values)
    statistic = typical.statistic(values)
    return None if statistic is None else float(getattr(statistic, times))


def last_operations(measurements: Measurements) -> list[OperationRecord]:
    """The operations of the last measured step that was logged, those that have a label."""
    logged = _logged_steps(measurements)
    last = logged[-1].number if logged else None
    return [
        record
        for record in measurements.operations
        if record.label is not None and record.step == last
    ]


def _logged_steps(measurements: Measurements) -> list[StepRecord]:
    """The measured steps whose operations were recorded."""
    numbers = {record.step for record in measurements.operations}
    return [step for step in measurements.measured_steps if step.number in numbers]
