"""Samples → columns: bins, ranges, sums and quantiles. Runs in a thread of its own, on numpy alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens.monitoring.bins import MINUS_INF, NAN, PLUS_INF, ZERO, bins_of, narrowed, raw_bins_of
from torchlens.monitoring.columns import HAS_NAN, QUANTILES, RANGE_IS_EXACT, Columns, merged
from torchlens.monitoring.samples import Plan, Sample, value_of

__all__ = ["Observation", "UnitActivity", "nonfinite_counts", "summarized"]


# One tensor that was looked at for a series (its number). With a second sample, the series is of the change since then.
Observation = tuple[int, Sample, Sample | None]


class UnitActivity:
    """Which units of a series ever gave something other than zero, over as many steps as it takes to tell.

    A sample has few elements of each unit. They are counted until `least` of each were seen; then it is known which units
    are dead, and counting begins anew: a unit may die later.
    """

    def __init__(self, series: Collection[int], least: float) -> None:
        self.series = series  # those that are counted; may grow
        self._least = least
        self._windows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # how many elements of each unit were seen, which live
        self._shares: dict[int, float] = {}

    def dead_share(self, series: int, values: np.ndarray, plan: Plan, has_zeros: bool) -> float:
        """The share of units that were dead when that was last known; NaN before. A series without any zero has no such."""
        if not has_zeros and series not in self._windows and series not in self._shares:
            return float("nan")
        units = plan.units_of_sample()
        if units is None:
            return float("nan")
        unit_of, sizes = units
        count = len(sizes)
        seen, alive = self._windows.get(series) or (np.zeros(count, np.int64), np.zeros(count, bool))
        if len(seen) != count:  # the number of its units changed
            seen, alive = np.zeros(count, np.int64), np.zeros(count, bool)
        seen += sizes
        if not alive.all():
            alive[unit_of[values != 0]] = True
        known = seen >= self._least
        if np.count_nonzero(known) > 0.9 * count:  # of a few units the fixed places may have nothing
            self._shares[series] = float(1 - alive[known].mean())
            self._windows.pop(series, None)
        else:
            self._windows[series] = seen, alive
        return self._shares.get(series, float("nan"))


def summarized(
    observations: Sequence[Observation], limits: Mapping[int, tuple[float, float]], activity: UnitActivity | None = None
) -> Columns:
    """One row for each series. `limits` are those of activations that have some; `activity` counts dead units."""
    rows: dict[tuple[int, int], int] = {}
    sources: list[Observation] = []
    place: list[int] = []  # the row of each: what one module returns, the next is given
    for observation in observations:
        key = id(observation[1]), id(observation[2])
        row = rows.setdefault(key, len(sources))
        if row == len(sources):
            sources.append(observation)
        place.append(row)
    if not sources:
        return merged([])
    series = [number for number, _, _ in observations]
    return merged([_fanned_out(series, np.array(place), _rows(sources), sources, limits, activity)])


class _Rows(NamedTuple):
    """Statistics of samples, in the order in which those came."""

    stacks: list[np.ndarray]  # the samples of one length and type together
    groups: np.ndarray  # in which of these each row is
    places: np.ndarray  # and where
    floats: np.ndarray  # low, high, total, squares
    flags: np.ndarray
    sizes: np.ndarray  # elements, sampled
    quantiles: np.ndarray
    # The bins of all rows in one, in no order of rows: where those of each begin, and how many it has.
    starts: np.ndarray
    num_bins: np.ndarray
    codes: np.ndarray
    counts: np.ndarray

    def values(self, row: int) -> np.ndarray:
        """The sample itself."""
        found: np.ndarray = self.stacks[self.groups[row]][self.places[row]]
        return found


def _rows(sources: list[Observation]) -> _Rows:
    """All samples of one length and type at once: one after the other, numpy would be called thousands of times."""
    count = len(sources)
    values = [_array(sample) for _, sample, _ in sources]
    floats, quantiles = np.empty((count, 4)), np.empty((count, 9), np.float32)
    sizes = np.array([(sample.plan.num_elements, 0) for _, sample, _ in sources], np.int64)
    starts, num_bins = np.zeros(count, np.int64), np.zeros(count, np.int64)
    all_codes: list[np.ndarray] = []
    all_counts: list[np.ndarray] = []
    num_before = 0
    groups_of, places_in_group = np.zeros(count, np.int64), np.zeros(count, np.int64)
    stacks: list[np.ndarray] = []
    groups: dict[tuple[int, np.dtype[Any], bool], list[int]] = {}
    for row, (own, (_, _, before)) in enumerate(zip(values, sources, strict=True)):
        groups.setdefault((len(own), own.dtype, before is not None), []).append(row)
    for (length, _, is_change), members in groups.items():
        rows = np.array(members)
        together = _stacked([values[row] for row in members])
        if is_change:
            with np.errstate(invalid="ignore"):  # Inf less Inf
                together -= _stacked([_array(before) for row in members if (before := sources[row][2]) is not None])
        together += 0  # −0 is 0
        groups_of[rows], places_in_group[rows] = len(stacks), np.arange(len(rows))
        stacks.append(together)
        own_floats, own_quantiles, ordered, is_finite = _numbers(together)
        floats[rows], quantiles[rows], sizes[rows, 1] = own_floats, own_quantiles, length
        codes, counts, own_num_bins = _bins(ordered, is_finite)
        num_bins[rows] = own_num_bins
        starts[rows] = num_before + np.cumsum(own_num_bins) - own_num_bins
        num_before += len(codes)
        all_codes.append(codes)
        all_counts.append(counts)
    flags, codes, counts = np.zeros(count, np.uint8), np.concatenate(all_codes), np.concatenate(all_counts)
    found = _Rows(
        stacks, groups_of, places_in_group, floats, flags, sizes, quantiles, starts, num_bins, codes, counts
    )  # fmt: skip
    _add_ranges(found, sources)
    return found


def _array(sample: Sample) -> np.ndarray:
    """The elements of a sample, as numbers that numpy knows."""
    values = value_of(sample.values)
    if isinstance(values, torch.Tensor):
        values = (values if values.dtype in (torch.float32, torch.float64) else values.float()).numpy()
        sample.values = values
    found: np.ndarray = values
    return found


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).reshape(len(arrays), -1)


def _numbers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(low, high, total and squares; quantiles; the values in order; which are finite) of samples of one length."""
    ordered = np.sort(values, axis=1)  # NaN last
    length = values.shape[1]
    wide = values.astype(np.float64)
    is_finite = np.isfinite(ordered[:, 0]) & np.isfinite(ordered[:, -1])
    if not is_finite.all():
        wide[~np.isfinite(wide)] = 0.0
    with np.errstate(over="ignore"):
        total, squares = wide.sum(1), np.einsum("ij,ij->i", wide, wide)
    places = QUANTILES * (length - 1)
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, length - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        lower, upper = ordered[:, below].astype(np.float64), ordered[:, above].astype(np.float64)
        quantiles = (lower + (upper - lower) * (places - below)).astype(np.float32)
    floats = np.stack([ordered[:, 0], ordered[:, -1], total, squares], 1)
    for row in np.flatnonzero(~is_finite).tolist():
        real = ordered[row][~np.isnan(ordered[row])]
        floats[row, :2] = (real[0], real[-1]) if len(real) else np.nan
        finite = real[np.isfinite(real)]
        with np.errstate(over="ignore"):
            quantiles[row] = np.quantile(finite.astype(np.float64), QUANTILES) if len(finite) else np.nan
    return floats, quantiles, ordered, is_finite


