"""Who put each element of a tensor where it is: worked out from addresses, by painting memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchlens.validation.snapshots import Region, Snapshot

__all__ = ["Contribution", "Painting", "paint"]

Tensor = torch.Tensor


class Contribution(NamedTuple):
    """Source `source` left `value` in the memory that `where` looked at."""

    source: int
    where: Snapshot
    value: Tensor


class Painting(NamedTuple):
    """What a tensor looks at after the contributions were painted: its elements, and whose each element is."""

    value: Tensor
    sources: Tensor


def paint(where: Snapshot, contributions: Sequence[Contribution], nobody: int) -> Painting | None:
    """Paints the contributions, in order, over the memory that `where` looks at. None if memory cannot be told."""
    region = where.region
    own = [c for c in contributions if c.where.storage == where.storage and c.where.region is not None]
    regions = [c.where.region for c in own if c.where.region is not None]
    if region is None or any(not isinstance(c.value, Tensor) or tuple(c.value.shape) != c.where.region.shape
                             for c in own if c.where.region is not None):  # fmt: skip
        return None
    start = min(r.offset for r in [region, *regions])
    end = max(_end(r) for r in [region, *regions])
    canvas = torch.zeros(end - start, dtype=torch.uint8)
    names = torch.full((end - start,), nobody, dtype=torch.int64)
    for contribution, place in zip(own, regions, strict=True):
        offsets = _offsets(place, start)
        canvas[offsets] = _bytes(contribution.value)
        names[offsets] = contribution.source
    offsets = _offsets(region, start)
    value = canvas[offsets].contiguous().view(where.value.dtype).reshape(region.shape)
    return Painting(value, names[offsets][:, 0].reshape(region.shape))


def _bytes(tensor: Tensor) -> Tensor:
    # Filled in, not made contiguous: a single element passes for contiguous with any stride, and views mind the stride.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).reshape(tensor.numel(), tensor.element_size())


def _offsets(region: Region, start: int) -> Tensor:
    """The place of each byte of each element, counted from `start`."""
    places = torch.tensor([region.offset - start])
    for size, stride in zip(region.shape, region.strides, strict=True):
        places = (places[:, None] + torch.arange(size) * stride).reshape(-1)
    return places[:, None] + torch.arange(region.item_bytes)


def _end(region: Region) -> int:
    if 0 in region.shape:
        return region.offset
    return region.offset + sum((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True)) + region.item_bytes
