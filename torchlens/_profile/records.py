"""The results of a profile: plain records, built once, when measuring ends.

Units: seconds, bytes, and floating-point operations (a multiply-add is two). None means "not
measured".
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median_low

from torchlens._profile.steps import Kind, Shape, Statistic, StepRecord, TypicalSteps, by_kind

# Quantities that do not add up: the highest of several stands for them all.
_HIGHEST = ("peak_", "output_bytes", "flops_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One call of one module.

    Times with `_self_` in their name leave out the modules called inside; the others include them.
    Peaks are relative to what was allocated when the call began; `added` is what the call left
    allocated.
    """

    index: int  # in Measurements.calls
    step: int
    address: str  # '' for the model itself
    pass_num: int  # of this module in this step, 1 = first
    module_type: str
    parent: int | None  # the index of the call around it
    depth: int  # 0 for the model itself
    is_recomputed: bool  # run again inside a backward pass (checkpointing); counts in no total
    includes_log: bool = False  # whether it ran under the log, whose time is in its forward time
    raised: str | None  # the name of the exception that ended it
    input_shapes: list[Shape]
    output_shapes: list[Shape]
    grad_in_shapes: list[Shape]  # of the inputs that got a gradient
    grad_out_shapes: list[Shape]  # of the outputs that got one
    input_bytes: list[int]
    output_bytes: list[int]
    forward_seconds: float
    forward_self_seconds: float
    backward_seconds: float | None
    backward_self_seconds: float | None
    own_seconds: float = 0.0  # what the profile itself took meanwhile; in none of the times
    start_ns: int = 0  # as they passed, from the beginning of the profile
    end_ns: int = 0
    backward_spans: tuple[tuple[int, int], ...] = ()  # one for each backward pass through it
    flops: int | None  # with the modules inside
    flops_backward: int | None
    saved_bytes: (
        int | None
    )  # activations kept for backward, with the modules inside, without parameters
    peak_bytes: int | None
    added_bytes: int | None
    peak_bytes_backward: int | None
    added_bytes_backward: int | None
    forward_nonfinite: bool | None  # whether an output has NaN or Inf
    grad_in_nonfinite: bool | None
    grad_out_nonfinite: bool | None

    @property
    def total_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + (self.backward_seconds or 0.0)

    @property
    def total_self_seconds(self) -> float:
        """Forward and backward, without the modules called inside."""
        return self.forward_self_seconds + (self.backward_self_seconds or 0.0)

    @property
    def flops_per_second(self) -> float | None:
        """Of the forward pass."""
        return (
            None
            if self.flops is None or not self.forward_seconds
            else self.flops / self.forward_seconds
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One operation of one step; recorded only at operation level.

    It ran under the log, so small operations take longer than in a step without it: compare
    operations with each other, not with modules.
    """

    step: int
    entry: int  # its number in the recording of the step
    label: (
        str | None
    )  # its layer label in the log (`Profile.history`); None for what the log leaves out
    call: int  # the index of the innermost module call around it
    start_ns: int = 0  # as it passed, from the beginning of the profile
    end_ns: int = 0
    address: str  # of that module
    layer_type: str
    shape: Shape
    num_bytes: int
    forward_seconds: float
    backward_seconds: float | None
    flops: int | None
    flops_backward: int | None
    peak_bytes: int | None
    added_bytes: int | None
    includes_log: bool = True

    @property
    def total_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + (self.backward_seconds or 0.0)

    @property
    def flops_per_second(self) -> float | None:
        """Of the forward pass."""
        return (
            None
            if self.flops is None or not self.forward_seconds
            else self.flops / self.forward_seconds
        )


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
    num_gradients: int  # how often a backward pass gave it one


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
        is_own, is_highest = "_self_" in quantity, quantity.startswith(_HIGHEST)
        if not self.calls and not is_own:
            found: dict[int, float] = {}
            for child in self.children:
                for step, value in child.by_step(quantity).items():
                    before = found.get(step, 0.0)
                    found[step] = max(before, value) if is_highest else before + value
        else:
            calls = self.measured_calls if is_own else self.outermost_calls
            found = by_step(calls, quantity, not is_highest)
        unknown = self._not_counted(quantity)
        return {step: value for step, value in found.items() if step not in unknown}

    def _not_counted(self, quantity: str) -> set[int]:
        """The steps in which FLOPs of a call are not known, and so neither is their sum."""
        if not quantity.startswith("flops"):
            return set()
        calls = self.outermost_calls
        unknown = {call.step for call in calls if getattr(call, quantity) is None}
        for child in () if self.calls else self.children:
            unknown |= child._not_counted(quantity)
        return unknown

    def typical(self, quantity: str) -> float | None:
        """The number that tables print: for a time, the mean over the typical steps, so that the
        modules inside add up to no more; for anything else, the median over the steps in which it
        was measured.

        >>> record.typical('forward_seconds')
        """
        if not quantity.endswith("_seconds"):
            statistic = self.statistic(quantity)
            return None if statistic is None else statistic.median
        return self.typical_steps.mean(quantity, self.by_step(quantity))

    def statistic(self, quantity: str) -> Statistic | None:
        """Median and spread of a quantity of CallRecord over the measured steps; None if it was not
        measured.
        """
        values = self.by_step(quantity)
        return (
            self.typical_steps.statistic(values)
            if quantity.endswith("_seconds")
            else Statistic.of([*values.values()])
        )

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
    steps: list[StepRecord]
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
    def measured_steps(self) -> list[StepRecord]:
        """The steps that are not warm-up; all steps if there are no others."""
        return [step for step in self.steps if not step.is_warmup] or self.steps

    def by_kind(self) -> "dict[str, Measurements]":
        """The measurements by kind of step: training or evaluation, with or without gradients, and
        input shapes. Shapes tell kinds apart only while there are few.
        """
        kinds = by_kind(self.measured_steps)
        if len(kinds) == 1:
            return {_kind_name(kind, kinds): self for kind in kinds}
        return {
            _kind_name(kind, kinds): self.of_steps({step.number for step in steps})
            for kind, steps in kinds.items()
        }

    def usual_first(self) -> "list[tuple[str, Measurements]]":
        """The same, the kind with the most steps first; without steps, the whole under no name."""
        kinds = (self.by_kind() if self.steps else {}) or {"": self}
        return sorted(kinds.items(), key=lambda kind: -len(kind[1].measured_steps))

    def of_steps(self, numbers: set[int]) -> "Measurements":
        """The measurements of some of the steps."""
        steps = [step for step in self.steps if step.number in numbers]
        typical = TypicalSteps.of([step for step in steps if not step.is_warmup] or steps)
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
            steps.setdefault(call.step, []).append(sum(value) if isinstance(value, list) else value)
    return {step: sum(values) if is_sum else max(values) for step, values in steps.items()}


def _kind_name(kind: Kind, others: Collection[Kind]) -> str:
    """What tells a kind of steps from the others."""
    phase, has_grad, shapes = kind
    words = [phase]
    if len({other[1] for other in others if other[0] == phase}) > 1:
        words.append("with gradients" if has_grad else "without gradients")
    if sum(other[:2] == kind[:2] for other in others) > 1:
        texts = ["x".join(map(str, shape)) or "scalar" for shape in shapes]
        words.append(f"inputs {', '.join(texts)}")
    return ", ".join(words)


def _of_steps(record: ModuleRecord, numbers: set[int], typical: TypicalSteps) -> ModuleRecord:
    return replace(
        record,
        children=[_of_steps(child, numbers, typical) for child in record.children],
        calls=[call for call in record.calls if call.step in numbers],
        typical_steps=typical,
    )
