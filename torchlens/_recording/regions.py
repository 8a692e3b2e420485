"""The storage of a tensor, and its region of that storage."""

import math
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.symbolic import examples, inert_sizes
from torchlens._recording.wrappers import inner_of

# (stride in bytes, count).
Progression = tuple[int, int]


class Region(NamedTuple):
    """A tensor's part of its storage: offset and strides in items, as torch has them.

    Different regions may hold the same bytes: a tensor and its transpose.
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
        """The number of elements; with `expand`, memory holds fewer."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all elements."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def overlaps_itself(self) -> bool:
        """True if two elements may share a byte; a few unusual strides give a false True."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += (size - 1) * stride
        return False

    def is_interval(self) -> bool:
        """True if the region has no holes."""
        return len(self.progressions()) == 1

    def filled(self) -> "Region":
        """The interval from the first to the last byte, as a region of bytes."""
        return Region(self.start, (self.end - self.start,), (1,), 1)

    def covers(self, other: "Region") -> bool:
        """True if this region contains `other`; only equal regions and intervals are checked."""
        return self == other or (
            self.start <= other.start and other.end <= self.end and self.is_interval()
        )

    def progressions(self) -> list[Progression]:
        """The bytes as a sum of progressions from `start`, by ascending stride; the first has
        stride 1.

        Each byte is `start` plus one place of each progression. Progressions that continue or
        overlap each other are merged: a contiguous region is one progression, whatever its shape.
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
    """The region of `tensor` in its storage."""
    if (inner := inner_of(tensor)) is not None:
        return region_of(inner)
    try:
        if type(tensor) is torch.Tensor:
            return _region(
                (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.element_size())
            )
        (offset,) = examples((tensor.storage_offset(),))  # sizes may be symbolic
        return Region(
            offset, examples(tensor.shape), examples(tensor.stride()), tensor.element_size()
        )
    except (NotImplementedError, RuntimeError, ValueError):
        # No strides or no example sizes: one region for the whole object.
        return Region(0, (1,), (1,), 1)


def storage_of(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors in the same storage."""
    if (inner := inner_of(tensor)) is not None:
        return storage_of(inner)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse, nested and wrapper tensors have no storage; nor do uninitialised lazy parameters.
        return -id(tensor)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """True if the tensor is plain memory: dense, without gradients, conj or neg bits."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_meta)
        and storage_of(tensor) >= 0
    )


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape; -1 for sizes of a nested tensor that differ between its parts."""
    try:
        shape = tensor.shape
    except RuntimeError:
        # Strided nested tensors and uninitialised lazy parameters have no shape.
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
