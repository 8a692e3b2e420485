"""A step that runs in a capture session: each operation of it is timed, placed and, if asked for, checked."""

from collections.abc import Callable
from time import time_ns
from typing import Any, NamedTuple

import torch

from torchlens.capture.backward import next_sequence
from torchlens.capture.observer import CallKind, ObservedCall, Observer
from torchlens.capture.session import CaptureOptions, Session
from torchlens.errors import NonFiniteError

__all__ = ["LoggedSession", "Look", "Mark", "Marker"]


# torch overflows its stack when it frees a chain of very many nodes that were looked at from Python (see Recorder).
_MOST_LOOKED_AT = 10_000


class Mark(NamedTuple):
    """One operation that ran: the rows it left in the recording, when, and the backward nodes it made."""

    first: int
    last: int
    call: int  # the index of the module call around it
    sequence: int
    sequence_end: int
    start_ns: int
    end_ns: int


# Told after each operation: the call and its results.
Look = Callable[[ObservedCall, Any], None]


class Marker(Observer):
    """Marks each operation. Its own failure is kept, and the model does not notice."""

    def __init__(self, current_call: Callable[[], int], look: Look | None) -> None:
        self.marks: list[Mark] = []
        self.failure: Exception | None = None
        self._current_call = current_call
        self._look = look
        self._sequence = 0
        self._start_ns = 0

    def begin(self, call: ObservedCall) -> None:
        """Notes when it begins. Calls are not seen inside others."""
        self._sequence, self._start_ns = next_sequence(), time_ns()

    def end(self, call: ObservedCall, result: Any) -> None:
        """Marks it, and has it looked at."""
        if call.kind in (CallKind.FUNCTION, CallKind.OPAQUE) and self.failure is None:
            try:
                self.mark(call, result)
            except NonFiniteError:
                raise
            except Exception as error:  # the model must not notice
                self.failure = error

    def mark(self, call: ObservedCall, result: Any) -> None:
        """Writes down the operation that has just run."""
        end_ns = time_ns()
        if call.last > call.first:
            module_call = self._current_call()
            self.marks.append(
                Mark(call.first, call.last, module_call, self._sequence, next_sequence(), self._start_ns, end_ns)
            )
            if self._look is not None:
                self._look(call, result)


class LoggedSession(Session):
    """A session that saves nothing but says when and where each operation ran."""

    def __init__(self, model: torch.nn.Module, current_call: Callable[[], int], look: Look | None) -> None:
        self.marker = Marker(current_call, look)
        super().__init__(model, CaptureOptions(saves=False, max_nodes=_MOST_LOOKED_AT), self.marker)
