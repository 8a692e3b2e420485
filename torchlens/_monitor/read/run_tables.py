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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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


def _extent(count: int, most: int, start: int, known_stride: int) -> tuple[int, int]:
    """(stride, first place) of an answer. It starts over if the stride is not the known one."""
    stride = stride_for(count, most)
    return stride, min(start, count) // stride * stride if stride == known_stride else 0


class RunTables:
    """The answers for one run. They change only with `update`, which takes the data that the reader
    has read since.
    """

    def __init__(self, reader: "RunReader") -> None:
        self.reader = reader
        self.keys: list[SeriesKey] = []
        self.steps: list[Step] = []
        # By statistic: one row for each series, one column for each place.
        self._tables: dict[str, np.ndarray] = {}
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
        self._tables = (
            {} if is_other else {name: table[:, :same] for name, table in self._tables.items()}
        )
        self.keys, self.steps = list(keys), list(steps)
        return -1 if is_other else same

    def table(
        self,
        kind: str,
        statistic: str,
        start: int = 0,
        known_stride: int = 0,
        most: int = MOST_COLUMNS,
    ) -> tuple[dict[str, Any], np.ndarray]:
        """(head, numbers) of a statistic of all series of a kind, from place `start` on; from the
        beginning if the stride is not `known_stride`.
        """
        stride, start = _extent(len(self.steps), most, start, known_stride)
        numbers = [number for number, key in enumerate(self.keys) if key.kind == kind]
        values = self._values(statistic)[numbers, start:]
        shown = bfloat16(_grouped(values, stride, STATISTICS[statistic]))
        head = {"stride": stride, "from": start, "columns": shown.shape[1], "series": numbers}
        return head, shown

    def _values(self, statistic: str) -> np.ndarray:
        """A statistic of all series at all places. NaN: nothing was recorded."""
        values = np.full((len(self.keys), len(self.steps)), np.nan, np.float32)
        known = self._tables.get(statistic, values[:0, :0])
        num_series, num_places = known.shape
        values[:num_series, :num_places] = known
        for place in range(num_places, len(self.steps)):
            columns = self.steps[place].columns
            values[columns.series, place] = _shown(columns, statistic)
        self._tables[statistic] = values
        return values

    def histograms(self, number: int, start: int = 0, known_stride: int = 0) -> bytes:
        """The histograms of one series, from place `start` on."""
        stride, start = _extent(len(self.steps), MOST_HISTOGRAMS, start, known_stride)
        columns = [step.columns for step in self.steps[start:]]
        return histogram_block(columns, number, stride, {"stride": stride, "from": start}, 255)

    def scalar(
        self, name: str, start: int = 0, known_stride: int = 0, most: int = 2 * MOST_COLUMNS
    ) -> bytes:
        """The numbers logged under a name, from row `start` on."""
        scalars = self.reader.scalars[name]
        stride, start = _extent(len(scalars), most, start, known_stride)
        rows: list[tuple[np.ndarray, Callable[..., Any]]] = [
            (scalars.steps, np.nanmax), (scalars.values, np.nanmean),
            (scalars.low, np.nanmin), (scalars.high, np.nanmax),
        ]  # fmt: skip
        shown = np.concatenate(
            [_grouped(row[None, start:].astype("<f8"), stride, how) for row, how in rows]
        )
        return block({"stride": stride, "from": start, "columns": shown.shape[1]}, shown)

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


def histogram_block(
    columns: Sequence[Columns], number: int, stride: int, head: dict[str, Any], levels: int
) -> bytes:
    """The block of the histograms of one series: a row for each bin in use, in ascending order, a
    column for each `stride` of the given steps. Bins of NaN and infinities are left out.
    """
    rows = [(own, own.row_of(number)) for own in columns]
    parts = [
        (place // stride, *own.bins(row))
        for place, (own, row) in enumerate(rows)
        if row is not None
    ]
    num_columns = -(-len(columns) // stride)
    places = np.repeat(
        np.array([place for place, _, _ in parts], np.int64), [len(codes) for _, codes, _ in parts]
    )
    codes = np.concatenate([np.zeros(0, np.int64), *(codes for _, codes, _ in parts)])
    counts = np.concatenate([np.zeros(0, np.int64), *(counts for _, _, counts in parts)])
    bins = np.setdiff1d(codes, (NAN, PLUS_INF, MINUS_INF))
    bins = bins[np.argsort(bin_order(bins), kind="stable")]
    row_of = np.full(NUM_BINS, len(bins))  # the extra last row takes NaN and infinities
    row_of[bins] = np.arange(len(bins))
    table = np.bincount(
        row_of[codes] * num_columns + places,
        weights=counts,
        minlength=(len(bins) + 1) * num_columns,
    ).reshape(len(bins) + 1, num_columns)[:-1]
    most = np.maximum(table.max(axis=0, initial=0), 1)
    return block(
        {**head, "columns": num_columns, "bins": bins.tolist(), "levels": levels},
        np.ceil(levels * np.sqrt(table / most)).astype("u1"),
    )


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


def _grouped(values: np.ndarray, stride: int, how: Callable[..., Any]) -> np.ndarray:
    """Columns reduced in groups of `stride`. A group is NaN if all of its columns are NaN."""
    if stride == 1:
        return values
    rows, count = values.shape
    groups = -(-count // stride)
    full = np.full((rows, groups * stride), np.nan, values.dtype)
    full[:, :count] = values
    parts = full.reshape(rows, groups, stride)
    is_empty = np.isnan(parts).all(axis=2)
    parts[is_empty] = 0
    return np.where(is_empty, np.nan, how(parts, axis=2))
