"""A step that runs in a capture session: each operation of it is timed, placed and, if asked for, checked."""

from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any, NamedTuple

import torch

from torchlens.capture.backward import next_sequence
from torchlens.capture.recorder import Recorder
from torchlens.capture.session import CaptureOptions, Session
from torchlens.errors import NonFiniteError

__all__ = ["LoggedSession", "Mark"]


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


# Told after each operation: the number of its first row, its results, its arguments.
Look = Callable[["LoggedRecorder", int, Any, Any], None]


class LoggedRecorder(Recorder):
    """Records as ever, and marks each operation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.marks: list[Mark] = []
        self.current_call: Callable[[], int] = lambda: -1
        self.look: Look | None = None
        self.mark_failure: Exception | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        first = len(self.rows)
        sequence, start_ns = next_sequence(), time_ns()
        result = super().__torch_function__(func, types, args, kwargs)
        if len(self.rows) > first and self.collected is None:
            self._try_mark(first, sequence, start_ns, result, (args, kwargs))
        return result

    def _gradfunc_of(self, tensor: torch.Tensor) -> str | None:
        """As in Recorder; but the user frees what comes out of this pass, so the nodes that torch cannot free stay few."""
        if len(self.rows) < _MOST_LOOKED_AT:
            return super()._gradfunc_of(tensor)
        return "Backward" if tensor.requires_grad else None

    def record_opaque(self, name: str, func: Callable[..., Any], run: Callable[[], Any], arguments: Any) -> Any:
        """As in Recorder."""
        first = len(self.rows)
        sequence, start_ns = next_sequence(), time_ns()
        result = super().record_opaque(name, func, run, arguments)
        with torch._C.DisableTorchFunction():
            self._try_mark(first, sequence, start_ns, result, (arguments, None))
        return result

    def _try_mark(self, *what: Any) -> None:
        if self.mark_failure is None:
            try:
                self._mark(*what)
            except NonFiniteError:
                raise
            except Exception as error:  # the model must not notice
                self.mark_failure = error

    def _mark(self, first: int, sequence: int, start_ns: int, result: Any, arguments: Any) -> None:
        end_ns = time_ns()
        last = len(self.rows)
        if self.marks and self.marks[-1].last > first:  # a Python method, whose own operations have been marked
            return
        call = self.current_call()
        self.marks.append(Mark(first, last, call, sequence, next_sequence(), start_ns, end_ns))
        if self.look is not None:
            self.look(self, first, result, arguments)


class LoggedSession(Session):
    """A session that saves nothing but says when and where each operation ran."""

    recorder_type = LoggedRecorder

    def __init__(self, model: torch.nn.Module, current_call: Callable[[], int], look: Look | None) -> None:
        super().__init__(model, CaptureOptions(saves=False))
        self.recorder.current_call = current_call
        self.recorder.look = look

    @property
    def recorder(self) -> LoggedRecorder:
        """The recorder, by its own type."""
        assert isinstance(self._recorder, LoggedRecorder)
        return self._recorder
