"""The sinks for TensorBoard, Weights & Biases, Trackio and MLflow."""

import os
import re
from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any

from torchlens._monitor.record.series import KINDS, WATCHED
from torchlens._monitor.sinks.sink import SeriesRecord, Sink, StepRecord, needed
from torchlens._text.error_wording import got


class TensorBoard(Sink):
    """Writes histograms, statistics, scalars and findings for TensorBoard.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.TensorBoard('tb/a')])
    >>> torchlens.open_run('runs/a').to_tensorboard('tb/a')  # a run that is recorded already

    The histograms have the bins of the run's own (two an octave), not bins of equal width. The
    other options are those of `Sink`.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must name a folder, such as 'tb/a', got {got(folder)}.")
        self._make = needed("torch.utils.tensorboard", "tensorboard", "TensorBoard").SummaryWriter
        self._folder = Path(folder).expanduser()
        self._writer: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        """Begins an event file."""
        self._writer = self._make(str(self._folder))

    def write(self, record: StepRecord) -> None:
        """Adds what was recorded."""
        writer = self._writer
        for name, step, value in record.scalars:
            writer.add_scalar(name, value, step, walltime=record.time)
        for series in record.series:
            for tag, value in self.numbers(series):
                writer.add_scalar(tag, value, record.step, walltime=record.time)
            if self.histograms:
                self._add_histogram(series, record)
        for finding in record.findings:
            writer.add_text("findings", str(finding), finding.step, walltime=record.time)
        writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()

    def _add_histogram(self, series: SeriesRecord, record: StepRecord) -> None:
        bins = series.bins
        if bins is None:
            return
        low, high = series.statistics.get("low", nan), series.statistics.get("high", nan)
        # The first bucket of an event reaches down to the smallest float: an empty one in front
        # keeps ours as it is.
        self._writer.add_histogram_raw(
            self.tag(series),
            min=low if isfinite(low) else float(bins.edges[0]),
            max=high if isfinite(high) else float(bins.edges[-1]),
            num=int(bins.counts.sum()),
            sum=series.total,
            sum_squares=series.squares,
            bucket_limits=bins.edges.tolist(),
            bucket_counts=[0, *bins.counts.tolist()],
            global_step=record.step,
            walltime=record.time,
        )


STEP = "torchlens_step"
# A run that finds something anew in every step does not fill the summary.
_MOST_FINDINGS = 200


class Wandb(Sink):
    """Logs histograms, statistics, scalars and findings to Weights & Biases.

    >>> wandb = torchlens.sinks.Wandb(project='cnn', mode='offline')
    >>> run = torchlens.monitor(model, 'runs/a', sinks=[wandb])

    If a run of wandb is active (`wandb.init` was called), that one is used and stays open;
    otherwise one is begun with `settings`, which are the arguments of `wandb.init`, and finished at
    the end. Everything is logged over the step of the training, 'torchlens_step', so your own
    `wandb.log` goes on counting as before. Findings are in the run's summary. `every`, `statistics`
    and `histograms` are those of `Sink`.
    """

    def __init__(
        self, *, every: int = 1, statistics: Any = None, histograms: bool = True, **settings: Any
    ) -> None:
        chosen = {} if statistics is None else {"statistics": statistics}
        super().__init__(every=every, histograms=histograms, **chosen)
        self._wandb = needed("wandb", "wandb", "Weights & Biases")
        self._settings = settings
        self._run: Any = None
        self._is_ours = False
        self._findings: list[str] = []

    def open(self, info: Mapping[str, Any]) -> None:
        """Takes the active run, or begins one."""
        self._run = self._wandb.run
        if self._run is None or self._settings:
            settings = {"name": info["name"], **self._settings}
            self._run, self._is_ours = self._wandb.init(reinit="create_new", **settings), True
        self._run.config.update({"torchlens": dict(info)}, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        for pattern in ["*"] if self._is_ours else [f"{kind}*" for kind in (*KINDS, WATCHED)]:
            self._run.define_metric(pattern, step_metric=STEP)

    def write(self, record: StepRecord) -> None:
        """Logs one row for each step that something is told of."""
        for step, row in self.rows(record, self._wandb.Histogram).items():
            self._run.log({STEP: step, **row})
        if record.findings and len(self._findings) < _MOST_FINDINGS:
            self._findings += map(str, record.findings)
            self._run.summary["torchlens_findings"] = self._findings[:_MOST_FINDINGS]

    def close(self) -> None:
        """Finishes the run, if it was begun here."""
        if self._is_ours:
            self._run.finish()


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
