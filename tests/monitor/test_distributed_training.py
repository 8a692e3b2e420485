"""Two processes that train together: the same with and without a monitor, each writes its own
files, reading joins them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchlens as tl
from tests.monitor import distributed_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch without gloo",
    ),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("distributed")
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    }
    processes = [
        subprocess.Popen(
            [sys.executable, distributed_training.__file__, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(distributed_training.WORLD)
    ]
    try:
        said = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return folder, [json.loads((folder / f"results_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("how", distributed_training.HOW)
def test_processes_that_train_together_train_the_same(
    how: str, trained: tuple[Path, list[Any]]
) -> None:
    folder, results = trained
    for rank in (0, 1):
        plain, monitored = results[rank][how]
        assert plain == monitored
    r = tl.open_run(folder / how)
    assert r.ranks == [0, 1]
    assert r.problems == []
    assert r.is_finished
    assert r.steps == [0, 2, 4]
    assert r.ranks == [0, 1]
    prefix = "module." if how == "ddp" else ""
    outputs = r[f"{prefix}0"].outputs
    assert outputs.num_calls.tolist() == [2, 2, 2]  # one of each rank
    assert outputs.num_elements.tolist() == [2 * 8 * 16] * 3
    assert len(r[f"{prefix}0"].gradients.steps) == 3
    weight = r[f"{prefix}4"].parameters["weight"]
    # Under FSDP each rank has a part of the weight; under DDP each has all of it.
    assert weight.num_elements.tolist() == [48 if how.startswith("fsdp") else 96] * 3
    assert len(r[f"{prefix}4"].updates["weight"].steps) == 3
    assert len(r[f"{prefix}4"].parameter_gradients["weight"].steps) == 3
    assert r.counts.dropped == 0
