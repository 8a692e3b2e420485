"""No Ctrl-C leaves the modes of the thread changed, nor a hook, a patch or the collector."""

import random
import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
)

import torchlens as tl
from benchmarks.soak.figures import Figures
from benchmarks.soak.moments import CASES, interrupt_at, places_of, run_moments
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.unseen import GradMode, NoTorchFunction, unseen
from torchlens._validate.check_completeness import Census


def work_unseen() -> None:
    with unseen(), NoTorchFunction():
        assert not torch.is_grad_enabled()
        without_collector(lambda: torch.ones(2).sum())


def test_nothing_is_computed_unseen_in_view_of_function_modes():
    """`unseen` ends in C++ and hides from all but function modes, whose own context is C, too."""
    package = Path(tl.__file__).parent
    uses = [
        (path.name, use)
        for path in package.rglob("*.py")
        for use in re.findall(r"with .*unseen\(\).*:", path.read_text(encoding="utf-8"))
    ]
    assert len(uses) > 20
    assert [use for use in uses if "NoTorchFunction()" not in use[1]] == []


def test_no_interrupt_leaves_grad_mode_or_torch_functions_off():
    places = places_of(work_unseen)
    assert len(places) > 10
    for place in places:
        assert interrupt_at(place, work_unseen).startswith("raised")
        assert torch.is_grad_enabled()
        assert torch._C._is_torch_function_enabled()


def work_in_a_census() -> None:
    census = Census(0)
    with census.around(lambda _: ("", None, 0)), census.pause():
        assert torch._C._len_torch_dispatch_stack() == 1


def test_no_interrupt_leaves_a_dispatch_mode_of_validation():
    outer = TorchDispatchMode()
    with outer:
        places = places_of(work_in_a_census)
        assert any(place[0].co_name == "_push_mode" for place in places)
        for place in places:
            assert interrupt_at(place, work_in_a_census).startswith("raised")
            left = _get_current_dispatch_mode_stack()
            while torch._C._len_torch_dispatch_stack() > 1:
                _pop_mode()
            assert left == [outer], place


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False, None])
def test_grad_mode_is_that_of_the_block_and_then_what_it_was(grad, inference):
    for outer in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with outer:
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            with GradMode(grad, inference):
                expected = before[1] if inference is None else inference
                assert torch.is_grad_enabled() is grad
                assert torch.is_inference_mode_enabled() is expected
                assert torch.ones(2).is_inference() is expected
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("log", "tail", "edit") else [pytest.mark.soak])
        for name in CASES
    ],
)
def test_nothing_is_left_changed_by_an_interrupt(name):
    random.seed(0)
    figures = Figures()
    run_moments(figures, most=15, names=[name])
    assert figures.problems == []
    assert figures.moments >= 10
