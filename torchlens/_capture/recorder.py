"""Records one row per call: the hot path.

torch passes a `TorchFunctionMode` every call that may run an operation, under any name, in the
thread that entered the mode. The mode is off while the recorder handles a call, so nested calls are
part of it. The handler does little: it looks up the entries of the arguments, makes the call and
appends a row. Everything else is left to `_graph/`.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Protocol, Self

import torch
from torch.overrides import TorchFunctionMode

from torchlens._capture.entries import (
    PLAIN_KEYWORD_TYPES,
    PLAIN_TYPES,
    TENSORS,
    UNKNOWN,
    describe_arguments,
    without_flat_tensors,
    written_by,
)
from torchlens._capture.gradients.entry_gradients import GradientHooks
from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.observer import CallKind, ObservedCall, Observer
from torchlens._capture.patches.mode_stack import push_mode, run_overridden, without_mode
from torchlens._capture.rows import Rows
from torchlens._capture.selection import Selection
from torchlens._recording.operations import KNOWN_OPERATIONS, Kind, Operation
from torchlens._recording.recording import Failure, References, make_call
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction
from torchlens._recording.user_code import KNOWN_CODE

Tensor = torch.Tensor
_OPERATION, _READ = Kind.OPERATION, Kind.READ
_known_code = KNOWN_CODE.get
_stack_depth, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_is_disabled = torch._C._is_torch_function_all_disabled
# Sentinel for `collected`: neither record nor collect.
_IGNORED: dict[int, None] = {}

# Reads by which values leave torch, for NumPy or another library.
_HANDING_OUT = frozenset({"__array__", "__dlpack__", "numpy"})


class Look(Protocol):
    """Checks periodically how much a running log has saved."""

    interval: float

    def look(self, outside: Iterable[torch.Tensor]) -> float:
        """Runs the check; returns the time of the next. `outside` are tensors that live anyway."""


class Failures:
    """Keeps the place of the exception that ends a pass; exceptions that the model handles do not
    count.
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
        """Records a place that `error` passed through; only the first, innermost place is kept."""
        if not self._is_of(error):
            self._error = error
            arguments = describe_arguments(args, kwargs)
            message = f"{type(error).__name__}: {error}"
            self.failure = Failure(message, module_call, *place, operation, arguments, references)

    def settle(self, error: BaseException | None) -> None:
        """Ends the pass, with `error` or without one."""
        if not self._is_of(error):
            self.failure = None
        self._error = None

    def _is_of(self, error: BaseException | None) -> bool:
        """True if the recorded failure belongs to this exception, or to its cause or context."""
        while error is not None:
            if error is self._error:
                return True
            error = error.__cause__ or error.__context__
        return False


