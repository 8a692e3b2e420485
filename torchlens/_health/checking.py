"""What a checker is given with each value and gradient: the place, and the inputs it was computed
from.
"""

from collections.abc import Callable
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple

import torch

from torchlens._recording.user_code import code_of_line, line_of_code, source_line


class Checking(Enum):
    """What is checked in a step."""

    NOTHING = 0
    NONFINITE = 1  # the results of modules and gradients, only for NaN and Inf
    EVERYTHING = 2


class CheckedPlace(NamedTuple):
    """Where a value or gradient was computed. At module level `entry` is None and `operation` is
    the module's class.
    """

    phase: str  # 'forward' or 'backward'
    step: int
    call: int  # as CallRecord.index; -1 outside all modules
    address: str  # of that module
    pass_num: int
    # the layer type ('conv2d'), or in backward the name of autograd's node ('ConvolutionBackward0')
    operation: str
    entry: int | None = None  # as OperationRecord.entry
    parameter: str | None = None  # the address of the parameter that a gradient is for
    code: CodeType | None = None  # where the user's code called the operation
    instruction: int = 0

    @property
    def source(self) -> str | None:
        """The place in the user's code: 'model.py:12 in forward'. None at module level."""
        return None if self.code is None else str(source_line(self.code, self.instruction))

    def __reduce__(self) -> tuple[Any, ...]:
        line = None if self.code is None else line_of_code(self.code, self.instruction)
        return _place, (tuple(self._replace(code=None, instruction=0)), line)


def _place(fields: tuple[Any, ...], line: tuple[str, int, str, str] | None) -> CheckedPlace:
    """Restores a pickled place; code objects cannot be pickled."""
    place = CheckedPlace(*fields)
    return place if line is None else place._replace(code=code_of_line(*line))


class Held(NamedTuple):
    """A parameter or buffer of a module."""

    address: str
    tensor: torch.Tensor
    is_parameter: bool


class Caller(NamedTuple):
    """The module that called another; `held` are the parameters and buffers that it may read
    itself.
    """

    place: CheckedPlace
    held: Callable[[], list[Held]]


def _no_address(tensor: torch.Tensor) -> str | None:
    return None


class GivenInputs(NamedTuple):
    """The arguments of an operation, or at module level of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    references: Any = ()  # of an operation: which entries the tensors are, as in Recording
    first: int | None = None  # of an operation: the entry of the first tensor that it made
    parameter_address: Callable[[torch.Tensor], str | None] = _no_address
    # of a module: the parameters and buffers that it may read
    held: Callable[[], list[Held]] = list
    caller: Caller | None = None  # of a module: None if it was called from outside


class GradientSources(NamedTuple):
    """The gradients and entries that a gradient was computed from."""

    arrived: tuple[Any, ...]  # the gradients that the node was given
    read: Callable[[], list[int]] = list  # the entries that the operation read
    has_inner: bool = False  # whether other nodes ran inside, as with a checkpoint
