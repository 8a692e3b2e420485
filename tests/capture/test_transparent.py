"""Promise 1: the model does what it would have done."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.networks import (
    MLP,
    ConvNet,
    Model,
    Recurrent,
    Residual,
    TinyBERT,
    TinyGPT,
    TinySwin,
    TinyViT,
)

IMAGE, TOKENS, VECTOR = (2, 3, 8, 8), "tokens", (2, 4)


def make_input(kind: Any) -> torch.Tensor:
    return torch.randint(11, (2, 6)) if kind == "tokens" else torch.randn(kind)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def noisy(self: Model, x: torch.Tensor) -> torch.Tensor:
    x = (
        F.dropout(x, 0.5, training=True)
        + torch.rand_like(x) * random.random()
        + float(np.random.rand())
    )
    return x.bernoulli(0.5) + torch.randperm(x.shape[-1])


NETWORKS = [
    (MLP, VECTOR), (Residual, VECTOR), (ConvNet, IMAGE), (Recurrent, VECTOR), (TinyGPT, TOKENS),
    (TinyBERT, TOKENS),
    (TinyViT, IMAGE), (TinySwin, IMAGE), (lambda: Model(noisy), VECTOR),
]  # fmt: skip


def outputs(history: tl.ModelHistory) -> list[torch.Tensor]:
    return [history[label].tensor_contents for label in history.output_layers]


def flat(result: Any) -> list[torch.Tensor]:
    return (
        [result]
        if isinstance(result, torch.Tensor)
        else list(result.values() if isinstance(result, dict) else result)
    )


@pytest.mark.parametrize("saved", ["all", "none", ["input", "output"]])
@pytest.mark.parametrize(("make", "kind"), NETWORKS)
def test_output_and_generators_are_those_of_a_plain_call(make: Any, kind: Any, saved: Any) -> None:
    model, x = make(), make_input(kind)
    twin = copy.deepcopy(model)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = flat(twin(x))
    after = states()
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    history = tl.log_forward_pass(model, x, layers_to_save=saved)
    assert states() == after
    if saved != "none":
        for found, wanted in zip(outputs(history), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for (name, value), wanted in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_transformer_encoder_takes_the_same_path_as_without_a_log(
    is_training: bool, grad: bool
) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(is_training)
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        history = tl.log_forward_pass(model, x)
    torch.testing.assert_close(history["output_1"].tensor_contents, expected, rtol=0, atol=0)
    is_fast = any("transformerencoderlayerfwd" in entry.layer_type for entry in history)
    assert is_fast == (not is_training and not grad)


@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention_takes_the_same_path_as_without_a_log(grad: bool) -> None:
    model = Model(
        lambda self, x: self.attention(x, x, x),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    ).eval()
    x = torch.randn(2, 5, 8)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        history = tl.log_forward_pass(model, x)
    for found, wanted in zip(outputs(history), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_inputs_are_not_copied_or_moved() -> None:
    seen = []

    def forward(self: Model, x: torch.Tensor, *, extra: list[torch.Tensor]) -> torch.Tensor:
        seen.extend([x, extra, extra[0]])
        return x + extra[0]

    x, extra = torch.rand(3), [torch.rand(3)]
    tl.log_forward_pass(Model(forward), x, {"extra": extra})
    assert seen[0] is x
    assert seen[1] is extra
    assert seen[2] is extra[0]


def test_no_requires_grad_changes() -> None:
    model = MLP()
    model.fc1.weight.requires_grad_(False)
    x = torch.rand(2, 4)
    before = [p.requires_grad for p in model.parameters()]
    history = tl.log_forward_pass(model, x, save_gradients=True)
    assert [p.requires_grad for p in model.parameters()] == before
    assert not x.requires_grad
    assert x.grad_fn is None
    assert not history["input_1"].tensor_contents.requires_grad


def test_one_forward_pass_runs() -> None:
    model = Model(lambda self, x: self.fc(x) + 1, fc=nn.Linear(4, 4))
    keys = ["all", "none", [], None, "fc", ["fc"], "linear_1_1", -1, lambda entry: True]
    for number, saved in enumerate(keys, start=1):
        tl.log_forward_pass(model, torch.rand(2, 4), layers_to_save=saved)
        assert model.num_calls == number, saved


@pytest.mark.parametrize("saved", ["all", "conv", "norm", lambda entry: entry.layer_type == "relu"])
def test_batch_norm_in_training_is_updated_once(saved: Any) -> None:
    model, x = ConvNet(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    twin(x)
    tl.log_forward_pass(model, x, layers_to_save=saved)
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean, rtol=0, atol=0)
    torch.testing.assert_close(model.norm.running_var, twin.norm.running_var, rtol=0, atol=0)
    assert model.norm.num_batches_tracked == 1


def test_naming_labels_has_the_effects_of_one_call() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        self.count.add_(1)
        self.memory = self.memory * 2
        self.plain += 1
        return (
            (x + torch.rand(3) + random.random() + float(np.random.rand())) * self.count
            + self.memory
            + self.plain
        )

    def make() -> Model:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        model = Model(forward, plain=torch.zeros(3))
        model.register_buffer("count", torch.zeros(()))
        model.register_buffer("memory", torch.ones(3))
        return model

    x = torch.ones(3)
    expected = make()(x.clone())
    model = make()
    history = tl.log_forward_pass(model, x, layers_to_save=["mul", "output"])
    torch.testing.assert_close(history["output_1"].tensor_contents, expected, rtol=0, atol=0)
    assert torch.equal(x, torch.full((3,), 2.0))
    assert model.count == 1
    assert torch.equal(model.memory, torch.full((3,), 2.0))
    assert torch.equal(model.plain, torch.ones(3))


def test_a_random_seed_seeds_every_generator() -> None:
    model = Model(noisy)
    x = torch.rand(2, 4)
    first = tl.log_forward_pass(model, x, random_seed=3)
    second = tl.log_forward_pass(model, x, random_seed=3)
    third = tl.log_forward_pass(model, x, random_seed=4)
    assert torch.equal(first["output_1"].tensor_contents, second["output_1"].tensor_contents)
    assert not torch.equal(first["output_1"].tensor_contents, third["output_1"].tensor_contents)
    assert first.random_seed_used == 3
    assert tl.log_forward_pass(model, x).random_seed_used is None


def test_the_models_own_gradients_are_those_of_a_plain_call() -> None:
    model, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    history = tl.log_forward_pass(model, x, save_gradients=True, save_function_args=True)
    history["output_1"].tensor_contents.sum().backward()
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=0, atol=0)


def test_the_models_modes_and_hooks_are_as_before() -> None:
    model = MLP()
    model.fc1.register_forward_hook(lambda module, args, out: None)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    tl.log_forward_pass(model, torch.rand(2, 4), save_gradients=True)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        for key, value in vars(module).items():
            assert value is before[name][key] or value == before[name][key]
    assert len(model.fc1._forward_hooks) == 1
    assert not any(p._backward_hooks for p in model.parameters())


def test_grad_mode_and_default_dtype_are_as_before() -> None:
    with torch.no_grad():
        tl.log_forward_pass(MLP(), torch.rand(2, 4), save_gradients=True)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32


def test_a_default_device_that_the_model_sets_stays_set() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        torch.set_default_device("meta")
        return x + 1

    try:
        tl.log_forward_pass(Model(forward), torch.rand(3))
        assert torch.empty(1).is_meta
    finally:
        torch.set_default_device(None)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("way", ["in place", "data in place", "new data"])
def test_naming_labels_updates_parameters_once(way: str) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if way == "in place":
                self.fc.weight.mul_(2)
            elif way == "data in place":
                self.fc.weight.data.mul_(2)
            else:
                self.fc.weight.data = self.fc.weight.data * 2
        return self.fc(x)

    model = Model(forward, fc=nn.Linear(4, 4))
    before = model.fc.weight.detach().clone()
    history = tl.log_forward_pass(model, torch.rand(2, 4), layers_to_save="linear_1")
    assert torch.equal(model.fc.weight, before * 2)
    assert history["linear_1"].has_saved_activations


def test_naming_labels_draws_once_from_a_generator_of_the_models_own() -> None:
    generator, twin = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    model = Model(lambda self, x: x + torch.rand(3, generator=generator))
    history = tl.log_forward_pass(model, torch.rand(3), layers_to_save=["rand", "add"])
    assert torch.equal(history["rand_1"].tensor_contents, torch.rand(3, generator=twin))
    assert torch.equal(generator.get_state(), twin.get_state())
