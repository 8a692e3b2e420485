"""The protocol of a sink, the records that it is given, and how a run is sent to one."""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from queue import SimpleQueue
from time import time
from typing import Any, NamedTuple

import numpy as np

from torchlens._health.finding import RunFinding
from torchlens._monitor.read.views import Scalars
from torchlens._monitor.store.bins import bin_edges
from torchlens._monitor.store.columns import QUANTILES, Columns, SeriesKey, Step
from torchlens._text.error_wording import check_count, did_you_mean, got, one_of
from torchlens._text.problems import Problems

STATISTICS = ("mean", "std", "rms", "low", "high", "zero", "nonfinite", "dead", "saturated")
# Half the width of the bin around zero: ours has none, but programs that draw histograms need one.
_NEAR_ZERO = 1e-38
# The most bins that Weights & Biases takes. Merged steps may have more.
_MOST_BINS = 512


class Bins(NamedTuple):
    """A histogram without gaps: `counts[i]` of the sampled elements lie between `edges[i]` and
    `edges[i + 1]`.
    """

    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class SeriesRecord:
    """One tensor of a module in one step. `module` is '' for the model itself; `name` is '' if the
    module has only one tensor of this kind.
    """

    module: str
    kind: str
    name: str
    statistics: Mapping[
        str, float
    ]  # by the names in STATISTICS; those that do not apply are absent
    quantiles: Mapping[float, float]
    num_elements: int
    num_sampled: int
    total: float  # sum of the finite elements in the sample
    squares: float  # sum of their squares
    codes: np.ndarray  # numbers of the bins in use
    code_counts: np.ndarray

    @cached_property
    def bins(self) -> Bins | None:
        """The histogram of the finite elements in the sample; None if there are none."""
        return gapless(self.codes, self.code_counts)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """A recorded step; or, without `series`, scalars that were logged in between. `scalars` are
    (name, step, value).
    """

    step: int
    time: float
    scalars: list[tuple[str, int, float]] = field(default_factory=list)
    findings: list[RunFinding] = field(default_factory=list)
    columns: Columns | None = None  # the numbers of all series, as stored
    keys: Sequence[SeriesKey] = ()  # the series by number

    @cached_property
    def series(self) -> list[SeriesRecord]:
        """The recorded tensors; empty if the record has only scalars."""
        columns = self.columns
        if columns is None:
            return []
        keys = [self.keys[number] for number in columns.series.tolist()]
        return [_series_record(columns, row, key) for row, key in enumerate(keys)]


def _series_record(columns: Columns, row: int, key: SeriesKey) -> SeriesRecord:
    values = {name: float(getattr(columns, name)[row]) for name in STATISTICS}
    quantiles = zip(QUANTILES.tolist(), columns.quantiles[row].tolist(), strict=True)
    return SeriesRecord(
        key.module, key.kind, key.name,
        {name: value for name, value in values.items() if not np.isnan(value)},
        {level: value for level, value in quantiles if not np.isnan(value)},
        int(columns.elements[row]), int(columns.sampled[row]), float(columns.total[row]),
        float(columns.squares[row]), *columns.bins(row),
    )  # fmt: skip


