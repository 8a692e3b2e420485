"""Which steps run in a capture session, and what such a session tells of the step.

Steps that are timed do not (see `details`). Of the others, at operation level each does. At module
level the first step of each kind does (training or not, with gradients or not, inputs of some
shapes) that is no warm-up, for the FLOPs: what a later one does may depend on anything, so its
FLOPs are not known. A part of the model that is called by itself is treated so at either level.
"""

from collections.abc import Hashable
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.current import CURRENT
from torchlens._history.log import Log
from torchlens._profile.measuring.calls import Step
from torchlens._profile.measuring.ledger import Ledger
from torchlens._profile.measuring.logged_session import LoggedSession, Looker, Mark, Marker
from torchlens._profile.measuring.operations import Operation
from torchlens._recording.collector import pause_collector, resume_collector
from torchlens._recording.recording import Recording
from torchlens.errors import NonFiniteError

NO_RESULT: Any = object()
_FAILED = "There is no log, and no FLOPs"
_THREADS = (
    "The model computes in threads of its own, which the profile does not see: times, kept memory "
    "and calls lack what they do, and FLOPs are not counted"
)


class LoggedStep(NamedTuple):
    """What is known of a step that was logged: which operations it did, and the marks of each."""

    kind: int
    marks: list[Mark]
    is_whole: bool  # False: a part of it ran in other threads, and there are no marks of that


