"""Sends a run to MLflow."""

import re
from collections.abc import Mapping
from typing import Any

from torchlens._monitor.sinks.sink import Sink, needed
from torchlens._monitor.sinks.step_record import StepRecord

# What a server takes in one request.
_MOST_METRICS = 1000
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MLflow(Sink):
    """Logs statistics and scalars to MLflow as metrics, histograms and findings as artifacts.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.MLflow(experiment='cnn')])

    If a run of MLflow is active, that one is used and stays open; otherwise one is begun in
    `experiment`, and ended. MLflow draws no histograms: they are in files
    `torchlens/histograms/step-00000100.json`, with edges and counts by tag. `tracking_uri` says
    where, if not where `mlflow.set_tracking_uri` did. The other options are those of `Sink`.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        run_id: str | None = None,
        tracking_uri: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._mlflow = needed("mlflow", "mlflow", "MLflow")
        self._experiment = experiment
        self._uri = tracking_uri
        self.run_id = run_id
        self._client: Any = None
        self._is_ours = False
        self._findings: list[str] = []

    def open(self, info: Mapping[str, Any]) -> None:
        """Takes the run that was named or is active, or begins one."""
        # By a client, since which run is active is a matter of the thread.
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        active = self._mlflow.active_run()
        if self.run_id is None and active is not None and self._experiment is None:
            self.run_id = active.info.run_id
        if self.run_id is None:
            self._is_ours = True
            self.run_id = self._client.create_run(
                self._experiment_id(), run_name=str(info["name"])
            ).info.run_id
        self._client.set_tag(self.run_id, "torchlens.folder", str(info["folder"]))
        self._client.set_tag(self.run_id, "torchlens.model", str(info["model"]))

    def write(self, record: StepRecord) -> None:
        """Logs metrics in batches, and a file of histograms."""
        metric = self._mlflow.entities.Metric
        time = int(record.time * 1000)
        found = [metric(_allowed(name), value, time, step) for name, step, value in record.scalars]
        histograms: dict[str, Any] = {}
        for series in record.series:
            found += [
                metric(_allowed(tag), value, time, record.step)
                for tag, value in self.numbers(series)
            ]
            if self.histograms and series.bins is not None:
                edges, counts = series.bins
                histograms[self.tag(series)] = {"edges": edges.tolist(), "counts": counts.tolist()}
        for start in range(0, len(found), _MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=found[start : start + _MOST_METRICS])
        if histograms:
            self._client.log_dict(
                self.run_id, histograms, f"torchlens/histograms/step-{record.step:08d}.json"
            )
        if record.findings:
            self._findings += map(str, record.findings)
            self._client.log_text(
                self.run_id, "\n".join(self._findings) + "\n", "torchlens/findings.txt"
            )

    def close(self) -> None:
        """Ends the run, if it was begun here."""
        if self._is_ours:
            self._client.set_terminated(self.run_id)

    def _experiment_id(self) -> str:
        name = self._experiment or "Default"
        known = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if known is None else known.experiment_id)


def _allowed(name: str) -> str:
    return _FORBIDDEN.sub("_", name)
