"""Forecasts an extraction of ResNet-18 from its first batch, runs it, and prints both.

python -m benchmarks.extraction_forecast [--images 512]
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import torchlens as tl
from benchmarks.workloads import WORKLOADS

LAYERS = ["stem", "layer1", "layer2", "layer3", "layer4", "avgpool"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    count = parser.parse_args().images
    model, _ = WORKLOADS["ResNet-18 224"]()
    images = torch.rand(count, 3, 224, 224)
    options = {"dtype": "float16", "shard_size": 128}
    start = time.process_time()
    ahead = tl.features.forecast(model, images[:32], LAYERS, num_inputs=count, **options)
    print(ahead)
    first = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        clock, start = time.perf_counter(), time.process_time()
        features = tl.extract(model, images, LAYERS, Path(folder) / "f", **options)
        seconds, processor = time.perf_counter() - clock, time.process_time() - start
        print(
            f"forecast {ahead.num_bytes:,} bytes, {ahead.num_shards} shards, {ahead.seconds:.1f} s"
        )
        print(f"measured {features.nbytes:,} bytes, {features.num_shards} shards, {seconds:.1f} s")
        print(f"processor time {processor:.1f} s, of the forecast {first:.1f} s")


if __name__ == "__main__":
    main()
