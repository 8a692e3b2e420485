"""What looking takes that no clock of ours sees: torch finding out that somebody looks, calling us, and coming back.

That is a microsecond or two each time, and much to an operation that takes as little. So it is measured, on small models of
our own: how much longer a thing takes when it is looked at, without what the clocks have seen of that (see OwnTime). Each
is done several times in a row, as in a model that does much of it, with and without in turns, and the shortest counts:
others use the machine as well.
"""

import itertools
from collections.abc import Callable
from functools import cache
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchlens.capture.backward import BackwardWatch, NodeInfo
from torchlens.capture.current import CURRENT
from torchlens.capture.own_time import SHORT, OwnTime
from torchlens.nonfinite import has_nonfinite
from torchlens.profiling.health.checker import make_checker
from torchlens.profiling.measuring.allocators import AllocatorWatch
from torchlens.profiling.measuring.watcher import Watcher
from torchlens.profiling.options import ProfileOptions
from torchlens.profiling.problems import Problems

__all__ = ["NOTHING", "NO_RESIDUALS", "Residuals", "measure_residuals"]

_ROUNDS = 8
_TURNS = 4
_REPEATS = 6

Tensor = torch.Tensor
Work = Callable[[Tensor], Any]


class Residuals(NamedTuple):
    """Seconds that the clocks do not see, for each thing that is looked at."""

    operation: float = 0.0
    # An operation that takes longer has more arguments to be looked through, and more to fetch anew that our work drove
    # out of the processor's caches: so much for each second of an operation, of its first few microseconds.
    short_operation_share: float = 0.0
    # How much of that is in what the operation itself is seen to take; the rest comes before and after.
    cold_share: float = 0.0
    cold_operation: float = 0.0  # of an operation that has not run for a while, beside that (see OwnTime)
    read: float = 0.0  # of `x.shape` and its like
    module: float = 0.0  # in the time of the module itself
    module_around: float = 0.0  # in that of the one that calls it
    event: float = 0.0  # of an allocator
    logged_event: float = 0.0  # the same in a step that is logged
    node: float = 0.0  # of autograd's graph
    short_node_share: float = 0.0  # as of operations


NOTHING = Residuals()
NO_RESIDUALS = {False: NOTHING, True: NOTHING}


def measure_residuals(check: str | None, has_grad: bool) -> Residuals:
    """How long it takes, with or without gradients. That is found out once; NOTHING where it cannot be.

    Not inside a log or a mode of somebody's, which would see our small models, and be part of what they take.
    """
    if CURRENT.tracker is not None or CURRENT.watcher is not None or _has_modes() or torch.compiler.is_compiling():
        return NOTHING
    return _measure(check, has_grad)


def _has_modes() -> bool:
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@cache
def _measure(check: str | None, has_grad: bool) -> Residuals:
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        logged, called = _Logged(), _Called()
        _watch(logged, check)
        _watch(called, None)
        nodes = _of_nodes(check) if has_grad else (0.0, 0.0)
        return Residuals(*logged.found(), *called.found(), _of_events(), logged.event(), *nodes)


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
    return torch.ones(8, dtype=torch.float32, device="cpu", requires_grad=torch.is_grad_enabled())


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    start = perf_counter()
    function(*args)
    return perf_counter() - start


def _share(part: float, whole: float) -> float:
    return min(max(part, 0.0) / max(whole, 1e-7), 1.0)


# -- work to do --------------------------------------------------------------------------------------------------------


def _views(x: Tensor) -> Tensor:
    """Operations that do next to nothing."""
    for _ in range(_REPEATS):
        x = x.view(2, 4).view(8)
    return x


def _sums(x: Tensor) -> Tensor:
    """Operations that do little, and allocate."""
    for _ in range(_REPEATS):
        x = x * 1.01
        x = x - x.mean(0, keepdim=True)
    return x


