"""Every field that PRODUCT names exists, and is right on networks small enough to check by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Conditional, Model, Recurrent, Residual
from tests.work import lines_run

HISTORY_FIELDS = [
    "model_name",
    "layer_list",
    "layer_labels",
    "layer_labels_w_pass",
    "layer_labels_no_pass",
    "layer_num_passes",
    "input_layers",
    "output_layers",
    "buffer_layers",
    "internally_initialized_layers",
    "internally_terminated_layers",
    "internally_terminated_bool_layers",
    "conditional_branch_edges",
    "layers_with_saved_activations",
    "layers_with_saved_gradients",
    "unlogged_layers",
    "model_is_recurrent",
    "model_max_recurrent_loops",
    "model_is_branching",
    "model_has_conditional_branching",
    "num_operations",
    "num_tensors_total",
    "num_tensors_saved",
    "tensor_fsize_total",
    "tensor_fsize_total_nice",
    "tensor_fsize_saved",
    "tensor_fsize_saved_nice",
    "total_params",
    "total_param_tensors",
    "total_param_layers",
    "total_params_fsize",
    "total_params_fsize_nice",
    "module_addresses",
    "module_types",
    "module_passes",
    "module_num_passes",
    "module_children",
    "top_level_modules",
    "module_nparams",
    "module_layers",
    "random_seed_used",
    "elapsed_time_total",
    "elapsed_time_forward_pass",
    "elapsed_time_function_calls",
    "elapsed_time_torchlens_logging",
]

ENTRY_FIELDS = [
    "layer_label",
    "layer_label_w_pass",
    "layer_label_no_pass",
    "layer_label_short",
    "layer_label_w_pass_short",
    "layer_label_no_pass_short",
    "layer_type",
    "layer_type_num",
    "layer_total_num",
    "pass_num",
    "layer_passes_total",
    "operation_num",
    "lookup_keys",
    "tensor_contents",
    "has_saved_activations",
    "tensor_shape",
    "tensor_dtype",
    "tensor_fsize",
    "tensor_fsize_nice",
    "creation_args",
    "creation_kwargs",
    "grad_contents",
    "has_saved_grad",
    "grad_shape",
    "grad_dtype",
    "func_applied",
    "func_applied_name",
    "func_call_stack",
    "func_time_elapsed",
    "func_argnames",
    "func_position_args_non_tensor",
    "func_keyword_args_non_tensor",
    "function_is_inplace",
    "gradfunc",
    "is_part_of_iterable_output",
    "iterable_output_index",
    "computed_with_params",
    "parent_params",
    "parent_param_shapes",
    "num_param_tensors",
    "num_params_total",
    "parent_params_fsize",
    "parent_params_fsize_nice",
    "same_layer_operations",
    "parent_layers",
    "child_layers",
    "sibling_layers",
    "spouse_layers",
    "has_parents",
    "has_children",
    "has_siblings",
    "has_spouses",
    "parent_layer_arg_locs",
    "input_ancestors",
    "output_descendents",
    "is_input_layer",
    "is_output_layer",
    "is_output_parent",
    "has_input_ancestor",
    "is_output_ancestor",
    "min_distance_from_input",
    "max_distance_from_input",
    "min_distance_from_output",
    "max_distance_from_output",
    "input_output_address",
    "is_buffer_layer",
    "buffer_address",
    "initialized_inside_model",
    "terminated_inside_model",
    "is_terminal_bool_layer",
    "atomic_bool_val",
    "in_cond_branch",
    "cond_branch_start_children",
    "containing_module_origin",
    "containing_modules_origin_nested",
    "module_nesting_depth",
    "modules_entered",
    "module_passes_entered",
    "modules_exited",
    "module_passes_exited",
    "is_submodule_input",
    "is_submodule_output",
    "is_bottom_level_submodule_output",
    "bottom_level_submodule_pass_exited",
]


@pytest.mark.parametrize("model", [MLP(), Residual(), Recurrent(), Conditional()])
@pytest.mark.parametrize(
    "options",
    [{}, {"layers_to_save": "none"}, {"layers_to_save": "add", "keep_unsaved_layers": False}],
)
def test_every_field_exists_and_can_be_read(model: nn.Module, options: dict[str, Any]) -> None:
    if isinstance(model, MLP) and options.get("layers_to_save") == "add":
        options = {**options, "layers_to_save": "linear"}
    history = tl.log_forward_pass(model, torch.rand(2, 4), **options)
    for name in HISTORY_FIELDS:
        getattr(history, name)
    for entry in history:
        for name in ENTRY_FIELDS:
            getattr(entry, name)


def test_the_fields_of_a_history() -> None:
    torch.manual_seed(0)
    history = tl.log_forward_pass(Residual(), torch.rand(2, 4))
    labels = [
        "input_1_0", "buffer_1_0", "relu_1_1", "linear_1_2", "add_1_3", "relu_2_4", "linear_2_5",
        "add_2_6", "mul_1_7",
        "ones_1_8", "add_3_9", "output_1_10", "output_2_11",
    ]  # fmt: skip
    assert history.model_name == "Residual"
    assert history.layer_labels == labels
    assert [entry.layer_label for entry in history.layer_list] == labels
    assert history.layer_labels_no_pass == labels
    assert history.layer_labels_w_pass == [f"{label}:1" for label in labels]
    assert history.layer_num_passes == dict.fromkeys(labels, 1)
    assert history.input_layers == ["input_1_0"]
    assert history.output_layers == ["output_1_10", "output_2_11"]
    assert history.buffer_layers == ["buffer_1_0"]
    assert history.internally_initialized_layers == ["ones_1_8"]
    assert history.internally_terminated_layers == []
    assert history.internally_terminated_bool_layers == []
    assert history.conditional_branch_edges == []
    assert history.layers_with_saved_activations == labels
    assert history.layers_with_saved_gradients == []
    assert history.unlogged_layers == []
    assert not history.model_is_recurrent
    assert history.model_max_recurrent_loops == 1
    assert history.model_is_branching
    assert not history.model_has_conditional_branching
    assert history.num_operations == 9
    assert history.num_tensors_total == history.num_tensors_saved == 13
    # Eleven tensors of 2x4 floats, and the buffer and the ones with four each.
    assert history.tensor_fsize_total == history.tensor_fsize_saved == 11 * 32 + 2 * 16
    assert history.tensor_fsize_total_nice == history.tensor_fsize_saved_nice == "384 B"
    assert history.total_params == 40
    assert history.total_param_tensors == 4
    assert history.total_param_layers == 2
    assert history.total_params_fsize == 160
    assert history.total_params_fsize_nice == "160 B"
    assert history.module_addresses == ["blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc"]
    assert history.module_types == {
        "blocks.0": "ResidualBlock", "blocks.0.fc": "Linear", "blocks.1": "ResidualBlock",
        "blocks.1.fc": "Linear",
    }  # fmt: skip
    assert history.module_passes == ["blocks.0:1", "blocks.0.fc:1", "blocks.1:1", "blocks.1.fc:1"]
    assert history.module_num_passes == dict.fromkeys(history.module_addresses, 1)
    assert history.module_children == {"blocks.0": ["blocks.0.fc"], "blocks.0.fc": [],
    "blocks.1": ["blocks.1.fc"],
                                       "blocks.1.fc": []}  # fmt: skip
    assert history.top_level_modules == ["blocks.0", "blocks.1"]
    assert history.module_nparams == {
        "blocks.0": 20,
        "blocks.0.fc": 20,
        "blocks.1": 20,
        "blocks.1.fc": 20,
    }
    assert history.module_layers["blocks.0"] == ["relu_1_1", "linear_1_2", "add_1_3"]
    assert history.module_layers["blocks.1.fc"] == ["linear_2_5"]
    assert history.random_seed_used is None
    assert (
        0
        < history.elapsed_time_function_calls
        <= history.elapsed_time_forward_pass
        <= history.elapsed_time_total
    )
    assert history.elapsed_time_torchlens_logging >= 0
    assert len(history) == 13
    assert list(history) == history.layer_list


def test_the_fields_of_an_entry() -> None:
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(
        model, x, save_function_args=True, mark_input_output_distances=True
    )
    entry = history["fc1"]
    assert entry.layer_label == entry.layer_label_no_pass == "linear_1_1"
    assert entry.layer_label_w_pass == "linear_1_1:1"
    assert entry.layer_label_short == entry.layer_label_no_pass_short == "linear_1"
    assert entry.layer_label_w_pass_short == "linear_1:1"
    assert (entry.layer_type, entry.layer_type_num, entry.layer_total_num) == ("linear", 1, 1)
    assert (entry.pass_num, entry.layer_passes_total, entry.operation_num) == (1, 1, 2)
    assert set(entry.lookup_keys) >= {
        1,
        -4,
        "linear_1_1",
        "linear_1_1:1",
        "linear_1",
        "linear_1:1",
        "fc1",
        "fc1:1",
    }
    assert torch.equal(entry.tensor_contents, model.fc1(x))
    assert entry.has_saved_activations
    assert entry.tensor_shape == (2, 5)
    assert entry.tensor_dtype is torch.float32
    assert (entry.tensor_fsize, entry.tensor_fsize_nice) == (40, "40 B")
    assert torch.equal(entry.creation_args[0], x)
    assert entry.creation_args[1] is model.fc1.weight or torch.equal(
        entry.creation_args[1], model.fc1.weight
    )
    assert entry.creation_kwargs == {}
    assert entry.func_applied is torch.nn.functional.linear
    assert entry.func_applied_name == "linear"
    assert entry.func_time_elapsed > 0
    assert entry.func_argnames[:2] == ("input", "weight")
    assert entry.func_position_args_non_tensor == []
    assert entry.func_keyword_args_non_tensor == {}
    assert not entry.function_is_inplace
    assert entry.gradfunc == "AddmmBackward0"
    assert not entry.is_part_of_iterable_output
    assert entry.iterable_output_index is None
    assert entry.computed_with_params
    assert entry.parent_params[0] is model.fc1.weight
    assert entry.parent_param_shapes == [(5, 4), (5,)]
    assert (entry.num_param_tensors, entry.num_params_total, entry.parent_params_fsize) == (
        2,
        25,
        100,
    )
    assert entry.parent_params_fsize_nice == "100 B"
    assert entry.same_layer_operations == ["linear_1_1"]
    assert entry.parent_layers == ["input_1_0"]
    assert entry.child_layers == ["relu_1_2"]
    assert (entry.sibling_layers, entry.spouse_layers, entry.has_siblings, entry.has_spouses) == (
        [],
        [],
        False,
        False,
    )
    assert entry.has_parents
    assert entry.has_children
    assert entry.parent_layer_arg_locs == {"args": {0: "input_1_0"}, "kwargs": {}}
    assert entry.input_ancestors == {"input_1_0"}
    assert entry.output_descendents == {"output_1_4"}
    assert (entry.is_input_layer, entry.is_output_layer, entry.is_output_parent) == (
        False,
        False,
        False,
    )
    assert history["fc2"].is_output_parent
    assert entry.has_input_ancestor
    assert entry.is_output_ancestor
    assert (entry.min_distance_from_input, entry.max_distance_from_input) == (1, 1)
    assert (entry.min_distance_from_output, entry.max_distance_from_output) == (3, 3)
    assert entry.input_output_address is None
    assert not entry.is_buffer_layer
    assert entry.buffer_address is None
    assert not entry.initialized_inside_model
    assert not entry.terminated_inside_model
    assert entry.containing_module_origin == "fc1:1"
    assert entry.containing_modules_origin_nested == ["fc1:1"]
    assert entry.module_nesting_depth == 1
    assert (entry.modules_entered, entry.module_passes_entered) == (["act"], ["act:1"])
    assert (entry.modules_exited, entry.module_passes_exited) == (["fc1"], ["fc1:1"])
    assert entry.is_submodule_input
    assert entry.is_submodule_output
    assert entry.is_bottom_level_submodule_output
    assert entry.bottom_level_submodule_pass_exited == "fc1:1"


def test_where_an_operation_was_called() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    entry = tl.log_forward_pass(nn.Sequential(Model(forward)), torch.rand(3))["sin_1"]
    place = entry.func_call_stack[0]
    assert place.file == str(Path(__file__).relative_to(Path.cwd()))
    assert place.line == forward.__code__.co_firstlineno + 1
    assert "forward" in place.function


def test_distances_are_shortest_and_longest_ways() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return x + torch.exp(torch.sin(x)) * torch.ones(3)

    history = tl.log_forward_pass(Model(forward), torch.rand(3), mark_input_output_distances=True)
    add, ones = history["add_1"], history["ones_1"]
    assert (add.min_distance_from_input, add.max_distance_from_input) == (1, 4)
    assert (add.min_distance_from_output, add.max_distance_from_output) == (1, 1)
    assert (ones.min_distance_from_input, ones.max_distance_from_input) == (None, None)
    source = history["input_1"]
    assert (source.min_distance_from_output, source.max_distance_from_output) == (2, 5)
    plain = tl.log_forward_pass(Model(forward), torch.rand(3))["add_1"]
    assert plain.min_distance_from_input is None


def test_siblings_and_spouses() -> None:
    history = tl.log_forward_pass(Model(lambda self, x: torch.sin(x) * torch.cos(x)), torch.rand(3))
    assert history["sin_1"].sibling_layers == ["cos_1_2"]
    assert history["sin_1"].spouse_layers == ["cos_1_2"]
    assert history["sin_1"].has_siblings
    assert history["sin_1"].has_spouses


def test_fields_of_passes() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    entry = history["linear_1_1:3"]
    assert (entry.pass_num, entry.layer_passes_total) == (3, 4)
    assert entry.layer_label == "linear_1_1:3"
    assert entry.layer_label_short == "linear_1:3"
    assert entry.same_layer_operations == [f"linear_1_1:{n}" for n in (1, 2, 3, 4)]
    assert entry.parent_layers == ["mul_1_3:2"]
    assert entry.module_passes_exited == ["fc:3"]
    assert history.module_num_passes == {"fc": 4}
    assert history.module_passes == ["fc:1", "fc:2", "fc:3", "fc:4"]
    assert history.layer_num_passes == {
        "input_1_0": 1,
        "linear_1_1": 4,
        "add_1_2": 4,
        "mul_1_3": 4,
        "output_1_4": 1,
    }
    assert history.model_is_recurrent
    assert history.model_max_recurrent_loops == 4
    assert history.total_param_layers == 1


def test_conditions() -> None:
    history = tl.log_forward_pass(Conditional(), torch.ones(3))
    assert history.layer_labels == ["input_1_0", "sum_1_1", "gt_1_2", "add_1_3", "output_1_4"]
    condition = history["gt_1"]
    assert condition.is_terminal_bool_layer
    assert condition.atomic_bool_val is True
    assert condition.in_cond_branch
    assert history["sum_1"].in_cond_branch
    assert not history["add_1"].in_cond_branch
    assert history.model_has_conditional_branching
    assert history.internally_terminated_bool_layers == ["gt_1_2"]
    assert history.conditional_branch_edges == [("input_1_0", "sum_1_1")]
    assert history["input_1"].cond_branch_start_children == ["sum_1_1"]
    assert history["add_1"].atomic_bool_val is None


def test_non_tensor_arguments() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.transpose(x, 0, 1), min=0.1).add_(2)

    history = tl.log_forward_pass(Model(forward), torch.rand(2, 4))
    assert history["transpose_1"].func_position_args_non_tensor == [0, 1]
    assert history["clamp_1"].func_keyword_args_non_tensor == {"min": 0.1}
    assert history["add_1"].function_is_inplace
    assert history["clamp_1"].creation_args is None


def test_nice_sizes() -> None:
    history = tl.log_forward_pass(Model(lambda self, x: x + 1), torch.rand(1, 384, 13, 13))
    assert history["add_1"].tensor_fsize == 259_584
    assert history["add_1"].tensor_fsize_nice == "253.5 KB"


def test_print_all_fields_shows_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history.print_all_fields()
    out = capsys.readouterr().out
    for name in HISTORY_FIELDS:
        assert f"{name}: " in out
    assert "layer_labels: ['input_1_0', 'linear_1_1'" in out


def _long_loop(count: int) -> tl.ModelHistory:
    def forward(self: Model, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(count // 2):
            x = torch.sin(x + y)
        return x, y * 2

    return tl.get_model_metadata(Model(forward), [torch.ones(1), torch.ones(1)])


@torch.no_grad()
def test_the_ancestors_of_ten_times_the_entries_are_ten_times_the_work() -> None:
    def lines(count: int) -> int:
        history = _long_loop(count)
        assert history.layer_labels

        def read() -> None:
            for entry in history:
                assert entry.input_ancestors
                assert entry.output_descendents

        return lines_run(read)

    assert lines(2_000) < 11 * lines(200)


def test_ancestors_are_the_inputs_and_outputs_that_a_search_finds() -> None:
    history = _long_loop(6)
    for entry in history:
        for edges, ends, found in (
            ("parent_layers", history.input_layers, entry.input_ancestors),
            ("child_layers", history.output_layers, entry.output_descendents),
        ):
            reached, pending = {entry.layer_label}, [entry.layer_label]
            while pending:
                new = set(getattr(history[pending.pop()], edges)) - reached
                reached |= new
                pending += new
            assert found == reached & set(ends)


def test_parameters_among_saved_arguments_are_not_copied_and_changes_are_noticed() -> None:
    model = torch.nn.Linear(3, 2)
    history = tl.log_forward_pass(model, torch.rand(1, 3), save_function_args=True)
    args = history["linear_1"].creation_args
    assert args is not None
    assert args[1] is model.weight
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(tl.ValueChangedError, match="'weight', an argument of 'linear_1_1', was ch"):
        _ = history["linear_1"].creation_args
