"""A history as a pandas table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import numpy

from torchlens._history import columns
from torchlens._history.log import Log
from torchlens._recording.collector import without_collector
from torchlens._recording.symbolic import SymbolicInt

if TYPE_CHECKING:
    import pandas


# One column per field that is a fact rather than a tensor, in the order a reader wants them.
COLUMNS = (
    "layer_label", "layer_label_w_pass", "layer_label_no_pass", "layer_label_short", "layer_type",
    "layer_type_num",
    "layer_total_num", "pass_num", "layer_passes_total", "operation_num", "tensor_shape",
    "tensor_dtype",
    "tensor_fsize", "tensor_fsize_nice", "has_saved_activations", "func_applied_name",
    "func_time_elapsed", "flops",
    "flops_backward",
    "function_is_inplace", "gradfunc", "is_part_of_iterable_output", "iterable_output_index",
    "func_position_args_non_tensor", "func_keyword_args_non_tensor", "parent_layers",
    "child_layers", "is_input_layer",
    "is_output_layer", "is_buffer_layer", "input_output_address", "buffer_address",
    "computed_with_params",
    "parent_param_shapes", "num_param_tensors", "num_params_total", "parent_params_fsize",
    "parent_params_fsize_nice",
    "has_input_ancestor", "is_output_ancestor", "min_distance_from_input",
    "max_distance_from_input",
    "min_distance_from_output", "max_distance_from_output", "initialized_inside_model",
    "terminated_inside_model",
    "is_terminal_bool_layer", "atomic_bool_val", "in_cond_branch", "containing_module_origin",
    "containing_modules_origin_nested", "module_nesting_depth", "modules_entered",
    "module_passes_entered",
    "modules_exited", "module_passes_exited", "is_submodule_input", "is_submodule_output",
    "is_bottom_level_submodule_output", "bottom_level_submodule_pass_exited", "has_saved_grad",
    "grad_shape",
    "backward_time_elapsed", "backward_order",
    "source",
)  # fmt: skip

# What pandas makes of a column with values of one type. It finds that by itself, too, in three to
# five times the time.
_DTYPES: dict[type, Any] = {
    int: "int64",
    float: "float64",
    bool: "bool",
    list: object,
    tuple: object,
    dict: object,
}
_NUMBERS = (int, float)


def entries_to_pandas(log: Log, entries: Sequence[int]) -> "pandas.DataFrame":
    """One row per entry; `source` is the user's line that called the operation."""
    import pandas  # slow to import, so imported by those who want a table

    def table() -> pandas.DataFrame:
        makers = {name: getattr(columns, name) for name in COLUMNS}
        cells = {name: Cells(_kind(make)) for name, make in makers.items()}
        for part in log.parts(entries):
            for name, make in makers.items():
                cells[name].add(make(log, part))
        # Copied, they would be put together by dtype, for which pandas touches every list of a
        # million again.
        return pandas.DataFrame({name: cells.pop(name).series() for name in COLUMNS}, copy=False)

    return without_collector(table)


def _kind(make: Callable[..., Any]) -> type | None:
    """What a column says to hold: `list` where it returns `list[list[str]]`; None where it holds
    several kinds.
    """
    (kind,) = get_args(get_type_hints(make)["return"])
    kind = get_origin(kind) or kind
    return kind if kind in _DTYPES else None


class Cells:
    """A column that comes in parts; numbers and lists are an array as soon as they come, while they
    are at hand.
    """

    def __init__(self, kind: type | None) -> None:
        self._kind = kind
        self._parts: list[Any] = []

    def add(self, values: list[Any]) -> None:
        self._parts.append(self._array(values))

    def _array(self, values: list[Any]) -> Any:
        if self._kind is None or (
            self._kind in _NUMBERS and set(map(type, values)) != {self._kind}
        ):
            return values
        try:
            return numpy.fromiter(values, _DTYPES[self._kind], len(values))
        except OverflowError:  # beyond 64 bits: pandas knows what to do
            return values

    def series(self) -> "pandas.Series[Any]":
        import pandas

        if self._parts and all(isinstance(part, numpy.ndarray) for part in self._parts):
            return pandas.Series(numpy.concatenate(self._parts), copy=False)
        return with_symbols([value for part in self._parts for value in _listed(part)])


def _listed(part: Any) -> list[Any]:
    return part.tolist() if isinstance(part, numpy.ndarray) else part


def with_symbols(cells: list[Any]) -> "pandas.Series[Any]":
    """A column; one with symbolic numbers stays as it is, and is not made one of plain numbers."""
    import pandas

    column = pandas.Series(cells)
    has_symbols = column.dtype.kind in "if" and SymbolicInt in set(map(type, cells))
    return pandas.Series(cells, dtype=object) if has_symbols else column
