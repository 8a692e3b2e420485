"""The rows of a pass: one for each tensor that is made, enters or leaves the model."""

import weakref
from collections.abc import Container, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from torchlens._capture.entries import TensorEntries, take_apart
from torchlens._capture.gradients.backward_hooks import node_of
from torchlens._capture.gradients.entry_gradients import GradientHooks, slice_written
from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.observer import Observer
from torchlens._capture.selection import Selection
from torchlens._recording.operations import OUTPUT, Kind, Operation
from torchlens._recording.origin import version_of
from torchlens._recording.recording import MadeCall, References, located, make_call, make_row
from torchlens._recording.regions import region_of, shape_of, storage_of
from torchlens._recording.trees import SLICE_BOUNDS, plain_tensors, same_with
from torchlens._recording.view_tree import Slice

Tensor = torch.Tensor
_DEEP = 5_000  # entries
_SEVERAL, _ONLY_TENSORS = (tuple, list), frozenset({Tensor})


class Kept(list[Tensor]):
    """A saved argument: one tensor, in a place where it can be replaced by its copy."""


def unwrap(tree: Any) -> Any:
    """Saved arguments with each tensor in its own place again."""
    if isinstance(tree, Kept):
        return tree[0]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(unwrap, tree))
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(map(unwrap, tree))
    if isinstance(tree, dict):
        return {key: unwrap(item) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(unwrap(getattr(tree, name)) for name in SLICE_BOUNDS))
    return tree


