"""What one call leaves behind: the hot path.

torch tells a `TorchFunctionMode` of every call that would run an operation, whichever name it was
called by, and only in the thread that entered the mode. While the recorder handles a call the mode
is off, so what happens inside the call is part of it. The handler is dull on purpose: look up which
entries the arguments are, call, append one row. Everything else waits for `graph/`.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode

from torchlens._capture.arguments import (
    PLAIN_KEYWORD_TYPES,
    PLAIN_TYPES,
    TENSORS,
    are_plain,
    describe_arguments,
    shallow_arguments,
    written_by,
)
from torchlens._capture.gradients.entry_gradients import GradientHooks
from torchlens._capture.memory.saved_values import Memory, is_sole_owner
from torchlens._capture.observer import CallKind, ObservedCall, Observer
from torchlens._capture.patches.mode_stack import run_overridden, without_mode
from torchlens._capture.rows import Rows
from torchlens._recording.operations import KNOWN_OPERATIONS, Kind, Operation, operation_of
from torchlens._recording.recording import Failure, References, make_call
from torchlens._recording.trees import plain_tensors
from torchlens._recording.user_code import KNOWN_CODE

Tensor = torch.Tensor
_OPERATION, _READ = Kind.OPERATION, Kind.READ
_known_operation = KNOWN_OPERATIONS.get
_known_code = KNOWN_CODE.get
_stack_depth, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_is_disabled = torch._C._is_torch_function_all_disabled
_UNKNOWN = 1 << 62  # no entry has this number
_SEVERAL, _ONLY_TENSORS = (tuple, list), frozenset({Tensor})
_ASIDE: dict[int, None] = {}  # stands in `collected` for: not even that


class Look(Protocol):
    """Looks from time to time at what a running log has saved so far."""

    interval: float

    def look(self, outside: Sequence[torch.Tensor]) -> float:
        """Looks, and returns the time of the next look. `outside` are tensors that live anyway."""


class Failures:
    """Keeps the place of the exception that ends a pass; those that the model handles itself are no
    failure.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._error: BaseException | None = None

    def note(
        self,
        error: BaseException,
        module_call: int,
        place: tuple[CodeType | None, int],
        operation: Operation | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        references: References = (),
    ) -> None:
        """Takes down a place that `error` came through; of its way out, the innermost, which is
        told first, stays.
        """
        if not self._is_of(error):
            self._error = error
            arguments = describe_arguments(args, kwargs)
            message = f"{type(error).__name__}: {error}"
            self.failure = Failure(message, module_call, *place, operation, arguments, references)

    def settle(self, error: BaseException | None) -> None:
        """The pass ended with `error`, or without one."""
        if not self._is_of(error):
            self.failure = None
        self._error = None

    def _is_of(self, error: BaseException | None) -> bool:
        """Whether the failure noted is of this exception, or of one that it was raised from."""
        while error is not None:
            if error is self._error:
                return True
            error = error.__cause__ or error.__context__
        return False


