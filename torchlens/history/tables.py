"""A history as a pandas table."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchlens.capture.collector import without_collector
from torchlens.capture.symbolic import SymbolicInt
from torchlens.history import columns
from torchlens.history.log import Log

if TYPE_CHECKING:
    import pandas

__all__ = ["COLUMNS", "entries_to_pandas"]

# One column per field that is a fact rather than a tensor, in the order a reader wants them.
COLUMNS = (
    "layer_label", "layer_label_w_pass", "layer_label_no_pass", "layer_label_short", "layer_type", "layer_type_num",
    "layer_total_num", "pass_num", "layer_passes_total", "operation_num", "tensor_shape", "tensor_dtype",
    "tensor_fsize", "tensor_fsize_nice", "has_saved_activations", "func_applied_name", "func_time_elapsed", "flops",
    "flops_backward",
    "function_is_inplace", "gradfunc", "is_part_of_iterable_output", "iterable_output_index",
    "func_position_args_non_tensor", "func_keyword_args_non_tensor", "parent_layers", "child_layers", "is_input_layer",
    "is_output_layer", "is_buffer_layer", "input_output_address", "buffer_address", "computed_with_params",
    "parent_param_shapes", "num_param_tensors", "num_params_total", "parent_params_fsize", "parent_params_fsize_nice",
    "has_input_ancestor", "is_output_ancestor", "min_distance_from_input", "max_distance_from_input",
    "min_distance_from_output", "max_distance_from_output", "initialized_inside_model", "terminated_inside_model",
    "is_terminal_bool_layer", "atomic_bool_val", "in_cond_branch", "containing_module_origin",
    "containing_modules_origin_nested", "module_nesting_depth", "modules_entered", "module_passes_entered",
    "modules_exited", "module_passes_exited", "is_submodule_input", "is_submodule_output",
    "is_bottom_level_submodule_output", "bottom_level_submodule_pass_exited", "has_saved_grad", "grad_shape",
    "backward_time_elapsed", "backward_order",
    "source",
)  # fmt: skip

# What pandas makes of a column with values of one type. It finds that by itself, too, in three times the time.
_DTYPES: dict[type, Any] = {int: "int64", float: "float64", bool: "bool", list: object, tuple: object, dict: object}


def entries_to_pandas(log: Log, entries: Sequence[int]) -> "pandas.DataFrame":
    """One row per entry; `source` is the user's line that called the operation."""
    import pandas  # slow to import, so imported by those who want a table

    def table() -> pandas.DataFrame:
        cells: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        types: dict[str, set[type]] = {name: set() for name in COLUMNS}
        for part in log.parts(entries):
            for name in COLUMNS:
                own = getattr(columns, name)(log, part)
                cells[name] += own
                types[name].update(map(type, own))
        return pandas.DataFrame({name: _series(cells.pop(name), types[name]) for name in COLUMNS})

    return without_collector(table)


def with_symbols(cells: list[Any]) -> "pandas.Series[Any]":
    """A column; one with symbolic numbers stays as it is, and is not made one of plain numbers."""
    return _series(cells, set(map(type, cells)))


def _series(cells: list[Any], types: set[type]) -> "pandas.Series[Any]":
    import pandas

    dtype = _DTYPES.get(next(iter(types))) if len(types) == 1 else None
    if dtype is not None:
        with suppress(OverflowError):  # beyond 64 bits: pandas knows what to do
            return pandas.Series(cells, dtype=dtype)
    column = pandas.Series(cells)
    has_symbols = column.dtype.kind in "if" and SymbolicInt in types
    return pandas.Series(cells, dtype=object) if has_symbols else column
