"""Finds which operation last wrote each part of a storage, at given times.

A write stores its number in the cells of its region, and a reader reads the numbers in the cells of
its own region. So the cost of a write does not depend on the size of the tensor, but on the number
of cells into which the writes and readers divide it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from torchlens._recording.cells import Cells, cells_of
from torchlens._recording.recording import Write
from torchlens._recording.regions import Region

# From this many cells on, counting is faster than sorting.
_MANY = 1 << 12


class Question(NamedTuple):
    """Asks which writes after entry `after` and before entry `before` were the last to some part of
    `region`.
    """

    region: Region
    after: int
    before: int


class Answer(NamedTuple):
    """The entries of the last writes, the earliest first, and whether they wrote all of the region.
    If `is_exact` is False, an entry too many may be among them, or all of the region may be written
    although the answer says no.
    """

    writers: tuple[int, ...]
    is_covered: bool
    is_exact: bool


def last_writers(writes: Sequence[Write], questions: Iterable[Question]) -> dict[Question, Answer]:
    """Answers questions about one storage; `writes` to it are in the order of their entries."""
    times = [write.entry for write in writes]
    found: dict[Question, Answer] = {}
    for group in _independent(questions):
        first = bisect_right(times, group[0].after)
        last = bisect_left(times, max(question.before for question in group))
        found.update(_answers(writes[first:last], times[first:last], group))
    return found


def _independent(questions: Iterable[Question]) -> list[list[Question]]:
    """The questions in groups that have no write in common. This also separates two storages with
    one number, which torch reuses after the first is freed.
    """
    groups: list[list[Question]] = []
    end = 0
    for question in sorted(set(questions), key=lambda question: question.after):
        if not groups or question.after >= end:
            groups.append([])
            end = question.before
        groups[-1].append(question)
        end = max(end, question.before)
    return groups


def _answers(
    writes: Sequence[Write], times: list[int], questions: list[Question]
) -> dict[Question, Answer]:
    regions = dict.fromkeys(
        [*(write.region for write in writes), *(question.region for question in questions)]
    )
    painting = _Painting(cells_of(list(regions)), len(writes))
    found = {}
    num_done = 0
    for question in sorted(questions, key=lambda question: question.before):
        num_before = bisect_left(times, question.before)
        for number in range(num_done, num_before):
            painting.write(number, writes[number].region)
        num_done = max(num_done, num_before)
        numbers, is_covered, is_exact = painting.read(
            question.region, bisect_right(times, question.after)
        )
        writers = tuple(dict.fromkeys([times[number] for number in numbers]))
        found[question] = Answer(writers, is_covered, is_exact)
    return found


class _Painting:
    """The number of the last write in every cell. Writes are numbered from 0; in the array from 1,
    and 0 means no write.
    """

    def __init__(self, cells: Cells, num_writes: int) -> None:
        self._cells = cells
        self._last = np.zeros(cells.shape, dtype=np.int32)
        # How many cells have each number.
        self._counts = np.zeros(num_writes + 1, dtype=np.int64)
        self._counts[0] = self._last.size
        # Writes to regions that are not exact.
        self._hazy: list[tuple[int, Region]] = []

    def write(self, number: int, region: Region) -> None:
        if region in self._cells.inexact:
            self._hazy.append((number, region))
            return
        if self._hazy:
            self._hazy = [hazy for hazy in self._hazy if not region.covers(hazy[1])]
        last, counts = self._last, self._counts
        for part in self._cells.parts[region]:
            before = last[part]
            if before.size == 1:
                counts[before] -= 1
            elif before.size > max(_MANY, len(counts)):
                counts -= np.bincount(before.reshape(-1), minlength=len(counts))
            else:
                numbers, amounts = np.unique(before, return_counts=True)
                counts[numbers] -= amounts
            counts[number + 1] += before.size
            last[part] = number + 1

    def read(self, region: Region, first: int) -> tuple[list[int], bool, bool]:
        """The last writes from number `first` on in a region, whether they cover all of it, and
        whether that is exact.
        """
        found: set[int] = set()
        is_covered = True
        for part in self._cells.parts[region]:
            cells = self._last[part]
            if cells.size == self._last.size:
                numbers = np.flatnonzero(self._counts)
            elif cells.size > max(_MANY, len(self._counts)):
                numbers = np.flatnonzero(
                    np.bincount(cells.reshape(-1), minlength=len(self._counts))
                )
            else:
                numbers = np.unique(cells)
            recent = numbers[numbers > first]
            is_covered = is_covered and len(recent) == len(numbers)
            found.update((recent - 1).tolist())
        is_exact = region not in self._cells.inexact
        for number, written in self._hazy:
            if number >= first and written.start < region.end and region.start < written.end:
                found.add(number)
                is_exact = False
        return sorted(found), is_covered and bool(self._cells.parts[region]), is_exact
