"""A run as a page asks for it: a statistic of all series of a kind over the steps, the histograms of one series, a scalar.

Steps are counted by *place*: the first recorded one is 0. What is sent begins at a place, so that only what is new is sent,
and has one column for `stride` places, a power of two, so that no answer is larger than a screen can show.

A block is four bytes (the length of the head), the head (JSON), and numbers:

    table       head {"stride", "from", "columns", "series"}: bfloat16, one row for each of the series, by number
    histograms  head {"stride", "from", "columns", "bins", "levels"}: bytes, one row for each of the bins (see bins.py); the
                square of what a byte is of `levels` is the share of the fullest bin of the column
    scalar      head {"stride", "from", "columns"}: four rows of float64: steps, means, smallest, largest
"""

import json
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torchlens.monitoring.bins import MINUS_INF, NAN, PLUS_INF, ZERO, bin_order, narrowed
from torchlens.monitoring.columns import HAS_NAN, Columns, merged
from torchlens.monitoring.frames import Step
from torchlens.monitoring.statistics import nonfinite_counts

if TYPE_CHECKING:
    from torchlens.monitoring.reader import RunReader
    from torchlens.monitoring.views import SeriesKey

__all__ = ["STATISTICS", "RunTables", "block", "stride_for"]

# As many columns as are sent at most: of curves, and of histograms.
MOST_COLUMNS, MOST_HISTOGRAMS = 1024, 256
# What each is where several steps share a column. Others (norm, update ratio) the page works out of these.
STATISTICS: dict[str, Callable[..., Any]] = {
    "rms": np.nanmean, "mean": np.nanmean, "std": np.nanmean, "low": np.nanmin, "high": np.nanmax, "zero": np.nanmean,
    "dead": np.nanmean, "saturated": np.nanmean, "nonfinite": np.nanmax,
}  # fmt: skip
_MOST_TABLES = 48


