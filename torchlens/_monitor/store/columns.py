"""What is known of the tensors of a step: one row for each series, in columns, which merge by
addition.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from torchlens._monitor.record.bins import NUM_BINS

QUANTILES = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])

# Flags: what is known of all elements, and not of the sample alone.
RANGE_IS_EXACT = 1  # `low` and `high`
HAS_NAN = 2  # there is NaN among all elements (known if the range is exact)


@dataclass(slots=True, eq=False)
class Columns:
    """Rows in the order of `series`, each series once. `codes` and `counts` hold the bins of all
    rows, row after row.
    """

    series: np.ndarray  # u4: the number of the series, as the file's list of names has it
    calls: np.ndarray  # u4: how many tensors were looked at
    elements: np.ndarray  # u8: how many elements those have
    sampled: np.ndarray  # u8: how many of them were counted
    flags: np.ndarray  # u1
    low: np.ndarray  # f8: of all elements if RANGE_IS_EXACT, else of the sample; NaN apart
    high: np.ndarray  # f8
    total: np.ndarray  # f8: the sum of the sample, as far as it is finite
    squares: np.ndarray  # f8: the sum of its squares
    dead: (
        np.ndarray
    )  # f4: the share of units of which all that was sampled is zero; NaN where that means nothing
    saturated: (
        np.ndarray
    )  # f4: the share of the sample that lies at the limits of the activation; NaN without limits
    quantiles: (
        np.ndarray
    )  # f4, nine a row: of what is finite in the sample; weighted means where several merged
    num_bins: np.ndarray  # u2: how many bins each row has
    codes: np.ndarray  # u2: as in bins.py
    counts: np.ndarray  # u8

    def __len__(self) -> int:
        return len(self.series)

    @property
    def starts(self) -> np.ndarray:
        """Where the bins of each row begin, and at last their number."""
        return np.concatenate([[0], np.cumsum(self.num_bins, dtype=np.int64)])


TYPES = {
    "series": "<u4", "calls": "<u4", "elements": "<u8", "sampled": "<u8", "flags": "<u1",
    "low": "<f8", "high": "<f8",
    "total": "<f8", "squares": "<f8", "dead": "<f4", "saturated": "<f4", "quantiles": "<f4",
    "num_bins": "<u2",
    "codes": "<u2", "counts": "<u8",
}  # fmt: skip
assert list(TYPES) == [field.name for field in fields(Columns)]


def empty_columns() -> Columns:
    """No rows."""
    return Columns(
        **{
            name: np.zeros((0, 9) if name == "quantiles" else 0, kind)
            for name, kind in TYPES.items()
        }
    )


def merged(parts: Sequence[Columns]) -> Columns:
    """One row for each series of any part: counts add up exactly, ranges widen, quantiles and
    shares are weighted means.
    """
    parts = [part for part in parts if len(part)]
    if not parts:
        return empty_columns()
    if len(parts) == 1 and bool((parts[0].series[1:] > parts[0].series[:-1]).all()):
        return parts[0]
    together = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TYPES}
    series, place = np.unique(together["series"], return_inverse=True)
    size = len(series)
    weights = together["sampled"].astype(np.float64)

    def added(name: str) -> np.ndarray:
        found = np.zeros(size, TYPES[name])
        np.add.at(found, place, together[name])
        return found

    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.fmin.at(low, place, together["low"])
    np.fmax.at(high, place, together["high"])
    nothing = np.full(size, True)
    np.logical_and.at(nothing, place, np.isnan(together["low"]))
    low[nothing] = high[nothing] = np.nan
    exact = np.full(size, RANGE_IS_EXACT, np.uint8)
    np.bitwise_and.at(exact, place, together["flags"])
    has_nan = np.zeros(size, np.uint8)
    np.bitwise_or.at(has_nan, place, together["flags"] & HAS_NAN)
    keys = np.repeat(place, together["num_bins"]) * NUM_BINS + together["codes"]
    found, where = np.unique(keys, return_inverse=True)
    counts = np.zeros(len(found), "<u8")
    np.add.at(counts, where, together["counts"])
    return Columns(
        series=series.astype("<u4"),
        calls=added("calls"),
        elements=added("elements"),
        sampled=added("sampled"),
        flags=(exact & RANGE_IS_EXACT) | has_nan,
        low=low,
        high=high,
        total=added("total"),
        squares=added("squares"),
        dead=_means(place, size, together["dead"], weights),
        saturated=_means(place, size, together["saturated"], weights),
        quantiles=np.stack(
            [_means(place, size, each, weights) for each in together["quantiles"].T], 1
        ),
        num_bins=np.bincount(found // NUM_BINS, minlength=size).astype("<u2"),
        codes=(found % NUM_BINS).astype("<u2"),
        counts=counts,
    )


def _means(place: np.ndarray, size: int, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means of what is not NaN."""
    known = ~np.isnan(values)
    sums, total = np.zeros(size), np.zeros(size)
    np.add.at(sums, place[known], values[known].astype(np.float64) * weights[known])
    np.add.at(total, place[known], weights[known])
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums / total).astype("<f4")
