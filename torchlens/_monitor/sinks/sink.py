"""What every sink is: opened with the run, given its recorded steps, closed at the end."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from queue import SimpleQueue
from time import time
from typing import Any, NamedTuple

import numpy as np

from torchlens._health.finding import RunFinding
from torchlens._monitor.read.views import Scalars
from torchlens._monitor.store.bins import bin_edges, bin_order
from torchlens._monitor.store.columns import QUANTILES, Step
from torchlens._text.error_wording import check_count, did_you_mean, got, one_of
from torchlens._text.problems import Problems

STATISTICS = ("mean", "std", "rms", "low", "high", "zero", "nonfinite", "dead", "saturated")
# The bin of zero has no width. Programs that draw histograms want one.
_NEAR_ZERO = 1e-38
# Weights & Biases takes no more; merged steps of a wild tensor may have as many.
_MOST_BINS = 512


class Bins(NamedTuple):
    """A histogram without gaps: `counts[i]` of the sampled elements lie between `edges[i]` and
    `edges[i + 1]`.
    """

    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True, eq=False)
class SeriesRecord:
    """One tensor of a module in one step. `module` is '' for the model itself, `name` '' where
    there is only one tensor.
    """

    module: str
    kind: str
    name: str
    statistics: Mapping[
        str, float
    ]  # by the names in STATISTICS; what means nothing here is left out
    quantiles: Mapping[float, float]
    num_elements: int
    num_sampled: int
    total: float  # the sum of what is finite in the sample
    squares: float  # the sum of its squares
    codes: np.ndarray
    code_counts: np.ndarray

    @cached_property
    def bins(self) -> Bins | None:
        """The histogram of what is finite in the sample; None if nothing is."""
        return gapless(self.codes, self.code_counts)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """A recorded step; or, with no `series`, scalars that were logged in between. `scalars` are
    (name, step, value).
    """

    step: int
    time: float
    series: list[SeriesRecord]
    scalars: list[tuple[str, int, float]]
    findings: list[RunFinding]


@dataclass(slots=True, eq=False)
class RecordedStep:
    """What those who listen to a run are told, in the writer's thread, once it is in the file."""

    step: Step | None  # None if only scalars were logged
    scalars: list[tuple[str, int, float]]
    findings: list[RunFinding]


def step_records(step: Step, key_of: Callable[[int], Any]) -> Iterator[SeriesRecord]:
    """The series of a step. `key_of` tells module, kind and name of a series by its number."""
    columns = step.columns
    values = {name: getattr(columns, name) for name in STATISTICS}
    for row, number in enumerate(columns.series.tolist()):
        key = key_of(number)
        found = {name: float(own[row]) for name, own in values.items() if not np.isnan(own[row])}
        quantiles = zip(QUANTILES.tolist(), columns.quantiles[row].tolist(), strict=True)
        yield SeriesRecord(
            key.module, key.kind, key.name, found,
            {level: value for level, value in quantiles if value == value},
            int(columns.elements[row]), int(columns.sampled[row]), float(columns.total[row]),
            float(columns.squares[row]), *columns.bins(row),
        )  # fmt: skip


def gapless(codes: np.ndarray, counts: np.ndarray) -> Bins | None:
    """Bins side by side, from those that are not empty: empty ones where there are gaps, a narrow
    one around zero.
    """
    order = np.argsort(bin_order(codes), kind="stable")
    low, high = bin_edges(codes[order])
    numbers = counts[order]
    real = np.isfinite(low) & np.isfinite(high)
    low, high, numbers = low[real], high[real], numbers[real]
    if not len(numbers):
        return None
    is_zero = low == high
    # Numbers that are nearer to zero than that share its bin's place; none is lost.
    low, high = np.where(is_zero, -_NEAR_ZERO, low), np.where(is_zero, _NEAR_ZERO, high)
    edges, found = [float(low[0])], []
    for left, right, count in zip(low.tolist(), high.tolist(), numbers.tolist(), strict=True):
        if left > edges[-1]:
            edges.append(left)
            found.append(0)
        if right > edges[-1]:
            edges.append(right)
            found.append(count)
        else:
            found[-1] += count
    edges_array, counts_array = np.array(edges), np.array(found, np.int64)
    if len(found) > _MOST_BINS:
        return _coarser(edges_array, counts_array)
    return Bins(edges_array, counts_array)


