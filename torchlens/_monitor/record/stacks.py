"""Samples of tensors, stacked, and the statistics of all of them at once.

numpy is called a few dozen times, whatever the number of samples. One after the other, it would be
called thousands of times, and each call may hold up the thread that trains. So samples of all
lengths lie in stacks of two widths; short ones are filled up, and what they are filled up with is
left out of every statistic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchlens._monitor.record.samples import SAMPLE_SIZE
from torchlens._monitor.store.bins import NAN, ZERO, bins_of, narrowed, raw_bins_of
from torchlens._monitor.store.columns import QUANTILES

_WIDTHS = (SAMPLE_SIZE // 4, SAMPLE_SIZE)
# So much stays in the processor's cache, and in memory that is not asked of the system again and
# again.
_MOST_ROWS = 128


class Stack(NamedTuple):
    """Samples, one a row; where one is shorter than the stack is wide, there are zeros."""

    members: np.ndarray  # which of all samples
    lengths: np.ndarray
    values: np.ndarray


class StackStatistics(NamedTuple):
    """Statistics of each row of a stack."""

    floats: np.ndarray  # low, high, total, squares
    quantiles: np.ndarray
    # The bins of all rows, one row after the other: how many each row has, their codes and counts.
    num_bins: np.ndarray
    codes: np.ndarray
    counts: np.ndarray


def stacked(samples: Sequence[np.ndarray], befores: Sequence[np.ndarray | None]) -> list[Stack]:
    """All samples in as few stacks as there are widths and types. With a second array, it is the
    change since then.
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
    starts, ends = begins, begins + lengths  # of what is finite in each row
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
    """The sum of each row, and that of its squares. In rows that are bad, not all is finite: only
    what is counts.
    """
    wide = values.astype(np.float64)
    if len(bad):
        wide[bad] = np.where(np.isfinite(wide[bad]), wide[bad], 0.0)
    with np.errstate(over="ignore"):
        return np.einsum("ij->i", wide), np.einsum("ij,ij->i", wide, wide)


def _quantiles(flat: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of numbers in order: those from each start to its end."""
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
    """(how many bins each row has, codes, counts) of rows in order: a bin is a run of equal
    codes.
    """
    narrow = narrowed(ordered)
    # Of numbers in order, zeros (there is no −0 any more) stand together, and the code says which
    # they are only at their beginning; unless there are some that are not finite, or so small that
    # they share the code of zero.
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
    if num_filled.any():  # what a row was filled up with stands last in it, among what is NaN
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
