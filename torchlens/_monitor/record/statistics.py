"""Samples → columns: ranges, sums, quantiles and bins, computed with numpy in the writer's thread.

Samples are stacked, so that a few dozen numpy calls process many of them: each call may hold the
GIL and delay the training thread. Shorter samples are padded with NaN.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchlens._health.tensor_statistics import row_statistics
from torchlens._monitor.record.samples import SAMPLE_SIZE, Sample, value_of
from torchlens._monitor.record.series import UnitActivity
from torchlens._monitor.store.bins import (
    MINUS_INF,
    NAN,
    NUM_BINS,
    PLUS_INF,
    ZERO,
    bins_of,
    narrowed,
)
from torchlens._monitor.store.columns import (
    HAS_NAN,
    QUANTILES,
    RANGE_IS_EXACT,
    ROW,
    Columns,
    columns_of,
    merged,
)

_WIDTHS = (SAMPLE_SIZE // 4, SAMPLE_SIZE)
# A stack of this size fits the processor's cache, and its memory is reused by the allocator.
_MOST_ROWS = 64

# (number of the series, sample, earlier sample or None). With an earlier sample, the series records
# the change from it.
Observation = tuple[int, Sample, Sample | None]
_Key = tuple[int, int]  # what is described once: ids of a sample and of the earlier one


class _SampleSource(NamedTuple):
    """What is processed once, even if several series share it."""

    sample: Sample
    values: np.ndarray  # float32 or float64
    has_range: bool  # the range of all elements is that of the sample's tensor


def summarized(
    observations: Sequence[Observation],
    limits: Mapping[int, tuple[float, float]],
    activity: UnitActivity | None = None,
) -> Columns:
    """The columns of observations, with one row for each series. `limits` are those of bounded
    activations by series; `activity` counts dead units.
    """
    if not observations:
        return merged([])
    keys = [(id(sample), id(before)) for _, sample, before in observations]
    sources = _sources(observations)
    columns = _columns_of_sources(sources, keys)
    columns.series[:] = [number for number, _, _ in observations]
    values = [sources[key].values for key in keys]
    if activity is not None:
        has_zeros = (columns.counted(ZERO) > 0).tolist()
        columns.dead[:] = activity.dead_shares(observations, values, has_zeros)
    for row, (number, own) in enumerate(zip(columns.series.tolist(), values, strict=True)):
        if number in limits:
            low, high = limits[number]
            columns.saturated[row] = np.count_nonzero((own <= low) | (own >= high)) / len(own)
    return merged([columns])


def _sources(observations: Sequence[Observation]) -> dict[_Key, _SampleSource]:
    sources: dict[_Key, _SampleSource] = {}
    for _, sample, before in observations:
        key = id(sample), id(before)
        if key not in sources:
            has_range = before is None and sample.low is not None
            sources[key] = _SampleSource(sample, _values(sample, before), has_range)
    return sources


def _columns_of_sources(sources: Mapping[_Key, _SampleSource], keys: Sequence[_Key]) -> Columns:
    """One row for each of the keys, in order; each source is described once."""
    short = [key for key, source in sources.items() if len(source.values) <= _WIDTHS[0]]
    long = [key for key, source in sources.items() if len(source.values) > _WIDTHS[0]]
    parts = [
        _described([sources[key] for key in group[start : start + _MOST_ROWS]], width)
        for group, width in zip((short, long), _WIDTHS, strict=True)
        for start in range(0, len(group), _MOST_ROWS)
    ]
    row_of = {key: row for row, key in enumerate([*short, *long])}
    columns = columns_of(*map(np.concatenate, zip(*parts, strict=True)))
    return columns.taken([row_of[key] for key in keys])


def _values(sample: Sample, before: Sample | None) -> np.ndarray:
    """The elements of a sample, or how they changed."""
    own = _array(sample)
    if before is None:
        return own
    with np.errstate(invalid="ignore"):  # Inf less Inf
        changes: np.ndarray = own - _array(before)
    return changes


def _array(sample: Sample) -> np.ndarray:
    values = value_of(sample.values)
    if isinstance(values, torch.Tensor):
        is_wide = values.dtype is torch.float64
        values = sample.values = (values if is_wide else values.float()).numpy()
    found: np.ndarray = values
    return found


def _described(
    sources: Sequence[_SampleSource], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of sources of at most `width` elements, and the codes and counts of their bins."""
    lengths = np.array([len(source.values) for source in sources])
    dtype = np.result_type(*{source.values.dtype for source in sources})
    stack = np.full((len(sources), width), np.nan, dtype)
    for row, source in enumerate(sources):
        stack[row, : len(source.values)] = source.values
    narrow = narrowed(stack)
    counts = _bin_counts(narrow, width - lengths)
    found = row_statistics(stack)
    rows = np.zeros(len(sources), ROW)
    rows["calls"], rows["sampled"] = 1, lengths
    rows["dead"] = rows["saturated"] = np.nan
    rows["total"], rows["squares"] = found.total, found.squares
    rows["quantiles"] = _quantiles(narrow, found.num_finite)
    # Infinities are outside the range of the finite values; NaN stays if there are none of either.
    infinite = np.where(counts[:, [MINUS_INF, PLUS_INF]] > 0, [-np.inf, np.inf], np.nan)
    rows["low"] = np.fmin(found.low, np.fmin(*infinite.T))
    rows["high"] = np.fmax(found.high, np.fmax(*infinite.T))
    _add_ranges(rows, counts, sources)
    _add_absent(rows, counts, sources)
    filled = np.flatnonzero(counts > 0)
    own_rows, codes = np.divmod(filled, NUM_BINS)
    rows["num_bins"] = np.bincount(own_rows, minlength=len(rows))
    return rows, codes.astype("<u2"), counts.reshape(-1)[filled].astype("<u8")


