"""Runs the model in a capture session in some steps, and notes each operation.

At operation level, each detailed step runs in a session. At module level the first step of each
kind does (training or not, with gradients or not, input shapes), for its FLOPs. FLOPs of later
steps are not known, because what a step does may depend on anything. A part of the model that the
user's code calls by itself is treated so at either level.
"""

from collections.abc import Callable, Hashable
from time import perf_counter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.current import CURRENT
from torchlens._capture.gradients.backward_hooks import next_sequence, node_of, sequence_of
from torchlens._capture.observer import CallKind, ObservedCall, Observer
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session
from torchlens._graph.build import hashable
from torchlens._profile.checks import Checks
from torchlens._profile.ledger import Ledger, LoggedRun, MeasuredOperation, MeasuredStep
from torchlens._recording.garbage_collector import pause_collector, resume_collector
from torchlens._recording.operations import Operation
from torchlens._recording.recording import Recording, References
from torchlens.errors import NonFiniteError

NO_RESULT: Any = object()
# torch overflows its stack when it frees a chain of very many nodes that Python has seen.
_MOST_WATCHED_NODES = 10_000
_MARKED = (CallKind.FUNCTION, CallKind.OPAQUE, CallKind.AUTOGRAD)
_THREADS = (
    "The model computes in threads of its own, which the profile does not see: times, kept memory "
    "and calls lack what they do, and FLOPs are not counted"
)


class Marker(Observer):
    """Notes each operation of a session. If this fails, the model continues, and `failure` has the
    reason.
    """

    def __init__(self, step: int, current_call: Callable[[], int], checks: Checks | None) -> None:
        self.operations: list[MeasuredOperation] = []
        self.failure: Exception | None = None
        self._step, self._current_call = step, current_call
        self._checks = checks
        self._sequence = 0
        self._start = 0.0

    def begin(self, call: ObservedCall) -> None:
        """Notes when the operation begins. Calls inside others are not reported."""
        self._sequence, self._start = next_sequence(), perf_counter()

    def end(self, call: ObservedCall, result: Any) -> None:
        """Notes the operation, and has its result checked."""
        if call.kind in _MARKED and self.failure is None:
            try:
                self.mark(call, result)
            except NonFiniteError:
                raise
            except Exception as error:  # the model must not see it
                self.failure = error

    def mark(self, call: ObservedCall, result: Any) -> None:
        """Notes the operation that has just run."""
        end = perf_counter()
        if call.last > call.first:
            self.operations.append(
                MeasuredOperation(
                    step=self._step,
                    entry=call.first,
                    last=call.last,
                    call=self._current_call(),
                    sequence=self._sequence,
                    sequence_end=next_sequence(),
                    start=self._start,
                    end=end,
                )
            )
            if self._checks is not None:
                self._checks.operation(call, result)
        if call.kind is CallKind.AUTOGRAD and self.operations:
            nodes = dict.fromkeys(node for node in map(node_of, result) if node is not None)
            self.operations[-1].function_nodes += tuple(map(sequence_of, nodes))

    def add_boundary(
        self, number: int, tensor: torch.Tensor, operation: Operation, references: References
    ) -> None:
        """Has an input, a buffer or an output checked."""
        if self._checks is not None and self.failure is None:
            self._checks.boundary(number, operation, tensor, references)