class _Layers:
    """What a small transformer does: many operations, none of them twice in a row, on more memory than the caches hold."""

    _WIDTH, _LENGTH, _NUM_LAYERS = 128, 8, 4

    def __init__(self) -> None:
        width = self._WIDTH
        shapes = ((3 * width, width), (width, width), (2 * width, width), (2 * width, width), (width, 2 * width))
        self._weights = itertools.cycle(
            [torch.full(shape, 1 / width, dtype=torch.float32, device="cpu") for shape in shapes]
            for _ in range(self._NUM_LAYERS)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """One layer; the next in turn, so that each finds its weights as cold as in a model."""
        x = x.repeat(self._LENGTH * self._WIDTH // 8).view(1, self._LENGTH, self._WIDTH)
        return self._layer(x, *next(self._weights))

    def _layer(self, x: Tensor, all_three: Tensor, last: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        heads = (1, self._LENGTH, 4, self._WIDTH // 4)
        half = heads[-1] // 2
        h = x.to(torch.float64).to(torch.float32)
        h = last[0] * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        q, k, v = (part.view(heads).transpose(1, 2) for part in F.linear(h, all_three).chunk(3, dim=-1))
        q = q * 0.5 + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * 0.5
        scores = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1)
        x = x + F.linear(torch.matmul(scores, v).transpose(1, 2).contiguous().reshape(x.shape), last)
        h = F.layer_norm(x, (self._WIDTH,))
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def _reads(x: Tensor) -> None:
    for _ in range(_REPEATS):
        _ = x.shape, x.dim(), x.dtype, x.size(0)


class _Excess:
    """How much longer some work takes than it would if nobody looked, without what the clocks have seen of that."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._plain = self._seen = float("inf")
        self._plain_now = 0.0  # in this turn
        self._by_turn: list[float] = []
        self.number = 1  # of things that are looked at
        self._short_seconds = self._coldness = 0.0

    def run_plain(self, x: Tensor) -> None:
        """Does the work a few times while nobody looks."""
        self._plain_now = min(_seconds(self._work, x) for _ in range(_ROUNDS))
        self._plain = min(self._plain, self._plain_now)

    def run_seen(self, x: Tensor, own: OwnTime) -> None:
        """Does the work a few times while somebody does."""
        seen_now = float("inf")
        for _ in range(_ROUNDS):
            own.seconds, own.short_seconds, own.coldness = 0.0, 0.0, 0.0
            number = own.num_operations + own.num_reads
            seconds = _seconds(self._work, x) - own.seconds
            seen_now = min(seen_now, seconds)
            if seconds < self._seen:
                self._seen, self._short_seconds, self._coldness = seconds, own.short_seconds, own.coldness
                self.number = max(own.num_operations + own.num_reads - number, 1)
        self._by_turn.append(max(seen_now - self._plain_now, 0.0))

    @property
    def total(self) -> float:
        return max(self._seen - self._plain, 0.0)

    @property
    def each(self) -> float:
        """For each thing that is looked at."""
        return self.total / self.number

    @property
    def each_in_a_turn(self) -> float:
        """The same by the middle of the turns, the lower of two: of longer work, the shortest runs may lie far apart."""
        return sorted(self._by_turn)[(len(self._by_turn) - 1) // 2] / self.number

    @property
    def short_seconds(self) -> float:
        """What one operation is seen to take."""
        return self._short_seconds / self.number

    @property
    def coldness(self) -> float:
        """How long ago, as it were, an operation has run for the last time."""
        return self._coldness / self.number

    @property
    def cold_share(self) -> float:
        """How much of that it would not take if nobody looked."""
        return max(1.0 - self._plain / self._short_seconds, 0.0) if self._short_seconds else 0.0


class _Logged(nn.Module):
    """Does its work with and without being looked at, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.own_time = OwnTime()
        self._views, self._sums, self._reads = _Excess(_views), _Excess(_sums), _Excess(_reads)
        self._listening, self._layers = _Excess(_sums), _Excess(_Layers())
        self._num_events = 1

    def forward(self, x: Tensor) -> Tensor:
        memory, own = AllocatorWatch(time_ns), self.own_time
        for _ in range(_TURNS):
            for excess in (self._views, self._sums, self._reads, self._layers, self._listening):
                with torch._C.DisableTorchFunction():
                    excess.run_plain(x)
                if excess is not self._listening:
                    excess.run_seen(x, own)
            try:
                memory.start()
                self._listening.run_seen(x, own)
            finally:
                self._num_events = max(memory.stop().num_events // _ROUNDS, 1)
        return x

    @property
    def _share(self) -> float:
        light, heavy = self._views, self._sums
        return _share(heavy.each - light.each, heavy.short_seconds - light.short_seconds)

    def found(self) -> tuple[float, float, float, float, float]:
        """Of an operation: by number, by what it takes, how much of that inside, by how cold it is; and of a read."""
        each = max(self._views.each - self._share * self._views.short_seconds, 0.0)
        layers = self._layers
        cold = max(layers.each_in_a_turn - each - self._share * layers.short_seconds, 0.0) / max(layers.coldness, 0.01)
        return each, self._share, min(self._sums.cold_share, self._share), cold, self._reads.each

    def event(self) -> float:
        """Of an allocation, beside what makes the operation itself longer, of which its share is taken."""
        longer = self._listening.short_seconds - self._sums.short_seconds
        each = self._listening.each - self._sums.each - self._share * longer
        return max(each, 0.0) * self._sums.number / self._num_events


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _Called(nn.Module):
    """Calls modules with and without being looked at, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.own_time = OwnTime()
        self.parts = nn.ModuleList([_Nothing() for _ in range(_REPEATS)])
        self._excess = _Excess(self._call_all)

    def _call_all(self, x: Tensor) -> None:
        for part in self.parts:
            x = part(x)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(_TURNS):
            watcher, tracker = CURRENT.watcher, CURRENT.tracker
            CURRENT.watcher = CURRENT.tracker = None
            try:
                self._excess.run_plain(x)
            finally:
                CURRENT.watcher, CURRENT.tracker = watcher, tracker
            self._excess.run_seen(x, self.own_time)
        return x

    def found(self) -> tuple[float, float]:
        """In the time of a module itself, and around it: about the same."""
        each = self._excess.total / len(self.parts)
        return each / 2, each / 2


# -- what is looked at without a log -----------------------------------------------------------------------------------


def _of_events() -> float:
    x, watch, excess, num_events = _input(), AllocatorWatch(time_ns), _Excess(_sums), 1
    for _ in range(_TURNS):
        excess.run_plain(x)
        try:
            if not watch.start():
                return 0.0
            excess.run_seen(x, OwnTime())
        finally:
            num_events = max(watch.stop().num_events // _ROUNDS, 1)
    return excess.total / num_events


def _of_nodes(check: str | None) -> tuple[float, float]:
    """Of a backward node, by the number of them and by what they take, as of operations."""
    look = None if check is None else _look
    found: list[tuple[float, float]] = []
    for work in (_views, _sums):
        plain = watched = float("inf")
        number, short_seconds = 1, 0.0
        for _ in range(_TURNS * _ROUNDS):
            plain = min(plain, _seconds(work(_input()).sum().backward))
            own_time = OwnTime()
            watch = BackwardWatch(look, look, own_time=own_time)
            result = work(_input()).sum()
            watch.watch([result])
            seconds = _seconds(result.backward) - own_time.seconds
            watch.stop()
            if seconds < watched:
                watched, number = seconds, max(len(watch.runs), 1)
                short_seconds = sum(min(run.seconds, SHORT) for run in watch.runs)
        found.append((max(watched - plain, 0.0) / number, short_seconds / number))
    (light, light_seconds), (heavy, heavy_seconds) = found
    share = _share(heavy - light, heavy_seconds - light_seconds)
    return max(light - share * light_seconds, 0.0), share


def _look(_info: NodeInfo, gradients: tuple[Any, ...]) -> None:
    """What a check does with gradients, more or less."""
    for gradient in gradients:
        if gradient is not None:
            has_nonfinite(gradient)