def _bin_counts(values: np.ndarray, num_padded: np.ndarray) -> np.ndarray:
    """How many elements of each row (float32) lie in each bin, without those that are padding."""
    num_rows = len(values)
    keys = bins_of(values) + np.arange(num_rows)[:, None] * NUM_BINS
    counts = np.bincount(keys.reshape(-1), minlength=num_rows * NUM_BINS)
    found = counts.reshape(num_rows, NUM_BINS)
    found[:, NAN] -= num_padded
    return found


def _quantiles(values: np.ndarray, num_finite: np.ndarray) -> np.ndarray:
    """The quantiles of the finite elements of each row (float32)."""
    if np.isinf(values).any():
        values = np.where(np.isinf(values), np.nan, values)
    ordered = np.sort(values, axis=1)  # NaN last
    places = QUANTILES * np.maximum(num_finite - 1, 0)[:, None]
    below = places.astype(np.int64)
    lower, upper = (
        np.take_along_axis(ordered, each, 1).astype(np.float64)
        for each in (below, np.ceil(places).astype(np.int64))
    )
    return narrowed(lower + (upper - lower) * (places - below))


def _add_ranges(rows: np.ndarray, counts: np.ndarray, sources: Sequence[_SampleSource]) -> None:
    """Fills in what is known of all elements."""
    rows["elements"] = [source.sample.plan.num_elements for source in sources]
    is_whole = rows["elements"] == rows["sampled"]
    rows["flags"][is_whole] = RANGE_IS_EXACT
    rows["flags"][is_whole & (counts[:, NAN] > 0)] |= HAS_NAN
    known = [row for row, source in enumerate(sources) if source.has_range]
    low, high = (
        np.array([float(value_of(getattr(sources[row].sample, name))) for row in known])
        for name in ("low", "high")
    )
    # With NaN among the elements, the range of the others is unknown: keep that of the sample.
    has_nan = np.isnan(low)
    rows["flags"][known] = np.where(has_nan, HAS_NAN, RANGE_IS_EXACT)
    chosen = np.array(known, np.int64)[~has_nan]
    rows["low"][chosen], rows["high"][chosen] = low[~has_nan], high[~has_nan]


def _add_absent(rows: np.ndarray, counts: np.ndarray, sources: Sequence[_SampleSource]) -> None:
    """Adds the elements that sparse tensors do not store: zeros, in proportion to the sample."""
    for row, (sample, values, _) in enumerate(sources):
        if sample.num_absent:
            count = round(sample.num_absent * len(values) / sample.plan.num_elements)
            counts[row, ZERO] += count
            rows["sampled"][row] += count
            rows["elements"][row] += sample.num_absent
            rows["low"][row] = np.fmin(rows["low"][row], 0)
            rows["high"][row] = np.fmax(rows["high"][row], 0)
            rows["quantiles"][row] = _quantiles_with_zeros(values, count)


def _quantiles_with_zeros(values: np.ndarray, num_zeros: int) -> np.ndarray:
    """Quantiles of the finite values together with `num_zeros` zeros."""
    ordered = np.sort(values[np.isfinite(values)])
    total = len(ordered) + num_zeros
    if not total:
        return np.full(len(QUANTILES), np.nan, np.float32)
    split = int(np.searchsorted(ordered, 0))
    # The positions of the first and the last zero.
    zeros = np.array([split, split + num_zeros - 1]) if num_zeros else np.zeros(0, np.int64)
    places = np.concatenate([np.arange(split), zeros, np.arange(split + num_zeros, total)])
    known = np.concatenate([ordered[:split], np.zeros(len(zeros)), ordered[split:]])
    return narrowed(np.interp(QUANTILES * (total - 1), places, known))
