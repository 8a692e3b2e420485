"""What looking takes that no clock of ours sees: torch finding out that somebody looks, calling us, and coming back.

That is a microsecond or two each time, and much to an operation that takes as little. So it is measured, on small models of
our own: how much longer a thing takes when it is looked at, without what the clocks have seen of that (see OwnTime). Each
is done several times in a row, as in a model that does much of it, with and without in turns, and the shortest counts:
others use the machine as well.
"""

from collections.abc import Callable
from functools import cache
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlens.capture.backward import BackwardWatch, NodeInfo
from torchlens.capture.current import CURRENT
from torchlens.capture.own_time import SHORT, OwnTime, coldness_of
from torchlens.nonfinite import has_nonfinite
from torchlens.problems import Problems
from torchlens.profiling.health.checker import make_checker
from torchlens.profiling.measuring.allocators import AllocatorWatch
from torchlens.profiling.measuring.calibration_work import (
    REPEATS,
    Cells,
    Layers,
    make_views,
    read_facts,
    scan,
    sum_up,
)
from torchlens.profiling.measuring.watcher import Watcher
from torchlens.profiling.options import Level, ProfileOptions

__all__ = ["NOTHING", "NO_RESIDUALS", "Residuals", "measure_residuals"]

_ROUNDS = 8
_TURNS = 4
# On quiet machines, what is left when all else is known is once to one and a half times that. More is a disturbance, which
# would be taken off each operation of a model.
_MOST_LEFT = 2.0

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
    cell: float = 0.0  # of a cell of a recurrent network, beside that: all that it does inside finds the caches cold
    read: float = 0.0  # of `x.shape` and its like
    module: float = 0.0  # in the time of the module itself
    module_around: float = 0.0  # in that of the one that calls it
    event: float = 0.0  # of an allocator
    logged_event: float = 0.0  # the same in a step that is logged
    node: float = 0.0  # of autograd's graph
    short_node_share: float = 0.0  # as of operations
    cold_node: float = 0.0  # likewise


NOTHING = Residuals()
NO_RESIDUALS = {False: NOTHING, True: NOTHING}


def measure_residuals(level: Level, check: str | None, has_grad: bool) -> Residuals:
    """How long it takes, with or without gradients. That is found out once; NOTHING where it cannot be.

    Not inside a log or a mode of somebody's, which would see our small models, and be part of what they take.
    """
    if CURRENT.tracker is not None or CURRENT.watcher is not None or _has_modes() or torch.compiler.is_compiling():
        return NOTHING
    # At module level, what is logged is not checked; gradients are, at either.
    found = _measure_forward(check if level == "operation" else None, has_grad)
    return found._replace(**_measure_backward(check)._asdict()) if has_grad else found


def _has_modes() -> bool:
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@cache
def _measure_forward(check: str | None, has_grad: bool) -> Residuals:
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        model = _Measured()
        watcher = _watcher_of(model, "operation", check)
        model.own_time = watcher.ledger.own_time
        try:
            watcher.start()
            model(_input())
        finally:
            watcher.stop()
        return model.found()._replace(event=_of_events())


class _NodeResiduals(NamedTuple):
    """Those of Residuals that are in a backward pass."""

    node: float
    short_node_share: float
    cold_node: float


@cache
def _measure_backward(check: str | None) -> _NodeResiduals:
    with torch.inference_mode(False), torch.set_grad_enabled(True):
        node, share = _of_nodes(check)
        return _NodeResiduals(node, share, _of_cold_nodes(check, node, share))


def _watcher_of(model: nn.Module, level: Level, check: str | None) -> Watcher:
    options = ProfileOptions(level=level, check=check, memory=False)
    return Watcher(model, options, None if check is None else make_checker(check), Problems())


def _input() -> Tensor:
    return torch.ones(8, dtype=torch.float32, device="cpu", requires_grad=torch.is_grad_enabled())


def _seconds(function: Callable[..., Any], *args: Any) -> float:
    start = perf_counter()
    result = function(*args)
    seconds = perf_counter() - start
    del result  # now: with it goes autograd's graph, which a model's forward pass leaves behind
    return seconds


def _share(part: float, whole: float) -> float:
    return min(max(part, 0.0) / max(whole, 1e-7), 1.0)


