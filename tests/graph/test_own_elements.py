"""Which of a call's arguments each of its results reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "foreachmul": lambda a, b: torch._foreach_mul([a, b], 2.0),
    "foreachadd": lambda a, b: torch._foreach_add_([a, b], [1.0, 2.0]) or [a, b],
    "foreachnorm": lambda a, b: torch._foreach_norm([a, b]),
    "meshgrid": lambda a, b: torch.meshgrid(a, b, indexing="ij"),
    "atleast2d": lambda a, b: torch.atleast_2d(a, b),
    "atleast3d": lambda a, b: torch.atleast_3d([a, b]),
    "broadcasttensors": lambda a, b: torch.broadcast_tensors(a[:, None], b),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_result_reads_its_own_argument(name: str) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        return list(CALLS[name](x * 2, x + 3))

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    first, second = (entry for entry in history if entry.layer_type == name)
    assert [first.parent_layers[0], second.parent_layers] in (
        ["mul_1_1", ["add_1_2"]],
        ["getitem_1_3", ["add_1_2"]],
    )
    assert len(first.parent_layers) == 1
    assert tl.validate_forward_pass(Model(forward), torch.rand(3)).passed


def test_each_result_reads_the_elements_at_its_place_and_what_is_common() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        a, b, factor = x * 2, x + 3, x.sum()
        scaled = torch._foreach_mul([a, b], factor)
        return torch._foreach_add(scaled, [a, b])

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert history["foreachmul_2"].parent_layers == ["add_1_2", "sum_1_3"]
    assert history["foreachadd_1"].parent_layers == ["foreachmul_1_4", "mul_1_1"]


def test_each_result_reads_its_own_parameter() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = torch._foreach_mul([self.a, self.b], 2.0)
            return x + a * b

    model = Two()
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [id(own) for own in history["foreachmul_2"].parent_params] == [id(model.b)]
