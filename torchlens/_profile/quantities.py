"""What a profile measures: one table of all quantities, read by the printed table, pandas, JSON,
comparisons and overlays, and how each is found in the records.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torchlens._history.overlay import Overlay
from torchlens._profile.records import (
    CallRecord,
    Measurements,
    ModuleRecord,
    OperationRecord,
    ProfiledStep,
    TypicalSteps,
    by_step,
)
from torchlens._text.error_wording import did_you_mean, got, one_of
from torchlens._text.measures import Measure, short_word
from torchlens._text.numbers import bytes_text, count_text, seconds_text

# The names of QUANTITIES, and the shorter words for some of them.
QuantityName: TypeAlias = (
    Measure
    | Literal[
        "forward_self_time", "backward_self_time", "total_self_time", "flops_per_second",
        "param_bytes", "gradient_bytes",
        "saved_bytes", "peak_bytes", "added_bytes", "peak_bytes_backward", "added_bytes_backward",
    ]
)  # fmt: skip
_UNIT_TEXTS: dict[str, Callable[[float], str]] = {"seconds": seconds_text, "bytes": bytes_text}
_ByStep: TypeAlias = dict[int, float]
_CallsInside: TypeAlias = dict[int, list[CallRecord]]  # by the index of the call around them


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One quantity. Empty fields: records of that kind do not have it."""

    title: str
    heading: str = ""  # of its column in the printed table
    unit: str  # 'seconds', 'bytes', 'FLOPs' or '' for a count
    json: str = ""  # its name in JSON
    call: str = ""  # the field of CallRecord
    own_call: str = ""  # the same without the modules inside
    operation: str = ""  # the field of OperationRecord
    module: str = ""  # the field of ModuleRecord
    own_module: str = ""  # the same without the modules inside
    is_sum: bool = True  # whether several add up to one
    parts: tuple[str, str] | None = None  # the quantities that it is the sum of
    ratio: tuple[str, str] | None = None  # the quantities that it is the ratio of

    @property
    def column(self) -> str:
        """Its column in the pandas table of modules."""
        return self.call or self.module

    def text(self, value: float) -> str:
        """The number as it is printed."""
        return _UNIT_TEXTS.get(self.unit, count_text)(value)


def _time(name: str, title: str, heading: str, parts: tuple[str, str] | None = None) -> Quantity:
    """`name` is 'forward', 'forward_self', ..."""
    phase = name.removesuffix("_self")
    suffix = "_self" if name != phase else ""
    return Quantity(
        title=title,
        heading=heading,
        unit="seconds",
        json="" if parts else f"{phase}_latency{suffix}",
        call=f"{name}_seconds",
        own_call=f"{phase}_self_seconds",
        operation=f"{phase}_seconds",
        parts=parts,
    )


QUANTITIES: dict[str, Quantity] = {
    "forward_time": _time("forward", "forward time", "forward"),
    "forward_self_time": _time("forward_self", "own forward time", "own fwd"),
    "backward_time": _time("backward", "backward time", "backward"),
    "backward_self_time": _time("backward_self", "own backward time", "own bwd"),
    "total_time": _time(
        "total", "forward + backward time", "total", ("forward_time", "backward_time")
    ),
    "total_self_time": _time(
        "total_self",
        "own time, forward + backward",
        "own time",
        ("forward_self_time", "backward_self_time"),
    ),
    "flops": Quantity(
        title="FLOPs", heading="FLOPs", unit="FLOPs", json="flops", call="flops", operation="flops"
    ),
    "flops_per_second": Quantity(
        title="FLOP/s",
        heading="FLOP/s",
        unit="FLOPs",
        call="flops_per_second",
        operation="flops_per_second",
        is_sum=False,
        ratio=("flops", "forward_time"),
    ),
    "flops_backward": Quantity(
        title="backward FLOPs",
        unit="FLOPs",
        json="flops_backward",
        call="flops_backward",
        operation="flops_backward",
    ),
    "parameters": Quantity(
        title="parameters",
        heading="params",
        unit="",
        json="num_parameters",
        module="num_parameters",
        own_module="own_num_parameters",
    ),
    "param_bytes": Quantity(
        title="parameter memory",
        unit="bytes",
        json="param_memory_usage",
        module="param_bytes",
        own_module="own_param_bytes",
    ),
    "gradient_bytes": Quantity(
        title="gradient memory",
        unit="bytes",
        json="gradient_memory_usage",
        module="gradient_bytes",
        own_module="own_gradient_bytes",
    ),
    "output_bytes": Quantity(
        title="output memory",
        heading="size",
        unit="bytes",
        call="output_bytes",
        operation="num_bytes",
        is_sum=False,
    ),
    "saved_bytes": Quantity(
        title="memory kept for backward",
        heading="kept",
        unit="bytes",
        json="saved_memory",
        call="saved_bytes",
    ),
    "peak_bytes": Quantity(
        title="peak memory",
        heading="peak fwd",
        unit="bytes",
        json="peak_memory_fwd",
        call="peak_bytes",
        operation="peak_bytes",
        is_sum=False,
    ),
    "added_bytes": Quantity(
        title="memory added",
        unit="bytes",
        json="effective_additional_memory_fwd",
        call="added_bytes",
        operation="added_bytes",
    ),
    "peak_bytes_backward": Quantity(
        title="backward peak memory",
        heading="peak bwd",
        unit="bytes",
        json="peak_memory_bwd",
        call="peak_bytes_backward",
        is_sum=False,
    ),
    "added_bytes_backward": Quantity(
        title="memory added in backward",
        unit="bytes",
        json="effective_additional_memory_bwd",
        call="added_bytes_backward",
    ),
    "calls": Quantity(
        title="calls",
        heading="calls",
        unit="",
        json="num_calls",
        module="num_calls",
        own_module="num_calls",
    ),
}
# The shorter words, which also sort a history and colour a diagram.
_SHORT = {short_word(name): name for name in QUANTITIES if short_word(name) != name}


