"""Labels: types, numbers, what is an entry and what is not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, Residual


def labels(forward: Any, *inputs: torch.Tensor, **attributes: object) -> list[str]:
    """Labels of a function's operations on `inputs`, without those of inputs and outputs."""
    history = tl.log_forward_pass(Model(forward, **attributes), list(inputs))
    return [
        entry.layer_label
        for entry in history
        if not (entry.is_input_layer or entry.is_output_layer)
    ]


def type_of(function: object, x: torch.Tensor | None = None) -> str:
    """The layer type of the one operation that `function` does."""
    (label,) = labels(lambda self, x: function(x), torch.rand(1, 2, 4, 4) + 0.5 if x is None else x)
    return label.partition("_")[0]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.max_pool2d(x, 2), "maxpool2d"),
        (lambda x: F.adaptive_avg_pool2d(x, 1), "adaptiveavgpool2d"),
        (lambda x: x[0], "getitem"),
        (lambda x: 1 + x, "radd"),
        (lambda x: x + 1, "add"),
        (lambda x: x / 2, "truediv"),
        (lambda x: 2 - x, "rsub"),
        (lambda x: F.relu(x), "relu"),
        (lambda x: torch.relu(x), "relu"),
        (lambda x: x.relu(), "relu"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "scaleddotproductattention"),
        (lambda x: F.softmax(x, dim=-1), "softmax"),
        (lambda x: F.gelu(x), "gelu"),
        (lambda x: x.mT, "mt"),
        (lambda x: F.layer_norm(x, (4,)), "layernorm"),
        (lambda x: torch.flatten(x, 1), "flatten"),
        (lambda x: F.dropout(x, 0.5), "dropout"),
        (lambda x: F.interpolate(x, scale_factor=2), "upsamplenearest2d"),
    ],
)
def test_the_type_is_the_functions_name_in_lower_case_without_underscores(
    function: object, expected: str
) -> None:
    assert type_of(function) == expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("y += 1", "iadd"), ("y -= 1", "isub"), ("y *= 2", "imul"), ("y /= 2", "itruediv"), (("y "
                                                                                             "**= 2"), "ipow"),
        ("y //= 2", "ifloordiv"), ("y %= 2", "imod"), ("y[0] = 3", "setitem"), ("y.relu_()",
        "relu"),
        ("torch.relu_(y)", "relu"), ("y.add_(1)", "add"), ("F.relu(y, inplace=True)", "relu"),
    ],
)  # fmt: skip
def test_in_place_operators_have_names_of_their_own_and_in_place_functions_have_not(
    statement: str, expected: str
) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        space: dict[str, Any] = {"y": x * 1, "torch": torch, "F": F}
        exec(statement, space)
        return space["y"]

    assert labels(forward, torch.rand(3)) == ["mul_1_1", f"{expected}_1_2"]


def test_split_with_a_list_of_sizes_is_splitwithsizes() -> None:
    assert labels(lambda self, x: x.split([1, 3]), torch.rand(4)) == [
        "splitwithsizes_1_1",
        "splitwithsizes_2_2",
    ]
    assert labels(lambda self, x: torch.split(x, [1, 3]), torch.rand(4)) == [
        "splitwithsizes_1_1",
        "splitwithsizes_2_2",
    ]
    assert labels(lambda self, x: x.split(2), torch.rand(4)) == ["split_1_1", "split_2_2"]
    assert labels(lambda self, x: torch.split(x, 2), torch.rand(4)) == ["split_1_1", "split_2_2"]


def test_each_output_of_a_call_is_a_layer_of_its_own() -> None:
    history = tl.log_forward_pass(Model(lambda self, x: x.max(dim=0)), torch.randn(3, 4))
    values, indices = history["max_1"], history["max_2"]
    assert (values.layer_label, indices.layer_label) == ("max_1_1", "max_2_2")
    assert (values.iterable_output_index, indices.iterable_output_index) == (0, 1)
    assert values.is_part_of_iterable_output
    assert not history["input_1"].is_part_of_iterable_output
    assert indices.tensor_dtype is torch.int64
    assert history.num_operations == 1


def test_overall_numbers_count_layers_and_a_new_pass_takes_none() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.fc(self.fc(torch.sin(x))))

    found = labels(forward, torch.randn(2, 4), fc=nn.Linear(4, 4))
    assert found == ["sin_1_1", "linear_1_2:1", "linear_1_2:2", "exp_1_3"]


def test_inputs_and_buffers_come_before_and_outputs_after_all_operations() -> None:
    history = tl.log_forward_pass(Residual(), torch.randn(2, 4))
    assert history.layer_labels[:2] == ["input_1_0", "buffer_1_0"]
    assert history.layer_labels[-2:] == ["output_1_10", "output_2_11"]
    assert [history[label].layer_total_num for label in ("input_1", "buffer_1", "relu_1")] == [
        0,
        0,
        1,
    ]


def test_several_inputs_are_numbered_in_order() -> None:
    history = tl.log_forward_pass(
        Model(lambda self, a, b, c: a * c + b), [torch.rand(2), torch.rand(2), torch.rand(2)]
    )
    assert history.input_layers == ["input_1_0", "input_2_0", "input_3_0"]
    assert history["mul_1"].parent_layers == ["input_1_0", "input_3_0"]


def test_an_input_that_nothing_reads_is_listed() -> None:
    history = tl.log_forward_pass(Model(lambda self, a, b: b + 1), [torch.rand(2), torch.rand(2)])
    assert history.input_layers == ["input_1_0", "input_2_0"]
    assert history["input_1"].child_layers == []


