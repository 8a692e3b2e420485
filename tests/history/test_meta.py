"""Tensors without values, on the meta device or fake, are logged like any others, and say that they
have none.
"""

import copy
import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import torchlens as tl
from benchmarks.zoo.libraries import import_transformers
from tests.failures import partial_history
from tests.networks import MLP, ConvNet, Model, Recurrent, Residual, writes_through_views
from torchlens._draw.draw_options import draw_options
from torchlens._draw.drawing import make_drawing
from torchlens._recording.regions import Region, region_of
from torchlens._recording.view_tree import Share

MODELS = {
    "mlp": (MLP, (2, 4)),
    "convnet": (ConvNet, (2, 3, 8, 8)),
    "recurrent": (Recurrent, (2, 4)),
    "residual": (Residual, (2, 4)),
    "writes": (lambda: Model(writes_through_views), (3, 4)),
}
model_of = pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)


def on_meta(make: Any, shape: tuple[int, ...], **options: Any) -> Any:
    with torch.device("meta"):  # also for what a model makes while it runs
        return tl.log_forward_pass(make(), torch.rand(shape), **options)


def faked(make: Any, shape: tuple[int, ...], **options: Any) -> Any:
    with FakeTensorMode():
        return tl.log_forward_pass(make(), torch.rand(shape), **options)


log_of = pytest.mark.parametrize("log", [on_meta, faked], ids=["meta", "fake"])


@log_of
@model_of
def test_everything_but_values_is_as_on_a_real_device(log: Any, make: Any, shape: tuple[int, ...]):
    history, real = log(make, shape), tl.log_forward_pass(make(), torch.rand(shape))
    names = ("layer_labels", "layer_num_passes", "module_layers", "tensor_fsize_total",
        "total_params_fsize_nice",
             "total_flops", "total_flops_backward", "flops_not_counted",
             "conditional_branch_edges")  # fmt: skip
    assert {name: getattr(history, name) for name in names} == {
        name: getattr(real, name) for name in names
    }
    for mine, theirs in zip(history, real, strict=True):
        for name in (
            "tensor_shape",
            "tensor_dtype",
            "parent_layers",
            "flops",
            "func_applied",
            "parent_param_shapes",
        ):
            assert getattr(mine, name) == getattr(theirs, name), (mine, name)
        assert mine.tensor_contents.shape == theirs.tensor_contents.shape
    assert make_drawing(history, draw_options({"vis_opt": "rolled"})).source == (
        make_drawing(real, draw_options({"vis_opt": "rolled"})).source
    )
    assert len(history.to_pandas()) == len(history)
    assert [node["shape"] for node in json.loads(history.to_json())["nodes"]] == [
        list(e.tensor_shape) for e in history
    ]


@pytest.mark.parametrize(
    ("log", "reason"), [(on_meta, "on the meta device"), (faked, "fake")], ids=["meta", "fake"]
)
def test_values_say_that_there_are_none(log: Any, reason: str):
    history = log(MLP, (2, 4))
    assert (
        "\t5 tensors (160 B) computed in forward pass; 5 tensors (160 B) saved, without values "
        f"({reason})." in str(history)
    )
    assert str(history["relu_1"]).splitlines()[2] == f"\t\t(no values: the tensor is {reason})"
    assert f"5 saved (160 B), without values ({reason})" in str(history.summary(width=200))
    page = history.explore(None).html
    assert f'"valueless":"{reason}"' in page
    with pytest.raises(
        ValueError, match=rf"have no values \(they are {reason}\), so there is no NaN to find"
    ):
        history.first_nonfinite()


def test_real_tensors_say_nothing_of_it():
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    assert "without values" not in f"{history}{history.summary()}"
    assert '"valueless":""' in history.explore(None).html


def test_some_tensors_without_values_are_counted():
    history = tl.log_forward_pass(Model(lambda self, x: (x + 1, x.to("meta") * 2)), torch.rand(2))
    assert "saved, 3 of them without values (on the meta device)." in str(history)
    with pytest.warns(
        UserWarning,
        match=r"All saved tensors are finite, but 3 of 6 entries have no values and were not",
    ):
        assert history.first_nonfinite() is None


@log_of
def test_gradients_have_shapes(log: Any):
    history = log(ConvNet, (2, 3, 8, 8), save_gradients=True)
    history[history.output_layers[0]].tensor_contents.sum().backward()
    assert history["conv2d_1"].grad_shape == (2, 4, 8, 8)
    assert history.param_grads["conv.weight"].shape == (4, 3, 3, 3)
    assert "no values: the tensor is" in str(history["conv2d_1"]).split("Gradient:")[1]
    assert history.explore(None).html
    other = log(MLP, (2, 4))
    other.log_backward(other["output_1"].tensor_contents.sum())
    assert other["linear_1"].grad_shape == (2, 5)


