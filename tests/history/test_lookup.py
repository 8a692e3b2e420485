"""Lookup keys, and what is said where there is none."""

import re
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, Recurrent, Residual


@pytest.mark.parametrize(
    "key", ["linear_2_3", "linear_2_3:1", "linear_2", "linear_2:1", "fc2", "fc2:1", 3, -2, "near_2",
    "_2_3"]
)  # fmt: skip
def test_every_kind_of_key_finds_the_entry(key: Any) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    assert history[key].layer_label == "linear_2_3"
    assert key in history


def test_addresses_are_keys() -> None:
    history = tl.log_forward_pass(Residual(), torch.rand(2, 4))
    assert history["input.x"].layer_label == "input_1_0"
    assert history["output.logits"].layer_label == "output_1_10"
    assert history["output.hidden"].layer_label == "output_2_11"
    assert history["scale"].layer_label == "buffer_1_0"
    assert history["blocks.1"].layer_label == "add_2_6"
    assert history["blocks.1.fc"].layer_label == "linear_2_5"
    assert history["output.logits"].input_output_address == "output.logits"


@pytest.mark.parametrize("model", [MLP(), Residual(), Recurrent(), nn.LSTM(4, 4)])
def test_every_lookup_key_of_every_entry_finds_it(model: nn.Module) -> None:
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    for position, entry in enumerate(history):
        assert history[position] == entry
        assert history[position - len(history)] == entry
        assert entry.lookup_keys
        for key in entry.lookup_keys:
            assert history[key] == entry, key


def test_passes_are_keys() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    for key in ("linear_1_1:2", "linear_1:2", "fc:2"):
        assert history[key].layer_label == "linear_1_1:2"


@pytest.mark.parametrize("key", ["linear_1_1", "linear_1", "fc"])
def test_a_bare_name_with_several_passes_lists_them(key: str) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    with pytest.raises(
        KeyError,
        match=rf"{key}' has 4 passes; say which: '{key}:1', '{key}:2', '{key}:3', '{key}:4'",
    ):
        history[key]
    assert key not in history


def test_an_unknown_name_lists_the_closest_keys() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(KeyError, match=r"No layer 'linaer_1'. Closest: .*'linear_1"):
        history["linaer_1"]
    with pytest.raises(KeyError, match=r"No layer 'FC2'. Closest: .*'fc2'"):
        history["FC2"]
    with pytest.raises(KeyError, match="No layer 'linear_1:7'"):
        history["linear_1:7"]
    with pytest.raises(KeyError, match="No layer ''"):
        history[""]


def test_a_part_of_several_labels_lists_them() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(
        KeyError, match=r"'linear' fits 2 layers; say which: 'linear_1_1', 'linear_2_3'"
    ):
        history["linear"]


@pytest.mark.parametrize("index", [5, -6, 100])
def test_an_index_out_of_range_says_the_range(index: int) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(
        IndexError, match=re.escape(f"Layer {index} is out of range: there are 5, numbered 0 to 4")
    ):
        history[index]


@pytest.mark.parametrize("key", [1.5, None, True, ("a", 1), {"fc1"}])
def test_a_key_of_another_type_is_a_type_error(key: Any) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(TypeError, match="key of a layer must be a name or a number"):
        history[key]


def test_a_slice_is_told_where_slices_work() -> None:
    history: Any = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(TypeError, match=r"history\.layer_list\[1:3\]"):
        history[1:3]


def test_a_missing_key_does_not_break_membership() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    assert "nothing" not in history
    assert 99 not in history
    assert history["fc1"] in history


def test_a_module_that_returns_several_tensors_is_found_by_its_first() -> None:
    model = Model(lambda self, x: self.rnn(x)[0], rnn=nn.LSTM(4, 4))
    assert tl.log_forward_pass(model, torch.rand(3, 2, 4))["rnn"].iterable_output_index == 0


def test_ordinals_count_listed_entries() -> None:
    history = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="linear", keep_unsaved_layers=False
    )
    assert [history[0].layer_label, history[-1].layer_label] == ["linear_1_1", "linear_2_3"]
    for entry in history:
        for key in entry.lookup_keys:
            assert history[key] == entry


def test_a_full_label_wins_over_a_module_of_the_same_name() -> None:
    model = nn.Sequential()
    model.add_module("relu_1_2", nn.Tanh())
    model.add_module("other", nn.ReLU())
    history = tl.log_forward_pass(model, torch.rand(3))
    assert history["relu_1_2"].layer_label == "relu_1_2"


def test_a_label_wins_over_an_address_of_the_same_name() -> None:
    model = Model(lambda self, x: (x + self.sin_1_2).sin())
    model.register_buffer("sin_1_2", torch.ones(1))
    history = tl.log_forward_pass(model, torch.rand(3))
    assert history["sin_1_2"].layer_type == "sin"


def test_labels_are_found_without_a_table_of_other_keys() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    for label in (*history.layer_labels, *history.layer_labels_w_pass):
        assert history[label].layer_label_w_pass.startswith(label)
    assert not {"_modules", "_addresses"} & vars(history._lookup).keys()
    assert "linear_1_1:9" not in history
    assert "linear_1_1:02" not in history


