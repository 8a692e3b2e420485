"""FLOPs of a step are those of what that step did, or not known."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

import torchlens as tl

Level = Literal["module", "operation"]
LEVELS = ["module", "operation"]
COUNT = 2 * 3 * 4 * 4  # of a layer below, for three rows


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def backward_flops(p: tl.Profile) -> list[int | None]:
    """Of each call of the model."""
    return [call.flops_backward for call in p.root.calls]


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_that_was_frozen_for_a_step_costs_what_it_did_then(level: Level):
    model = layers()
    with tl.profile(model, level=level) as p:
        model[1].requires_grad_(False)
        model(torch.rand(3, 4)).sum().backward()
        model[1].requires_grad_(True)
    assert backward_flops(p) == [2 * COUNT]


@pytest.mark.parametrize("frozen", ["weights", "inputs"])
def test_steps_that_differ_in_what_wants_gradients_cost_what_each_did(frozen: str):
    model = layers()
    with tl.profile(model, level="operation") as p:
        for number in range(4):
            is_first = number < 2
            model[1].requires_grad_(frozen == "inputs" or is_first)
            x = torch.rand(3, 4, requires_grad=frozen == "inputs" and not is_first)
            model(x).sum().backward()
    expected = {"weights": [3 * COUNT, 2 * COUNT], "inputs": [3 * COUNT, 4 * COUNT]}
    assert [count for count in backward_flops(p) if count is not None] == expected[frozen]


def test_a_model_may_freeze_what_it_is_going_to_use():
    class Frozen(nn.Sequential):
        def forward(self, x: Any) -> Any:
            self[1].requires_grad_(False)
            return super().forward(x)

    model = Frozen(*layers())
    with tl.profile(model) as p:
        model(torch.rand(3, 4)).sum().backward()
    assert backward_flops(p) == [2 * COUNT]
