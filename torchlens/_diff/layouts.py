"""The same numbers with the axes in another order: NCHW and NHWC, heads split or merged."""

from functools import lru_cache
from itertools import permutations
from math import prod
from typing import NamedTuple

import torch

from torchlens._recording.tolerance import relative_error

Tensor = torch.Tensor
_MOST_AXES = 6
_BETTER = 10.0  # how many times smaller than the plain layout's error that of another must be


class AxisOrder(NamedTuple):
    """The order of the candidate's axes: `axes` permutes the sizes `finer`, which are those of the
    reference's shape (`of_reference`) or of the candidate's, without ones.

    `SAME` is the layout of two tensors of one shape. Without `axes`, the two differ at most by a
    reshape.
    """

    axes: tuple[int, ...] = ()
    finer: tuple[int, ...] = ()
    of_reference: bool = False

    @property
    def is_plain(self) -> bool:
        return self.axes == tuple(range(len(self.axes)))

    def to_reference(self, candidate: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The candidate's tensor in the reference's `shape`."""
        return self._back(candidate, shape) if self.of_reference else self._forth(candidate, shape)

    def to_candidate(self, reference: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The reference's tensor in the candidate's `shape`."""
        return self._forth(reference, shape) if self.of_reference else self._back(reference, shape)

    def _forth(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.axes:
            return value.reshape(shape)
        return value.reshape(self.finer).permute(self.axes).reshape(shape)

    def _back(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.axes:
            return value.reshape(shape)
        permuted = tuple(self.finer[axis] for axis in self.axes)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return value.reshape(permuted).permute(inverse).reshape(shape)

    def __str__(self) -> str:
        names = {(0, 3, 1, 2): "NHWC for NCHW", (0, 2, 3, 1): "NCHW for NHWC", (1, 0): "transposed"}
        if self.is_plain:
            return "reshaped"
        axes = (
            self.axes
            if not self.of_reference
            else tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))
        )
        return names.get(axes, f"axes {' '.join(map(str, axes))}")


SAME = AxisOrder()


@lru_cache(maxsize=4096)
def layouts_between(
    reference: tuple[int, ...], candidate: tuple[int, ...]
) -> tuple[AxisOrder, ...]:
    """All layouts that lead from one shape to the other, the plain one first.

    Without axes of size 1, one shape must be a permutation of the other, whose axes may be split.
    """
    if prod(reference) != prod(candidate):
        return ()
    found = dict.fromkeys([SAME]) if reference == candidate else {}
    for of_reference, one, other in ((False, candidate, reference), (True, reference, candidate)):
        finer, target = _without_ones(one), _without_ones(other)
        if len(target) <= len(finer) <= _MOST_AXES:
            for axes in permutations(range(len(finer))):
                if _is_grouped(tuple(finer[axis] for axis in axes), target):
                    layout = AxisOrder(axes, finer, of_reference)
                    found[SAME if layout.is_plain else layout] = None
        if len(finer) == len(target):  # exchanging the two gives the same layouts
            break
    return tuple(sorted(found, key=lambda layout: not layout.is_plain))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_grouped(sizes: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """True if neighbours among `sizes` can be multiplied to give `target`."""
    place = 0
    for size in target:
        product = 1
        while product < size and place < len(sizes):
            product *= sizes[place]
            place += 1
        if product != size:
            return False
    return place == len(sizes)


def best_layout(
    reference: Tensor, candidate: Tensor, good: float, known: tuple[AxisOrder, ...] = ()
) -> tuple[float, AxisOrder | None]:
    """The relative error of two tensors in the layout in which it is smallest; no layout if their
    sizes differ.

    Stops at the first error of at most `good`. A layout that permutes axes is accepted only if it
    is ten times better than the plain one, or if no plain one fits the shapes. `known` layouts are
    tried first, and win if none is better.
    """
    shape = tuple(reference.shape)
    places = {layout: place for place, layout in enumerate(known)}
    best: tuple[float, AxisOrder | None] = (float("inf"), None)
    for layout in sorted(
        layouts_between(shape, tuple(candidate.shape)),
        key=lambda layout: (not layout.is_plain, places.get(layout, len(known))),
    ):
        found = relative_error(reference, layout.to_reference(candidate, shape))
        needed = 1.0 if best[1] is None or not best[1].is_plain else _BETTER
        if best[1] is None or found < best[0] / needed:
            best = (found, layout)
        if best[0] <= good:
            break
    return best
