"""What looking takes that no clock of ours sees: torch finding out that somebody looks, calling us,
and coming back.

That is a microsecond or two each time, and much to an operation that takes as little. So it is
measured, on small models of our own: how much longer a thing takes when it is looked at, without
what the clocks have seen of that (see OwnTime). Each is done several times in a row, as in a model
that does much of it, with and without in turns. Others use the machine as
well: the shortest of a turn counts, and the two of one turn are held against each other, because
what disturbs one for longer disturbs both. The median of all turns is what counts.
"""

from collections.abc import Callable
from functools import cache
from operator import sub
from statistics import median
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlens._capture.current import CURRENT, unwatched
from torchlens._capture.gradients.backward_hooks import BackwardWatch, Look, NodeInfo, NodeRun
from torchlens._capture.own_time import SHORT, OwnTime, coldness_of
from torchlens._health.checker import make_checker
from torchlens._health.tensor_statistics import has_nonfinite
from torchlens._profile.measuring.allocators import AllocatorWatch
from torchlens._profile.measuring.calibration_work import (
    REPEATS,
    Cells,
    Layers,
    make_views,
    read_facts,
    scan,
    sum_up,
    sum_up_much,
)
from torchlens._profile.measuring.calls import Signature
from torchlens._profile.measuring.details import Details, Wanted
from torchlens._profile.measuring.watcher import Watcher
from torchlens._profile.options import Level, ProfileOptions
from torchlens._text.problems import Problems

_ROUNDS = 3
_TURNS = 12
# On quiet machines, what is left when all else is known is once to one and a half times that. More
# is a disturbance, which would be taken off each operation of a model.
_MOST_LEFT = 2.0

# In cold caches and on a busy machine everything takes two or three times as long. What is more is
# a disturbance.
_MOST_PACE = 4.0

Tensor = torch.Tensor
Work = Callable[[Tensor], Any]


class Residuals(NamedTuple):
    """Seconds that the clocks do not see, for each thing that is looked at."""

    operation: float = 0.0
    # What the clocks saw of handling such an operation: what they did not see grows with it, where
    # the caches are cold or others use the machine.
    handling: float = 0.0
    # An operation that takes longer has more arguments to be looked through, and more to fetch anew
    # that our work drove out of the processor's caches: so much for each second of an operation, of
    # its first few microseconds.
    short_operation_share: float = 0.0
    # How much of that is in what the operation itself is seen to take; the rest comes before and
    # after.
    cold_share: float = 0.0
    cold_operation: float = (
        0.0  # of an operation that has not run for a while, beside that (see OwnTime)
    )
    # of a cell of a recurrent network, beside that: all that it does inside finds the caches cold
    cell: float = 0.0
    read: float = 0.0  # of `x.shape` and its like
    module: float = 0.0  # in the time of the module itself
    module_around: float = 0.0  # in that of the one that calls it
    timed_module: float = 0.0  # both, in a step that is timed and not logged
    event: float = 0.0  # of an allocator
    node: float = 0.0  # of autograd's graph
    short_node_share: float = 0.0  # as of operations
    cold_node: float = 0.0  # likewise

    def pace_of(self, handling_seconds: float, num_plain: int) -> float:
        """How many times as long handling a plain operation took in some span as it did here."""
        if not num_plain or not self.handling:
            return 1.0
        return min(max(handling_seconds / num_plain / self.handling, 1 / _MOST_PACE), _MOST_PACE)


NOTHING = Residuals()
NO_RESIDUALS = {False: NOTHING, True: NOTHING}


def measure_residuals(level: Level, check: str | None, has_grad: bool) -> Residuals:
    """How long it takes, with or without gradients. That is found out once; NOTHING where it cannot
    be.

    Not inside a log or a mode of somebody's, which would see our small models, and be part of what
    they take.
    """
    if (
        CURRENT.tracker is not None
        or CURRENT.watcher is not None
        or _has_modes()
        or torch.compiler.is_compiling()
    ):
        return NOTHING
    # At module level, what is logged is not checked; gradients are, at either.
    found = _measure_forward(check if level == "operation" else None, has_grad)
    found = found._replace(timed_module=_of_timed_modules(level, check, has_grad))
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


