"""Times come from steps in which nothing else is measured; what else is asked for is measured in
the others.
"""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP
from torchlens._health.checking import Checking
from torchlens._profile.measuring import times
from torchlens._profile.measuring.calls import Call, Signature, Step
from torchlens._profile.measuring.details import Details
from torchlens._profile.measuring.logged_session import LoggedSession
from torchlens._profile.options import ProfileOptions
from torchlens._profile.steps import StepRecord


def signature(size: int) -> Signature:
    return True, True, ((size, 3),)


def plan(
    sizes: list[int], is_compiled: bool = False, lost: tuple[int, ...] = (), **options: Any
) -> str:
    """What is done in steps with inputs of these sizes: t(imed), l(ogged), m(emory), b(oth).

    There is no log of what is compiled, nor, from some other reason, of the steps that are `lost`.
    """
    details, found = Details(ProfileOptions(**options)), ""
    for number, size in enumerate(sizes):
        wanted = details.wanted(signature(size), False, is_compiled)
        has_log = (
            wanted.log
            and number not in lost
            and (not is_compiled or options.get("level") == "operation")
        )
        details.has_run(signature(size), has_log, wanted.memory)
        found += "tmlb"[wanted.memory + 2 * has_log]
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "btbtb" + "t" * 17),
        ({"memory": False}, "b" + "t" * 21),
        ({"check": "health", "level": "module"}, "btbtb" + "t" * 17),
        ({"level": "operation"}, "btbtb" + "ttl" * 5 + "ll"),
        ({"check": "nonfinite"}, "btbtb" + "ttl" * 5 + "ll"),
        ({"check": "health"}, "btbtb" + "ttl" * 5 + "ll"),
        ({"check": "health", "stop": True}, "bbb" + "l" * 19),
    ],
    ids=str,
)
def test_detailed_and_timed_steps_take_turns(options, expected):
    """The step after a detailed one counts less: Python has to learn anew what the log had
    changed.
    """
    assert plan([2] * 22, **options) == expected
    # Each kind by itself, as long as there are few.
    both = plan([2, 5] * 22, **options)
    for own in (both[::2], both[1::2]):
        assert own[:5] == expected[:5]
        assert own.count("b") == expected.count("b")


@pytest.mark.parametrize(
    "sizes", [[2], [2, 5], [2, 2, 5], [2, 5, 7], [2, 5, 7, 9, 11, 13]], ids=str
)
@pytest.mark.parametrize("level", ["module", "operation"])
def test_there_are_timed_steps_that_do_not_follow_a_detailed_one(sizes, level):
    steps = sizes * 20
    found = plan(steps, level=level)
    warm = [
        size
        for size, own, before in zip(steps[1:], found[1:], found, strict=False)
        if own == before == "t"
    ]
    assert len(warm) >= 5
    if len(set(sizes)) < 4:
        assert set(warm) == set(sizes)


def test_with_many_kinds_two_other_steps_follow_each_detailed_one():
    assert plan(list(range(1, 23))) == "bbbb" + "ttb" * 6
    # At operation level, five of all kinds together are timed.
    assert plan(list(range(1, 25)), level="operation") == "bbbb" + "ttb" * 5 + "b" * 5
    # Where the same four come again and again, each has both.
    four = plan([1, 2, 3, 4] * 6, level="operation")
    for number in range(4):
        assert {"t", "b"} <= set(four[number::4])


def test_a_compiled_model_is_not_timed_at_operation_level():
    """A log runs its source, which is something else."""
    assert plan([2] * 6, level="operation", is_compiled=True) == "bbblll"
    assert plan([2] * 6, is_compiled=True) == "mtmtmt"


def test_a_step_that_could_not_be_logged_is_made_up_for_in_the_next():
    assert plan([2] * 4, lost=(0,)) == "mbtt"
    assert plan([2] * 4, lost=(0,), level="operation") == "mbbt"


def test_our_own_runs_are_detailed_first_and_then_timed():
    def runs(**options: Any) -> list[tuple[int, Checking]]:
        asked = ProfileOptions(has_inputs=True, **options)
        details = Details(asked)
        wanted = [
            details.wanted(signature(2), number < asked.warmup, False)
            for number in range(asked.num_runs)
        ]
        return [(each.memory + 2 * each.log, each.checking) for each in wanted]

    nothing, everything = (0, Checking.NOTHING), Checking.EVERYTHING
    assert runs() == [nothing] * 2 + [(3, everything)] + [nothing] * 5
    assert runs(level="operation", repeats=2, warmup=0) == [
        (3, everything),
        (2, everything),
        nothing,
        nothing,
    ]
    assert (
        runs(check="health")
        == [nothing] * 2 + [(3, everything)] + [(2, everything)] * 2 + [nothing] * 5
    )


