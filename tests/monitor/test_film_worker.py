"""The film process: training never waits for it, it ends with its parent, every tensor is counted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import torchlens as tl
from torchlens._monitor.films import film_worker
from torchlens._monitor.films.film_worker import Capture, FilmWorker
from torchlens._text.problems import Problems

OPTIONS = {"method": "pca", "basis": "aligned"}


def capture(name: str = "a", job: str = "points") -> Capture:
    return Capture(job, name, OPTIONS, torch.randn(10, 4))


def wait_for(worker: FilmWorker, done: int) -> None:
    while worker.counts.done < done:
        time.sleep(0.01)


@pytest.mark.slow
def test_killing_the_process_costs_only_what_it_would_have_drawn(tmp_path: Path) -> None:
    problems = Problems("the monitor")
    worker = FilmWorker(tmp_path, problems)
    worker.offer(0, capture())
    wait_for(worker, 1)
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    worker.offer(1, capture())
    worker.finish()
    worker.offer(2, capture())
    counts = worker.counts
    assert (counts.offered, counts.done, counts.dropped) == (3, 1, 2)
    assert "The film process has ended (-9): no more projections or videos" in problems[0]


@pytest.mark.slow
def test_a_process_that_is_slow_or_fails_holds_nothing_up(tmp_path: Path) -> None:
    problems = Problems("the monitor")
    worker = FilmWorker(tmp_path, problems, most_waiting=1 << 14)
    for step in range(200):  # before the process is there
        worker.offer(step, capture())
    dropped = worker.counts.dropped
    assert 0 < dropped < 200
    wait_for(worker, 200 - dropped)
    worker.offer(0, capture("b", "nonsense"))
    worker.finish()
    worker.finish()
    counts = worker.counts
    assert (counts.offered, counts.done, counts.dropped) == (201, 201 - dropped, dropped)
    assert problems == ["In the film process: nonsense of 'b' failed (KeyError: 'nonsense')"]


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_worker, "_PATIENCE", 0.2)
    problems = Problems("the monitor")
    worker = FilmWorker(tmp_path, problems)
    worker.offer(0, capture())
    wait_for(worker, 1)
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.offer(1, capture())
    worker.finish()
    assert "was not done after 0.2 seconds, and was ended" in problems[0]
    assert worker.counts.dropped == 1


@pytest.mark.slow
def test_the_process_ends_with_its_parent_and_never_imports_torch(tmp_path: Path) -> None:
    code = f"""
import time, torch
from pathlib import Path
from torchlens._monitor.films.film_worker import Capture, FilmWorker
from torchlens._text.problems import Problems
worker = FilmWorker(Path({str(tmp_path)!r}), Problems())
worker.offer(0, Capture("points", "a", {OPTIONS}, torch.ones(4, 4)))
while worker.counts.done < 1:
    time.sleep(0.01)
print(worker.process.pid, flush=True)
time.sleep(600)
"""
    root = Path(tl.__file__).parents[1]
    parent: Any = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root
    )
    pid = int(parent.stdout.readline())
    maps = Path(f"/proc/{pid}/maps")
    if maps.exists():
        assert "libtorch" not in maps.read_text()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while _is_running(pid):
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