class _Excess:
    """How much longer some work takes than it would if nobody looked, without what the clocks have seen of that."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._plain = self._seen = float("inf")
        self.number = 1  # of things that are looked at
        self.num_modules = 0
        self._short_seconds = self._coldness = 0.0

    def run_plain(self, x: Tensor) -> None:
        """Does the work a few times while nobody looks."""
        self._plain = min(self._plain, *(_seconds(self._work, x) for _ in range(_ROUNDS)))

    def run_seen(self, x: Tensor, own: OwnTime) -> None:
        """Does the work a few times while somebody does."""
        for _ in range(_ROUNDS):
            own.seconds, own.short_seconds, own.coldness = 0.0, 0.0, 0.0
            number, num_modules = own.num_operations + own.num_reads, own.num_modules
            seconds = _seconds(self._work, x) - own.seconds
            if seconds < self._seen:
                self._seen, self._short_seconds, self._coldness = seconds, own.short_seconds, own.coldness
                self.number = max(own.num_operations + own.num_reads - number, 1)
                self.num_modules = own.num_modules - num_modules

    @property
    def plain(self) -> float:
        """What it takes if nobody looks."""
        return self._plain

    @property
    def total(self) -> float:
        return max(self._seen - self._plain, 0.0)

    @property
    def each(self) -> float:
        """For each thing that is looked at."""
        return self.total / self.number

    @property
    def short_seconds(self) -> float:
        """What one operation is seen to take."""
        return self._short_seconds / self.number

    @property
    def coldness(self) -> float:
        """How many of the operations had not run for a while."""
        return self._coldness

    @property
    def cold_share(self) -> float:
        """How much of that it would not take if nobody looked."""
        return max(1.0 - self._plain / self._short_seconds, 0.0) if self._short_seconds else 0.0


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _Measured(nn.Module):
    """Does its work with and without being looked at, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.own_time = OwnTime()
        self.layers, self.cells, self.nothings = Layers(), Cells(), nn.ModuleList([_Nothing() for _ in range(REPEATS)])
        self.of_views, self.of_sums, self.of_cells = _Excess(make_views), _Excess(sum_up), _Excess(self.cells)
        self.of_reads, self.of_modules, self.of_layers = _Excess(read_facts), _Excess(self._call_all), _Excess(self.layers)
        self.of_scan, self.of_listening = _Excess(scan), _Excess(sum_up)
        self._num_events = 1

    def _call_all(self, x: Tensor) -> None:
        for module in self.nothings:
            x = module(x)

    def forward(self, x: Tensor) -> Tensor:
        # The turns of each lie apart, so that others who use the machine for a while do not disturb all of them.
        of_operations = self.of_views, self.of_sums, self.of_scan, self.of_cells, self.of_layers
        for _ in range(_TURNS):
            for excess in (*of_operations, self.of_reads, self.of_modules):
                _unseen(excess.run_plain, x)
                excess.run_seen(x, self.own_time)
        memory = AllocatorWatch(time_ns)
        for _ in range(_TURNS):
            _unseen(self.of_listening.run_plain, x)
            try:
                memory.start()
                self.of_listening.run_seen(x, self.own_time)
            finally:
                self._num_events = max(memory.stop().num_events // _ROUNDS, 1)
        return x

    def found(self) -> Residuals:
        """What was found, but of what is looked at without a log."""
        light, heavy, cells, varied = self.of_views, self.of_sums, self.of_cells, (self.of_scan, self.of_layers)
        share = _share(heavy.each - light.each, heavy.short_seconds - light.short_seconds)
        each = max(light.each - share * light.short_seconds, 0.0)
        module = self.of_modules.total / len(self.nothings) / 2  # about the same in it and around it

        def rest(excess: _Excess) -> float:
            """What is left of the whole when all that has been found already is taken off."""
            known = excess.number * (each + share * excess.short_seconds) + 2 * module * excess.num_modules
            return min(max(excess.total - known, 0.0), _MOST_LEFT * known)

        # Of an allocation, beside what makes the operation itself longer, of which its share is taken.
        listening = self.of_listening
        event = listening.each - heavy.each - share * (listening.short_seconds - heavy.short_seconds)
        return Residuals(
            operation=each,
            short_operation_share=share,
            cold_share=min(heavy.cold_share, share),
            cold_operation=sum(map(rest, varied)) / max(sum(excess.coldness for excess in varied), 0.01),
            cell=min(rest(cells), cells.plain) / REPEATS,  # it takes at most twice as long
            read=self.of_reads.each,
            module=module,
            module_around=module,
            logged_event=max(event, 0.0) * heavy.number / self._num_events,
        )


def _unseen(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Calls the function while nobody looks."""
    watcher, tracker = CURRENT.watcher, CURRENT.tracker
    CURRENT.watcher = CURRENT.tracker = None
    try:
        with torch._C.DisableTorchFunction():
            return function(x)
    finally:
        CURRENT.watcher, CURRENT.tracker = watcher, tracker


# -- what is looked at without a log -----------------------------------------------------------------------------------


def _of_events() -> float:
    x, watch, excess, num_events = _input(), AllocatorWatch(time_ns), _Excess(sum_up), 1
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
    for work in (make_views, sum_up):
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


def _of_cold_nodes(check: str | None, node: float, share: float) -> float:
    """Of a backward node that has not run for a while, beside that: as of operations, with the checks themselves."""
    model, x, runs = Layers(), _input(), []
    plain, watched = float("inf"), float("inf")
    watcher = _watcher_of(model, "module", check)
    own = watcher.ledger.own_time
    try:
        watcher.start()
        for _ in range(_TURNS):
            for _ in range(_ROUNDS):
                result = _unseen(model, x).sum()
                plain = min(plain, _seconds(result.backward))
            for _ in range(_ROUNDS):
                result, seen = model(x).sum(), own.seconds
                num_runs = len(watcher.windows.backward.runs)
                seconds = _seconds(result.backward) - (own.seconds - seen)
                if seconds < watched:
                    watched, runs = seconds, watcher.windows.backward.runs[num_runs:]
    finally:
        watcher.stop()
    known = len(runs) * node + sum(min(run.seconds, SHORT) for run in runs) * share
    rest = min(max(watched - plain - known, 0.0), _MOST_LEFT * known)
    return rest / max(sum(coldness_of(run.name for run in runs)), 1.0)


def _look(_info: NodeInfo, gradients: tuple[Any, ...]) -> None:
    """What a check does with gradients, more or less."""
    for gradient in gradients:
        if gradient is not None:
            has_nonfinite(gradient)
