"""The public functions: every option that does not draw, and refusals before the model runs."""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, Recurrent, Residual


def saved(history: tl.ModelHistory) -> list[str]:
    return history.layers_with_saved_activations


# -- layers_to_save --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", ["input_1_0", "linear_1_1", "relu_1_2", "linear_2_3", "output_1_4"]),
        ("none", []), (None, []), ([], []),
        ("linear_1_1", ["linear_1_1"]), ("linear_1", ["linear_1_1"]), ("linear_1_1:1",
        ["linear_1_1"]),
        ("fc2", ["linear_2_3"]), ("fc2:1", ["linear_2_3"]), (2, ["relu_1_2"]), (-1, ["output_1_4"]),
        ("linear", ["linear_1_1", "linear_2_3"]), ("input.x", ["input_1_0"]),
        (["act", "fc1"], ["linear_1_1", "relu_1_2"]), (["act", 0, "linear_2"], ["input_1_0",
        "relu_1_2", "linear_2_3"]),
        (("relu", "output"), ["relu_1_2", "output_1_4"]),
        (lambda entry: entry.computed_with_params, ["linear_1_1", "linear_2_3"]),
        (lambda entry: False, []),
    ],
)  # fmt: skip
def test_layers_to_save(layers: Any, expected: list[str]) -> None:
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x, layers_to_save=layers)
    assert saved(history) == expected
    assert len(history) == 5
    assert history.num_tensors_saved == len(expected)
    everything = tl.log_forward_pass(model, x)
    for label in expected:
        assert torch.equal(history[label].tensor_contents, everything[label].tensor_contents)
    for entry in history:
        assert (
            (entry.tensor_contents is not None)
            == entry.has_saved_activations
            == (entry.layer_label in expected)
        )


@pytest.mark.parametrize("name", ["linear_1_1", "linear_1", "fc"])
def test_a_bare_name_means_all_its_passes(name: str) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4), layers_to_save=name)
    assert saved(history) == [f"linear_1_1:{number}" for number in (1, 2, 3, 4)]
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4), layers_to_save=f"{name}:2")
    assert saved(history) == ["linear_1_1:2"]


def test_a_module_written_in_place_after_it_returned_is_saved_as_it_was() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        y += 100
        return y

    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x, layers_to_save="fc")
    assert torch.equal(history["fc"].tensor_contents, model.fc(x))


def test_a_partial_save_marks_saved_layers_with_a_star() -> None:
    text = str(tl.log_forward_pass(MLP(), torch.rand(2, 4), layers_to_save="fc1"))
    assert "* 1: linear_1_1" in text
    assert "* 2: relu_1_2" not in text


def test_keep_unsaved_layers() -> None:
    history = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="fc1", keep_unsaved_layers=False
    )
    assert history.layer_labels == ["linear_1_1"]
    assert len(history) == 1
    assert history.unlogged_layers == ["input_1_0", "relu_1_2", "linear_2_3", "output_1_4"]
    assert history["fc1"].parent_layers == ["input_1_0"]
    assert history.num_tensors_total == 5
    assert history.input_layers == ["input_1_0"]


# -- what is done to saved tensors -----------------------------------------------------------------


def test_output_device() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), output_device="meta")
    assert all(entry.tensor_contents.is_meta for entry in history)
    assert history["fc1"].tensor_shape == (2, 5)
    same = tl.log_forward_pass(MLP(), torch.rand(2, 4), output_device=torch.device("cpu"))
    assert same["fc1"].tensor_contents.device.type == "cpu"


def test_activation_postfunc_leaves_shape_and_dtype_fields_alone() -> None:
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x, activation_postfunc=lambda t: t.mean(0).half())
    entry = history["fc1"]
    torch.testing.assert_close(entry.tensor_contents, model.fc1(x).mean(0).half())
    assert entry.tensor_shape == (2, 5)
    assert entry.tensor_dtype is torch.float32
    assert entry.tensor_fsize == 40
    assert len(history) == 5
    names = tl.log_forward_pass(model, x, activation_postfunc=lambda t: str(tuple(t.shape)))
    assert names["fc1"].tensor_contents == "(2, 5)"


def test_detach_saved_tensors() -> None:
    plain = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    assert plain["fc1"].tensor_contents.requires_grad
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), detach_saved_tensors=True)
    assert not any(entry.tensor_contents.requires_grad for entry in history)
    assert history["fc1"].gradfunc == "AddmmBackward0"


