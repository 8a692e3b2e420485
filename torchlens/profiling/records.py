"""What a profile measured: plain records, built once, when measuring is over.

Units: seconds, bytes, and floating-point operations (a multiply-add is two). None says that something was not measured.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, Protocol

import torch

from torchlens.history.log import source_line

__all__ = [
    "CallRecord",
    "Checker",
    "Measurements",
    "ModuleRecord",
    "OperationRecord",
    "ParameterRecord",
    "Place",
    "Shape",
    "Statistic",
    "StepRecord",
    "TypicalSteps",
]

Shape = tuple[int, ...]


class Statistic(NamedTuple):
    """A quantity over the measured steps: the median, and the width of the middle half (0 for one step)."""

    median: float
    spread: float
    num: int

    @classmethod
    def of(cls, values: list[float]) -> "Statistic | None":
        """Of some values; None of none."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(_quantile(ordered, 0.5), _quantile(ordered, 0.75) - _quantile(ordered, 0.25), len(ordered))


def _quantile(ordered: list[float], share: float) -> float:
    """The value below which a share of the others lie; between two of them, by proportion."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One call of the model and what followed until the next: backward, optimizer, whatever the user does."""

    number: int  # 1 = first
    is_warmup: bool
    forward_seconds: float
    backward_seconds: float | None  # all backward passes through the model; None: there was none
    num_backward_passes: int
    own_seconds: float = 0.0  # what measuring itself took of the forward time, and is not in it
    peak_bytes: int | None  # above what was allocated when the step began
    added_bytes: int | None  # still allocated when the step ended
    raised: str | None = None  # the name of the exception that ended the forward pass


@dataclass(frozen=True, slots=True)
class TypicalSteps:
    """The steps that times are the mean of: the measured ones without the quickest and the slowest quarter.

    They are the same for all modules, so that their times add up.
    """

    forward: frozenset[int] = frozenset()
    backward: frozenset[int] = frozenset()

    @classmethod
    def of(cls, steps: list[StepRecord]) -> "TypicalSteps":
        """Of the measured steps."""
        with_backward = [(step.backward_seconds, step.number) for step in steps if step.backward_seconds is not None]
        return cls(_middle_half([(step.forward_seconds, step.number) for step in steps]), _middle_half(with_backward))

    def mean(self, quantity: str, values: Mapping[int, float]) -> float | None:
        """The mean of a quantity that was measured in some steps; in others it is nothing. None if in no typical one."""
        chosen = self.backward if quantity.startswith("backward") else self.forward
        chosen = chosen or frozenset(values)
        found = [value for step, value in values.items() if step in chosen]
        return sum(found) / len(chosen) if found else None