class Rows(TensorEntries):
    """The rows of a pass, its saved values, and other records of its tensors.

    `saves` selects the entries whose values are saved: True, False, or a set of entry numbers.
    `selection` saves further ones. From entry `max_nodes` on, backward nodes are not read.
    """

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
        super().__init__(memory, gradients, observer)
        # Until `complete`, the last rows may hold only their first nine fields.
        self.rows: list[Any] = []
        # Leaves that require gradients: inputs, buffers, and tensors on which the model sets
        # `requires_grad`.
        self.leaves: set[int] = set()
        # Entries received from, or sent to, another process.
        self.received: set[int] = set()
        self.sent: set[int] = set()
        # Tensors whose `.grad` was filled by a backward pass inside the model.
        self.differentiated: list[weakref.ref[Tensor]] = []
        # Entries that are parameters made during the pass: their numbers.
        self.param_entries: dict[int, int] = {}
        self.saved_args: dict[int, tuple[Any, Any]] = {}
        # Entries whose result was exchanged (see `exchange.py`).
        self.edited: set[int] = set()
        # Without `gradients`: the in-place writes to views, for a backward pass that is logged
        # later.
        self.slices: list[Slice] = []
        # Entries that wrote to views without a node in autograd's graph: under no_grad, or several
        # in one call.
        self.hidden_writes: set[int] = set()
        self._saves = saves
        self._selection = selection
        self.saves_all = saves is True
        self._keeps_args = keeps_args
        # The saved arguments of the current call.
        self._kept_args: tuple[Any, Any] = ((), {})
        self._max_nodes = max_nodes
        # Fast path: if everything is saved, `complete` fills in shape, dtype and storage later. If
        # not, `_append_unsaved` writes complete rows.
        are_lost = saves is True and memory.may_die
        self._is_short = not keeps_args and gradients is None and observer is None and not are_lost
        memory.may_die |= saves is not True
        # torch 2.13 frees nodes that Python has accessed recursively, and tens of thousands of them
        # overflow the stack. These references free them one by one, last first, after the model's
        # output.
        self._deep_nodes: list[Any] = []

    # -- inputs, outputs, parameters

    def add_source(self, operation: Operation, tensor: Tensor) -> int:
        """Adds an input or buffer as an entry; returns its number."""
        entry = self._add_boundary(operation, tensor, ())
        self._entry_of_id[id(tensor)] = entry
        self._note_inner(entry, tensor)
        if tensor.requires_grad and tensor.is_leaf:
            self.leaves.add(entry)
        if self.gradients is not None:
            self.gradients.watch_source(entry, tensor)
            self._note_view(entry, tensor, ())
        return entry

    def add_output(self, tensor: Tensor) -> int:
        """Adds an output of the model as an entry; returns its number."""
        reference = self.meet(tensor)
        if self.gradients is not None:
            self.watch_arguments((tensor,), None)
        entry = self._add_boundary(OUTPUT, tensor, () if reference is None else (reference,))
        if self.gradients is not None:
            self.gradients.watch(entry, tensor)
        return entry

    def _add_boundary(self, operation: Operation, tensor: Tensor, references: References) -> int:
        entry = len(self.rows)
        if self._is_short and self.saves_all and type(tensor) is Tensor:  # as for operations
            self.rows.append((operation, (), None, references, 0, None, 0, 0.0, None))
            self.memory.values.append(tensor)
            self.memory.versions.append(version_of(tensor))
            return entry
        self.complete()
        self.memory.add(tensor, self._is_saved(entry, operation, 0))
        shape, dtype, gradfunc = shape_of(tensor), tensor.dtype, self._gradfunc_of(tensor)
        self.rows.append(
            make_row(
                (operation, (), None, references, 0, None, 0, 0.0, None, shape, dtype, gradfunc)
            )
        )
        if self.observer is not None:
            self.observer.add_boundary(entry, tensor, operation, references)
        return entry

    def _is_saved(self, entry: int, operation: Operation, call: int) -> bool:
        if self._selection is not None and not self.saves_all:
            return self._selection.may_mean(operation, call, self.module_calls)
        return self._saves if isinstance(self._saves, bool) else entry in self._saves

    # -- operations

    def made_call(
        self,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        references: References,
        place: tuple[CodeType | None, int],
        seconds: float = 0.0,
    ) -> MadeCall:
        """A call of the current module, for `append`. Rows keep no tensors, nor lists that the
        model may change.
        """
        kept, kept_kwargs = take_apart(args, (), {}), take_apart(kwargs, (), {})
        return MadeCall(operation, kept, kept_kwargs, references, self.module_call, *place, seconds)

    def append(
        self,
        call: MadeCall,
        tensor: Tensor,
        output_index: int | None,
        is_written: bool = False,
        is_finished: bool = True,
        is_end: bool = False,
    ) -> None:
        """Adds a row for `tensor`.

        If not `is_finished`, the value comes later. With `is_end`, the tensor keeps its earlier
        entry.
        """
        self.complete()
        entry = len(self.rows)
        saves = self._is_saved(entry, call.operation, call.module_call)
        if self._keeps_args and saves:
            self.saved_args[entry] = self._kept_args
        self.memory.add(tensor, saves, is_finished)
        result = (output_index, shape_of(tensor), tensor.dtype, self._gradfunc_of(tensor))
        self.rows.append(make_row((*call, *result)))
        if not is_finished and not call.references:
            self.received.add(entry)
        if is_end:
            self.sent.add(entry)
            self._twins.add(id(tensor))
        else:
            self._become(entry, tensor, is_written)
        if self.gradients is not None and not (is_written and tensor._is_view()):
            self.gradients.watch(entry, tensor)
            self._note_view(entry, tensor, call.references)
        if self.observer is not None:
            self.observer.add(entry, tensor)

    def append_results(
        self,
        call: MadeCall,
        result: Any,
        written: Sequence[Tensor],
        is_finished: bool = True,
        is_end: bool = False,
        each_reads: Sequence[References] = (),
    ) -> None:
        """Adds a row for each result, or for each written tensor if there is no result.

        `each_reads` has the references of each row if they differ.
        """
        operation = call.operation
        first = len(self.rows)
        if isinstance(result, Tensor):
            self.append(call, result, None, _is_among(result, written), is_finished, is_end)
        else:
            outputs = [tensor for _, tensor in plain_tensors(result)]
            if not outputs:
                outputs = list(written)
            is_single = len(outputs) == 1 and not isinstance(result, list | tuple)
            for index, tensor in enumerate(outputs):
                own = call._replace(references=each_reads[index]) if each_reads else call
                self.append(
                    own,
                    tensor,
                    None if is_single else index,
                    _is_among(tensor, written),
                    is_finished,
                    is_end,
                )
        if written and len(self.rows) > first:
            # autograd does not record the write of a collective.
            if operation.is_inplace and operation.kind is Kind.OPERATION:
                self._note_changed(first, written, call)
            self._note_writes(first, written)

    def append_short(
        self, fields: tuple[Any, ...], tensor: Tensor, is_written: bool = False
    ) -> None:
        """Fast path of `append`, for a plain tensor; `fields` are the first nine of its row.

        If all values are saved, `complete` adds the other fields.
        """
        if not self.saves_all:
            self._append_unsaved(fields, tensor, is_written)
            return
        rows, memory = self.rows, self.memory
        entry = len(rows)
        before = self._entry_of_id.setdefault(id(tensor), entry)
        if before != entry:
            self._entry_of_id[id(tensor)] = entry
            if not is_written:
                self._hand_back(tensor, entry, before)
        try:
            version = tensor._version
        except RuntimeError:  # as in `version_of`
            version = -1
        rows.append(fields)
        memory.values.append(tensor)
        memory.versions.append(version)

    def append_several(self, fields: tuple[Any, ...], results: Any) -> bool:
        """Calls `append_short` for each result; returns False if they are not all plain tensors."""
        if not isinstance(results, _SEVERAL):
            return False
        if not _ONLY_TENSORS.issuperset(map(type, results)):
            return False
        for index, tensor in enumerate(results):
            self.append_short((*fields[:8], index), tensor)
        return True

    def _append_unsaved(self, fields: tuple[Any, ...], tensor: Tensor, is_written: bool) -> None:
        """As `append_short`, with a complete row, because the tensor may die."""
        rows = self.rows
        entry = len(rows)
        if (self._saves or self._selection is not None) and self._is_saved(
            entry, fields[0], fields[4]
        ):
            self.append(make_call(fields[:8]), tensor, fields[8], is_written)
            return
        before = self._entry_of_id.setdefault(id(tensor), entry)
        if before != entry:
            origin = self._origin_of(before)
            is_other = origin is not None and origin() is not tensor  # its id was reused
            if is_other or before >= 0:  # parameters keep their number
                self._entry_of_id[id(tensor)] = entry
            if before >= 0 and not is_other and not is_written:
                self._hand_back(tensor, entry, before)
        shape: tuple[int, ...]
        try:
            shape, storage = tensor.shape, tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # as in `complete`
            shape, storage = shape_of(tensor), storage_of(tensor)
        name = self._gradfunc_of(tensor) if tensor.requires_grad else None
        rows.append(make_row((*fields, shape, tensor.dtype, name)))
        self.memory.add_unsaved(entry, tensor, storage)

    def complete(self) -> None:
        """Completes the rows that the fast path left incomplete.

        Until the next write, the missing fields can be read from the tensors.
        """
        rows, values, storages = self.rows, self.memory.values, self.memory.storages
        for entry in range(len(storages), len(rows)):
            tensor = values[entry]
            try:
                node = tensor.grad_fn
                shape, storage = tensor.shape, tensor.untyped_storage()._cdata
                name = None if node is None else type(node).__name__
            except (NotImplementedError, RuntimeError):  # a kind of tensor without some of these
                shape, storage, name = shape_of(tensor), storage_of(tensor), _node_name(tensor)
            rows[entry] = make_row((*rows[entry], shape, tensor.dtype, name))
            storages.append(storage)

    def _gradfunc_of(self, tensor: Tensor) -> str | None:
        if self._max_nodes is not None and len(self.rows) >= self._max_nodes:
            return "Backward" if tensor.requires_grad else None
        if len(self.rows) > _DEEP and (node := node_of(tensor)) is not None:
            self._deep_nodes.append(node)
        return _node_name(tensor)

    # -- writes

    def _note_view(self, entry: int, tensor: Tensor, references: References) -> None:
        """Registers a view and its parent, the first referenced entry in the same storage."""
        assert self.gradients is not None
        if tensor.requires_grad and tensor._is_view():
            storage, storages = self.memory.storages[entry], self.memory.storages
            given = references.values() if isinstance(references, dict) else references
            parent = next(
                (n for n in given if n is not None and n >= 0 and storages[n] == storage), None
            )
            self.gradients.views.add(entry, parent, storage, region_of(tensor))

    def _note_changed(self, first: int, written: Sequence[Tensor], call: MadeCall) -> None:
        """Registers the writes of an in-place operation; its entries start at `first`."""
        if len(written) == 1:
            tensor, before = written[0], _changed_entry(call)
            if self.note_slice(first, tensor, before) or not tensor._is_view():
                return
            if not torch.is_grad_enabled():
                self.hidden_writes.add(first)
            # A dropout that is off writes nothing: the view has its node still.
            elif self.gradients is not None:
                self.gradients.watch(first, tensor)
                self._note_view(first, tensor, (before,))
            return
        views = [entry for entry, tensor in enumerate(written, first) if tensor._is_view()]
        self.hidden_writes.update(views)
        if self.gradients is not None:
            for entry in views:
                self.gradients.note_written_together(
                    entry, [number for _, number in located(call.references)]
                )

    def note_slice(self, entry: int, tensor: Tensor, before: int | None) -> bool:
        """Registers a write that turned entry `before` into `entry`; a view's gradient comes via
        its base. False if autograd has noted no write to a view.
        """
        part = slice_written(entry, tensor, before)
        if part is not None and self.gradients is not None:
            self.gradients.watch_write(part)
        # The slice is kept no longer than the tensor itself.
        elif part is not None and self.memory.values[entry] is tensor:
            self.slices.append(part._replace(is_base_known=self.entry_of(tensor._base) is not None))
        return part is not None

    def _note_writes(self, first: int, written: Sequence[Tensor]) -> None:
        """Records the writer of each written tensor: its entry, or `first` if it is no result."""
        for tensor in written:
            entry = self.entry_of(tensor)
            entry = first if entry is None or entry < first else entry
            self.memory.after_write(entry, [tensor])
            if self.gradients is not None:
                self.gradients.views.note_write(entry, storage_of(tensor), region_of(tensor))

    # -- arguments

    def watch_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Hooks the arguments that are views, whose autograd node may have changed."""
        assert self.gradients is not None
        for _, tensor in plain_tensors((args, kwargs)):
            if tensor.requires_grad and tensor._is_view():
                entry = self.entry_of(tensor)
                if entry is not None and entry >= 0:
                    self.gradients.watch_again(entry, tensor, len(self.rows))

    def keep_args(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Keeps the arguments of the next rows; their tensors are copied before a write."""
        if not self._keeps_args:
            return

        def keep(tensor: Tensor) -> list[Tensor]:
            holder = Kept([tensor])
            self.memory.watch_argument(holder, 0)
            return holder

        self._kept_args = same_with(args, keep), same_with(kwargs or {}, keep)

    def other_params(self, packed: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """By row, the parameters that it reads through entries or objects that hold them; `packed`
        has the parameters of objects, by id.
        """
        found: dict[int, tuple[int, ...]] = {}
        for number, row in enumerate(self.rows if packed or self.param_entries else ()):
            entries = [entry for _, entry in located(row.references)]
            own = [self.param_entries[entry] for entry in entries if entry in self.param_entries]
            for arg in row.args:
                own += packed.get(id(arg), ()) if isinstance(arg, torch.ScriptObject) else ()
            if own:
                found[number] = tuple(dict.fromkeys(own))
        return found

    # -- completion

    def finish_entries(self, entries: Sequence[int]) -> None:
        """Saves the values of finished asynchronous operations."""
        self.complete()
        for entry, tensor in self.memory.finish(entries):
            if self.observer is not None:
                self.observer.add(entry, tensor)

    def drop_entries(self, entries: Sequence[int]) -> None:
        """Marks the values of these entries as unavailable."""
        self.memory.drop(entries)

    def finish(self, outliving: Sequence[Tensor], wanted: Container[int] | None = None) -> None:
        """Ends the pass: discards arguments and unwanted values, copies values shared with
        `outliving`.
        """
        self.memory.cut(len(self.rows))
        del self.rows[len(self.memory.values) :]
        self.complete()
        self.memory.settle(outliving, wanted)
        for holder in self.saved_args:
            self.saved_args[holder] = unwrap(self.saved_args[holder])
        self._entry_of_id.clear()
        self._held.clear()


def _node_name(tensor: Tensor) -> str | None:
    try:
        node = tensor.grad_fn
    except RuntimeError:  # one of several views of one call, whose base was written since
        return None
    return None if node is None else type(node).__name__


def _changed_entry(call: MadeCall) -> int | None:
    """The entry of the tensor that an in-place operation modifies."""
    if isinstance(call.references, dict):
        return call.references.get(0, call.references.get(call.operation.name_of(0)))
    return call.references[0]


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)