def _bins(ordered: np.ndarray, is_finite: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, counts, how many bins each row has) of rows in order: a bin is a run of equal codes."""
    narrow = narrowed(ordered)
    # Of numbers in order, zeros (there is no −0 any more) stand together, and the code says which they are only at their
    # beginning; unless there are some that are not finite, or so small that they share the code of zero.
    codes = raw_bins_of(narrow) if is_finite.all() else bins_of(narrow)
    is_first = np.empty(codes.shape, bool)
    flat, flat_first = codes.reshape(-1), is_first.reshape(-1)
    np.not_equal(flat[1:], flat[:-1], out=flat_first[1:])
    is_first[:, 0] = True
    begins = np.flatnonzero(flat_first)
    counts = np.diff(begins, append=codes.size)
    found = flat[begins]
    if codes.dtype == np.uint32:
        numbers = narrow.reshape(-1)
        is_zero = (found == 0) & (numbers[begins] == 0)
        if (numbers[(begins + counts - 1)[is_zero]] != 0).any():
            return _bins(ordered, np.zeros_like(is_finite))
        found[is_zero] = ZERO
    return found, counts, np.diff(np.searchsorted(begins, np.arange(len(codes) + 1) * codes.shape[1]))


def _add_ranges(found: _Rows, sources: list[Observation]) -> None:
    """The ranges of all elements, where they are known."""
    rows: list[int] = []
    lows: list[Any] = []
    highs: list[Any] = []
    for row, (_, sample, before) in enumerate(sources):
        if sample.low is not None and before is None:
            rows.append(row)
            lows.append(_number(sample.low))
            highs.append(_number(sample.high))
    low, high, chosen = np.array(lows, np.float64), np.array(highs, np.float64), np.array(rows, np.int64)
    has_nan = np.isnan(low)
    # With NaN among them the range of the rest is not known: what there is, is the sample's.
    found.flags[chosen] |= np.where(has_nan, HAS_NAN, RANGE_IS_EXACT).astype(np.uint8)
    found.floats[chosen[~has_nan], 0], found.floats[chosen[~has_nan], 1] = low[~has_nan], high[~has_nan]
    is_whole = found.sizes[:, 0] == found.sizes[:, 1]  # all were looked at
    found.flags[is_whole] |= RANGE_IS_EXACT
    found.flags[is_whole & _rows_with(NAN, found)] |= HAS_NAN


def _number(part: Any) -> Any:
    value = value_of(part)
    return value.item() if isinstance(value, torch.Tensor) else value


def _fanned_out(
    series: list[int],
    place: np.ndarray,
    rows: _Rows,
    sources: list[Observation],
    limits: Mapping[int, tuple[float, float]],
    activity: UnitActivity | None,
) -> Columns:
    dead = np.full(len(series), np.nan, np.float32)
    saturated = np.full(len(series), np.nan, np.float32)
    if activity is not None:
        has_zeros = _rows_with(ZERO, rows).tolist()
        for number, (own, row) in enumerate(zip(series, place.tolist(), strict=True)):
            if own in activity.series:
                dead[number] = activity.dead_share(own, rows.values(row), sources[row][1].plan, has_zeros[row])
    bounded: dict[tuple[int, tuple[float, float]], list[int]] = {}
    if limits:
        for number, own in enumerate(series):
            if own in limits:
                bounded.setdefault((int(rows.groups[place[number]]), limits[own]), []).append(number)
    for (group, (low, high)), numbers in bounded.items():
        values = rows.stacks[group][rows.places[place[numbers]]]
        saturated[numbers] = np.count_nonzero((values <= low) | (values >= high), axis=1) / values.shape[1]
    num_bins = rows.num_bins[place]
    ends = np.cumsum(num_bins)
    chosen = np.arange(ends[-1]) + np.repeat(rows.starts[place] - ends + num_bins, num_bins)
    return Columns(
        series=np.array(series, "<u4"),
        calls=np.ones(len(series), "<u4"),
        elements=rows.sizes[place, 0].astype("<u8"),
        sampled=rows.sizes[place, 1].astype("<u8"),
        flags=rows.flags[place],
        low=rows.floats[place, 0],
        high=rows.floats[place, 1],
        total=rows.floats[place, 2],
        squares=rows.floats[place, 3],
        dead=dead,
        saturated=saturated,
        quantiles=rows.quantiles[place],
        num_bins=num_bins.astype("<u2"),
        codes=rows.codes[chosen].astype("<u2"),
        counts=rows.counts[chosen].astype("<u8"),
    )


def _rows_with(code: int, rows: _Rows) -> np.ndarray:
    """Which rows have a bin."""
    found = np.zeros(len(rows.starts), bool)
    places = np.flatnonzero(rows.codes == code)
    if len(places):
        order = np.argsort(rows.starts)  # bins lie by the rows' starts
        found[order[np.searchsorted(rows.starts[order], places, "right") - 1]] = True
    return found


def nonfinite_counts(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """How many NaN and how many Inf the sample of each row has."""
    rows = np.repeat(np.arange(len(columns)), columns.num_bins)
    nan = np.bincount(rows, weights=columns.counts * (columns.codes == NAN), minlength=len(columns))
    is_inf = (columns.codes == PLUS_INF) | (columns.codes == MINUS_INF)
    return nan, np.bincount(rows, weights=columns.counts * is_inf, minlength=len(columns))
