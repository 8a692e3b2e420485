"""Replays of real architectures and of random programs equal reruns bit for bit, or are refused."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import torchlens as tl
from tests.edit.architectures import ARCHITECTURES
from tests.fuzz.compare import program_inputs
from tests.fuzz.machine import Program
from tests.fuzz.programs import programs

Tensor = torch.Tensor


def shifted(value: Tensor) -> Tensor:
    return value * 0.5 + 0.1 if value.is_floating_point() else value


def compare(history: tl.ModelHistory, again: Any, entries: list[tl.LayerEntry]) -> int:
    """The number of entries at which a replay of an edit equals a rerun; the others are refused."""
    equal = 0
    for entry in entries:
        try:
            out = history.replay({entry: shifted})
        except tl.EditError:
            continue
        if out.certificate.kind == "not shown":  # it returned its argument
            continue
        new = again({entry: shifted})
        expected = [each.tensor_contents for each in new if each.is_output_layer]
        for one, other in zip(expected, out.outputs.values(), strict=True):
            assert torch.equal(one, other), entry.layer_label
        assert out.certificate.kind == "bit-equal"
        equal += 1
    return equal


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_edits_of_architectures_replay_as_they_rerun(name: str) -> None:
    model, args, kwargs = ARCHITECTURES[name].make()
    history = tl.log_forward_pass(model, args, kwargs)
    entries = [each for each in history if not each.is_output_layer]
    entries = entries[:: 1 + len(entries) // 8]
    num = compare(history, lambda edits: history.rerun(model, args, kwargs, edits=edits), entries)
    assert num > len(entries) // 2


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(steps=programs)
def test_edits_of_random_programs_replay_as_they_rerun(steps: Any) -> None:
    model = Program(steps)

    def logged(edits: Any = None) -> Any:
        torch.manual_seed(0)
        if edits is None:
            return tl.log_forward_pass(model, program_inputs())
        return history.rerun(model, program_inputs(), edits=edits)

    history = logged()
    entries = [each for each in history if not (each.is_output_layer or each.is_buffer_layer)]
    for entry in entries[:: 1 + len(entries) // 6]:
        try:
            logged({entry: shifted})
        except (RuntimeError, tl.EditError):  # autograd refuses writes to some views
            continue
        compare(history, logged, [entry])
