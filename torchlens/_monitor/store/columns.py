"""The statistics of a recorded step: a row for each series, in columns. Steps merge by addition."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchlens._monitor.store.bins import MINUS_INF, NAN, NUM_BINS, PLUS_INF, ZERO

QUANTILES = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])

# Flags: what is known of all elements, not only of the sample.
RANGE_IS_EXACT = 1  # `low` and `high`
HAS_NAN = 2  # there is NaN among all elements (known if the range is exact)


class SeriesKey(NamedTuple):
    """Identifies a series: the module, the kind, and which of several tensors ('weight', '1',
    'logits'; '' if there is one).
    """

    module: str
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(eq=False)
class Columns:
    """Rows in the order of `series`, each series once. `codes` and `counts` hold the bins of all
    rows, row after row. The statistics are NaN where nothing that was sampled is finite.
    """

    series: np.ndarray  # the number of the series
    calls: np.ndarray  # how many tensors were sampled
    elements: np.ndarray  # how many elements those have
    sampled: np.ndarray  # how many of them are in the sample
    flags: np.ndarray
    low: np.ndarray  # of all elements if RANGE_IS_EXACT, else of the sample; without NaN
    high: np.ndarray
    total: np.ndarray  # the sum of what is finite in the sample
    squares: np.ndarray  # the sum of its squares
    dead: np.ndarray  # the share of units of which every sampled value is zero, or NaN
    saturated: np.ndarray  # the share of the sample at the limits of the activation, or NaN
    quantiles: np.ndarray  # of what is finite in the sample; weighted means where steps merged
    num_bins: np.ndarray  # how many bins each row has
    codes: np.ndarray  # see bins.py
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.series)

    @property
    def starts(self) -> np.ndarray:
        """The place of the first bin of each row, and the number of all bins at the end."""
        return np.concatenate([[0], np.cumsum(self.num_bins, dtype=np.int64)])

    def row_of(self, series: int) -> int | None:
        """The row of a series; None if it has none."""
        row = int(np.searchsorted(self.series, series))
        return row if row < len(self.series) and self.series[row] == series else None

    def taken(self, rows: Sequence[int]) -> "Columns":
        """The given rows, in order; a row may be given several times."""
        num_bins = self.num_bins[rows].astype(np.int64)
        ends = np.cumsum(num_bins)
        chosen = np.arange(num_bins.sum()) + np.repeat(
            self.starts[rows] - ends + num_bins, num_bins
        )
        return columns_of(rows_of(self)[rows], self.codes[chosen], self.counts[chosen])

    def bins(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The codes of the bins of a row, and how many elements lie in each."""
        start = int(self.num_bins[:row].sum(dtype=np.int64))
        own = slice(start, start + int(self.num_bins[row]))
        return self.codes[own], self.counts[own].astype(np.int64)

    def counted(self, *codes: int) -> np.ndarray:
        """How many sampled elements of each row lie in some bins."""
        is_counted = self.codes == codes[0]
        for code in codes[1:]:
            is_counted |= self.codes == code
        places = np.flatnonzero(is_counted)
        if not len(places):
            return np.zeros(len(self))
        rows = np.searchsorted(self.starts, places, "right") - 1
        return np.bincount(rows, weights=self.counts[places], minlength=len(self))

    @cached_property
    def num_finite(self) -> np.ndarray:
        """How many of the sampled elements are finite."""
        return self.sampled - self.counted(NAN, PLUS_INF, MINUS_INF)

    @cached_property
    def mean(self) -> np.ndarray:
        """The mean of what is finite."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.asarray(self.total / self.num_finite)

    @cached_property
    def rms(self) -> np.ndarray:
        """The root mean square of what is finite."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return np.asarray(np.sqrt(self.squares / self.num_finite))

    @cached_property
    def std(self) -> np.ndarray:
        """The standard deviation of what is finite."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            square = self.squares / self.num_finite
            return np.asarray(np.sqrt(np.maximum(square - self.mean**2, 0)))

    @cached_property
    def zero(self) -> np.ndarray:
        """The share of the sample that is exactly zero."""
        return np.asarray(self.counted(ZERO) / np.maximum(self.sampled, 1))

    @cached_property
    def nonfinite(self) -> np.ndarray:
        """The share of the sample that is NaN or infinite; a tiny number if only elements outside
        the sample are.
        """
        share = (self.sampled - self.num_finite) / np.maximum(self.sampled, 1)
        is_outside = (self.flags & HAS_NAN > 0) | np.isinf(self.low) | np.isinf(self.high)
        return np.where(is_outside, np.maximum(share, 1 / np.maximum(self.elements, 1)), share)


# A row as it lies in a file; bins follow in arrays of their own.
ROW = np.dtype([
    ("series", "<u4"), ("calls", "<u4"), ("elements", "<u8"), ("sampled", "<u8"),
    ("flags", "u1"), ("low", "<f8"), ("high", "<f8"), ("total", "<f8"), ("squares", "<f8"),
    ("dead", "<f4"), ("saturated", "<f4"), ("quantiles", "<f4", (9,)), ("num_bins", "<u2"),
])  # fmt: skip
_NAMES = ROW.names or ()


@dataclass(slots=True, eq=False)
class Step:
    """The columns of a recorded step, or of several that were merged: `first` to `last`, `count` of
    them recorded.
    """

    first: int
    last: int
    count: int
    time: float
    dropped: int  # tensors that were not recorded, since the step before
    columns: Columns


def empty_columns() -> Columns:
    """No rows."""
    rows = np.zeros(0, ROW)
    return columns_of(rows, np.zeros(0, "<u2"), np.zeros(0, "<u8"))


def columns_of(rows: np.ndarray, codes: np.ndarray, counts: np.ndarray) -> Columns:
    """Columns from rows as they lie in a file."""
    return Columns(**{name: rows[name] for name in _NAMES}, codes=codes, counts=counts)


def rows_of(columns: Columns) -> np.ndarray:
    """Rows as they lie in a file."""
    rows = np.zeros(len(columns), ROW)
    for name in _NAMES:
        rows[name] = getattr(columns, name)
    return rows


def merged(parts: Sequence[Columns]) -> Columns:
    """One row for each series of any part: counts add up exactly, ranges widen, quantiles and
    shares are weighted means.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        return empty_columns()
    if len(parts) == 1 and bool((parts[0].series[1:] > parts[0].series[:-1]).all()):
        return parts[0]
    together = _concatenated(parts)
    series, place = np.unique(together["series"], return_inverse=True)
    size = len(series)
    rows = np.zeros(size, ROW)
    rows["series"] = series
    for name in ("calls", "elements", "sampled", "total", "squares"):
        np.add.at(rows[name], place, together[name])
    rows["low"], rows["high"] = _ranges(place, size, together["low"], together["high"])
    rows["flags"] = RANGE_IS_EXACT
    np.bitwise_and.at(rows["flags"], place, together["flags"])
    np.bitwise_or.at(rows["flags"], place, together["flags"] & HAS_NAN)
    weights = together["sampled"].astype(np.float64)
    for name in ("dead", "saturated"):
        rows[name] = _means(place, size, together[name], weights)
    for number, quantile in enumerate(together["quantiles"].T):
        rows["quantiles"][:, number] = _means(place, size, quantile, weights)
    keys = np.repeat(place, together["num_bins"]) * NUM_BINS + together["codes"]
    found, where = np.unique(keys, return_inverse=True)
    counts = np.zeros(len(found), "<u8")
    np.add.at(counts, where, together["counts"])
    rows["num_bins"] = np.bincount(found // NUM_BINS, minlength=size)
    return columns_of(rows, (found % NUM_BINS).astype("<u2"), counts)


def _concatenated(parts: Sequence[Columns]) -> dict[str, np.ndarray]:
    """The columns of all parts, by name, one after the other."""
    names = (*_NAMES, "codes", "counts")
    return {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}


def _ranges(
    place: np.ndarray, size: int, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The range of each row; NaN where no part has one."""
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.fmin.at(low, place, lows)
    np.fmax.at(high, place, highs)
    has_none = np.full(size, True)
    np.logical_and.at(has_none, place, np.isnan(lows))
    low[has_none] = high[has_none] = np.nan
    return low, high


def _means(place: np.ndarray, size: int, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means of what is not NaN."""
    known = ~np.isnan(values)
    sums, total = np.zeros(size), np.zeros(size)
    np.add.at(sums, place[known], values[known].astype(np.float64) * weights[known])
    np.add.at(total, place[known], weights[known])
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums / total).astype("<f4")


def as_one(steps: Sequence[Step]) -> Step:
    """One step in place of several of one rank: neighbours, or parts of the same step."""
    if len(steps) == 1:
        return steps[0]
    return Step(
        first=min(step.first for step in steps),
        last=max(step.last for step in steps),
        count=sum({(step.first, step.last): step.count for step in steps}.values()),
        time=steps[-1].time,
        dropped=sum(step.dropped for step in steps),
        columns=merged([step.columns for step in steps]),
    )


def in_blocks(steps: Sequence[Step], level: int, every: int) -> tuple[int, list[Step]]:
    """(level, steps) with fewer steps: those of a block become one.

    One of every `every` steps is recorded; a block has 2 ** level of those, and begins at the same
    number in the files of all ranks, so that ranks can be joined when they are read. If no block
    has two steps, the level rises until one has.
    """
    while True:
        blocks: dict[int, list[Step]] = {}
        for step in steps:
            blocks.setdefault(step.first // every >> level, []).append(step)
        if len(blocks) < len(steps) or len(steps) < 2:
            return level, [as_one(block) for block in blocks.values()]
        level += 1
