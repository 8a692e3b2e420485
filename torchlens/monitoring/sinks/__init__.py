"""Where a run may be sent, beside its folder: TensorBoard, Weights & Biases, Trackio, MLflow, or one of your own."""

from torchlens.monitoring.sinks.mlflow_sink import MLflow
from torchlens.monitoring.sinks.sink import Sink
from torchlens.monitoring.sinks.step_record import SeriesRecord, StepRecord
from torchlens.monitoring.sinks.tensorboard_sink import TensorBoard
from torchlens.monitoring.sinks.trackio_sink import Trackio
from torchlens.monitoring.sinks.wandb_sink import Wandb

__all__ = ["MLflow", "SeriesRecord", "Sink", "StepRecord", "TensorBoard", "Trackio", "Wandb"]
