"""Times come from light steps, contain no hook of the profile, and add up. The clock stands still
until a test advances it.
"""

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model
from torchlens._capture import current
from torchlens._capture.gradients import backward_hooks as backward
from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._health.tensor_statistics import has_nonfinite
from torchlens._profile import allocators, checks, ledger, model_modules, model_watcher
from torchlens._profile.profile_options import ProfileOptions
from torchlens._profile.records import ProfiledStep, TypicalSteps
from torchlens._recording import trees
from torchlens._text.problems import Problems


class Clock:
    def __init__(self):
        self.now = 1000.0

    def read(self):
        return self.now

    def slow(self, function, seconds):
        """The function, which now takes so long."""

        def slowed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slowed


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (backward, model_watcher):
        monkeypatch.setattr(module, "perf_counter", clock.read)
    monkeypatch.setattr(current._Current, "clock", staticmethod(clock.read))
    return clock


class Working(nn.Module):
    """Takes some seconds itself, and what the modules inside take."""

    def __init__(self, clock, seconds, *inside):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.inside = nn.ModuleList(inside)

    def forward(self, x):
        self.clock.now += self.seconds
        for module in self.inside:
            x = module(x * 1.0) + 1.0
        return x


def working(clock):
    return Working(clock, 1.0, Working(clock, 2.0, Working(clock, 0.5)), Working(clock, 1.0))


