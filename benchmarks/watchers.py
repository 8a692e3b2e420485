"""The monitor, or one of its peers, on one training workload, in the environment it is run in;
prints one line of JSON.

    python -m benchmarks.watchers torchlens|PEER WORKLOAD [--every 10] [--seconds 20]

Watched and unwatched steps take turns, and each turn is compared with its neighbours: the median of
these ratios is told, and the range of the middle half of them. `ratio` is of the CPU time of the
training thread, `wall` of the clock meanwhile, `process` of the CPU time of all threads until
everything is written. Ours is paused for the unwatched steps; a peer watches a copy of the model.
Each peer records what it can of what the monitor records: torchexplorer all but updates,
wandb.watch parameters and their gradients alone, TensorBoard everything, by hooks such as a user
writes.
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
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.workloads import TRAINING_WORKLOADS

__all__ = ["WATCHERS", "measure"]

# Of steps that are all recorded, so many are one turn: a neighbour is soon there, and the writer
# falls behind as it would.
_STEPS_IN_TURN = 4


def _nothing(*_: Any) -> None:
    pass


class Watch(NamedTuple):
    """What is called before and after each step of the watched model, with the number of the step,
    and around a turn.
    """

    begin: Callable[[int], None] = _nothing
    end: Callable[[int], None] = _nothing
    resume: Callable[[], None] = _nothing
    pause: Callable[[], None] = _nothing
    wait: Callable[[], None] = _nothing  # until all is written
    has_copy: bool = True


def with_torchlens(model: nn.Module, every: int, folder: str) -> Watch:
    """All six kinds of series."""
    import torchlens

    run = torchlens.monitor(model, folder, every=every)

    def wait() -> None:
        while run.counts.pending:
            time.sleep(0.0005)

    return Watch(resume=run.resume, pause=run.pause, wait=wait, has_copy=False)


def with_torchexplorer(model: nn.Module, every: int, folder: str) -> Watch:
    """Inputs, outputs, parameters and the gradients of both, with its default of 1,000 sampled
    elements.
    """
    import torchexplorer
    import wandb

    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    blocks = list(
        {type(module) for module in model.modules() if type(module).__name__ == "Block"}
    )  # adds in place
    torchexplorer.watch(
        model, log_freq=every, disable_inplace=True, ignore_io_grad_classes=blocks, backend="wandb"
    )
    return Watch(end=lambda step: run.log({"step": step}))


def with_wandb(model: nn.Module, every: int, folder: str) -> Watch:
    """Parameters and their gradients."""
    import wandb

    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    run.watch(model, log="all", log_freq=every)
    return Watch(end=lambda step: run.log({"step": step}))


def with_tensorboard(model: nn.Module, every: int, folder: str) -> Watch:
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
        module.register_forward_hook(
            lambda module, args, result, name=name: hook(module, args, result, name)
        )

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

    return Watch(begin, end)


WATCHERS: dict[str, Callable[[nn.Module, int, str], Watch]] = {
    "torchlens": with_torchlens,
    "torchexplorer": with_torchexplorer,
    "wandb": with_wandb,
    "tensorboard": with_tensorboard,
}


def measure(watcher: str, workload: str, every: int, seconds: float) -> dict[str, Any]:
    """A watched step against the same step unwatched."""
    model, images, targets = TRAINING_WORKLOADS[workload]()
    other = copy.deepcopy(model)
    length = _STEPS_IN_TURN if every == 1 else every
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        watch = WATCHERS[watcher](other, every, folder)
        watched = _Training(other, images, targets, watch)
        plain = _Training(model, images, targets, Watch()) if watch.has_copy else watched
        watched.turn(length)  # the first recorded step makes the graph
        plain.turn(length)
        turns: dict[str, list[_Times]] = {"plain": [], "watched": []}
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop or len(turns["plain"]) < 4:
            watch.pause()
            plain.settle(every)
            turns["plain"].append(plain.turn(length))
            watch.resume()
            watched.settle(every)
            turns["watched"].append(watched.turn(length))
    found: dict[str, Any] = {"runs": len(turns["plain"])}
    for place, name in enumerate(("ratio", "wall", "process")):
        before, own = (
            [times[place] for times in turns["plain"]],
            [times[place] for times in turns["watched"]],
        )
        ratios = [
            each * 2 / (one + two) for each, one, two in zip(own, before, before[1:], strict=False)
        ]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found |= {
            name: middle,
            f"{name}_half": [low, high],
            f"{name}_ms": [1e3 * statistics.median(before)],
        }
        found[f"{name}_ms"].append(1e3 * statistics.median(own))
    return found


# Seconds of one step: CPU of the thread, clock, CPU of the process until all was written.
_Times = tuple[float, float, float]


class _Training:
    def __init__(self, model: nn.Module, images: Any, targets: Any, watch: Watch) -> None:
        self.model, self.images, self.targets, self.watch = model, images, targets, watch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = 0

    def settle(self, every: int) -> None:
        """Takes steps that do not count: at least one, and until the next is one that is
        recorded.
        """
        self.one()
        while self.step % every:
            self.one()
        self.watch.wait()

    def turn(self, count: int) -> _Times:
        """Takes some steps."""
        own, clock, process = time.thread_time(), time.perf_counter(), time.process_time()
        for _ in range(count):
            self.one()
        own, clock = time.thread_time() - own, time.perf_counter() - clock
        self.watch.wait()
        return own / count, clock / count, (time.process_time() - process) / count

    def one(self) -> None:
        """Takes one."""
        self.optimizer.zero_grad()
        self.watch.begin(self.step)
        nn.functional.cross_entropy(self.model(self.images), self.targets).backward()
        self.optimizer.step()
        self.watch.end(self.step)
        self.step += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("watcher", choices=list(WATCHERS))
    parser.add_argument("workload", choices=list(TRAINING_WORKLOADS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # what other threads do is not seen by the clock of this one
    warnings.simplefilter("ignore")
    os.environ.setdefault("WANDB_SILENT", "true")
    print(
        json.dumps(measure(options.watcher, options.workload, options.every, options.seconds)),
        flush=True,
    )
    os._exit(0)  # an offline run of wandb has nothing to wait for


if __name__ == "__main__":
    main()
