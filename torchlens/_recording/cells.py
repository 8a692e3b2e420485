"""Divides memory into cells: bytes in the same set of regions form one cell, however many.

The cells of a storage are the elements of a small array, and a region is an index into that array.
Regular regions (rows, columns, blocks, every second element) become boxes, at a cost independent of
their size. If some regions are irregular (a diagonal), all are split into runs of bytes. If that
gives too many runs, an irregular region is replaced by the interval from its first to its last
byte, and marked as inexact.

Boxes are boxes of a lattice, which is memory seen as an array with several axes. A byte number is
written in mixed radix, like hours, minutes and seconds: with strides 1, 4 and 40, byte 126 is (2,
1, 3), because 2 + 1 * 4 + 3 * 40 = 126. A row, column, block or slice of a tensor whose strides are
among those of the lattice is then a box: a range with a step on each axis.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from math import gcd, inf, prod
from typing import Any, NamedTuple

import numpy as np

from torchlens._recording.regions import Progression, Region

# Places on one axis: start, step, count.
Places = tuple[int, int, int]
# One `Places` for each axis of the lattice, finest axis first.
Box = tuple[Places, ...]

_MOST_AXES = 12


class Lattice:
    """Converts regions of one storage to boxes. `strides` start with 1; each divides the next."""

    def __init__(self, strides: Iterable[int], origin: int) -> None:
        self.strides = tuple(strides)
        self.origin = origin

    @classmethod
    def of(cls, regions: Iterable[Region]) -> "Lattice":
        """A lattice in which most of these regions need few boxes."""
        regions = list(regions)
        origin = min((region.start for region in regions), default=0)
        return cls(_strides_for(regions), origin)

    def boxes(self, region: Region, most: float = inf) -> list[Box] | None:
        """Boxes whose union is the region; None if it needs more than `most`.

        They may overlap if the elements of the region do.
        """
        if not region.num_elements:
            return []
        found: list[Box] = []
        is_done = self._place(region.start - self.origin, region.progressions(), (), found, most)
        return found if is_done else None

    def _place(
        self, offset: int, sides: list[Progression], box: Box, found: list[Box], most: float
    ) -> bool:
        """Appends the boxes of the region that begins at `offset`; False if there are more than
        `most`.

        The axes in `box` are finished, and `offset` is 0 on them.
        """
        strides = self.strides
        last = len(strides) - 1
        for axis in range(len(box), last + 1):
            stride = strides[axis]
            wider = strides[axis + 1] if axis < last else 0
            own = [side for side in sides if not wider or side[0] % wider]
            place = (offset % wider if wider else offset) // stride
            step, count = 1, 1
            if len(own) > 1:
                return self._spread(offset, sides, min(own, key=_count), box, found, most)
            if own:
                step, count = own[0][0] // stride, own[0][1]
                if wider and place + step * (count - 1) >= wider // stride:
                    if (wider // stride) % step:
                        return self._spread(offset, sides, own[0], box, found, most)
                    return self._wrap(offset, sides, own[0], box, found, most)
                sides = [side for side in sides if side is not own[0]]
            box += ((place, step, count),)
            offset -= place * stride
        found.append(box)
        return len(found) <= most

    def _wrap(
        self,
        offset: int,
        sides: list[Progression],
        side: Progression,
        box: Box,
        found: list[Box],
        most: float,
    ) -> bool:
        """As `_place`, for a progression that exceeds its axis: a partial turn, full turns, a
        partial turn.
        """
        axis = len(box)
        stride, wider = self.strides[axis : axis + 2]
        step, count = side[0] // stride, side[1]
        others = [other for other in sides if other is not side]
        per_turn = wider // side[0]
        place = offset % wider // stride
        num_first = per_turn - place // step if place >= step else 0
        if num_first:
            first = (*box, (place, step, num_first))
            if not self._place(offset - place * stride, others, first, found, most):
                return False
            offset += num_first * side[0]
            count -= num_first
            place = offset % wider // stride
        offset -= place * stride
        num_turns, num_last = divmod(count, per_turn)
        if num_turns:
            turns = _joined(others, (wider, num_turns)) if num_turns > 1 else others
            if not self._place(offset, turns, (*box, (place, step, per_turn)), found, most):
                return False
        last = (*box, (place, step, num_last))
        return not num_last or self._place(offset + num_turns * wider, others, last, found, most)

    def _spread(
        self,
        offset: int,
        sides: list[Progression],
        side: Progression,
        box: Box,
        found: list[Box],
        most: float,
    ) -> bool:
        """As `_place`, with one call for each place of `side`."""
        stride, count = side
        if count + len(found) > most:
            return False
        others = [other for other in sides if other is not side]
        return all(
            self._place(offset + number * stride, others, box, found, most)
            for number in range(count)
        )


def _count(side: Progression) -> int:
    return side[1]


def _joined(sides: list[Progression], side: Progression) -> list[Progression]:
    """`sides` plus `side`, merged with another one if the two are contiguous or overlap."""
    for other in sides:
        (inner, inner_count), (outer, outer_count) = sorted((other, side))
        if not outer % inner and outer // inner <= inner_count:
            joined = (inner, (outer_count - 1) * (outer // inner) + inner_count)
            return [joined if own is other else own for own in sides]
    return [*sides, side]


def _strides_for(regions: list[Region]) -> list[int]:
    """Lattice strides: item sizes, then the most frequent strides, larger ones first on a tie.

    Each must divide, or be divided by, all others. A stride that does not is replaced by its
    greatest common divisor with the next larger one.
    """
    chosen = sorted({1, *(region.item_bytes for region in regions)})
    rejected: list[int] = []
    for stride in _by_frequency(regions):
        if stride not in chosen and len(chosen) < _MOST_AXES:
            (chosen if _fits(stride, chosen) else rejected).append(stride)
    for stride in rejected:
        common = _common_divisor(stride, chosen)
        if common is not None and len(chosen) < _MOST_AXES:
            chosen.append(common)
    return sorted(chosen)


def _by_frequency(regions: list[Region]) -> list[int]:
    """The strides of regions, the most frequent first."""
    counts = Counter(stride for region in regions for stride in _byte_strides(region))
    needed = {stride for region in regions for stride, _ in region.progressions()[1:]}
    return sorted(needed, key=lambda stride: (-counts[stride], -stride))


def _common_divisor(stride: int, chosen: list[int]) -> int | None:
    """The greatest common divisor of a stride and the next larger one; None if the next smaller
    one does not divide it.
    """
    smaller = max(other for other in chosen if other < stride)
    common = gcd(stride, min((other for other in chosen if other > stride), default=0))
    return common if smaller < common and not common % smaller else None


def _byte_strides(region: Region) -> list[int]:
    """The strides of the axes along which a region has several elements, in bytes."""
    sides = zip(region.shape, region.strides, strict=True)
    return [stride * region.item_bytes for size, stride in sides if size > 1]


def _fits(stride: int, others: list[int]) -> bool:
    """Whether a stride divides, or is divided by, each of the others."""
    return all(not stride % other or not other % stride for other in others)


_MOST_BOXES = 1 << 8  # of one region
_MOST_STEPS = 1 << 16  # of one box along an axis
_MOST_CELLS = 1 << 25
_MOST_RUNS = 1 << 22  # of all regions together

# An index into the array of cells.
Part = tuple[Any, ...]


class Cells(NamedTuple):
    """The cells into which regions divide a storage.

    `shape` is the shape of an array with one element per cell; `parts` maps each region to the
    indices of its cells.
    """

    shape: tuple[int, ...]
    parts: dict[Region, list[Part]]
    inexact: frozenset[Region] = frozenset()


def cells_of(regions: Sequence[Region]) -> Cells:
    """Divides a storage into cells, each either inside or outside each region."""
    lattice = Lattice.of(regions)
    boxes, odd = _boxes_of(regions, lattice)
    cells = None if odd else _from_boxes(boxes)
    if cells is not None:
        return cells
    if sum(map(_num_runs, regions)) <= _MOST_RUNS:
        return _from_runs(regions)
    for region in odd:
        boxes[region] = lattice.boxes(region.filled()) or []
    cells = _from_boxes(boxes, odd)
    if cells is not None:
        return cells
    most = _MOST_RUNS / len(regions)
    return _from_runs(regions, [region for region in regions if _num_runs(region) > most])


# -- boxes


def _boxes_of(
    regions: Sequence[Region], lattice: Lattice
) -> tuple[dict[Region, list[Box]], list[Region]]:
    """The boxes of each region, and the regions that need too many boxes or too fine ones."""
    boxes: dict[Region, list[Box]] = {}
    odd: list[Region] = []
    for region in regions:
        own = lattice.boxes(region, _MOST_BOXES)
        if own is None or _is_too_fine(own):
            odd.append(region)
        else:
            boxes[region] = own
    return boxes, odd


def _is_too_fine(boxes: list[Box]) -> bool:
    return any(step > 1 and count > _MOST_STEPS for box in boxes for _, step, count in box)


def _from_boxes(boxes: dict[Region, list[Box]], inexact: Iterable[Region] = ()) -> Cells | None:
    """The cells for these boxes; None if there are too many."""
    axes = [_cuts(set(places)) for places in zip(*chain.from_iterable(boxes.values()), strict=True)]
    if prod(map(len, axes)) > _MOST_CELLS:
        return None
    divided = [(axis, cuts) for axis, cuts in enumerate(axes) if len(cuts) > 2]
    shape = tuple(len(cuts) - 1 for _, cuts in divided)
    return Cells(
        shape,
        {region: [_part(box, divided) for box in own] for region, own in boxes.items()},
        frozenset(inexact),
    )


def _cuts(sets: set[Places]) -> dict[int, int]:
    """The cuts of an axis, with their numbers; each range starts and ends at a cut."""
    cuts: set[int] = set()
    for start, step, count in sets:
        if step == 1:
            cuts.update((start, start + count))
        else:
            cuts.update(
                range(start, start + step * count, step),
                range(start + 1, start + 1 + step * count, step),
            )
    return {cut: number for number, cut in enumerate(sorted(cuts))}


def _part(box: Box, axes: Sequence[tuple[int, dict[int, int]]]) -> Part:
    """The index of a box in an array with one axis for each of `axes`."""
    part: list[slice | list[int]] = []
    for axis, cuts in axes:
        start, step, count = box[axis]
        if step == 1:
            part.append(slice(cuts[start], cuts[start + count]))
            continue
        numbers = [cuts[place] for place in range(start, start + step * count, step)]
        stride = numbers[1] - numbers[0]
        is_regular = numbers[-1] - numbers[0] == stride * (count - 1) and numbers == list(
            range(numbers[0], numbers[-1] + 1, stride)
        )
        part.append(slice(numbers[0], numbers[-1] + 1, stride) if is_regular else numbers)
    if any(isinstance(own, list) for own in part):
        return np.ix_(*[own if isinstance(own, list) else np.r_[own] for own in part])
    return tuple(part)


# -- runs


def _num_runs(region: Region) -> int:
    return prod(count for _, count in region.progressions()[1:])


def _from_runs(regions: Sequence[Region], inexact: Iterable[Region] = ()) -> Cells:
    """The cells of these regions along a single axis."""
    inexact = frozenset(inexact)
    runs = {
        region: _runs_of(region.filled() if region in inexact else region) for region in regions
    }
    ends = [cut for starts, length in runs.values() for cut in (starts, starts + length)]
    cuts = np.unique(np.concatenate(ends))
    parts: dict[Region, list[Part]] = {}
    for region, (starts, length) in runs.items():
        numbers = _numbers(np.searchsorted(cuts, starts), np.searchsorted(cuts, starts + length))
        parts[region] = [(numbers,)] if len(starts) else []
    return Cells((max(0, len(cuts) - 1),), parts, inexact)


def _runs_of(region: Region) -> tuple[Any, int]:
    """The starts of a region's runs of bytes, and their common length."""
    if not region.num_elements:
        return np.zeros(0, dtype=np.int64), 0
    (_, length), *sides = region.progressions()
    starts = np.array([region.start], dtype=np.int64)
    for stride, count in sides:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _numbers(firsts: Any, ends: Any) -> Any:
    """The union of the ranges from each first to its end."""
    lengths = ends - firsts
    numbers = np.unique(
        np.arange(lengths.sum()) + np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)
    )
    is_one_range = len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1
    return slice(numbers[0], numbers[-1] + 1) if is_one_range else numbers
