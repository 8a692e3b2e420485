"""A history as JSON. The format is described, field by field, in docs/json.md."""

import math
import os
from typing import Any

from torchlens.graph.costs import flops_of
from torchlens.history.json_text import write_json
from torchlens.history.layer_entry import LayerEntry
from torchlens.history.log import Log

__all__ = ["FORMAT", "VERSION", "graph_data", "to_json"]

FORMAT = "torchlens-graph"
VERSION = 1  # raised when a field changes its meaning or goes; new fields may come without


def to_json(history: Any, path: str | os.PathLike[str] | None = None, indent: int | None = None) -> str | None:
    """The graph as JSON text, or, with a path, in that file.

    >>> json.loads(history.to_json())['nodes'][0]['label']
    'input_1_0'
    """
    return write_json(graph_data(history), path, indent)


def graph_data(history: Any) -> dict[str, Any]:
    """The graph as dicts, lists, strings and numbers. No tensor is in it."""
    log: Log = history._log
    entries = [LayerEntry(log, entry) for entry in range(len(log.graph.recorded))]
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": _model(history),
        "nodes": [node_data(log, entry) for entry in entries],
        "layers": [
            {"label": layer.label, "type": layer.type, "passes": [log.label_w_pass(entry) for entry in layer.entries]}
            for layer in log.graph.layers
        ],
        "modules": _modules(history),
        "failure": _failure(log),
    }


def _model(history: Any) -> dict[str, Any]:
    return {
        "name": history.model_name,
        "num_tensors": history.num_tensors_total,
        "num_operations": history.num_operations,
        "tensor_bytes": _plain(history.tensor_fsize_total),
        "num_params": history.total_params,
        "param_bytes": history.total_params_fsize,
        "num_modules": len(history.module_addresses),
        "is_recurrent": history.model_is_recurrent,
        "max_passes": history.model_max_recurrent_loops,
        "has_conditions": history.model_has_conditional_branching,
        "seconds_forward": history.elapsed_time_forward_pass,
        "random_seed": history.random_seed_used,
    }


def node_data(log: Log, entry: LayerEntry) -> dict[str, Any]:
    """One entry."""
    stack = entry.func_call_stack
    return {
        "label": entry.layer_label_w_pass,
        "layer": entry.layer_label_no_pass,
        "pass": entry.pass_num,
        "type": entry.layer_type,
        "kind": _kind(entry),
        "function": entry.func_applied_name,
        "address": entry.input_output_address or entry.buffer_address,
        "modules": entry.containing_modules_origin_nested,
        "modules_exited": entry.module_passes_exited,
        "shape": _plain(entry.tensor_shape),
        "dtype": str(entry.tensor_dtype).removeprefix("torch."),
        "bytes": _plain(entry.tensor_fsize),
        "seconds": entry.func_time_elapsed,
        "flops": _plain(flops_of(log.recording, log.row(entry._entry))),
        "params": [
            {"address": address, "shape": list(shape)}
            for address, shape in zip(entry.parent_param_addresses, entry.parent_param_shapes, strict=True)
        ],
        "num_params": entry.num_params_total,
        "parents": _parents(log, entry),
        "output_index": entry.iterable_output_index,
        "is_inplace": entry.function_is_inplace,
        "args": [_plain(value) for value in entry.func_position_args_non_tensor],
        "kwargs": {name: _plain(value) for name, value in entry.func_keyword_args_non_tensor.items()},
        "has_input_ancestor": entry.has_input_ancestor,
        "is_output_ancestor": entry.is_output_ancestor,
        "condition": entry.atomic_bool_val,
        "is_saved": entry.has_saved_activations,
        "source": str(stack[0]) if stack else None,
    }


def _kind(entry: LayerEntry) -> str:
    for kind in ("input", "output", "buffer"):
        if getattr(entry, f"is_{kind}_layer"):
            return kind
    return "operation"


def _parents(log: Log, entry: LayerEntry) -> list[dict[str, Any]]:
    """Who is read, and as which argument: a position or keyword, then the way inside it."""
    found = []
    for places in entry.parent_layer_arg_locs.values():
        for location, labels in places.items():
            way = list(location) if isinstance(location, tuple) else [location]
            for label in [labels] if isinstance(labels, str) else labels:
                found.append({"label": label if ":" in label else f"{label}:1", "argument": [_plain(part) for part in way]})
    return found


def _modules(history: Any) -> list[dict[str, Any]]:
    types, children, passes, nparams = (
        history.module_types, history.module_children, history.module_num_passes, history.module_nparams
    )  # fmt: skip
    parent_of = {child: address for address, below in children.items() for child in below}
    return [
        {
            "address": address,
            "class": types[address],
            "parent": parent_of.get(address),
            "children": children[address],
            "num_passes": passes[address],
            "num_params": nparams[address],
        }
        for address in history.module_addresses
    ]


def _failure(log: Log) -> dict[str, Any] | None:
    failure = log.recording.failure
    if failure is None:
        return None
    return {
        "message": failure.message,
        "operation": None if failure.operation is None else failure.operation.name,
        "arguments": failure.arguments,
        "modules": [log.module_pass(call) for call in log.graph.module_chains[failure.module_call]],
    }


def _plain(value: Any) -> Any:
    """What JSON can say of a value: itself, or how Python prints it (a symbolic size is its expression)."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and type(value) is int:
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return repr(value)
