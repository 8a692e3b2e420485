"""The sinks for TensorBoard, Weights & Biases, Trackio and MLflow."""

import os
import re
from collections.abc import Iterable, Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any

from torchlens._monitor.record.series import KINDS, WATCHED
from torchlens._monitor.sinks.sink import STATISTICS, Sink, StepRecord, needed
from torchlens._text.error_wording import got


class TensorBoard(Sink):
    """Writes histograms, statistics, scalars and findings for TensorBoard.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.TensorBoard('tb/a')])
    >>> torchlens.open_run('runs/a').to_tensorboard('tb/a')  # a run that is recorded already

    The histograms have the run's own bins (two per octave), not bins of equal width. The other
    options are those of `Sink`.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must name a folder, such as 'tb/a', got {got(folder)}.")
        self._make = needed("torch.utils.tensorboard", "tensorboard", "TensorBoard").SummaryWriter
        self._folder = Path(folder).expanduser()
        self._writer: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        """Starts an event file."""
        self._writer = self._make(str(self._folder))

    def write(self, record: StepRecord) -> None:
        """Adds the record's scalars, statistics, histograms and findings."""
        writer, time = self._writer, record.time
        for tag, step, value in self.all_numbers(record):
            writer.add_scalar(tag, value, step, walltime=time)
        for tag, series, bins in self.all_histograms(record):
            low, high = series.statistics.get("low", nan), series.statistics.get("high", nan)
            writer.add_histogram_raw(
                tag,
                min=low if isfinite(low) else float(bins.edges[0]),
                max=high if isfinite(high) else float(bins.edges[-1]),
                num=int(bins.counts.sum()),
                sum=series.total,
                sum_squares=series.squares,
                bucket_limits=bins.edges.tolist(),
                # TensorBoard's first bucket starts at the smallest float, so it must be empty.
                bucket_counts=[0, *bins.counts.tolist()],
                global_step=record.step,
                walltime=time,
            )
        for finding in record.findings:
            writer.add_text("findings", str(finding), finding.step, walltime=time)
        writer.flush()

    def close(self) -> None:
        """Ends the file."""
        if self._writer is not None:
            self._writer.close()


STEP = "torchlens_step"
# The summary of a run has at most so many findings.
_MOST_FINDINGS = 200


class Wandb(Sink):
    """Logs histograms, statistics, scalars and findings to Weights & Biases.

    >>> wandb = torchlens.sinks.Wandb(project='cnn', mode='offline')
    >>> run = torchlens.monitor(model, 'runs/a', sinks=[wandb])

    If a run of wandb is active (`wandb.init` was called), the sink logs to it and leaves it open;
    otherwise it starts one with `settings`, the arguments of `wandb.init`, and finishes it at the
    end. The x-axis is the training step, 'torchlens_step', so the step counter of your own
    `wandb.log` is not affected. Findings are in the run's summary. `every`, `statistics` and
    `histograms` are those of `Sink`.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        statistics: str | Iterable[str] = STATISTICS,
        histograms: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(every=every, statistics=statistics, histograms=histograms)
        self._wandb = needed("wandb", "wandb", "Weights & Biases")
        self._settings = settings
        self._run: Any = None
        self._is_ours = False
        self._findings: list[str] = []

    def open(self, info: Mapping[str, Any]) -> None:
        """Takes the active run, or starts one."""
        self._run = self._wandb.run
        if self._run is None or self._settings:
            settings = {"name": info["name"], **self._settings}
            self._run, self._is_ours = self._wandb.init(reinit="create_new", **settings), True
        self._run.config.update({"torchlens": dict(info)}, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        for pattern in ["*"] if self._is_ours else [f"{kind}*" for kind in (*KINDS, WATCHED)]:
            self._run.define_metric(pattern, step_metric=STEP)

    def write(self, record: StepRecord) -> None:
        """Logs one row for each step in the record."""
        for step, row in self.rows(record, self._wandb.Histogram):
            self._run.log({STEP: step, **row})
        if record.findings and len(self._findings) < _MOST_FINDINGS:
            self._findings += map(str, record.findings)
            self._run.summary["torchlens_findings"] = self._findings[:_MOST_FINDINGS]

    def close(self) -> None:
        """Finishes the run if this sink started it."""
        if self._is_ours:
            self._run.finish()


class Trackio(Sink):
    """Logs histograms, statistics, scalars and findings (as alerts) to Trackio.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.Trackio(project='cnn')])

    Starts a run of Trackio with `settings`, the arguments of `trackio.init`, and finishes it at the
    end. Without a project, the sink logs to the run that `trackio.init` started and leaves it open.
    `every`, `statistics` and `histograms` are those of `Sink`.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        every: int = 1,
        statistics: str | Iterable[str] = STATISTICS,
        histograms: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(every=every, statistics=statistics, histograms=histograms)
        self._trackio = needed("trackio", "trackio", "Trackio")
        self._project = project
        self._settings = settings
        self._run: Any = None

    def open(self, info: Mapping[str, Any]) -> None:
        """Takes the active run, or starts one."""
        if self._project is None:
            self._run = self._trackio.context_vars.current_run.get()
            if self._run is None:
                raise ValueError(
                    "project must be named, as in Trackio('cnn'), unless trackio.init was called "
                    "before."
                )
            return
        defaults = {
            "name": info["name"],
            "config": {"torchlens_folder": str(info["folder"]), "model": info["model"]},
            "embed": False, "auto_log_cpu": False, "auto_log_gpu": False,
        }  # fmt: skip
        current = self._trackio.context_vars.current_run
        before = current.get()
        self._run = self._trackio.init(project=self._project, **{**defaults, **self._settings})
        current.set(before)  # otherwise Trackio would finish our run a second time at exit

    def write(self, record: StepRecord) -> None:
        """Logs one row for each step in the record."""
        for step, row in self.rows(record, self._trackio.Histogram):
            self._run.log(row, step=step)
        for finding in record.findings:
            self._run.alert(title=finding.kind, text=str(finding), step=finding.step)

    def close(self) -> None:
        """Finishes the run if this sink started it."""
        if self._project is not None:
            self._run.finish()


# The most metrics that a server takes in one request.
_MOST_METRICS = 1000
_FORBIDDEN = re.compile(r"[^\w\-. :/]")


class MLflow(Sink):
    """Logs statistics and scalars to MLflow as metrics, histograms and findings as artifacts.

    >>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.MLflow(experiment='cnn')])

    If a run of MLflow is active, the sink logs to it and leaves it open; otherwise it starts one in
    `experiment` and ends it. MLflow draws no histograms: they are artifacts,
    `torchlens/histograms/step-00000100.json`, with edges and counts by tag. `tracking_uri` is the
    server, if it is not that of `mlflow.set_tracking_uri`. The other options are those of `Sink`.
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
        """Takes the run of `run_id` or the active one, or starts one."""
        # A client, because MLflow's active run belongs to one thread and `write` runs in another.
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
        metric, time = self._mlflow.entities.Metric, int(record.time * 1000)
        found = [
            metric(_FORBIDDEN.sub("_", tag), value, time, step)
            for tag, step, value in self.all_numbers(record)
        ]
        histograms = {
            tag: {"edges": edges.tolist(), "counts": counts.tolist()}
            for tag, _, (edges, counts) in self.all_histograms(record)
        }
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
        """Ends the run if this sink started it."""
        if self._is_ours:
            self._client.set_terminated(self.run_id)

    def _experiment_id(self) -> str:
        name = self._experiment or "Default"
        known = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if known is None else known.experiment_id)