class LoggedSession(Session):
    """A session that saves no values."""

    def __init__(self, model: torch.nn.Module, marker: Marker) -> None:
        self.marker = marker
        options = CaptureOptions(saves=False, max_nodes=_MOST_WATCHED_NODES)
        super().__init__(model, options, marker)

    def call_model(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Not `model(...)`: this may already run inside a `__call__` of the model's class."""
        return self.model._wrapped_call_impl(*args, **kwargs)


class LoggedSteps:
    """The capture sessions of a profile; `checks` get each value at operation level."""

    def __init__(self, ledger: Ledger, checks: Checks | None) -> None:
        self.last: Recording | None = None  # of the whole model, at operation level
        self._recordings: dict[Hashable, Recording] = {}  # one for all runs that did the same
        self._ledger = ledger
        self._checks = checks
        self._is_off = False
        self._is_running = False
        self._result = NO_RESULT
        self._signatures: set[Hashable] = set()
        self._signature: Hashable = None  # of the call from outside that is running

    # -- running

    def wants(self, step: MeasuredStep, module: torch.nn.Module, shapes: Hashable) -> bool:
        """Whether a call from outside, with inputs of these shapes, is to run in a session."""
        if self._is_off:
            return False
        ledger, problems = self._ledger, self._ledger.problems
        address = ledger.modules.modules[id(module)].address
        is_in_depth = self._is_in_depth(module)
        self._signature = address, module.training, torch.is_grad_enabled(), shapes
        if ledger.options.is_operation_level and not is_in_depth:
            problems.add(
                f"{address!r} was called by itself, not by the model: it was measured at module "
                "level"
            )
        if CURRENT.tracker is not None:
            problems.add(
                f"Step {step.number} ran inside a log: it was measured at module level, without "
                "FLOPs"
            )
            return False
        if ledger.modules.is_compiled:
            outcome = (
                "at operation level its source is run instead"
                if is_in_depth
                else "the profile does not see inside, and FLOPs are not counted"
            )
            problems.add(f"The model, or a part of it, is compiled: {outcome}")
        return step.wants_log and (is_in_depth or self._counts_flops(step))

    def _counts_flops(self, step: MeasuredStep) -> bool:
        """Whether a step that is not measured in depth is logged for its FLOPs: the first of each
        kind is.
        """
        is_new = self._signature not in self._signatures and not step.is_warmup
        return is_new and not self._ledger.modules.is_compiled

    def _is_in_depth(self, module: torch.nn.Module) -> bool:
        """Whether the operations of a call of this module become records."""
        return self._ledger.options.is_operation_level and module is self._ledger.model

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module in a session. Returns NO_RESULT if that fails before the module has
        returned; the call is then to be made without a session.
        """
        ledger, step, num_calls = self._ledger, self._ledger.steps[-1], len(self._ledger.calls)
        begin = perf_counter()
        session: LoggedSession | None = None
        self._is_running, self._result, step.has_log = True, NO_RESULT, True
        step.is_logged = is_in_depth = self._is_in_depth(module)
        try:
            checks = self._checks if is_in_depth else None
            session = LoggedSession(module, Marker(step.number, self._current_call, checks))
            pause_collector(self)  # it would run more often than without a log
            result = session.run(list(args), dict(kwargs))
        except BaseException as error:
            result = self._result
            if self._is_from_model(session, error, num_calls):
                if session is not None:
                    self._keep(session, num_calls)
                raise
            if not isinstance(error, Exception):
                raise
            self._give_up(error)
            step.is_logged = False
            if result is NO_RESULT:
                ledger.forget_since(num_calls)
            return result
        finally:
            self._is_running, self._result = False, NO_RESULT
            try:
                resume_collector(self)
            finally:  # again, because an interrupt may have cut the first short
                resume_collector(self)
        self._keep(session, num_calls)
        if len(ledger.calls) > num_calls:  # not if measuring ended meanwhile
            call = ledger.calls[num_calls]
            end = step.forward_end = perf_counter()
            ledger.own_spans += [(begin, call.start), (call.end, end)]
            step.around_seconds += call.start - begin + end - call.end
        return result

    def keep_result(self, result: Any) -> None:
        """Keeps what the model returned, which is the result even if the session fails
        afterwards.
        """
        if self._is_running:
            self._result = result

    def _current_call(self) -> int:
        return -1 if self._ledger.current is None else self._ledger.current.index

    def _is_from_model(
        self, session: LoggedSession | None, error: BaseException, num_calls: int
    ) -> bool:
        """Whether an exception is the model's own (or stops it), not a failure of the session."""
        if isinstance(error, NonFiniteError):  # also raised before the first call, for inputs
            return True
        is_begun = len(self._ledger.calls) > num_calls
        return is_begun and self._result is NO_RESULT and not _is_own_failure(session, error)

    def _give_up(self, error: Exception) -> None:
        self._is_off = True
        self._ledger.problems.add_failure(error, "There is no log, and no FLOPs")

    # -- results

    def _keep(self, session: LoggedSession, first_call: int) -> None:
        """Attaches what was logged to the call."""
        ledger = self._ledger
        try:
            if session.marker.failure is not None:
                raise session.marker.failure
            recording, operations = session.recording, session.marker.operations
            shared = recording
            if recording.branches:
                ledger.problems.add(_THREADS)
            if recording.failure is None:  # else the next of its kind is to be counted
                self._signatures.add(self._signature)
            if self._is_in_depth(session.model):
                shared = self._recordings.setdefault(_what_was_done(recording), recording)
                self.last = recording
                for operation in operations:
                    operation.describe(recording)
                ledger.add_operations(operations)
            if len(ledger.calls) > first_call:
                is_whole = not recording.branches
                ledger.calls[first_call].run = LoggedRun(shared, operations, is_whole)
        except Exception as error:
            self._give_up(error)


def _what_was_done(recording: Recording) -> Hashable:
    """A key of everything that labels and FLOPs depend on: runs with equal keys share them."""
    rows = [
        (
            row.operation.layer_type,
            row.module_call,
            row.shape,
            row.gradfunc,
            *map(hashable, (row.references, row.args, row.kwargs)),
        )
        for row in recording.rows
    ]
    shapes = [
        None if is_lazy(parameter) else tuple(parameter.shape) for parameter in recording.params
    ]
    wants_gradients = frozenset(recording.leaves), frozenset(recording.trained or ())
    return tuple(rows), tuple(recording.param_addresses), tuple(shapes), wants_gradients


def _is_own_failure(session: LoggedSession | None, error: BaseException) -> bool:
    """Whether the log raised the error, not the model. An error of the model was noted with its
    operation, or comes from a file outside this package.

    A compiler that starts inside a log and cannot handle it raises an error of its own.
    """
    if not isinstance(error, Exception) or session is None:
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    raiser = "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))
    failure = session.failure
    is_noted = failure is not None and failure.operation is not None
    return raiser.startswith("torch._dynamo") or (raiser.startswith("torchlens.") and not is_noted)
