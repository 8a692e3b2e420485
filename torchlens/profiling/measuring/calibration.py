"""What looking takes that no clock of ours sees: torch finding out that somebody looks, calling us, and coming back.

That is a microsecond or two each time, and much to an operation that takes as little. So it is measured, on small models of
our own: how much longer a thing takes when it is looked at, without what the clocks have seen of that (see OwnTime). Each
is done many times in a row, as in a model that does much of it, and the shortest counts: others use the machine as well.
"""

from collections.abc import Callable
from functools import cache
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlens.capture.backward import BackwardWatch
from torchlens.capture.current import CURRENT
from torchlens.capture.own_time import OwnTime
from torchlens.profiling.health.checker import make_checker
from torchlens.profiling.measuring.allocators import AllocatorWatch
from torchlens.profiling.measuring.watcher import Watcher
from torchlens.profiling.options import ProfileOptions
from torchlens.profiling.problems import Problems

__all__ = ["NOTHING", "Residuals", "measure_residuals"]

_ROUNDS = 12
_TURNS = 2
_REPEATS = 12

Tensor = torch.Tensor
Work = Callable[[Tensor], Any]


class Residuals(NamedTuple):
    """Seconds that the clocks do not see, for each thing that is looked at."""

    operation: float = 0.0
    # An operation that takes longer has more arguments to be looked through, and more to fetch anew that our work drove
    # out of the processor's caches: so much for each second of an operation, of its first few microseconds.
    short_operation_share: float = 0.0
    read: float = 0.0  # of `x.shape` and its like
    module: float = 0.0  # in the time of the module itself
    module_around: float = 0.0  # in that of the one that calls it
    event: float = 0.0  # of an allocator
    logged_event: float = 0.0  # the same in a step that is logged
    node: float = 0.0  # of autograd's graph


NOTHING = Residuals()


def measure_residuals(check: str | None) -> Residuals:
    """How long it takes now. The most of it is found out once; NOTHING where it cannot be.

    Not inside a log or a mode of somebody's, which would see our small models, and be part of what they take.
    """
    if CURRENT.tracker is not None or CURRENT.watcher is not None or _has_modes() or torch.compiler.is_compiling():
        return NOTHING
    found, then = _measure(check)
    slowness = _speed() / then  # of the machine at the moment
    return Residuals(*(seconds * slowness for seconds in found))._replace(short_operation_share=found.short_operation_share)


def _has_modes() -> bool:
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@cache
@torch.no_grad()
def _measure(check: str | None) -> tuple[Residuals, float]:
    logged = _Logged()
    _watch(logged, check)
    called = _Called()
    _watch(called, None)
    return Residuals(*logged.found(), *called.found(), *_of_events(), logged.event(), _of_nodes()), _speed()


def _watch(model: "_Logged | _Called", check: str | None) -> None:
    """Has a profile look at one of our models, at operation level."""
    options = ProfileOptions(level="operation", check=check, memory=False)
    watcher = Watcher(model, options, None if check is None else make_checker(check), Problems())
    model.own_time = watcher.ledger.own_time
    try:
        watcher.start()
        model(_input())
    finally:
        watcher.stop()


def _input() -> Tensor:
    return torch.ones(8, dtype=torch.float32, device="cpu")


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    start = perf_counter()
    function(*args)
    return perf_counter() - start


@torch.no_grad()
def _speed() -> float:
    x = _input()
    return min(_seconds(_sums, x) for _ in range(_ROUNDS))


# -- work to do --------------------------------------------------------------------------------------------------------


def _views(x: Tensor) -> None:
    """Operations that do next to nothing."""
    for _ in range(_REPEATS):
        x = x.view(2, 4).view(8)


def _sums(x: Tensor) -> None:
    """Operations that do little, and allocate."""
    for _ in range(_REPEATS):
        x = x * 1.01
        x = x - x.mean(0, keepdim=True)


def _reads(x: Tensor) -> None:
    for _ in range(_REPEATS):
        _ = x.shape, x.dim(), x.dtype, x.size(0)


