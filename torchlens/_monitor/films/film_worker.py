"""Sends tensors to the film process and counts what became of them. Training never waits."""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from torchlens._monitor.films import film_process
from torchlens._text.problems import Problems

# Bytes of tensors that may wait for the process.
_MOST_WAITING = 32 << 20
# Seconds that the end of a run waits for the process.
_PATIENCE = 60.0


class Capture(NamedTuple):
    """A tensor for a job of the film process: 'points' or 'video', under a name."""

    job: str
    name: str
    options: dict[str, Any]
    tensor: torch.Tensor


@dataclass(slots=True)
class WorkCounts:
    """Tensors offered to the film process: done + dropped = offered, once it has ended."""

    offered: int = 0
    done: int = 0
    dropped: int = 0


class FilmWorker:
    """Runs the film process. A thread and the process are started with the first tensor."""

    def __init__(self, folder: Path, problems: Problems, most_waiting: int = _MOST_WAITING) -> None:
        self.counts = WorkCounts()
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = folder
        self._problems = problems
        self._most_waiting = most_waiting
        self._lock = threading.Lock()  # for the counts
        self._num_bytes = 0  # of tensors that wait
        self._is_over = False
        self._queue: SimpleQueue[tuple[int, Capture] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def offer(self, step: int, capture: Capture) -> None:
        """Hands a tensor over, or drops it if too much waits. Returns at once."""
        with self._lock:
            self.counts.offered += 1
            size = capture.tensor.nbytes
            if self._is_over or self._num_bytes + size > self._most_waiting:
                self.counts.dropped += 1
                return
            self._num_bytes += size
        self._queue.put((step, capture))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchlens films", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Waits for what was sent, and ends the process. May be called again."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join(_PATIENCE)
        if thread.is_alive() and self.process is not None:
            self._problems.add(
                f"The film process was not done after {_PATIENCE:g} seconds, and was ended"
            )
            self.process.kill()
            thread.join()

    def abandon(self) -> None:
        """In a forked process, which has neither the thread nor the process."""
        self._is_over, self._thread = True, None

    def _run(self) -> None:
        with tempfile.TemporaryFile() as errors:
            try:
                with self._started(errors) as self.process:
                    self._send_all(self.process)
            except (OSError, EOFError, pickle.UnpicklingError):
                code = None if self.process is None else self.process.returncode
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                self._problems.add(
                    f"The film process has ended ({code}): no more projections or videos. "
                    f"{said}".rstrip()
                )
        with self._lock:
            self._is_over, self._queue = True, SimpleQueue()
            self.counts.dropped = self.counts.offered - self.counts.done

    def _started(self, errors: Any) -> "subprocess.Popen[bytes]":
        command = [sys.executable, film_process.__file__, str(self._folder.resolve())]
        # One core is enough for films.
        single = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | single,
            start_new_session=True,  # Ctrl-C is for the training; we end the process ourselves
        )

    def _send_all(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        while (item := self._queue.get()) is not None:
            step, (job, name, options, tensor) = item
            array = tensor.cpu().numpy()
            pickle.dump((job, name, options, step, array), process.stdin)
            process.stdin.flush()
            problem = pickle.load(process.stdout)
            if problem:
                self._problems.add(f"In the film process: {problem}")
            with self._lock:
                self.counts.done += 1
                self._num_bytes -= tensor.nbytes
            del item, tensor, array
        pickle.dump(None, process.stdin)
        process.stdin.flush()
