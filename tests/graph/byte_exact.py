"""The slow and simple way to tell who last wrote what: byte by byte."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchlens._graph.last_writers import Question
from torchlens._recording.recording import Write
from torchlens._recording.regions import Region


def bytes_of(region: Region) -> Any:
    """The number of every byte in the region."""
    offsets = np.array([region.offset], dtype=np.int64)
    for size, stride in zip(region.shape, region.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.unique(
        (
            offsets[:, None] * region.item_bytes + np.arange(region.item_bytes, dtype=np.int64)
        ).reshape(-1)
    )


def writers_of(question: Question, writes: Sequence[Write]) -> tuple[list[int], bool]:
    """The writes that are the last ones to some byte of the region, the earliest first; whether
    they wrote all of it.
    """
    remaining = bytes_of(question.region)
    writers: list[int] = []
    for write in reversed(writes):
        if question.after < write.entry < question.before:
            left = np.setdiff1d(remaining, bytes_of(write.region))
            if len(left) < len(remaining):
                writers.insert(0, write.entry)
                remaining = left
    return writers, not len(remaining)


def random_view(generator: np.random.Generator, base: torch.Tensor) -> torch.Tensor:
    """Some view of a tensor, as programs make them: sliced, stepped, reshaped, transposed, seen as
    another type.
    """
    view = base
    for _ in range(generator.integers(0, 4)):
        kind = generator.integers(0, 11)
        dim = int(generator.integers(0, view.dim())) if view.dim() else 0
        if not view.dim() or not view.numel():
            break
        size = view.size(dim)
        if kind < 4:
            start = int(generator.integers(0, size))
            view = view.narrow(dim, start, int(generator.integers(1, size - start + 1)))
        elif kind == 4:
            view = view.select(dim, int(generator.integers(0, size)))
        elif kind == 5:
            step = int(generator.integers(1, 4))
            index = [slice(None)] * view.dim()
            index[dim] = slice(int(generator.integers(0, size)), None, step)
            view = view[tuple(index)]
        elif kind == 6 and view.is_contiguous():
            numel = view.numel()
            side = int(generator.choice([n for n in range(1, numel + 1) if numel % n == 0]))
            view = view.view(side, -1) if generator.integers(0, 2) else view.view(-1)
        elif kind == 7:
            view = view.transpose(dim, int(generator.integers(0, view.dim())))
        elif kind == 8 and view.dim() > 1:
            view = view.diagonal(0, 0, 1)
        elif kind == 9:
            view = view.unfold(
                dim, int(generator.integers(1, size + 1)), int(generator.integers(1, 4))
            )
        elif kind == 10 and view.stride(-1) == 1 and view.element_size() == 4:
            places = [view.storage_offset(), view.size(-1), *view.stride()[:-1]]
            view = view.view(torch.int16 if any(place % 2 for place in places) else torch.float64)
    return view
