"""Columns with statistics of saved tensors: range, moments, a histogram and a small picture."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchlens._health.tensor_statistics import COMPUTED_AS, row_statistics
from torchlens._recording.wrappers import holds_others, local_value, why_valueless

_SMALL = 4096  # tensors up to this size are described together with others of their shape
_EXACT = 1 << 20  # larger ones have their mean, deviation and zeros estimated from a sample
_SAMPLE = 1 << 16
_COUNTED = 1 << 12  # about how many values are counted in a histogram
_BATCH = 1 << 21
_NOT_FINITE = 255
_NUMBERS = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.complex32, torch.complex64,
    torch.complex128,
})  # fmt: skip
_COLUMNS = (
    "min", "mean", "max", "std", "zeros", "nonfinite", "nan", "low", "high", "heatlow", "heathigh",
)  # fmt: skip


@dataclass
class Statistics:
    """Columns with one row per tensor: `add` returns its row, `columns` computes all of them."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, value: Any) -> int:
        """The row of a tensor; -1 if it has no values to describe."""
        value = local_value(value)
        if not isinstance(value, torch.Tensor) or why_valueless(value) is not None:
            return -1
        if (
            value.layout is not torch.strided
            or value.is_nested
            or holds_others(value)
            or value.numel() == 0
        ):
            return -1
        if value.dtype in COMPUTED_AS:
            value = value.to(COMPUTED_AS[value.dtype])
        elif value.dtype not in _NUMBERS:
            return -1
        self.tensors.append(value.detach())
        return len(self.tensors) - 1

    def columns(self) -> dict[str, Any]:
        bins, side = _resolution(len(self.tensors))
        rows = self._described(bins, side)
        sizes = [row["heat"].shape for row in rows]
        columns: dict[str, Any] = {name: [_number(row[name]) for row in rows] for name in _COLUMNS}
        return columns | {
            "sample": [row["sample"] for row in rows],
            "rows": [height for height, _ in sizes],
            "cols": [width for _, width in sizes],
            "bins": bins,
            "histograms": _packed([row["histogram"] for row in rows]),
            "heat": _packed([row["heat"].flatten() for row in rows]),
        }

    def _described(self, bins: int, side: int) -> list[dict[str, Any]]:
        """One record per tensor."""
        rows: list[dict[str, Any]] = [{}] * len(self.tensors)
        for members in self._batches():
            tensors = [self.tensors[row] for row in members]
            batch = torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)
            for row, found in zip(members, _describe(batch, bins, side), strict=True):
                rows[row] = found
        return rows

    def _batches(self) -> Iterator[list[int]]:
        """The rows of tensors that are described together: small ones of the same shape."""
        groups: dict[Any, list[int]] = {}
        for row, tensor in enumerate(self.tensors):
            key = (tensor.shape, tensor.dtype, tensor.device) if tensor.numel() <= _SMALL else row
            groups.setdefault(key, []).append(row)
        for members in groups.values():
            size = max(1, _BATCH // self.tensors[members[0]].numel())
            for start in range(0, len(members), size):
                yield members[start : start + size]


def _resolution(num_tensors: int) -> tuple[int, int]:
    """The number of bins of each histogram, and the length of the sides of each picture."""
    if num_tensors <= 1000:
        return 32, 24
    return (24, 16) if num_tensors <= 3000 else (16, 8)


def _packed(parts: Sequence[torch.Tensor]) -> str:
    if not parts:
        return ""
    return base64.b64encode(torch.cat(list(parts)).cpu().numpy().tobytes()).decode("ascii")


def _number(value: float) -> float | None:
    """Four digits; None where there is no number."""
    return float(f"{value:.4g}") if value == value and abs(value) != float("inf") else None


def _describe(batch: torch.Tensor, bins: int, side: int) -> list[dict[str, Any]]:
    """One record per tensor in `batch`, which has one more dimension in front."""
    if batch.is_complex():
        batch = batch.abs()
    flat = batch.reshape(len(batch), -1)
    size = flat.shape[1]
    lowest, highest = _extremes(flat)
    is_finite = bool((torch.isfinite(lowest) & torch.isfinite(highest)).all())
    step = 1 if size <= _EXACT or not is_finite else -(-size // _SAMPLE)
    values = flat[:, ::step].float()
    counted = values.cpu().numpy()
    found = row_statistics(counted)
    if not is_finite:
        lowest, highest = (torch.from_numpy(each).to(values) for each in (found.low, found.high))
    histogram = _histograms(
        values[:, :: max(1, values.shape[1] // _COUNTED)], lowest, highest, bins
    )
    heat, darkest, brightest = _pictures(batch, side)
    low, high, heat_low, heat_high = (
        each.double().cpu().numpy() for each in (lowest, highest, darkest, brightest)
    )
    width = values.shape[1]
    zeros = width - np.count_nonzero(counted, axis=1)
    shares = [number / width for number in (zeros, width - found.num_finite, found.num_nan)]
    numbers = low, found.mean, high, found.std, *shares, low, high, heat_low, heat_high
    by_row = np.stack(numbers, axis=1).tolist()
    sample = values.shape[1] if step > 1 else 0
    return [
        dict(zip(_COLUMNS, own, strict=True))
        | {"histogram": histogram[row], "heat": heat[row], "sample": sample}
        for row, own in enumerate(by_row)
    ]


def _extremes(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest of each row. For a single row, the call without `dim` is several
    times faster.
    """
    numbers = flat.byte() if flat.dtype is torch.bool else flat
    low, high = numbers[0].aminmax() if len(numbers) == 1 else numbers.aminmax(dim=1)
    return low.float().reshape(-1), high.float().reshape(-1)


def _histograms(
    values: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bins: int
) -> torch.Tensor:
    """Heights from 0 to 255, the highest bar of each row being 255."""
    width = (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    place = ((values - low[:, None]) / width[:, None] * bins).nan_to_num(-1.0, bins, -1.0)
    is_counted = torch.isfinite(values)
    index = (
        place.clamp(0, bins - 1).long()
        + torch.arange(len(values), device=values.device)[:, None] * bins
    )
    counts = (
        torch.bincount(index[is_counted], minlength=len(values) * bins)
        .reshape(len(values), bins)
        .float()
    )
    return (counts / counts.amax(1, keepdim=True).clamp(min=1) * 255).ceil().byte().cpu()


def _pictures(batch: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A picture of each tensor: the last two dimensions of the first example, thinned to `side`, as
    bytes from the lowest to the highest value. Dimensions before these two are averaged.
    """
    if batch.dim() == 1:
        batch = batch[:, None]
    if batch.dim() == 2:
        batch = batch[:, None]
    rows, cols = batch.shape[-2:]
    wide = side if rows > 1 else side * 2
    picture = batch[..., _thinned(rows, side, batch), :][..., _thinned(cols, wide, batch)].float()
    if picture.dim() > 3:
        picture = picture[:, 0].flatten(1, -3).mean(1) if picture.dim() > 4 else picture[:, 0]
    flat = picture.flatten(1)
    is_finite = torch.isfinite(flat)
    low = torch.where(is_finite, flat, torch.inf).amin(1)
    high = torch.where(is_finite, flat, -torch.inf).amax(1)
    width = (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (
        ((flat - low[:, None]) / width[:, None] * 254)
        .nan_to_num(0.0, 0.0, 0.0)
        .clamp(0, 254)
        .round()
    )
    scaled = torch.where(is_finite, scaled, _NOT_FINITE).byte()
    return scaled.reshape(picture.shape).cpu(), low, high


def _thinned(size: int, most: int, like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, size - 1, min(size, most), device=like.device).round().long()