class _Turns:
    """What some work takes while nobody looks and while somebody does, without what the clocks have
    seen of the looking.
    """

    def __init__(self) -> None:
        self._plain: list[float] = []  # seconds, one for each turn
        self._seen: list[float] = []
        self._short: list[float] = []  # what the operations were seen to take (see OwnTime)

    def add(self, plain: float, seen: float, short_seconds: float) -> None:
        """One turn: the shortest of each."""
        self._plain.append(plain)
        self._seen.append(seen)
        self._short.append(short_seconds)

    @property
    def plain(self) -> float:
        """What it takes if nobody looks."""
        return median(self._plain)

    @property
    def total(self) -> float:
        """How much longer it takes if somebody does."""
        return max(median(map(sub, self._seen, self._plain)), 0.0)

    @property
    def short_seconds(self) -> float:
        """What its operations are seen to take."""
        return median(self._short)

    @property
    def cold_share(self) -> float:
        """How much of that they would not take if nobody looked."""
        parts = zip(self._plain, self._short, strict=True)
        return max(median(1.0 - plain / short if short else 0.0 for plain, short in parts), 0.0)


class _Excess(_Turns):
    """The same of work in a forward pass."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._shortest = 0.0  # of this turn, while nobody looks
        self._handling: list[float] = []
        self.number = 1  # of things that are looked at
        self.num_modules = 0
        self.coldness = 0.0  # how many of the operations had not run for a while

    def run_plain(self, x: Tensor) -> None:
        """Begins a turn: does the work a few times while nobody looks."""
        self._shortest = min(_seconds(self._work, x) for _ in range(_ROUNDS))

    def run_seen(self, x: Tensor, own: OwnTime) -> None:
        """Ends the turn: does the work a few times while somebody does."""
        shortest, short_seconds, handling = float("inf"), 0.0, 0.0
        for _ in range(_ROUNDS):
            own.seconds = own.short_seconds = own.coldness = own.handling_seconds = 0.0
            own.num_plain = 0
            number, num_modules = own.num_operations + own.num_reads, own.num_modules
            seconds = _seconds(self._work, x) - own.seconds
            if seconds < shortest:
                shortest, short_seconds = seconds, own.short_seconds
                handling = own.handling_seconds / max(own.num_plain, 1)
                self.coldness = own.coldness
                self.number = max(own.num_operations + own.num_reads - number, 1)
                self.num_modules = own.num_modules - num_modules
        self.add(self._shortest, shortest, short_seconds)
        self._handling.append(handling)

    @property
    def each(self) -> float:
        """How much longer, for each thing that is looked at."""
        return self.total / self.number

    @property
    def handling(self) -> float:
        """What the clocks saw of handling one plain operation."""
        return median(self._handling)

    @property
    def each_short_seconds(self) -> float:
        """What one operation is seen to take."""
        return self.short_seconds / self.number


class _Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class _Measured(nn.Module):
    """Does its work with and without being looked at, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.own_time = OwnTime()
        self.layers, self.cells, self.nothings = (
            Layers(),
            Cells(),
            nn.ModuleList([_Nothing() for _ in range(REPEATS)]),
        )
        self.of_views, self.of_sums, self.of_cells = (
            _Excess(make_views),
            _Excess(sum_up),
            _Excess(self.cells),
        )
        self.of_reads, self.of_modules, self.of_layers = (
            _Excess(read_facts),
            _Excess(self._call_all),
            _Excess(self.layers),
        )
        self.of_scan = _Excess(scan)

    def _call_all(self, x: Tensor) -> None:
        for module in self.nothings:
            x = module(x)

    def forward(self, x: Tensor) -> Tensor:
        # The turns of each lie apart, so that others who use the machine for a while do not disturb
        # all of them.
        of_operations = self.of_views, self.of_sums, self.of_scan, self.of_cells, self.of_layers
        for _ in range(_TURNS):
            for excess in (*of_operations, self.of_reads, self.of_modules):
                _unseen(excess.run_plain, x)
                excess.run_seen(x, self.own_time)
        return x

    def found(self) -> Residuals:
        """What was found, but of what is looked at without a log."""
        light, heavy, cells, varied = (
            self.of_views,
            self.of_sums,
            self.of_cells,
            (self.of_scan, self.of_layers),
        )
        pace = heavy.handling / light.handling if light.handling else 1.0
        share = _share(
            heavy.each - pace * light.each,
            heavy.each_short_seconds - pace * light.each_short_seconds,
        )
        each = max(light.each - share * light.each_short_seconds, 0.0)
        module = (
            self.of_modules.total / len(self.nothings) / 2
        )  # about the same in it and around it

        known = Residuals(operation=each, handling=light.handling)

        def rest(excess: _Excess) -> float:
            """What is left of the whole when all that has been found already is taken off."""
            pace = known.pace_of(excess.handling, 1 if excess.handling else 0)
            found = (
                pace * excess.number * each
                + share * excess.short_seconds
                + 2 * module * excess.num_modules
            )
            return min(max(excess.total - found, 0.0), _MOST_LEFT * found) / pace

        return Residuals(
            operation=each,
            handling=light.handling,
            short_operation_share=share,
            cold_share=min(heavy.cold_share, share),
            cold_operation=sum(map(rest, varied))
            / max(sum(excess.coldness for excess in varied), 0.01),
            cell=min(rest(cells), cells.plain) / REPEATS,  # it takes at most twice as long
            read=self.of_reads.each,
            module=module,
            module_around=module,
        )


