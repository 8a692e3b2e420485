"""Extracts with two Ray actors, of which one is killed, and compares with one process.

pip install 'ray[data]' && python -m benchmarks.extraction_ray
"""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import torchlens as tl
from tests.extract import worker

LAYERS = ["1", "4"]


class KilledOnce(tl.features.Extractor):
    """Kills its process at one of its batches, the first time."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        mark = self.path.with_name("killed")
        if 40 in batch["id"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def main() -> int:
    root = Path(tempfile.mkdtemp())
    environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    data = worker.make_data().numpy()
    rows = [{"id": number, "image": data[number]} for number in range(worker.NUM)]
    ledger = (
        ray.data.from_items(rows, override_num_blocks=12)
        .map_batches(
            KilledOnce,
            batch_size=worker.SHARD,
            compute=ray.data.ActorPoolStrategy(size=2),
            fn_constructor_args=(worker.make_model, LAYERS, root / "ray"),
            fn_constructor_kwargs={"num_threads": 1},
        )
        .take_all()
    )
    assert (root / "killed").exists()
    assert sorted(row["id"] for row in ledger) == list(range(worker.NUM))
    torch.set_num_threads(1)
    extractor = tl.features.Extractor(worker.make_model, LAYERS, root / "one")
    for start in range(0, worker.NUM, worker.SHARD):
        part = slice(start, start + worker.SHARD)
        extractor({"id": list(range(worker.NUM))[part], "image": data[part]})
    by_ray, by_one = tl.open_features(root / "ray"), tl.open_features(root / "one")
    assert by_ray.ids == by_one.ids == list(range(worker.NUM))
    assert all(np.array_equal(by_ray[name][:], by_one[name][:]) for name in LAYERS)
    print(f"{by_ray!r}\none actor was killed; all rows are bit-equal to those of one process")
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