def stride_for(count: int, most: int) -> int:
    """How many places share a column: the smallest power of two with which there are at most so many columns."""
    stride = 1
    while -(-count // stride) > most:
        stride *= 2
    return stride


def block(head: dict[str, Any], numbers: np.ndarray) -> bytes:
    """A head and numbers, as they are sent."""
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 4) % 8)  # numbers begin where a browser can read them in place
    return struct.pack("<I", len(text)) + text + np.ascontiguousarray(numbers).tobytes()


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, rounded: as exact as a screen shows."""
    single = narrowed(np.asarray(values, np.float64))
    bits = single.view(np.uint32).astype(np.uint64)
    found = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2")
    found[np.isnan(single)] = 0x7FC0
    return found


class RunTables:
    """Answers for one run. Call `update` after the reader has read on; nothing else here is changed by it."""

    def __init__(self, reader: "RunReader") -> None:
        self.reader = reader
        self.keys: list[SeriesKey] = []
        self.steps: list[Step] = []
        self._tables: dict[
            tuple[str, str], np.ndarray
        ] = {}  # one row for each series of the kind, one column for each place
        self._numbers: dict[str, np.ndarray] = {}
        self.update()

    def update(self) -> int:
        """Looks at what the reader has now. The first place at which anything is new or other; -1: nothing is as it was."""
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
            self._numbers[kind] = np.array([number for number, key in enumerate(self.keys) if key.kind == kind], np.int64)
        return self._numbers[kind]

    # -- statistics ------------------------------------------------------------------------------------------------------

    def table(self, kind: str, statistic: str, start: int = 0, known_stride: int = 0, most: int = MOST_COLUMNS) -> bytes:
        """A statistic of all series of a kind, from a place on; from the beginning if the stride is not the known one."""
        values = self._table(kind, statistic)
        head, shown = self._reduced(values, STATISTICS[statistic], start, known_stride, most)
        head["series"] = self.numbers(kind).tolist()
        return block(head, bfloat16(shown))

    def reduced_table(self, kind: str, statistic: str, most: int) -> tuple[int, np.ndarray]:
        """(stride, values) with so many columns at most."""
        head, shown = self._reduced(self._table(kind, statistic), STATISTICS[statistic], 0, 0, most)
        return head["stride"], shown

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
                values[rows[is_own], place] = narrowed(np.asarray(_statistic(columns, statistic)[is_own], np.float64))
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
            shown = _grouped(shown, stride, how)
        return {"stride": stride, "from": start, "columns": shown.shape[1]}, shown

    # -- histograms ------------------------------------------------------------------------------------------------------

    def histograms(self, number: int, start: int = 0, known_stride: int = 0, most: int = MOST_HISTOGRAMS) -> bytes:
        """The histograms of one series, from a place on."""
        count = len(self.steps)
        stride = stride_for(count, most)
        start = 0 if stride != known_stride else max(0, min(start, count)) // stride * stride
        columns: list[dict[int, int]] = []
        for first in range(start, count, stride):
            column: dict[int, int] = {}
            for step in self.steps[first : first + stride]:
                for code, number_in in zip(*_bins(step.columns, number), strict=True):
                    column[code] = column.get(code, 0) + number_in
            columns.append(column)
        return histogram_block(columns, {"stride": stride, "from": start}, 255)

    def all_histograms(self, most: int) -> tuple[int, list[list[dict[int, int]]]]:
        """(stride, for each column the bins of all series): as `histograms`, but of everything at once."""
        stride = stride_for(len(self.steps), most)
        found = []
        for first in range(0, len(self.steps), stride):
            own = [step.columns for step in self.steps[first : first + stride]]
            together = own[0] if len(own) == 1 else merged(own)
            starts, codes, counts = together.starts.tolist(), together.codes.tolist(), together.counts.tolist()
            column: list[dict[int, int]] = [{} for _ in self.keys]
            for row, series in enumerate(together.series.tolist()):
                part = slice(starts[row], starts[row + 1])
                column[series] = dict(zip(codes[part], counts[part], strict=True))
            found.append(column)
        return stride, found

    # -- scalars ---------------------------------------------------------------------------------------------------------

    def scalar(self, name: str, start: int = 0, known_stride: int = 0, most: int = 2 * MOST_COLUMNS) -> bytes:
        """What was logged under a name, from its so-manieth row on."""
        scalars = self.reader.scalars[name]
        rows = np.stack([scalars.steps.astype(np.float64), scalars.values, scalars.low, scalars.high])
        count = rows.shape[1]
        stride = stride_for(count, most)
        start = 0 if stride != known_stride else max(0, min(start, count)) // stride * stride
        shown = rows[:, start:]
        if stride > 1:
            hows: tuple[Callable[..., Any], ...] = (np.nanmax, np.nanmean, np.nanmin, np.nanmax)
            shown = np.concatenate([_grouped(shown[each : each + 1], stride, how) for each, how in enumerate(hows)])
        return block({"stride": stride, "from": start, "columns": shown.shape[1]}, shown.astype("<f8"))

    # -- the rest --------------------------------------------------------------------------------------------------------

    def summary(self, start: int = 0, num_series: int = 0, num_findings: int = 0) -> dict[str, Any]:
        """What the page knows of a run besides its numbers: steps from a place on, and the rest after so many."""
        reader = self.reader
        counts = reader.counts
        findings = [each.as_json() for each in reader.findings[num_findings:]]
        return {
            "from": start,
            "steps": [step.last for step in self.steps[start:]],
            "merged": [step.count for step in self.steps[start:]],
            "series": [[key.module, key.kind, key.name, list(key.shape), key.dtype] for key in self.keys[num_series:]],
            "scalars": {name: len(own) for name, own in reader.scalars.items()},
            "findings": [{name: _finite(value) for name, value in each.items()} for each in findings],
            "problems": reader.problems,
            "counts": [counts.offered, counts.recorded, counts.dropped],
            "drops": [[drop.step, drop.observations] for drop in reader.drops[-200:]],
            "isFinished": reader.is_finished,
            "ranks": len(reader.ranks),
        }


def histogram_block(columns: Sequence[dict[int, int]], head: dict[str, Any], levels: int) -> bytes:
    """Histograms of one series with all their bins, from the smallest to the largest."""
    codes = np.array(sorted({code for column in columns for code in column}), np.int64)
    codes = codes[~np.isin(codes, (NAN, PLUS_INF, MINUS_INF))]
    codes = codes[np.argsort(bin_order(codes), kind="stable")]
    counts = np.array([[column.get(code, 0) for column in columns] for code in codes.tolist()], np.float64)
    counts = counts.reshape(len(codes), len(columns))
    most = np.maximum(counts.max(axis=0, initial=0), 1)
    return block(
        {**head, "columns": len(columns), "bins": codes.tolist(), "levels": levels},
        np.ceil(levels * np.sqrt(counts / most)).astype("u1"),
    )


def _finite(value: Any) -> Any:
    """JSON has no infinity; a word stands for it."""
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)


def _is_same(one: Step, two: Step) -> bool:
    """Of a step that another rank wrote to since, more is known."""
    if one is two:
        return True
    same = (one.first, one.last, one.count, len(one.columns)) == (two.first, two.last, two.count, len(two.columns))
    return same and int(one.columns.calls.sum()) == int(two.columns.calls.sum())


def _statistic(columns: Columns, name: str) -> np.ndarray:
    """One statistic of each row. What they mean is told in views.py."""
    if name in ("low", "high", "dead", "saturated"):
        return np.asarray(getattr(columns, name), np.float64)
    sampled = columns.sampled.astype(np.float64)
    if name == "zero":
        return _counted(columns, ZERO) / np.maximum(sampled, 1)
    nan, infinite = nonfinite_counts(columns) if np.isin((NAN, PLUS_INF, MINUS_INF), columns.codes).any() else (0.0, 0.0)
    bad = np.broadcast_to(nan + infinite, sampled.shape)
    if name == "nonfinite":
        is_known = ((columns.flags & HAS_NAN) > 0) | np.isinf(columns.low) | np.isinf(columns.high)
        share = bad / np.maximum(sampled, 1)
        return np.where(is_known, np.maximum(share, 1 / np.maximum(columns.elements.astype(np.float64), 1)), share)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean, square = columns.total / (sampled - bad), columns.squares / (sampled - bad)
        if name == "std":
            return np.asarray(np.sqrt(np.maximum(square - mean**2, 0)))
        return np.asarray(mean if name == "mean" else np.sqrt(square))


def _counted(columns: Columns, code: int) -> np.ndarray:
    rows = np.repeat(np.arange(len(columns)), columns.num_bins)
    is_own = columns.codes == code
    return np.bincount(rows[is_own], weights=columns.counts[is_own], minlength=len(columns))


def _bins(columns: Columns, number: int) -> tuple[list[int], list[int]]:
    row = int(np.searchsorted(columns.series, number))
    if row >= len(columns) or columns.series[row] != number:
        return [], []
    start = int(columns.num_bins[:row].sum(dtype=np.int64))
    own = slice(start, start + int(columns.num_bins[row]))
    return columns.codes[own].tolist(), columns.counts[own].tolist()


def _grouped(values: np.ndarray, stride: int, how: Callable[..., Any]) -> np.ndarray:
    """One column for so many; what is NaN in all of them is NaN."""
    rows, count = values.shape
    groups = -(-count // stride)
    full = np.full((rows, groups * stride), np.nan, values.dtype)
    full[:, :count] = values
    parts = full.reshape(rows, groups, stride)
    is_empty = np.isnan(parts).all(axis=2)
    parts[is_empty] = 0
    return np.where(is_empty, np.nan, how(parts, axis=2))
