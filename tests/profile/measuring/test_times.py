"""Times are those of the model, not of looking at it, and they add up. The clock stands still until
it is told to go on.
"""

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model
from tests.profile import profile_records
from torchlens._capture import current, recorder, timed_recorder
from torchlens._capture.gradients import backward_hooks as backward
from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._capture.module_tracker import ModuleTracker
from torchlens._capture.own_time import LONGEST_HANDLING, WHILE, OwnTime, coldness_of
from torchlens._health.tensor_statistics import has_nonfinite
from torchlens._profile import profile as profile_module
from torchlens._profile.measuring import (
    backward_times,
    calibration,
    calls,
    checks,
    kept_tensors,
    logged_session,
    times,
    watcher,
)
from torchlens._profile.measuring.calls import Call, Step
from torchlens._profile.options import ProfileOptions
from torchlens._profile.output import table
from torchlens._profile.steps import StepRecord, TypicalSteps
from torchlens._recording import trees
from torchlens._text.problems import Problems

US = 1e-6


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
    for module in (backward, recorder, timed_recorder, logged_session, watcher):
        monkeypatch.setattr(module, "perf_counter", clock.read)
    monkeypatch.setattr(current._Current, "clock", staticmethod(clock.read))
    monkeypatch.setattr(
        profile_module, "measure_residuals", lambda level, check, has_grad: calibration.NOTHING
    )
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
def test_what_looking_takes_is_in_no_time(clock, monkeypatch, options):
    model = working(clock)
    # Everything that is done for the profile is slow, before and after calls and operations.
    monkeypatch.setattr(watcher, "note_tensors", clock.slow(calls.note_tensors, 100.0))
    monkeypatch.setattr(watcher, "named_tensors", clock.slow(trees.named_tensors, 50.0))
    monkeypatch.setattr(watcher, "saved_storages", clock.slow(kept_tensors.saved_storages, 30.0))
    monkeypatch.setattr(checks.Checks, "_show", clock.slow(checks.Checks._show, 20.0))
    monkeypatch.setattr(
        logged_session.Marker, "begin", clock.slow(logged_session.Marker.begin, 7.0)
    )
    monkeypatch.setattr(logged_session.Marker, "mark", clock.slow(logged_session.Marker.mark, 3.0))
    tracker = ModuleTracker
    monkeypatch.setattr(tracker, "enter", clock.slow(tracker.enter, 11.0))
    monkeypatch.setattr(tracker, "leave", clock.slow(tracker.leave, 13.0))
    with tl.profile(model, **options) as p:
        for _ in range(3):
            model(torch.rand(2, requires_grad=True)).sum().backward()
    assert p.problems == []
    for address, span in SPANS.items():
        for call in p[address].calls:
            assert call.forward_seconds == pytest.approx(span, abs=1e-9)
            assert call.forward_self_seconds == pytest.approx(
                model.get_submodule(address).seconds, abs=1e-9
            )
            assert call.own_seconds > 100 or not len(model.get_submodule(address).inside)
    assert [step.forward_seconds for step in p.steps] == pytest.approx([4.5] * 3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_time_of_an_operation_is_in_that_of_its_module(clock, options):
    """Also beside one that leaves no row (`shape`), and one that is made of others
    (`unflatten`).
    """
    with torch.library._scoped_library("torchlens_tests", "DEF") as library:
        library.define("slow(Tensor x) -> Tensor")
        library.impl("slow", clock.slow(torch.clone, 5.0), "CompositeExplicitAutograd")

        def inner(self, x):
            return torch.ops.torchlens_tests.slow(x.unflatten(0, (1, 2)).flatten())

        model = Model(lambda self, x: self.inner(x) * self.inner(x).shape[0], inner=Model(inner))
        with tl.profile(model, **options) as p:
            model(torch.rand(2))
    assert p.problems == []
    assert [call.forward_seconds for call in p["inner"].calls] == pytest.approx([5.0, 5.0])
    assert p.root.calls[0].forward_self_seconds == pytest.approx(0.0, abs=1e-9)
    if p.operations:
        assert sum(
            each.forward_seconds for each in p.operations if each.layer_type == "slow"
        ) == pytest.approx(10.0)


def test_backward_times_leave_out_what_looking_takes(clock, monkeypatch):
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
    monkeypatch.setattr(checks.Checks, "_show", clock.slow(checks.Checks._show, 20.0))
    monkeypatch.setattr(checks, "has_nonfinite", clock.slow(has_nonfinite, 10.0))
    choices: list[Any] = [{}, {"check": "health"}]
    for options in choices:
        with tl.profile(model, **options) as p:
            model(torch.rand(3, requires_grad=True)).sum().backward()
        assert p["first"].calls[0].backward_seconds == pytest.approx(2.0)
        assert p["second"].calls[0].backward_seconds == pytest.approx(5.0)
        assert p.root.calls[0].backward_seconds == pytest.approx(7.0)
        assert p.steps[0].backward_seconds == pytest.approx(7.0)


def call_of(index, parent, start, end, own=0.0, **numbers):
    step = parent.step if parent else Step(1)
    call = Call(index, step, f"m{index}", "Module", parent)
    call.start, call.end, call.clock.own_seconds = start, end, own
    for name, number in numbers.items():
        setattr(
            call if name in ("num_events", "num_nodes", "backward_self") else call.clock,
            name,
            number,
        )
    return call


def test_what_no_clock_sees_is_taken_off_by_number():
    residuals = calibration.Residuals(
        operation=2 * US, short_operation_share=0.5, read=1 * US, module=3 * US,
        module_around=4 * US,
        event=0.1 * US, node=6 * US,
    )  # fmt: skip
    root = call_of(
        0,
        None,
        0.0,
        1000 * US,
        100 * US,
        num_operations=10,
        num_reads=5,
        num_modules=2,
        short_seconds=20 * US,
    )
    plain = call_of(1, root, 0.0, 200 * US, num_events=50, backward_self=100 * US, num_nodes=5)
    logged = call_of(2, root, 0.0, 200 * US, num_operations=1, num_events=50)
    found = times.call_times([root, plain, logged], {False: residuals})
    assert found[0].forward == pytest.approx(
        (1000 - 100 - 10 * 2 - 20 * 0.5 - 5 * 1 - 2 * (3 + 4) - 3) * US
    )
    assert found[0].own == pytest.approx(1000 * US - found[0].forward)
    assert found[0].estimated == pytest.approx((10 * 2 + 20 * 0.5 + 5 * 1 + 2 * (3 + 4) + 3) * US)
    assert found[1].forward == pytest.approx((200 - 50 * 0.1 - 3) * US)
    assert found[1].backward == found[1].backward_self == pytest.approx((100 - 5 * 6) * US)
    assert found[0].backward == found[1].backward
    assert found[2].forward == pytest.approx((200 - 50 * 0.1 - 2 - 3) * US)


def test_in_a_step_that_is_only_timed_a_module_leaves_colder_caches_behind_than_a_log_does():
    residuals = calibration.Residuals(module=3 * US, module_around=4 * US, timed_module=5 * US)
    root = call_of(0, None, 0.0, 200 * US, 10 * US, num_modules=2)
    inner = call_of(1, root, 0.0, 50 * US)
    tiny = call_of(2, root, 0.0, 7 * US)
    found = times.call_times([root, inner, tiny], {False: residuals})
    assert found[0].forward == pytest.approx((200 - 10 - 3 - 2 * (3 + 4) - 5 * (5 - 3)) * US)
    assert found[1].forward == pytest.approx((50 - 5) * US)
    assert found[2].forward == pytest.approx((7 - 3) * 0.75 * US)  # of which something is left
    root.step.has_log = True
    found = times.call_times([root, inner, tiny], {False: residuals})
    assert [each.forward for each in found[1:]] == pytest.approx([(50 - 3) * US, (7 - 3) * US])


def test_times_add_up_even_where_more_is_taken_off_than_there_was():
    residuals = calibration.Residuals(operation=10 * US)
    root = call_of(0, None, 0.0, 120 * US, num_operations=11)
    inner = call_of(1, root, 0.0, 100 * US, num_operations=1)
    tiny = call_of(2, root, 0.0, 5 * US, num_operations=9)
    found = times.call_times([root, inner, tiny], {False: residuals})
    assert found[2].forward == 0.0
    assert found[0].forward == pytest.approx(90 * US)  # not the 10 that would be left
    assert found[0].forward_self == 0.0
    assert all(each.forward >= 0 and each.forward_self >= 0 for each in found)


def test_operations_take_no_longer_than_their_call_does_by_itself():
    class Mark:
        call = 0

    class Done:
        def __init__(self, seconds, num_events=0):
            self.mark, self.seconds, self.num_events = Mark, seconds, num_events
            self.step = Step(1)

    residuals = calibration.Residuals(cold_share=0.25, event=1 * US)
    operations: list[Any] = [Done(8 * US), Done(100 * US, num_events=5)]
    times_of_call = times.CallTimes(200 * US, 200 * US, 0, 0, 0, 0, 0)
    found = times.operation_times(operations, [times_of_call], {False: residuals})
    assert found == pytest.approx(
        [6 * US, (100 - 20 * 0.25 - 5) * US]
    )  # of the first 20 microseconds
    found = times.operation_times(
        operations, [times_of_call._replace(forward_self=48 * US)], {False: residuals}
    )
    assert found == pytest.approx([3 * US, 45 * US])


def test_backward_times_of_operations_are_corrected_as_those_of_their_call():
    class Mark:
        call = 0

    class Done:
        def __init__(self, seconds):
            self.mark, self.backward_seconds = Mark, seconds

    class Made:
        index, original, backward_self = 0, None, 100 * US

    calls_made: list[Any] = [Made]
    operations: list[Any] = [
        Done(60 * US),
        Done(20 * US),
        Done(None),
    ]  # the rest went to the gradients of parameters
    times_of_call = times.CallTimes(0, 0, 50 * US, 50 * US, 0, 0, 0)
    found = times.backward_operation_times(operations, calls_made, [times_of_call])
    assert found[:2] == pytest.approx([30 * US, 10 * US])
    assert found[2] is None
    # Charged twice where one backward pass runs inside another: still no more than the call.
    operations = [Done(150 * US), Done(50 * US)]
    found = times.backward_operation_times(operations, calls_made, [times_of_call])
    assert found == pytest.approx([37.5 * US, 12.5 * US])


def run_of(sequence, start, end, task=0, own_start=0.0, own_end=0.0):
    return NodeRun(sequence, None, "", start, end, 0, 0, 0, task, own_start, own_end)


def test_what_autograd_does_between_two_nodes_belongs_to_the_next():
    owners = backward_times.Owners()
    first, second = call_of(0, None, 0, 0), call_of(1, None, 0, 0)
    owners.enter(0, first)
    owners.enter(10, second)
    owners.enter(20, None)
    runs = [
        run_of(25, 0.0, 1.0),  # the loss: nobody's
        run_of(
            15, 2.0, 3.0, own_start=0.5, own_end=0.5
        ),  # 1.0 since the last, half of which was spent on looking
        run_of(5, 9.0, 9.5, task=1, own_start=0.5, own_end=0.5),  # inside the next
        run_of(5, 4.0, 10.0, own_start=0.5, own_end=1.5),
    ]
    charged = [
        (call.index, seconds) for _, call, seconds in backward_times.charge(runs, owners, {})
    ]
    assert [index for index, _ in charged] == [1, 0, 0]
    assert [seconds for _, seconds in charged] == pytest.approx([1.5, 0.5, 5.5])


def step_of(number, forward, backward=None):
    return StepRecord(
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


def test_times_are_those_of_the_steps_in_which_nothing_else_was_measured():
    model = nn.Linear(3, 4)
    with tl.profile(model) as p:
        for size in (2, 2, 5, 2, 2, 2):
            model(torch.rand(size, 3))
    assert [step.is_light for step in p.steps] == [False, True, False, False, True, False]
    assert [step.peak_bytes is None for step in p.steps] == [step.is_light for step in p.steps]
    typical = p.root.typical_steps
    assert typical.timed == {2, 3, 5}  # the third is the only one of its kind
    seconds = p.root.by_step("forward_seconds")
    assert p.root.statistic("forward_seconds").minimum == min(seconds[step] for step in (2, 3, 5))
    assert p.root.statistic("peak_bytes").num == 4
    text = " ".join(str(p).split())
    assert (
        "Of 6 steps, times are those of 2, in which nothing else was measured, memory is that of "
        "4, FLOPs" in text
    )
    for memory in (True, False):
        with tl.profile(model, memory=memory) as p:
            for _ in range(2):
                model(torch.rand(2, 3))
        assert p.root.typical_steps.timed == {2}  # the first is for FLOPs
    with tl.profile(model, check="nonfinite", stop=True) as p:
        for _ in range(2):
            model(torch.rand(2, 3))
    assert p.root.typical_steps.timed == {1, 2}


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


def test_with_inputs_of_ever_new_shapes_some_steps_are_for_their_times_alone():
    model = nn.Linear(3, 4)
    with tl.profile(model) as p:
        for size in range(1, 10):
            model(torch.rand(size, 3))
    assert [step.number for step in p.steps if step.is_light] == [5, 6, 8, 9]
    assert [step.has_flops for step in p.steps] == [not step.is_light for step in p.steps]
    assert p.root.typical_steps.timed == {6, 9}
    with tl.profile(model, level="operation") as p:
        for size in range(1, 10):
            model(torch.rand(size, 3))
    assert [step.number for step in p.steps if step.is_light] == [5, 6, 8, 9]
    assert [step.has_flops for step in p.steps] == [not step.is_light for step in p.steps]
    assert {operation.step for operation in p.operations} == {1, 2, 3, 4, 7}
    assert p.root.typical_steps.timed == {6, 9}


def test_a_step_after_a_detailed_one_counts_only_if_there_is_no_better():
    model = nn.Linear(3, 4)
    with tl.profile(model) as p:
        for _ in range(9):
            model(torch.rand(2, 3))
    assert [step.is_cold for step in p.steps] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert p.root.typical_steps.timed == {7, 8, 9}
    assert "Of 9 steps, times are those of 3, in which nothing else was measured" in " ".join(
        str(p).split()
    )
    with tl.profile(model, skip=1, measure=1, every=2, max_steps=9) as p:  # others lie between
        for _ in range(12):
            model(torch.rand(2, 3))
    assert not any(step.is_cold for step in p.steps)


def test_what_is_printed_adds_up():
    """In each step another part takes long: medians of the parts would add up to less, or more,
    than that of the whole.
    """
    clock = Clock()
    inside = Working(clock, 1.0), Working(clock, 1.0)
    model = Working(clock, 0.0, *inside)
    with pytest.MonkeyPatch.context() as patch:
        for module in (backward, recorder, timed_recorder, logged_session, watcher):
            patch.setattr(module, "perf_counter", clock.read)
        patch.setattr(current._Current, "clock", staticmethod(clock.read))
        patch.setattr(
            profile_module, "measure_residuals", lambda level, check, has_grad: calibration.NOTHING
        )
        with tl.profile(model, memory=False) as p:
            for inside[0].seconds, inside[1].seconds in ((1, 9), (9, 1), (1, 9), (9, 1), (8, 8)):
                model(torch.rand(2))
    parts = [p[f"inside.{number}"] for number in (0, 1)]
    assert math.fsum(part.statistic("forward_seconds").median for part in parts) != p.root.typical(
        "forward_seconds"
    )
    together = math.fsum(part.typical("forward_seconds") or 0.0 for part in parts)
    assert together == pytest.approx(p.root.typical("forward_seconds"))


def test_the_table_says_what_measuring_took_and_what_is_rough():
    def summary(own, estimated):
        times = {"forward_seconds": 1e-3, "own_seconds": own, "estimated_seconds": estimated}
        calls = [profile_records.call(step, "", **times) for step in (2, 3)]
        return str(
            table.summary(
                profile_records.made_up(root=profile_records.module("", "Net", calls, []))
            )
        )

    assert "Measuring took" not in summary(1e-5, 0.0)
    assert "Measuring took another 2.00 ms of a forward pass" in summary(2e-3, 1e-4)
    assert "Rough" not in summary(2e-3, 2e-4)
    for estimated in (4e-4, 1.5e-3):
        assert "is over 30 % of what is left: Net." in summary(2e-3, estimated).replace("\n  ", " ")


def test_the_table_says_which_backward_times_are_rough():
    def summary(estimated):
        times = {"backward_seconds": 1e-3, "backward_estimated_seconds": estimated}
        calls = [profile_records.call(step, "", **times) for step in (2, 3)]
        return str(
            table.summary(
                profile_records.made_up(root=profile_records.module("", "Net", calls, []))
            )
        )

    assert "Rough" not in summary(2e-4)
    assert "the backward times of Net." in summary(4e-4)


def test_what_is_taken_off_backward_times_is_told_and_never_more_than_there_was():
    root = call_of(0, None, 0.0, 0.0, backward_self=20 * US, num_nodes=1)
    inner = call_of(1, root, 0.0, 0.0, backward_self=10 * US, num_nodes=4)
    found = times.call_times([root, inner], {False: calibration.Residuals(node=5 * US)})
    assert [call.backward for call in found] == pytest.approx([15 * US, 0.0])
    assert [call.backward_estimated for call in found] == pytest.approx([15 * US, 10 * US])


def test_an_operation_is_cold_if_many_others_have_run_since_it_did():
    class Counted(torch.nn.Module):
        def forward(self, x):
            for _ in range(40):
                x = x * 1.01
            return x

    class Varied(torch.nn.Module):
        def forward(self, x):
            for _ in range(4):
                for name in (
                    "sin",
                    "cos",
                    "tan",
                    "exp",
                    "abs",
                    "neg",
                    "sqrt",
                    "relu",
                    "tanh",
                    "ceil",
                    "floor",
                    "sign",
                ):
                    x = getattr(x, name)()
            return x

    def coldness(model):
        measuring = watcher.Watcher(model, ProfileOptions(level="operation"), None, Problems())
        measuring.start()
        try:
            model(torch.rand(3))
        finally:
            measuring.stop()
        clock = measuring.ledger.calls[0].clock
        return clock.coldness / clock.num_operations

    assert coldness(Counted()) == pytest.approx(1 / 40)  # the first
    assert coldness(Varied()) == pytest.approx((1 + 3 * 11 / WHILE) / 4)


def test_what_coldness_costs_is_taken_off():
    step = Step(1)
    call = Call(0, step, "", "Net", None)
    call.end, call.clock.coldness = 100 * US, 5.0
    residuals = calibration.Residuals(cold_operation=4 * US)
    for has_grad, expected in ((True, 80 * US), (False, 100 * US)):
        step.signature = True, has_grad, ()
        found = times.call_times([call], {True: residuals, False: calibration.NOTHING})
        assert found[0].forward == pytest.approx(expected)


def test_where_handling_an_operation_takes_longer_what_no_clock_sees_does_too():
    residuals = calibration.Residuals(operation=2 * US, handling=10 * US)
    for handling, expected in ((10 * US, 60 * US), (20 * US, 20 * US), (5 * US, 80 * US)):
        call = call_of(
            0, None, 0.0, 100 * US, num_operations=20, num_plain=10, handling_seconds=10 * handling
        )
        assert times.call_times([call], {False: residuals})[0].forward == pytest.approx(expected)


def test_handling_is_without_checks_and_without_what_others_do_meanwhile(clock, monkeypatch):
    class Look:
        def operation(self, _observed, _result):
            clock.now += 1.0

        def boundary(self, *_arguments):
            pass

    def handling(takes):
        own = OwnTime()
        with monkeypatch.context() as patched:  # which is asked for twice
            patched.setattr(
                logged_session, "next_sequence", clock.slow(backward.next_sequence, takes / 2)
            )
            marker = logged_session.Marker(own, lambda: 0, Look())
            logged_session.LoggedSession(nn.ReLU(), marker).run([torch.rand(3)], {})
        return own.handling_seconds

    assert handling(10 * US) == pytest.approx(10 * US)
    assert handling(1.0) == LONGEST_HANDLING


def test_a_cell_that_takes_long_to_be_handled_does_not_make_the_machine_slow():
    """Handling it takes longer for what it is given, not because everything takes longer."""
    measuring = watcher.Watcher(
        model := nn.LSTMCell(4, 4), ProfileOptions(level="operation"), None, Problems()
    )
    try:
        measuring.start()
        model(torch.rand(2, 4), (torch.rand(2, 4), torch.rand(2, 4)))
    finally:
        measuring.stop()
    counted = measuring.ledger.calls[0].clock
    assert (counted.num_operations, counted.num_plain, counted.handling_seconds) == (1, 0, 0.0)


class Disturbed:
    """Work whose runs others disturb, all but one in each turn, on a machine that is not as fast in
    each.
    """

    def __init__(
        self, clock, own, plain, seen, num_operations=1, num_modules=0, short=0.0, coldness=0.0
    ):
        self.clock, self.own, self.seconds = clock, own, (plain, seen)
        self.counts = num_operations, num_modules, short, coldness
        self.is_seen, self.number = False, 0

    def __call__(self, x):
        self.number += 1
        is_quiet = self.number % calibration._ROUNDS == 1
        self.clock.now += self.seconds[self.is_seen] + (
            0 if is_quiet else (2 + self.number % 7) * 10 * US
        )
        if self.is_seen:
            num_operations, num_modules, short, coldness = self.counts
            self.own.num_operations += num_operations
            self.own.num_modules += num_modules
            self.own.short_seconds += short
            self.own.coldness += coldness
            self.own.seconds += 5 * US
            self.clock.now += 5 * US

    def excess(self):
        """What is found of it."""
        found = calibration._Excess(self)
        plain, seen = self.seconds
        for turn in range(calibration._TURNS):
            # Quick for a moment, in which nobody looks; busy in between; disturbed at last, while
            # somebody looks.
            busy = 30 * US * (turn % 3)
            quick = min(plain, 5 * US) if turn == 0 else 0.0
            disturbed = 500 * US if turn > calibration._TURNS - 4 else 0.0
            self.seconds = plain + busy - quick, seen + busy + disturbed
            self.is_seen = False
            found.run_plain(torch.zeros(1))
            self.is_seen = True
            found.run_seen(torch.zeros(1), self.own)
        return found


def test_calibration_charges_nobody_with_what_others_do_to_the_machine(monkeypatch):
    clock, own = Clock(), OwnTime()
    monkeypatch.setattr(calibration, "perf_counter", clock.read)
    model = calibration._Measured()
    model.of_views = Disturbed(clock, own, 10 * US, 30 * US, 10, short=10 * US).excess()  # 2 each
    model.of_sums = Disturbed(clock, own, 20 * US, 50 * US, 10, short=30 * US).excess()  # 3 each
    model.of_modules = Disturbed(
        clock, own, 6 * US, 18 * US, 0, len(model.nothings)
    ).excess()  # 2 each
    # 40 operations: 60 by number, 100 by what they take, 10 for the modules, and 44 that are left.
    model.of_layers = Disturbed(clock, own, 200 * US, 414 * US, 40, 5, 200 * US, 22.0).excess()
    # 10 operations: 15 by number, 15 by what they take, and 24 that are left.
    model.of_scan = Disturbed(clock, own, 20 * US, 74 * US, 10, 0, 30 * US, 12.0).excess()
    model.of_cells = Disturbed(
        clock, own, 60 * US, 60 * US + 6 * (1.5 + 5 + 2 + 7) * US, 6, 6, 60 * US
    ).excess()
    model.of_reads = Disturbed(clock, own, 1 * US, 2 * US).excess()
    found = model.found()
    assert found.operation == pytest.approx(1.5 * US)
    assert found.short_operation_share == pytest.approx(0.5)
    assert found.module + found.module_around == pytest.approx(2 * US)
    assert found.cold_operation == pytest.approx(2 * US)
    assert found.cell == pytest.approx(7 * US)
    # If all runs of the layers were disturbed, the rest cannot be theirs: it is cut to twice the
    # 170 that is known.
    model.of_layers = Disturbed(clock, own, 200 * US, 9000 * US, 40, 5, 200 * US, 22.0).excess()
    assert model.found().cold_operation == pytest.approx((2 * 170 + 24) / (22 + 12) * US)
    # Nor do cells take more than twice as long because somebody looks; of a turn in the middle they
    # take 90.
    model.of_cells = Disturbed(clock, own, 60 * US, 6000 * US, 6, 6, 60 * US).excess()
    assert model.found().cell == pytest.approx(15 * US)


def test_backward_nodes_that_have_not_run_for_a_while_are_charged_more():
    assert coldness_of("abba" + "c" * WHILE + "a") == [
        1,
        1,
        0,
        2 / WHILE,
        *([1] + [0] * (WHILE - 1)),
        1,
    ]

    class Net(nn.Module):
        def forward(self, x):
            return x.exp().mul(2).mul(3).sin()

    measuring = watcher.Watcher(model := Net(), ProfileOptions(), None, Problems())
    try:
        measuring.start()
        model(torch.rand(3, requires_grad=True)).sum().backward()
    finally:
        measuring.stop()
    root = measuring.ledger.calls[0]
    assert root.num_nodes == 5  # with the one that adds to the gradient of the input
    assert root.node_coldness == 4  # the second product is warm
    call = call_of(0, None, 0.0, 0.0, backward_self=100 * US)
    call.node_coldness = 4.0
    assert times.call_times([call], {False: calibration.Residuals(cold_node=5 * US)})[
        0
    ].backward == pytest.approx(80 * US)


def test_calibration_leaves_out_what_letting_go_of_a_result_takes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(calibration, "perf_counter", clock.read)

    class Graph:
        def __init__(self) -> None:
            clock.now += 3

        def __del__(self) -> None:
            clock.now += 40

    assert calibration._seconds(Graph) == 3
    assert clock.now == 1043  # and it is gone


def test_cells_of_recurrent_networks_are_counted_and_charged():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long, self.gated, self.simple = (
                nn.LSTMCell(4, 4),
                nn.GRUCell(4, 4),
                nn.RNNCell(4, 4),
            )

        def forward(self, x):
            state = self.long(x)
            for _ in range(2):
                state = self.long(x, state)
            return self.gated(x, state[0]) + self.simple(x)

    measuring = watcher.Watcher(model := Net(), ProfileOptions(level="operation"), None, Problems())
    try:
        measuring.start()
        model(torch.rand(2, 4))
    finally:
        measuring.stop()
    counts = {call.address: call.clock.num_cells for call in measuring.ledger.calls}
    assert counts == {"": 4, "long": 1, "gated": 1, "simple": 0}
    root = call_of(0, None, 0.0, 100 * US, num_cells=4)
    assert times.call_times([root], {False: calibration.Residuals(cell=10 * US)})[
        0
    ].forward == pytest.approx(60 * US)


def test_calibration_can_be_had_in_inference_mode_too():
    with torch.inference_mode():
        calibration._measure_backward.cache_clear()
        assert calibration.measure_residuals("operation", None, True).node >= 0


def test_at_module_level_checks_are_of_gradients_only(monkeypatch):
    asked = []

    def measure_forward(check, has_grad):
        asked.append(check)
        return calibration.NOTHING

    monkeypatch.setattr(calibration, "_measure_forward", measure_forward)
    nodes = {"nonfinite": calibration._NodeResiduals(1.0, 2.0, 3.0)}
    monkeypatch.setattr(calibration, "_measure_backward", nodes.__getitem__)
    for level in ("module", "operation"):
        assert calibration.measure_residuals(level, "nonfinite", True).cold_node == 3
    assert asked == [None, "nonfinite"]


def test_calibration_finds_something_and_leaves_nothing():
    before = torch.get_rng_state(), torch.is_grad_enabled()
    found = calibration.measure_residuals("operation", None, True)
    assert found.operation > 0 or found.short_operation_share > 0
    assert all(0 <= each <= 1 for each in found)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.is_grad_enabled()
    assert current.CURRENT.watcher is None
    with torch.overrides.BaseTorchFunctionMode():
        assert calibration.measure_residuals("operation", None, True) == calibration.NOTHING
