"""Operations that hand back the tensor they are given: for how long they stand for it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchlens
from benchmarks.zoo.libraries import import_transformers


def parents(history: torchlens.ModelHistory, label: str) -> list[str]:
    return [parent.rsplit("_", 1)[0] for parent in history[label].parent_layers]


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        return x * x.mean()


class Returns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self.size = x.sum()
        return x


class Around(nn.Module):
    """Calls another module, and returns what `pick` makes of its argument and the other's
    result.
    """

    def __init__(self, inner: nn.Module, pick: Any) -> None:
        super().__init__()
        self.inner, self.pick = inner, pick

    def forward(self, x: Tensor) -> Any:
        return self.pick(x, self.inner(x))


class Net(nn.Module):
    """Reads a tensor once more after a module was given it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        self.inner(x)
        return x.sin()


@pytest.mark.parametrize(
    ("inner", "parent"),
    [
        (Norm(), "exp_1"),  # did not return it
        (Returns(), "contiguous_1"),
        (nn.Identity(), "identity_1"),
        (nn.Dropout().eval(), "dropout_1"),
        (Around(Norm(), lambda x, y: y), "exp_1"),
        (Around(Norm(), lambda x, y: x), "identity_1"),  # the outer one returns what it was given
        (Around(Returns(), lambda x, y: y), "contiguous_1"),
        (Around(Returns(), lambda x, y: {"a": [y]}), "contiguous_1"),
        (
            Around(Returns(), lambda x, y: y + 1),
            "exp_1",
        ),  # the inner one returned it, the outer one did not
        (Around(nn.Identity(), lambda x, y: y.cos()), "exp_1"),
        (Around(Norm(), lambda x, y: x.add_(1)), "add_1"),  # a write stays
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"layers_to_save": "none"}, {"layers_to_save": ["sin"]}, {"save_function_args": True}],
)
def test_it_stands_for_the_tensor_as_long_as_modules_hand_it_on(
    inner: nn.Module, parent: str, options: Any
) -> None:
    model = Net(inner).eval()
    history = torchlens.log_forward_pass(model, torch.rand(3, 4), **options)
    assert parents(history, "sin_1") == [parent]
    assert torchlens.validate_saved_activations(model, torch.rand(3, 4))


def test_it_stands_for_the_tensor_in_the_module_that_called_it() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.to(torch.float32)
            return x.cos()

    history = torchlens.log_forward_pass(Net(Inside()), torch.rand(3))
    assert parents(history, "cos_1") == ["to_1"]
    assert parents(history, "sin_1") == ["exp_1"]


def test_two_after_each_other_are_undone_in_turn() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32).contiguous().cos()

    history = torchlens.log_forward_pass(Net(Twice()), torch.rand(3))
    assert parents(history, "contiguous_1") == ["to_1"]
    assert parents(history, "sin_1") == ["exp_1"]


def test_what_was_written_in_between_stays() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to(torch.float32)
            y.mul_(2)
            return y.contiguous().cos()

    model = Net(Writes())
    history = torchlens.log_forward_pass(model, torch.rand(3))
    assert parents(history, "sin_1") == ["mul_1"]
    assert torchlens.validate_saved_activations(model, torch.rand(3))


def test_a_module_that_raises_undoes_it_too() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.to(torch.float32)
            raise KeyError("handled by the model")

    class Handles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Raises()

        def forward(self, x: Tensor) -> Tensor:
            x = x.exp()
            try:
                self.inner(x)
            except KeyError:
                return x.sin() + x.to(torch.float32)
            raise AssertionError

    history = torchlens.log_forward_pass(Handles(), torch.rand(3))
    assert parents(history, "sin_1") == ["exp_1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen2", "Gemma", "T5"])
def test_the_residual_of_a_transformer_starts_at_the_input_of_its_block(name: str) -> None:
    library = import_transformers()
    options: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if name == "T5":
        options = {
            "vocab_size": 50,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        }
        options["feed_forward_proj"] = "gated-gelu"
        model = library.T5EncoderModel(library.T5Config(**options)).eval()
    else:
        options |= {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
        if name == "Mixtral":
            options |= {"num_local_experts": 2, "num_experts_per_tok": 1}
        model = getattr(library, f"{name}Model")(
            getattr(library, f"{name}Config")(**options)
        ).eval()
    ids = torch.randint(0, 50, (1, 5))
    history = torchlens.log_forward_pass(model, input_kwargs={"input_ids": ids}, input_args=[])
    norms = ("layer_norm", "layernorm")
    blocks = [
        address
        for address in history.module_addresses
        if address.rsplit(".", 1)[-1].endswith(norms)
    ]
    assert len(blocks) >= 4
    inside = {
        label for address in blocks for label in history.layer_labels
        if any(module.startswith(f"{address}:") for module in history[label].containing_modules_origin_nested)
    }  # fmt: skip
    residuals = [
        entry for entry in history
        if entry.layer_type == "add" and len(entry.parent_layers) == 2 and entry.layer_label not in inside
        and "attn" not in (entry.containing_module_origin or "").rsplit(".", 1)[-1]
    ]  # fmt: skip
    assert len(residuals) >= 4
    for entry in residuals:
        assert not inside.intersection(entry.parent_layers), (
            entry.layer_label,
            entry.parent_layers,
        )
