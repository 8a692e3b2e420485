"""Keys of `layers_to_save`: one run is enough, and it holds only what a key could mean."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from benchmarks.zoo.libraries import import_transformers
from tests.networks import Model

KEYS = [
    "relu_1", "relu", ["linear_1", "mul_1"], -1, [0, "relu_1"], ["fc"], ["fc", "relu_1"],
    lambda entry: entry.layer_type == "relu",
]  # fmt: skip


class Counter:
    def __init__(self) -> None:
        self.number = 0


class Remembers(nn.Module):
    """Reads from, or adds to, an argument of any type."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.num_calls = 0

    def forward(self, x: torch.Tensor, memory: Any) -> torch.Tensor:
        self.num_calls += 1
        x = self.drop(self.norm(self.fc(x)))
        if isinstance(memory, Counter):
            memory.number += 1
            number = memory.number
        elif isinstance(memory, list):
            memory.append(x.detach())
            number = len(memory)
        else:
            number = sum(memory)
        return torch.relu(x) * number


def numbers() -> Iterator[int]:
    yield from range(4)


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("make", [Counter, list, numbers, lambda: iter([1, 2])])
def test_naming_layers_runs_the_model_once_on_its_own_inputs(
    make: Callable[[], Any], keys: Any
) -> None:
    model, x = Remembers(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    given, given_to_twin = make(), make()
    torch.manual_seed(1)
    expected = twin(x, given_to_twin)
    torch.manual_seed(1)
    history = tl.log_forward_pass(model, [x, given], layers_to_save=keys)
    assert model.num_calls == 1
    assert 1 <= len(history.layers_with_saved_activations) < len(history)
    torch.manual_seed(1)
    complete = tl.log_forward_pass(copy.deepcopy(model), [x, make()])
    assert torch.equal(complete["output"].tensor_contents, expected)
    for label in history.layers_with_saved_activations:
        assert torch.equal(history[label].tensor_contents, complete[label].tensor_contents)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)
    if isinstance(given, Counter):
        assert given.number == 1
    if isinstance(given, list):
        assert len(given) == 1


def test_naming_labels_adds_to_a_cache_of_transformers_once() -> None:
    pytest.importorskip("transformers")
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    first, second = torch.randint(50, (1, 5)), torch.randint(50, (1, 1))
    caches = [transformers.DynamicCache(config=config) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(first, past_key_values=cache)
        expected = model(second, past_key_values=caches[0]).logits
        history = tl.log_forward_pass(
            model, second, {"past_key_values": caches[1]}, layers_to_save=["silu", "output.logits"]
        )
    assert caches[1].get_seq_length() == caches[0].get_seq_length() == 6
    assert torch.equal(history["output.logits"].tensor_contents, expected)
    assert len(history.layers_with_saved_activations) == 3


@pytest.mark.parametrize("keys", ["relu_1", ["0"], ["0", "relu"], -1])
def test_a_lazy_model_can_be_saved_by_label(keys: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d())
    history = tl.log_forward_pass(model, torch.rand(3, 5), layers_to_save=keys)
    assert history.layers_with_saved_activations
    assert model[2].num_batches_tracked == 1


HELD = [
    ("relu_2", {"relu"}),
    ("relu", {"relu"}),
    ("fc", {"linear"}),
    (["fc", "tanh_1"], {"linear", "tanh"}),
    ("other:1", {"conv1d"}),
    (0, {"linear", "relu", "tanh", "conv1d"}),
    (lambda entry: False, {"linear", "relu", "tanh", "conv1d"}),
]


@pytest.mark.parametrize(("keys", "types"), HELD)
def test_only_what_a_key_could_mean_is_held_during_the_run(keys: Any, types: set[str]) -> None:
    alive: set[str] = set()

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        made: dict[str, weakref.ref[torch.Tensor]] = {}
        for function in (self.fc, torch.relu, torch.tanh, self.other, torch.relu):
            x = function(x)
            name = {self.fc: "linear", self.other: "conv1d"}.get(function)
            made[name or function.__name__] = weakref.ref(x)
        x = x + 1
        alive.update(name for name, tensor in made.items() if tensor() is not None)
        return x

    model = Model(
        forward, fc=nn.Linear(4, 4), conv1=nn.Conv1d(3, 3, 1), other=nn.Conv1d(3, 3, 1)
    ).eval()
    with torch.no_grad():
        history = tl.log_forward_pass(model, torch.rand(3, 4), layers_to_save=keys)
    saved = {history[label].layer_type for label in history.layers_with_saved_activations}
    assert saved <= types | {"input"}
    assert alive == types


def test_a_modules_output_is_saved_as_it_was_before_a_write_through_a_view() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.view(-1).add_(1)
            return y

    model = Model(lambda self, x: self.block(x) + 1, block=Writes())
    history = tl.log_forward_pass(model, torch.ones(3), layers_to_save=["block"])
    complete = tl.log_forward_pass(model, torch.ones(3))
    assert history.layers_with_saved_activations == [complete["block"].layer_label]
    assert torch.equal(history["block"].tensor_contents, complete["block"].tensor_contents)
    assert torch.equal(history["block"].tensor_contents, torch.full((3,), 2.0))


def test_activation_postfunc_is_applied_to_what_is_meant_alone() -> None:
    seen = []

    def postfunc(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.mean(0)

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    for keys in ("relu_1", ["1"], 2):
        seen.clear()
        history = tl.log_forward_pass(
            model, torch.rand(3, 4), layers_to_save=keys, activation_postfunc=postfunc
        )
        assert seen == [(3, 8)]
        assert history["relu_1"].tensor_contents.shape == (8,)


def test_the_address_of_a_module_that_returns_nothing_means_nothing_else() -> None:
    model = Model(lambda self, x: torch.relu(x), relu=nn.ReLU())
    for read in (
        lambda: tl.log_forward_pass(model, torch.rand(3))["relu"],
        lambda: tl.log_forward_pass(model, torch.rand(3), layers_to_save="relu"),
    ):
        with pytest.raises((KeyError, ValueError), match=r"'relu' \(ReLU\) returned no tensor"):
            read()
