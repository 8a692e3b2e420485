"""Index of the values in one storage, to find those that a write changes.

Every write queries all values that earlier writes left alone, so a query must be cheap. Most are
decided by where regions start and end. For the others, regions become spans on the axes of a
lattice, which are compared in one vectorised step.
"""

from collections.abc import Iterable, Iterator
from math import gcd
from typing import Any

import numpy as np

from torchlens._recording.cells import Lattice, Places
from torchlens._recording.regions import Region

# Up to this many values are compared one by one.
_FEW = 12
# The lattice is rebuilt at most this many times.
_MOST_LATTICES = 16
# A region of more boxes than this is replaced by the interval from its first to its last byte.
_MOST_BOXES = 8

# On each axis of the lattice: first place, last place, step (0 if they are equal).
_Span = tuple[tuple[int, int, int], ...]
_NOWHERE = (1, 0, 0)


class Aliases:
    """Objects of any type, each with its region."""

    __slots__ = ("_crowd", "_few")

    def __init__(self) -> None:
        self._few: list[tuple[Any, Region]] = []
        self._crowd: _Crowd | None = None

    def __iter__(self) -> Iterator[Any]:
        yield from [thing for thing, _ in self._few]
        if self._crowd is not None:
            yield from [thing for thing in self._crowd.things if thing is not None]

    def add(self, thing: Any, region: Region) -> None:
        """Adds an object other than None."""
        self._few.append((thing, region))

    def take(self, written: Region) -> list[Any]:
        """Removes and returns the objects that a write to `written` changes.

        May return too many, but never too few, if regions are irregular.
        """
        taken, left, unclear = [], [], []
        start, end = written.start, written.end
        is_dense = written.num_bytes >= end - start
        for alias in self._few:
            thing, region = alias
            own_start, own_end = region.start, region.end
            if region == written:
                taken.append(thing)
            elif own_end <= start or end <= own_start:
                left.append(alias)
            elif (is_dense and start <= own_start) or (
                own_start <= start and region.num_bytes >= own_end - own_start
            ):
                taken.append(thing)
            else:
                unclear.append(alias)
        if unclear or len(left) > _FEW:
            if self._crowd is None:
                self._crowd = _Crowd()
            self._crowd.add([*left, *unclear])
            left = []
        self._few = left
        if self._crowd is not None:
            taken += self._crowd.take(written)
        return taken


class _Crowd:
    """Objects that are compared in one vectorised step."""

    def __init__(self) -> None:
        self.things: list[Any] = []  # None once taken
        self._regions: list[Region] = []
        self._num_taken = 0
        self._lattice = Lattice((1,), 0)
        self._num_lattices = 0
        # (strides, item size) of the regions that the lattice supports.
        self._layouts: set[tuple[tuple[int, ...], int]] = set()
        self._spans: dict[Region, _Span] = {}
        # By axis: first, last and step of the first `_num_listed` objects.
        self._table = np.zeros((0, 3, 0), dtype=np.int64)
        self._num_listed = 0
        self._is_stepped = False

    def add(self, aliases: Iterable[tuple[Any, Region]]) -> None:
        for thing, region in aliases:
            self.things.append(thing)
            self._regions.append(region)
            self._learn(region)

    def take(self, written: Region) -> list[Any]:
        """As in Aliases."""
        self._learn(written)
        found = self._compare(self._span_of(written))
        taken = [self.things[number] for number in found]
        for number in found:
            self.things[number] = None
        self._table[0, 0, found] = np.iinfo(np.int64).max  # matches no span
        self._num_taken += len(taken)
        if self._num_taken > len(self.things) // 2:
            self._close_ranks()
        return taken

    def _learn(self, region: Region) -> None:
        """Rebuilds the lattice if it does not support regions with this layout."""
        layout = (region.strides, region.item_bytes)
        if layout in self._layouts:
            return
        self._layouts.add(layout)
        strides = [stride for stride, _ in region.progressions()]
        if self._num_lattices < _MOST_LATTICES and not {*strides, region.item_bytes}.issubset(
            self._lattice.strides
        ):
            self._num_lattices += 1
            self._close_ranks()
            self._lattice = Lattice.of(dict.fromkeys([*self._regions, region]))
            self._spans.clear()
            self._num_listed = 0

    def _span_of(self, region: Region) -> _Span:
        span = self._spans.get(region)
        if span is None:
            boxes = self._lattice.boxes(region, _MOST_BOXES)
            if boxes is None:
                boxes = self._lattice.boxes(region.filled()) or []
            span = tuple(map(_span, *boxes)) if boxes else (_NOWHERE,) * len(self._lattice.strides)
            self._spans[region] = span
        return span

    def _compare(self, span: _Span) -> list[int]:
        """The indices of the objects that intersect a span."""
        self._list()
        num_things = len(self.things)
        meets = np.ones(num_things, dtype=bool)
        for axis, (first, last, step) in enumerate(span):
            firsts, lasts, steps = self._table[axis, :, :num_things]
            meets &= (firsts <= last) & (lasts >= first)
            if step > 1 or self._is_stepped:  # stepped ranges may interleave without a common place
                common = np.maximum(np.gcd(steps, step), 1)
                meets &= (firsts - first) % common == 0
        return np.flatnonzero(meets).tolist()

    def _list(self) -> None:
        """Adds new objects to the table."""
        first, end, num_axes = self._num_listed, len(self.things), len(self._lattice.strides)
        if not first:
            self._is_stepped = False
        if not first or self._table.shape[2] < end:
            grown = np.empty((num_axes, 3, 2 * end), dtype=np.int64)
            grown[:, :, :first] = self._table[:, :, :first] if first else 0
            self._table = grown
        if first < end:
            added = np.array(
                [self._span_of(region) for region in self._regions[first:]], dtype=np.int64
            )
            self._table[:, :, first:end] = added.transpose(1, 2, 0)
            self._is_stepped = self._is_stepped or bool((added[:, :, 2] > 1).any())
            self._num_listed = end

    def _close_ranks(self) -> None:
        """Removes taken objects from the lists."""
        if not self._num_taken:
            return
        kept = [number for number, thing in enumerate(self.things) if thing is not None]
        listed = [number for number in kept if number < self._num_listed]
        self.things = [self.things[number] for number in kept]
        self._regions = [self._regions[number] for number in kept]
        self._table[:, :, : len(listed)] = self._table[:, :, listed]
        self._num_listed = len(listed)
        self._num_taken = 0


def _span(*places: Places) -> tuple[int, int, int]:
    """The smallest span that contains all these places of one axis."""
    if len(places) == 1:
        first, step, count = places[0]
        return first, first + step * (count - 1), step if count > 1 else 0
    spans = [_span(own) for own in places]
    first = min(span[0] for span in spans)
    return (
        first,
        max(span[1] for span in spans),
        gcd(*(n for span in spans for n in (span[0] - first, span[2]))),
    )
