"""Samples → columns: ranges, sums, quantiles and bins, computed with numpy in the writer's thread.

Samples are stacked, so that a few dozen numpy calls process many of them: each call may hold the
GIL and delay the training thread. Stacks have two widths. Shorter samples are padded, and all
statistics exclude the padding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens._monitor.record.samples import SAMPLE_SIZE, Sample, value_of
from torchlens._monitor.record.series import UnitActivity
from torchlens._monitor.store.bins import NAN, ZERO, bins_of, narrowed, raw_bins_of
from torchlens._monitor.store.columns import HAS_NAN, QUANTILES, RANGE_IS_EXACT, Columns, merged

_WIDTHS = (SAMPLE_SIZE // 4, SAMPLE_SIZE)
# A stack of this size fits the processor's cache, and its memory is reused by the allocator.
_MOST_ROWS = 128


class Stack(NamedTuple):
    """Samples, one per row, padded with zeros."""

    members: np.ndarray  # the indices of the samples
    lengths: np.ndarray
    values: np.ndarray


class StackStatistics(NamedTuple):
    """Statistics of each row of a stack."""

    floats: np.ndarray  # low, high, total, squares
    quantiles: np.ndarray
    # The bins of all rows, row after row: the number of bins of each row, their codes and counts.
    num_bins: np.ndarray
    codes: np.ndarray
    counts: np.ndarray


def stacked(samples: Sequence[np.ndarray], befores: Sequence[np.ndarray | None]) -> list[Stack]:
    """Stacks of the samples, by width and type, of at most `_MOST_ROWS` rows. Where an array of
    `befores` is given, the row is the change from it.
    """
    by_kind: dict[tuple[int, str], list[int]] = {}
    for number, sample in enumerate(samples):
        length = len(sample)
        width = _WIDTHS[0] if length <= _WIDTHS[0] else max(length, _WIDTHS[1])
        by_kind.setdefault((width, sample.dtype.char), []).append(number)
    found = []
    chunks = [
        (width, numbers[start : start + _MOST_ROWS])
        for (width, _), numbers in by_kind.items()
        for start in range(0, len(numbers), _MOST_ROWS)
    ]
    for width, members in chunks:
        values, lengths = _filled_up([samples[number] for number in members], width)
        changed = [
            (row, before)
            for row, number in enumerate(members)
            if (before := befores[number]) is not None
        ]
        if changed:
            earlier, _ = _filled_up([before for _, before in changed], width)
            with np.errstate(invalid="ignore"):  # Inf less Inf
                values[[row for row, _ in changed]] -= earlier
        values += 0  # −0 is 0
        found.append(Stack(np.array(members), lengths, values))
    return found


def _filled_up(arrays: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(each) for each in arrays])
    together = np.concatenate(arrays)
    if len(together) == len(arrays) * width:
        return together.reshape(-1, width), lengths
    values = np.zeros((len(arrays), width), together.dtype)
    values[np.arange(width) < lengths[:, None]] = together
    return values, lengths


def statistics_of(stack: Stack) -> StackStatistics:
    """Ranges, sums, quantiles and bins of each row."""
    values, lengths = stack.values, stack.lengths
    num_rows, width = values.shape
    ordered = values.copy()
    if (lengths < width).any():
        ordered[np.arange(width) >= lengths[:, None]] = np.nan
    ordered.sort(axis=1)  # NaN last
    flat = ordered.reshape(-1)
    begins = np.arange(num_rows) * width
    low, high = flat[begins], flat[begins + lengths - 1]
    bad = np.flatnonzero(~(np.isfinite(low) & np.isfinite(high)))
    starts, ends = begins, begins + lengths  # of the finite values in each row
    if len(bad):
        own = ordered[bad]
        num_real = width - np.count_nonzero(np.isnan(own), axis=1)
        starts = begins.copy()
        starts[bad] += np.count_nonzero(np.isneginf(own), axis=1)
        ends[bad] = begins[bad] + num_real - np.count_nonzero(np.isposinf(own), axis=1)
        high[bad] = np.where(num_real > 0, flat[begins[bad] + np.maximum(num_real - 1, 0)], np.nan)
    floats = np.stack([low, high, *_sums(values, bad)], 1)
    return StackStatistics(
        floats, _quantiles(flat, starts, ends), *_bins(ordered, width - lengths,
        is_finite=not len(bad))
    )  # fmt: skip


def _sums(values: np.ndarray, bad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums and the sums of squares of the finite values in each row. `bad` are the rows that
    have other values.
    """
    wide = values.astype(np.float64)
    if len(bad):
        wide[bad] = np.where(np.isfinite(wide[bad]), wide[bad], 0.0)
    with np.errstate(over="ignore"):
        return np.einsum("ij->i", wide), np.einsum("ij,ij->i", wide, wide)


