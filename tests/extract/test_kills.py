"""A run that is killed resumes, and its files are those of an undisturbed run, by any number of
processes.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import torchlens as tl
from tests.extract import worker

WORKER = Path(worker.__file__)
ROOT = WORKER.parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def start(folder: Path, rank: int = 0, world: int = 1, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(folder), *arguments],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("undisturbed")
    worker.extract(str(folder))
    return files(folder)


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate()
    return process.returncode


def kill_and_finish(folder: Path, seconds: float, world: int) -> None:
    """Kills a run after some time, then finishes it with `world` processes."""
    process = start(folder)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    others = [start(folder, rank, world) for rank in range(world)]
    assert [ended(other) for other in others] == [0] * world


def check(folder: Path, undisturbed: dict[str, bytes]) -> None:
    assert files(folder) == undisturbed
    features = tl.open_features(folder)
    assert features.ids == list(range(worker.NUM))
    assert features.is_complete


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_is_finished_bit_for_bit_by_one_process_or_two(
    world: int, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    kill_and_finish(tmp_path, 0.03 * world, world)
    check(tmp_path, undisturbed)


@pytest.mark.soak
def test_kills_at_sixty_random_moments() -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.extraction_kills"], check=True, cwd=ROOT)


@pytest.mark.slow
def test_torchrun_divides_the_shards_among_its_processes(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(WORKER), str(tmp_path)],
        check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    check(tmp_path, undisturbed)


@pytest.mark.slow
def test_extractors_in_several_processes_share_a_folder_also_if_one_is_killed(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    killed, other = start(tmp_path, 0, 1, "0", "2"), start(tmp_path, 0, 1, "1", "2")
    time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    ended(killed)
    again = start(tmp_path, 0, 1, "0", "2")
    assert (ended(other), ended(again)) == (0, 0)
    features = tl.open_features(tmp_path)
    assert features.ids == list(range(worker.NUM))
    worker.extract(str(tmp_path / "whole"))
    whole = tl.open_features(tmp_path / "whole")
    for name in ("1", "4"):
        assert np.allclose(features[name][:], whole[name][:], atol=1e-5)


def test_an_extractor_returns_a_ledger_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    extractor = tl.features.Extractor(worker.make_model, ["1", "4"], tmp_path, id_name="name")
    batch = {"name": np.array(["b", "a"]), "image": worker.make_data()[:2].numpy()}
    ledger = extractor(batch)
    assert ledger["id"].tolist() == ["b", "a"]
    assert ledger["row"].tolist() == [0, 1]
    before = files(tmp_path)
    extractor(batch)
    assert files(tmp_path) == before
    features = tl.open_features(tmp_path)
    assert features.ids == ["b", "a"]
    assert torch.is_grad_enabled()
    images = worker.make_data()[:2].flip(0)
    receipt = features.verify(2, model=worker.make_model(), data=images, ids=["a", "b"])
    assert (receipt.num_identical, receipt.ids) == (4, ["b", "a"])
    with pytest.raises(ValueError, match=r"no input 'b'\. Give ids="):
        features.verify(2, model=worker.make_model(), data=images)
    with pytest.raises(KeyError, match="must have the item 'name'"):
        extractor({"image": batch["image"]})
    other = tl.features.Extractor(worker.make_model, ["4"], tmp_path, id_name="name")
    with pytest.raises(tl.FeaturesError, match="Different is layers"):
        other({"name": ["c", "d"], "image": batch["image"]})
