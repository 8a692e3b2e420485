"""FLOPs counted from shapes agree with torch's own counter."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Model, TinyGPT
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import torchlens as tl
from torchlens.export.json_graph import graph_data

X = torch.rand(2, 3, 8, 8)

MODELS: dict[str, tuple[nn.Module, Any]] = {
    "conv2d": (nn.Conv2d(3, 6, 3, stride=2, padding=1), X),
    "grouped": (nn.Conv2d(3, 6, 3, groups=3), X),
    "conv1d": (nn.Conv1d(3, 6, 3), torch.rand(2, 3, 9)),
    "transposed": (nn.ConvTranspose2d(3, 6, 3, stride=2), X),
    "linear": (nn.Linear(4, 5), torch.rand(2, 7, 4)),
    "matmul": (Model(lambda self, x: x @ x.mT), torch.rand(2, 3, 4)),
    "bmm": (Model(lambda self, x: torch.bmm(x, x.transpose(1, 2))), torch.rand(2, 3, 4)),
    "addmm": (Model(lambda self, x: torch.addmm(x, x, x)), torch.rand(4, 4)),
    "attention": (Model(lambda self, x: F.scaled_dot_product_attention(x, x, x)), torch.rand(1, 2, 5, 4)),
    "einsum": (Model(lambda self, x: torch.einsum("bij,bkj->bik", x, x)), torch.rand(2, 3, 4)),
    "gpt": (TinyGPT(), torch.randint(10, (1, 6))),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_agree_with_torch(name: str):
    model, x = MODELS[name]
    # The other ways to compute attention on a CPU are not counted by torch (2.13).
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(x)
    counted = sum(node["flops"] or 0 for node in graph_data(tl.get_model_metadata(model, x))["nodes"])
    assert counted == counter.get_total_flops()


def test_a_recurrent_layer_costs_its_weights_at_every_step_once():
    model = nn.LSTM(4, 5, batch_first=True)
    nodes = graph_data(tl.get_model_metadata(model, torch.rand(2, 7, 4)))["nodes"]
    assert sum(node["flops"] or 0 for node in nodes) == 2 * 2 * 7 * (4 * 5 * 4 + 4 * 5 * 5)


def test_what_multiplies_no_matrices_is_not_counted():
    nodes = graph_data(tl.get_model_metadata(nn.ReLU(), X))["nodes"]
    assert [node["flops"] for node in nodes] == [None, None, None]
