"""Random programs: log and plain run agree on values, parents, outputs and random numbers."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.compare import HOW, check_program, program_inputs
from tests.fuzz.machine import Program
from tests.fuzz.programs import programs
from tests.validate.proof import prove
from torchlens import ValueChangedError
from torchlens._capture.memory.saved_values import Memory
from torchlens._graph import edges


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(steps=programs, how=st.sampled_from(HOW), has_grad=st.booleans())
def test_random_programs_are_logged_as_they_run(steps, how, has_grad):
    assert check_program(steps, how, has_grad) > 0


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(steps=programs)
def test_the_logs_of_random_programs_are_proved(steps):
    report = prove(Program(steps), *program_inputs())
    assert report.passed, str(report)


# What random programs found, and a few by hand.
FOUND: dict[str, list[Any]] = {
    "a row of a product is written": [
        ("sin", 0, 0, 0),
        ("select", 2, 0, 0),
        ("add_", 3, 0, 0),
        ("add", 2, 2, 0),
    ],
    "a view is read after its base was written": [
        ("sin", 0, 0, 0),
        ("flatten", 2, 0, 0),
        ("add_", 2, 0, 0),
        ("sin", 3, 0, 0),
    ],
    "a result that went into its own argument is written over": [
        ("sin", 0, 0, 0),
        ("out", 2, 2, 0),
        ("flatten", 2, 0, 0),
        ("add_", 4, 0, 0),
    ],
    "a result that went elsewhere does not read what was there": [
        ("sin", 0, 0, 0),
        ("out", 0, 2, 0),
    ],
    "a module hands back a view that was written": [
        ("split", 0, 0, 0),
        ("module", 1, 2, 3, [("add_", 0, 0, 0)]),
        ("module", 0, 4, 3, [("mul_", 4, 0, 0), ("assign masked", 2, 0, 1)]),
    ],
    "running statistics are read after they were written": [
        ("batch_norm", 0, 0, 0),
        ("remember", 0, 1, 0),
    ],
}


def test_a_log_that_forgets_writes_is_noticed(monkeypatch):
    monkeypatch.setattr(edges._WrittenMemory, "may_differ", lambda self, given: False)
    with pytest.raises(AssertionError, match="has the parents"):
        check_program(FOUND["a row of a product is written"])


def test_a_log_that_saves_stale_values_is_noticed(monkeypatch):
    monkeypatch.setattr(Memory, "before_write", lambda self, targets: None)
    monkeypatch.setattr(Memory, "keep_copy", lambda self, entry, tensor: True)
    with pytest.raises((AssertionError, ValueChangedError)):
        check_program(FOUND["a row of a product is written"])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_once_went_wrong(name, how):
    assert check_program(FOUND[name], how) > 0
