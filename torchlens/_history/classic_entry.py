"""The fields and methods of the classic's entry that ours lacks: each function is one."""

from typing import Any

import torch

from torchlens._graph.build import key_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import Row
from torchlens._text.numbers import bytes_text

# -- the operation ---------------------------------------------------------------------------------


def func_all_args_non_tensor(entry: LayerEntry) -> list[Any]:
    """Its non-tensor arguments: the positional ones, then the values of the keyword arguments."""
    return [*entry.func_position_args_non_tensor, *entry.func_keyword_args_non_tensor.values()]


def num_position_args(entry: LayerEntry) -> int:
    """How many positional arguments it was called with, tensors included."""
    return 0 if entry._is_boundary else len(_row(entry).args)


def num_keyword_args(entry: LayerEntry) -> int:
    """How many keyword arguments it was called with."""
    return 0 if entry._is_boundary else len(_row(entry).kwargs or {})


def num_func_args_total(entry: LayerEntry) -> int:
    """How many arguments it was called with."""
    return num_position_args(entry) + num_keyword_args(entry)


def function_args_saved(entry: LayerEntry) -> bool:
    """Whether its arguments were kept."""
    return entry.creation_args is not None


def realtime_tensor_num(entry: LayerEntry) -> int:
    """Its number among all tensors of the pass, from 1, including those that are not in the log."""
    return entry._log.graph.recorded[entry._entry] + 1


def operation_equivalence_type(entry: LayerEntry) -> str:
    """What it does: operations with the same type are equivalent."""
    return _equivalence_type(entry._log, entry._entry)


def equivalent_operations(entry: LayerEntry) -> set[str]:
    """All operations that do the same, whether or not they are one layer."""
    log, own, operation = entry._log, operation_equivalence_type(entry), _row(entry).operation
    likely = (
        other for other in range(len(log.graph.recorded)) if log.row(other).operation is operation
    )
    return {log.label(other) for other in likely if _equivalence_type(log, other) == own}


def parent_param_barcodes(entry: LayerEntry) -> list[str]:
    """What identifies its parameters: their addresses."""
    return entry.parent_param_addresses


def parent_param_passes(entry: LayerEntry) -> dict[str, int]:
    """Address of each of its parameters → how many operations up to this one have computed with
    it.
    """
    used = entry._log.graph.params[: entry._entry + 1]
    addresses = entry._log.recording.param_addresses
    return {
        addresses[number]: sum(number in own for own in used)
        for number in entry._log.graph.params[entry._entry]
    }


# -- the tensor ------------------------------------------------------------------------------------


def grad_fsize(entry: LayerEntry) -> int:
    """Bytes of the gradient; 0 without one."""
    gradient = entry.grad_contents
    return 0 if gradient is None else gradient.numel() * gradient.element_size()


def grad_fsize_nice(entry: LayerEntry) -> str:
    """Size of the gradient as text."""
    return bytes_text(grad_fsize(entry))


def is_atomic_bool_layer(entry: LayerEntry) -> bool:
    """Whether it is a single True or False."""
    return entry.tensor_dtype is torch.bool and entry.tensor_shape == ()


def was_getitem_applied(entry: LayerEntry) -> bool:
    """Whether it was indexed: `x[...]`."""
    children = (LayerEntry(entry._log, child) for child in entry._log.graph.children[entry._entry])
    return any(
        child.layer_type == "getitem" and (0, entry.layer_label) in child._located_parents()
        for child in children
    )


def children_tensor_versions(entry: LayerEntry) -> dict[str, torch.Tensor]:
    """Child → the value as the child read it, if that is not the saved one (with
    `save_function_args=True`).

    This happens to a view whose memory was written to in between.
    """
    found = {}
    for child in get_child_layers(entry):
        for location, label in child._located_parents():
            value = _argument(child, location) if label == entry.layer_label else None
            saved = entry.tensor_contents
            if (
                not isinstance(value, torch.Tensor)
                or not isinstance(saved, torch.Tensor)
                or value.shape != saved.shape
            ):
                continue  # not kept, or a view of what this entry wrote to
            if not torch.equal(value, saved):
                found[child.layer_label] = value
    return found


