"""The worker process: takes arrays out of the ring and does the jobs. It never imports torch.

It lives as long as its standard input is open and its parent is the same, which is as long as the
process that started it
lives: then it finishes what is in the ring, and ends.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from torchlens._monitor.record.jobs import Job, make_job
from torchlens._monitor.store.ring import Ring

_PATIENCE = 0.01  # seconds between two looks into an empty ring


def encode(job: str, name: str, step: int, options: dict[str, Any], array: np.ndarray) -> bytes:
    """A record: a line of JSON, then the array's numbers."""
    head = {
        "job": job,
        "name": name,
        "step": step,
        "options": options,
        "shape": array.shape,
        "dtype": array.dtype.str,
    }
    return json.dumps(head).encode() + b"\n" + np.ascontiguousarray(array).tobytes()


def decode(record: bytes) -> tuple[dict[str, Any], np.ndarray]:
    """What `encode` made a record of."""
    line, _, data = record.partition(b"\n")
    head = json.loads(line)
    return head, np.frombuffer(data, np.dtype(head["dtype"])).reshape(head["shape"])


def main(ring_path: str, folder: str) -> None:
    """Works until standard input ends and the ring is empty."""
    ring = Ring(Path(ring_path))
    is_over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        is_over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(10)  # the training comes first
    jobs: dict[tuple[str, str], Job | None] = {}
    parent = os.getppid()
    while True:
        was_over = is_over.is_set()  # asked before looking: what was put before the end is seen
        record = ring.get()
        if record is not None:
            _work(jobs, Path(folder), record)
            ring.mark_done()
        elif was_over:
            break
        elif (
            os.getppid() != parent
        ):  # a process that the parent forked may hold our standard input open
            is_over.set()
        else:
            is_over.wait(_PATIENCE)
    for job in jobs.values():
        if job is not None:
            job.finish()
    ring.close()


def _work(jobs: dict[tuple[str, str], Job | None], folder: Path, record: bytes) -> None:
    """One record. A job that fails is told on standard error, and given up."""
    head, array = decode(record)
    key = head["job"], head["name"]
    try:
        if key not in jobs:
            jobs[key] = None
            jobs[key] = make_job(head["job"], folder, head["name"], head["options"])
        job = jobs[key]
        if job is not None:
            job.add(head["step"], array)
    except Exception as error:
        jobs[key] = None
        sys.stderr.write(
            f"{head['job']} of {head['name']!r} failed ({type(error).__name__}: {error})\n"
        )
        sys.stderr.flush()
