"""What each of two processes does in `test_distributed_training.py`: trains with and without a
monitor, and says what came.

Run as `python distributed_training.py RANK FOLDER`.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchlens as tl

WORLD = 2
HOW = ("ddp", "ddp inside", "fsdp", "fsdp late")


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def train(how: str, rank: int, folder: Path | None) -> dict[str, Any]:
    torch.manual_seed(0)
    inner = network()
    model: Any = inner
    run: Any = None
    if (
        how == "fsdp late" and folder is not None
    ):  # the parameters are replaced after the monitor has seen them
        run = tl.monitor(model, folder, every=2)
    if how.startswith("ddp"):
        model = DistributedDataParallel(inner)
    else:
        for layer in (inner[0], inner[4]):
            fully_shard(layer)
        fully_shard(inner)
    if run is None and folder is not None:
        run = tl.monitor(inner if how == "ddp inside" else model, folder, every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(8, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if run is not None:
        run.finish()
        assert run.problems == [], run.problems
    weights = [
        getattr(value, "_local_tensor", value).double().flatten().tolist()
        for value in model.state_dict().values()
    ]
    return {"losses": losses, "weights": weights, "generator": torch.get_rng_state().sum().item()}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    results = {}
    store = FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for how in HOW:
        results[how] = [train(how, rank, None), train(how, rank, folder / how)]
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"results_{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
