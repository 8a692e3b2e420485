"""Sends a run to Trackio."""

from collections.abc import Mapping
from typing import Any

from torchlens._monitor.sinks.sink import Sink, needed
from torchlens._monitor.sinks.step_record import StepRecord


class Trackio(Sink):
    """Logs histograms, statistics, scalars and findings (as alerts) to Trackio.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.Trackio(project='cnn')])

    Begins a run of Trackio with `settings`, the arguments of `trackio.init`, and finishes it at the
    end. Without a project, the run that `trackio.init` began is used, and stays open. `every`,
    `statistics` and `histograms` are those of `Sink`.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        every: int = 1,
        statistics: Any = None,
        histograms: bool = True,
        **settings: Any,
    ) -> None:
        chosen = {} if statistics is None else {"statistics": statistics}
        super().__init__(every=every, histograms=histograms, **chosen)
        self._trackio = needed("trackio", "trackio", "Trackio")
        self._project = project
        self._settings = settings
        self._run: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        """Takes the active run, or begins one."""
        if self._project is None:
            self._run = self._trackio.context_vars.current_run.get()
            if self._run is None:
                raise ValueError(
                    "project must be named, as in Trackio('cnn'), unless trackio.init was called "
                    "before."
                )
            return
        defaults = {
            "name": info["name"], "config": {"torchlens_folder": str(info["folder"]),
            "model": info["model"]},
            "embed": False, "auto_log_cpu": False, "auto_log_gpu": False,
        }  # fmt: skip
        current = self._trackio.context_vars.current_run
        before = current.get()
        self._run = self._trackio.init(project=self._project, **{**defaults, **self._settings})
        current.set(
            before
            # Trackio finishes the current run at exit, again: this one is ours, and was finished by
            # then
        )

    def write(self, record: StepRecord) -> None:
        """Logs one row for each step that something is told of."""
        for step, row in self.rows(record, self._trackio.Histogram).items():
            self._run.log(row, step=step)
        for finding in record.findings:
            self._run.alert(title=finding.kind, text=str(finding), step=finding.step)

    def close(self) -> None:
        """Finishes the run, if it was begun here."""
        if self._project is not None:
            self._run.finish()