def _quantiles(flat: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The quantiles of each range of sorted numbers, from its start to its end."""
    span = np.maximum(ends - starts - 1, 0)[:, None]
    places = QUANTILES * span
    below = places.astype(np.int64)
    first = np.minimum(starts, len(flat) - 1)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        lower = flat[first + below].astype(np.float64)
        upper = flat[first + np.minimum(below + 1, span)].astype(np.float64)
        found = narrowed(lower + (upper - lower) * (places - below))
    found[ends <= starts] = np.nan
    return found


def _bins(
    ordered: np.ndarray, num_filled: np.ndarray, is_finite: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number of bins of each row, codes, counts) of sorted rows: a bin is a run of equal codes."""
    narrow = narrowed(ordered)
    # In a sorted row, zeros are adjacent (−0 was removed), so only the first of a run is compared
    # with zero below. Non-finite values, or tiny ones that share the raw code of zero, need
    # `bins_of`.
    codes = raw_bins_of(narrow) if is_finite else bins_of(narrow)
    num_rows, width = codes.shape
    is_first = np.empty(codes.shape, bool)
    flat, flat_first = codes.reshape(-1), is_first.reshape(-1)
    np.not_equal(flat[1:], flat[:-1], out=flat_first[1:])
    is_first[:, 0] = True
    begins = np.flatnonzero(flat_first)
    counts = np.diff(begins, append=codes.size)
    found = flat[begins]
    if is_finite:
        numbers = narrow.reshape(-1)
        is_zero = (found == 0) & (numbers[begins] == 0)
        if (numbers[(begins + counts - 1)[is_zero]] != 0).any():
            return _bins(ordered, num_filled, is_finite=False)
        found[is_zero] = ZERO
    num_bins = np.diff(np.searchsorted(begins, np.arange(num_rows + 1) * width))
    if num_filled.any():  # the padding is NaN, and sorted to the end of its row
        last = (np.cumsum(num_bins) - 1)[num_filled > 0]
        assert (found[last] == NAN).all()
        counts[last] -= num_filled[num_filled > 0]
        is_left = counts > 0
        rows = np.repeat(np.arange(num_rows), num_bins)
        found, counts, num_bins = (
            found[is_left],
            counts[is_left],
            np.bincount(rows[is_left], minlength=num_rows),
        )
    return num_bins, found, counts


_NUMBER_TYPES = frozenset({np.float32, np.float64})
# (number of the series, sample, earlier sample or None). With an earlier sample, the series records
# the change from it.
Observation = tuple[int, Sample, Sample | None]


def summarized(
    observations: Sequence[Observation],
    limits: Mapping[int, tuple[float, float]],
    activity: UnitActivity | None = None,
) -> Columns:
    """The columns of observations, with one row for each series. `limits` are those of bounded
    activations by series; `activity` counts dead units.
    """
    rows: dict[tuple[int, int], int] = {}
    sources: list[Observation] = []
    place: list[int] = []  # the row of each observation: series may share a sample
    for observation in observations:
        key = id(observation[1]), id(observation[2])
        row = rows.setdefault(key, len(sources))
        if row == len(sources):
            sources.append(observation)
        place.append(row)
    if not sources:
        return merged([])
    found = _rows(sources)
    columns = _fanned_out(observations, np.array(place), found, limits, activity)
    absent = [number for number, row in enumerate(place) if sources[row][1].num_absent]
    return merged(
        [
            columns,
            *(
                _zeros(columns, number, found.values(place[number]), sources[place[number]])
                for number in absent
            ),
        ]
    )


class _SampleRows(NamedTuple):
    """Statistics of samples, in the order of the samples."""

    stacks: list[Stack]
    groups: np.ndarray  # the stack of each row
    places: np.ndarray  # the row's index in its stack
    floats: np.ndarray  # low, high, total, squares
    flags: np.ndarray
    sizes: np.ndarray  # elements, sampled
    quantiles: np.ndarray
    # The bins of all rows, in the order of the stacks: the start and the number of those of each
    # row.
    starts: np.ndarray
    num_bins: np.ndarray
    codes: np.ndarray
    counts: np.ndarray

    def values(self, row: int) -> np.ndarray:
        """The values of a sample."""
        found: np.ndarray = self.stacks[self.groups[row]].values[
            self.places[row], : self.sizes[row, 1]
        ]
        return found

    def has_bin(self, code: int) -> np.ndarray:
        """A mask of the rows that have the bin of this code."""
        found = np.zeros(len(self.starts), bool)
        places = np.flatnonzero(self.codes == code)
        if len(places):
            order = np.argsort(self.starts, kind="stable")  # bins lie by the rows' starts
            found[order[np.searchsorted(self.starts[order], places, "right") - 1]] = True
        return found


def _rows(sources: list[Observation]) -> _SampleRows:
    count = len(sources)
    values = [_array(sample) for _, sample, _ in sources]
    stacks = stacked(
        values, [None if before is None else _array(before) for _, _, before in sources]
    )
    found = [statistics_of(stack) for stack in stacks]
    order = np.concatenate([stack.members for stack in stacks])
    # The index of each sample in the arrays below, which are concatenated stack by stack.
    place_of = np.empty(count, np.int64)
    place_of[order] = np.arange(count)
    num_bins = np.concatenate([each.num_bins for each in found])
    sizes = np.empty((count, 2), np.int64)
    sizes[:, 0] = [sample.plan.num_elements for _, sample, _ in sources]
    sizes[order, 1] = np.concatenate([stack.lengths for stack in stacks])
    rows = _SampleRows(
        stacks=stacks,
        groups=np.repeat(np.arange(len(stacks)), [len(stack.members) for stack in stacks])[
            place_of
        ],
        places=np.concatenate([np.arange(len(stack.members)) for stack in stacks])[place_of],
        floats=np.concatenate([each.floats for each in found])[place_of],
        flags=np.zeros(count, np.uint8),
        sizes=sizes,
        quantiles=np.concatenate([each.quantiles for each in found])[place_of],
        starts=(np.cumsum(num_bins) - num_bins)[place_of],
        num_bins=num_bins[place_of],
        codes=np.concatenate([each.codes for each in found]),
        counts=np.concatenate([each.counts for each in found]),
    )
    _add_ranges(rows, sources)
    return rows


def _array(sample: Sample) -> np.ndarray:
    """The elements of a sample as a numpy array of float32 or float64."""
    values = sample.values
    if type(values) is np.ndarray:
        return values
    values = value_of(values)
    if isinstance(values, torch.Tensor):
        values = (
            values if values.dtype in (torch.float32, torch.float64) else values.float()
        ).numpy()
        sample.values = values
    found: np.ndarray = values
    return found


def _add_ranges(found: _SampleRows, sources: list[Observation]) -> None:
    """Fills in the ranges of all elements, where they are known."""
    known = [
        (row, sample)
        for row, (_, sample, before) in enumerate(sources)
        if before is None and sample.low is not None
    ]
    if known:
        chosen = np.array([row for row, _ in known])
        low, high = (
            _numbers([sample.low for _, sample in known]),
            _numbers([sample.high for _, sample in known]),
        )
        has_nan = np.isnan(low)
        # With NaN among the elements, the range of the others is unknown: keep that of the sample.
        found.flags[chosen] |= np.where(has_nan, HAS_NAN, RANGE_IS_EXACT).astype(np.uint8)
        found.floats[chosen[~has_nan], 0], found.floats[chosen[~has_nan], 1] = (
            low[~has_nan],
            high[~has_nan],
        )
    is_whole = found.sizes[:, 0] == found.sizes[:, 1]  # the sample has all elements
    found.flags[is_whole] |= RANGE_IS_EXACT
    found.flags[is_whole & found.has_bin(NAN)] |= HAS_NAN


def _numbers(parts: list[Any]) -> np.ndarray:
    """An array of numbers, each a numpy number or a tensor that may still be copied to the host."""
    if not _NUMBER_TYPES.issuperset(map(type, parts)):
        values = [value_of(part) for part in parts]
        parts = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return np.array(parts, np.float64)


def _fanned_out(
    observations: Sequence[Observation],
    place: np.ndarray,
    rows: _SampleRows,
    limits: Mapping[int, tuple[float, float]],
    activity: UnitActivity | None,
) -> Columns:
    series = [number for number, _, _ in observations]
    dead = np.full(len(series), np.nan, np.float32)
    saturated = np.full(len(series), np.nan, np.float32)
    if activity is not None:
        has_zeros = rows.has_bin(ZERO)[place].tolist()
        dead = activity.dead_shares(
            observations, lambda number: rows.values(place[number]), has_zeros
        )
    bounded: dict[tuple[int, tuple[float, float]], list[int]] = {}
    if limits:
        for number, own in enumerate(series):
            if own in limits:
                bounded.setdefault((int(rows.groups[place[number]]), limits[own]), []).append(
                    number
                )
    for (group, (low, high)), numbers in bounded.items():
        chosen_rows = place[numbers]
        values, lengths = (
            rows.stacks[group].values[rows.places[chosen_rows]],
            rows.sizes[chosen_rows, 1],
        )
        is_real = np.arange(values.shape[1]) < lengths[:, None]
        saturated[numbers] = (
            np.count_nonzero(((values <= low) | (values >= high)) & is_real, axis=1) / lengths
        )
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


def _zeros(columns: Columns, row: int, values: np.ndarray, source: Observation) -> Columns:
    """A row for the elements that a sparse tensor does not store: zeros, in proportion to its
    sample. Merged with the row of the stored elements, it describes the whole tensor."""
    sample = source[1]
    count = round(sample.num_absent * len(values) / sample.plan.num_elements)
    columns.quantiles[row] = _quantiles_with_zeros(values, count)
    return Columns(
        series=columns.series[row : row + 1],
        calls=np.zeros(1, "<u4"),
        elements=np.array([sample.num_absent], "<u8"),
        sampled=np.array([count], "<u8"),
        flags=np.array([RANGE_IS_EXACT], np.uint8),
        low=np.zeros(1),
        high=np.zeros(1),
        total=np.zeros(1),
        squares=np.zeros(1),
        dead=np.full(1, np.nan, np.float32),
        saturated=np.full(1, np.nan, np.float32),
        quantiles=columns.quantiles[row : row + 1],
        num_bins=np.ones(1, "<u2"),
        codes=np.array([ZERO], "<u2"),
        counts=np.array([count], "<u8"),
    )


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
