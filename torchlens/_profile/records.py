"""The results of a profile: plain records, built once, when measuring ends.

Units: seconds, bytes, and floating-point operations (a multiply-add is two). None means "not
measured".
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import NamedTuple, TypeAlias

import numpy as np

from torchlens._text.numbers import shape_text

Shape: TypeAlias = tuple[int, ...]
# Whether the model is in training, whether autograd records, the shapes of the inputs.
Signature: TypeAlias = tuple[bool, bool, tuple[Shape, ...]]
Kind: TypeAlias = tuple[str, bool, tuple[Shape, ...]]  # the same, with the name of the phase
OutsideTime: TypeAlias = tuple[str, int, int]  # kind, start and end in nanoseconds

# With more kinds of steps than this, the shapes of inputs are ignored.
MOST_KINDS = 4


class Statistic(NamedTuple):
    """A quantity over the measured steps. `spread` is the width of the middle half (0 for one
    step).
    """

    median: float
    spread: float
    num: int
    minimum: float = 0.0
    p95: float = 0.0  # of twenty steps, one takes longer

    @classmethod
    def of(cls, values: Collection[float]) -> "Statistic | None":
        """The statistic of some values; None if there are none."""
        if not values:
            return None
        least, low, middle, high, p95 = np.quantile([*values], (0, 0.25, 0.5, 0.75, 0.95)).tolist()
        return cls(middle, high - low, len(values), least, p95)


@dataclass(kw_only=True, eq=False)
class ProfiledStep:
    """One call of the model and what followed until the next: backward, optimizer, the user's own
    code.
    """

    number: int  # 1 = first
    is_warmup: bool
    phase: str = "training"  # or 'evaluation': the mode of the model
    has_grad: bool = True  # whether autograd recorded
    input_shapes: tuple[Shape, ...] = ()
    has_flops: bool = False  # at module level, the first step of each kind has
    # whether memory was measured, and whether it ran under the log: both make it slower
    has_memory: bool = False
    has_log: bool = False
    # whether it follows a step under the log, after which Python finds methods more slowly
    is_cold: bool = False
    position: int = 0  # in the loop, counting the steps that a schedule skips; 1 = first
    start_ns: int = 0  # from the beginning of the profile
    end_ns: int = 0  # when the next step began, or the profile ended
    forward_end_ns: int = 0
    outside_spans: tuple[OutsideTime, ...] = ()  # 'backward', 'optimizer', 'data' or 'skip'
    forward_seconds: float = 0.0
    backward_seconds: float | None = (
        None  # all backward passes through the model; None: there was none
    )
    num_backward_passes: int = 0
    own_seconds: float = 0.0  # in and around the forward pass, and in none of the times
    peak_bytes: int | None = None  # above what was allocated when the step began
    added_bytes: int | None = None  # still allocated when the step ended
    raised: str | None = None  # the name of the exception that ended the forward pass

    @property
    def is_light(self) -> bool:
        """Whether only times were measured. Times come from light steps."""
        return not (self.has_memory or self.has_log)

    @property
    def disturbance(self) -> tuple[bool, bool, bool]:
        """A key that sorts steps by how much measuring slowed them down."""
        return self.has_log, self.has_memory, self.is_cold

    @property
    def kind(self) -> Kind:
        """Phase, whether autograd recorded, and the shapes of the inputs."""
        return self.phase, self.has_grad, self.input_shapes

    @property
    def wall_seconds(self) -> float:
        """From the call of the model to the next one, without `own_seconds`."""
        return max(0.0, (self.end_ns - self.start_ns) / 1e9 - self.own_seconds)

    @property
    def loss_seconds(self) -> float | None:
        """From the end of the forward pass to the first backward pass, without data and optimizers:
        usually the loss. None without a backward pass.
        """
        return self._outside("loss")

    @property
    def backward_call_seconds(self) -> float | None:
        """Calls of `backward`, including the nodes of the loss; None without any."""
        return self._outside("backward")

    @property
    def optimizer_seconds(self) -> float | None:
        """Steps of optimizers; None without any. A closure that runs the model counts as the
        model.
        """
        return self._outside("optimizer")

    @property
    def data_seconds(self) -> float | None:
        """Waiting for a `DataLoader`; None without any."""
        return self._outside("data")

    @property
    def other_seconds(self) -> float:
        """The rest of the step."""
        found = _innermost_ns(self)
        known = (found.total() - found["skip"]) / 1e9
        return max(0.0, self.wall_seconds - self.forward_seconds - known)

    def _outside(self, kind: str) -> float | None:
        found = _innermost_ns(self)
        return found[kind] / 1e9 if kind in found else None


def _innermost_ns(step: ProfiledStep) -> Counter[str]:
    """The time of each kind of span after the forward pass, without that of the spans inside it.

    Spans nest: an optimizer steps in a backward pass, or runs a closure that does everything; the
    next batch is fetched before the backward pass.
    """
    since = step.forward_end_ns
    spans = [(kind, max(start, since), max(end, since)) for kind, start, end in step.outside_spans]
    starts = [start for kind, start, _ in spans if kind == "backward"]
    loss = [("loss", since, min(starts))] if starts else []
    found: Counter[str] = Counter()
    around: list[tuple[str, int]] = []  # kind and end
    for kind, start, end in sorted([*spans, *loss], key=lambda span: (span[1], -span[2])):
        while around and around[-1][1] <= start:
            around.pop()
        if around:
            found[around[-1][0]] -= min(end, around[-1][1]) - start
        found[kind] += end - start
        around.append((kind, end))
    return found


def by_kind(steps: Sequence[ProfiledStep]) -> dict[Kind, list[ProfiledStep]]:
    """Groups steps by kind. With many kinds, input shapes are ignored."""
    has_few = len({step.kind for step in steps}) <= MOST_KINDS
    found: dict[Kind, list[ProfiledStep]] = {}
    for step in steps:
        shapes = step.input_shapes if has_few else ()
        found.setdefault((step.phase, step.has_grad, shapes), []).append(step)
    return found


@dataclass(frozen=True, slots=True)
class TypicalSteps:
    """The steps whose mean times are reported: the timed ones without the fastest and the slowest
    quarter.

    They are the same for all modules, for forward, backward and everything outside the model, so
    that times add up. The timed steps of each kind are those that measuring slowed down least:
    light steps that do not follow a logged one, if there are any.
    """

    forward: frozenset[int] = frozenset()
    backward: frozenset[int] = frozenset()  # those of them that have a backward pass
    timed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, steps: Sequence[ProfiledStep]) -> "TypicalSteps":
        """Of the measured steps."""
        timed = []
        for alike in by_kind(steps).values():
            least = min(step.disturbance for step in alike)
            timed += [step for step in alike if step.disturbance == least]
        backward, others = [], []
        for step in timed:
            if step.backward_seconds is None:
                others.append((step.forward_seconds, step.number))
            else:
                backward.append((step.forward_seconds + step.backward_seconds, step.number))
        chosen = _middle_half(backward)
        return cls(chosen | _middle_half(others), chosen, frozenset(step.number for step in timed))

    def statistic(self, quantity: str, values: Mapping[int, float]) -> Statistic | None:
        """Of a quantity by step: of a time, over the timed steps."""
        is_time = quantity.endswith("_seconds")
        timed = [value for step, value in values.items() if is_time and step in self.timed]
        return Statistic.of(timed or values.values())

    def number(
        self, quantity: str, values: Mapping[int, float], times: str = "typical"
    ) -> float | None:
        """One number for all steps: of a time, the mean over the typical steps or another
        statistic; of anything else, the median.
        """
        is_time = quantity.endswith("_seconds")
        if is_time and times == "typical":
            return self.mean(quantity, values)
        statistic = self.statistic(quantity, values)
        return None if statistic is None else getattr(statistic, times if is_time else "median")

    def mean(self, quantity: str, values: Mapping[int, float]) -> float | None:
        """The mean of a time by step over the typical steps; a step that is not in `values` counts
        as 0. None if no typical step has it.
        """
        chosen = self.backward if quantity.startswith("backward") else self.forward
        chosen = chosen or frozenset(values)
        found = [value for step, value in values.items() if step in chosen]
        return sum(found) / len(chosen) if found else None


def _middle_half(steps: list[tuple[float, int]]) -> frozenset[int]:
    num_left_out = (len(steps) + 1) // 4 if len(steps) > 2 else 0
    kept = sorted(steps)[num_left_out : len(steps) - num_left_out]
    return frozenset(number for _, number in kept)


# Quantities that do not add up: of several calls, the highest counts.
_HIGHEST = ("peak_", "output_bytes", "flops_per_second")


class _Costs:
    """The quantities of calls and operations that follow from others."""

    forward_seconds: float
    backward_seconds: float | None
    flops: int | None

    @property
    def total_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + (self.backward_seconds or 0.0)

    @property
    def flops_per_second(self) -> float | None:
        """The FLOPs of the forward pass divided by its time."""
        if self.flops is None or not self.forward_seconds:
            return None
        return self.flops / self.forward_seconds


@dataclass(kw_only=True, eq=False)
class CallRecord(_Costs):
    """One call of one module.

    Times with `_self_` in their name leave out the modules called inside; the others include them.
    Peaks are relative to what was allocated when the call began; `added` is what the call left
    allocated.
    """

    index: int  # in Measurements.calls
    step: int
    address: str  # '' for the model itself
    pass_num: int = 1  # of this module in this step, 1 = first
    module_type: str
    parent: int | None = None  # the index of the call around it
    depth: int = 0  # 0 for the model itself
    # run again inside a backward pass (checkpointing); counts in no total
    is_recomputed: bool = False
    includes_log: bool = False  # whether it ran under the log, whose time is in its forward time
    raised: str | None = None  # the name of the exception that ended it
    input_shapes: Sequence[Shape] = ()
    output_shapes: Sequence[Shape] = ()
    grad_in_shapes: Sequence[Shape] = ()  # of the inputs that got a gradient
    grad_out_shapes: Sequence[Shape] = ()  # of the outputs that got one
    input_bytes: Sequence[int] = ()
    output_bytes: Sequence[int] = ()
    forward_seconds: float = 0.0
    forward_self_seconds: float = 0.0
    backward_seconds: float | None = None
    backward_self_seconds: float | None = None
    own_seconds: float = 0.0  # overhead of the profile meanwhile; in none of the times
    start_ns: int = 0  # wall-clock times, from the beginning of the profile
    end_ns: int = 0
    backward_spans: tuple[tuple[int, int], ...] = ()  # one for each backward pass through it
    flops: int | None = None  # with the modules inside
    flops_backward: int | None = None
    # activations kept for backward, with the modules inside, without parameters; measured in
    # detailed steps
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    added_bytes: int | None = None
    peak_bytes_backward: int | None = None
    added_bytes_backward: int | None = None
    forward_nonfinite: bool | None = None  # whether an output has NaN or Inf
    grad_in_nonfinite: bool | None = None
    grad_out_nonfinite: bool | None = None

    @property
    def total_self_seconds(self) -> float:
        """Forward and backward, without the modules called inside."""
        return self.forward_self_seconds + (self.backward_self_seconds or 0.0)


@dataclass(kw_only=True, eq=False)
class OperationRecord(_Costs):
    """One operation of one step; recorded only at operation level.

    It ran under the log, so small operations take longer than in a step without it: compare
    operations with each other, not with modules.
    """

    step: int
    entry: int  # its number in the recording of the step
    # its layer label in the log (`Profile.history`); None for what the log leaves out
    label: str | None = None
    call: int  # the index of the innermost module call around it
    start_ns: int = 0  # wall-clock times, from the beginning of the profile
    end_ns: int = 0
    address: str = ""  # of that module
    layer_type: str = ""
    shape: Shape = ()
    num_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float | None = None
    flops: int | None = None
    flops_backward: int | None = None
    peak_bytes: int | None = None
    added_bytes: int | None = None
    includes_log: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """A parameter; one record, however many modules share it."""

    address: str
    aliases: list[str]  # the other names it goes by
    module: str  # the address of the module that owns it, the first of several
    shape: Shape
    num_elements: int
    num_bytes: int
    is_learnable: bool
    gradient_bytes: int  # of its gradient at the end of the steps; 0: it has none
    num_gradients: int  # the number of gradients that backward passes gave it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord:
    """A module, under the first of its addresses. Counts include all modules inside; those with
    `own_` do not.

    >>> record.typical('forward_seconds')
    >>> record.statistic('forward_seconds').median
    """

    address: str
    aliases: list[str]
    module_type: str
    depth: int
    num_parameters: int
    num_learnable: int
    param_bytes: int
    gradient_bytes: int
    own_num_parameters: int
    own_num_learnable: int
    own_param_bytes: int
    own_gradient_bytes: int
    children: list["ModuleRecord"]
    calls: list[CallRecord]  # of all steps, also warm-up and recomputed ones
    warmup_steps: frozenset[int] = frozenset()
    typical_steps: TypicalSteps = field(default_factory=TypicalSteps)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rpartition(".")[2]

    @property
    def measured_calls(self) -> list[CallRecord]:
        """The calls that count: not those of warm-up steps (unless there are no others), and not
        recomputed ones.
        """
        calls = [call for call in self.calls if not call.is_recomputed]
        return [call for call in calls if call.step not in self.warmup_steps] or calls

    @property
    def num_calls(self) -> int:
        """How often it was called in a step: the median over the measured steps that called it."""
        counts = Counter(call.step for call in self.measured_calls)
        return median_low(counts.values()) if counts else 0

    @property
    def outermost_calls(self) -> list[CallRecord]:
        """The measured calls that are not inside another of them, as those of a module that calls
        itself are.
        """
        found: list[CallRecord] = []
        for call in self.measured_calls:
            last = found[-1] if found else None
            if (
                last is None
                or call.step != last.step
                or call.depth <= last.depth
                or call.start_ns >= last.end_ns
            ):
                found.append(call)
        return found

    def by_step(self, quantity: str) -> dict[int, float]:
        """A field of CallRecord in each measured step: the sum over its calls or, for peaks and
        outputs, the maximum.

        A module that is never called itself but holds others (`ModuleList`) has the sum of theirs,
        and nothing of its own. If a module calls itself, only the outermost calls count.
        """
        found, unknown = self._summed(quantity)
        return {step: value for step, value in found.items() if step not in unknown}

    def _summed(self, quantity: str) -> tuple[dict[int, float], set[int]]:
        """The values by step, and the steps in which FLOPs of a call are not known: neither is
        their sum.
        """
        is_own, is_highest = "_self_" in quantity, quantity.startswith(_HIGHEST)
        if self.calls or is_own:
            calls = self.measured_calls if is_own else self.outermost_calls
            is_flops = quantity.startswith("flops")
            unknown = {call.step for call in calls if is_flops and getattr(call, quantity) is None}
            return by_step(calls, quantity, not is_highest), unknown
        found: dict[int, float] = {}
        unknown = set()
        for child in self.children:
            values, missing = child._summed(quantity)
            unknown |= missing
            for step, value in values.items():
                before = found.get(step, 0.0)
                found[step] = max(before, value) if is_highest else before + value
        return found, unknown

    def typical(self, quantity: str) -> float | None:
        """The number in tables: of a time, the mean over the typical steps, so that the modules
        inside add up to no more than the module; of anything else, the median over the steps in
        which it was measured.

        >>> record.typical('forward_seconds')
        """
        return self.typical_steps.number(quantity, self.by_step(quantity))

    def statistic(self, quantity: str) -> Statistic | None:
        """Median and spread of a quantity of CallRecord over the measured steps; None if it was not
        measured.
        """
        return self.typical_steps.statistic(quantity, self.by_step(quantity))

    def walk(self) -> Iterator["ModuleRecord"]:
        """This module and those inside, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was measured."""

    model_name: str
    level: str  # 'module' or 'operation'
    check: str | None
    root: ModuleRecord
    steps: list[ProfiledStep]
    calls: list[CallRecord]
    operations: list[OperationRecord]
    parameters: list[ParameterRecord]
    flops_not_counted: dict[
        str, int
    ]  # layer type → calls in the last step, of operations without a formula
    problems: list[str] = field(default_factory=list)  # what could not be measured, and why

    @property
    def modules(self) -> dict[str, ModuleRecord]:
        """All modules by address, the model itself ('') first, each before its children."""
        return {record.address: record for record in self.root.walk()}

    @property
    def measured_steps(self) -> list[ProfiledStep]:
        """The steps that are not warm-up; all steps if there are no others."""
        return [step for step in self.steps if not step.is_warmup] or self.steps

    def by_kind(self) -> "dict[str, Measurements]":
        """The measurements by kind of step: training or evaluation, with or without gradients, and
        (unless there are many) input shapes. Without steps, the whole under no name.
        """
        kinds = by_kind(self.measured_steps)
        if len(kinds) < 2:
            return {next((_kind_name(kind, kinds) for kind in kinds), ""): self}
        return {_kind_name(kind, kinds): self._of_steps(steps) for kind, steps in kinds.items()}

    def usual_first(self) -> "list[tuple[str, Measurements]]":
        """The same, the kind with the most steps first."""
        return sorted(self.by_kind().items(), key=lambda kind: -len(kind[1].measured_steps))

    def _of_steps(self, steps: list[ProfiledStep]) -> "Measurements":
        """The measurements of some of the steps."""
        numbers, typical = {step.number for step in steps}, TypicalSteps.of(steps)
        return replace(
            self,
            root=_of_steps(self.root, numbers, typical),
            steps=steps,
            calls=[call for call in self.calls if call.step in numbers],
            operations=[operation for operation in self.operations if operation.step in numbers],
        )


def by_step(calls: Iterable[CallRecord], field: str, is_sum: bool) -> dict[int, float]:
    """A field of some calls in each step: added up, or the largest."""
    steps: dict[int, list[float]] = {}
    for call in calls:
        value = getattr(call, field)
        if value is not None:
            steps.setdefault(call.step, []).append(
                sum(value) if isinstance(value, Sequence) else value
            )
    return {step: sum(values) if is_sum else max(values) for step, values in steps.items()}


def kind_words(kind: Kind) -> tuple[str, str, str]:
    """Each part of a kind of steps in words."""
    phase, has_grad, shapes = kind
    inputs = f"inputs {', '.join(map(shape_text, shapes))}" if shapes else "no inputs"
    return phase, f"with{'' if has_grad else 'out'} gradients", inputs


def _kind_name(kind: Kind, others: Collection[Kind]) -> str:
    """A name that distinguishes a kind of steps from the others."""
    words = kind_words(kind)
    has_other_grad = any(other[0] == kind[0] and other[1] != kind[1] for other in others)
    has_other_inputs = any(other[:2] == kind[:2] and other != kind for other in others)
    shown = [words[0], *[words[1]] * has_other_grad, *[words[2]] * has_other_inputs]
    return ", ".join(shown)


def _of_steps(record: ModuleRecord, numbers: set[int], typical: TypicalSteps) -> ModuleRecord:
    return replace(
        record,
        children=[_of_steps(child, numbers, typical) for child in record.children],
        calls=[call for call in record.calls if call.step in numbers],
        typical_steps=typical,
    )
