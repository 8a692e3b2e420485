"""Where a tensor's elements lie: its storage, and the region of it that the tensor looks at."""

import math
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.symbolic import examples, inert_sizes
from torchlens._recording.wrappers import inner_of

# `count` places, `stride` bytes apart.
Progression = tuple[int, int]


class Region(NamedTuple):
    """The part of its storage that a tensor looks at, as torch tells it: offset and strides in
    items.

    Two different regions may hold the same bytes: a tensor and its transpose.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def start(self) -> int:
        """The first byte."""
        return self.offset * self.item_bytes

    @property
    def end(self) -> int:
        """One past the last byte; for a region without elements, its start."""
        offset, shape, strides, item = self
        if 0 in shape:
            return offset * item
        for size, stride in zip(shape, strides, strict=True):
            offset += (size - 1) * stride
        return (offset + 1) * item

    @property
    def num_elements(self) -> int:
        """How many elements the tensor has. They may be fewer in memory (`expand`)."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of all its elements."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may look at one byte; True for some odd strides by which they do
        not.
        """
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += (size - 1) * stride
        return False

    def is_interval(self) -> bool:
        """Whether the region has no holes."""
        return len(self.progressions()) == 1

    def filled(self) -> "Region":
        """All that lies between the first and the last byte."""
        return Region(self.start, (self.end - self.start,), (1,), 1)

    def covers(self, other: "Region") -> bool:
        """Whether every byte of `other` is certainly in this region; told only where that is plain
        to see.
        """
        return self == other or (
            self.start <= other.start and other.end <= self.end and self.is_interval()
        )

    def progressions(self) -> list[Progression]:
        """The bytes as a sum of progressions from `start`, in ascending order of their strides, the
        first one of bytes.

        A byte of the region is `start` plus one place of each. Those that continue or overlap each
        other are one: what is contiguous is a single progression, whatever its shape.
        """
        item = self.item_bytes
        found = [(1, item)]
        sides = sorted(
            [(stride * item, size) for size, stride in zip(self.shape, self.strides, strict=True)]
        )
        for stride, count in sides:
            if count < 2 or not stride:
                continue
            inner, inner_count = found[-1]
            step, rest = divmod(stride, inner)
            if not rest and step <= inner_count:
                found[-1] = (inner, (count - 1) * step + inner_count)
            else:
                found.append((stride, count))
        return found


_region = Region._make


def region_of(tensor: torch.Tensor) -> Region:
    """The part of its storage that `tensor` looks at."""
    if (inner := inner_of(tensor)) is not None:
        return region_of(inner)
    try:
        if type(tensor) is torch.Tensor:
            return _region(
                (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.element_size())
            )
        (offset,) = examples((tensor.storage_offset(),))  # it may have symbolic sizes
        return Region(
            offset, examples(tensor.shape), examples(tensor.stride()), tensor.element_size()
        )
    except (
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):  # no strides, no example: take the object as one whole
        return Region(0, (1,), (1,), 1)


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors sharing memory have in common."""
    if (inner := inner_of(tensor)) is not None:
        return storage_of(inner)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse, nested and wrapped tensors have no storage of their own, nor parameters of lazy
        # modules any yet.
        return -id(tensor)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape, with -1 for the sizes of a nested tensor that differ from one part to the next."""
    try:
        shape = tensor.shape
    except (
        RuntimeError
    ):  # the strided layout has no shape at all, nor has a lazy module's parameter yet
        if is_lazy(tensor):
            return ()
        return (tensor.size(0), *(-1 for _ in range(tensor.dim() - 1)))
    if type(tensor) is not torch.Tensor:
        return (
            tuple(size if type(size) is int else -1 for size in shape)
            if tensor.is_nested
            else inert_sizes(shape)
        )
    return shape
