"""Modules and weights that come during the pass, and those that keep their weights elsewhere."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model


class MakesHead(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "head"):
            self.head = nn.Linear(3, 2)
        return self.head(x).relu()


class MakesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> Any:
        if "a" not in self.heads:
            self.heads["a"] = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return self.heads["a"](x)


def test_a_module_made_in_forward_has_its_address_and_parameters() -> None:
    x = torch.rand(2, 3)
    model = MakesHead()
    first, second = tl.log_forward_pass(model, x), tl.log_forward_pass(model, x)
    for history in (first, second):
        assert history["head"].layer_type == "linear"
        assert history["head"].num_params_total == history.total_params == 8
        assert history.module_addresses == ["head"]
        assert history.module_types == {"head": "Linear"}
        assert [id(own) for own in history["head"].parent_params] == [
            *(id(model.head.weight), id(model.head.bias))
        ]
    assert tl.validate_forward_pass(MakesHead(), x).passed


def test_modules_made_inside_a_module_have_their_addresses() -> None:
    model = nn.Sequential(MakesInside(), nn.Linear(3, 2))
    history = tl.log_forward_pass(model, torch.rand(2, 3), layers_to_save=["0.heads.a.0"])
    assert history["0.heads.a.0"].has_saved_activations
    assert history["0.heads.a.1"].layer_type == "batchnorm"
    assert history["0.heads.a.0"].num_params_total == 12
    assert history["1"].num_params_total == 8


def test_a_module_put_in_the_place_of_another_is_a_second_pass_with_its_own_weights() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer: nn.Module = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.layer(x)
            self.layer = nn.Linear(3, 4)
            return self.layer(x)

    history = tl.log_forward_pass(Replaces(), torch.rand(2, 3))
    assert history["layer:1"].parent_param_shapes == [(3, 3), (3,)]
    assert history["layer:2"].parent_param_shapes == [(4, 3), (4,)]


def test_a_parameter_made_in_forward_is_one() -> None:
    class MakesWeight(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight = nn.Parameter(torch.ones(3))
            return x * self.weight

    model = MakesWeight()
    history = tl.log_forward_pass(model, torch.rand(2, 3))
    assert history["mul"].parent_params == [model.weight]
    assert history["mul"].parent_layers == ["input_1_0", "parameter_1_2"]


def test_a_module_that_the_model_does_not_keep_has_no_address() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        return nn.Linear(3, 2)(x)

    history = tl.log_forward_pass(Model(forward), torch.rand(2, 3))
    assert history.module_addresses == []
    assert history["linear"].num_params_total == 0


@pytest.mark.parametrize("is_static", [False, True])
def test_quantized_modules_have_their_parameters(is_static: bool) -> None:
    quantization = torch.ao.quantization
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        if is_static:
            model = nn.Sequential(quantization.QuantStub(), *model)
            model.qconfig = quantization.get_default_qconfig("x86")
            model = quantization.prepare(model)
            model(torch.rand(3, 4))
            model = quantization.convert(model)
        else:
            model = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        history = tl.log_forward_pass(model, torch.rand(3, 4))
    sizes = [entry.num_params_total for entry in history if entry.num_params_total]
    assert sizes == [20, 10]
    assert history.total_params == 30


def test_weights_that_accelerate_loads_when_needed_are_those_of_their_module() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    history = tl.log_forward_pass(model, torch.rand(3, 4))
    sizes = {entry.layer_type: entry.parent_param_shapes for entry in history}
    assert sizes["linear"] == [(2, 4), (2,)]
    assert history["linear_1"].num_params_total == 20
    assert history.total_params == 30
    assert tl.validate_forward_pass(model, torch.rand(3, 4)).passed