def _middle_half(steps: list[tuple[float, int]]) -> frozenset[int]:
    num_left_out = (len(steps) + 1) // 4 if len(steps) > 2 else 0
    return frozenset(number for _, number in sorted(steps)[num_left_out : len(steps) - num_left_out])


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One call of one module.

    Times are without what measuring itself takes. Those called `_self_` leave out the modules called inside; the others
    add up: a call takes what it does itself and what the calls inside it take. Peaks are above what was allocated when the
    call began, `added` is what it left behind.
    """

    index: int  # in Measurements.calls
    step: int
    address: str  # '' for the model itself
    pass_num: int  # of this module in this step, 1 = first
    module_type: str
    parent: int | None  # the index of the call around it
    depth: int  # 0 for the model itself
    is_recomputed: bool  # run again inside a backward pass (checkpointing); counts in no total
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
    own_seconds: float = 0.0  # what measuring itself took of the forward time, and is in none of the above
    estimated_seconds: float = 0.0  # how much of that no clock saw: so many things looked at, times what one takes
    flops: int | None  # with the modules inside
    flops_backward: int | None
    saved_bytes: int | None  # activations kept for backward, with the modules inside, without parameters
    peak_bytes: int | None
    added_bytes: int | None
    peak_bytes_backward: int | None
    added_bytes_backward: int | None
    forward_nonfinite: bool | None  # whether an output has NaN or Inf
    grad_in_nonfinite: bool | None
    grad_out_nonfinite: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """One operation of one step. There are such only at operation level."""

    step: int
    entry: int  # its number in the recording of the step
    label: str | None  # its layer label in the log (`Profile.history`); None for what the log leaves out
    call: int  # the index of the innermost module call around it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRecord:
    """A parameter, once, however many modules share it."""

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
    """A module, once, under the first of its addresses. Counts are with all modules inside, `own_` without.

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
    typical_steps: TypicalSteps = TypicalSteps()

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rpartition(".")[2]

    @property
    def measured_calls(self) -> list[CallRecord]:
        """The calls that count: none of a warm-up step (unless there are only such), none that is recomputed."""
        calls = [call for call in self.calls if not call.is_recomputed]
        return [call for call in calls if call.step not in self.warmup_steps] or calls

    @property
    def num_calls(self) -> int:
        """How often it was called in the last of the measured steps that called it."""
        calls = self.measured_calls
        return sum(call.step == calls[-1].step for call in calls) if calls else 0

    def by_step(self, quantity: str) -> dict[int, float]:
        """A quantity of CallRecord in each measured step: the sum over its calls, of peaks the highest."""
        steps: dict[int, list[float]] = {}
        for call in self.measured_calls:
            value = getattr(call, quantity)
            if value is not None:
                steps.setdefault(call.step, []).append(value)
        return {
            step: max(values) if quantity.startswith("peak_") else sum(values) for step, values in steps.items()
        }  # fmt: skip

    def per_step(self, quantity: str) -> list[float]:
        """A quantity of CallRecord for each measured step: the sum over its calls, of peaks the highest."""
        return list(self.by_step(quantity).values())

    def typical(self, quantity: str) -> float | None:
        """The mean of a time over the typical steps, which is what is printed: those of modules inside add up to no more.

        >>> record.typical('forward_seconds')
        """
        return self.typical_steps.mean(quantity, self.by_step(quantity))

    def statistic(self, quantity: str) -> Statistic | None:
        """Median and spread of a quantity of CallRecord over the measured steps; None if it was not measured."""
        return Statistic.of(self.per_step(quantity))

    def walk(self) -> Iterator["ModuleRecord"]:
        """This module and those inside, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that was measured."""

    model_name: str
    level: str  # 'module' or 'operation'
    check: str | None
    root: ModuleRecord
    steps: list[StepRecord]
    calls: list[CallRecord]
    operations: list[OperationRecord]
    parameters: list[ParameterRecord]
    flops_not_counted: dict[str, int]  # layer type → calls in the last step, of operations without a formula
    problems: list[str] = field(default_factory=list)  # what could not be measured, and why

    @property
    def modules(self) -> dict[str, ModuleRecord]:
        """All modules by address, the model itself ('') first, each before its children."""
        return {record.address: record for record in self.root.walk()}

    @property
    def measured_steps(self) -> list[StepRecord]:
        """The steps that are no warm-up; all, if there are no others."""
        return [step for step in self.steps if not step.is_warmup] or self.steps


class Place(NamedTuple):
    """Where a value or gradient came up. At module level `entry` is None and `operation` is the module's class."""

    phase: str  # 'forward' or 'backward'
    step: int
    call: int  # as CallRecord.index; -1 outside all modules
    address: str  # of that module
    pass_num: int
    operation: str  # the layer type ('conv2d'), or in backward the name of autograd's node ('ConvolutionBackward0')
    entry: int | None = None  # as OperationRecord.entry
    parameter: str | None = None  # the address of the parameter that a gradient is for
    code: CodeType | None = None  # where the user's code called the operation
    instruction: int = 0

    @property
    def source(self) -> str | None:
        """The place in the user's code: 'model.py:12 in forward'. None at module level."""
        return None if self.code is None else str(source_line(self.code, self.instruction))


class Inputs(NamedTuple):
    """What an operation, or at module level a module, was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    references: Any = ()  # of an operation: which entries the tensors are, as in Recording


class Checker(Protocol):
    """Looks at values and gradients while they exist.

    Called without gradient recording and unseen by the log. It must change nothing and keep no tensor. NonFiniteError goes
    through to the user and so stops the training; any other exception switches the checker off and becomes a problem.
    """

    def on_boundary(self, place: Place, tensor: torch.Tensor, node: int | None) -> None:
        """An input, buffer or output of a model that is logged; `node` is the entry that an output is."""

    def on_value(self, place: Place, tensor: torch.Tensor, inputs: Inputs) -> None:
        """After an operation (at module level: a module) made `tensor` out of `inputs`."""

    def on_gradient(self, place: Place, gradient: torch.Tensor, inputs: Any) -> None:
        """After the backward of an operation made the gradient of one of its arguments out of `inputs`, a tuple."""

    def on_parameter(self, place: Place, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """When a backward pass gives a parameter its gradient (this pass' own, before it is added to `.grad`)."""

    def finish(self, label_of: Callable[[int, int], str | None]) -> None:
        """Measuring is over. `label_of(step, entry)` tells layer labels."""
