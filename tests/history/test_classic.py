"""Code written for the classic TorchLens (0.1) runs. What is expected here is what the classic
says, but for its labels.
"""

import copy
import inspect
import math
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, Recurrent
from torchlens._history.classic import ENTRY_FIELDS, ENTRY_METHODS, HISTORY_FIELDS, NOT_HERE


def of(history: tl.ModelHistory, field: str) -> dict[str, Any]:
    """The field of every entry."""
    return {entry.layer_label: getattr(entry, field) for entry in history}


class Branching(nn.Module):
    """Two branches, a constant, a call with several results, an index, a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        p, q = self.a(x), self.block(x)
        c = torch.ones(4)
        u, v = torch.split(torch.cat([p, q], dim=1), [4, 4], dim=1)
        return {"sum": u + v + c, "first": u[0]}


@pytest.fixture(scope="module")
def branching() -> tl.ModelHistory:
    return tl.log_forward_pass(Branching(), torch.rand(2, 4), save_function_args=True)


@pytest.fixture(scope="module")
def recurrent() -> tl.ModelHistory:
    """Four times (linear, +1, *2)."""
    return tl.log_forward_pass(Recurrent(), torch.rand(2, 4))


@pytest.fixture(scope="module")
def buffers() -> tl.ModelHistory:
    return tl.log_forward_pass(
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).eval(), torch.rand(2, 4)
    )


# -- calls -----------------------------------------------------------------------------------------


def test_options_by_position(tmp_path: Path):
    model, x = MLP(), torch.rand(2, 4)
    assert tl.log_forward_pass(model, x, None, "none").num_tensors_saved == 0
    history = tl.log_forward_pass(
        model, x, None, ["fc1"], False, "cpu", torch.sin, True, True, True, True, "rolled", 1,
        tmp_path / "a.gv", True,
        "gv", False, "topdown", {"bgcolor": "red"}, None, None, None, None, None, 7,
    )  # fmt: skip
    assert history.layer_labels == ["linear_1_1"]
    assert history["fc1"].max_distance_from_input == 1
    assert history["fc1"].creation_args is not None
    assert history.random_seed_used == 7
    source = (tmp_path / "a.gv").read_text()
    assert "rankdir=TB" in source
    assert "bgcolor=red" in source
    by_name = tl.log_forward_pass(
        model,
        x,
        layers_to_save=["fc1"],
        keep_unsaved_layers=False,
        activation_postfunc=torch.sin,
        detach_saved_tensors=True,
    )
    assert torch.equal(history["fc1"].tensor_contents, by_name["fc1"].tensor_contents)
    assert not history["fc1"].tensor_contents.requires_grad


def test_drawing_options_by_position_and_by_their_classic_names(
    tmp_path: Path, recurrent: tl.ModelHistory
):
    drawing = recurrent.render_graph(
        "rolled", 1, tmp_path / "b", save_only=True, vis_fileformat="gv", direction="leftright"
    )
    assert drawing is not None
    assert drawing.source_path == tmp_path / "b"
    assert "rankdir=LR" in drawing.source
    nones = [None] * 6
    again = recurrent.render_graph(
        "rolled", 1, tmp_path / "c", *nones, True, "gv", True, "leftright"
    )
    assert again is not None
    assert again.source == drawing.source
    tl.show_model_graph(
        Recurrent(),
        torch.rand(2, 4),
        None,
        "rolled",
        1,
        tmp_path / "d",
        save_only=True,
        vis_fileformat="gv",
    )
    tl.show_model_graph(
        Recurrent(),
        torch.rand(2, 4),
        None,
        "rolled",
        1,
        tmp_path / "e",
        *nones,
        True,
        "gv",
        False,
        "topdown",
        3,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"b", "c", "d", "e"}


def test_options_by_position_that_are_too_many_or_given_twice(recurrent: tl.ModelHistory):
    with pytest.raises(
        TypeError,
        match=r"render_graph\(\) got 'vis_nesting_depth' twice: by position, and as "
        r"'vis_nesting_depth'",
    ):
        recurrent.render_graph("rolled", 1, vis_nesting_depth=2)
    with pytest.raises(TypeError, match=r"render_graph\(\) got 'vis_save_only' twice"):
        recurrent.render_graph("rolled", save_only=True, vis_save_only=True)
    with pytest.raises(
        TypeError, match=r"takes at most 12 options by position after vis_opt, got 13"
    ):
        recurrent.render_graph("rolled", *[None] * 13)


@pytest.mark.parametrize(
    ("layers", "count"),
    [("ALL", 5), ("All", 5), ("NONE", 0), ("None", 0), (None, 0), ((), 0), (set(), 0)],
)
def test_all_and_none_in_any_spelling(layers: Any, count: int):
    assert (
        tl.log_forward_pass(MLP(), torch.rand(2, 4), layers_to_save=layers).num_tensors_saved
        == count
    )
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history.save_new_activations(MLP(), torch.rand(2, 4), None, layers)
    assert history.num_tensors_saved == count


def test_the_types_have_their_classic_names(recurrent: tl.ModelHistory):
    assert isinstance(recurrent[0], tl.TensorLogEntry)
    assert isinstance(recurrent.layer_list_rolled[0], tl.RolledTensorLogEntry)
    assert "TensorLogEntry" not in dir(tl)


# -- fields of a history ---------------------------------------------------------------------------


def test_options_are_fields():
    def half(t: torch.Tensor) -> torch.Tensor:
        return t / 2

    plain = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    asked = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="fc1", keep_unsaved_layers=False,
        output_device="cpu",
        activation_postfunc=half, mark_input_output_distances=True, detach_saved_tensors=True,
        save_function_args=True,
        save_gradients=True,
    )  # fmt: skip
    fields = (
        "keep_unsaved_layers", "output_device", "activation_postfunc",
        "mark_input_output_distances",
        "detach_saved_tensors", "save_function_args", "save_gradients",
    )  # fmt: skip
    assert [getattr(plain, name) for name in fields] == [
        True,
        "same",
        None,
        False,
        False,
        False,
        False,
    ]
    assert [getattr(asked, name) for name in fields] == [False, "cpu", half, True, True, True, True]
    entry = asked["fc1"]
    assert (entry.activation_postfunc, entry.output_device, entry.detach_saved_tensor,
    entry.save_gradients) == (
        half, "cpu", True, True,
    )  # fmt: skip


def test_dicts_of_layers(recurrent: tl.ModelHistory):
    assert list(recurrent.layer_dict_main_keys) == recurrent.layer_labels
    assert recurrent.layer_dict_main_keys["add_1_2:3"] == recurrent["add_1_2:3"]
    every = recurrent.layer_dict_all_keys
    for key in (0, -1, "linear_1_1:2", "linear_1:2", "fc:2", "input.x", "output_1"):
        assert every[key] == recurrent[key]
    assert recurrent.layers_computed_with_params == {
        "linear_1_1:1": [f"linear_1_1:{number}" for number in (1, 2, 3, 4)]
    }
    assert recurrent.same_layer_operations["mul_1_3"] == [
        f"mul_1_3:{number}" for number in (1, 2, 3, 4)
    ]
    assert set(map(frozenset, recurrent.equivalent_operations.values())) == {
        frozenset({"input_1_0"}), frozenset({"output_1_4"}),
        *(frozenset(f"{layer}:{number}" for number in (1, 2, 3, 4)) for layer in ("linear_1_1",
        "add_1_2", "mul_1_3")),
    }  # fmt: skip
    assert recurrent.has_saved_gradients is False
    assert recurrent.func_argnames["linear"] == ("input", "weight", "bias")


def test_a_dict_that_is_indexed_in_a_loop_is_made_once():
    history = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="fc1", keep_unsaved_layers=False
    )
    made = history.layer_dict_main_keys
    assert list(made) == ["linear_1_1"]
    assert history.layer_dict_main_keys is made
    history.save_new_activations(MLP(), torch.rand(2, 4))
    assert list(history.layer_dict_main_keys) == history.layer_labels
    assert len(history.layer_dict_main_keys) == 5
    log = weakref.ref(history._log)
    del history, made
    assert log() is None  # without the garbage collector


def test_dicts_of_modules(branching: tl.ModelHistory, recurrent: tl.ModelHistory):
    assert branching.module_num_tensors == {"a": 1, "block": 2, "block.0": 1, "block.1": 1}
    assert branching.module_pass_layers == {
        "a:1": ["linear_1_1"], "block:1": ["linear_2_2", "relu_1_3"], "block.0:1": ["linear_2_2"],
        "block.1:1": ["relu_1_3"],
    }  # fmt: skip
    assert branching.module_pass_num_tensors == {
        "a:1": 1,
        "block:1": 2,
        "block.0:1": 1,
        "block.1:1": 1,
    }
    assert branching.module_pass_children == {
        "a:1": [],
        "block:1": ["block.0:1", "block.1:1"],
        "block.0:1": [],
        "block.1:1": [],
    }
    assert branching.top_level_module_passes == ["a:1", "block:1"]
    assert recurrent.top_level_module_passes == ["fc:1", "fc:2", "fc:3", "fc:4"]
    assert recurrent.module_pass_layers["fc:3"] == ["linear_1_1:3"]


def test_times():
    before = time.time()
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    assert before - 1 <= history.pass_start_time <= history.pass_end_time <= time.time() + 1
    assert history.elapsed_time_setup > 0
    parts = (
        history.elapsed_time_setup,
        history.elapsed_time_forward_pass,
        history.elapsed_time_cleanup,
    )
    assert math.isclose(sum(parts), history.elapsed_time_total)


def test_gradients():
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    assert history.has_saved_gradients
    assert history["fc1"].grad_fsize == 2 * 5 * 4
    assert history["fc1"].grad_fsize_nice == "40 B"
    assert history["input_1"].grad_fsize == 0


# -- fields of an entry ----------------------------------------------------------------------------


def test_arguments(branching: tl.ModelHistory):
    expected = {
        "linear_1_1": ([], 3, 0), "ones_1_4": ([4], 1, 0), "cat_1_5": ([1], 1, 1),
        "splitwithsizes_1_6": ([[4, 4], 1], 3, 0), "getitem_1_10": ([0], 2, 0), "input_1_0": ([], 0,
        0),
        "output_2_12": ([], 0, 0),
    }  # fmt: skip
    for label, (others, positional, named) in expected.items():
        entry = branching[label]
        assert entry.func_all_args_non_tensor == others
        assert (entry.num_position_args, entry.num_keyword_args) == (positional, named)
        assert entry.num_func_args_total == positional + named
    assert branching["linear_1"].function_args_saved
    assert not tl.log_forward_pass(MLP(), torch.rand(2, 4))["fc1"].function_args_saved


def test_ancestors(branching: tl.ModelHistory, buffers: tl.ModelHistory):
    assert branching["add_2_9"].orig_ancestors == {"input_1_0", "ones_1_4"}
    assert branching["add_2_9"].internally_initialized_ancestors == {"ones_1_4"}
    assert branching["add_2_9"].internally_initialized_parents == ["ones_1_4"]
    assert branching["ones_1_4"].internally_initialized_ancestors == {"ones_1_4"}
    assert branching["add_1_8"].orig_ancestors == {"input_1_0"}
    flags = of(branching, "has_internally_initialized_ancestor")
    assert [label for label, flag in flags.items() if flag] == [
        "ones_1_4",
        "add_2_9",
        "output_1_11",
    ]
    assert branching.layers_where_internal_branches_merge_with_input == ["add_2_9"]
    assert buffers.layers_where_internal_branches_merge_with_input == ["batchnorm_1_1"]
    assert buffers["linear_1"].orig_ancestors == {"input_1_0", "buffer_1_0", "buffer_2_0"}
    assert buffers["linear_1"].internally_initialized_parents == ["batchnorm_1_1"]
    assert buffers["batchnorm_1"].internally_initialized_parents == ["buffer_1_0", "buffer_2_0"]
    assert buffers.buffer_num_passes == {"0.running_mean": 1, "0.running_var": 1}
    assert (buffers["buffer_1"].buffer_pass, buffers["buffer_1"].buffer_parent) == (1, None)
    assert buffers["linear_1"].buffer_pass is None


def test_small_facts(branching: tl.ModelHistory):
    last = of(branching, "is_last_output_layer")
    assert [label for label, flag in last.items() if flag] == ["output_2_12"]
    assert [label for label, flag in of(branching, "was_getitem_applied").items() if flag] == [
        "splitwithsizes_1_6"
    ]
    inside = of(branching, "is_computed_inside_submodule")
    assert [label for label, flag in inside.items() if flag] == [
        "linear_1_1",
        "linear_2_2",
        "relu_1_3",
    ]
    assert branching["linear_1_1"].realtime_tensor_num == 2
    assert branching["linear_1_1"].equivalent_operations == {"linear_1_1"}
    assert (
        branching["splitwithsizes_1"].operation_equivalence_type
        != branching["splitwithsizes_2"].operation_equivalence_type
    )


def test_the_number_at_run_time_counts_what_is_not_in_the_log():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        torch.zeros(3) + 1
        return x * 2

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert of(history, "realtime_tensor_num") == {"input_1_0": 1, "mul_1_1": 4, "output_1_2": 5}


def test_single_booleans():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        scalar, vector = x.sum() > 0, x[0, :1] > 0
        return x * scalar * vector * (x > 0)

    history = tl.log_forward_pass(Model(forward), torch.rand(2, 4))
    assert [label for label, flag in of(history, "is_atomic_bool_layer").items() if flag] == [
        "gt_1_2"
    ]


def test_passes_of_parameters(recurrent: tl.ModelHistory):
    assert recurrent["linear_1_1:3"].parent_param_barcodes == ["fc.weight", "fc.bias"]
    assert recurrent["linear_1_1:3"].parent_param_passes == {"fc.weight": 3, "fc.bias": 3}
    assert recurrent["add_1_2:1"].parent_param_passes == {}


def test_neighbours_as_entries(recurrent: tl.ModelHistory):
    entry = recurrent["add_1_2:2"]
    assert entry.get_parent_layers() == [recurrent["linear_1_1:2"]]
    assert entry.get_child_layers() == [recurrent["mul_1_3:2"]]
    assert entry.copy() == entry
    assert entry.copy() is not entry


def test_the_history_of_an_entry():
    history = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="fc1", keep_unsaved_layers=False
    )
    entry = history["fc1"]
    assert entry.source_model_history is history
    assert entry.copy().source_model_history is history
    del history
    again = entry.source_model_history
    assert isinstance(again, tl.ModelHistory)
    assert again.layer_labels == ["linear_1_1"]
    assert again["fc1"] == entry
    again.save_new_activations(MLP(), torch.rand(3, 4))
    assert entry.tensor_contents.shape == (3, 5)


def test_what_a_child_read_of_a_view_that_was_written_to():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        view = y.view(-1)
        y.add_(1)
        return view * 2

    x = torch.rand(2, 3)
    history = tl.log_forward_pass(Model(forward), x, save_function_args=True)
    versions = history["view_1"].children_tensor_versions
    assert list(versions) == ["mul_2_4"]
    assert torch.equal(versions["mul_2_4"], (x + 1).flatten())
    assert all(
        entry.children_tensor_versions == {} for entry in history if entry.layer_type != "view"
    )
    plain = tl.log_forward_pass(Model(forward), x)
    assert plain["view_1"].children_tensor_versions == {}


def test_printing_all_fields_of_an_entry(
    recurrent: tl.ModelHistory, capsys: pytest.CaptureFixture[str]
):
    recurrent["add_1_2:2"].print_all_fields()
    printed = capsys.readouterr().out
    assert "\nlayer_label: add_1_2:2\n" in printed
    assert "\ntensor_shape: (2, 4)\n" in printed


# -- layers with all their passes ------------------------------------------------------------------


def test_rolled_layers(recurrent: tl.ModelHistory):
    layers = recurrent.layer_dict_rolled
    assert list(layers) == ["input_1_0", "linear_1_1", "add_1_2", "mul_1_3", "output_1_4"]
    linear, add, mul = (layers[name] for name in ("linear_1_1", "add_1_2", "mul_1_3"))
    assert linear.parent_layers_per_pass == {
        1: ["input_1_0"],
        2: ["mul_1_3"],
        3: ["mul_1_3"],
        4: ["mul_1_3"],
    }
    assert linear.parent_passes_per_layer == {"input_1_0": [1], "mul_1_3": [2, 3, 4]}
    assert linear.parent_layers == ["input_1_0", "mul_1_3"]
    assert linear.parent_layer_arg_locs == {"args": {0: {"input_1_0", "mul_1_3"}}, "kwargs": {}}
    assert linear.child_passes_per_layer == {"add_1_2": [1, 2, 3, 4]}
    assert mul.child_layers_per_pass == {
        1: ["linear_1_1"],
        2: ["linear_1_1"],
        3: ["linear_1_1"],
        4: ["output_1_4"],
    }
    assert mul.child_layers == ["linear_1_1", "output_1_4"]
    assert [layer.edges_vary_across_passes for layer in (linear, add, mul)] == [True, False, True]
    assert linear.bottom_level_submodule_passes_exited == {"fc:1", "fc:2", "fc:3", "fc:4"}
    assert (linear.layer_label, linear.layer_type, linear.layer_passes_total) == (
        "linear_1_1",
        "linear",
        4,
    )
    assert (linear.tensor_shape, linear.num_param_tensors, linear.computed_with_params) == (
        (2, 4),
        2,
        True,
    )
    assert layers["output_1_4"].is_last_output_layer
    assert repr(linear) == "<RolledLayer linear_1_1>"
    assert copy.copy(linear).layer_label == "linear_1_1"
    with pytest.raises(AttributeError, match="Use tensor_contents"):
        linear.activation  # noqa: B018


# -- out of the way --------------------------------------------------------------------------------


def test_classic_fields_stay_out_of_the_main_interface(recurrent: tl.ModelHistory):
    assert not set(HISTORY_FIELDS) & set(dir(recurrent))
    assert not (set(ENTRY_FIELDS) | set(ENTRY_METHODS)) & set(dir(recurrent[0]))


def test_every_classic_field_can_be_read_and_says_what_it_is(
    branching: tl.ModelHistory, buffers: tl.ModelHistory
):
    for history in (branching, buffers):
        for name in HISTORY_FIELDS:
            getattr(history, name)
        for entry in history:
            for name in ENTRY_FIELDS:
                getattr(entry, name)
    for fields in (HISTORY_FIELDS, ENTRY_FIELDS, ENTRY_METHODS):
        for name, function in fields.items():
            assert inspect.getdoc(function), name


@pytest.mark.parametrize("name", NOT_HERE)
def test_a_classic_name_that_means_nothing_here_says_why(recurrent: tl.ModelHistory, name: str):
    for owner in (recurrent, recurrent[0]):
        with pytest.raises(AttributeError) as caught:
            getattr(owner, name)
        assert NOT_HERE[name] in str(caught.value)


def test_a_near_miss_of_a_classic_name(recurrent: tl.ModelHistory):
    with pytest.raises(AttributeError, match="Did you mean 'orig_ancestors'"):
        recurrent[0].orig_ancestor  # noqa: B018
