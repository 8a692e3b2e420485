"""Memory seen as a box with several axes, so that regions of it become boxes that are quick to
compare.

The number of a byte is written in mixed digits, like a time in hours, minutes and seconds: for the
strides 1, 4 and 40, byte 126 is (2, 1, 3), being 2 + 1 * 4 + 3 * 40. The rows, columns, blocks and
steps of a tensor whose strides are among those of the lattice are then boxes: on each axis, a range
of places with a step.
"""

from collections import Counter
from collections.abc import Iterable
from math import gcd, inf

from torchlens._recording.regions import Progression, Region

# Of one axis: the first place, the step to the next one, how many there are.
Places = tuple[int, int, int]
# One for each axis of the lattice, the finest axis first.
Box = tuple[Places, ...]

_MOST_AXES = 12


class Lattice:
    """Turns regions of one storage into boxes. `strides` begin with 1, and each divides the
    next.
    """

    def __init__(self, strides: Iterable[int], origin: int) -> None:
        self.strides = tuple(strides)
        self.origin = origin

    @classmethod
    def of(cls, regions: Iterable[Region]) -> "Lattice":
        """One in which most of these regions are few boxes."""
        regions = list(regions)
        origin = min((region.start for region in regions), default=0)
        return cls(_strides_for(regions), origin)

    def boxes(self, region: Region, most: float = inf) -> list[Box] | None:
        """Boxes that together are the region; None if it takes more than `most`.

        They may overlap where the region's own elements do.
        """
        if not region.num_elements:
            return []
        found: list[Box] = []
        is_done = self._place(region.start - self.origin, region.progressions(), (), found, most)
        return found if is_done else None

    def _place(
        self, offset: int, sides: list[Progression], box: Box, found: list[Box], most: float
    ) -> bool:
        """Adds the boxes of the region that begins at `offset`; the axes of `box` are done, and
        `offset` is 0 on them.
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
        """As `_place`, for a progression that goes on past the end of its axis: a part, whole
        turns, another part.
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
        """As `_place`, with each place of `side` on its own."""
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
    """`sides` and one more, which is made one with another where the two continue or overlap each
    other.
    """
    for other in sides:
        (inner, inner_count), (outer, outer_count) = sorted((other, side))
        if not outer % inner and outer // inner <= inner_count:
            joined = (inner, (outer_count - 1) * (outer // inner) + inner_count)
            return [joined if own is other else own for own in sides]
    return [*sides, side]


def _strides_for(regions: list[Region]) -> list[int]:
    """Strides that divide each other: the sizes of items, then the strides that most regions have,
    the largest first.

    Of one that does not go with the others, what it has in common with the next larger one.
    """
    counts = Counter(
        stride * region.item_bytes
        for region in regions
        for size, stride in zip(region.shape, region.strides, strict=True)
        if size > 1
    )
    needed = {stride for region in regions for stride, _ in region.progressions()[1:]}
    chosen = sorted({1, *(region.item_bytes for region in regions)})
    rejected = []
    for stride in sorted(needed, key=lambda stride: (-counts[stride], -stride)):
        if stride not in chosen and len(chosen) < _MOST_AXES:
            if all(not stride % other or not other % stride for other in chosen):
                chosen.append(stride)
            else:
                rejected.append(stride)
    for stride in rejected:
        smaller = max(other for other in chosen if other < stride)
        common = gcd(stride, min((other for other in chosen if other > stride), default=0))
        if smaller < common and not common % smaller and len(chosen) < _MOST_AXES:
            chosen.append(common)
    return sorted(chosen)
