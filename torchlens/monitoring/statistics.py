"""Samples → columns: bins, ranges, sums and quantiles. Runs in a thread of its own, on numpy alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchlens.monitoring.bins import MINUS_INF, NAN, PLUS_INF, ZERO, bins_of, narrowed
from torchlens.monitoring.columns import HAS_NAN, QUANTILES, RANGE_IS_EXACT, Columns, merged
from torchlens.monitoring.samples import Plan, Sample, value_of

__all__ = ["Observation", "UnitActivity", "nonfinite_counts", "summarized"]


class Observation(NamedTuple):
    """One tensor that was looked at for a series. With `before`, the series is of the change since then."""

    series: int
    sample: Sample
    before: Sample | None = None


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
        units = plan.unit_of_each()
        if units is None:
            return float("nan")
        unit_of, count = units
        seen, alive = self._windows.get(series) or (np.zeros(count, np.int64), np.zeros(count, bool))
        if len(seen) != count:  # the number of its units changed
            seen, alive = np.zeros(count, np.int64), np.zeros(count, bool)
        seen += np.bincount(unit_of, minlength=count)
        alive[unit_of[values != 0]] = True
        known = seen >= self._least
        if known.mean() > 0.9:  # of a few units the fixed places may have nothing
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
    arrays: list[np.ndarray] = []
    sources: list[Observation] = []
    fan_out: list[tuple[int, int]] = []  # series and row: what one module returns, the next is given
    for observation in observations:
        key = id(observation.sample), id(observation.before)
        row = rows.get(key)
        if row is None:
            row = rows[key] = len(arrays)
            arrays.append(_values(observation))
            sources.append(observation)
        fan_out.append((observation.series, row))
    if not arrays:
        return merged([])
    return merged([_fanned_out(fan_out, _rows(arrays, sources), arrays, sources, limits, activity)])


def _values(observation: Observation) -> np.ndarray:
    values = _numpy(value_of(observation.sample.values))
    if observation.before is None:
        return values
    with np.errstate(invalid="ignore"):  # Inf less Inf
        found: np.ndarray = values - _numpy(value_of(observation.before.values))
    return found


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    found: np.ndarray = tensor.numpy()
    return found


class _Rows(NamedTuple):
    """Statistics of samples, in the order in which those came; bins by row."""

    floats: np.ndarray  # low, high, total, squares
    flags: np.ndarray
    sizes: np.ndarray  # elements, sampled
    quantiles: np.ndarray
    bins: list[tuple[np.ndarray, np.ndarray]]


def _rows(arrays: list[np.ndarray], sources: list[Observation]) -> _Rows:
    count = len(arrays)
    found = _Rows(
        np.empty((count, 4)), np.zeros(count, np.uint8), np.zeros((count, 2), np.int64),
        np.empty((count, 9), np.float32), [(_NO_CODES, _NO_COUNTS)] * count,
    )  # fmt: skip
    by_length: dict[tuple[int, np.dtype], list[int]] = {}
    for row, values in enumerate(arrays):
        by_length.setdefault((len(values), values.dtype), []).append(row)
    for rows in by_length.values():
        _fill(found, np.array(rows), np.stack([arrays[row] for row in rows]))
    _add_ranges(found, sources)
    return found


_NO_CODES, _NO_COUNTS = np.zeros(0, np.uint16), np.zeros(0, np.int64)


def _fill(found: _Rows, rows: np.ndarray, values: np.ndarray) -> None:
    """Samples of one length together."""
    ordered = np.sort(values, axis=1)  # NaN last
    wide = values.astype(np.float64)
    is_finite = np.isfinite(wide).all(axis=1)
    if not is_finite.all():
        wide[~np.isfinite(wide)] = 0.0
    length = values.shape[1]
    with np.errstate(over="ignore"):
        found.floats[rows, 2], found.floats[rows, 3] = wide.sum(1), np.einsum("ij,ij->i", wide, wide)
    found.sizes[rows, 1] = length
    places = QUANTILES * (length - 1)
    below = np.floor(places).astype(np.int64)
    above = np.minimum(below + 1, length - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        lower, upper = ordered[:, below].astype(np.float64), ordered[:, above].astype(np.float64)
        found.quantiles[rows] = lower + (upper - lower) * (places - below)
    found.floats[rows, 0], found.floats[rows, 1] = ordered[:, 0], ordered[:, -1]
    for place in np.flatnonzero(~is_finite):
        own_row = rows[place]
        real = ordered[place][~np.isnan(ordered[place])]
        found.floats[own_row, :2] = (real[0], real[-1]) if len(real) else np.nan
        finite = real[np.isfinite(real)]
        found.quantiles[own_row] = np.quantile(finite.astype(np.float64), QUANTILES) if len(finite) else np.nan
    codes = bins_of(narrowed(ordered))
    is_first = np.ones(codes.shape, bool)
    is_first[:, 1:] = codes[:, 1:] != codes[:, :-1]
    starts = np.flatnonzero(is_first)
    counts = np.diff(np.append(starts, codes.size))
    codes = codes.reshape(-1)[starts]
    bounds = np.searchsorted(starts, np.arange(len(rows) + 1) * length)
    for line, number in enumerate(rows.tolist()):
        own = slice(bounds[line], bounds[line + 1])
        found.bins[number] = codes[own], counts[own]


def _add_ranges(found: _Rows, sources: list[Observation]) -> None:
    """The ranges of all elements, where they are known."""
    known = [row for row, each in enumerate(sources) if each.sample.low is not None and each.before is None]
    if known:
        # One tensor after the other would ask torch twice for each.
        by_dtype: dict[torch.dtype, list[int]] = {}
        lows = {row: value_of(sources[row].sample.low) for row in known}
        for row in known:
            by_dtype.setdefault(lows[row].dtype, []).append(row)
        for rows in by_dtype.values():
            both = [lows[row] for row in rows] + [value_of(sources[row].sample.high) for row in rows]
            values = torch.stack([each.reshape(()) for each in both]).double().numpy()
            low, high = values[: len(rows)], values[len(rows) :]
            chosen = np.array(rows)
            has_nan = np.isnan(low)
            found.flags[chosen] |= np.where(has_nan, HAS_NAN | RANGE_IS_EXACT, RANGE_IS_EXACT).astype(np.uint8)
            found.floats[chosen[~has_nan], 0], found.floats[chosen[~has_nan], 1] = low[~has_nan], high[~has_nan]
            # With NaN among them the range of the rest is not known: what there is, is the sample's.
            found.flags[chosen[has_nan]] &= np.uint8(255 - RANGE_IS_EXACT)
    for row, each in enumerate(sources):
        plan: Plan = each.sample.plan
        found.sizes[row, 0] = plan.num_elements
        if plan.num_elements == found.sizes[row, 1]:  # all were looked at
            codes = found.bins[row][0]
            found.flags[row] |= RANGE_IS_EXACT | (HAS_NAN if NAN in codes else 0)


def _fanned_out(
    fan_out: list[tuple[int, int]],
    rows: _Rows,
    arrays: list[np.ndarray],
    sources: list[Observation],
    limits: Mapping[int, tuple[float, float]],
    activity: UnitActivity | None,
) -> Columns:
    series, place = (np.array(each) for each in zip(*fan_out, strict=True))
    dead = np.full(len(fan_out), np.nan, np.float32)
    saturated = np.full(len(fan_out), np.nan, np.float32)
    for number, (own, row) in enumerate(fan_out):
        if activity is not None and own in activity.series:
            has_zeros = ZERO in rows.bins[row][0]
            dead[number] = activity.dead_share(own, arrays[row], sources[row].sample.plan, has_zeros)
        if own in limits:
            saturated[number] = _saturated_share(arrays[row], *limits[own])
    bins = [rows.bins[row] for row in place]
    return Columns(
        series=series.astype("<u4"),
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
        num_bins=np.array([len(codes) for codes, _ in bins], "<u2"),
        codes=np.concatenate([codes for codes, _ in bins]).astype("<u2"),
        counts=np.concatenate([counts for _, counts in bins]).astype("<u8"),
    )


def _saturated_share(values: np.ndarray, low: float, high: float) -> float:
    return float(((values <= low) | (values >= high)).mean())


def nonfinite_counts(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """How many NaN and how many Inf the sample of each row has."""
    rows = np.repeat(np.arange(len(columns)), columns.num_bins)
    nan = np.bincount(rows, weights=columns.counts * (columns.codes == NAN), minlength=len(columns))
    is_inf = (columns.codes == PLUS_INF) | (columns.codes == MINUS_INF)
    return nan, np.bincount(rows, weights=columns.counts * is_inf, minlength=len(columns))