def test_the_same_tensor_given_twice_is_one_input_with_two_addresses() -> None:
    x = torch.rand(2)
    history = tl.log_forward_pass(Model(lambda self, a, b: a + b), [x, x])
    assert history.input_layers == ["input_1_0"]
    assert history["add_1"].parent_layers == ["input_1_0"]
    assert history["add_1"].parent_layer_arg_locs["args"] == {0: "input_1_0", 1: "input_1_0"}


def test_the_suffix_stands_only_where_there_are_several_passes() -> None:
    history = tl.log_forward_pass(MLP(), torch.randn(2, 4))
    assert not any(":" in label for label in history.layer_labels)
    assert history["linear_1_1:1"] == history["linear_1_1"]
    assert history.layer_labels_w_pass[1] == "linear_1_1:1"


# -- what is an entry ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda self, x: self.drop(x), "dropout"),
        (lambda self, x: x.contiguous(), "contiguous"),
        (lambda self, x: x.to(torch.float32), "to"),
        (lambda self, x: x.float(), "float"),
        (lambda self, x: self.identity(x), "identity"),
    ],
)
def test_operations_that_return_their_input_are_entries_and_readers_hang_below_them(
    function: object, name: str
) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return function(self, y) + 1

    model = Model(forward, drop=nn.Dropout(), identity=nn.Identity()).eval()
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [entry.layer_label for entry in history][1:-1] == ["mul_1_1", f"{name}_1_2", "add_1_3"]
    assert history["add_1"].parent_layers == [f"{name}_1_2"]
    assert history[f"{name}_1"].parent_layers == ["mul_1_1"]


def test_a_module_that_hands_back_an_earlier_tensor_adds_identity() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()), nn.ReLU())
    history = tl.log_forward_pass(model, torch.rand(3))
    assert history["0"].layer_type == "identity"
    assert history["relu_1"].parent_layers == [history["1.0"].layer_label]


def test_tensors_made_inside_are_parentless_entries() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            + torch.zeros(3)
            + torch.arange(3)
            + torch.randn_like(x)
            + torch.tensor([1.0, 2.0, 3.0])
        )

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    made = ["zeros_1_1", "arange_1_3", "tensor_1_7"]
    assert [
        label for label in history.internally_initialized_layers if not label.startswith("randn")
    ] == made
    for label in made:
        assert history[label].parent_layers == []
        assert not history[label].has_input_ancestor
        assert history[label].initialized_inside_model


def test_reads_of_values_and_metadata_are_no_entries() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        facts = [
            x.shape,
            x.size(),
            x.size(0),
            x.numel(),
            x.dim(),
            x.ndim,
            x.dtype,
            x.device,
            x.layout,
            x.is_sparse,
        ]
        facts += [
            x.requires_grad,
            x.is_leaf,
            x.grad,
            x.grad_fn,
            x.stride(),
            x.storage_offset(),
            x.data_ptr(),
            len(x),
        ]
        facts += [
            x.numpy(),
            x.tolist(),
            x.element_size(),
            x.nbytes,
            x.is_contiguous(),
            str(x),
            repr(x),
            f"{x}",
            hash(x),
        ]
        facts += [
            torch.is_tensor(x),
            torch.is_floating_point(x),
            torch.numel(x),
            x.is_floating_point(),
            x._version,
        ]
        facts += [torch.equal(x, x), torch.allclose(x, x), x.untyped_storage().nbytes(), x.is_cuda]
        return x + len(facts)

    assert labels(forward, torch.rand(3)) == ["add_1_1"]


def test_item_and_conversions_to_numbers_are_no_entries() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        s = x.sum()
        return x * (s.item() + float(s) + int(s) + complex(s).real)

    assert labels(forward, torch.rand(3)) == ["sum_1_1", "mul_1_2"]


def test_iterating_over_a_tensor_is_unbind() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        a, b = x
        return a + b

    assert labels(forward, torch.rand(2, 3)) == ["unbind_1_1", "unbind_2_2", "add_1_3"]


def test_operations_without_input_or_output_are_left_out_and_counted() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        torch.ones(3) * 2
        return x + 1

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert len(history) == 3
    assert history.num_operations_left_out == 2


def test_a_result_that_is_not_used_but_comes_from_the_input_is_listed() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        torch.exp(x)
        return x + 1

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert history.internally_terminated_layers == ["exp_1_1"]
    assert history["exp_1"].terminated_inside_model
    assert not history["exp_1"].is_output_ancestor


def test_buffers_are_entries_only_where_they_are_read() -> None:
    model = Model(lambda self, x: x * self.used)
    model.register_buffer("unused", torch.rand(3))
    model.register_buffer("used", torch.rand(3))
    history = tl.log_forward_pass(model, torch.rand(3))
    assert history.buffer_layers == ["buffer_1_0"]
    assert history["buffer_1"].buffer_address == "used"
    assert history["used"] == history["buffer_1"]
    assert history["buffer_1"].is_buffer_layer


def test_multihead_attention_logs_its_linears_views_and_attention() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = Model(
        lambda self, x: self.attention(x, x, x, need_weights=False)[0], attention=attention
    )
    types = [entry.layer_type for entry in tl.log_forward_pass(model.train(), torch.randn(2, 5, 8))]
    assert types.count("linear") == 2
    assert "scaleddotproductattention" in types
    assert "view" in types
    assert "multiheadattentionforward" not in types


def test_lstm_is_one_call_with_three_outputs() -> None:
    history = tl.log_forward_pass(nn.LSTM(4, 6), torch.randn(5, 2, 4))
    found = [entry for entry in history if entry.layer_type == "lstm"]
    assert [entry.iterable_output_index for entry in found] == [0, 1, 2]
    assert found[0].num_param_tensors == 4
    assert found[0].tensor_shape == (5, 2, 6)
