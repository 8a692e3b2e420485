"""The peers of the monitor on one training workload, in the environment it is run in; prints one line of JSON.

    python -m benchmarks.watchers PEER WORKLOAD [--every 10] [--seconds 20]

Two copies of a model are trained in turn, one of them watched: the ratio is that of the CPU time of the training thread.
Each peer records what it can of what the monitor records: torchexplorer all but updates, wandb.watch parameters and their
gradients alone, TensorBoard everything, by hooks such as a user writes.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import TRAINING_WORKLOADS

__all__ = ["PEERS", "measure"]

# What is called before and after each step of the watched model, with the number of the step.
Around = tuple[Callable[[int], None], Callable[[int], None]]
_STEPS_IN_TURN = 10


def _nothing(_: int) -> None:
    pass


def with_torchexplorer(model: nn.Module, every: int, folder: str) -> Around:
    """Inputs, outputs, parameters and the gradients of both, with its default of 1,000 sampled elements."""
    import torchexplorer
    import wandb

    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    blocks = list({type(module) for module in model.modules() if type(module).__name__ == "Block"})  # adds in place
    torchexplorer.watch(model, log_freq=every, disable_inplace=True, ignore_io_grad_classes=blocks, backend="wandb")
    return _nothing, lambda step: run.log({"step": step})


def with_wandb(model: nn.Module, every: int, folder: str) -> Around:
    """Parameters and their gradients."""
    import wandb

    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    run.watch(model, log="all", log_freq=every)
    return _nothing, lambda step: run.log({"step": step})


def with_tensorboard(model: nn.Module, every: int, folder: str) -> Around:
    """Inputs, outputs, their gradients, parameters, their gradients and updates."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)
    now = -1  # the step that is recorded, if one is
    before: dict[str, torch.Tensor] = {}

    def see(name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            writer.add_histogram(name, tensor.detach(), now)

    def hook(module: nn.Module, args: tuple[Any, ...], result: Any, name: str) -> None:
        if now < 0:
            return
        for place, each in enumerate(args):
            see(f"{name}/input{place}", each)
        see(f"{name}/output", result)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(lambda gradient: see(f"{name}/gradient", gradient))

    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, result, name=name: hook(module, args, result, name))

    def begin(step: int) -> None:
        nonlocal now
        now = step if step % every == 0 else -1
        if now >= 0:
            before.update({name: own.detach().clone() for name, own in model.named_parameters()})

    def end(step: int) -> None:
        if now < 0:
            return
        for name, own in model.named_parameters():
            see(f"{name}/parameter", before[name])
            see(f"{name}/parameter_gradient", own.grad)
            see(f"{name}/update", own.detach() - before[name])

    return begin, end


PEERS: dict[str, Callable[[nn.Module, int, str], Around]] = {
    "torchexplorer": with_torchexplorer,
    "wandb": with_wandb,
    "tensorboard": with_tensorboard,
}


def measure(peer: str, workload: str, every: int, seconds: float) -> dict[str, float]:
    """CPU time of the training thread, a watched step against the same step of a copy that nobody watches."""
    model, images, targets = TRAINING_WORKLOADS[workload]()
    other = copy.deepcopy(model)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        begin, end = PEERS[peer](other, every, folder)
        plain, watched = _Training(model, images, targets), _Training(other, images, targets, begin, end)
        plain.steps()
        watched.steps()
        times: dict[str, list[float]] = {"plain": [], "logged": []}
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or len(times["plain"]) < 3:
            times["plain"].append(plain.steps())
            times["logged"].append(watched.steps())
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "ratio": medians["logged"] / medians["plain"], "runs": len(times["plain"])}


class _Training:
    def __init__(self, model: nn.Module, images: Any, targets: Any, begin: Any = _nothing, end: Any = _nothing) -> None:
        self.model, self.images, self.targets, self.begin, self.end = model, images, targets, begin, end
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = 0

    def steps(self) -> float:
        """Takes some; CPU seconds of one."""
        start = time.thread_time()
        for _ in range(_STEPS_IN_TURN):
            self.optimizer.zero_grad()
            self.begin(self.step)
            nn.functional.cross_entropy(self.model(self.images), self.targets).backward()
            self.optimizer.step()
            self.end(self.step)
            self.step += 1
        return (time.thread_time() - start) / _STEPS_IN_TURN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("workload", choices=list(TRAINING_WORKLOADS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # what other threads do is not seen by the clock of this one
    warnings.simplefilter("ignore")
    os.environ.setdefault("WANDB_SILENT", "true")
    print(json.dumps(measure(options.peer, options.workload, options.every, options.seconds)), flush=True)
    os._exit(0)  # an offline run of wandb has nothing to wait for


if __name__ == "__main__":
    main()
