"""The data of a run as the page requests it: a statistic of all series of a kind over the steps,
the histograms of one series, or a scalar.

Recorded steps are counted by *place*, from 0. An answer begins at a given place, so that the page
fetches only new data. Each of its columns covers `stride` places, a power of two that limits the
number of columns.

A block is four bytes (the length of the head), the head (JSON), and numbers:

    table       head {"stride", "from", "columns", "series"}
                bfloat16, one row per series, by number. NaN: nothing was recorded. Infinite: no
                sampled element is finite.
    histograms  head {"stride", "from", "columns", "bins", "levels"}
                bytes, one row per bin (see bins.py). (byte / levels) ** 2 is the count of the bin
                relative to the fullest bin of its column.
    scalar      head {"stride", "from", "columns"}
                float64, four rows: steps, means, smallest, largest.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchlens._monitor.store.bins import (
    MINUS_INF,
    NAN,
    NUM_BINS,
    PLUS_INF,
    bin_order,
    narrowed,
)
from torchlens._monitor.store.columns import Columns, SeriesKey, Step

if TYPE_CHECKING:
    from torchlens._monitor.read.reader import RunReader


# The maximum number of columns in an answer: of curves, and of histograms.
MOST_COLUMNS, MOST_HISTOGRAMS = 1024, 256
# How each statistic is reduced where several steps share a column. The page derives the others
# (norm, update ratio) from these.
STATISTICS: dict[str, Callable[..., Any]] = {
    "rms": np.nanmean, "mean": np.nanmean, "std": np.nanmean, "low": np.nanmin, "high": np.nanmax,
    "zero": np.nanmean,
    "dead": np.nanmean, "saturated": np.nanmean, "nonfinite": np.nanmax,
}  # fmt: skip
_EMPTY = {"rms": np.inf, "mean": np.inf, "std": np.inf, "low": np.inf, "high": -np.inf}
_MOST_TABLES = 48
# The number of series whose bins are counted at once, in an array of series x bins.
_SERIES_AT_ONCE = 4096
_NO_CODES, _NO_COUNTS = np.zeros(0, np.uint16), np.zeros(0, np.int64)


def stride_for(count: int, most: int) -> int:
    """How many places share a column: the smallest power of two that gives at most `most`
    columns.
    """
    stride = 1
    while -(-count // stride) > most:
        stride *= 2
    return stride


def block(head: dict[str, Any], numbers: np.ndarray) -> bytes:
    """A block: a head and numbers (see the module docstring)."""
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)  # alignment for JavaScript's typed arrays
    return struct.pack("<I", len(text)) + text + np.ascontiguousarray(numbers).tobytes()


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as the upper 16 bits of a float32."""
    single = narrowed(np.asarray(values, np.float64))
    bits = single.view(np.uint32).astype(np.uint64)
    found = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(
        "<u2"
    )
    found[np.isnan(single)] = 0x7FC0
    return found