class LoggedSteps:
    """The capture sessions of a profile. `look` sees each operation and its result, at operation
    level.
    """

    def __init__(self, ledger: Ledger, look: Looker | None) -> None:
        self.steps: dict[int, LoggedStep] = {}
        self.parts: dict[
            int, LoggedStep
        ] = {}  # index of a call from outside of a part of the model → its operations
        self.by_kind: list[Log] = []  # one for all steps that did the same
        self.last: Recording | None = None
        self._kinds: dict[Hashable, int] = {}
        self._ledger = ledger
        self._look = look
        self._is_off = False
        self._is_operation_level = ledger.options.level == "operation"
        self._is_running = False
        self._result = NO_RESULT
        self._signatures: set[Hashable] = set()
        self._signature: Hashable = None  # of the call from outside that is running

    # -- running
    # ----------------------------------------------------------------------------------------------

    def wants(self, step: Step, module: torch.nn.Module, shapes: Hashable) -> bool:
        """Whether a call from outside, with inputs of these shapes, is to run in a session."""
        if self._is_off:
            return False
        ledger, problems = self._ledger, self._ledger.problems
        address = ledger.modules.modules[id(module)].address
        is_in_depth = self._is_operation_level and module is ledger.model
        self._signature = address, module.training, torch.is_grad_enabled(), shapes
        if self._is_operation_level and not is_in_depth:
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
            problems.add(
                "The model, or a part of it, is compiled: at operation level its source is run "
                "instead"
                if is_in_depth
                else "The model, or a part of it, is compiled: the profile does not see inside, "
                "and FLOPs are not counted"
            )
            return is_in_depth and step.wants_log
        # Of a warm-up step nothing is summed up.
        is_new = self._signature not in self._signatures
        return step.wants_log and (is_in_depth or (is_new and not step.is_warmup))

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model in a session. NO_RESULT if that cannot be had: nothing has been run then
        that counts.
        """
        ledger, step, num_calls = self._ledger, self._ledger.steps[-1], len(self._ledger.calls)
        begin_ns = time_ns()
        session: LoggedSession | None = None
        self._is_running, self._result, step.has_log = True, NO_RESULT, True
        step.is_logged = is_in_depth = self._is_operation_level and module is ledger.model
        try:
            look = self._look if is_in_depth else None
            session = LoggedSession(module, Marker(ledger.own_time, self._current_call, look))
            pause_collector(
                self
            )  # it would run more often than it does without a log, at the cost of the model
            result = session.run(list(args), dict(kwargs))
        except BaseException as error:
            result = self._result
            is_begun = len(ledger.calls) > num_calls
            has_raised = is_begun and result is NO_RESULT and not _is_own_failure(session, error)
            if has_raised or isinstance(
                error, NonFiniteError
            ):  # which is raised for what goes in, too
                if session is not None:
                    self._keep(step, session, num_calls)
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
            finally:  # once more, for an interrupt may cut the first short
                resume_collector(self)
        self._keep(step, session, num_calls)
        if len(ledger.calls) > num_calls:  # not if measuring ended meanwhile
            call = ledger.calls[num_calls]
            end_ns = step.forward_end_ns = time_ns()
            ledger.own_spans += [(begin_ns, call.start_ns), (call.end_ns, end_ns)]
            step.around_ns += call.start_ns - begin_ns + end_ns - call.end_ns
        return result

    def keep_result(self, result: Any) -> None:
        """The model returned: whatever fails from now on, this is what it returned."""
        if self._is_running:
            self._result = result

    def _current_call(self) -> int:
        return -1 if self._ledger.current is None else self._ledger.current.index

    def _give_up(self, error: Exception) -> None:
        self._is_off = True
        self._ledger.problems.add_failure(error, _FAILED)

    # -- what was learnt
    # -------------------------------------------------------------------------------------------

    def _keep(self, step: Step, session: LoggedSession, first_call: int) -> None:
        try:
            if session.marker.failure is not None:
                raise session.marker.failure
            recording = session.recording
            marks = session.marker.marks
            kind = self._kinds.setdefault(_what_was_done(recording), len(self.by_kind))
            is_whole = session.model is self._ledger.model
            logged = LoggedStep(kind, marks, not recording.branches)
            if recording.branches:
                self._ledger.problems.add(_THREADS)
            if is_whole:
                self.steps[step.number] = logged
            else:
                self.parts[first_call] = logged
            if kind == len(self.by_kind):
                self.by_kind.append(Log(recording))
            if recording.failure is None:  # else the next of its kind is to be counted
                self._signatures.add(self._signature)
            if self._is_operation_level and is_whole:
                self.last = recording
                step.operations = [Operation(step, mark, recording) for mark in marks]
                self._ledger.add_operations(step.operations)
        except Exception as error:
            self._give_up(error)

    def forget_all(self) -> None:
        """Takes back everything that was learnt."""
        self.steps, self.parts, self.by_kind, self.last = {}, {}, [], None


def _what_was_done(recording: Recording) -> Hashable:
    """All that labels and FLOPs depend on, so that steps that did the same share them."""
    rows = [
        (
            row.operation.layer_type,
            row.module_call,
            row.shape,
            row.gradfunc,
            *map(_frozen, (row.references, row.args, row.kwargs)),
        )
        for row in recording.rows
    ]
    shapes = [
        None if is_lazy(parameter) else tuple(parameter.shape) for parameter in recording.params
    ]
    wants_gradients = frozenset(recording.leaves), frozenset(recording.trained or ())
    return tuple(rows), tuple(recording.param_addresses), tuple(shapes), wants_gradients


def _frozen(value: Any) -> Hashable:
    """Something that is equal for equal arguments and can be a key."""
    if isinstance(value, list | tuple):
        return type(value), tuple([_frozen(item) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _frozen(item)) for key, item in value.items()])
    if value is None or isinstance(
        value, str | int | float | complex | slice | torch.dtype | torch.device
    ):
        return (
            str(value) if isinstance(value, slice | float | complex) else value
        )  # NaN is not equal to itself
    return type(value).__qualname__


def _is_own_failure(session: LoggedSession | None, error: BaseException) -> bool:
    """Whether the log raised, not the model. What the model raises was noted with the operation, or
    lies outside.

    A compiler that starts in the middle of a log and runs into it complains for itself.
    """
    if isinstance(error, NonFiniteError) or not isinstance(error, Exception) or session is None:
        return False
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    raiser = "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))
    failure = session.failure
    is_noted = failure is not None and failure.operation is not None
    return raiser.startswith("torch._dynamo") or (raiser.startswith("torchlens.") and not is_noted)
