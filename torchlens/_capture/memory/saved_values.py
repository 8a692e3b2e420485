"""Saved values, and the operation that last wrote each storage.

A saved value is the tensor itself. Before an operation writes to memory, the saved values in that
memory are replaced by copies; after the pass, so are those that share memory with tensors that the
user holds. Each write is recorded with its region, so that the graph can find which entry a later
read depends on.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from sys import getrefcount
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchlens._capture.memory.aliases import Aliases
from torchlens._recording.origin import version_of
from torchlens._recording.recording import Write
from torchlens._recording.regions import Region, is_plain_memory, region_of, storage_of
from torchlens._recording.stored import StoredValue
from torchlens._recording.wrappers import copy_of

# A value to copy before its memory is written: an entry, or a list and an index.
Held = int | tuple[list[Any], int]


def _is_alone(tensor: torch.Tensor) -> bool:
    """True if `tensor` is plain, needs no gradient and shares its memory with no other tensor."""
    if type(tensor) is not torch.Tensor or tensor.requires_grad:
        return False
    try:
        return _num_owners(tensor) == _ALONE
    except (NotImplementedError, RuntimeError):  # no storage of its own
        return False


def _num_owners(tensor: torch.Tensor) -> int:
    """The reference count of the tensor's storage.

    Depending on the version of torch, the count includes Python's storage object.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _num_holders(values: list[Any], index: int) -> int:
    """Python's count of references to one of the values."""
    return getrefcount(values[index])


_ALONE = _num_owners(torch.empty(1, device="cpu"))
_HELD_ONCE = _num_holders([object()], 0)