@pytest.mark.parametrize(
    "options", [{"level": "operation"}, {"check": "nonfinite"}, {"check": "health"}], ids=str
)
def test_in_a_timed_step_no_operation_is_logged_and_no_memory_measured(monkeypatch, options):
    model, sessions = MLP(), []
    run = LoggedSession.run

    def counted(self, args, kwargs):
        sessions.append(1)
        return run(self, args, kwargs)

    monkeypatch.setattr(LoggedSession, "run", counted)
    num_sessions = []
    with tl.profile(model, **options) as p:
        for _ in range(4):
            model(torch.rand(2, 4)).sum().backward()
            num_sessions.append(len(sessions))
    assert num_sessions == [1, 1, 2, 2]
    assert (
        [step.is_light for step in p.steps]
        == [step.is_cold for step in p.steps]
        == [False, True, False, True]
    )
    assert [step.peak_bytes is None for step in p.steps] == [False, True, False, True]
    assert [step.has_flops for step in p.steps] == [True, False, True, False]
    assert {operation.step for operation in p.operations} == {1, 3}
    assert p.root.typical_steps.timed == {2, 4}
    assert p.history is not None
    text = " ".join(str(p).split())
    assert (
        "Of 4 steps, times are those of 2, in which nothing else was measured, memory is that of 2"
        in text
    )
    # Operations are those of the steps that have any.
    assert "linear" in str(p.summary(by="operation"))
    assert any(label.startswith("linear") for label in p.overlay("forward_time"))


@pytest.mark.parametrize("level", ["module", "operation"])
def test_one_step_is_measured_in_full(level):
    model = nn.Linear(3, 4)
    with tl.profile(model, level=level) as p:
        model(torch.rand(2, 3))
    assert p.root.typical("forward_seconds") is not None
    assert p.root.typical("flops") is not None
    assert p.root.typical("peak_bytes") is not None


def charged(
    calls: list[tuple[int, str, float, float]], timed: set[int], looking: float = 100.0
) -> list[tuple[float, float]]:
    """What calls (step, address, own forward and own backward seconds) are said to take; '' is
    around the others.

    `looking` is what each took in addition, forward and backward, because it was looked at.
    """
    made: list[Call] = []
    found: list[times.CallTimes] = []
    steps = {number: Step(number) for number, *_ in calls}
    for number, address, forward, backward in calls:
        parent = next(
            (call for call in reversed(made) if call.step.number == number and not call.address),
            None,
        )
        call = Call(len(made), steps[number], address, "Module", parent if address else None)
        call.backward_self, call.end = backward + looking, forward + looking
        if call.parent is not None:
            call.parent.end += call.end
        made.append(call)
        found.append(times.CallTimes(forward, forward, backward, backward, 0.0, 0.0, 0.0))
    records = [step_record(number, details=0 if number in timed else 3) for number in steps]
    return [(each.forward, each.backward) for each in times.agreeing_times(made, found, records)]


def step_record(number: int, details: int) -> StepRecord:
    return StepRecord(
        number=number, is_warmup=False, forward_seconds=1.0, backward_seconds=1.0,
        num_backward_passes=1, peak_bytes=None,
        added_bytes=None, details=details,
    )  # fmt: skip


def test_detailed_steps_are_charged_what_timed_ones_took():
    """What a module does itself takes as long on average; what is inside adds up."""
    found = charged(
        [
            (1, "", 4.0, 8.0), (1, "a", 6.0, 0.0),
            (2, "", 2.0, 4.0), (2, "a", 3.0, 1.0),
            (3, "", 8.0, 8.0), (3, "a", 6.0, 0.0), (3, "only here", 5.0, 5.0),
        ],
        timed={2},
    )  # fmt: skip
    assert found[2:4] == [(5.0, 5.0), (3.0, 1.0)]  # as it was
    own_1, own_3 = 4.0 * 2.0 / 6.0, 8.0 * 2.0 / 6.0
    assert found[1] == (3.0, 1.0)
    assert found[0] == pytest.approx((own_1 + 3.0, 4.0 + 1.0))
    assert found[4] == pytest.approx((own_3 + 3.0 + 5.0, 4.0 + 1.0 + 5.0))
    assert found[6] == (5.0, 5.0)  # an estimate is all there is


def test_an_estimate_that_is_far_off_is_replaced():
    assert (
        charged([(1, "", 0.0, 1e-9), (2, "", 2.0, 4.0), (3, "", 1e-6, 1e-9)], timed={2})
        == [(2.0, 4.0)] * 3
    )


def test_no_call_is_charged_more_than_it_took_with_the_looking():
    assert charged([(1, "", 1.0, 2.0), (2, "", 9.0, 9.0)], timed={2}, looking=0.5)[0] == (1.5, 2.5)


def test_without_timed_steps_estimates_stay():
    assert charged([(1, "", 1.0, 2.0), (2, "", 3.0, 4.0)], timed=set()) == [(1.0, 2.0), (3.0, 4.0)]