def _coarser(edges: np.ndarray, counts: np.ndarray) -> Bins:
    """Neighbours put together, so that there are few enough."""
    step = -(-len(counts) // _MOST_BINS)
    starts = np.arange(0, len(counts), step)
    return Bins(np.append(edges[starts], edges[-1]), np.add.reduceat(counts, starts))


class Sink:
    """Sends a run somewhere else, beside its folder. Write your own by overriding `open`, `write`
    and `close`.

    >>> class Printer(torchlens.sinks.Sink):
    ...     def write(self, record):
    ...         for series in record.series:
    ...             print(record.step, series.module, series.kind, series.statistics['rms'])
    >>> run = torchlens.monitor(model, 'runs/a', sinks=[Printer(every=10)])

    `open` is called in the thread that calls `monitor`, `write` and `close` in a thread of the
    sink's own. A failure there ends the sink alone, and `run.problems` says why. A sink that is too
    slow misses steps; `run.problems` says how many.

    every: send every n-th recorded step; scalars are always sent.
    statistics: which numbers to send for each tensor; 'quantiles' stands for nine of them.
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

    # -- for those who write one -------------------------------------------------------------------

    def open(self, info: Mapping[str, Any]) -> None:
        """The run begins: `info` has 'name', 'folder', 'model' (its class) and 'options'."""

    def write(self, record: StepRecord) -> None:
        """Takes a recorded step, or scalars alone."""
        raise NotImplementedError

    def close(self) -> None:
        """The run is over."""

    # -- for those who feed one --------------------------------------------------------------------

    def begin(self, info: Mapping[str, Any]) -> None:
        """Opens it."""
        self._model = str(info.get("model") or "model")
        self.open(info)

    # -- what sinks share --------------------------------------------------------------------------

    def tag(self, series: SeriesRecord, statistic: str = "") -> str:
        """The sink's name of a series: 'outputs/layer1.0.conv1', 'outputs.rms/layer1.0.conv1',
        'parameters/fc.weight'.
        """
        place = ".".join(part for part in (series.module or self._model, series.name) if part)
        return f"{series.kind}.{statistic}/{place}" if statistic else f"{series.kind}/{place}"

    def rows(self, record: StepRecord, histogram: Callable[..., Any]) -> dict[int, dict[str, Any]]:
        """By step, in order: what there is to say of it, by tags. `histogram` is made of
        `np_histogram=(counts, edges)`.
        """
        rows: dict[int, dict[str, Any]] = {}
        for name, step, value in record.scalars:
            rows.setdefault(step, {})[name] = value
        for series in record.series:
            row = rows.setdefault(record.step, {})
            row.update(self.numbers(series))
            if self.histograms and series.bins is not None:
                row[self.tag(series)] = histogram(
                    np_histogram=(series.bins.counts, series.bins.edges)
                )
        return dict(sorted(rows.items()))

    def numbers(self, series: SeriesRecord) -> Iterator[tuple[str, float]]:
        """The statistics of a series that were asked for, by their tags."""
        for name in self.statistics:
            if name == "quantiles":
                yield from (
                    (self.tag(series, f"q{level:g}"), value)
                    for level, value in series.quantiles.items()
                )
            elif name in series.statistics:
                yield self.tag(series, name), series.statistics[name]


def needed(module: str, extra: str, title: str) -> Any:
    """Imports an optional package; the error says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            # It is there, but something that it needs is not (torch's writer needs tensorboard).
            raise ImportError(
                f"{title} cannot be imported: {error}. Run: pip install 'torchlens[{extra}]'."
            ) from error
        raise ImportError(
            f"{title} is not installed. Run: pip install 'torchlens[{extra}]'."
        ) from error


# -- sending a run ---------------------------------------------------------------------------------

# The steps that may wait. One of a large model takes some hundred kilobytes.
MOST_WAITING = 64
# Seconds that the end of a run waits for a sink.
_PATIENCE = 120.0


class SinkFeed:
    """Hands recorded steps to one sink. A slow server holds up neither training nor the files.
    `key_of` gives the module, kind and name of a series by its number.
    """

    def __init__(self, sink: Sink, key_of: Callable[[int], Any], problems: Problems) -> None:
        self._sink = sink
        self._key_of = key_of
        self._problems = problems
        self._queue: SimpleQueue[RecordedStep | None] = SimpleQueue()
        self._num_recorded = self._num_missed = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="torchlens sink", daemon=True)
        self._thread.start()

    def tell(self, recorded: RecordedStep) -> None:
        """Takes a step, unless too many wait. Never blocks."""
        if self._has_failed:
            return
        if recorded.step is not None:
            self._num_recorded += 1
            if (self._num_recorded - 1) % self._sink.every:
                recorded = RecordedStep(None, recorded.scalars, recorded.findings)
        if self._queue.qsize() >= MOST_WAITING:
            self._num_missed += 1
            return
        if recorded.step is not None or recorded.scalars or recorded.findings:
            self._queue.put(recorded)

    def finish(self) -> None:
        """Waits until all is sent and the sink is closed, within reason."""
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
            while (recorded := self._queue.get()) is not None:
                self._sink.write(record_of(recorded, self._key_of))
        except Exception as error:
            self._fail(error, "no longer gets what is recorded")
        try:
            self._sink.close()
        except Exception as error:
            self._fail(error, "could not be closed")

    def _fail(self, error: Exception, what: str) -> None:
        self._has_failed = True
        self._problems.add_failure(error, f"The sink {type(self._sink).__name__} {what}")


def record_of(recorded: RecordedStep, key_of: Callable[[int], Any]) -> StepRecord:
    """What a sink is given of a step."""
    step = recorded.step
    if step is None:
        number = max((each for _, each, _ in recorded.scalars), default=0)
        return StepRecord(number, time(), [], recorded.scalars, recorded.findings)
    return StepRecord(
        step.last, step.time, list(step_records(step, key_of)), recorded.scalars, recorded.findings
    )


def send(
    sink: Sink,
    info: Mapping[str, Any],
    steps: Sequence[Step],
    key_of: Callable[[int], Any],
    scalars: Mapping[str, Scalars],
    findings: Sequence[RunFinding],
) -> None:
    """Opens the sink, sends all of it in the order of steps, and closes it. What fails is
    raised.
    """
    ends = [step.last for step in steps]
    batches = [
        RecordedStep(None if place % sink.every else step, [], [])
        for place, step in enumerate(steps)
    ]
    batches.append(RecordedStep(None, [], []))  # what came after the last step
    for name, own in scalars.items():
        for step, value in zip(own.steps.tolist(), own.values.tolist(), strict=True):
            batches[bisect_left(ends, step)].scalars.append((name, step, value))
    for finding in findings:
        batches[bisect_left(ends, finding.step)].findings.append(finding)
    sink.begin(info)
    try:
        for batch in batches:
            if batch.step is not None or batch.scalars or batch.findings:
                sink.write(record_of(batch, key_of))
    finally:
        sink.close()
