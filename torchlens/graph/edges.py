"""Who reads whose result.

An operation that is given a tensor reads the entry that made it, unless the memory was written since: then it reads the
writers, each byte's last one. An entry that only looks at memory (a view) is read in any case: it is how the reader got
there.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from torchlens.capture.memory import extent_of
from torchlens.capture.recording import Recording, References, Region, Write

__all__ = ["find_edges", "located"]

# Above this many elements, strided regions are compared by their first and last byte only.
_MAX_ELEMENTS = 1 << 22


def find_edges(recording: Recording) -> tuple[list[tuple[int, ...]], dict[int, list[tuple[Any, int]]]]:
    """For every entry, the entries it reads, in the order of its arguments; one read twice is listed twice.

    Beside it, for the entries that read something else than what they were given, the same with locations.
    """
    parents_of: list[tuple[int, ...]] = []
    located_reads: dict[int, list[tuple[Any, int]]] = {}
    if not recording.writes:
        for row in recording.rows:
            references = row.references
            found = references.values() if isinstance(references, dict) else references
            parents_of.append(tuple([entry for entry in found if entry is not None and entry >= 0]))
        return parents_of, located_reads
    readers = _Readers(recording)
    for entry, row in enumerate(recording.rows):
        given = located(row.references)
        if not readers.may_differ(given):
            parents_of.append(tuple([argument for _, argument in given if argument >= 0]))
            continue
        # All results of one call were read for before the first of them was there.
        time = entry - (row.output_index or 0)
        read = [(location, source) for location, argument in given for source in readers.read(argument, time)]
        if read != given:
            located_reads[entry] = read
        parents_of.append(tuple([source for _, source in read]))
    return parents_of, located_reads


def located(references: References) -> list[tuple[Any, int]]:
    """References as (location, entry) pairs."""
    if isinstance(references, dict):
        return list(references.items())
    return [(position, entry) for position, entry in enumerate(references) if entry is not None]


class _Readers:
    """Answers which entries a reader of an entry reads at a given time, in a recording with writes."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        writes: dict[int, list[Write]] = {}
        for write in recording.writes:
            writes.setdefault(write.storage, []).append(write)
        self.histories = {storage: _WriteHistory(own) for storage, own in writes.items()}
        self.writers = {(write.entry, write.storage) for write in recording.writes}

    def may_differ(self, given: list[tuple[Any, int]]) -> bool:
        """Whether memory that one of the arguments looks at was ever written."""
        return any(self._storage_of(argument) in self.histories for _, argument in given)

    def read(self, entry: int, time: int) -> list[int]:
        """The entries whose result is read by reading `entry` just before entry `time` was made."""
        own = [entry] if entry >= 0 else []
        storage = self._storage_of(entry)
        history = self.histories.get(storage)
        if history is None:
            return own
        # An entry that was never looked at while its memory was written was not written.
        region = self.recording.regions.get(entry)
        candidates = [] if region is None else history.between(entry, time)
        if region is None or not candidates:
            return own
        is_view = entry >= 0 and self._is_view(entry, storage)
        writers, is_covered = _last_writers(region, candidates)
        return writers if is_covered and not is_view else [*own, *writers]

    def _storage_of(self, entry: int) -> int:
        return self.recording.storages[entry] if entry >= 0 else self.recording.outside_storages[-1 - entry]

    def _is_view(self, entry: int, storage: int) -> bool:
        """Whether the entry looks at memory that something before it made."""
        row = self.recording.rows[entry]
        if (entry, storage) in self.writers:
            return False
        return any(storage == self._storage_of(parent) for _, parent in located(row.references))


class _WriteHistory:
    """The writes to one storage. Asked in the order of time, it keeps of each region the last write alone."""

    def __init__(self, writes: list[Write]) -> None:
        self._writes = writes
        self._num_done = 0
        self._last: dict[Region, Write] = {}  # the latest write stands last

    def between(self, after: int, before: int) -> list[Write]:
        """The last writes after entry `after` and before entry `before`, latest first."""
        while self._num_done < len(self._writes) and self._writes[self._num_done].entry < before:
            write = self._writes[self._num_done]
            self._last.pop(write.region, None)
            self._last[write.region] = write
            self._num_done += 1
        return list(takewhile(lambda write: write.entry > after, reversed(self._last.values())))


def _last_writers(region: Region, writes: Sequence[Write]) -> tuple[list[int], bool]:
    """Which of the writes (latest first) are the last ones to some part of `region`, and whether they cover it all.

    The answer has the earliest first.
    """
    writers: list[int] = []
    start, end = extent_of(region)
    remaining: Any = None  # bytes of the region that no later write covers; None while it is all of them
    for write in writes:
        low, high = extent_of(write.region)
        if high <= start or end <= low:
            continue
        if remaining is None and (write.region == region or (_is_dense(write.region) and low <= start and end <= high)):
            return [write.entry, *writers], True
        if max(_num_elements(region), _num_elements(write.region)) > _MAX_ELEMENTS:
            writers.insert(0, write.entry)
            continue
        if remaining is None:
            remaining = _bytes_of(region)
        left = np.setdiff1d(remaining, _bytes_of(write.region))
        if len(left) < len(remaining):
            writers.insert(0, write.entry)
            remaining = left
            if not len(left):
                return writers, True
    return writers, False


def _num_elements(region: Region) -> int:
    return int(np.prod(region.shape, dtype=np.int64))


def _is_dense(region: Region) -> bool:
    """Whether the region has no holes."""
    start, end = extent_of(region)
    return end - start == _num_elements(region) * region.item_bytes


@lru_cache(maxsize=32)
def _bytes_of(region: Region) -> Any:
    """The offsets of all bytes in the region."""
    offsets = np.array([region.offset], dtype=np.int64)
    for size, stride in zip(region.shape, region.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    offsets = (offsets[:, None] * region.item_bytes + np.arange(region.item_bytes, dtype=np.int64)).reshape(-1)
    return np.unique(offsets)
