"""Sends a run to Trackio."""

from collections.abc import Mapping
from typing import Any

from torchlens.monitoring.sinks.sink import Sink, needed
from torchlens.monitoring.sinks.step_record import StepRecord

__all__ = ["Trackio"]


class Trackio(Sink):
    """Logs histograms, statistics, scalars and findings (as alerts) to Trackio.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.Trackio(project='cnn')])

    Begins a run of Trackio with `settings`, the arguments of `trackio.init`, and finishes it at the end. `every`,
    `statistics` and `histograms` are those of `Sink`.
    """

    def __init__(
        self, project: str, *, every: int = 1, statistics: Any = None, histograms: bool = True, **settings: Any
    ) -> None:
        chosen = {} if statistics is None else {"statistics": statistics}
        super().__init__(every=every, histograms=histograms, **chosen)
        self._trackio = needed("trackio", "trackio", "Trackio")
        self._settings = {"project": project, **settings}
        self._run: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        """Begins a run."""
        config = {"torchlens_folder": str(info["folder"]), "model": info["model"]}
        self._run = self._trackio.init(**{"name": info["name"], "config": config, "embed": False, **self._settings})

    def write(self, record: StepRecord) -> None:
        """Logs one row for each step that something is told of."""
        rows: dict[int, dict[str, Any]] = {}
        for name, step, value in record.scalars:
            rows.setdefault(step, {})[name] = value
        for series in record.series:
            row = rows.setdefault(record.step, {})
            row.update(self.numbers(series))
            if self.histograms and series.bins is not None:
                edges, counts = series.bins
                row[self.tag(series)] = self._trackio.Histogram(np_histogram=(counts, edges))
        for step in sorted(rows):
            self._run.log(rows[step], step=step)
        for finding in record.findings:
            self._run.alert(title=finding.kind, text=str(finding), step=finding.step)

    def close(self) -> None:
        """Finishes the run."""
        if self._run is not None:
            self._run.finish()
