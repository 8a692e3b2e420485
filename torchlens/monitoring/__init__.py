"""A model through its whole training: statistics of every module, recorded into a folder that can be read meanwhile."""

from torchlens.monitoring.options import MonitorOptions
from torchlens.monitoring.reader import RunReader, open_run
from torchlens.monitoring.run import Run

__all__ = ["MonitorOptions", "Run", "RunReader", "open_run"]
