"""What every sink is: opened with the run, given its recorded steps one after the other, closed at
the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from torchlens._monitor.sinks.step_record import STATISTICS, SeriesRecord, StepRecord
from torchlens._text.wording import check_count, did_you_mean, got, one_of


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

    # -- for those who write one
    # ---------------------------------------------------------------------------------------

    def open(self, info: Mapping[str, Any]) -> None:
        """The run begins: `info` has 'name', 'folder', 'model' (its class) and 'options'."""

    def write(self, record: StepRecord) -> None:
        """Takes a recorded step, or scalars alone."""
        raise NotImplementedError

    def close(self) -> None:
        """The run is over."""

    # -- for those who feed one
    # ----------------------------------------------------------------------------------------

    def begin(self, info: Mapping[str, Any]) -> None:
        """Opens it."""
        self._model = str(info.get("model") or "model")
        self.open(info)

    # -- what sinks share
    # ----------------------------------------------------------------------------------------------

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
