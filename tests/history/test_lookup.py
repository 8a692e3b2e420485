"""Lookup keys, and what is said where there is none."""

import re
from typing import Any

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
        KeyError, match=r"'linear' is part of 2 labels; say which: 'linear_1_1', 'linear_2_3'"
    ):
        history["linear"]


@pytest.mark.parametrize("index", [5, -6, 100])
def test_an_index_out_of_range_says_the_range(index: int) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(
        IndexError, match=re.escape(f"Layer {index} is out of range: there are 5, numbered 0 to 4")
    ):
        history[index]


@pytest.mark.parametrize("key", [1.5, None, True, ("a", 1), [1]])
def test_a_key_of_another_type_is_a_type_error(key: Any) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(TypeError, match="key of a layer must be a name or a number"):
        history[key]


def test_a_slice_is_told_where_slices_work() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
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


@pytest.mark.parametrize("model", [MLP(), Residual(), Recurrent(), nn.LSTM(4, 4)])
def test_a_label_means_what_the_table_of_all_keys_says(model: nn.Module) -> None:
    lookup = tl.log_forward_pass(model, torch.rand(2, 4))._lookup
    found = {key: lookup._labelled(key) for key in lookup._table()}
    assert sum(entry is not None for entry in found.values()) >= len(lookup._log.visible)
    for key, entries in lookup._table().items():
        assert found[key] is None or entries == [found[key]], key


def test_an_address_that_looks_like_a_label_is_found_beside_it() -> None:
    model = Model(lambda self, x: (x + self.sin_1_2).sin())
    model.register_buffer("sin_1_2", torch.ones(1))
    history = tl.log_forward_pass(model, torch.rand(3))
    assert "sin_1_2" in history.layer_labels
    with pytest.raises(KeyError, match="say which"):
        history["sin_1_2"]


def test_labels_are_found_without_the_table_of_all_keys() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    for label in (*history.layer_labels, *history.layer_labels_w_pass):
        assert history[label].layer_label_w_pass.startswith(label)
    assert "_entries" not in vars(history._lookup)
    assert "linear_1_1:9" not in history
    assert "linear_1_1:02" not in history
