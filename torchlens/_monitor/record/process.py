"""The process that records: its rank among others, and what the files say of it and of the run."""

import os
import platform
from time import time
from typing import Any

import torch

from torchlens._monitor.record.options import MonitorOptions
from torchlens._monitor.store.folder import FORMAT


def own_rank() -> int:
    """Which of the processes that train together this is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return _told("RANK", 0)


def world_size() -> int:
    """How many train together."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return _told("WORLD_SIZE", 1)


def session_record(
    session: str, rank: int, first_step: int, options: MonitorOptions
) -> dict[str, Any]:
    """What the files say of the session."""
    return {
        "session": session, "first_step": first_step, "rank": rank, "time": time(),
        "pid": os.getpid(),
        "host": platform.node(), "options": options.as_json(),
    }  # fmt: skip


def run_record(run: str, model: torch.nn.Module, options: MonitorOptions) -> dict[str, Any]:
    """What run.json says."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {
        "format": FORMAT, "run": run, "model": type(model).__name__, "time": time(),
        "versions": versions,
        "options": options.as_json(), "world_size": world_size(),
    }  # fmt: skip


def _told(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
