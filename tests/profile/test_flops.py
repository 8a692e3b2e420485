"""FLOPs of a step are those of what that step did, or not known."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model

Level = Literal["module", "operation"]
LEVELS = ["module", "operation"]
COUNT = 2 * 3 * 4 * 4  # of a layer below, for three rows


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def backward_flops(p: tl.Profile) -> list[int | None]:
    """Of each call of the model."""
    return [call.flops_backward for call in p.root.calls]


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_that_is_frozen_for_a_step_has_no_backward_flops_in_it(level: Level):
    model = layers()
    with tl.profile(model, level=level) as p:
        model[1].requires_grad_(False)
        model(torch.rand(3, 4)).sum().backward()
        model[1].requires_grad_(True)
    assert backward_flops(p) == [2 * COUNT]


@pytest.mark.parametrize("frozen", ["weights", "inputs"])
def test_steps_that_differ_in_trained_parameters_have_their_own_flops(frozen: str):
    model = layers()
    with tl.profile(model, level="operation") as p:
        for number in range(4):
            is_first = number < 2
            model[1].requires_grad_(frozen == "inputs" or is_first)
            x = torch.rand(3, 4, requires_grad=frozen == "inputs" and not is_first)
            model(x).sum().backward()
    expected = {"weights": [3 * COUNT, 2 * COUNT], "inputs": [3 * COUNT, 4 * COUNT]}
    assert [count for count in backward_flops(p) if count is not None] == expected[frozen]


def test_a_model_may_freeze_its_own_part():
    class Frozen(nn.Sequential):
        def forward(self, x: Any) -> Any:
            self[1].requires_grad_(False)
            return super().forward(x)

    model = Frozen(*layers())
    with tl.profile(model) as p:
        model(torch.rand(3, 4)).sum().backward()
    assert backward_flops(p) == [2 * COUNT]


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_may_use_tensors_that_the_model_does_not_return(level: Level):
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.side = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Any) -> Any:
            hidden = self.body(x)
            self.loss = self.side(hidden).pow(2).mean()
            return self.head(hidden)

    model = WithLoss()
    with tl.profile(model, level=level) as p:
        (model(torch.rand(3, 4)).sum() + model.loss).backward()
    assert p["side"].calls[0].flops_backward == 2 * COUNT
    assert backward_flops(p) == [5 * COUNT]


@pytest.mark.parametrize("level", LEVELS)
def test_a_trained_tensor_from_outside_makes_backward_flops_unknown(level: Level):
    weight = torch.rand(4, 4, requires_grad=True)
    model = Model(
        lambda self, x: torch.nn.functional.linear(self.fc(x), weight), fc=nn.Linear(4, 4)
    )
    with tl.profile(model, level=level) as p:
        model(torch.rand(3, 4)).sum().backward()
    assert backward_flops(p) == [None]
    assert p.root.calls[0].flops == 2 * COUNT
    assert p["fc"].calls[0].flops_backward == COUNT


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_that_is_called_again_beside_the_model_is_not_free(level: Level):
    model = layers()
    with tl.profile(model, level=level) as p:
        model(torch.rand(3, 4))
        for _ in range(2):
            model[0](torch.rand(3, 4))
    assert [call.flops for call in p["0"].calls] == [COUNT, COUNT, None]
    assert [call.flops for call in p.root.calls] == [2 * COUNT]


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_raised_is_no_measure_of_the_model(level: Level, memory: bool):
    class Failing(nn.Sequential):
        fails = True

        def forward(self, x: Any) -> Any:
            x = self[0](x)
            if self.fails:
                raise ValueError("too few")
            return self[1](x)

    model = Failing(*layers())
    with tl.profile(model, level=level, memory=memory) as p:
        with pytest.raises(ValueError, match="too few"):
            model(torch.rand(3, 4))
        model.fails = False
        for _ in range(2):
            model(torch.rand(3, 4)).sum().backward()
    statistic = p.root.statistic("flops")
    assert statistic is not None
    assert (statistic.median, statistic.num) == (2 * COUNT, 1)
    assert p.root.calls[0].flops is None
    assert p["0"].calls[0].flops == COUNT


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Conv1d(3, 3, 1)]
)
def test_a_pass_for_some_gradients_alone_makes_backward_flops_unknown(
    layer: nn.Module, level: Level
):
    x = torch.rand(3, 4, requires_grad=True)
    model = nn.Sequential(layer)
    with tl.profile(model, level=level) as p:
        torch.autograd.grad(model(x).sum(), x)
    assert backward_flops(p) == [None]
    with tl.profile(model, level=level) as p:
        torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert backward_flops(p) == [2 * (p.root.calls[0].flops or 0)]
