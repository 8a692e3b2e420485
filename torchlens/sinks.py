"""Where else a run can be sent, besides its folder.

>>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.TensorBoard('tb/a')])
"""

from torchlens._monitor.sinks.mlflow_sink import MLflow
from torchlens._monitor.sinks.sink import Sink
from torchlens._monitor.sinks.step_record import SeriesRecord, StepRecord
from torchlens._monitor.sinks.tensorboard_sink import TensorBoard
from torchlens._monitor.sinks.trackio_sink import Trackio
from torchlens._monitor.sinks.wandb_sink import Wandb

__all__ = ["MLflow", "SeriesRecord", "Sink", "StepRecord", "TensorBoard", "Trackio", "Wandb"]
