"""Memory divided into cells: bytes that belong to the same regions form one cell, whether four or a
million.

The cells of a storage are the elements of a small array, and a region is a part of that array, to
be read and written at once. Regular regions (rows, columns, blocks, every second element) are
boxes, and it does not matter how large they are. Where some are not (a diagonal), all are taken
apart into runs of bytes. Where those would be too many, an irregular region is taken for all that
lies between its first and its last byte, and is said to be inexact.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from torchlens._recording.lattice import Box, Lattice, Places
from torchlens._recording.regions import Region

_MOST_BOXES = 1 << 8  # of one region
_MOST_STEPS = 1 << 16  # of one box along an axis
_MOST_CELLS = 1 << 25
_MOST_RUNS = 1 << 22  # of all regions together

# What selects some elements of an array.
Part = tuple[Any, ...]


class Cells(NamedTuple):
    """The cells that regions of one storage divide it into.

    `shape` is that of an array with one element for each cell; `parts` has for each region which
    elements are its own.
    """

    shape: tuple[int, ...]
    parts: dict[Region, list[Part]]
    inexact: frozenset[Region] = frozenset()


def cells_of(regions: Sequence[Region]) -> Cells:
    """Divides a storage into cells that are each inside or outside each of the regions."""
    lattice = Lattice.of(regions)
    boxes: dict[Region, list[Box]] = {}
    odd: list[Region] = []
    for region in regions:
        own = lattice.boxes(region, _MOST_BOXES)
        if own is None or _is_too_fine(own):
            odd.append(region)
        else:
            boxes[region] = own
    cells = None if odd else _from_boxes(boxes)
    if cells is None and sum(map(_num_runs, regions)) <= _MOST_RUNS:
        return _from_runs(regions)
    if cells is None:
        boxes.update({region: lattice.boxes(region.filled()) or [] for region in odd})
        cells = _from_boxes(boxes, odd)
    if cells is None:
        odd = [region for region in regions if _num_runs(region) * len(regions) > _MOST_RUNS]
        cells = _from_runs(regions, odd)
    return cells


# -- boxes
# --------------------------------------------------------------------------------------------------


def _is_too_fine(boxes: list[Box]) -> bool:
    return any(step > 1 and count > _MOST_STEPS for box in boxes for _, step, count in box)


def _from_boxes(boxes: dict[Region, list[Box]], inexact: Iterable[Region] = ()) -> Cells | None:
    """None if there would be too many."""
    num_axes = max((len(box) for own in boxes.values() for box in own), default=0)
    axes = [_cuts({box[axis] for own in boxes.values() for box in own}) for axis in range(num_axes)]
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
    """Where an axis is cut, so that each set of places begins and ends at cuts; with the number of
    each cut.
    """
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
    """Which elements a box is in an array with one axis for each of `axes`."""
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
# --------------------------------------------------------------------------------------------------


def _num_runs(region: Region) -> int:
    return prod(count for _, count in region.progressions()[1:])


def _from_runs(regions: Sequence[Region], inexact: Iterable[Region] = ()) -> Cells:
    """Cells along one axis."""
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
    """Where the runs of bytes of a region begin, and how long they are."""
    if not region.num_elements:
        return np.zeros(0, dtype=np.int64), 0
    (_, length), *sides = region.progressions()
    starts = np.array([region.start], dtype=np.int64)
    for stride, count in sides:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _numbers(firsts: Any, ends: Any) -> Any:
    """All numbers from each first up to its end."""
    lengths = ends - firsts
    numbers = np.unique(
        np.arange(lengths.sum()) + np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)
    )
    is_one_range = len(numbers) and numbers[-1] - numbers[0] == len(numbers) - 1
    return slice(numbers[0], numbers[-1] + 1) if is_one_range else numbers
