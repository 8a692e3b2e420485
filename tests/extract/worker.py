"""Extracts a data set in a process of its own, for tests that kill it or run several.

python tests/extract/worker.py FOLDER [EXTRACTOR-PART PARTS]
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import torchlens as tl

NUM, BATCH, SHARD = 96, 4, 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(216, 9),
    )


def make_data() -> torch.Tensor:
    return torch.randn(NUM, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def extract(folder: str) -> tl.features.Features:
    return tl.extract(
        make_model(), make_data(), ["1", "relu_1", "4"], folder, batch_size=BATCH, shard_size=SHARD
    )


def main() -> None:
    torch.set_num_threads(1)
    print(f"started {os.environ.get('RANK', '')}", flush=True)
    if len(sys.argv) == 2:
        extract(sys.argv[1])
        return
    part, parts = map(int, sys.argv[2:])
    extractor = tl.features.Extractor(make_model, ["1", "4"], sys.argv[1])
    data = make_data()
    for start in range(part * SHARD, NUM, parts * SHARD):
        rows = range(start, start + SHARD)
        extractor({"id": list(rows), "image": data[start : start + SHARD].numpy()})


if __name__ == "__main__":
    main()