def _unseen(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Calls the function while nobody looks."""
    tracker, CURRENT.tracker = CURRENT.tracker, None
    try:
        with unwatched(), torch._C.DisableTorchFunction():
            return function(x)
    finally:
        CURRENT.tracker = tracker


# -- what is looked at without a log
# -----------------------------------------------------------------------------------


class _TimesAlone(Details):
    """Has no step measured in detail."""

    def wanted(self, signature: Signature, is_warmup: bool, is_compiled: bool) -> Wanted:
        return self.of_timed


@cache
def _of_timed_modules(level: Level, check: str | None, has_grad: bool) -> float:
    """Of a module: what it and the one around it find driven out of the caches by what we write
    down, and by checks.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
        model, x, turns, num_modules, own = Layers(), _input(), _Turns(), 1, float("inf")
        watcher = _watcher_of(model, level, check)
        watcher.windows.details = _TimesAlone(watcher.ledger.options)
        try:
            watcher.start()
            for _ in range(_TURNS):
                plain = min(_seconds(_unseen, model.forward, x) for _ in range(_ROUNDS))
                seen = float("inf")
                for _ in range(_ROUNDS):
                    model(x)
                    whole = watcher.ledger.steps[-1].calls[0]
                    num_modules, own = (
                        max(whole.clock.num_modules, 1),
                        min(whole.clock.own_seconds, own),
                    )
                    seen = min(whole.end - whole.start - whole.clock.own_seconds, seen)
                turns.add(plain, seen, 0.0)
        finally:
            watcher.stop()
        return min(
            turns.total / (2 * num_modules + 1), own / (2 * num_modules)
        )  # more than we did is a disturbance


def _of_events() -> float:
    x, watch, excess, num_events = _input(), AllocatorWatch(time_ns), _Excess(sum_up_much), 1
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
        turns, number = _Turns(), 1
        for _ in range(_TURNS):
            plain = min(_seconds(work(_input()).sum().backward) for _ in range(_ROUNDS))
            seen, short_seconds, number = min(_run_backward(work, look) for _ in range(_ROUNDS))
            turns.add(plain, seen, short_seconds)
        found.append((turns.total / number, turns.short_seconds / number))
    (light, light_seconds), (heavy, heavy_seconds) = found
    share = _share(heavy - light, heavy_seconds - light_seconds)
    return max(light - share * light_seconds, 0.0), share


def _run_backward(work: Work, look: Look | None) -> tuple[float, float, int]:
    """Seconds of a backward pass that is looked at, without what the clocks saw of that; of its
    nodes; and of how many.
    """
    own_time = OwnTime()
    watch = BackwardWatch(look, look, own_time=own_time)
    result = work(_input()).sum()
    watch.watch([result])
    seconds = _seconds(result.backward) - own_time.seconds
    watch.stop()
    return seconds, _short_seconds(watch.runs), max(len(watch.runs), 1)


def _short_seconds(runs: list[NodeRun]) -> float:
    return sum(min(run.seconds, SHORT) for run in runs)


def _of_cold_nodes(check: str | None, node: float, share: float) -> float:
    """Of a backward node that has not run for a while, beside that: as of operations, with the
    checks themselves.
    """
    model, x, turns = Layers(), _input(), _Turns()
    runs: list[NodeRun] = []
    watcher = _watcher_of(model, "module", check)
    own = watcher.ledger.own_time
    try:
        watcher.start()
        for _ in range(_TURNS):
            plain = min(_seconds(_unseen(model, x).sum().backward) for _ in range(_ROUNDS))
            shortest = float("inf")
            for _ in range(_ROUNDS):
                result, seen = model(x).sum(), own.seconds
                num_runs = len(watcher.windows.backward.runs)
                seconds = _seconds(result.backward) - (own.seconds - seen)
                if seconds < shortest:
                    shortest, runs = seconds, watcher.windows.backward.runs[num_runs:]
            turns.add(plain, shortest, _short_seconds(runs))
    finally:
        watcher.stop()
    known = len(runs) * node + turns.short_seconds * share
    rest = min(max(turns.total - known, 0.0), _MOST_LEFT * known)
    return rest / max(sum(coldness_of(run.name for run in runs)), 1.0)


def _look(_info: NodeInfo, gradients: tuple[Any, ...]) -> None:
    """What a check does with gradients, more or less."""
    for gradient in gradients:
        if gradient is not None:
            has_nonfinite(gradient)