class RunTables:
    """The answers for one run. Only `update` takes in what the reader has read since."""

    def __init__(self, reader: "RunReader") -> None:
        self.reader = reader
        self.keys: list[SeriesKey] = []
        self.steps: list[Step] = []
        # By kind and statistic: one row for each series of the kind, one column for each place.
        self._tables: dict[tuple[str, str], np.ndarray] = {}
        self._numbers: dict[str, np.ndarray] = {}
        self.update()

    def update(self) -> int:
        """Takes in the reader's current data. Returns the first place whose data is new or changed;
        -1 if all data is invalid, because the numbers of the series have changed.
        """
        keys, steps = self.reader.recorded()
        is_other = keys[: len(self.keys)] != self.keys
        same = 0
        while same < min(len(steps), len(self.steps)) and _is_same(steps[same], self.steps[same]):
            same += 1
        if len(keys) != len(self.keys) or is_other:
            self._numbers = {}
        if is_other:
            self._tables.clear()
        for key, table in self._tables.items():
            self._tables[key] = table[:, :same]
        self.keys, self.steps = list(keys), list(steps)
        return -1 if is_other else same

    def numbers(self, kind: str) -> np.ndarray:
        """The numbers of the series of a kind."""
        if kind not in self._numbers:
            self._numbers[kind] = np.array(
                [number for number, key in enumerate(self.keys) if key.kind == kind], np.int64
            )
        return self._numbers[kind]

    # -- statistics --------------------------------------------------------------------------------

    def table(
        self,
        kind: str,
        statistic: str,
        start: int = 0,
        known_stride: int = 0,
        most: int = MOST_COLUMNS,
    ) -> bytes:
        """A statistic of all series of a kind, from place `start` on; from the beginning if the
        stride is not `known_stride`.
        """
        values = self._table(kind, statistic)
        head, shown = self._reduced(values, STATISTICS[statistic], start, known_stride, most)
        head["series"] = self.numbers(kind).tolist()
        return block(head, bfloat16(shown))

    def all_tables(self, most: Mapping[str, int]) -> dict[str, tuple[int, np.ndarray]]:
        """(stride, values) of each statistic, in one pass over the steps. Values have one row per
        series and at most `most[statistic]` columns.
        """
        count = len(self.steps)
        strides = {statistic: stride_for(count, most[statistic]) for statistic in STATISTICS}
        found = {
            name: np.full((len(self.keys), -(-count // stride)), np.nan, np.float32)
            for name, stride in strides.items()
        }
        length = max(*strides.values(), 64)  # all are powers of two
        for start in range(0, count, length):
            steps = self.steps[start : start + length]
            values = {
                name: np.full((len(self.keys), len(steps)), np.nan, np.float32)
                for name in STATISTICS
            }
            for place, step in enumerate(steps):
                for name, own in values.items():
                    own[step.columns.series, place] = _shown(step.columns, name)
            for name, stride in strides.items():
                shown = (
                    values[name] if stride == 1 else grouped(values[name], stride, STATISTICS[name])
                )
                found[name][:, start // stride : start // stride + shown.shape[1]] = shown
        return {name: (strides[name], values) for name, values in found.items()}

    def _table(self, kind: str, statistic: str) -> np.ndarray:
        numbers = self.numbers(kind)
        known = self._tables.pop((kind, statistic), None)
        values = np.full((len(numbers), len(self.steps)), np.nan, np.float32)
        begun = 0
        if known is not None:
            values[: len(known), : known.shape[1]] = known
            begun = known.shape[1] if len(known) == len(numbers) else 0
        row_of = np.full(len(self.keys) + 1, -1)
        row_of[numbers] = np.arange(len(numbers))
        for place in range(begun, len(self.steps)):
            columns = self.steps[place].columns
            rows = row_of[np.minimum(columns.series, len(self.keys))]
            is_own = rows >= 0
            if is_own.any():
                values[rows[is_own], place] = _shown(columns, statistic)[is_own]
        self._tables[kind, statistic] = values
        while len(self._tables) > _MOST_TABLES:
            self._tables.pop(next(iter(self._tables)))
        return values

    def _reduced(
        self, values: np.ndarray, how: Callable[..., Any], start: int, known_stride: int, most: int
    ) -> tuple[dict[str, Any], np.ndarray]:
        count = values.shape[1]
        stride = stride_for(count, most)
        start = 0 if stride != known_stride else max(0, min(start, count)) // stride * stride
        shown = values[:, start:]
        if stride > 1:
            shown = grouped(shown, stride, how)
        return {"stride": stride, "from": start, "columns": shown.shape[1]}, shown

    # -- histograms --------------------------------------------------------------------------------

    def histograms(
        self, number: int, start: int = 0, known_stride: int = 0, most: int = MOST_HISTOGRAMS
    ) -> bytes:
        """The histograms of one series, from place `start` on."""
        count = len(self.steps)
        stride = stride_for(count, most)
        start = 0 if stride != known_stride else max(0, min(start, count)) // stride * stride
        rows = [(step.columns, step.columns.row_of(number)) for step in self.steps[start:]]
        parts = [
            (place // stride, *columns.bins(row))
            for place, (columns, row) in enumerate(rows)
            if row is not None
        ]
        codes = np.concatenate([_NO_CODES, *(codes for _, codes, _ in parts)])
        places = np.repeat(
            [place for place, _, _ in parts], [len(codes) for _, codes, _ in parts]
        ).astype(np.int64)
        counts = np.concatenate([_NO_COUNTS, *(counts for _, _, counts in parts)])
        head = {"stride": stride, "from": start}
        return histogram_block(codes, places, counts, -(-(count - start) // stride), head, 255)

    def all_histograms(self, most: int) -> "AllHistograms":
        """The histograms of all series at once."""
        stride = stride_for(len(self.steps), most)
        keys: list[np.ndarray] = []
        counts: list[np.ndarray] = []
        for first in range(0, len(self.steps), stride):
            own = [step.columns for step in self.steps[first : first + stride]]
            found = [
                _counted_keys(own, start, len(self.keys))
                for start in range(0, len(self.keys), _SERIES_AT_ONCE)
            ]
            keys.append(np.concatenate([_NO_COUNTS, *(key for key, _ in found)]))
            counts.append(np.concatenate([_NO_COUNTS, *(count for _, count in found)]))
        places = np.repeat(np.arange(len(keys)), [len(each) for each in keys])
        all_keys = np.concatenate([_NO_COUNTS, *keys])
        order = np.argsort(all_keys, kind="stable")
        all_keys, places, all_counts = (
            all_keys[order],
            places[order],
            np.concatenate([_NO_COUNTS, *counts])[order],
        )
        starts = np.searchsorted(all_keys, np.arange(len(self.keys) + 1) * NUM_BINS)
        return AllHistograms(stride, len(keys), starts, all_keys % NUM_BINS, places, all_counts)

    # -- scalars -----------------------------------------------------------------------------------

    def scalar(
        self, name: str, start: int = 0, known_stride: int = 0, most: int = 2 * MOST_COLUMNS
    ) -> bytes:
        """The numbers logged under a name, from row `start` on."""
        scalars = self.reader.scalars[name]
        rows = np.stack(
            [scalars.steps.astype(np.float64), scalars.values, scalars.low, scalars.high]
        )
        count = rows.shape[1]
        stride = stride_for(count, most)
        start = 0 if stride != known_stride else max(0, min(start, count)) // stride * stride
        shown = rows[:, start:]
        if stride > 1:
            hows: tuple[Callable[..., Any], ...] = (np.nanmax, np.nanmean, np.nanmin, np.nanmax)
            shown = np.concatenate(
                [grouped(shown[each : each + 1], stride, how) for each, how in enumerate(hows)]
            )
        return block(
            {"stride": stride, "from": start, "columns": shown.shape[1]}, shown.astype("<f8")
        )

    # -- summary -----------------------------------------------------------------------------------

    def summary(self, start: int = 0, num_series: int = 0, num_findings: int = 0) -> dict[str, Any]:
        """The data of a run besides its numbers: steps from place `start` on, series and findings
        after the first `num_series` and `num_findings`, and the rest in full.
        """
        reader = self.reader
        counts = reader.counts
        findings = [each.as_json() for each in reader.findings[num_findings:]]
        return {
            "from": start,
            "steps": [step.last for step in self.steps[start:]],
            "merged": [step.count for step in self.steps[start:]],
            "series": [
                [key.module, key.kind, key.name, list(key.shape), key.dtype]
                for key in self.keys[num_series:]
            ],
            "scalars": {name: len(own) for name, own in reader.scalars.items()},
            "findings": [
                {name: _finite(value) for name, value in each.items()} for each in findings
            ],
            "problems": reader.problems,
            "counts": [counts.offered, counts.recorded, counts.dropped],
            "drops": [[drop.step, drop.observations] for drop in reader.drops[-200:]],
            "isFinished": reader.is_finished,
            "ranks": len(reader.ranks),
        }


class AllHistograms(NamedTuple):
    """The bins of all series in all columns. Those of a series lie from `starts[number]` to
    `starts[number + 1]`.
    """

    stride: int
    num_columns: int
    starts: np.ndarray
    codes: np.ndarray
    places: np.ndarray
    counts: np.ndarray

    def block(self, number: int, most: int, levels: int) -> bytes:
        """The histograms of one series in at most `most` columns. Counts of merged columns add
        up.
        """
        by = stride_for(self.num_columns, most)
        own = slice(self.starts[number], self.starts[number + 1])
        head = {"stride": self.stride * by, "from": 0}
        num_columns = -(-self.num_columns // by)
        return histogram_block(
            self.codes[own], self.places[own] // by, self.counts[own], num_columns, head, levels
        )


def histogram_block(
    codes: np.ndarray,
    places: np.ndarray,
    counts: np.ndarray,
    num_columns: int,
    head: dict[str, Any],
    levels: int,
) -> bytes:
    """The block of the histograms of one series: a row for each bin in use, in ascending order, a
    column for each stride. Bins of NaN and infinities are left out.
    """
    bins = np.flatnonzero(np.bincount(codes, minlength=NUM_BINS))
    bins = bins[~np.isin(bins, (NAN, PLUS_INF, MINUS_INF))]
    bins = bins[np.argsort(bin_order(bins), kind="stable")]
    row_of = np.full(NUM_BINS, len(bins))  # the extra last row takes NaN and infinities
    row_of[bins] = np.arange(len(bins))
    cells = row_of[codes] * num_columns + places
    table = np.bincount(cells, weights=counts, minlength=(len(bins) + 1) * num_columns).reshape(
        len(bins) + 1, num_columns
    )
    table = table[: len(bins)]
    most = np.maximum(table.max(axis=0, initial=0), 1)
    return block(
        {**head, "columns": num_columns, "bins": bins.tolist(), "levels": levels},
        np.ceil(levels * np.sqrt(table / most)).astype("u1"),
    )


def _counted_keys(
    columns: Sequence[Columns], start: int, num_series: int
) -> tuple[np.ndarray, np.ndarray]:
    """(keys, counts) of up to `_SERIES_AT_ONCE` series from `start` on, summed over several steps.
    A key is series number * NUM_BINS + bin code.
    """
    keys: list[np.ndarray] = [_NO_COUNTS]
    counts: list[np.ndarray] = [_NO_COUNTS]
    end = min(start + _SERIES_AT_ONCE, num_series)
    for each in columns:
        rows = slice(*np.searchsorted(each.series, (start, end)))
        starts = each.starts
        own = slice(starts[rows.start], starts[rows.stop])
        keys.append(
            np.repeat(each.series[rows].astype(np.int64), each.num_bins[rows]) * NUM_BINS
            + each.codes[own]
        )
        counts.append(each.counts[own])
    together = np.concatenate(keys) - start * NUM_BINS
    table = np.bincount(
        together, weights=np.concatenate(counts), minlength=(end - start) * NUM_BINS
    )
    found = np.flatnonzero(table)
    return found + start * NUM_BINS, table[found].astype(np.int64)


def _finite(value: Any) -> Any:
    """The value, or its text if it is a NaN or infinite float, which JSON cannot hold."""
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)


def _is_same(one: Step, two: Step) -> bool:
    """Whether two steps have the same data. They differ if another rank has since added rows."""
    if one is two:
        return True
    same = (one.first, one.last, one.count, len(one.columns)) == (
        two.first,
        two.last,
        two.count,
        len(two.columns),
    )
    return same and int(one.columns.calls.sum()) == int(two.columns.calls.sum())


def _shown(columns: Columns, statistic: str) -> np.ndarray:
    """A statistic of each row. Those in `_EMPTY` are infinite where no sampled value is finite."""
    values = getattr(columns, statistic)
    empty = _EMPTY.get(statistic)
    return narrowed(values if empty is None else np.where(np.isnan(values), empty, values))


def grouped(values: np.ndarray, stride: int, how: Callable[..., Any]) -> np.ndarray:
    """Columns reduced in groups of `stride`. A group is NaN if all of its columns are NaN."""
    rows, count = values.shape
    groups = -(-count // stride)
    full = np.full((rows, groups * stride), np.nan, values.dtype)
    full[:, :count] = values
    parts = full.reshape(rows, groups, stride)
    is_empty = np.isnan(parts).all(axis=2)
    parts[is_empty] = 0
    return np.where(is_empty, np.nan, how(parts, axis=2))