class Memory:
    """The saved values of a pass and the writes that happened in it, by entry number."""

    def __init__(
        self, transform: Callable[[torch.Tensor], Any] | None = None, may_save_late: bool = False
    ) -> None:
        self.values: list[Any] = []
        self.versions: list[int] = []
        self.storages: list[int] = []
        # Weak references to the tensors of entries whose saved value is another object.
        self.origins: dict[int, weakref.ref[torch.Tensor]] = {}
        # Weak references to other tensors that `entry_of` maps to the entry.
        self._stand_ins: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        # Entries whose memory an asynchronous operation is writing: their tensor, and the entry of
        # that operation.
        self.unfinished: dict[int, tuple[torch.Tensor, int]] = {}
        self.regions: dict[int, Region] = {}
        self.writes: list[Write] = []
        # True once the tensor of an entry may die during the pass, so that its id may be reused.
        self.may_die = transform is not None
        # Tensors that are no longer saved values, kept alive so that their ids stay unique.
        self._replaced: list[torch.Tensor] = []
        # Entries whose saved value is a copy.
        self.copies: set[int] = set()
        self._transform = transform
        # True if `save` may save a value that was not saved when its entry was made.
        self._may_save_late = may_save_late
        # By storage in storages that were written (`_aliases`), and values not indexed yet.
        self._aliases: dict[int, Aliases] = {}
        self._waiting: dict[int, list[Held]] = {}
        self._num_indexed = 0
        # By storage: the last entry that wrote there, the tensor it wrote to, and the version after
        # that.
        self.last_writes: dict[int, tuple[int, weakref.ref[torch.Tensor], int]] = {}
        # Storages whose memory the model exposed (to numpy, say), so that it may write unseen.
        self.exposed: set[int] = set()

    def add(self, tensor: torch.Tensor, is_saved: bool, is_finished: bool = True) -> None:
        """Adds the next entry's tensor; if not `is_finished`, `finish` saves its value later."""
        storage = storage_of(tensor)
        self.storages.append(storage)
        if storage in self.last_writes:
            self.regions[len(self.storages) - 1] = region_of(tensor)
        is_plain = is_saved and self._transform is None and storage not in self.exposed
        if is_plain and is_finished and not self.unfinished:
            self.values.append(tensor)
            self.versions.append(version_of(tensor))
            return
        entry = len(self.storages) - 1
        self.values.append(None)
        self.versions.append(-1)
        begun_by = self.writers_of(tensor)[-1:] if is_finished else [entry]
        if is_saved and begun_by:
            self.values[entry] = tensor
            self.unfinished[entry] = (tensor, begun_by[0])
        else:
            self._take(entry, tensor, is_saved)

    def _take(self, entry: int, tensor: torch.Tensor, is_saved: bool) -> None:
        is_exposed = self.storages[entry] in self.exposed
        value: Any = tensor if is_saved else None
        if is_saved and is_exposed:
            (value,) = copies_of([tensor])
            self.copies.add(entry)
        if is_saved and self._transform is not None:
            value = self._transform(value)
        self.values[entry] = value
        self.versions[entry] = version_of(value) if isinstance(value, torch.Tensor) else -1
        if value is not tensor:
            self.origins[entry] = weakref.ref(tensor)
            self.may_die = True

    def writers_of(self, tensor: torch.Tensor) -> list[int]:
        """The entries of asynchronous operations that write to memory of `tensor`."""
        if not self.unfinished:
            return []
        storage, region = storage_of(tensor), region_of(tensor)
        return [
            owner
            for entry, (begun, owner) in self.unfinished.items()
            if self.storages[entry] == storage and _may_overlap(region_of(begun), region)
        ]

    def finish(self, entries: Iterable[int]) -> list[tuple[int, torch.Tensor]]:
        """Saves the values of finished asynchronous operations; returns the entries and tensors."""
        begun = set(entries)
        found = [
            (entry, tensor) for entry, (tensor, owner) in self.unfinished.items() if owner in begun
        ]
        for entry, tensor in found:
            del self.unfinished[entry]
            self._take(entry, tensor, is_saved=True)
        for storage in {self.storages[entry] for entry in begun} & self.last_writes.keys():
            last, reference, version = self.last_writes[storage]
            target = reference()  # the version may count the write only now
            self.last_writes[storage] = (
                last,
                reference,
                version if target is None else version_of(target),
            )
        return found

    def drop(self, entries: Iterable[int]) -> None:
        """Marks the values of these entries, and of views of them, as unavailable."""
        begun = set(entries)
        for entry in [entry for entry, (_, owner) in self.unfinished.items() if owner in begun]:
            tensor, _ = self.unfinished.pop(entry)
            self._take(entry, tensor, is_saved=False)

    def stand_in(self, entry: int, tensor: torch.Tensor) -> None:
        """Registers `tensor` as another tensor of the entry."""
        self._stand_ins.setdefault(entry, []).append(weakref.ref(tensor))
        if not self.may_die:  # entries are found by `id` alone, so ids must stay unique
            self._replaced.append(tensor)

    def save(self, entry: int, tensor: torch.Tensor, is_changed: bool = False) -> None:
        """Saves the value of an entry that was not saved when it was made, or that `is_changed`."""
        if self.values[entry] is None or is_changed:
            value = tensor if self._transform is None else self._transform(tensor)
            self.values[entry] = value
            self.versions[entry] = version_of(value) if isinstance(value, torch.Tensor) else -1
            if (
                entry < self._num_indexed and not self._may_save_late
            ):  # so that the next write to its memory copies it
                self._waiting.setdefault(self.storages[entry], []).append(entry)

    def let_go(self, stored: Mapping[int, StoredValue | None]) -> None:
        """Replaces the saved values of entries by stored ones, or by None.

        Their tensors may die, and their ids be reused.
        """
        self.may_die = True
        for entry, value in stored.items():
            tensor = self.values[entry]
            self.origins.setdefault(entry, weakref.ref(tensor))
            self.values[entry] = value
            self.versions[entry] = -1

    def add_unsaved(self, entry: int, tensor: torch.Tensor, storage: int) -> None:
        """As `add`, for an operation's tensor that is not saved and lies in `storage`."""
        self.storages.append(storage)
        self.values.append(None)
        self.versions.append(-1)
        self.origins[entry] = weakref.ref(tensor)
        if storage in self.last_writes:
            self.regions[entry] = region_of(tensor)

    def may_overwrite(self, entry: int, tensor: torch.Tensor) -> bool:
        """True if the tensor of an unsaved entry can be overwritten without a copy.

        The entry then gets a storage number of its own, as if it had been saved and copied.
        """
        if self.values[entry] is not None or not _is_alone(tensor):
            return False
        self.storages[entry] = 2 * entry + 1  # no address is odd
        return True

    def keep_copy(self, entry: int, tensor: torch.Tensor) -> bool:
        """Replaces a saved tensor that is about to be written by a copy; returns whether it did.

        Only for a tensor that shares its memory with no other tensor.
        """
        if self.values[entry] is not tensor or not _is_alone(tensor):
            return False
        copy = tensor.clone()
        if type(copy) is not torch.Tensor:  # a FakeTensorMode made a copy without values
            return False
        self._replaced.append(tensor)
        self.values[entry] = copy
        self.versions[entry] = version_of(copy)
        self.copies.add(entry)
        if entry < len(self.storages):
            self.storages[entry] = storage_of(copy)
        return True

    def is_written_since(self, entry: int) -> bool:
        """True if the storage of an entry was written after the entry was made."""
        last = self.last_writes.get(self.storages[entry])
        return last is not None and last[0] > entry

    def is_alive(self, entry: int, tensor: torch.Tensor) -> bool:
        """True if `tensor` is a live tensor of `entry`, not a new one with the same id."""
        origin = self.origins.get(entry)
        if origin is None or origin() is tensor:
            return True
        return any(stand_in() is tensor for stand_in in self._stand_ins.get(entry, ()))

    def exchange(self, first: torch.Tensor, second: torch.Tensor, swap: Callable[[], None]) -> None:
        """Calls `swap`, which exchanges what two tensor objects are.

        torch refuses that while there are weak references to them.
        """
        pair = {id(first): (first, second), id(second): (second, first)}  # tensor, the other one
        origins = {n: pair[id(t)] for n, ref in self.origins.items() if id(t := ref()) in pair}
        writes = {
            storage: (entry, pair[id(target)], version)
            for storage, (entry, ref, version) in self.last_writes.items()
            if id(target := ref()) in pair
        }
        for number in origins:
            del self.origins[number]
        for storage in writes:
            del self.last_writes[storage]
        is_swapped = False
        try:
            swap()
            is_swapped = True
        finally:
            for number, both in origins.items():
                self.origins[number] = weakref.ref(both[is_swapped])
            for storage, (entry, both, version) in writes.items():
                self.last_writes[storage] = (entry, weakref.ref(both[is_swapped]), version)
        self.values[:] = [
            pair[id(value)][1] if id(value) in pair else value for value in self.values
        ]

    def watch_argument(self, holder: list[Any], index: int) -> None:
        """Registers `holder[index]` to be copied before its memory is written."""
        self._waiting.setdefault(storage_of(holder[index]), []).append((holder, index))

    def before_write(self, targets: Sequence[torch.Tensor]) -> None:
        """Copies the saved values that overlap `targets`, before a write to `targets`.

        Also before their memory is freed.
        """
        self._index()
        for target in targets:
            storage = storage_of(target)
            written = region_of(target)
            aliases = self._place(storage)
            taken = [
                held
                for held in aliases.take(written)
                if isinstance(value := self._value_of(held), torch.Tensor)
                and (value is not target or not self._may_come_late(held))
            ]
            if self.unfinished:  # unfinished values are taken later, from their own memory
                for held in [
                    held for held in taken if isinstance(held, int) and held in self.unfinished
                ]:
                    taken.remove(held)
                    aliases.add(held, region_of(self.values[held]))
            if taken:
                self._replace_by_copies(taken)

    def expose(self, tensor: torch.Tensor) -> None:
        """Marks the tensor's storage as exposed: from now on, values in it are saved as copies."""
        self.before_write([tensor])
        self.exposed.add(storage_of(tensor))
        self.may_die = True

    def after_write(self, entry: int, targets: Sequence[torch.Tensor]) -> None:
        """Records that `entry` wrote to `targets`."""
        for target in targets:
            storage = storage_of(target)
            self.writes.append(Write(entry, storage, region_of(target)))
            self.last_writes[storage] = (entry, weakref.ref(target), version_of(target))

    def meet(self, entry: int, tensor: torch.Tensor) -> None:
        """Records that the tensor of `entry` existed before the first operation."""
        if self.writes:  # possibly to this memory
            self.regions[entry] = region_of(tensor)

    def cut(self, num_entries: int) -> None:
        """Cuts all lists to the same length, since Ctrl-C may interrupt between two appends."""
        num_entries = min(num_entries, len(self.values), len(self.versions))
        for column in (self.storages, self.values, self.versions):
            del column[num_entries:]

    def settle(
        self, outliving: Iterable[torch.Tensor], wanted: Container[int] | None = None
    ) -> None:
        """Copies the saved values that share memory with `outliving` tensors. May be called again.

        Discards the values of entries that are not in `wanted`.
        """
        if wanted is not None:
            for entry in range(len(self.values)):
                if entry not in wanted:
                    self.values[entry], self.versions[entry] = None, -1
        storages = set(map(storage_of, outliving))
        storages |= self._held_by_others(storages)
        shared: list[Held] = []
        looked_at = storages.union(self.last_writes)
        for entry, storage in enumerate(self.storages):
            if storage not in looked_at:
                continue
            if storage in self.last_writes:
                self._note_region(entry)
            if storage in storages:
                value = self.values[entry]
                if isinstance(value, torch.Tensor) and (
                    entry not in self.origins or storage_of(value) in storages
                ):
                    shared.append(entry)
        for storage in self.last_writes:
            self._renew_versions(storage)
        for storage in storages:
            for held in (*self._waiting.get(storage, ()), *self._aliases.get(storage, ())):
                # A parameter stays itself: `saved_arguments` checks that it is unchanged.
                if not isinstance(held, int) and not _is_parameter(held[0][held[1]]):
                    shared.append(held)
        self._replace_by_copies(shared)
        self._replaced.clear()

    def _held_by_others(self, known: Container[int]) -> set[int]:
        """The storages of saved values without a version (of inference mode) that others hold, too.

        A later write to them would not be noticed. Those that are `known` are left out.
        """
        found = set()
        uses = self._without_version()  # no value stays in a variable: it would count as a holder
        tensors = Counter(self.storages[entries[0]] for entries in uses.values())
        for entry, *more in uses.values():
            storage = self.storages[entry]
            num_holders = _num_holders(self.values, entry) - _HELD_ONCE - len(more)
            num_owners = _num_owners(self.values[entry]) - _ALONE + 1 if storage > 0 else 1
            if storage not in known and (num_holders or num_owners > tensors[storage]):
                found.add(storage)
        return found

    def _without_version(self) -> dict[int, list[int]]:
        """By the id of a saved value of inference mode, its entries."""
        uses: dict[int, list[int]] = {}
        for entry in [entry for entry, version in enumerate(self.versions) if version < 0]:
            value = self.values[entry]
            if type(value) is not torch.Tensor or not value.is_inference():
                continue
            if storage_of(value) == self.storages[entry]:
                uses.setdefault(id(value), []).append(entry)
        return uses

    def note_outside(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """The storages of tensors that are no entries, by number; {} if nothing was written.

        Records the regions of those whose storage was written.
        """
        written = {write.storage for write in self.writes}
        storages = {number: storage_of(tensor) for number, tensor in tensors.items() if written}
        for number, storage in storages.items():
            if storage in written:
                self.regions[number] = region_of(tensors[number])
        return storages

    def _place(self, storage: int) -> Aliases:
        """The indexed values of a storage, after indexing those that are waiting."""
        aliases = self._aliases.get(storage)
        if aliases is None:
            aliases = self._aliases[storage] = Aliases()
        for held in self._waiting.pop(storage, ()):
            region = self._note_region(held) if isinstance(held, int) else None
            value = self._value_of(held)
            if isinstance(value, torch.Tensor) and storage_of(value) == storage:
                aliases.add(held, region or region_of(value))
        return aliases

    def _note_region(self, entry: int) -> Region | None:
        """Records an entry's region; returns it if the saved value is the entry's own tensor."""
        origin = self.origins.get(entry)
        tensor = self.values[entry] if origin is None else origin()
        if entry not in self.regions and tensor is not None:
            self.regions[entry] = region_of(tensor)
        return self.regions.get(entry) if origin is None else None

    def _replace_by_copies(self, taken: Sequence[Held]) -> None:
        if not taken:
            return
        values = {id(value): value for value in map(self._value_of, taken)}
        copies = dict(zip(values, copies_of(list(values.values())), strict=True))
        for held in taken:
            value = self._value_of(held)
            copy = copies[id(value)]
            if not isinstance(held, int):
                holder, index = held
                holder[index] = copy
                continue
            if held not in self.origins:
                self.origins[held] = weakref.ref(value)
                if not self.may_die:  # as in `stand_in`
                    self._replaced.append(value)
            self.copies.add(held)
            self.values[held] = copy
            self.versions[held] = version_of(copy)

    def _renew_versions(self, storage: int) -> None:
        """Renews the versions of values that the last recorded write to their storage left
        unchanged.
        """
        _, reference, version = self.last_writes[storage]
        target = reference()
        # Otherwise an unrecorded write came later.
        if target is None or version_of(target) == version:
            for held in self._aliases.get(storage, ()):
                if isinstance(held, int) and isinstance(self.values[held], torch.Tensor):
                    self.versions[held] = version_of(self.values[held])

    def _value_of(self, held: Held) -> Any:
        if self._may_come_late(held):
            return self.origins[held]()
        if isinstance(held, int):
            return self.values[held]
        holder, index = held
        return holder[index]

    def _may_come_late(self, held: Held) -> TypeGuard[int]:
        """True if the value of an entry is not saved, but may still be."""
        return (
            self._may_save_late
            and isinstance(held, int)
            and self.values[held] is None
            and held in self.origins
        )

    def _index(self) -> None:
        """Indexes new entries by storage; called only when something is written."""
        first = self._num_indexed
        for entry in range(first, len(self.storages)):
            self._waiting.setdefault(self.storages[entry], []).append(entry)
        self._num_indexed = len(self.storages)


def _is_parameter(argument: Any) -> bool:
    return type(argument) is torch.nn.Parameter


def _may_overlap(a: Region, b: Region) -> bool:
    return a.start < b.end and b.start < a.end


# -- copies. Tensors that share memory share one copy of it, if that is less to copy.

_clone_all = getattr(torch, "_foreach_clone", None)  # not in every version of torch
_ALIGNMENT = 16  # bytes; no element is larger
# Below this total size, copies do not share memory.
_SMALL = 1 << 16  # bytes


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in the autograd graph of the tensors; copies of real tensors are never fake."""
    # The writing code may run under no_grad, like the forward of a custom function.
    with unset_fake_temporarily(), torch.enable_grad():
        return _copies_of(tensors)


def _copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Other tensors may have symbolic sizes, which must not be compared.
    simple = [tensor for tensor in tensors if type(tensor) is torch.Tensor and not tensor.is_nested]
    if sum(tensor.numel() * tensor.element_size() for tensor in simple) < _SMALL:
        return _copies_apart(tensors)
    copies: dict[int, torch.Tensor] = {}
    together: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if is_plain_memory(tensor):
            together.setdefault(storage_of(tensor), []).append(tensor)
    for group in together.values():
        regions = list(map(region_of, group))
        start, end = min(region.start for region in regions), max(region.end for region in regions)
        start -= start % _ALIGNMENT
        if (
            sum(tensor.numel() * tensor.element_size() for tensor in group)
            > end - start + _ALIGNMENT
        ):
            memory = _bytes_between(group[0], start, end)
            copies.update({id(tensor): _same_view(tensor, memory, start) for tensor in group})
    alone = [tensor for tensor in tensors if id(tensor) not in copies]
    copies.update(zip(map(id, alone), _copies_apart(alone), strict=True))
    return [copies[id(tensor)] for tensor in tensors]


def _bytes_between(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """A copy of some bytes of the tensor's storage."""
    memory = torch.empty(
        -(-(end - start) // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=tensor.device
    )
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    source.set_(tensor.untyped_storage(), start, (end - start,), (1,))
    memory[: end - start].copy_(source)
    return memory


def _same_view(tensor: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    """A tensor in `memory`, laid out like `tensor` in its own memory from byte `start` on."""
    offset = int(tensor.storage_offset()) - start // tensor.element_size()
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), offset)


def _copies_apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) == 1:  # takes less time than a list of one
        return [_copy_apart(tensors[0])]
    if _clone_all is not None and all(
        type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in tensors
    ):
        try:
            return list(_clone_all(list(tensors)))
        except (NotImplementedError, RuntimeError):
            # A kind of tensor that can only be cloned alone.
            pass
    return list(map(_copy_apart, tensors))


def _copy_apart(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return copy_of(tensor)
    except RuntimeError:  # one of several views of one call, whose base was written since
        return tensor.detach().clone()
