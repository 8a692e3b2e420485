"""A step that runs in a capture session: each operation of it is timed, placed and, if asked for,
checked.
"""

from collections.abc import Callable
from time import perf_counter, time_ns
from typing import Any, NamedTuple, Protocol

import torch

from torchlens._capture.gradients.backward_hooks import next_sequence, node_of, sequence_of
from torchlens._capture.observer import CallKind, ObservedCall, Observer
from torchlens._capture.options import CaptureOptions
from torchlens._capture.own_time import OwnTime
from torchlens._capture.session import Session
from torchlens._recording.operations import Operation
from torchlens._recording.recording import References
from torchlens.errors import NonFiniteError

# torch overflows its stack when it frees a chain of very many nodes that were looked at from Python
# (see Recorder).
_MOST_LOOKED_AT = 10_000


class Mark(NamedTuple):
    """One operation that ran: the rows it left in the recording, when, and the backward nodes it
    made.
    """

    first: int
    last: int
    call: int  # the index of the module call around it
    sequence: int
    sequence_end: int
    start_ns: int
    end_ns: int
    function_nodes: tuple[
        int, ...
    ] = ()  # of custom autograd functions whose result it made; they have other numbers


class Looker(Protocol):
    """Looks at values while they exist."""

    def operation(self, observed: ObservedCall, result: Any) -> None:
        """An operation made `result`."""

    def boundary(
        self, entry: int, operation: Operation, tensor: torch.Tensor, references: References
    ) -> None:
        """An input, a buffer or an output of the model."""


class Marker(Observer):
    """Marks each operation. Its own failure is kept, and the model does not notice."""

    def __init__(
        self, own_time: OwnTime, current_call: Callable[[], int], look: Looker | None
    ) -> None:
        self.own_time: OwnTime = own_time
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
        if (
            call.kind in (CallKind.FUNCTION, CallKind.OPAQUE, CallKind.AUTOGRAD)
            and self.failure is None
        ):
            try:
                self.mark(call, result)
                if call.kind is CallKind.AUTOGRAD and self.marks:
                    nodes = dict.fromkeys(node for node in map(node_of, result) if node is not None)
                    numbers = tuple(sequence_of(node) for node in nodes)
                    self.marks[-1] = self.marks[-1]._replace(
                        function_nodes=(*self.marks[-1].function_nodes, *numbers)
                    )
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
                Mark(
                    call.first,
                    call.last,
                    module_call,
                    self._sequence,
                    next_sequence(),
                    self._start_ns,
                    end_ns,
                )
            )
            if self._look is not None:
                start = perf_counter()
                self._look.operation(call, result)
                self.own_time.look_seconds += perf_counter() - start

    def add_boundary(
        self, number: int, tensor: torch.Tensor, operation: Operation, references: References
    ) -> None:
        """Has what goes in and comes out looked at."""
        if self._look is not None and self.failure is None:
            self._look.boundary(number, operation, tensor, references)


class LoggedSession(Session):
    """A session that saves nothing but says when and where each operation ran."""

    def __init__(self, model: torch.nn.Module, marker: Marker) -> None:
        self.marker = marker
        super().__init__(model, CaptureOptions(saves=False, max_nodes=_MOST_LOOKED_AT), marker)

    def call_model(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Not `model(...)`: its class may have a `__call__` of its own, from inside which this is
        called.
        """
        return self.model._wrapped_call_impl(*args, **kwargs)
