"""The cost of writing one step of 100 modules with 4 series each: python -m benchmarks.run_writer
[--steps 60]

CPU time of the writer's thread, in its parts: statistics of the samples, health, file. For
comparison, numpy's sort of as many samples, which the quantiles need, and copying the samples into
one array, which nothing can do without.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import torchlens
from torchlens._monitor.record import writer as writer_module
from torchlens._monitor.record.run_health import RunHealth
from torchlens._monitor.record.samples import SAMPLE_SIZE
from torchlens._monitor.store.rank_files import RankFiles

__all__ = ["measure"]

_KINDS = ("outputs", "gradients", "parameters", "parameter_gradients")


def measure(num_steps: int) -> dict[str, float]:
    """Median milliseconds of a step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(100)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)
    times: dict[str, list[float]] = {}

    def timed(name: str, own: Callable[..., Any], *args: Any, **more: Any) -> Any:
        start = time.thread_time()
        try:
            return own(*args, **more)
        finally:
            times.setdefault(name, []).append(time.thread_time() - start)

    parts = {
        "statistics": (writer_module, "summarized"),
        "health": (RunHealth, "after_step"),
        "file": (RankFiles, "write"),
    }
    originals = {name: getattr(owner, attribute) for name, (owner, attribute) in parts.items()}
    writer_module.summarized = partial(timed, "statistics", writer_module.summarized)
    RunHealth.after_step = lambda *args: timed("health", originals["health"], *args)  # type: ignore[method-assign]
    RankFiles.write = lambda *args: timed("file", originals["file"], *args)  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            names = [str(number) for number in range(100)]
            run = torchlens.monitor(model, folder, log=_KINDS, graph="modules", modules=names)
            run._writer._take = partial(timed, "step", run._writer._take)  # type: ignore[method-assign]
            for _ in range(num_steps):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                while run.counts.pending:
                    time.sleep(0.0005)
            run.finish()
    finally:
        for name, (owner, attribute) in parts.items():
            setattr(owner, attribute, originals[name])
    samples = [
        np.random.default_rng(row).standard_normal(SAMPLE_SIZE).astype(np.float32)
        for row in range(400)
    ]
    for _ in range(num_steps):
        together = timed("reading alone", np.concatenate, samples).reshape(400, -1)
        timed("sorting alone", together.sort, axis=1)
    return {name: round(1e3 * statistics.median(own[5:]), 3) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    print(json.dumps(measure(parser.parse_args().steps)))


if __name__ == "__main__":
    main()
