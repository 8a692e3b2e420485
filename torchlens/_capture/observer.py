"""The one hook for features that must see more of each recorded call than the log keeps."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import CodeType
from typing import Any

import torch

from torchlens._recording.operations import Operation
from torchlens._recording.recording import References

# Where the run is: the address of the running module, and the user's code (with the instruction)
# that led to the caller, or to the frame so many further out.
PlaceOf = Callable[[int], tuple[str, CodeType | None, int]]


class CallKind(Enum):
    """How a call came to be recorded, and so how it is made again."""

    FUNCTION = "function"  # func(*args, **kwargs)
    OPAQUE = "opaque"  # args is ((args, kwargs, ...),): func(*args, **kwargs)
    AUTOGRAD = "autograd"  # an autograd.Function: func.apply(*args); it is told of when it has run
    IDENTITY = "identity"  # nothing runs: the tensor is handed on
    # needs the other processes; what it makes may be there only later: `add` is told again then
    COLLECTIVE = "collective"
    READ = "read"  # tells something about a tensor; leaves no row
    # what a wrapper like FSDP does to parameters around the model's own operations; leaves no row
    ASIDE = "aside"


@dataclass(slots=True, eq=False)
class ObservedCall:
    """One call. It leaves the rows `first` up to `last` of the recording, none if the two are the
    same.
    """

    kind: CallKind
    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    references: References  # which entries the tensors among the arguments are
    written: Sequence[torch.Tensor]  # what it is going to write to, as far as the log knows
    code: CodeType | None  # where the user's code called it
    instruction: int
    first: int
    last: int
    inside: int | None = (
        None  # of an autograd function, which has run: the first row of what it did inside
    )
    # whether an argument is still being written by a collective that the model has not waited for
    is_early: bool = False


class Observer:
    """Sees each call before and after it, and each tensor that the recorder takes up. Override what
    is wanted.

    torch does not report what an observer itself does. What it raises comes out of the model's
    call. Of the calls inside an opaque one it sees nothing. It must not hold the recorder, which
    holds it.
    """

    def around(self, place: PlaceOf) -> AbstractContextManager[Any]:
        """Stands around the run of the model; `place` may be asked while it runs."""
        return nullcontext()

    def for_thread(self) -> "Observer":
        """Who is to see what a thread does that the model starts; told of one thing at a time, as
        all of them are.
        """
        return Observer()

    def pause(self) -> AbstractContextManager[Any]:
        """Stands around a stretch of the run that is not logged."""
        return nullcontext()

    def begin(self, call: ObservedCall) -> None:
        """A call is going to be made."""

    def end(self, call: ObservedCall, result: Any) -> None:
        """It has been made and has left its rows."""

    def abandon(self, call: ObservedCall) -> None:
        """It raised, or declined (`NotImplemented`)."""

    def add(self, number: int, tensor: torch.Tensor) -> None:
        """`tensor` is entry `number` of the recording; -1 - k for what is outside the log (see
        Recording).
        """

    def add_boundary(
        self, number: int, tensor: torch.Tensor, operation: Operation, references: References
    ) -> None:
        """Likewise, for an entry that no operation made: an input, a buffer or an output (which is
        what it refers to).
        """
        self.add(number, tensor)
