"""Starts the worker process, sends it arrays, and counts what became of them. Used in the writer's
thread alone.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from torchlens._monitor.record.work_process import encode
from torchlens._monitor.store.ring import Ring
from torchlens._text.problems import Problems

CAPACITY = 32 << 20
# Seconds that the end of a run waits for the worker: it has at most the ring to work off.
_PATIENCE = 60.0
_PACKAGE = Path(__file__).parents[1]
# Packages stand for ours without running what imports torch.
_START = """
import sys, types
root, ring, folder = sys.argv[1:]
for name, path in (("torchlens", root), ("torchlens._monitor", root + "/monitoring")):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [path]
from torchlens._monitor.record.work_process import main
main(ring, folder)
"""


class WorkCounts:
    """Arrays that were offered to the worker: done + dropped = offered, once it has ended."""

    __slots__ = ("done", "dropped", "offered")

    def __init__(self, offered: int, done: int, dropped: int) -> None:
        self.offered = offered
        self.done = done
        self.dropped = dropped

    def __repr__(self) -> str:
        return f"<WorkCounts: {self.offered} offered, {self.done} done, {self.dropped} dropped>"


class Worker:
    """A process that does jobs (see jobs.py). It is started when the first array is sent."""

    def __init__(self, folder: Path, problems: Problems, capacity: int = CAPACITY) -> None:
        self._folder = folder
        self._problems = problems
        self._capacity = capacity
        self._process: subprocess.Popen[bytes] | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._ring: Ring | None = None
        self._offered = self._put = self._done = 0
        self._is_over = False

    @property
    def counts(self) -> WorkCounts:
        """What has become of what was offered. While the worker is at work, what waits is neither
        done nor dropped.
        """
        done = self._done if self._ring is None else self._ring.num_done
        waiting = 0 if self._is_over else self._put - done
        return WorkCounts(self._offered, done, self._offered - done - waiting)

    @property
    def pid(self) -> int | None:
        """The process, if it was started."""
        return None if self._process is None else self._process.pid

    def send(
        self, job: str, name: str, step: int, array: np.ndarray, options: dict[str, Any]
    ) -> bool:
        """Hands an array over; False if it was dropped: the ring is full, or the worker gone."""
        self._offered += 1
        if self._process is None and not self._is_over:
            self._start()
        if self._process is None or self._ring is None or self._is_over:
            return False
        if self._process.poll() is not None:
            self._problems.add(
                f"The worker process has ended ({self._process.returncode}): no more projections "
                "or videos"
            )
            return False
        if not self._ring.put(encode(job, name, step, options, array)):
            return False
        self._put += 1
        return True

    def add_dropped(self, count: int) -> None:
        """Arrays that were not even sent."""
        self._offered += count

    def finish(self) -> None:
        """Waits for what was sent, and ends the process. May be called again."""
        process, self._is_over = self._process, True
        if process is None or self._ring is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._problems.add(
                f"The worker process was not done after {_PATIENCE:g} seconds, and was ended"
            )
            process.kill()
            process.wait()
        self._told()
        self._done = self._ring.num_done
        self._ring.close()
        self._ring = None
        if self._place is not None:
            self._place.cleanup()

    def _start(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="torchlens-", ignore_cleanup_errors=True)
        place = Path(self._place.name)
        self._ring = Ring.create(place / "ring", self._capacity)
        self._errors = place / "errors"
        # Nothing of a job is worth more than one core.
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(_PACKAGE), str(self._ring.path),
                str(self._folder.resolve())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
                env=os.environ | single,
                start_new_session=True,
            )  # fmt: skip

    def _told(self) -> None:
        """What the worker said went wrong."""
        for line in self._errors.read_text(encoding="utf-8", errors="replace").splitlines()[:20]:
            self._problems.add(f"In the worker process: {line}")
