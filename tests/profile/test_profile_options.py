"""Times come from light steps; everything else is measured in the detailed ones."""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP
from torchlens._health.checking import Checking
from torchlens._profile.logged_steps import LoggedSession
from torchlens._profile.profile_options import ProfileOptions, StepPlan
from torchlens._profile.records import Signature


def signature(size: int) -> Signature:
    return True, True, ((size, 3),)


def plan(sizes: list[int], is_compiled: bool = False, **options: Any) -> str:
    """What is measured in steps with inputs of these sizes: t(imes), l(og), m(emory), b(oth)."""
    steps = StepPlan(ProfileOptions(**options))
    found = [steps.wanted(signature(size), False, is_compiled) for size in sizes]
    return "".join("tmlb"[wanted.memory + 2 * wanted.log] for wanted in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "btbtb" + "t" * 17),
        ({"memory": False}, "l" + "t" * 21),
        ({"check": "health", "level": "module"}, "btbtb" + "t" * 17),
        ({"level": "operation"}, "btbtbttt" + "l" * 14),
        ({"check": "nonfinite"}, "btbtbttt" + "l" * 14),
        ({"check": "health", "memory": False}, "ltltlttt" + "l" * 14),
        ({"check": "health", "stop": True}, "bbbbb" + "l" * 17),
    ],
    ids=str,
)
def test_detailed_and_light_steps_alternate(options, expected):
    assert plan([2] * 22, **options) == expected
    # Each kind by itself, as long as there are few.
    both = plan([2, 5] * 22, **options)
    assert both[::2] == both[1::2] == expected


@pytest.mark.parametrize("sizes", [[2, 5, 7], [2, 5, 7, 9, 11, 13], range(60)], ids=str)
@pytest.mark.parametrize("level", ["module", "operation"])
def test_enough_steps_are_light_whatever_the_shapes(sizes, level):
    steps = (list(sizes) * 20)[:60]
    found = plan(steps, level=level)
    assert found.count("t") >= 5
    assert found.count("b") >= 3


def test_a_compiled_model_has_no_light_steps_at_operation_level():
    """A log runs its source, which takes another time."""
    assert plan([2] * 6, level="operation", is_compiled=True) == "bbbbbl"
    assert plan([2] * 6, memory=False, is_compiled=True) == "tttttt"


def test_with_inputs_the_light_runs_come_first():
    def runs(**options: Any) -> list[tuple[int, Checking]]:
        asked = ProfileOptions(has_inputs=True, **options)
        steps = StepPlan(asked)
        wanted = [
            steps.wanted(signature(2), number < asked.warmup, False)
            for number in range(asked.num_runs)
        ]
        return [(each.memory + 2 * each.log, each.checking) for each in wanted]

    nothing, everything = (0, Checking.NOTHING), Checking.EVERYTHING
    assert runs() == [nothing] * 7 + [(3, everything)]
    operation = runs(level="operation", repeats=2, warmup=0)
    assert operation == [nothing, nothing, (3, everything), (2, everything)]
    health = [(3, everything), (2, everything), (2, everything)]
    assert runs(check="health") == [nothing] * 7 + health


@pytest.mark.parametrize(
    "options", [{"level": "operation"}, {"check": "nonfinite"}, {"check": "health"}], ids=str
)
def test_in_a_light_step_no_operation_is_logged_and_no_memory_measured(monkeypatch, options):
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
    assert [step.is_light for step in p.steps] == [False, True, False, True]
    assert [step.is_cold for step in p.steps] == [False, True, False, True]
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
