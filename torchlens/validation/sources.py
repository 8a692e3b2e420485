"""Whose result each tensor is, element by element, at each moment of the pass: worked out from what the witness saw.

Nothing here asks the log. A tensor is told by what it is for Python (`is`), memory by its address. Whoever is given a
tensor reads, of each element, the last operation that wrote it since the tensor was handed out; and the operation that
handed it out, if an element is still as that one left it, or if the tensor is a view, being how the reader got there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from torchlens.validation.snapshots import Region, Snapshot, frozen_tensors
from torchlens.validation.witness import Call, Evidence

__all__ = ["Sources"]

Tensor = torch.Tensor
_NOBODY = torch.iinfo(torch.int32).min
# The log does not look at the single elements of larger regions: there it may name a writer too many.
_MAX_ELEMENTS = 1 << 22


@dataclass(slots=True)
class _Memory:
    """The last row to have written each place of one storage; places are `unit` bytes wide, the first at `start`."""

    unit: int
    start: int
    owners: Tensor

    def view(self, region: Region) -> Tensor:
        """The owners of the places at which the elements of a region begin."""
        strides = [stride // self.unit for stride in region.strides]
        offset = (region.offset - self.start) // self.unit
        # Each element is all the places it takes up.
        return self.owners.as_strided((*region.shape, region.item_bytes // self.unit), (*strides, 1), offset)


class Sources:
    """Answers, call after call in the order they were made, who made what a call was given."""

    def __init__(self, evidence: Evidence) -> None:
        self._tensors = evidence.tensors
        # By identity, the rows (or -1 - k) that handed the tensor out, in order.
        self._rows: dict[int, list[int]] = {}
        self._by_storage: dict[int, list[int]] = {}
        for number, snapshot in sorted(evidence.tensors.items()):
            for identity in (snapshot.identity, *snapshot.inner):
                self._rows.setdefault(identity, []).append(number)
            self._by_storage.setdefault(snapshot.storage, []).append(number)
        self._made = {number for call in evidence.calls for number in range(call.first, call.last)}
        self._views: set[int] = set()
        self._memories = _written_memories(evidence)
        self._writers: set[tuple[int, int]] = set()
        self._has_large_writes: set[int] = set()

    def rows_of(self, argument: Snapshot, time: int) -> list[int]:
        """The rows made before row `time` whose result is this very tensor; -1 - k for what came from outside."""
        return [number for number in self._rows.get(argument.identity, ()) if number < time]

    def looked_at(self, argument: Snapshot, time: int) -> list[int]:
        """The rows before row `time` that look at the same memory."""
        if argument.region is None:
            return []
        return [number for number in self._by_storage.get(argument.storage, ()) if number < time]

    def read(self, argument: Snapshot, row: int) -> tuple[set[int], bool]:
        """Who is read by reading the argument as row `row` handed it out, and whether more may be named.

        Rows from outside the log are not among them.
        """
        own = {row} if row >= 0 else set()
        memory, region = self._memories.get(argument.storage), argument.region
        if memory is None or region is None:
            return own, False
        owners = memory.view(region)
        # What no call made was there before the pass, whenever the log took it up.
        is_later = owners > (row if row in self._made else _NOBODY)
        if not bool(is_later.any()):
            return own, False
        writers = set(owners[is_later].unique().tolist()) - {_NOBODY}
        is_covered = bool(is_later.all())
        may_be_more = argument.storage in self._has_large_writes or argument.value.numel() > _MAX_ELEMENTS
        return (writers if is_covered and row not in self._views else own | writers), may_be_more

    def is_view(self, row: int) -> bool:
        """Whether the row's result looks at memory that was there before it."""
        return row in self._views

    def after(self, call: Call, arguments: Iterable[Snapshot]) -> None:
        """The call was made: takes note of what it wrote, and of which of its results are views."""
        for snapshot in call.written:
            writer = self._writer_of(call, snapshot)
            self._writers.add((writer, snapshot.storage))
            memory = self._memories.get(snapshot.storage)
            if memory is not None and snapshot.region is not None:
                if snapshot.value.numel() > _MAX_ELEMENTS:
                    self._has_large_writes.add(snapshot.storage)
                memory.view(_without_repeats(snapshot.region)).fill_(writer)
        storages = {argument.storage for argument in arguments}
        for number in range(call.first, call.last):
            storage = self._tensors[number].storage
            if storage in storages and (number, storage) not in self._writers:
                self._views.add(number)

    def _writer_of(self, call: Call, written: Snapshot) -> int:
        """The row of a tensor that was written: the call's first where it is no result."""
        own = [n for n in range(call.first, call.last) if self._tensors[n].identity == written.identity]
        return own[-1] if own else call.first


def _written_memories(evidence: Evidence) -> dict[int, _Memory]:
    """Memory for each storage that is ever written, as wide as what is ever seen of it."""
    written = {snapshot.storage for call in evidence.calls for snapshot in call.written if snapshot.region is not None}
    if not written:
        return {}
    regions: dict[int, list[Region]] = {storage: [] for storage in written}
    for snapshot in _all_snapshots(evidence):
        if snapshot.storage in regions and snapshot.region is not None:
            regions[snapshot.storage].append(snapshot.region)
    memories = {}
    for storage, own in regions.items():
        unit = min(region.item_bytes for region in own)
        start = min(region.offset for region in own)
        end = max(_end(region) for region in own)
        memories[storage] = _Memory(unit, start, torch.full((max(end - start, 0) // unit + 1,), _NOBODY, dtype=torch.int32))
    return memories


def _all_snapshots(evidence: Evidence) -> Iterable[Snapshot]:
    yield from evidence.tensors.values()
    for call in evidence.calls:
        yield from call.written
        for frozen in (call.args, call.kwargs):
            yield from (snapshot for _, snapshot in frozen_tensors(frozen))


def _end(region: Region) -> int:
    if 0 in region.shape:
        return region.offset
    return region.offset + sum((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True)) + region.item_bytes


def _without_repeats(region: Region) -> Region:
    """The same places, each once: torch does not write to a tensor that looks at one place several times."""
    shape = tuple(1 if stride == 0 else size for size, stride in zip(region.shape, region.strides, strict=True))
    return region._replace(shape=(0,) * len(shape) if 0 in region.shape else shape)