SPANS = {"": 4.5, "inside.0": 2.5, "inside.0.inside.0": 0.5, "inside.1": 1.0}
OPTIONS = [
    {},
    {"level": "operation"},
    {"check": "nonfinite"},
    {"check": "health"},
    {"check": "health", "level": "module"},
    {"memory": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_hooks_of_the_profile_are_in_no_time_of_a_light_step(clock, monkeypatch, options):
    model = working(clock)
    # Everything that the profile does before and after a call is slow.
    watcher = model_watcher.ModelWatcher
    monkeypatch.setattr(watcher, "_fact_of", clock.slow(watcher._fact_of, 100.0))
    monkeypatch.setattr(model_watcher, "named_tensors", clock.slow(trees.named_tensors, 50.0))
    storages = allocators.saved_storages
    monkeypatch.setattr(model_watcher, "saved_storages", clock.slow(storages, 30.0))
    monkeypatch.setattr(checks.Checks, "_run", clock.slow(checks.Checks._run, 20.0))
    with tl.profile(model, **options) as p:
        for _ in range(4):
            model(torch.rand(2, requires_grad=True)).sum().backward()
    assert p.problems == []
    light = [step for step in p.steps if step.is_light]
    assert [step.forward_seconds for step in light] == pytest.approx([4.5] * len(light))
    assert len(light) >= 2
    numbers = {step.number for step in light}
    for address, span in SPANS.items():
        for call in (call for call in p[address].calls if call.step in numbers):
            assert call.forward_seconds == pytest.approx(span, abs=1e-9)
            own = model.get_submodule(address).seconds
            assert call.forward_self_seconds == pytest.approx(own, abs=1e-9)
            assert call.own_seconds > 100 or not len(model.get_submodule(address).inside)


def test_times_of_a_detailed_step_are_marked_as_containing_the_log():
    with tl.profile(model := nn.Linear(3, 4), level="operation") as p:
        for _ in range(2):
            model(torch.rand(2, 3))
    assert [call.includes_log for call in p.root.calls] == [True, False]
    assert [step.has_log for step in p.steps] == [True, False]
    assert all(operation.includes_log for operation in p.operations)
    assert "logged fwd" in str(p.summary(by="operation", width=200))
    assert p.to_pandas(by="operation")["includes_log"].all()


def test_without_a_light_step_the_table_says_that_times_contain_the_measuring():
    with tl.profile(model := nn.Linear(3, 4)) as p:
        model(torch.rand(2, 3))
    assert "Times contain what measuring took: every step was detailed" in " ".join(str(p).split())
    with tl.profile(model) as p:
        for _ in range(2):
            model(torch.rand(2, 3))
    assert "Times contain" not in str(p)


def test_backward_times_leave_out_the_time_of_checks(clock, monkeypatch):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds):
            ctx.seconds = seconds
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            clock.now += ctx.seconds
            return gradient, None

    model = Model(
        lambda self, x: self.second(self.first(x)),
        first=Model(lambda self, x: Slow.apply(x, 2.0)),
        second=Model(lambda self, x: Slow.apply(Slow.apply(x, 1.0), 4.0)),
    )
    monkeypatch.setattr(checks.Checks, "_run", clock.slow(checks.Checks._run, 20.0))
    monkeypatch.setattr(checks, "has_nonfinite", clock.slow(has_nonfinite, 10.0))
    choices: list[Any] = [{}, {"check": "health"}]
    for options in choices:
        with tl.profile(model, **options) as p:
            model(torch.rand(3, requires_grad=True)).sum().backward()
        assert p["first"].calls[0].backward_seconds == pytest.approx(2.0)
        assert p["second"].calls[0].backward_seconds == pytest.approx(5.0)
        assert p.root.calls[0].backward_seconds == pytest.approx(7.0)
        assert p.steps[0].backward_seconds == pytest.approx(7.0)


def call_of(index):
    step = ledger.MeasuredStep(number=1, signature=(True, True, ()), is_warmup=False)
    module = model_modules.NamedModule(f"m{index}", "Module", nn.Identity())
    return ledger.MeasuredCall(index, step, module, None)


def run_of(number, start, end, task=0, own_start=0.0, own_end=0.0):
    return NodeRun(0, None, "", start, end, number, task, own_start, own_end)


def test_the_time_between_two_backward_nodes_belongs_to_the_next():
    written = ledger.Ledger(nn.Identity(), ProfileOptions(), Problems())
    first, second = call_of(0), call_of(1)
    written.makers.update({5: first, 15: second})
    runs = [
        run_of(25, 0.0, 1.0),  # the loss
        # 1.0 since the last, half of which was spent in hooks
        run_of(15, 2.0, 3.0, own_start=0.5, own_end=0.5),
        run_of(5, 9.0, 9.5, task=1, own_start=0.5, own_end=0.5),  # inside the next
        run_of(5, 4.0, 10.0, own_start=0.5, own_end=1.5),
    ]
    charged = [(call.index, seconds) for _, call, seconds in ledger._charges(written, runs)]
    assert [index for index, _ in charged] == [1, 0, 0]
    assert [seconds for _, seconds in charged] == pytest.approx([1.5, 0.5, 5.5])


def step_of(number, forward, backward=None):
    return ProfiledStep(
        number=number, is_warmup=False, forward_seconds=forward, backward_seconds=backward,
        num_backward_passes=0,
        peak_bytes=None, added_bytes=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([3], {1}),
        ([3, 1], {1, 2}),
        ([5, 1, 3], {3}),
        ([4, 1, 3, 2], {3, 4}),
        ([9, 1, 3, 2, 4], {3, 4, 5}),
    ],
)
def test_typical_are_the_steps_without_the_quickest_and_the_slowest_quarter(seconds, chosen):
    steps = [step_of(number, each) for number, each in enumerate(seconds, 1)]
    assert TypicalSteps.of(steps).forward == chosen
    assert (
        TypicalSteps.of(
            [step_of(step.number, 0.0, step.forward_seconds) for step in steps]
        ).backward
        == chosen
    )


def test_a_mean_counts_the_steps_in_which_a_module_did_not_run():
    typical = TypicalSteps(forward=frozenset({1, 2}))
    assert typical.mean("forward_seconds", {1: 4.0, 3: 9.0}) == 2.0
    assert typical.mean("forward_seconds", {3: 9.0}) is None
    assert (
        typical.mean("backward_seconds", {3: 9.0, 4: 1.0}) == 5.0
    )  # where none is chosen, all are


