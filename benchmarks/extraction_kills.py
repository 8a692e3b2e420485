"""Kills extractions at random moments, finishes them, and compares the files with an undisturbed
run's.

    python -m benchmarks.extraction_kills [--kills 60]

Each run is a fork of this process, which has imported everything and computed nothing.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.extract import worker


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def started(folder: Path, rank: int = 0, world: int = 1) -> int:
    """The id of a process that extracts into a folder."""
    child = os.fork()
    if child:
        return child
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
    try:
        worker.extract(str(folder))
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=60)
    kills = parser.parse_args().kills
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp())
    start = time.perf_counter()
    assert ended(started(root / "whole")) == 0
    seconds = time.perf_counter() - start
    whole = files(root / "whole")
    moments, num_shards = random.Random(0), []
    for number in range(kills):
        folder = root / str(number)
        process = started(folder)
        time.sleep(moments.uniform(0, seconds))
        os.kill(process, signal.SIGKILL)
        ended(process)
        num_shards.append(len(list(folder.glob("shards/*.json"))))
        world = moments.choice([1, 2, 4])
        others = [started(folder, rank, world) for rank in range(world)]
        assert [ended(other) for other in others] == [0] * world
        assert files(folder) == whole, f"kill {number}: other files"
        shutil.rmtree(folder)
    shutil.rmtree(root)
    print(f"{kills} kills; shards that were done then: {sorted(num_shards)}; all files identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