class Named(nn.Module):
    """Modules whose names are also labels of other layers, addresses or arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_0, self.linear_1 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.output, self.relu_1_3, self.max = nn.Linear(4, 4), nn.Tanh(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_1(self.linear_0(x)).relu()
        return self.relu_1_3(self.output(x)) + 1


@pytest.mark.parametrize(("key", "label"), [
    ("linear_1", "linear_2_2"), ("linear_0", "linear_1_1"), ("linear_1_1", "linear_1_1"),
    ("output", "linear_3_4"), ("relu_1_3", "relu_1_3"), ("relu_1_3:1", "relu_1_3"),
    ("linear_2", "linear_2_2"), ("x", "input_1_0"), ("output_1", "output_1_7"), ("tan", "tanh_1_5"),
])  # fmt: skip
def test_a_key_means_the_same_layer_in_reading_and_saving(key: str, label: str) -> None:
    model, x = Named(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x)
    assert history[key].layer_label == label
    assert tl.log_forward_pass(model, x, layers_to_save=key).layers_with_saved_activations == [
        label
    ]
    history.save_new_activations(model, x, layers_to_save=key)
    assert history.layers_with_saved_activations == [label]
    for entry in history:
        assert all(history[own] == entry for own in entry.lookup_keys)


def test_a_module_called_output_is_saved_by_its_address() -> None:
    inner = nn.Sequential(OrderedDict(dense=nn.Linear(3, 3), act=nn.ReLU()))
    model = nn.Sequential(OrderedDict(output=nn.Sequential(OrderedDict(output=inner))))
    history = tl.log_forward_pass(model, torch.rand(2, 3), layers_to_save="output.output.dense")
    assert [e.layer_label for e in history if e.has_saved_activations] == ["linear_1_1"]


def test_a_shared_module_is_found_by_all_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.teacher = self.encoder

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.teacher(x) - 1

    history = tl.log_forward_pass(Tied(), torch.rand(2, 4))
    assert history["teacher"] == history["encoder"] == history["relu_1"]
    assert history["teacher.0:1"] == history["encoder.0"] == history["linear_1"]
    log = tl.log_forward_pass(Tied(), torch.rand(2, 4), layers_to_save=["teacher.0"])
    assert log.layers_with_saved_activations == ["linear_1_1"]


def test_an_argument_is_found_by_its_name() -> None:
    class Pool(nn.Module):
        def forward(self, x: torch.Tensor, pair: list[torch.Tensor]) -> torch.Tensor:
            return nn.functional.max_pool2d(x, 2) + pair[0] + pair[1]

    pair = [torch.rand(1), torch.rand(1)]
    history = tl.log_forward_pass(Pool(), [torch.rand(1, 1, 4, 4), pair])
    assert history["x"] == history["input.x"] == history[0]
    says = "'pair' means 2 tensors; say which: 'input.pair.0', 'input.pair.1'"
    with pytest.raises(KeyError, match=says):
        history["pair"]


class Parts(nn.Module):
    """Returns tensors in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.pair = nn.LSTM(4, 4), Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, (hidden, cell) = self.lstm(x)
        total = states + hidden + cell
        for _ in range(2):
            found = self.pair(total)
            total = found["sum"] + found["both"].left + found["both"].right[0]
        return total


class Both(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"sum": x + 1, "both": Both(x.sin(), [x.cos(), x])}


PARTS = {
    "lstm.output.0": "lstm_1", "lstm.output.1.0": "lstm_2", "lstm:1.output.1.1": "lstm_3",
    "pair:1.output.sum": "add_3:1", "pair:2.output.both.left": "sin_1:2",
    "pair:2.output.both.right.0": "cos_1:2", "pair:1.output.both.right.1": "identity_1:1",
}  # fmt: skip


def test_each_tensor_that_a_module_returns_has_a_key() -> None:
    model, x = Parts(), torch.rand(3, 2, 4)
    history = tl.log_forward_pass(model, x)
    for key, label in PARTS.items():
        assert history[key] == history[label], key
        assert key in history[label].lookup_keys
        chosen = tl.log_forward_pass(model, x, layers_to_save=key)
        assert chosen.layers_with_saved_activations == [history[label].layer_label]
        assert torch.equal(chosen[key].tensor_contents, history[key].tensor_contents)
    both = tl.log_forward_pass(model, x, layers_to_save="pair.output.sum")
    assert len(both.layers_with_saved_activations) == 2
    with pytest.raises(KeyError, match="means 2 tensors"):
        history["pair.output.sum"]


@pytest.mark.parametrize(
    "choose",
    [
        lambda entry: entry.tensor_contents.mean() > 0,
        lambda entry: entry.tensor_contents is not None,
    ],
)
def test_a_function_that_chooses_by_value_is_told_that_values_come_later(choose: Any) -> None:
    with pytest.raises(ValueError, match="no tensor_contents"):
        tl.log_forward_pass(nn.Linear(2, 2), torch.ones(1, 2), layers_to_save=choose)