def test_times_come_from_light_steps():
    model = nn.Linear(3, 4)
    with tl.profile(model) as p:
        for size in (2, 2, 5, 2, 2, 2):
            model(torch.rand(size, 3))
    assert [step.is_light for step in p.steps] == [False, True, False, False, True, False]
    assert [step.peak_bytes is None for step in p.steps] == [step.is_light for step in p.steps]
    typical = p.root.typical_steps
    assert typical.timed == {3, 5}  # the third is the only one of its kind
    seconds = p.root.by_step("forward_seconds")
    assert p.root.statistic("forward_seconds").minimum == min(seconds[step] for step in (3, 5))
    assert p.root.statistic("peak_bytes").num == 4
    text = " ".join(str(p).split())
    assert "Of 6 steps, times are those of 1, in which nothing else was measured, memory" in text
    for memory in (True, False):
        with tl.profile(model, memory=memory) as p:
            for _ in range(2):
                model(torch.rand(2, 3))
        assert p.root.typical_steps.timed == {2}  # the first is for FLOPs
    with tl.profile(model, check="nonfinite", stop=True, memory=False) as p:
        for _ in range(2):
            model(torch.rand(2, 3))
    assert p.root.typical_steps.timed == {1}  # the second follows a logged one


@pytest.mark.parametrize(
    "options", [{"level": "module"}, {"level": "operation"}, {"level": "module", "check": "health"}]
)
def test_the_garbage_collector_runs_in_no_module(options: Any):
    """Where it runs is chance; what is written down would make it run more often."""
    running: list[str] = []
    seen: list[str] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        running.append("forward")
        kept = [[number] for number in range(5000)]
        running.pop()
        return x * len(kept)

    def on_collection(phase: str, info: dict[str, int]) -> None:
        seen.extend(running)

    model = Model(forward)
    gc.callbacks.append(on_collection)
    try:
        model(torch.ones(2))
        assert seen
        seen.clear()
        with tl.profile(model, **options) as p:
            for _ in range(4):
                model(torch.ones(2))
    finally:
        gc.callbacks.remove(on_collection)
    assert any(step.is_light for step in p.steps)
    assert not seen
    assert gc.isenabled()


@pytest.mark.parametrize("level", ["module", "operation"])
def test_with_inputs_of_ever_new_shapes_some_steps_are_light(level):
    model = nn.Linear(3, 4)
    with tl.profile(model, level=level) as p:
        for size in range(1, 11):
            model(torch.rand(size, 3))
    assert [step.number for step in p.steps if step.is_light] == [6, 8, 10]
    assert [step.has_flops for step in p.steps] == [not step.is_light for step in p.steps]
    assert p.root.typical_steps.timed == {6, 8, 10}


def test_a_step_after_a_logged_one_counts_only_if_there_is_no_better():
    model = nn.Linear(3, 4)
    with tl.profile(model) as p:
        for _ in range(9):
            model(torch.rand(2, 3))
    assert [step.number for step in p.steps if step.is_cold] == [2]
    assert p.root.typical_steps.timed == {4, 6, 7, 8, 9}
    with tl.profile(model, level="operation") as p:
        for _ in range(9):
            model(torch.rand(2, 3))
    assert p.root.typical_steps.timed == {7, 8}
    with tl.profile(model, skip=1, measure=1, every=2, max_steps=9) as p:  # others lie between
        for _ in range(12):
            model(torch.rand(2, 3))
    assert not any(step.is_cold for step in p.steps)


def test_printed_times_add_up(clock):
    """In each step another part takes long: medians of the parts would add up to less, or more,
    than that of the whole.
    """
    inside = Working(clock, 1.0), Working(clock, 1.0)
    model = Working(clock, 0.0, *inside)
    with tl.profile(model, memory=False) as p:
        for seconds in ((1, 9), (9, 1), (1, 9), (9, 1), (8, 8), (2, 9)):
            inside[0].seconds, inside[1].seconds = seconds
            model(torch.rand(2))
    parts = [p[f"inside.{number}"] for number in (0, 1)]
    medians = [part.statistic("forward_seconds").median for part in parts]
    assert math.fsum(medians) != p.root.typical("forward_seconds")
    together = math.fsum(part.typical("forward_seconds") or 0.0 for part in parts)
    assert together == pytest.approx(p.root.typical("forward_seconds"))
