"""What the worker process can do with arrays: jobs by name.

A job is a class that is made once for each name that something is sent under:

    class Job:
        def __init__(self, folder: Path, name: str, options: dict[str, Any]) -> None: ...
        def add(self, step: int, array: np.ndarray) -> None: ...      # in the order in which they
        were sent def finish(self) -> None: ...                                  # nothing more will
        come

To add one, name it here as 'module:class'; the module is imported in the worker alone, and must not
import torch, nor anything that does: the worker has numpy, and of torchlens the files that need
nothing else.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

JOBS: dict[str, str] = {
    "points": "torchlens._monitor.films.projection:PointsJob",
    "video": "torchlens._monitor.films.video_job:Video",
}


class Job(Protocol):
    """Does something with one array after the other."""

    def add(self, step: int, array: np.ndarray) -> None:
        """The array of a step."""

    def finish(self) -> None:
        """Nothing more will come."""


def make_job(kind: str, folder: Path, name: str, options: dict[str, Any]) -> Job:
    """A new job of the kind that is known by that name."""
    module, _, attribute = JOBS[kind].partition(":")
    job: Job = getattr(import_module(module), attribute)(folder, name, options)
    return job