def full_name(name: object) -> str:
    """`forward_time` for `time`."""
    return _SHORT.get(str(name), str(name))


def checked_quantity(name: object, option: str) -> Quantity:
    """The quantity of that name, or an error that lists them."""
    if isinstance(name, str) and full_name(name) in QUANTITIES:
        return QUANTITIES[full_name(name)]
    words = [*QUANTITIES, *_SHORT]
    raise ValueError(
        f"{option} must be {one_of(words)}, got {got(name)}. {did_you_mean(name, words)}".rstrip()
    )


# -- of modules


def module_value(record: ModuleRecord, quantity: Quantity, times: str = "typical") -> float | None:
    """The value of a module in a step: the typical time, or the median of anything else; None if it
    was not measured.

    `times` selects another statistic of the times: 'minimum', 'median' or 'p95'.
    """
    if quantity.module:
        return float(getattr(record, quantity.module))
    if quantity.ratio or (quantity.parts and times == "typical"):
        return _composed(quantity, lambda part: module_value(record, part, times))
    return record.typical_steps.number(quantity.call, record.by_step(quantity.call), times)


def own_value(
    records: Sequence[ModuleRecord],
    quantity: Quantity,
    inside: _CallsInside,
    times: str = "typical",
) -> float | None:
    """The sum over some modules, each without the modules inside; for peaks and outputs, which do
    not add up, the largest value.
    """
    if quantity.own_module:
        return float(sum(getattr(record, quantity.own_module) for record in records))
    if quantity.ratio or (quantity.parts and times == "typical"):
        return _composed(quantity, lambda part: own_value(records, part, inside, times))
    if not quantity.is_sum:
        return max(_known(module_value(record, quantity) for record in records), default=None)
    own = _own_by_step(records, quantity.own_call or quantity.call, inside)
    return records[0].typical_steps.number(quantity.call, own, times)


def _composed(quantity: Quantity, value_of: Callable[[Quantity], float | None]) -> float | None:
    """The sum or the ratio of two quantities."""
    names = quantity.ratio or quantity.parts or ()
    first, second = (value_of(QUANTITIES[name]) for name in names)
    if quantity.ratio:
        return first / second if first and second else None
    return None if first is None else first + (second or 0.0)


def calls_inside(measurements: Measurements) -> _CallsInside:
    """The calls that each call made."""
    found: _CallsInside = {}
    for call in measurements.calls:
        if call.parent is not None and not call.is_recomputed:
            found.setdefault(call.parent, []).append(call)
    return found


def _own_by_step(records: Iterable[ModuleRecord], field: str, inside: _CallsInside) -> _ByStep:
    """In each step, a field of CallRecord without that of the calls inside. (Fields with `_self_`
    in their name are measured so.)
    """
    steps: _ByStep = {}
    for call in (call for record in records for call in record.measured_calls):
        value = getattr(call, field)
        if value is not None:
            calls = () if "_self_" in field else inside.get(call.index, ())
            inner = sum(getattr(other, field) or 0 for other in calls)
            steps[call.step] = steps.get(call.step, 0.0) + max(0.0, value - inner)
    return steps


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# -- of operations