# State of a call off the fast path: the tensors it writes, the observed call, and whether its row
# may still be short.
_Detour = tuple[Sequence[Tensor], ObservedCall | None, bool]
_NO_DETOUR: _Detour = ((), None, True)


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
        selection: Selection | None = None,
    ) -> None:
        super().__init__(memory, saves, keeps_args, gradients, observer, max_nodes, selection)
        self.booleans: dict[int, bool] = {}
        # Entries whose value the model read into Python, other than for an `if`.
        self.reads: set[int] = set()
        # Finds the number of a parameter that was made during the pass, once a module of the model
        # holds it.
        self.on_made_parameter: Callable[[Tensor], int | None] | None = None
        self._makes_parameters = False
        # The number of rows when values first left torch through NumPy or DLPack.
        self.first_handed_out: int | None = None
        self.failures = Failures()
        self.warnings: list[str] = []
        # Set by a patched operator for the one call that follows.
        self.operator: Operation | None = None
        # True while entering a Python method of Tensor whose own operations are recorded.
        self.is_inlining = False
        # Records calls of `Kind.COLLECTIVE`; and the collectives not waited for yet (see
        # `collectives.py`).
        self.on_collective: Callable[..., Any] | None = None
        self.unfinished: list[Any] = []
        # The time of the next check of saved memory, and the function for it.
        self._look_at = math.inf
        self._look: Callable[[Iterable[Tensor]], float] = lambda outside: math.inf

    # -- calls that make tensors

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = KNOWN_OPERATIONS[func]
        if operation.kind is not _OPERATION or self.collected is not None:
            return self.pass_through(operation, func, args, kwargs)
        if self.operator is not None:
            operation, self.operator = self.operator, None
        # As much as possible happens before the call: after it, the processor caches hold the
        # operation's data.
        frame = sys._getframe(1)
        code: CodeType | None = frame.f_code
        instruction = frame.f_lasti
        known = _known_code(id(code))
        if known is None or not known[0]:
            code, instruction = self.user_code(frame)
        references: References
        if PLAIN_TYPES.issuperset(map(type, args)) and (
            not kwargs or PLAIN_KEYWORD_TYPES.issuperset(map(type, kwargs.values()))
        ):
            at = self._entry_at
            if self.memory.may_die or UNKNOWN in (
                references := tuple(
                    [at(id(arg), UNKNOWN) if type(arg) in TENSORS else None for arg in args]
                )
            ):
                references = self._flat_references(args)
            kept = (None,) * len(args) if None not in references else without_flat_tensors(args)
            kept_kwargs, may_write = kwargs, bool(operation.written)
        elif _are_foreign(types):
            return run_overridden(self, func, types, args, kwargs)
        else:
            references, kept, kept_kwargs = self.read_arguments(args, kwargs)
            may_write = bool(operation.written) or bool(kwargs and "out" in kwargs)
        detour = _NO_DETOUR
        if may_write or not self._is_short:
            detour = self._prepare_detour(operation, args, kwargs, references, (code, instruction))
        start = perf_counter()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            self.fail(error, operation, args, kwargs, references, sys._getframe(1), detour[1])
            raise
        end = perf_counter()
        fields = (
            operation, kept, kept_kwargs, references, self.module_call, code, instruction,
            end - start, None,
        )  # fmt: skip
        if detour is _NO_DETOUR and type(result) is Tensor:
            self.append_short(fields, result)
        else:
            self._append_others(fields, result, detour)
        if end > self._look_at:
            self._look_at = self._look(self.outside.values())
        return result

    def _prepare_detour(
        self,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        references: References,
        place: tuple[CodeType | None, int],
    ) -> _Detour:
        """Prepares a call that writes to tensors, or whose row cannot be short."""
        written = written_by(operation, args, kwargs)
        if self._is_short and (not written or self._keep_before(operation, written)):
            return written, None, True
        observed = self.prepare(
            CallKind.FUNCTION, operation, args, kwargs, references, written, place
        )
        return written, observed, False

    def _append_others(self, fields: tuple[Any, ...], result: Any, detour: _Detour) -> None:
        """Adds the rows of a call that wrote to tensors, returned several, or is not fast-path."""
        written, observed, is_short = detour
        if is_short and type(result) is Tensor and (not written or result is written[0]):
            self.append_short(fields, result, bool(written))
        elif is_short and not written and self.append_several(fields, result):
            pass
        elif result is NotImplemented:
            self.abandon_observed(observed)
        else:
            self.append_results(make_call(fields[:8]), result, written)
            self.end_observed(observed, result)

    def _keep_before(self, operation: Operation, written: Sequence[Tensor]) -> bool:
        """Copies the saved value of a tensor that is about to be written and shares its memory with
        none.

        Returns False if the write needs `prepare`.
        """
        target = written[0]
        entry = self.number_of(target)
        if entry is None or entry < 0 or id(target) in self._twins:
            return False
        if not operation.is_inplace or len(written) > 1 or self.unfinished:
            return False
        if self.saves_all:
            return self.memory.keep_copy(entry, target)
        return not self._saves and self.memory.may_overwrite(entry, target)

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
        """Prepares a call that is off the fast path: observer, saved arguments, copies, gradient
        hooks.
        """
        observed = self.begin_observed(kind, operation, args, kwargs, references, written, place)
        self.complete()
        if written:
            self.before_write(written)
        if self.gradients is not None:
            self.watch_arguments(args, kwargs)
        if self._makes_parameters:
            self._note_made_parameters(args, kwargs)
        return observed

    def expect_parameters(self) -> None:
        """From now on, looks for parameters made during the pass among the arguments of a call."""
        if not self._makes_parameters:
            with NoTorchFunction():
                self.complete()
            self._is_short, self._makes_parameters = False, True

    def _note_made_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        for _, tensor in plain_tensors((args, kwargs)):
            if isinstance(tensor, torch.nn.Parameter) and self.on_made_parameter is not None:
                entry = self.entry_of(tensor)
                if entry is not None and entry >= 0 and entry not in self.param_entries:
                    number = self.on_made_parameter(tensor)
                    if number is not None:
                        self.param_entries[entry] = number

    def before_write(self, targets: Sequence[Tensor]) -> None:
        """Copies the saved values that a write to `targets` is about to change."""
        if self.unfinished:  # the writing code must have waited for those writes
            for target in targets:
                self.finish_entries(self.memory.writers_of(target))
        self.memory.before_write(targets)

    # -- calls that leave no row

    def pass_through(
        self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Makes a call that is no operation, or is not recorded, and notes what it reads."""
        kind = operation.kind
        if self.collected is not None:
            self._collect(args, kwargs)
        # READ comes first: `x.shape` is as frequent as operations.
        elif kind is _READ and self.observer is None:
            pass
        elif kind is Kind.COLLECTIVE and self.on_collective is not None:
            return self.on_collective(self, operation, func, args, kwargs)
        elif kind is Kind.INLINE:
            return self._inline(func, args, kwargs)
        else:
            return self._read(operation, func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _collect(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Collects the entries that are read inside an opaque call."""
        if self.collected is not _IGNORED:
            read = [self.entry_of(tensor) for _, tensor in plain_tensors((args, kwargs))]
            self.collect_entries([entry for entry in read if entry is not None])

    def collect_entries(self, entries: Iterable[int]) -> None:
        """Notes that an opaque call reads these entries or parameters."""
        if self.collected is not None and self.collected is not _IGNORED:
            self.collected.update(dict.fromkeys(entries))

    def _inline(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Calls a Python method of Tensor whose own operations are recorded instead of it."""
        self.is_inlining = True
        push_mode(self)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_inlining = False
            torch._C._pop_torch_function_stack()

    def _read(
        self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Makes a call that reads from a tensor (a value, a truth value, its memory), and notes the
        read.
        """
        observed = self.begin_observed(CallKind.READ, operation, args, kwargs, (), (), (None, 0))
        if operation.kind is Kind.EXPOSURE:
            self.complete()
            self._is_short = False
            self.before_write(args[:1])
            self.memory.expose(args[0])
            if self.first_handed_out is None and operation.name in _HANDING_OUT:
                self.first_handed_out = len(self.rows)
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException:
            self.abandon_observed(observed)
            raise
        self.end_observed(observed, result)
        if operation.kind is Kind.LEAF:
            self._note_leaf(args[0])
        elif operation.kind is Kind.BOOLEAN:
            self.booleans.update(dict.fromkeys(self._entries_in(args[:1]), result))
        elif operation.kind in (Kind.VALUE, Kind.EXPOSURE):
            self.reads.update(self._entries_in(args))
        return result

    def _entries_in(self, args: tuple[Any, ...]) -> list[int]:
        entries = [self.entry_of(tensor) for _, tensor in plain_tensors(args)]
        return [entry for entry in entries if entry is not None and entry >= 0]

    def _note_leaf(self, tensor: torch.Tensor) -> None:
        """Records that the model has set `requires_grad` of a leaf."""
        number = self.entry_of(tensor)
        if number is None or not tensor.is_leaf:
            return
        noted = self.leaves if number >= 0 else self.trained
        if tensor.requires_grad:
            noted.add(number)
        elif number < 0:
            noted.discard(number)

    # -- the observer

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
        """Begins a call that is off the fast path: keeps its arguments, and reports it to the
        observer, if any. For `inside` see ObservedCall.
        """
        if kind is not CallKind.READ:
            self.keep_args(args, kwargs)
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
        """True if an argument is still being written by a collective."""
        for begun in [begun for begun in self.unfinished if begun.is_awaited()]:
            self.unfinished.remove(begun)
            self.finish_entries(begun.entries)
        given = references.values() if isinstance(references, dict) else references
        return not self.memory.unfinished.keys().isdisjoint(given)

    def end_observed(self, call: ObservedCall | None, result: Any) -> None:
        """Reports the end of a call to the observer."""
        if call is not None and self.observer is not None:
            call.last = len(self.rows)
            self.observer.end(call, result)

    def abandon_observed(self, call: ObservedCall | None) -> None:
        """Reports to the observer that the call raised or declined."""
        if call is not None and self.observer is not None:
            self.observer.abandon(call)

    # -- failures

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
        """Records that the model raised here."""
        self.abandon_observed(observed)
        self.failures.note(
            error, self.module_call, self.user_code(frame), operation, args, kwargs, references
        )

    # -- on and off

    def is_on(self) -> bool:
        """True if calls are recorded now; False inside a recorded or opaque call."""
        depth = _stack_depth()
        if not depth or self.collected is not None or _is_disabled():
            return False
        return _mode_at(depth - 1) is self or any(
            _mode_at(level) is self for level in range(depth - 1)
        )

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """A context in which calls leave no row. They still reach the recorder;
        `paused` takes the recorder off the stack of modes, and `unseen` hides a
        computation of torchlens from every mode of the user's.
        """
        before, self.collected = self.collected, _IGNORED
        try:
            yield
        finally:
            self.collected = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the recorder is no torch mode and the observer is paused: for tracers,
        which run functions on tensors without values.
        """
        with NoTorchFunction():
            self.complete()
        with without_mode(self), nullcontext() if self.observer is None else self.observer.pause():
            yield

    def watch_memory(self, watch: Look) -> None:
        """Lets `watch` check periodically how much is saved."""
        self._look = watch.look
        self._look_at = perf_counter() + watch.interval

    def expect_values_to_leave(self, stops_saving: bool = False) -> None:
        """Completes all rows now, and from now on at each call, as saved values may be removed.

        With `stops_saving`, no more values are saved.
        """
        with NoTorchFunction():
            self.complete()
        self._is_short = False
        if stops_saving:
            self._saves = self.saves_all = False

    def share(self) -> None:
        """Prepares the recorder for use by several threads."""
        with NoTorchFunction():
            self.complete()
        self._is_short = False
        if self.gradients is not None:
            self.gradients.admit_threads()

    def for_thread(self, code: CodeType, started_by: FrameType | None) -> Self:
        """A recorder for a new thread that `code` runs; it shares all records with this one."""
        own = copy.copy(self)
        own.operator = own.collected = None
        own.is_inlining = False
        own.thread_code, own.thread_place = code, self.user_code(started_by)
        own.observer = None if self.observer is None else self.observer.for_thread()
        return own


def _are_foreign(types: Sequence[type]) -> bool:
    """True if an argument type that overrides torch functions is not a tensor."""
    return not all(issubclass(kind, Tensor) for kind in types)
