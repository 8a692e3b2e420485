"""The hook for features that need more of each recorded call than the log keeps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any

import torch

from torchlens._recording.operations import Operation
from torchlens._recording.recording import References

# Returns the address of the current module and the user code (with its instruction) above the frame
# a number of levels up.
PlaceOf = Callable[[int], tuple[str, CodeType | None, int]]


class CallKind(Enum):
    """How a call was recorded, and so how to repeat it."""

    FUNCTION = "function"  # func(*args, **kwargs)
    OPAQUE = "opaque"  # args is ((args, kwargs, ...),): func(*args, **kwargs)
    AUTOGRAD = "autograd"  # an autograd.Function: func.apply(*args); reported after it ran
    IDENTITY = "identity"  # nothing runs: the tensor is returned unchanged
    # needs other processes; `add` is called again if the result comes later
    COLLECTIVE = "collective"
    READ = "read"  # reads from a tensor; leaves no row
    # changes to parameters by a wrapper like FSDP between operations of the model; leaves no row
    ASIDE = "aside"


@dataclass(slots=True, eq=False)
class ObservedCall:
    """One call, which adds the rows from `first` to `last` (exclusive)."""

    kind: CallKind
    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    references: References  # the entries of the tensor arguments
    written: Sequence[torch.Tensor]  # the tensors it writes to, as far as known
    code: CodeType | None  # the user code that called it
    instruction: int
    first: int
    last: int
    # For an autograd function: the first row of its inner operations.
    inside: int | None = None
    # True if an argument is still being written by a collective not waited for
    is_early: bool = False


class Observer:
    """Receives each call before and after it, and each new tensor. Subclasses override what they
    need.

    torch does not report the calls of an observer. Its exceptions propagate to the model. It does
    not see calls inside an opaque one. It must not refer to the recorder, which refers to it.
    """

    def around(self, place: PlaceOf) -> AbstractContextManager[Any]:
        """The context in which the model runs; `place` may be called during the run."""
        return nullcontext()

    def for_thread(self) -> "Observer":
        """The observer of a thread that the model starts; calls to all observers are serialised."""
        return Observer()

    def pause(self) -> AbstractContextManager[Any]:
        """The context of a part of the run that is not logged."""
        return nullcontext()

    def begin(self, call: ObservedCall) -> None:
        """Called before a call."""

    def end(self, call: ObservedCall, result: Any) -> None:
        """Called after a call, when its rows have been added."""

    def abandon(self, call: ObservedCall) -> None:
        """Called if the call raised or declined (`NotImplemented`)."""

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """Called for each new tensor with its entry number, or -1 - k if it is outside the log."""

    def add_boundary(
        self, number: int, tensor: torch.Tensor, operation: Operation, references: References
    ) -> None:
        """As `add`, for an input, a buffer or an output (which refers to what is returned)."""
        self.add(number, tensor)