class _Shortest:
    """The shortest of several times that some work took, without what looking took of it."""

    def __init__(self) -> None:
        self.seconds = float("inf")
        self.number = 1  # of things that were looked at
        self.short_seconds = 0.0

    def measure(self, work: Work, x: Tensor, own: OwnTime) -> None:
        """Does the work a few times."""
        for _ in range(_ROUNDS):
            own.seconds, own.short_seconds, own.num_operations, own.num_reads = 0.0, 0.0, 0, 0
            seconds = _seconds(work, x) - own.seconds
            if seconds < self.seconds:
                self.seconds, self.short_seconds = seconds, own.short_seconds
                self.number = max(own.num_operations + own.num_reads, 1)

    def excess_over(self, other: "_Shortest") -> float:
        """How much longer it took than something else, for each thing that was looked at."""
        return max(self.seconds - other.seconds, 0.0) / self.number


class _Logged(nn.Module):
    """Does its work with and without being looked at, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.own_time = OwnTime()
        self._plain = {work: _Shortest() for work in (_views, _sums, _reads)}
        self._seen = {work: _Shortest() for work in self._plain}
        self._listening = _Shortest()
        self._num_events = 1

    def forward(self, x: Tensor) -> Tensor:
        memory, own = AllocatorWatch(time_ns), self.own_time
        for _ in range(_TURNS):
            for work in self._plain:
                with torch._C.DisableTorchFunction():
                    self._plain[work].measure(work, x, own)
                self._seen[work].measure(work, x, own)
            try:
                memory.start()
                self._listening.measure(_sums, x, own)
            finally:
                self._num_events = max(memory.stop().num_events // _ROUNDS, 1)
        return x

    def found(self) -> tuple[float, float, float]:
        """Of an operation, by the number of them and by what they take; and of a read."""
        views, sums, reads = (self._seen[work].excess_over(self._plain[work]) for work in (_views, _sums, _reads))
        light, heavy = (self._seen[work].short_seconds / self._seen[work].number for work in (_views, _sums))
        share = max(sums - views, 0.0) / max(heavy - light, 1e-7)
        return max(views - share * light, 0.0), share, reads

    def event(self) -> float:
        """Of an allocation."""
        return max(self._listening.seconds - self._seen[_sums].seconds, 0.0) / self._num_events


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _Called(nn.Module):
    """Calls modules with and without being looked at, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.own_time = OwnTime()
        self.parts = nn.ModuleList([_Nothing() for _ in range(_REPEATS)])
        self._plain, self._seen = _Shortest(), _Shortest()

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.parts)

        def call_all(x: Tensor) -> None:
            for part in parts:
                x = part(x)

        for _ in range(_TURNS):
            watcher, tracker = CURRENT.watcher, CURRENT.tracker
            CURRENT.watcher = CURRENT.tracker = None
            try:
                self._plain.measure(call_all, x, self.own_time)
            finally:
                CURRENT.watcher, CURRENT.tracker = watcher, tracker
            self._seen.measure(call_all, x, self.own_time)
        return x

    def found(self) -> tuple[float, float]:
        """In the time of a module itself, and around it: about the same."""
        each = max(self._seen.seconds - self._plain.seconds, 0.0) / len(self.parts)
        return each / 2, each / 2


# -- what is looked at without a log -----------------------------------------------------------------------------------


def _of_events() -> tuple[float]:
    x, watch, own = _input(), AllocatorWatch(time_ns), OwnTime()
    plain, listening, num_events = _Shortest(), _Shortest(), 1
    for _ in range(_TURNS):
        plain.measure(_sums, x, own)
        try:
            if not watch.start():
                return (0.0,)
            listening.measure(_sums, x, own)
        finally:
            num_events = max(watch.stop().num_events // _ROUNDS, 1)
    return (max(listening.seconds - plain.seconds, 0.0) / num_events,)


@torch.enable_grad()
def _of_nodes() -> float:
    plain = watched = float("inf")
    number = 1
    for _ in range(_ROUNDS):
        plain = min(plain, _seconds(_chain().backward))
        own_time = OwnTime()
        watch = BackwardWatch(own_time=own_time)
        result = _chain()
        watch.watch([result])
        watched = min(watched, _seconds(result.backward) - own_time.seconds)
        watch.stop()
        number = max(own_time.num_nodes, 1)
    return max(watched - plain, 0.0) / number


def _chain() -> Tensor:
    x = _input().requires_grad_()
    for _ in range(2 * _REPEATS):
        x = x * 1.01
    return x.sum()
