"""Where a run can be sent besides its folder.

>>> run = torchlens.monitor(model, 'runs/a', sinks=[torchlens.sinks.TensorBoard('tb/a')])
"""

from torchlens._monitor.sinks.sink import SeriesRecord, Sink, StepRecord
from torchlens._monitor.sinks.trackers import MLflow, TensorBoard, Trackio, Wandb

__all__ = ["MLflow", "SeriesRecord", "Sink", "StepRecord", "TensorBoard", "Trackio", "Wandb"]