# -- the graph around it ---------------------------------------------------------------------------


def internally_initialized_ancestors(entry: LayerEntry) -> set[str]:
    """Labels of the buffers, and of the tensors made from nothing, that lead to it."""
    graph, reached = entry._log.graph, entry._reachable(entry._log.graph.parents)
    origins = [other for other in reached if not graph.parents[other]]
    return {
        entry._log.label(other)
        for other in origins
        if not LayerEntry(entry._log, other).is_input_layer
    }


def has_internally_initialized_ancestor(entry: LayerEntry) -> bool:
    """Whether a buffer, or a tensor made from nothing, leads to it."""
    return bool(internally_initialized_ancestors(entry))


def internally_initialized_parents(entry: LayerEntry) -> list[str]:
    """Labels of the parents that a buffer, or a tensor made from nothing, leads to."""
    return [
        parent.layer_label
        for parent in get_parent_layers(entry)
        if has_internally_initialized_ancestor(parent)
    ]


def orig_ancestors(entry: LayerEntry) -> set[str]:
    """Labels of everything that it was ultimately computed from: inputs, buffers, tensors made from
    nothing.
    """
    return entry.input_ancestors | internally_initialized_ancestors(entry)


def is_last_output_layer(entry: LayerEntry) -> bool:
    """Whether it is the last of the outputs."""
    return entry._log.graph.outputs[-1:] == [entry._entry]


def is_computed_inside_submodule(entry: LayerEntry) -> bool:
    """Whether a module other than the model itself was running."""
    return bool(entry._log.module_chain(entry._entry))


def buffer_pass(entry: LayerEntry) -> int | None:
    """1 for a buffer: a value assigned to it during the pass is the entry of the operation that
    computed it.
    """
    return 1 if entry.is_buffer_layer else None


def buffer_parent(entry: LayerEntry) -> None:
    """None: the entry of a buffer holds its value before the pass."""


def source_model_history(entry: LayerEntry) -> ModelHistory:
    """The history that it belongs to."""
    return entry._log.history() or ModelHistory(entry._log)


def get_child_layers(entry: LayerEntry) -> list[LayerEntry]:
    """The entries that read it."""
    return [LayerEntry(entry._log, child) for child in entry._log.graph.children[entry._entry]]


def get_parent_layers(entry: LayerEntry) -> list[LayerEntry]:
    """The entries it reads."""
    return [LayerEntry(entry._log, parent) for parent in entry._log.graph.parents[entry._entry]]


def copy(entry: LayerEntry) -> LayerEntry:
    """Another object for the same entry."""
    return LayerEntry(entry._log, entry._entry)


def print_all_fields(entry: LayerEntry) -> None:
    """Prints every field of the main interface with its value."""
    for name in sorted(name for name in dir(type(entry)) if not name.startswith("_")):
        print(f"{name}: {getattr(entry, name)}")  # noqa: T201 (printing is what it is for)


METHODS = (copy, get_child_layers, get_parent_layers, print_all_fields)


# -- helpers ---------------------------------------------------------------------------------------


def _row(entry: LayerEntry) -> Row:
    return entry._log.row(entry._entry)


def _equivalence_type(log: Log, entry: int) -> str:
    row = log.row(entry)
    if row.operation.layer_type == "buffer":
        return f"buffer_{log.boundary_addresses[entry][0]}"
    if row.operation.layer_type in ("input", "output"):
        return f"{row.operation.layer_type}_{'_'.join(map(str, row.shape))}_{row.dtype}"
    params = log.graph.params[entry]
    if params:
        return "_".join(
            [
                row.operation.layer_type,
                *(log.recording.param_addresses[number] for number in params),
            ]
        )
    key = key_of(log.recording, row, params)
    return "_".join(str(part) for part in key if part not in (None, (), ""))


def _argument(entry: LayerEntry, location: Any) -> Any:
    """An argument that was kept, by its place: a position, a name, or a path from one of those."""
    head, *rest = location if isinstance(location, tuple) else (location,)
    arguments: Any = entry.creation_kwargs if isinstance(head, str) else entry.creation_args
    for step in (head, *rest):
        if arguments is None:
            return None
        arguments = arguments[step]
    return arguments
