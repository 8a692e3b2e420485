"""`save_new_activations`: a new input through the same graph."""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Conditional, ConvNet, Model, Recurrent


def test_new_values_come_into_the_same_graph() -> None:
    model = MLP()
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    labels, x = history.layer_labels, torch.rand(2, 4)
    history.save_new_activations(model, x)
    assert history.layer_labels == labels
    assert torch.equal(history["input_1"].tensor_contents, x)
    assert torch.equal(history["fc1"].tensor_contents, model.fc1(x))
    assert torch.equal(history["output_1"].tensor_contents, model(x))


def test_another_batch_size_is_the_same_graph() -> None:
    model = ConvNet().eval()
    history = tl.log_forward_pass(model, torch.rand(2, 3, 8, 8))
    x = torch.rand(5, 3, 8, 8)
    history.save_new_activations(model, x)
    assert history["conv"].tensor_shape == (5, 4, 8, 8)
    assert torch.equal(history["output_1"].tensor_contents, model(x))


def test_a_different_graph_is_an_error_and_the_old_values_are_kept() -> None:
    model = Conditional()
    history = tl.log_forward_pass(model, torch.ones(3))
    before = {entry.layer_label: entry.tensor_contents for entry in history}
    with pytest.raises(
        tl.DifferentGraphError,
        match=r"differs from the logged one at step \d+: the logged run did add.*this one mul",
    ):
        history.save_new_activations(model, -torch.ones(3))
    assert {entry.layer_label: entry.tensor_contents for entry in history} == before
    history.save_new_activations(model, torch.ones(3) * 2)
    assert history["add_1"].tensor_contents.tolist() == [3, 3, 3]


def test_more_or_fewer_steps_are_an_error() -> None:
    model = Recurrent(3)
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    for number in (2, 4):
        model.num_loops = number
        with pytest.raises(tl.DifferentGraphError):
            history.save_new_activations(model, torch.rand(2, 4))
    assert history["output_1"].has_saved_activations


def test_a_different_model_is_an_error() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(tl.DifferentGraphError):
        history.save_new_activations(Recurrent(), torch.rand(2, 4))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        history.save_new_activations("model", torch.rand(2, 4))  # type: ignore[arg-type]


def test_operands_in_another_order_are_a_different_graph() -> None:
    model = Model(lambda self, x: torch.sub(*((x, x * 2) if x[0] > 0 else (x * 2, x))))
    history = tl.log_forward_pass(model, torch.ones(3))
    with pytest.raises(tl.DifferentGraphError):
        history.save_new_activations(model, -torch.ones(3))


@pytest.mark.parametrize(
    "saved", ["fc1", "linear_1", ["linear_1_1"], 1, lambda entry: entry.layer_label == "linear_1_1"]
)
def test_only_the_chosen_layers_are_saved(saved: Any) -> None:
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, torch.rand(2, 4), layers_to_save="none")
    history.save_new_activations(model, x, layers_to_save=saved)
    assert history.layers_with_saved_activations == ["linear_1_1"]
    assert torch.equal(history["fc1"].tensor_contents, model.fc1(x))
    history.save_new_activations(model, x, layers_to_save="none")
    assert history.layers_with_saved_activations == []
    history.save_new_activations(model, x)
    assert history.num_tensors_saved == 5


def test_keyword_inputs_and_a_seed() -> None:
    class Noisy(nn.Module):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(3)

    history = tl.log_forward_pass(Noisy(), None, {"x": torch.zeros(3)}, random_seed=1)
    first = history["output_1"].tensor_contents
    history.save_new_activations(Noisy(), input_kwargs={"x": torch.zeros(3)}, random_seed=1)
    assert torch.equal(history["output_1"].tensor_contents, first)
    history.save_new_activations(Noisy(), input_kwargs={"x": torch.zeros(3)}, random_seed=2)
    assert not torch.equal(history["output_1"].tensor_contents, first)


def test_conditions_are_those_of_the_new_run() -> None:
    model = Model(lambda self, x: x + (1 if x.sum() > 0 else 2))
    history = tl.log_forward_pass(model, torch.ones(3))
    assert history["gt_1"].atomic_bool_val is True
    history.save_new_activations(model, -torch.ones(3))
    assert history["gt_1"].atomic_bool_val is False
    assert history["add_1"].func_position_args_non_tensor == [2]


def test_options_of_the_log_hold_for_new_runs() -> None:
    model = MLP()
    history = tl.log_forward_pass(
        model,
        torch.rand(2, 4),
        activation_postfunc=lambda t: t.mean(),
        save_function_args=True,
        save_gradients=True,
    )
    x = torch.rand(3, 4)
    history.save_new_activations(model, x)
    torch.testing.assert_close(history["fc1"].tensor_contents, model.fc1(x).mean())
    assert torch.equal(history["fc1"].creation_args[0], x)


def test_an_unknown_layer_is_refused_before_the_model_runs() -> None:
    model = Model(lambda self, x: x + 1)
    history = tl.log_forward_pass(model, torch.rand(3))
    with pytest.raises(ValueError, match="no such layer"):
        history.save_new_activations(model, torch.rand(3), layers_to_save="conv")
    assert model.num_calls == 1
