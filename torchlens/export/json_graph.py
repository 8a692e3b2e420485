"""A history as JSON. The format is described, field by field, in docs/json.md."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torchlens.capture.collector import without_collector
from torchlens.capture.operations import BUFFER, INPUT, OUTPUT
from torchlens.history import columns
from torchlens.history.json_text import write_json
from torchlens.history.log import Log

__all__ = ["FORMAT", "VERSION", "graph_data", "to_json"]

FORMAT = "torchlens-graph"
VERSION = 1  # raised when a field changes its meaning or goes; new fields may come without
_NODES_PER_PART = 10_000
_KINDS = {INPUT: "input", OUTPUT: "output", BUFFER: "buffer"}
_ITSELF = frozenset({int, bool, str, type(None)})


def to_json(history: Any, path: str | os.PathLike[str] | None = None, indent: int | None = None) -> str | None:
    """The graph as JSON text, or, with a path, in that file.

    >>> json.loads(history.to_json())['nodes'][0]['label']
    'input_1_0'
    """
    return write_json(_graph_data(history, _nodes_in_parts(history._log)), path, indent)


def graph_data(history: Any) -> dict[str, Any]:
    """The graph as dicts, lists, strings and numbers. No tensor is in it."""
    return _graph_data(history, [node for part in _nodes_in_parts(history._log) for node in part])


def _graph_data(history: Any, nodes: Any) -> dict[str, Any]:
    log: Log = history._log
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": _model(history),
        "nodes": nodes,
        "layers": [
            {"label": layer.label, "type": layer.type, "passes": log.labels_w_pass(layer.entries)}
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


def _nodes_in_parts(log: Log) -> Iterator[list[dict[str, Any]]]:
    """All nodes, some at a time: a million of them as dicts take gigabytes."""
    everything = range(len(log.graph.recorded))
    for start in range(0, len(everything), _NODES_PER_PART):
        yield without_collector(partial(_nodes, log, everything[start : start + _NODES_PER_PART]))


def _nodes(log: Log, entries: range) -> list[dict[str, Any]]:
    """The nodes of entries. Each field is made for all of them (see `columns`), then they are put together."""
    addresses = zip(columns.input_output_address(log, entries), columns.buffer_address(log, entries), strict=True)
    fields: dict[str, Iterable[Any]] = {
        "label": columns.layer_label_w_pass(log, entries),
        "layer": columns.layer_label_no_pass(log, entries),
        "pass": columns.pass_num(log, entries),
        "type": columns.layer_type(log, entries),
        "kind": [_KINDS.get(row.operation, "operation") for row in log.rows(entries)],
        "function": columns.func_applied_name(log, entries),
        "address": [boundary or buffer for boundary, buffer in addresses],
        "modules": columns.containing_modules_origin_nested(log, entries),
        "modules_exited": columns.module_passes_exited(log, entries),
        "shape": map(_plain, columns.tensor_shape(log, entries)),
        "dtype": [str(dtype).removeprefix("torch.") for dtype in columns.tensor_dtype(log, entries)],
        "bytes": map(_plain, columns.tensor_fsize(log, entries)),
        "seconds": columns.func_time_elapsed(log, entries),
        "flops": map(_plain, columns.flops(log, entries)),
        "params": _params(log, entries),
        "num_params": columns.num_params_total(log, entries),
        "parents": _parents(log, entries),
        "output_index": columns.iterable_output_index(log, entries),
        "is_inplace": columns.function_is_inplace(log, entries),
        "args": map(_plain, columns.func_position_args_non_tensor(log, entries)),
        "kwargs": [
            {name: _plain(value) for name, value in own.items()} if own else {}
            for own in columns.func_keyword_args_non_tensor(log, entries)
        ],
        "has_input_ancestor": columns.has_input_ancestor(log, entries),
        "is_output_ancestor": columns.is_output_ancestor(log, entries),
        "condition": columns.atomic_bool_val(log, entries),
        "is_saved": columns.has_saved_activations(log, entries),
        "source": columns.source(log, entries),
    }
    return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]


def _params(log: Log, entries: Sequence[int]) -> list[list[dict[str, Any]]]:
    addresses, shapes = columns.parent_param_addresses(log, entries), columns.parent_param_shapes(log, entries)
    return [
        [{"address": address, "shape": list(shape)} for address, shape in zip(*own, strict=True)] if own[0] else []
        for own in zip(addresses, shapes, strict=True)
    ]


def _parents(log: Log, entries: Sequence[int]) -> list[list[dict[str, Any]]]:
    """Who is read, and as which argument: a position or keyword, then the way inside it. Positions come first."""
    reads = columns.located_parents(log, entries)
    labels = iter(log.labels_w_pass([parent for own in reads for _, parent in own]))
    found = []
    for own in reads:
        parents = [{"label": next(labels), "argument": _way(location)} for location, _ in own]
        if len(parents) > 1:
            parents.sort(key=lambda parent: isinstance(parent["argument"][0], str))
        found.append(parents)
    return found


def _way(location: Any) -> list[Any]:
    return list(map(_plain, location)) if isinstance(location, tuple) else [location]


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
        "modules": log.module_passes(log.graph.module_chains[failure.module_call]),
    }


def _plain(value: Any) -> Any:
    """What JSON can say of a value: itself, or how Python prints it (a symbolic size is its expression)."""
    if type(value) in _ITSELF or isinstance(value, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, list | tuple):
        return list(value) if _ITSELF.issuperset(map(type, value)) else list(map(_plain, value))
    return repr(value)