class Recorder(Rows, TorchFunctionMode):
    """Records the calls made while it is the current mode. The arguments are those of `Rows`."""

    def __init__(
        self,
        memory: Memory,
        saves: bool | frozenset[int],
        keeps_args: bool,
        gradients: GradientHooks | None,
        observer: Observer | None = None,
        max_nodes: int | None = None,
    ) -> None:
        super().__init__(memory, saves, keeps_args, gradients, observer, max_nodes)
        self.booleans: dict[int, bool] = {}
        # Entries whose value the model took out of torch, other than for an `if`.
        self.reads: set[int] = set()
        self.failures = Failures()
        self.warnings: list[str] = []
        # Set by a patched operator for the one call that follows.
        self.operator: Operation | None = None
        # True while a Python method of Tensor is being entered whose own operations are to be
        # recorded.
        self.is_inlining = False
        # Records calls of `Kind.COLLECTIVE`, and which of them nobody has waited for yet: see
        # `collectives.py`.
        self.on_collective: Callable[..., Any] | None = None
        self.unfinished: list[Any] = []
        # When to look next at how much is saved, and who does.
        self._look_at = math.inf
        self._look: Callable[[Sequence[Tensor]], float] = lambda outside: math.inf

    # -- calls that make tensors
    # -----------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = _known_operation(func) or operation_of(func)
        if self.collected is not None or operation.kind is not _OPERATION:
            # `x.shape` and its like are as frequent as operations in some models.
            if operation.kind is _READ and self.collected is None and self.observer is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self.pass_through(operation, func, args, kwargs)
        if self.operator is not None:
            operation, self.operator = self.operator, None
        # All that can be done before the call is: after it, the caches hold the operation's data
        # and not ours.
        frame = sys._getframe(1)
        code: CodeType | None = frame.f_code
        instruction = frame.f_lasti
        known = _known_code(id(code))
        if known is None or not known[0]:
            code, instruction = self.user_code(frame)
        is_short = self._is_short
        shallow = None
        if (not PLAIN_TYPES.issuperset(map(type, args)) and not are_plain(args)) or (
            kwargs and not PLAIN_KEYWORD_TYPES.issuperset(map(type, kwargs.values()))
        ):
            if is_short and (shallow := shallow_arguments(args, kwargs)) is not None:
                references: References = {
                    path: self._reference_to(tensor) for path, tensor in shallow.tensors.items()
                }
            else:
                if types and not all(issubclass(kind, Tensor) for kind in types):
                    return run_overridden(self, func, types, args, kwargs)
                references = self.references_to(args, kwargs)
                is_short = False
        elif self.memory.may_die:
            at, origin_of = self._entry_at, self._origin_of
            references = tuple([
                None if type(arg) not in TENSORS
                else number if (number := at(id(arg),
                _UNKNOWN)) < 0 or ((origin := origin_of(number)) and origin() is arg)
                else self._reference_to(arg)
                for arg in args
            ])  # fmt: skip
        else:
            references = tuple(
                [
                    self._entry_at(id(arg), _UNKNOWN) if type(arg) in TENSORS else None
                    for arg in args
                ]
            )
            if _UNKNOWN in references:
                references = tuple(
                    [self._reference_to(arg) if type(arg) in TENSORS else None for arg in args]
                )
        written: Sequence[Tensor] = ()
        if operation.written or (kwargs and "out" in kwargs):
            written = written_by(operation, args, kwargs)
            if written:
                is_short = (
                    is_short
                    and operation.is_inplace
                    and len(written) == 1
                    and self._keep_before(written[0])
                )
        observed = (
            None
            if is_short
            else self.prepare(
                CallKind.FUNCTION, operation, args, kwargs, references, written, (code, instruction)
            )
        )
        if shallow is not None:
            kept, kept_kwargs = shallow.args, shallow.kwargs
        else:
            kept, kept_kwargs = args, kwargs
            if is_short and None in references:
                kept = tuple([None if type(arg) in TENSORS else arg for arg in args])
            elif is_short:  # there are nothing but tensors
                kept = (None,) * len(args)
        start = perf_counter()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            self.fail(error, operation, args, kwargs, references, sys._getframe(1), observed)
            raise
        end = perf_counter()
        seconds = end - start
        if is_short and type(result) is Tensor and (not written or result is written[0]):
            if not self.saves_all:
                call = (
                    operation,
                    kept,
                    kept_kwargs,
                    references,
                    self.module_call,
                    code,
                    instruction,
                    seconds,
                )
                self.append_unsaved(call, result, None, bool(written))
                return result
            # What `append` does, as far as it cannot wait: `complete` does the rest.
            entry = len(self.rows)
            before = self._entry_of_id.setdefault(id(result), entry)
            if before != entry:
                self._entry_of_id[id(result)] = entry
                if not written:
                    self._hand_back(result, entry, before)
            try:
                version = result._version
            except RuntimeError:  # as in `version_of`
                version = -1
            self.rows.append(
                (
                    operation,
                    kept,
                    kept_kwargs,
                    references,
                    self.module_call,
                    code,
                    instruction,
                    seconds,
                    None,
                )
            )
            self.memory.values.append(result)
            self.memory.versions.append(version)
        elif (
            is_short
            and not written
            and isinstance(result, _SEVERAL)
            and _ONLY_TENSORS.issuperset(map(type, result))
        ):
            call = (
                operation,
                kept,
                kept_kwargs,
                references,
                self.module_call,
                code,
                instruction,
                seconds,
            )
            self.append_several(call, result)
        elif result is not NotImplemented:
            call = make_call(
                (operation, args, kwargs, references, self.module_call, code, instruction, seconds)
            )
            self.append_results(call, result, written)
            if observed is not None:
                self.end_observed(observed, result)
        elif observed is not None and self.observer is not None:
            self.observer.abandon(observed)
        if end > self._look_at:
            self._look_at = self._look(self.outside)
        return result

    def _keep_before(self, target: Tensor) -> bool:
        """Replaces the saved value of a tensor that is going to be written by a copy, if nothing
        else looks at its memory.

        False if more may have to be done than that.
        """
        entry = self.number_of(target)
        if (
            entry is None
            or entry < 0
            or id(target) in self._twins
            or type(target) is not Tensor
            or target.requires_grad
        ):
            return False
        if self.unfinished:
            return False
        memory = self.memory
        if not self.saves_all:
            return not self._saves and memory.may_overwrite(entry, target)
        if memory.values[entry] is not target or not is_sole_owner(target):
            return False
        before = target.clone()
        if type(before) is not Tensor:  # a fake one, of a tensor that has values
            return False
        memory.replace(entry, before)
        return True

    def prepare(
        self,
        kind: CallKind,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        references: References,
        written: Sequence[Tensor],
        place: tuple[CodeType | None, int],
    ) -> ObservedCall | None:
        """What must be done before a call that does not go the short way."""
        observed = self.begin_observed(kind, operation, args, kwargs, references, written, place)
        self.complete()
        if self._keeps_args:
            self._kept_args = self._keep_args(args, kwargs)
        if written:
            self._before_write(written)
        if self.gradients is not None:
            self.watch_arguments(args, kwargs)
        return observed

    def _before_write(self, targets: Sequence[Tensor]) -> None:
        if self.unfinished:  # who writes there now has waited for what was being written
            for target in targets:
                self.finish_entries(self.memory.writers_of(target))
        self.memory.before_write(targets)

    # -- calls that leave no row
    # -----------------------------------------------------------------------------------

    def pass_through(
        self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Makes a call that is no operation, or is not to be recorded, and notes what it reads."""
        if self.collected is not None:
            if self.collected is not _ASIDE:
                for _, tensor in plain_tensors((args, kwargs)):
                    entry = self.entry_of(tensor)
                    if entry is not None:
                        self.collected[entry] = None
            return func(*args, **(kwargs or {}))
        if operation.kind is Kind.COLLECTIVE and self.on_collective is not None:
            return self.on_collective(self, operation, func, args, kwargs)
        if operation.kind is Kind.INLINE:
            self.is_inlining = True
            torch._C._push_on_torch_function_stack(self)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.is_inlining = False
                torch._C._pop_torch_function_stack()
        observed = self.begin_observed(CallKind.READ, operation, args, kwargs, (), (), (None, 0))
        if operation.kind is Kind.EXPOSURE:
            self.complete()
            self._is_short = False
            self._before_write(args[:1])
            self.memory.expose(args[0])
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException:
            if observed is not None and self.observer is not None:
                self.observer.abandon(observed)
            raise
        self.end_observed(observed, result)
        if operation.kind is Kind.LEAF and args[0].is_leaf:
            self._note_leaf(args[0])
        if operation.kind is Kind.BOOLEAN:
            read = self.entry_of(args[0])
            if read is not None and read >= 0:
                self.booleans[read] = result
        elif operation.kind in (Kind.VALUE, Kind.EXPOSURE):
            entries = [self.entry_of(tensor) for _, tensor in plain_tensors(args)]
            self.reads.update(entry for entry in entries if entry is not None and entry >= 0)
        return result

    def _note_leaf(self, tensor: torch.Tensor) -> None:
        """The model's code has said whether it wants gradients of a leaf."""
        number = self.entry_of(tensor)
        if number is None:
            return
        noted = self.leaves if number >= 0 else self.trained
        if tensor.requires_grad:
            noted.add(number)
        elif number < 0:
            noted.discard(number)

    # -- the observer
    # ----------------------------------------------------------------------------------------------

    def begin_observed(
        self,
        kind: CallKind,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        references: References,
        written: Sequence[Tensor],
        place: tuple[CodeType | None, int],
        inside: int | None = None,
    ) -> ObservedCall | None:
        """Tells the observer, if there is one, of a call that is going to be made; `inside` as in
        ObservedCall.
        """
        if self.observer is None:
            return None
        first = len(self.rows)
        is_early = bool(self.unfinished) and self._is_early(references)
        call = ObservedCall(
            kind,
            operation,
            args,
            kwargs,
            references,
            written,
            *place,
            first,
            first,
            inside,
            is_early,
        )
        self.observer.begin(call)
        return call

    def _is_early(self, references: References) -> bool:
        """Whether something that is read is still being written."""
        for begun in [begun for begun in self.unfinished if begun.is_awaited()]:
            self.unfinished.remove(begun)
            self.finish_entries(begun.entries)
        given = references.values() if isinstance(references, dict) else references
        return not self.memory.unfinished.keys().isdisjoint(given)

    def end_observed(self, call: ObservedCall | None, result: Any) -> None:
        """Tells the observer that the call was made."""
        if call is not None and self.observer is not None:
            call.last = len(self.rows)
            self.observer.end(call, result)

    # -- failures
    # ----------------------------------------------------------------------------------------------

    def fail(
        self,
        error: BaseException,
        operation: Operation | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        references: References,
        frame: FrameType | None,
        observed: ObservedCall | None = None,
    ) -> None:
        """Notes that the model raised here."""
        if observed is not None and self.observer is not None:
            self.observer.abandon(observed)
        self.failures.note(
            error, self.module_call, self.user_code(frame), operation, args, kwargs, references
        )

    # -- on and off
    # ----------------------------------------------------------------------------------------------

    def is_on(self) -> bool:
        """Whether calls are being reported; inside one that is, they are not, nor are those inside
        an opaque one.
        """
        depth = _stack_depth()
        if not depth or self.collected is not None or _is_disabled():
            return False
        return _mode_at(depth - 1) is self or any(
            _mode_at(level) is self for level in range(depth - 1)
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While it lasts, calls leave no trace."""
        before, self.collected = self.collected, _ASIDE
        try:
            yield
        finally:
            self.collected = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Logs nothing for a while."""
        with torch._C.DisableTorchFunction():
            self.complete()
        with without_mode(self), nullcontext() if self.observer is None else self.observer.pause():
            yield

    def watch_memory(self, watch: Look) -> None:
        """Has `watch` look from time to time at how much is saved."""
        self._look = watch.look
        self._look_at = perf_counter() + watch.interval

    def expect_values_to_leave(self, stops_saving: bool = False) -> None:
        """Writes down what is only to be seen of saved values; from now on, at once, and perhaps
        without saving them.
        """
        with torch._C.DisableTorchFunction():
            self.complete()
        self._is_short = False
        if stops_saving:
            self._saves = self.saves_all = False

    def share(self) -> None:
        """From now on, several threads write down here."""
        with torch._C.DisableTorchFunction():
            self.complete()
        self._is_short = False
        if self.gradients is not None:
            self.gradients.admit_threads()

    def for_thread(self, code: CodeType, started_by: FrameType | None) -> Self:
        """What a thread records with that `code` runs and that is started now: shares all that is
        written down.
        """
        own = copy.copy(self)
        own.operator = own.collected = own._kept_args = None
        own.is_inlining = False
        own.thread_code, own.thread_place = code, self.user_code(started_by)
        own.observer = None if self.observer is None else self.observer.for_thread()
        return own
