"""Sends a run to Weights & Biases, online or offline."""

from collections.abc import Mapping
from typing import Any

from torchlens._monitor.record.series import KINDS, WATCHED
from torchlens._monitor.sinks.sink import Sink, needed
from torchlens._monitor.sinks.step_record import StepRecord

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
