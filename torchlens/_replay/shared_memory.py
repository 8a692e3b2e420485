"""Which rows of a recording share memory that the model writes to.

The saved tensor of a row in such memory holds the value at its own time; a later call reads what
was written since. Calls on such memory run again together, on memory of their own.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

from torchlens._recording.operations import BUFFER
from torchlens._recording.recording import Recording, located


class SharedMemory:
    """The rows of a recording in written memory."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._times: dict[int, list[int]] = {}
        self._written: dict[int, set[int]] = {}
        for entry, storage, _ in recording.writes:
            self._times.setdefault(storage, []).append(entry)
            self._written.setdefault(entry, set()).add(storage)
        for times in self._times.values():
            times.sort()

    def is_stale(self, reference: int, reader: int) -> bool:
        """True if the memory of an argument was written between its row and the row `reader`."""
        times = self._times.get(self._storage(reference))
        if not times:
            return False
        is_early = reference < 0 or self._recording.rows[reference].operation is BUFFER
        return bisect_left(times, reader) > bisect_left(times, 0 if is_early else reference + 1)

    def is_written(self, number: int) -> bool:
        """True if the memory of a row is ever written."""
        return bool(self._times) and self._storage(number) in self._times

    def written_by(self, numbers: Sequence[int], references: Sequence[int]) -> list[int]:
        """Those of the arguments whose memory a call writes to, by the rows of its results."""
        storages = {each for number in numbers for each in self._written.get(number, ())}
        return [own for own in references if self._storage(own) in storages]

    def others(self, number: int) -> list[int]:
        """The rows that share memory with a row, itself among them, in order."""
        return self._groups.get(number, [number])

    def is_owner(self, number: int) -> bool:
        """True if no earlier row shares its memory."""
        return self.others(number)[0] == number

    def _storage(self, reference: int) -> int:
        if reference >= 0:
            return self._recording.storages[reference]
        return self._recording.outside_storages.get(reference, 0)

    @cached_property
    def _groups(self) -> dict[int, list[int]]:
        """The rows that lead to each other by arguments in the same memory. (An address alone is
        not enough: memory that was freed is used again.)
        """
        found: dict[int, list[int]] = {}
        storages = self._recording.storages
        for number, row in enumerate(self._recording.rows):
            if storages[number] not in self._times:
                continue
            group: list[int] = [number]
            for _, reference in located(row.references):
                other = found.get(reference)
                if other is not None and storages[reference] == storages[number]:
                    group = _joined(other, group, found)
            found[number] = group
        for group in {id(group): group for group in found.values()}.values():
            group.sort()
        return found


def _joined(first: list[int], second: list[int], found: dict[int, list[int]]) -> list[int]:
    """Two groups as one: the members of the smaller join the larger."""
    if first is second:
        return first
    large, small = (first, second) if len(first) >= len(second) else (second, first)
    large.extend(small)
    found.update(dict.fromkeys(small, large))
    return large
