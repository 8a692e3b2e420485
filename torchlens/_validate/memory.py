"""Memory that stands in for a storage of the pass: what lay in it, and who put each element where
it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchlens._recording.regions import Region
from torchlens._replay.snapshots import Snapshot

Tensor = torch.Tensor
# Stands for memory that none of the contributors wrote.
NOBODY = torch.iinfo(torch.int64).min
# Tensors of any type begin at a multiple of this many bytes.
_ALIGNMENT = 16


class Memory:
    """The bytes of one storage that some regions of it look at."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self._start = min(region.start for region in regions) // _ALIGNMENT * _ALIGNMENT
        end = max(region.end for region in regions)
        self._bytes = torch.zeros(end - self._start, dtype=torch.uint8, device=device)

    def look_at(self, snapshot: Snapshot) -> Tensor:
        """A tensor that looks at this memory as the snapshot's tensor did at its own."""
        region = snapshot.region
        assert region is not None
        tensor = torch.empty(0, dtype=snapshot.value.dtype, device=self._bytes.device)
        offset = (region.start - self._start) // region.item_bytes
        tensor = tensor.set_(self._bytes.untyped_storage(), offset, region.shape, region.strides)
        if snapshot.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if snapshot.is_neg else tensor

    def write(self, where: Snapshot, value: Tensor) -> None:
        """Puts `value` where the snapshot looks; torch does not write to what looks at one place
        twice (`expand`).
        """
        tensor = self.look_at(where)
        for dim in _repeated(tensor):
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        tensor.copy_(value)


class Contribution(NamedTuple):
    """Source `source` left `value` in the memory that `where` looked at."""

    source: int
    where: Snapshot
    value: Tensor


class Painting(NamedTuple):
    """What a tensor looks at after the contributions were painted, and whose that is.

    `sources` has one axis more than `value`: an element may be put together from several places.
    """

    value: Tensor
    sources: Tensor

    @property
    def num_of_nobody(self) -> int:
        """How many elements are, at least in part, nobody's."""
        return int((self.sources == NOBODY).any(-1).sum())

    def part_of(self, source: int) -> Tensor:
        """Which elements are, at least in part, those of a source."""
        return (self.sources == source).any(-1)


def paint(where: Snapshot, contributions: Sequence[Contribution]) -> Painting | None:
    """Paints the contributions, in order, over the memory that `where` looks at. None if memory
    cannot be told.

    What nobody paints over is as `where` saw it.
    """
    region = where.region
    own = [
        c for c in contributions if c.where.storage == where.storage and c.where.region is not None
    ]
    if (
        region is None
        or where.value.is_meta
        or any(c.value.shape != c.where.value.shape for c in own)
    ):
        return None
    regions = [region, *(c.where.region for c in own if c.where.region is not None)]
    memory = Memory(regions, where.value.device)
    memory.write(where, where.value)
    names = _Names(regions)
    for contribution in own:
        memory.write(contribution.where, contribution.value)
        names.write(contribution)
    return Painting(memory.look_at(where), names.look_at(region).to(where.value.device))


class _Names:
    """Whose each place is; a place is as wide as the smallest item."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._unit = min(region.item_bytes for region in regions)
        self._start = min(region.start for region in regions)
        end = max(region.end for region in regions)
        self._names = torch.full(((end - self._start) // self._unit,), NOBODY)

    def look_at(self, region: Region) -> Tensor:
        unit, item = self._unit, region.item_bytes
        strides = [stride * item // unit for stride in region.strides]
        offset = (region.start - self._start) // unit
        return self._names.as_strided((*region.shape, item // unit), (*strides, 1), offset)

    def write(self, contribution: Contribution) -> None:
        assert contribution.where.region is not None
        tensor = self.look_at(contribution.where.region)
        for dim in _repeated(tensor):
            tensor = tensor.narrow(dim, 0, 1)
        tensor.fill_(contribution.source)


def _repeated(tensor: Tensor) -> list[int]:
    return [
        dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.size(dim) > 1
    ]
