"""The fields of entries as columns: one function per field, which gives the values of many entries
at once.

A field of a `LayerEntry` is a column of one entry; tables and JSON are made of columns of a
million. So what a field means is said once, here, and what it is for users is said at the entry
(`entry_fields`, whose files are named alike). What is the same for all entries is looked up before
the loop, and what is the same for many of them is made once: half a microsecond per value is half a
minute per table.

Lists and dicts are made anew for every entry: they belong to who asked for them.
"""

from torchlens._history.columns.calls import (
    computed_with_params as computed_with_params,
)
from torchlens._history.columns.calls import (
    flops as flops,
)
from torchlens._history.columns.calls import (
    flops_backward as flops_backward,
)
from torchlens._history.columns.calls import (
    func_applied_name as func_applied_name,
)
from torchlens._history.columns.calls import (
    func_keyword_args_non_tensor as func_keyword_args_non_tensor,
)
from torchlens._history.columns.calls import (
    func_position_args_non_tensor as func_position_args_non_tensor,
)
from torchlens._history.columns.calls import (
    func_time_elapsed as func_time_elapsed,
)
from torchlens._history.columns.calls import (
    function_is_inplace as function_is_inplace,
)
from torchlens._history.columns.calls import (
    gradfunc as gradfunc,
)
from torchlens._history.columns.calls import (
    is_part_of_iterable_output as is_part_of_iterable_output,
)
from torchlens._history.columns.calls import (
    iterable_output_index as iterable_output_index,
)
from torchlens._history.columns.calls import (
    num_param_tensors as num_param_tensors,
)
from torchlens._history.columns.calls import (
    num_params_total as num_params_total,
)
from torchlens._history.columns.calls import (
    parent_param_addresses as parent_param_addresses,
)
from torchlens._history.columns.calls import (
    parent_param_shapes as parent_param_shapes,
)
from torchlens._history.columns.calls import (
    parent_params_fsize as parent_params_fsize,
)
from torchlens._history.columns.calls import (
    parent_params_fsize_nice as parent_params_fsize_nice,
)
from torchlens._history.columns.calls import (
    source as source,
)
from torchlens._history.columns.labels import (
    layer_label as layer_label,
)
from torchlens._history.columns.labels import (
    layer_label_no_pass as layer_label_no_pass,
)
from torchlens._history.columns.labels import (
    layer_label_no_pass_short as layer_label_no_pass_short,
)
from torchlens._history.columns.labels import (
    layer_label_short as layer_label_short,
)
from torchlens._history.columns.labels import (
    layer_label_w_pass as layer_label_w_pass,
)
from torchlens._history.columns.labels import (
    layer_label_w_pass_short as layer_label_w_pass_short,
)
from torchlens._history.columns.labels import (
    layer_passes_total as layer_passes_total,
)
from torchlens._history.columns.labels import (
    layer_total_num as layer_total_num,
)
from torchlens._history.columns.labels import (
    layer_type as layer_type,
)
from torchlens._history.columns.labels import (
    layer_type_num as layer_type_num,
)
from torchlens._history.columns.labels import (
    operation_num as operation_num,
)
from torchlens._history.columns.labels import (
    pass_num as pass_num,
)
from torchlens._history.columns.modules import (
    bottom_level_submodule_pass_exited as bottom_level_submodule_pass_exited,
)
from torchlens._history.columns.modules import (
    containing_module_origin as containing_module_origin,
)
from torchlens._history.columns.modules import (
    containing_modules_origin_nested as containing_modules_origin_nested,
)
from torchlens._history.columns.modules import (
    is_bottom_level_submodule_output as is_bottom_level_submodule_output,
)
from torchlens._history.columns.modules import (
    is_submodule_input as is_submodule_input,
)
from torchlens._history.columns.modules import (
    is_submodule_output as is_submodule_output,
)
from torchlens._history.columns.modules import (
    module_nesting_depth as module_nesting_depth,
)
from torchlens._history.columns.modules import (
    module_passes_entered as module_passes_entered,
)
from torchlens._history.columns.modules import (
    module_passes_exited as module_passes_exited,
)
from torchlens._history.columns.modules import (
    modules_entered as modules_entered,
)
from torchlens._history.columns.modules import (
    modules_exited as modules_exited,
)
from torchlens._history.columns.surroundings import (
    address as address,
)
from torchlens._history.columns.surroundings import (
    atomic_bool_val as atomic_bool_val,
)
from torchlens._history.columns.surroundings import (
    buffer_address as buffer_address,
)
from torchlens._history.columns.surroundings import (
    child_layers as child_layers,
)
from torchlens._history.columns.surroundings import (
    has_input_ancestor as has_input_ancestor,
)
from torchlens._history.columns.surroundings import (
    in_cond_branch as in_cond_branch,
)
from torchlens._history.columns.surroundings import (
    initialized_inside_model as initialized_inside_model,
)
from torchlens._history.columns.surroundings import (
    input_output_address as input_output_address,
)
from torchlens._history.columns.surroundings import (
    is_buffer_layer as is_buffer_layer,
)
from torchlens._history.columns.surroundings import (
    is_input_layer as is_input_layer,
)
from torchlens._history.columns.surroundings import (
    is_output_ancestor as is_output_ancestor,
)
from torchlens._history.columns.surroundings import (
    is_output_layer as is_output_layer,
)
from torchlens._history.columns.surroundings import (
    is_terminal_bool_layer as is_terminal_bool_layer,
)
from torchlens._history.columns.surroundings import (
    located_parents as located_parents,
)
from torchlens._history.columns.surroundings import (
    max_distance_from_input as max_distance_from_input,
)
from torchlens._history.columns.surroundings import (
    max_distance_from_output as max_distance_from_output,
)
from torchlens._history.columns.surroundings import (
    min_distance_from_input as min_distance_from_input,
)
from torchlens._history.columns.surroundings import (
    min_distance_from_output as min_distance_from_output,
)
from torchlens._history.columns.surroundings import (
    parent_layers as parent_layers,
)
from torchlens._history.columns.surroundings import (
    terminated_inside_model as terminated_inside_model,
)
from torchlens._history.columns.tensors import (
    backward_order as backward_order,
)
from torchlens._history.columns.tensors import (
    backward_time_elapsed as backward_time_elapsed,
)
from torchlens._history.columns.tensors import (
    grad_contents as grad_contents,
)
from torchlens._history.columns.tensors import (
    grad_shape as grad_shape,
)
from torchlens._history.columns.tensors import (
    has_saved_activations as has_saved_activations,
)
from torchlens._history.columns.tensors import (
    has_saved_grad as has_saved_grad,
)
from torchlens._history.columns.tensors import (
    tensor_dtype as tensor_dtype,
)
from torchlens._history.columns.tensors import (
    tensor_fsize as tensor_fsize,
)
from torchlens._history.columns.tensors import (
    tensor_fsize_nice as tensor_fsize_nice,
)
from torchlens._history.columns.tensors import (
    tensor_shape as tensor_shape,
)