def gapless(codes: np.ndarray, counts: np.ndarray) -> Bins | None:
    """Adjacent bins: empty ones where there are gaps, and a narrow one around zero, which takes in
    what is nearer to zero than its edges.
    """
    low, high = bin_edges(codes)
    is_finite = np.isfinite(low) & np.isfinite(high)
    low, high, numbers = low[is_finite], high[is_finite], counts[is_finite]
    if not len(numbers):
        return None
    is_near_low, is_near_high = np.abs(low) < _NEAR_ZERO, np.abs(high) < _NEAR_ZERO
    low = np.where(is_near_low, np.where(is_near_high, -_NEAR_ZERO, _NEAR_ZERO), low)
    high = np.where(is_near_high, np.where(is_near_low, _NEAR_ZERO, -_NEAR_ZERO), high)
    edges = np.unique(np.concatenate([low, high]))
    found = np.zeros(len(edges) - 1, np.int64)
    np.add.at(found, np.searchsorted(edges, low), numbers.astype(np.int64))
    starts = np.arange(0, len(found), -(-len(found) // _MOST_BINS))
    return Bins(np.append(edges[starts], edges[-1]), np.add.reduceat(found, starts))


class Sink:
    """Sends a run to another program, besides its folder. Write your own by overriding `open`,
    `write` and `close`.

    >>> class Printer(torchlens.sinks.Sink):
    ...     def write(self, record):
    ...         for series in record.series:
    ...             print(record.step, series.module, series.kind, series.statistics['rms'])
    >>> run = torchlens.monitor(model, 'runs/a', sinks=[Printer(every=10)])

    `open` is called in the thread that calls `monitor`, `write` and `close` in the sink's own
    thread. A failure there ends only this sink, and `run.problems` says why. A sink that is too
    slow misses steps; `run.problems` says how many.

    every: send every n-th recorded step; scalars are always sent.
    statistics: which numbers to send for each tensor; 'quantiles' stands for nine numbers.
    histograms: whether to send histograms.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        statistics: str | Iterable[str] = STATISTICS,
        histograms: bool = True,
    ) -> None:
        check_count("every", every, 1, "1 sends every recorded step")
        chosen = [statistics] if isinstance(statistics, str) else list(statistics)
        known = (*STATISTICS, "quantiles")
        for each in chosen:
            if each not in known:
                hint = did_you_mean(each, known)
                raise ValueError(
                    f"statistics must be made of {one_of(known)}, got {got(each)}. {hint}".rstrip()
                )
        if not isinstance(histograms, bool):
            raise TypeError(f"histograms must be True or False, got {got(histograms)}.")
        self.every = every
        self.statistics = tuple(chosen)
        self.histograms = histograms
        self._model = "model"

    # -- to override -------------------------------------------------------------------------------

    def open(self, info: Mapping[str, Any]) -> None:
        """Called when the run begins. `info` has 'name', 'folder', 'model' (its class) and
        'options'.
        """

    def write(self, record: StepRecord) -> None:
        """Takes a recorded step, or scalars alone."""
        raise NotImplementedError

    def close(self) -> None:
        """Called when the run is over."""

    # -- shared ------------------------------------------------------------------------------------

    def begin(self, info: Mapping[str, Any]) -> None:
        """Opens it."""
        self._model = str(info.get("model") or "model")
        self.open(info)

    def tag(self, series: SeriesRecord, statistic: str = "") -> str:
        """The sink's name of a series: 'outputs/layer1.0.conv1', 'outputs.rms/layer1.0.conv1',
        'parameters/fc.weight'.
        """
        place = ".".join(part for part in (series.module or self._model, series.name) if part)
        return f"{series.kind}.{statistic}/{place}" if statistic else f"{series.kind}/{place}"

    def numbers(self, series: SeriesRecord) -> Iterator[tuple[str, float]]:
        """(tag, value) of the chosen statistics of a series."""
        for name in self.statistics:
            if name == "quantiles":
                for level, value in series.quantiles.items():
                    yield self.tag(series, f"q{level:g}"), value
            elif name in series.statistics:
                yield self.tag(series, name), series.statistics[name]

    def all_numbers(self, record: StepRecord) -> Iterator[tuple[str, int, float]]:
        """(tag, step, value) of the scalars and the chosen statistics of a record."""
        yield from record.scalars
        for series in record.series:
            for tag, value in self.numbers(series):
                yield tag, record.step, value

    def all_histograms(self, record: StepRecord) -> Iterator[tuple[str, SeriesRecord, Bins]]:
        """(tag, series, histogram) of a record; nothing if histograms are not wanted."""
        for series in record.series if self.histograms else ():
            if series.bins is not None:
                yield self.tag(series), series, series.bins

    def rows(self, record: StepRecord, histogram: Any) -> list[tuple[int, dict[str, Any]]]:
        """(step, values by tag) in order of steps. `histogram` is the tracker's class of
        histograms, made with `np_histogram=(counts, edges)`.
        """
        rows: dict[int, dict[str, Any]] = {}
        for tag, step, value in self.all_numbers(record):
            rows.setdefault(step, {})[tag] = value
        for tag, _, (edges, counts) in self.all_histograms(record):
            rows.setdefault(record.step, {})[tag] = histogram(np_histogram=(counts, edges))
        return sorted(rows.items())


def needed(module: str, extra: str, title: str) -> Any:
    """Imports an optional package; the error says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            # Installed, but a package that it needs is not (torch's writer needs tensorboard).
            raise ImportError(
                f"{title} cannot be imported: {error}. Run: pip install 'torchlens[{extra}]'."
            ) from error
        raise ImportError(
            f"{title} is not installed. Run: pip install 'torchlens[{extra}]'."
        ) from error


# -- sending a run ---------------------------------------------------------------------------------

# The number of records that may wait for a sink. One of a large model takes a few 100 KB.
MOST_WAITING = 64
# Seconds that the end of a run waits for a sink.
_PATIENCE = 120.0


class SinkFeed:
    """Hands recorded steps to one sink in a thread of its own. A slow server delays neither the
    training nor the files.
    """

    def __init__(self, sink: Sink, problems: Problems) -> None:
        self._sink = sink
        self._problems = problems
        self._queue: SimpleQueue[StepRecord | None] = SimpleQueue()
        self._num_recorded = self._num_missed = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="torchlens sink", daemon=True)
        self._thread.start()

    def tell(self, record: StepRecord) -> None:
        """Takes a step, unless too many wait. Never blocks."""
        due = _due(record, self._num_recorded % self._sink.every == 0)
        self._num_recorded += record.columns is not None
        if due is None or self._has_failed:
            return
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(due)
        else:
            self._num_missed += 1

    def finish(self) -> None:
        """Waits until everything is sent and the sink is closed, for a limited time."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)
        name = type(self._sink).__name__
        if self._thread.is_alive():
            self._problems.add(
                f"{name} did not finish within {_PATIENCE:g} seconds: what it was sent may be "
                "incomplete"
            )
        if self._num_missed:
            self._problems.add(
                f"{name} was too slow: {self._num_missed:,} recorded steps were not sent to it "
                "(every=)"
            )

    def _run(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                self._sink.write(record)
        except Exception as error:
            self._fail(error, "no longer gets what is recorded")
        try:
            self._sink.close()
        except Exception as error:
            self._fail(error, "could not be closed")

    def _fail(self, error: Exception, what: str) -> None:
        self._has_failed = True
        self._problems.add_failure(error, f"The sink {type(self._sink).__name__} {what}")


def _due(record: StepRecord, has_series: bool) -> StepRecord | None:
    """The record that a sink gets, with or without series; None if nothing is left."""
    due = record if has_series else replace(record, columns=None)
    return due if due.columns is not None or due.scalars or due.findings else None


def send(
    sink: Sink,
    info: Mapping[str, Any],
    steps: Sequence[Step],
    keys: Sequence[SeriesKey],
    scalars: Mapping[str, Scalars],
    findings: Sequence[RunFinding],
) -> None:
    """Opens the sink, sends a whole run in the order of steps, and closes the sink."""
    ends = [step.last for step in steps]
    records = [StepRecord(step.last, step.time, [], [], step.columns, keys) for step in steps]
    records.append(StepRecord(max(ends, default=0), time()))  # for what came after the last step
    for name, own in scalars.items():
        for step, value in zip(own.steps.tolist(), own.values.tolist(), strict=True):
            records[bisect_left(ends, step)].scalars.append((name, step, value))
    for finding in findings:
        records[bisect_left(ends, finding.step)].findings.append(finding)
    sink.begin(info)
    try:
        for number, record in enumerate(records):
            if (due := _due(record, number % sink.every == 0)) is not None:
                sink.write(due)
    finally:
        sink.close()