def operation_values(
    measurements: Measurements, quantity: Quantity, times: str = "typical"
) -> dict[str, float]:
    """By label, the value of each operation: the typical time in logged steps, or the median of
    anything else.
    """
    if quantity.ratio is not None:
        return _ratios(*(operation_values(measurements, QUANTITIES[name], times)
                         for name in quantity.ratio))  # fmt: skip
    typical = TypicalSteps.of(_logged_steps(measurements))
    together = sum if quantity.is_sum else max
    by_label = _by_label(measurements, quantity.operation, together) if quantity.operation else {}
    values = {label: typical.number(quantity.call, own, times) for label, own in by_label.items()}
    return {label: value for label, value in values.items() if value is not None}


def _ratios(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {key: value / second[key] for key, value in first.items() if value and second.get(key)}


def _by_label(
    measurements: Measurements, field: str, together: Callable[[list[float]], float]
) -> dict[str, _ByStep]:
    """A field of the operations that have a label, in each measured step."""
    steps = {step.number for step in measurements.measured_steps}
    found: dict[str, dict[int, list[float]]] = {}
    for record in measurements.operations:
        value = getattr(record, field)
        if record.label is not None and value is not None and record.step in steps:
            found.setdefault(record.label, {}).setdefault(record.step, []).append(value)
    return {label: {s: together(v) for s, v in own.items()} for label, own in found.items()}


def last_operations(measurements: Measurements) -> list[OperationRecord]:
    """The operations of the last measured step that was logged, without those that have no
    label.
    """
    logged = _logged_steps(measurements)
    last = logged[-1].number if logged else None
    operations = measurements.operations
    return [record for record in operations if record.label is not None and record.step == last]


def _logged_steps(measurements: Measurements) -> list[ProfiledStep]:
    numbers = {record.step for record in measurements.operations}
    return [step for step in measurements.measured_steps if step.number in numbers]


# -- overlays


def overlay(measurements: Measurements, name: QuantityName) -> Overlay:
    """A number for each module and, at operation level, each layer, for `vis_color_by=` and
    `explore(overlays=)`.

    Of several kinds of steps, it takes the one with the most steps for which there are values.

    >>> history.render_graph(vis_color_by=profile.overlay('forward_time'))
    """
    quantity = checked_quantity(name, "The quantity of an overlay")
    found = [_overlay(alike, quantity) for _, alike in measurements.usual_first()]
    known = [each for each in found if each]
    if not known:
        raise ValueError(f"This profile has no {quantity.title}. {_reason(measurements, quantity)}")
    return next((each for each in known if any(each.values())), known[0])


def _overlay(measurements: Measurements, quantity: Quantity) -> Overlay:
    values: dict[str, float] = {}
    own: dict[str, float] = {}
    for record in measurements.root.walk():
        values |= _values(record, quantity, quantity.call)
        own |= _own_values(record, quantity)
    values |= operation_values(measurements, quantity)
    return Overlay(
        values, title=quantity.title, unit=quantity.unit, is_sum=quantity.is_sum, own=own
    )


def _values(record: ModuleRecord, quantity: Quantity, field: str) -> dict[str, float]:
    """By `address`, or by `address:pass` if a step calls the module more than once."""
    if quantity.ratio:
        parts = [QUANTITIES[name] for name in quantity.ratio]
        return _ratios(*(_values(record, part, part.call) for part in parts))
    if not field:
        value = module_value(record, quantity)
        return {} if value is None else {record.address: value}
    by_pass: dict[int, list[CallRecord]] = {}
    for call in record.measured_calls:
        by_pass.setdefault(call.pass_num, []).append(call)
    found: dict[str, float] = {}
    for number, calls in by_pass.items():
        steps = by_step(calls, field, quantity.is_sum)
        value = record.typical_steps.number(quantity.call, steps)
        if value is not None:
            found[record.address if len(by_pass) == 1 else f"{record.address}:{number}"] = value
    return found


def _own_values(record: ModuleRecord, quantity: Quantity) -> dict[str, float]:
    """By address, the value without the modules inside: as measured, or the difference."""
    if quantity.own_call or not record.children:
        return _values(record, quantity, quantity.own_call or quantity.call)
    value = module_value(record, quantity)
    if value is None or not quantity.is_sum or record.num_calls != 1:
        return {}
    inside = sum(_known(module_value(child, quantity) for child in record.children))
    return {record.address: max(0.0, value - inside)}


def _reason(measurements: Measurements, quantity: Quantity) -> str:
    if not measurements.steps:
        return "The model was not called while it was measured."
    has_backward = any(step.backward_seconds is not None for step in measurements.steps)
    if "backward" in quantity.title and not has_backward:
        return "No backward pass ran while it was measured."
    problems = " ".join(measurements.problems)
    return problems or "It was not measured: see the options of torchlens.profile."