def test_save_function_args() -> None:
    model, x = Residual(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x, save_function_args=True)
    add = history["add_1"]
    assert torch.equal(add.creation_args[0], x)
    assert torch.equal(add.creation_args[1], history["linear_1"].tensor_contents)
    assert history["ones_1"].creation_args == (4,)
    assert tl.log_forward_pass(model, x)["add_1"].creation_args is None
    for layers in ("blocks.0.fc", "linear_1"):
        history = tl.log_forward_pass(model, x, layers_to_save=layers, save_function_args=True)
        kept = [entry.layer_label for entry in history if entry.creation_args is not None]
        assert kept == history.layers_with_saved_activations == ["linear_1_2"]


def test_get_model_metadata_is_the_same_without_tensors() -> None:
    model, x = Residual(), torch.rand(2, 4)
    metadata, history = tl.get_model_metadata(model, x), tl.log_forward_pass(model, x)
    assert metadata.layer_labels == history.layer_labels
    assert metadata.num_tensors_saved == 0
    assert metadata.tensor_fsize_saved == 0
    assert metadata.tensor_fsize_total == history.tensor_fsize_total
    assert all(entry.tensor_contents is None for entry in metadata)
    named = tl.get_model_metadata(model, None, {"x": x})
    assert named.layer_labels == history.layer_labels


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers_to_save": 1.5}, TypeError, r"layers_to_save must be 'all'.*, got 1.5 \(float\)"),
        ({"layers_to_save": ["a", None]}, TypeError, "layers_to_save must be .*, got None"),
        ({"layers_to_save": ""}, TypeError, "layers_to_save must be .*, got ''"),
        ({"layers_to_save": True}, TypeError, "layers_to_save must be .*, got True"),
        ({"layers_to_save": torch.rand(2)}, TypeError, (r"layers_to_save must be .*, got a Tensor "
                                                       r"of shape \(2,\)")),
        ({"keep_unsaved_layers": "no"}, TypeError, ("keep_unsaved_layers must be True or False, "
                                                   "got 'no'")),
        ({"save_gradients": 1}, TypeError, "save_gradients must be True or False, got 1"),
        ({"save_function_args": None}, TypeError, "save_function_args must be True or False"),
        ({"detach_saved_tensors": "x"}, TypeError, "detach_saved_tensors must be True or False"),
        ({"mark_input_output_distances": 0}, TypeError, ("mark_input_output_distances must be True "
                                                        "or False")),
        ({"output_device": "gpu"}, ValueError, "output_device must be 'same' or a torch device"),
        ({"output_device": "cuda:99"}, ValueError, ("output_device must be a device that this "
                                                   "machine and this torch have")),
        ({"output_device": None}, (TypeError, ValueError), ("output_device must be 'same' or a "
                                                           "torch device")),
        ({"activation_postfunc": 3}, TypeError,
        "activation_postfunc must be a function of a tensor"),
        ({"random_seed": "1"}, TypeError, "random_seed must be a whole number"),
        ({"random_seed": -1}, ValueError, "random_seed must be between"),
        ({"vis_opt": "sideways"}, ValueError, "vis_opt"),
        ({"layer_to_save": "all"}, TypeError, "layer_to_save"),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_before_the_model_runs(
    options: dict[str, Any], error: Any, message: str
) -> None:
    model = Model(lambda self, x: x + 1)
    with pytest.raises(error, match=message):
        tl.log_forward_pass(model, torch.rand(3), **options)
    assert model.num_calls == 0


class OneArgument(nn.Module):
    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x + 1


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([torch.rand(3), torch.rand(3)], None, ("OneArgument.forward.*cannot be called with "
                                               ".Tensor, Tensor.")),
        ([], None, "missing a required argument: 'x'"),
        (torch.rand(3), {"y": 1}, "unexpected keyword argument 'y'"),
        (torch.rand(3), torch.rand(3), "input_kwargs must be a dict"),
        (torch.rand(3), "all", "input_kwargs must be a dict"),
    ],
)  # fmt: skip
def test_bad_inputs_are_refused_before_the_model_runs(args: Any, kwargs: Any, message: str) -> None:
    model = OneArgument()
    with pytest.raises(TypeError, match=message):
        tl.log_forward_pass(model, args, kwargs)
    assert model.num_calls == 0


@pytest.mark.parametrize("model", ["model", MLP, None])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        tl.log_forward_pass(model, torch.rand(2, 4))


def test_a_layer_that_does_not_exist_is_refused_after_one_run() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"names 'conv9', and there is no such layer"):
        tl.log_forward_pass(model, x, layers_to_save=["conv9"])
    assert model[0].num_batches_tracked == 1
    with pytest.raises(IndexError, match="out of range"):
        tl.log_forward_pass(model, x, layers_to_save=99)
    assert model[0].num_batches_tracked == 2