@log_of
def test_a_choice_of_layers_can_be_saved(log: Any):
    history = log(TinyBatchNorm, (2, 4), layers_to_save="relu", keep_unsaved_layers=False)
    assert history.layer_labels == ["relu_1_2"]
    assert history["relu_1"].tensor_contents.shape == (2, 4)


class TinyBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


def test_a_log_on_meta_can_be_filled_with_real_values():
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(copy.deepcopy(model).to("meta"), torch.rand(2, 4, device="meta"))
    history.save_new_activations(model, x)
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert history.first_nonfinite() is None


def test_parameters_without_values_are_counted_whatever_way_they_came():
    skipped = nn.utils.skip_init(nn.Linear, 4, 3, device="meta")
    assert tl.log_forward_pass(skipped, torch.rand(2, 4, device="meta")).total_params_fsize == 60
    with torch.device("meta"):
        built = nn.Linear(1 << 17, 1 << 17)  # 64 GB
        history = tl.log_forward_pass(built, torch.rand(1, 1 << 17))
    assert history.total_params_fsize_nice == "64.0 GB"
    assert history.total_flops == 2 * (1 << 34)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="asks Linux for the memory of the process"
)
def test_a_llama_of_70_billion_parameters_is_logged_drawn_and_explored_in_hardly_any_memory():
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    num_tokens = 2048
    before = resident_bytes()
    with torch.device("meta"), torch.no_grad():
        llama = transformers.LlamaForCausalLM(config).bfloat16().eval()
        history = tl.log_forward_pass(llama, torch.ones(1, num_tokens, dtype=torch.long))
    labels = history.layer_labels
    assert sum(label.startswith("linear_") for label in labels) == 80 * 7 + 1
    assert sum(label.startswith("scaleddotproductattention_") for label in labels) == 80
    assert history["model.layers.79.mlp.down_proj"].tensor_shape == (1, num_tokens, 8192)
    assert history["lm_head"].tensor_shape == (1, num_tokens, 128256)
    assert history["lm_head"].input_ancestors

    num_params = sum(parameter.numel() for parameter in llama.parameters())
    assert history.total_params == num_params == 70_553_706_496
    assert history.total_params_fsize == 2 * num_params
    # Two for each parameter and token; the embedding is a look-up, and attention comes on top: 2 *
    # 2 * tokens * width.
    weights = 2 * num_tokens * (num_params - 128256 * 8192)
    attention = 80 * 4 * num_tokens**2 * 8192
    assert weights < history.total_flops < 1.01 * (weights + attention)

    source = make_drawing(
        history, draw_options({"vis_opt": "rolled", "vis_nesting_depth": 3})
    ).source
    assert "model.layers.79" in source
    assert "1x2048x128256" in source
    html = history.explore(None).html
    assert "model.layers.79.mlp" in html
    assert '"valueless":"on the meta device"' in html
    assert "without values (on the meta device)" in str(history)
    assert history["lm_head"].tensor_contents.is_meta
    assert resident_bytes() - before < 1 << 30  # of 131 GB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_left_of_a_view_is_told_without_its_memory():
    rows, columns = 1 << 20, 1 << 18  # a tensor of a terabyte
    whole = Region(0, (rows, columns), (columns, 1), 4)
    column, row = Region(3, (rows,), (columns,), 4), Region(5 * columns, (columns,), (1,), 4)
    evens, odds = (Region(first, (rows, columns // 2), (columns, 2), 4) for first in (0, 1))
    assert Share(0, whole, whole, (column,)).is_any_left()
    assert not Share(0, column, row, (Region(5 * columns + 3, (), (), 4),)).is_any_left()
    assert not Share(0, whole, column, (odds,)).is_any_left()
    assert Share(0, whole, row, (odds,)).is_any_left()
    assert not Share(0, whole, whole, (odds, evens)).is_any_left()


def test_what_is_left_of_a_view_is_what_a_gradient_would_find():
    generator = np.random.default_rng(0)
    base = torch.zeros(6, 10)
    for _ in range(300):
        views = [
            base[
                slice(*sorted(generator.integers(0, 7, 2).tolist())),
                :: int(generator.integers(1, 4)),
            ]
            for _ in range(4)
        ]
        region, read, *written = (
            region_of(view.t() if generator.integers(0, 2) else view) for view in views
        )
        share = Share(0, region, read, tuple(written))
        assert share.is_any_left() == bool(share.cut(torch.ones(read.shape)).any()), share


# -- when values are needed ------------------------------------------------------------------------


def needs_number(self, x):
    return x * x.sum().item()


def needs_condition(self, x):
    return x if x.sum() > 0 else -x


def needs_mask(self, x):
    return x[x > 0]


@pytest.mark.parametrize("forward", [needs_number, needs_condition, needs_mask])
@log_of
def test_a_model_that_needs_values_raises_torchs_error_with_a_hint(forward: Any, log: Any):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (torch has one of its own for each)
        log(lambda: Model(forward), (2, 4))
    assert not isinstance(caught.value, tl.TorchLensError)
    assert any(note.startswith("torchlens: raised in Model") for note in caught.value.__notes__)
    assert (
        "has no values. Where a model needs some to go on (item(), an if, nonzero"
        in caught.value.__notes__[-1]
    )
    assert partial_history(caught.value).layer_labels[0] == "input_1_0"


@pytest.mark.parametrize(("of_model", "of_input"), [("meta", "cpu"), ("cpu", "meta")])
@pytest.mark.parametrize("saves", ["all", "none"])
def test_weights_and_input_must_both_have_values_or_neither(
    of_model: str, of_input: str, saves: str
):
    with pytest.raises(RuntimeError, match="is not on the expected device") as caught:
        tl.log_forward_pass(
            MLP().to(of_model), torch.rand(2, 4, device=of_input), layers_to_save=saves
        )
    assert "raised in module 'fc1' (Linear)" in caught.value.__notes__[0]
    if saves == "all":
        assert (
            "have values, and others have none: they are on the meta device. Make all alike"
            in caught.value.__notes__[1]
        )


def test_an_error_that_has_nothing_to_do_with_values_gets_no_hint():
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(MLP().to("meta"), torch.rand(2, 5, device="meta"))
    assert len(caught.value.__notes__) == 1


def test_values_that_are_not_there_cannot_be_moved():
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as caught:
        on_meta(MLP, (2, 4), output_device="cpu")
    assert (
        "A tensor on the meta device has no values to move; use output_device='same'."
        in caught.value.__notes__[0]
    )
    assert len(caught.value.__notes__) == 2


def test_validation_says_what_it_could_not_look_at():
    report = tl.validate_forward_pass(MLP().to("meta"), torch.rand(2, 4, device="meta"))
    assert report.passed
    assert (
        "1 not checked: values, as the tensors have none (on the meta device); shapes and types are"
        in str(report)
    )
    with FakeTensorMode():  # it never raises
        assert isinstance(tl.validate_forward_pass(MLP(), torch.rand(2, 4)), tl.ValidationReport)


# -- fake tensors ----------------------------------------------------------------------------------


def test_real_weights_and_a_fake_input_inside_and_outside_the_mode():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model, x = ConvNet().eval().requires_grad_(False), torch.rand(2, 3, 8, 8)
    fake = mode.from_tensor(x)
    outside = tl.log_forward_pass(model, fake)
    with mode:
        inside = tl.log_forward_pass(model, fake)
        # What is real can be looked at though the mode is on.
        assert "tensor([1., 1., 1., 1.])" in str(outside["buffer_2"])
        with pytest.warns(UserWarning, match="9 of 11 entries have no values"):
            assert outside.first_nonfinite() is None
        assert outside.explore(None).html
    assert outside.layer_labels == inside.layer_labels == tl.log_forward_pass(model, x).layer_labels
    assert isinstance(outside["output_1"].tensor_contents, FakeTensor)


def test_a_real_buffer_keeps_its_value_in_the_log_of_a_fake_pass():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.ones(2, 4))
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            norm = nn.BatchNorm1d(4)  # in training: it adds to a buffer in place
        history = tl.log_forward_pass(norm, fake)
        is_valid = tl.validate_saved_activations(norm, fake)
    assert torch.equal(history["running_var"].tensor_contents, torch.ones(4))
    assert "no values" not in str(history["running_var"])
    assert isinstance(history["batchnorm_1"].tensor_contents, FakeTensor)
    assert is_valid


def test_copies_of_fake_tensors():
    history = faked(ConvNet, (2, 3, 8, 8))
    # torch itself would copy the whole mode, and give back memory twice.
    for copied in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        assert copied["conv2d_1"].tensor_contents.is_meta
        assert copied["conv2d_1"].tensor_contents.shape == (2, 4, 8, 8)
        assert [param.shape for param in copied["conv2d_1"].parent_params] == [(4, 3, 3, 3), (4,)]
        assert all(isinstance(param, nn.Parameter) for param in copied["conv2d_1"].parent_params)


def test_numbers_of_unusual_types_are_described():
    def forward(self, x):
        small = torch.empty(2, 4, dtype=torch.uint4)  # type: ignore[attr-defined]  # torch's stubs lack it
        return x.to(torch.float8_e4m3fn), x.to(torch.uint16), small, x.to(torch.complex32)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        history = tl.log_forward_pass(Model(forward), torch.rand(2, 4))
        assert history.explore(None).html
    assert "torch cannot print numbers of type torch.uint4" in str(history["empty_1"])
