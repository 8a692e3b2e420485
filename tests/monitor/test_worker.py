"""The ring buffer and the worker process: never waiting, gone with its parent, every array done or
counted.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.films.projection import PointsJob, read_projection
from torchlens._monitor.record.worker import Worker
from torchlens._monitor.store.ring import Ring
from torchlens._text.problems import Problems


def test_a_ring_gives_what_was_put_in_order_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    ring = Ring.create(tmp_path / "ring", 1000)
    other = Ring(tmp_path / "ring")
    generator = random.Random(0)
    waiting: list[bytes] = []
    refused = 0
    for number in range(3000):
        if generator.random() < 0.55:
            payload = bytes([number % 256]) * generator.randrange(0, 400)
            if ring.put(payload):
                waiting.append(payload)
            else:
                refused += 1
        else:
            assert other.get() == (waiting.pop(0) if waiting else None)
    assert refused > 100
    assert not ring.put(bytes(2000))
    for payload in waiting:
        assert other.get() == payload
    assert other.get() is None
    ring.close()
    other.close()


def test_a_ring_that_is_none_and_records_that_are_damaged_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ring").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="not a ring buffer"):
        Ring(tmp_path / "ring")
    ring = Ring.create(tmp_path / "other", 1000)
    ring.put(b"abcdef")
    ring._map[4096 + 8] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        ring.get()
    ring.put(b"abcdef")
    ring._map[4096 + 16 : 4096 + 20] = (900_000).to_bytes(4, "little")
    with pytest.raises(ValueError, match="longer than the ring"):
        ring.get()
    ring.close()


def spectrum(points: np.ndarray) -> float:
    centred = points - points.mean(0)
    values = np.linalg.svd(centred, compute_uv=False) ** 2
    return float(values[:2].sum() / values.sum())


def test_projections_show_most_of_the_variance_and_do_not_jump(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    points = generator.normal(size=(60, 12)) * np.linspace(3, 0.1, 12)
    job = PointsJob(tmp_path, "a/b", {"basis": "aligned"})
    arrays = []
    for step in range(6):
        arrays.append(points + 0.05 * generator.normal(size=points.shape))
        job.add(step, arrays[-1].astype(np.float32))
    found = read_projection(tmp_path, "a/b")
    assert [step for step, _, _ in found] == list(range(6))
    for array, (_, _, share) in zip(arrays, found, strict=True):
        assert share == pytest.approx(spectrum(array), rel=1e-4)
    for (_, before, _), (_, after, _) in itertools.pairwise(found):
        assert (
            np.abs(after - before).max() < 1.0
        )  # signs or axes that change places would move points by several
    fixed = PointsJob(tmp_path, "fixed", {"basis": "fixed"})
    fixed.add(0, points)
    fixed.add(1, points + 1)
    (_, first, _), (_, second, _) = read_projection(tmp_path, "fixed")
    assert np.ptp(second - first, axis=0) == pytest.approx([0, 0], abs=1e-5)
    fixed.add(2, np.array([[np.nan, np.inf]]))


@pytest.mark.slow
def test_a_run_projects_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(40, 6)
    truth = []
    with tl.monitor(model, tmp_path, every=2) as run:
        run.embed("0", rows=30)
        run.embed("9")
        with pytest.raises(ValueError, match="method must be 'pca'"):
            run.embed("0", "umap")  # type: ignore[arg-type]
        for _ in range(6):
            truth.append(model[0](x).detach().numpy().copy())
            model(x).square().mean().backward()
            optimizer.step()
    assert run.problems == [
        "Nothing was seen of '9': no module has this address, nor was it watched."
    ]
    counts = run.work_counts
    assert (counts.offered, counts.done, counts.dropped) == (
        3,
        3,
        0,
    )  # the first call of the module in a recorded step
    found = tl.open_run(tmp_path).projections["0"]
    assert [step for step, _, _ in found] == [0, 2, 4]
    for step, points, share in found:
        assert points.shape == (30, 2)
        assert share == pytest.approx(spectrum(truth[step][:30]), rel=1e-3)


@pytest.mark.slow
def test_killing_the_worker_changes_nothing_but_the_count_of_drops(tmp_path: Path) -> None:
    problems = Problems("the monitor")
    worker = Worker(tmp_path, problems, capacity=1 << 16)
    array = np.ones((10, 4), np.float32)
    assert worker.send("points", "a", 0, array, {})
    while worker.counts.done < 1:
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert worker._process is not None
    worker._process.wait()
    assert not worker.send("points", "a", 1, array, {})
    worker.finish()
    counts = worker.counts
    assert (counts.offered, counts.done, counts.dropped) == (2, 1, 1)
    assert "The worker process has ended" in problems[0]


@pytest.mark.slow
def test_a_worker_that_is_slow_or_fails_holds_nobody_up(tmp_path: Path) -> None:
    problems = Problems("the monitor")
    worker = Worker(tmp_path, problems, capacity=1 << 14)
    sent = [
        worker.send("points", "a", step, np.ones((50, 8), np.float32), {}) for step in range(200)
    ]  # before it has begun
    assert not all(sent)
    while worker.counts.done < sum(sent):
        time.sleep(0.01)
    sent.append(worker.send("nonsense", "b", 0, np.ones(1), {}))
    worker.finish()
    counts = worker.counts
    assert counts.done + counts.dropped == counts.offered == 201
    assert counts.done == sum(sent)
    assert problems == ["In the worker process: nonsense of 'b' failed (KeyError: 'nonsense')"]


@pytest.mark.slow
def test_the_worker_goes_with_its_parent_and_never_imports_torch(tmp_path: Path) -> None:
    code = f"""
import sys, time
import numpy as np
from pathlib import Path
from torchlens._monitor.record.worker import Worker
from torchlens._text.problems import Problems
worker = Worker(Path({str(tmp_path)!r}), Problems())
worker.send("points", "a", 0, np.ones((4, 4), np.float32), {{}})
while worker.counts.done < 1:
    time.sleep(0.01)
print(worker.pid, flush=True)
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
