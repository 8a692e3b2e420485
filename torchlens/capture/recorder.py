"""What one call leaves behind: the hot path.

torch tells a `TorchFunctionMode` of every call that would run an operation, whichever name it was called by, and only in
the thread that entered the mode. While the recorder handles a call the mode is off, so what happens inside the call is
part of it. The handler is dull on purpose: look up which entries the arguments are, call, append one row. Everything
else waits for `graph/`.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchlens.capture.arguments import (
    PLAIN_KEYWORD_TYPES,
    PLAIN_TYPES,
    TENSORS,
    Kept,
    are_plain,
    shape_of,
    unwrap,
    without_tensors,
)
from torchlens.capture.failures import Failures
from torchlens.capture.gradients import GradientHooks, slice_written
from torchlens.capture.memory import Memory, is_sole_owner, version_of
from torchlens.capture.memory_watch import MemoryWatch
from torchlens.capture.mode_stack import run_overridden, without_mode
from torchlens.capture.observer import CallKind, ObservedCall, Observer
from torchlens.capture.operations import (
    KNOWN_OPERATIONS,
    OUTPUT,
    Kind,
    Operation,
    operation_of,
)
from torchlens.capture.recording import ModuleCall, References, Row
from torchlens.capture.regions import region_of, storage_of
from torchlens.capture.trees import plain_tensors, same_with
from torchlens.capture.user_code import KNOWN_CODE, is_user_code
from torchlens.capture.view_tree import Slice
from torchlens.capture.wrappers import inner_of

__all__ = ["Recorder"]

Tensor = torch.Tensor
_OPERATION, _READ = Kind.OPERATION, Kind.READ
_KNOWN = KNOWN_OPERATIONS.get
_known_code = KNOWN_CODE.get
_stack_depth, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_is_disabled = torch._C._is_torch_function_all_disabled
_UNKNOWN = 1 << 62  # no entry has this number
_DEEP = 5_000  # entries
_ASIDE: dict[int, None] = {}  # stands in `collected` for: not even that
_row: Callable[[tuple[Any, ...]], Row] = partial(tuple.__new__, Row)  # what `Row._make` does, at half the price


class Recorder(TorchFunctionMode):
    """Records the calls made while it is the current mode.

    `saves` says which entries keep their tensor: True, False, or a set of entry numbers. Of entries beyond `max_nodes`, the
    backward node is not looked at.
    """

    def __init__(
        self,
        memory: Memory,
        saves: bool | frozenset[int],
        keeps_args: bool,
        gradients: GradientHooks | None,
        observer: Observer | None = None,
        max_nodes: int | None = None,
    ) -> None:
        super().__init__()
        self.memory = memory
        # The last may be the first eight fields of a row alone, until `complete`.
        self.rows: list[Any] = []
        self.module_calls: list[ModuleCall] = [ModuleCall("", 1, -1, None, 0)]
        self.module_call = 0
        # The code that calls modules: what is further out on the stack called the module, not the operation.
        self.module_code: CodeType | None = None
        # Likewise the code that runs a thread of the model's; and where that was started.
        self.thread_code: CodeType | None = None
        self.thread_place: tuple[CodeType | None, int] = (None, 0)
        self.booleans: dict[int, bool] = {}
        # Entries whose value the model took out of torch, other than for an `if`.
        self.reads: set[int] = set()
        # Entries that gradients are computed for although they come from no differentiable operation.
        self.leaves: set[int] = set()
        # Other tensors by which the model reads its parameters: (number of the parameter, tensor).
        self.param_stand_ins: list[tuple[int, Tensor]] = []
        # Those and others, kept so that their ids stay theirs.
        self._held: list[Tensor] = []
        # Numbers of parameters that were put together from several.
        self.joint_params: set[int] = set()
        # Entries that came from another process alone, and that only went to one.
        self.received: set[int] = set()
        self.sent: set[int] = set()
        self.saved_args: dict[int, tuple[Any, Any]] = {}
        self.gradients = gradients
        # Without them: where autograd keeps what entries wrote to views, for a backward pass that is logged later.
        self.slices: list[Slice] = []
        self.failures = Failures()
        self.warnings: list[str] = []
        # The model's parameters, then tensors it found elsewhere.
        self.outside: list[Tensor] = []
        # What tensors of other classes hold: by id, the entry that holds it, the name it is held by, the tensor.
        self.held: dict[int, tuple[int, str, weakref.ref[Tensor]]] = {}
        # Asked for the entry that a tensor becomes which the log has not seen before; None if it becomes none.
        self.on_stranger: Callable[[Recorder, Tensor], int | None] | None = None
        # Set by a patched operator for the one call that follows.
        self.operator: Operation | None = None
        # True while a Python method of Tensor is being entered whose own operations are to be recorded.
        self.is_inlining = False
        # While not None, calls are not recorded; the entries they read are collected here.
        self.collected: dict[int, None] | None = None
        # Records calls of `Kind.COLLECTIVE`, and which of them nobody has waited for yet: see `collectives.py`.
        self.on_collective: Callable[..., Any] | None = None
        self.unfinished: list[Any] = []
        self._saves = saves
        self._saves_all = saves is True
        self._keeps_args = keeps_args
        # What is kept of the arguments of the call that is under way.
        self._kept_args: tuple[Any, Any] | None = None
        self._observer = observer
        self._max_nodes = max_nodes
        self._is_plain = saves is True and not keeps_args and gradients is None and observer is None and not memory.may_die
        # When to look next at how much is saved, and who does.
        self._look_at = math.inf
        self._look: Callable[[Sequence[Tensor]], float] = lambda outside: math.inf
        # torch frees nodes that were looked at from Python one inside the other, and tens of thousands of them overflow its
        # stack (torch 2.13). These are held until the model's output is gone, and then go one by one, the last first.
        self._deep_nodes: list[Any] = []
        # ids of tensors that are more than one entry: some operations hand back what they were given.
        self._twins: set[int] = set()
        # For each module call that is running: what operations in it handed back, as what, and what it was before.
        self.handed_back: dict[int, list[tuple[weakref.ref[Tensor], int, int]]] = {}
        # id of a tensor → the entry it is, or -1 - k for parameter k.
        self._entry_of_id: dict[int, int] = {}
        self._entry_at = self._entry_of_id.get

    # -- what exists before the first operation --------------------------------------------------------------------

    def add_source(self, operation: Operation, tensor: Tensor) -> int:
        """An entry that no operation made: an input or a buffer."""
        entry = self._add_boundary(operation, tensor, ())
        self._entry_of_id[id(tensor)] = entry
        self._know_inner(entry, tensor)
        if tensor.requires_grad and tensor.is_leaf:
            self.leaves.add(entry)
        if self.gradients is not None:
            self.gradients.watch_source(entry, tensor)
            self._note_view(entry, tensor, ())
        return entry

    def add_output(self, tensor: Tensor) -> int:
        """An entry for a tensor that the model returns."""
        reference = self.meet(tensor)
        if self.gradients is not None:
            self.watch_arguments((tensor,), None)
        entry = self._add_boundary(OUTPUT, tensor, () if reference is None else (reference,))
        if self.gradients is not None:
            self.gradients.watch(entry, tensor)
        return entry

    def _add_boundary(self, operation: Operation, tensor: Tensor, references: References) -> int:
        entry = len(self.rows)
        if self._is_plain and type(tensor) is Tensor:  # the short way, as for operations
            self.rows.append((operation, (), None, references, 0, None, 0, 0.0))
            self.memory.values.append(tensor)
            self.memory.versions.append(version_of(tensor))
            return entry
        self.complete()
        self.memory.add(tensor, self._saves_all or self._is_saved(entry))
        shape, dtype, gradfunc = shape_of(tensor), tensor.dtype, self._gradfunc_of(tensor)
        self.rows.append(_row((operation, (), None, references, 0, None, 0, 0.0, None, shape, dtype, gradfunc)))
        if self._observer is not None:
            self._observer.add_boundary(entry, tensor, operation, references)
        return entry

    def _is_saved(self, entry: int) -> bool:
        return self._saves if isinstance(self._saves, bool) else entry in self._saves

    def add_outside(self, tensor: Tensor) -> int:
        """A tensor that is no entry, but that the log must know when it meets it: a parameter or a constant."""
        self.outside.append(tensor)
        number = -len(self.outside)
        self._entry_of_id[id(tensor)] = number
        self._know_inner(number, tensor)
        if self.gradients is not None:
            self.gradients.watch_source(number, tensor)
        if self._observer is not None and self.collected is None:
            self._observer.add(number, tensor)
        return number

    def number_of(self, tensor: Tensor) -> int | None:
        """As `entry_of`, for a tensor that is known to have lived all along."""
        return self._entry_at(id(tensor))

    def entry_of(self, tensor: Tensor) -> int | None:
        """The entry that `tensor` is now, -1 - k for parameter k, None if it is not known."""
        entry = self._entry_at(id(tensor))
        memory = self.memory
        if memory.may_die and entry is not None and entry >= 0 and not memory.is_alive(entry, tensor):
            entry = None
        if entry is None and type(tensor) not in TENSORS:
            inner = inner_of(tensor)
            return None if inner is None else self.entry_of(inner)
        return entry

    def is_known(self, tensor: Tensor) -> bool:
        """Whether `tensor` is an entry or a parameter itself, and not only the tensor that it stands for."""
        return self._entry_at(id(tensor)) is not None and self.entry_of(tensor) is not None

    def stand_in(self, number: int, tensor: Tensor, has_gradient: bool = False) -> None:
        """From now on `tensor` passes for entry or parameter `number`, whose gradient may be the one that arrives there."""
        self._entry_of_id[id(tensor)] = number
        if number >= 0:
            self.memory.stand_in(number, tensor)
            return
        self._held.append(tensor)
        if has_gradient:
            self.param_stand_ins.append((-1 - number, tensor))
            if self.gradients is not None:
                self.gradients.watch_source(number, tensor)

    def _know_inner(self, number: int, tensor: Tensor) -> None:
        if type(tensor) not in TENSORS:
            inner = inner_of(tensor)
            if inner is not None:
                self.stand_in(number, inner)
                self._know_inner(number, inner)
            elif number >= 0:
                for name, part in vars(tensor).items():
                    if isinstance(part, Tensor):
                        self.held[id(part)] = (number, name, weakref.ref(part))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While it lasts, calls leave no trace."""
        before, self.collected = self.collected, _ASIDE
        try:
            yield
        finally:
            self.collected = before

    def meet(self, tensor: Tensor) -> int | None:
        """As `entry_of`; but a tensor that the log has not seen before may become an entry now."""
        entry = self.entry_of(tensor)
        return self.on_stranger(self, tensor) if entry is None and self.on_stranger is not None else entry

    def is_on(self) -> bool:
        """Whether calls are being reported; inside one that is, they are not, nor are those inside an opaque one."""
        depth = _stack_depth()
        if not depth or self.collected is not None or _is_disabled():
            return False
        return _mode_at(depth - 1) is self or any(_mode_at(level) is self for level in range(depth - 1))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Logs nothing for a while."""
        with torch._C.DisableTorchFunction():
            self.complete()
        with without_mode(self), nullcontext() if self._observer is None else self._observer.pause():
            yield

    # -- calls -----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = _KNOWN(func) or operation_of(func)
        if self.collected is not None or operation.kind is not _OPERATION:
            # `x.shape` and its like are as frequent as operations in some models.
            if operation.kind is _READ and self.collected is None and self._observer is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            return self._pass_through(operation, func, args, kwargs)
        if self.operator is not None:
            operation, self.operator = self.operator, None
        # All that can be done before the call is: after it, the caches hold the operation's data and not ours.
        frame = sys._getframe(1)
        code: CodeType | None = frame.f_code
        instruction = frame.f_lasti
        known = _known_code(id(code))
        if known is None or not known[0]:
            code, instruction = self.user_code(frame)
        is_short = self._is_plain
        if (not PLAIN_TYPES.issuperset(map(type, args)) and not are_plain(args)) or (
            kwargs and not PLAIN_KEYWORD_TYPES.issuperset(map(type, kwargs.values()))
        ):
            if types and not all(issubclass(kind, Tensor) for kind in types):
                return run_overridden(self, func, types, args, kwargs)
            references: References = self.references_to(args, kwargs)
            is_short = False
        elif self.memory.may_die:
            references = tuple([self._reference_to(arg) if type(arg) in TENSORS else None for arg in args])
        else:
            references = tuple([self._entry_at(id(arg), _UNKNOWN) if type(arg) in TENSORS else None for arg in args])
            if _UNKNOWN in references:
                references = tuple([self._reference_to(arg) if type(arg) in TENSORS else None for arg in args])
        written: Sequence[Tensor] = ()
        if operation.written or (kwargs and "out" in kwargs):
            written = self.written(operation, args, kwargs)
            if written:
                is_short = is_short and operation.is_inplace and len(written) == 1 and self._keep_before(written[0])
        observed = (
            None
            if is_short
            else self.prepare(CallKind.FUNCTION, operation, args, kwargs, references, written, (code, instruction))
        )
        kept = tuple([None if type(arg) in TENSORS else arg for arg in args]) if is_short else args
        start = perf_counter()
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            self.fail(error, operation, args, kwargs, references, sys._getframe(1), observed)
            raise
        end = perf_counter()
        seconds = end - start
        if is_short and type(result) is Tensor and (not written or result is written[0]):
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
            self.rows.append((operation, kept, kwargs, references, self.module_call, code, instruction, seconds))
            self.memory.values.append(result)
            self.memory.versions.append(version)
        elif result is not NotImplemented:
            call = (operation, args, kwargs, references, self.module_call, code, instruction, seconds)
            self.append_results(call, result, written)
            if observed is not None:
                self.end_observed(observed, result)
        elif observed is not None and self._observer is not None:
            self._observer.abandon(observed)
        if end > self._look_at:
            self._look_at = self._look(self.outside)
        return result

    def watch_memory(self, watch: MemoryWatch) -> None:
        """Has `watch` look from time to time at how much is saved."""
        self._look = watch.look
        self._look_at = perf_counter() + watch.interval

    def _keep_before(self, target: Tensor) -> bool:
        """Replaces the saved value of a tensor that is going to be written by a copy, if nothing else looks at its memory.

        False if more may have to be done than that.
        """
        entry = self._entry_at(id(target))
        if entry is None or entry < 0 or id(target) in self._twins or type(target) is not Tensor or target.requires_grad:
            return False
        if self.unfinished:
            return False
        memory = self.memory
        if memory.values[entry] is not target or not is_sole_owner(target):
            return False
        memory.replace(entry, target.clone())
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
        """Tells the observer, if there is one, of a call that is going to be made; `inside` as in ObservedCall."""
        if self._observer is None:
            return None
        first = len(self.rows)
        is_early = bool(self.unfinished) and self._is_early(references)
        call = ObservedCall(kind, operation, args, kwargs, references, written, *place, first, first, inside, is_early)
        self._observer.begin(call)
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
        if call is not None and self._observer is not None:
            call.last = len(self.rows)
            self._observer.end(call, result)

    def complete(self) -> None:
        """Writes down what the short way left for later: until something is written to, it is all still to be seen."""
        rows, values, storages = self.rows, self.memory.values, self.memory.storages
        for entry in range(len(storages), len(rows)):
            tensor = values[entry]
            try:
                gradfunc = tensor.grad_fn
                shape, storage = tensor.shape, tensor.untyped_storage()._cdata
                name = None if gradfunc is None else type(gradfunc).__name__
            except (NotImplementedError, RuntimeError):  # a kind of tensor that lacks one of these
                shape, storage, name = shape_of(tensor), storage_of(tensor), self._gradfunc_of(tensor)
            rows[entry] = _row((*rows[entry][:8], None, shape, tensor.dtype, name))
            storages.append(storage)

    def _gradfunc_of(self, tensor: Tensor) -> str | None:
        if self._max_nodes is not None and len(self.rows) >= self._max_nodes:
            return "Backward" if tensor.requires_grad else None
        try:
            gradfunc = tensor.grad_fn
        except RuntimeError:  # one of several views whose base was written behind autograd's back
            return None
        if len(self.rows) > _DEEP:
            self._deep_nodes.append(gradfunc)
        return None if gradfunc is None else type(gradfunc).__name__

    def append(
        self,
        call: tuple[Any, ...],
        tensor: Tensor,
        output_index: int | None,
        is_written: bool = False,
        is_finished: bool = True,
        is_end: bool = False,
    ) -> None:
        """A row for `tensor`: its value is to come if not `is_finished`; it goes on as what it was if the call `is_end`."""
        self.complete()
        operation, args, kwargs, references, *where = call
        rows, memory = self.rows, self.memory
        entry = len(rows)
        saves = self._saves_all or self._is_saved(entry)
        if self._keeps_args and saves:
            self.saved_args[entry] = self._kept_args or self._keep_args(args, kwargs)
        # Nothing must be kept alive, nor a list that the model may yet change.
        if type(references) is dict:
            args, kwargs = without_tensors(args), without_tensors(kwargs)
        else:
            args = tuple([None if type(arg) in TENSORS else arg for arg in args])
        memory.add(tensor, saves, is_finished)
        rows.append(_row((
            operation, args, kwargs, references, *where, output_index, shape_of(tensor), tensor.dtype,
            self._gradfunc_of(tensor),
        )))  # fmt: skip
        if not is_finished and not references:
            self.received.add(entry)
        known = self._entry_at(id(tensor))
        if memory.may_die and known is not None and known >= 0 and not memory.is_alive(known, tensor):
            known = None  # another tensor, which is gone, had this id
        if is_end:
            self.sent.add(entry)
            self._twins.add(id(tensor))
        elif known is None or known >= 0:  # a parameter that an operation hands back stays a parameter
            self._entry_of_id[id(tensor)] = entry
            self._know_inner(entry, tensor)
            if known is not None and is_written:
                self._twins.add(id(tensor))
            elif known is not None:
                self._hand_back(tensor, entry, known)
        if self.gradients is not None and tensor.requires_grad and not (is_written and tensor._is_view()):
            self.gradients.watch(entry, tensor)
            self._note_view(entry, tensor, references)
        if self._observer is not None:
            self._observer.add(entry, tensor)

    def _hand_back(self, tensor: Tensor, entry: int, before: int) -> None:
        """An operation returned a tensor that was there before, and it now is another entry; for how long, see below."""
        self._twins.add(id(tensor))
        if self.module_call:
            self.handed_back.setdefault(self.module_call, []).append((weakref.ref(tensor), entry, before))

    def undo_handing_back(self, call: int, returned: Sequence[Tensor]) -> None:
        """A module call is over: what was handed back in it is again what it was before, for it is others who hold it.

        But what the module returned goes on as it is, as if it had been handed back in the module around.
        """
        parent = self.module_calls[call].parent
        kept = {id(tensor) for tensor in returned}
        going_on = []
        for handed_back in reversed(self.handed_back.pop(call)):
            reference, entry, before = handed_back
            tensor = reference()
            if tensor is not None and id(tensor) in kept:
                going_on.append(handed_back)
            elif tensor is not None and self._entry_at(id(tensor)) == entry:  # not written since
                self._entry_of_id[id(tensor)] = before
                self._know_inner(before, tensor)
        if going_on and parent:
            self.handed_back.setdefault(parent, []).extend(reversed(going_on))

    def _note_view(self, entry: int, tensor: Tensor, references: References) -> None:
        """Tells the gradients of an entry that is a view, and which of the entries it was given it looks at."""
        assert self.gradients is not None
        if tensor.requires_grad and tensor._is_view():
            storage, storages = self.memory.storages[entry], self.memory.storages
            given = references.values() if isinstance(references, dict) else references
            parent = next((n for n in given if n is not None and n >= 0 and storages[n] == storage), None)
            self.gradients.views.add(entry, parent, storage, region_of(tensor))

    def append_results(
        self,
        call: tuple[Any, ...],
        result: Any,
        written: Sequence[Tensor],
        is_finished: bool = True,
        is_end: bool = False,
        each_reads: Sequence[References] = (),
    ) -> None:
        """Several results, or none but what was written. `each_reads` where not all read all that the call was given."""
        operation = call[0]
        first = len(self.rows)
        if isinstance(result, Tensor):
            self.append(call, result, None, bool(written) and operation.is_inplace, is_finished, is_end)
        else:
            outputs = [tensor for _, tensor in plain_tensors(result)]
            if not outputs:
                outputs = list(written)
            is_single = len(outputs) == 1 and not isinstance(result, list | tuple)
            for index, tensor in enumerate(outputs):
                own = (*call[:3], each_reads[index], *call[4:]) if each_reads else call
                self.append(own, tensor, None if is_single else index, operation.is_inplace, is_finished, is_end)
        if written and len(self.rows) > first:
            if operation.is_inplace and operation.kind is _OPERATION:  # autograd does not see a collective write
                self._note_slice(first, written[0], self._read_entry(call))
            self._note_writes(first, written)
        self._kept_args = None

    def finish_entries(self, entries: Sequence[int]) -> None:
        """What the entries were waiting for is there."""
        self.complete()
        for entry, tensor in self.memory.finish(entries):
            if self._observer is not None:
                self._observer.add(entry, tensor)

    def drop_entries(self, entries: Sequence[int]) -> None:
        """The entries will never know their value."""
        self.memory.drop(entries)

    def _note_slice(self, entry: int, tensor: Tensor, before: int | None) -> None:
        part = slice_written(entry, tensor, before)
        if part is not None and self.gradients is not None:
            self.gradients.watch_write(part)
        elif part is not None and self.memory.values[entry] is tensor:  # kept no longer than the tensor itself
            self.slices.append(part)

    def _note_writes(self, first: int, written: Sequence[Tensor]) -> None:
        """Each written tensor was written by the entry that it now is; by the call's first where it is no result."""
        for tensor in written:
            entry = self.entry_of(tensor)
            entry = first if entry is None or entry < first else entry
            self.memory.after_write(entry, [tensor])
            if self.gradients is not None:
                self.gradients.views.note_write(entry, storage_of(tensor), region_of(tensor))

    def _read_entry(self, call: tuple[Any, ...]) -> int | None:
        """The entry that an in-place operation took as the tensor it changes."""
        operation, references = call[0], call[3]
        if isinstance(references, dict):
            return references.get(0, references.get(operation.name_of(0)))
        return references[0]

    # -- arguments -------------------------------------------------------------------------------------------------

    def references_to(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[Any, int]:
        """Which of the arguments, nested and named ones too, are entries or parameters."""
        found = {}
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            self.memory.before_random(kwargs["generator"])
        for arguments in (args, kwargs):
            for path, tensor in plain_tensors(arguments):
                if path[0] == "out":  # written, not read
                    continue
                found[path[0] if len(path) == 1 else path] = self._reference_to(tensor)
        return found

    def watch_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Before tensors are read: views among them may have got another place in autograd's graph since."""
        assert self.gradients is not None
        for _, tensor in plain_tensors((args, kwargs)):
            if tensor.requires_grad and tensor._is_view():
                entry = self.entry_of(tensor)
                if entry is not None and entry >= 0:
                    self.gradients.watch_again(entry, tensor, len(self.rows))

    def _reference_to(self, tensor: Tensor) -> int:
        entry = self.meet(tensor)
        return self.add_outside(tensor) if entry is None else entry

    def written(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
        """The tensors that the call is going to write to."""
        does_write = operation.writes_if is None or (len(args) > operation.writes_if and args[operation.writes_if])
        if operation.written == (0,) and does_write and args and type(args[0]) is Tensor:
            return [args[0]]
        targets = [tensor for _, tensor in plain_tensors(kwargs["out"])] if kwargs and "out" in kwargs else []
        if does_write:
            for position in operation.written:
                argument = args[position] if position < len(args) else (kwargs or {}).get(operation.name_of(position))
                targets.extend(tensor for _, tensor in plain_tensors(argument))
        return [tensor for tensor in targets if not is_lazy(tensor)]  # a lazy module's parameter has no value to lose

    def _keep_args(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, Any]:
        """The arguments as they are at the call, copied like saved values when their memory is written."""

        def keep(tensor: Tensor) -> list[Tensor]:
            holder = Kept([tensor])
            self.memory.watch_argument(holder, 0)
            return holder

        return same_with(args, keep), same_with(kwargs or {}, keep)

    # -- calls that leave no row -----------------------------------------------------------------------------------

    def _pass_through(self, operation: Operation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
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
            self._is_plain = False
            self._before_write(args[:1])
            self.memory.expose(args[0])
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException:
            if observed is not None and self._observer is not None:
                self._observer.abandon(observed)
            raise
        self.end_observed(observed, result)
        if operation.kind is Kind.LEAF and args[0].requires_grad and args[0].is_leaf:
            made = self.entry_of(args[0])
            if made is not None and made >= 0:
                self.leaves.add(made)
        if operation.kind is Kind.BOOLEAN:
            read = self.entry_of(args[0])
            if read is not None and read >= 0:
                self.booleans[read] = result
        elif operation.kind in (Kind.VALUE, Kind.EXPOSURE):
            entries = [self.entry_of(tensor) for _, tensor in plain_tensors(args)]
            self.reads.update(entry for entry in entries if entry is not None and entry >= 0)
        return result

    # -- where it happened -----------------------------------------------------------------------------------------

    def user_code(self, frame: FrameType | None) -> tuple[CodeType | None, int]:
        """The user's code that led to `frame`, no further out than the call of the module we are in."""
        module_code = self.module_code
        while frame is not None:
            code = frame.f_code
            known = _known_code(id(code))
            if is_user_code(code) if known is None else known[0]:
                return code, frame.f_lasti
            if code is module_code:
                call = self.module_calls[self.module_call]
                return call.code, call.instruction
            if code is self.thread_code:
                return self.thread_place
            frame = frame.f_back
        return None, 0

    def place(self, depth: int) -> tuple[str, CodeType | None, int]:
        """The module that is running, and the user's code that led to the caller of the caller `depth` frames up."""
        code, instruction = self.user_code(sys._getframe(1 + depth))
        return self.module_calls[self.module_call].address, code, instruction

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
        if observed is not None and self._observer is not None:
            self._observer.abandon(observed)
        self.failures.note(error, self.module_call, self.user_code(frame), operation, args, kwargs, references)

    def finish(self, outliving: Sequence[Tensor]) -> None:
        """The pass is over: lets go of arguments, copies what must not change any more."""
        self.memory.cut(len(self.rows))
        del self.rows[len(self.memory.values) :]
        self.complete()
        self.memory.settle(outliving)
        for holder in self.saved_args:
            self.saved_args[holder] = unwrap(self.saved_args[holder])
        self._entry_of_id.clear()
        self._held.clear()
