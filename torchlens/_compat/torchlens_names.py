"""Names that other versions of TorchLens use, and what they are called here.

They are looked up only when a name was not found, for the hint in the error. The left side is a
name of the public TorchLens 1.x or 2.x, or one that people guess; the right side is what to write
here. The names of the classic TorchLens (0.1) that mean the same work here too: see
`_history/classic.py`.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

# torchlens.<name>
FUNCTION_NAMES = {
    "trace": "log_forward_pass(model, x)",
    "fastlog": "log_forward_pass(model, x, layers_to_save=...)",
    "record": "log_forward_pass(model, x, layers_to_save=...)",
    "log": "log_forward_pass(model, x)",
    "log_forward": "log_forward_pass(model, x)",
    "get_model_activations": "log_forward_pass(model, x)",
    "peek": "log_forward_pass(model, x, layers_to_save='conv2d_1')['conv2d_1'].tensor_contents",
    "pluck": "log_forward_pass(model, x, layers_to_save='conv2d_1')['conv2d_1'].tensor_contents",
    "extract_features": "log_forward_pass(model, x, layers_to_save=['conv2d_1', 'features.6'])",
    "log_model_metadata": "get_model_metadata(model, x)",
    "get_model_structure": "get_model_metadata(model, x)",
    "summary": "log_forward_pass(model, x).summary()",
    "draw": "show_model_graph(model, x), or history.render_graph()",
    "show": "show_model_graph(model, x), or history.render_graph()",
    "plot": "show_model_graph(model, x), or history.render_graph()",
    "visualize": "show_model_graph(model, x), or history.render_graph()",
    "visualization": "show_model_graph(model, x), or history.render_graph()",
    "vis": "show_model_graph(model, x), or history.render_graph()",
    "viz": "show_model_graph(model, x), or history.render_graph()",
    "render": "history.render_graph(), or show_model_graph(model, x)",
    "render_graph": "history.render_graph(), or show_model_graph(model, x)",
    "show_backward_graph": "history.log_backward(loss), then history.render_graph()",
    "explore": "history.explore('model.html')",
    "to_pandas": "history.to_pandas()",
    "save": "history.save(path)",
    "validate": "validate_saved_activations(model, x), or validate_forward_pass(model, x)",
    "validate_batch_of_models_and_inputs": "validate_forward_pass(model, x) in a loop over the "
    "models",
    "save_new_activations": "history.save_new_activations(model, x)",
    "log_backward": "history.log_backward(loss)",
    "find_nan": "history.first_nonfinite()",
    "Trace": "ModelHistory",
    "ModelLog": "ModelHistory",
    "CapturedRun": "ModelHistory",
    "Op": "LayerEntry",
    "Layer": "LayerEntry",
    "LayerLog": "LayerEntry",
    "LayerPassLog": "LayerEntry",
    "OpLog": "LayerEntry",
}

# history.<name>
HISTORY_NAMES = {
    "draw": "render_graph()",
    "show": "render_graph()",
    "plot": "render_graph()",
    "visualize": "render_graph()",
    "draw_backward": "log_backward(loss), then render_graph()",
    "draw_combined": "log_backward(loss), then render_graph()",
    "to_dataframe": "to_pandas()",
    "to_df": "to_pandas()",
    "to_agent_json": "to_json()",
    "save_new_outs": "save_new_activations(model, x)",
    "backward": "log_backward(loss)",
    "find_nan": "first_nonfinite()",
    "nonfinite_ops": "first_nonfinite()",
    "find_layers": "history['part of a label']",
    "find_sites": "history['part of a label']",
    "keys": "layer_labels",
    "values": "layer_list",
    "items": "layer_list",
    "activations": "[entry.tensor_contents for entry in history]",
    "validate_forward_pass": "torchlens.validate_forward_pass(model, x)",
    "ops": "layer_list",
    "layers": "layer_list (one entry per operation), or layer_labels_no_pass (one label per layer)",
    "layer_logs": "layer_list",
    "entries": "layer_list",
    "operations": "layer_list",
    "op_labels": "layer_labels_w_pass",
    "labels": "layer_labels",
    "layer_num_calls": "layer_num_passes",
    "modules": "module_addresses; module_types, module_children, module_layers and module_nparams "
    "go by address",
    "module_calls": "module_passes",
    "num_modules": "len(history.module_addresses)",
    "num_module_calls": "len(history.module_passes)",
    "root_module": "top_level_modules",
    "buffers": "buffer_layers",
    "inputs": "input_layers",
    "outputs": "output_layers",
    "input_ops": "input_layers",
    "output_ops": "output_layers",
    "params": "entry.parent_params of the entries, or param_grads by address",
    "num_params": "total_params",
    "num_param_tensors": "total_param_tensors",
    "num_layers_with_params": "total_param_layers",
    "total_param_memory": "total_params_fsize",
    "num_ops": "num_operations",
    "num_layers": "len(history.layer_labels_no_pass)",
    "num_tensors": "num_tensors_total",
    "num_saved_ops": "num_tensors_saved",
    "num_saved_layers": "num_tensors_saved",
    "total_activation_memory": "tensor_fsize_total",
    "saved_activation_memory": "tensor_fsize_saved",
    "saved_ops": "layers_with_saved_activations",
    "saved_layers": "layers_with_saved_activations",
    "saved_grad_ops": "layers_with_saved_gradients",
    "saved_grad_layers": "layers_with_saved_gradients",
    "has_gradients": "layers_with_saved_gradients",
    "has_backward_pass": "backward_passes",
    "num_backward_passes": "len(history.backward_passes)",
    "model_label": "model_name",
    "model_class_name": "model_name",
    "is_recurrent": "model_is_recurrent",
    "max_layer_op_count": "model_max_recurrent_loops",
    "is_branching": "model_is_branching",
    "has_conditional_branching": "model_has_conditional_branching",
    "internal_source_layers": "internally_initialized_layers",
    "internal_source_ops": "internally_initialized_layers",
    "internal_sink_layers": "internally_terminated_layers",
    "internal_sink_ops": "internally_terminated_layers",
    "internally_terminated_bool_ops": "internally_terminated_bool_layers",
    "layers_with_params": "layers_computed_with_params",
    "ops_with_params": "layers_computed_with_params",
    "orphans": "num_operations_left_out",
    "edges": "to_networkx().edges",
    "random_seed": "random_seed_used",
    "seed": "random_seed_used",
    "capture_duration": "elapsed_time_total",
    "forward_duration": "elapsed_time_forward_pass",
    "func_calls_duration": "elapsed_time_function_calls",
    "overhead_duration": "elapsed_time_torchlens_logging",
    "flops": "total_flops",
    "total_flops_forward": "total_flops",
    "unknown_flop_ops": "flops_not_counted",
    "gradients": "[entry.grad_contents for entry in history]",
}

# entry.<name>
ENTRY_NAMES = {
    "activation": "tensor_contents",
    "activations": "tensor_contents",
    "out": "tensor_contents",
    "output": "tensor_contents",
    "tensor": "tensor_contents",
    "value": "tensor_contents",
    "transformed_out": "tensor_contents",
    "has_saved_activation": "has_saved_activations",
    "shape": "tensor_shape",
    "dtype": "tensor_dtype",
    "activation_memory": "tensor_fsize",
    "memory": "tensor_fsize",
    "nbytes": "tensor_fsize",
    "grad": "grad_contents",
    "grads": "grad_contents",
    "gradient": "grad_contents",
    "has_grad": "has_saved_grad",
    "has_saved_gradient": "has_saved_grad",
    "gradient_memory": "grad_fsize",
    "name": "layer_label",
    "label": "layer_label",
    "label_short": "layer_label_short",
    "type": "layer_type",
    "type_index": "layer_type_num",
    "pass_index": "pass_num",
    "num_passes": "layer_passes_total",
    "ordinal_index": "operation_num, which counts from 1",
    "step_index": "operation_num, which counts inputs and buffers, too",
    "raw_index": "realtime_tensor_num",
    "func": "func_applied",
    "function": "func_applied",
    "func_name": "func_applied_name",
    "func_qualname": "func_applied_name",
    "func_time": "func_time_elapsed",
    "func_duration": "func_time_elapsed",
    "arg_names": "func_argnames",
    "non_tensor_pos_args": "func_position_args_non_tensor",
    "non_tensor_kwargs": "func_keyword_args_non_tensor",
    "func_non_tensor_args": "func_all_args_non_tensor",
    "num_args_total": "num_func_args_total",
    "num_pos_args": "num_position_args",
    "num_kwargs": "num_keyword_args",
    "is_inplace": "function_is_inplace",
    "grad_fn": "gradfunc",
    "grad_fn_class_name": "gradfunc",
    "in_multi_output": "is_part_of_iterable_output",
    "multi_output_index": "iterable_output_index",
    "args": "creation_args, with save_function_args=True",
    "kwargs": "creation_kwargs, with save_function_args=True",
    "saved_args": "creation_args",
    "saved_kwargs": "creation_kwargs",
    "has_saved_args": "function_args_saved",
    "code_context": "func_call_stack",
    "flops_forward": "flops",
    "siblings": "sibling_layers",
    "co_parents": "spouse_layers",
    "has_co_parents": "has_spouses",
    "get_parents": "get_parent_layers()",
    "get_children": "get_child_layers()",
    "num_parents": "len(entry.parent_layers)",
    "num_children": "len(entry.child_layers)",
    "parent_arg_positions": "parent_layer_arg_locs",
    "root_ancestors": "orig_ancestors",
    "output_descendants": "output_descendents",
    "has_output_descendant": "is_output_ancestor",
    "internal_source_parents": "internally_initialized_parents",
    "internal_source_ancestors": "internally_initialized_ancestors",
    "has_internal_source_ancestor": "has_internally_initialized_ancestor",
    "min_distance_to_output": "min_distance_from_output",
    "max_distance_to_output": "max_distance_from_output",
    "equivalent_ops": "equivalent_operations",
    "equivalence_class": "operation_equivalence_type",
    "recurrent_ops": "same_layer_operations",
    "passes": "same_layer_operations",
    "is_input": "is_input_layer",
    "is_output": "is_output_layer",
    "is_buffer": "is_buffer_layer",
    "is_final_output": "is_last_output_layer",
    "address": "buffer_address, or input_output_address",
    "io_role": "input_output_address",
    "is_internal_source": "initialized_inside_model",
    "is_internally_initialized": "initialized_inside_model",
    "is_internal_sink": "terminated_inside_model",
    "is_terminal_bool": "is_terminal_bool_layer",
    "is_scalar_bool": "is_atomic_bool_layer",
    "bool_value": "atomic_bool_val",
    "is_in_conditional_evaluation": "in_cond_branch",
    "conditional_entry_children": "cond_branch_start_children",
    "module": "containing_module_origin",
    "modules": "containing_modules_origin_nested",
    "module_call_stack": "containing_modules_origin_nested",
    "module_call_depth": "module_nesting_depth",
    "in_submodule": "is_computed_inside_submodule",
    "input_to_modules": "modules_entered",
    "input_to_module_calls": "module_passes_entered",
    "output_of_modules": "modules_exited",
    "output_of_module_calls": "module_passes_exited",
    "is_module_input": "is_submodule_input",
    "is_module_output": "is_submodule_output",
    "is_atomic_module": "is_bottom_level_submodule_output",
    "atomic_module": "bottom_level_submodule_pass_exited",
    "atomic_module_call": "bottom_level_submodule_pass_exited",
    "params": "parent_params",
    "param_names": "parent_param_addresses",
    "param_shapes": "parent_param_shapes",
    "param_memory": "parent_params_fsize",
    "num_params": "num_params_total",
    "uses_params": "computed_with_params",
    "trace": "source_model_history",
    "source_trace": "source_model_history",
    "save": "torch.save(entry.tensor_contents, path)",
    "to_pandas": "history.to_pandas()",
}

# log_forward_pass(model, x, <name>=...), show_model_graph and render_graph
OPTION_NAMES = {
    "vis_mode": "vis_opt",
    "view": "vis_opt",
    "mode": "vis_opt",
    "vis_call_depth": "vis_nesting_depth",
    "vis_module_depth": "vis_nesting_depth",
    "depth": "vis_nesting_depth",
    "nesting_depth": "vis_nesting_depth",
    "save_only": "vis_save_only",
    "file_format": "vis_fileformat",
    "fileformat": "vis_fileformat",
    "format": "vis_fileformat",
    "outpath": "vis_outpath",
    "out_path": "vis_outpath",
    "path": "vis_outpath",
    "filename": "vis_outpath",
    "direction": "vis_direction",
    "show_buffers": "vis_buffer_layers",
    "show_buffer_layers": "vis_buffer_layers",
    "graph_overrides": "vis_graph_overrides",
    "node_overrides": "vis_node_overrides",
    "edge_overrides": "vis_edge_overrides",
    "module_overrides": "vis_module_overrides",
    "grad_edge_overrides": "vis_gradient_edge_overrides",
    "vis_grad_edge_overrides": "vis_gradient_edge_overrides",
    "collapse_fn": "vis_collapse",
    "collapse": "vis_collapse",
    "fold_repeats": "vis_fold_repeats",
    "color_by": "vis_color_by",
    "save": "layers_to_save",
    "layers": "layers_to_save",
    "which_layers": "layers_to_save",
    "save_layers": "layers_to_save",
    "keep_layers": "layers_to_save",
    "activation_transform": "activation_postfunc",
    "transform": "activation_postfunc",
    "postfunc": "activation_postfunc",
    "detach": "detach_saved_tensors",
    "detach_saved_activations": "detach_saved_tensors",
    "save_args": "save_function_args",
    "save_arg_values": "save_function_args",
    "save_grads": "save_gradients",
    "gradients_to_save": "save_gradients",
    "compute_input_output_distances": "mark_input_output_distances",
    "mark_layer_depths": "mark_input_output_distances",
    "seed": "random_seed",
    "args": "input_args",
    "inputs": "input_args",
    "kwargs": "input_kwargs",
}


# The drawing options of the classic (0.1) after `vis_opt`, in the order in which it takes them by
# position.
_OVERRIDES = (
    "vis_graph_overrides", "vis_node_overrides", "vis_nested_node_overrides", "vis_edge_overrides",
    "vis_gradient_edge_overrides", "vis_module_overrides",
)  # fmt: skip
_DRAWING = (
    "vis_nesting_depth",
    "vis_outpath",
    *_OVERRIDES,
    "vis_save_only",
    "vis_fileformat",
    "vis_buffer_layers",
    "vis_direction",
)
_POSITIONS = {
    "log_forward_pass()": (
        "vis_nesting_depth", "vis_outpath", "vis_save_only", "vis_fileformat", "vis_buffer_layers",
        "vis_direction",
        *_OVERRIDES, "random_seed",
    ),
    "show_model_graph()": (*_DRAWING, "random_seed"),
    "render_graph()": _DRAWING,
}  # fmt: skip
# What show_model_graph() and render_graph() of the classic call differently.
_ALIASES = {
    "save_only": "vis_save_only",
    "show_buffer_layers": "vis_buffer_layers",
    "direction": "vis_direction",
}


def classic_drawing_options(
    function: str, by_position: tuple[Any, ...], by_name: Mapping[str, Any]
) -> dict[str, Any]:
    """The options after `vis_opt` by the names they have here, from positions and names of the
    classic.

    >>> classic_drawing_options("render_graph()", (1, "net.gv"), {"save_only": True})
    {'vis_nesting_depth': 1, 'vis_outpath': 'net.gv', 'vis_save_only': True}
    """
    places = _POSITIONS[function]
    if len(by_position) > len(places):
        raise TypeError(
            f"{function} takes at most {len(places)} options by position after vis_opt, got "
            f"{len(by_position)}."
        )
    options = dict(zip(places, by_position, strict=False))
    aliases = {} if function == "log_forward_pass()" else _ALIASES
    for given, value in by_name.items():
        name = aliases.get(given, given)
        if name in options:
            raise TypeError(f"{function} got {name!r} twice: by position, and as {given!r}.")
        options[name] = value
    return options


def no_such_name(
    owner: str, kind: str, name: str, foreign: Mapping[str, str], own: Iterable[str], listing: str
) -> str:
    """The message for a name that is not there: ours for that of another version, or the closest,
    or where to look.

    >>> no_such_name("'LayerEntry'", "field", "activation", ENTRY_NAMES, dir(LayerEntry), "...")
    "'LayerEntry' has no field 'activation'. Use tensor_contents."
    """
    message = f"{owner} has no {kind} {name!r}."
    if name in foreign:
        return f"{message} Use {foreign[name]}."
    close = difflib.get_close_matches(
        name, [word for word in own if not word.startswith("_")], n=1, cutoff=0.7
    )
    return f"{message} Did you mean {close[0]!r}?" if close else f"{message} {listing}"
