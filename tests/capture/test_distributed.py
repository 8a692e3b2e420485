"""Logs of models that several processes run together: two of them, over gloo.

The cases stand in `distributed_cases.py`. One pair of processes runs them all, as starting it is
what takes time.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture import distributed_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
        reason="torch without gloo",
    ),
]
RANKS = range(distributed_cases.WORLD)
# Far more than it takes: a process that waits in vain for the other gives up by itself before.
LIMIT = 900


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[str, Any]]:
    """What came of each case in each process."""
    folder = tmp_path_factory.mktemp("distributed")
    items: list[Any] = request.session.items
    wanted = [item.callspec.params["name"] for item in items if item.module is request.module]
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    }
    processes = [
        subprocess.Popen(
            [sys.executable, distributed_cases.__file__, str(rank), str(folder), *wanted],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in RANKS
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = []
    for rank in RANKS:
        path = folder / f"results_{rank}.json"
        found.append(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
        found[rank].setdefault("said", said[rank])
    return found


@pytest.mark.parametrize("name", distributed_cases.CASES)
def test_on_both_ranks(results: list[dict[str, Any]], name: str) -> None:
    for rank in RANKS:
        outcome = results[rank].get(name, f"the process ended before it:\n{results[rank]['said']}")
        assert outcome == "passed", f"on rank {rank}: {outcome}"
