"""A history as JSON. The format is described, field by field, in docs/json.md."""

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from torchlens._history.entry_graph import boundary_addresses, located_parents
from torchlens._history.field import ManyEntries
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.receipt import exported_receipt
from torchlens._portable.live_objects import FUNCTIONS, text_of
from torchlens._recording.functions import reference_to
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._text.json_text import write_json

if TYPE_CHECKING:
    from torchlens._graph.labels import Layer


FORMAT = "torchlens-graph"
VERSION = 1  # raised when a field changes its meaning or goes; new fields may come without
_LAYERS_PER_PART = 10_000
_KINDS = {INPUT: "input", OUTPUT: "output", BUFFER: "buffer"}
_ITSELF = frozenset({int, bool, str, type(None)})
_IS_INT = frozenset({int})
_Record = dict[str, Any]


def to_json(
    history: Any, path: str | os.PathLike[str] | None = None, indent: int | None = None
) -> str | None:
    """The graph as JSON text, or, with a path, in that file.

    >>> json.loads(history.to_json())['nodes'][0]['label']
    'input_1_0'
    """
    log: Log = history._log
    return write_json(_graph_data(history, _node_parts(log), _layer_parts(log)), path, indent)


def graph_data(history: Any) -> dict[str, Any]:
    """The graph as dicts, lists, strings and numbers. No tensor is in it."""
    log: Log = history._log
    nodes, layers = chain.from_iterable(_node_parts(log)), chain.from_iterable(_layer_parts(log))
    return _graph_data(history, list(nodes), list(layers))


def _graph_data(history: Any, nodes: Any, layers: Any) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": _model(history),
        "receipt": exported_receipt(history._log).to_dict(),
        "nodes": nodes,
        "layers": layers,
        "modules": _modules(history),
        "failure": _failure(history._log),
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


def _node_parts(log: Log) -> Iterator[list[_Record]]:
    """All nodes, in parts: a million at once would take gigabytes of memory."""
    for entries in ManyEntries(log, range(len(log.graph.recorded))).in_parts():
        yield without_collector(partial(_nodes, entries))


def _layer_parts(log: Log) -> Iterator[list[_Record]]:
    """All layers, in parts."""
    for start in range(0, len(log.graph.layers), _LAYERS_PER_PART):
        yield without_collector(
            partial(_layers, log, log.graph.layers[start : start + _LAYERS_PER_PART])
        )


def _nodes(entries: ManyEntries) -> list[_Record]:
    dtypes = LayerEntry.tensor_dtype.of(entries)
    dtype_names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(dtypes)}
    fields: dict[str, Sequence[Any]] = {
        "label": LayerEntry.layer_label_w_pass.of(entries),
        "layer": LayerEntry.layer_label_no_pass.of(entries),
        "pass": LayerEntry.pass_num.of(entries),
        "type": LayerEntry.layer_type.of(entries),
        "kind": [_KINDS.get(operation, "operation") for operation in entries._rows.operation],
        "function": LayerEntry.func_applied_name.of(entries),
        "address": boundary_addresses(entries),
        "modules": LayerEntry.containing_modules_origin_nested.of(entries),
        "modules_exited": LayerEntry.module_passes_exited.of(entries),
        "shape": _plain_lists(LayerEntry.tensor_shape.of(entries)),
        "dtype": [dtype_names[dtype] for dtype in dtypes],
        "bytes": _plain(LayerEntry.tensor_fsize.of(entries)),
        "seconds": LayerEntry.func_time_elapsed.of(entries),
        "flops": _plain(LayerEntry.flops.of(entries)),
        "params": _params(entries),
        "num_params": _plain(LayerEntry.num_params_total.of(entries)),
        "parents": _parents(entries),
        "output_index": LayerEntry.iterable_output_index.of(entries),
        "is_inplace": LayerEntry.function_is_inplace.of(entries),
        "args": _plain_lists(LayerEntry.func_position_args_non_tensor.of(entries)),
        "kwargs": [
            {name: _plain(value) for name, value in own.items()} if own else {}
            for own in LayerEntry.func_keyword_args_non_tensor.of(entries)
        ],
        "has_input_ancestor": LayerEntry.has_input_ancestor.of(entries),
        "is_output_ancestor": LayerEntry.is_output_ancestor.of(entries),
        "condition": LayerEntry.atomic_bool_val.of(entries),
        "is_saved": LayerEntry.has_saved_activations.of(entries),
        "source": LayerEntry.source.of(entries),
    }
    return [dict(zip(fields, own, strict=True)) for own in zip(*fields.values(), strict=True)]


def _params(entries: ManyEntries) -> list[list[_Record]]:
    addresses = LayerEntry.parent_param_addresses.of(entries)
    shapes = LayerEntry.parent_param_shapes.of(entries)
    return [
        [
            {"address": address, "shape": _plain(tuple(shape))}
            for address, shape in zip(*own, strict=True)
        ]
        for own in zip(addresses, shapes, strict=True)
    ]


def _parents(entries: ManyEntries) -> list[list[_Record]]:
    """The entries that are read, and as which argument: a position or keyword, then the path
    inside it. Positions come first.
    """
    reads = located_parents(entries)
    for own in reads:
        if len(own) > 1 and not _IS_INT.issuperset([type(location) for location, _ in own]):
            own.sort(key=lambda read: isinstance(_way(read[0])[0], str))
    labels = iter(entries._log.labels_w_pass([parent for own in reads for _, parent in own]))
    return [
        [{"label": next(labels), "argument": _way(location)} for location, _ in own]
        for own in reads
    ]


def _way(location: Any) -> list[Any]:
    return list(map(_plain, location)) if isinstance(location, tuple) else [location]


def _layers(log: Log, layers: "Sequence[Layer]") -> list[_Record]:
    labels = iter(log.labels_w_pass([entry for layer in layers for entry in layer.entries]))
    return [
        {
            "label": layer.label,
            "type": layer.type,
            "passes": list(islice(labels, len(layer.entries))),
        }
        for layer in layers
    ]


def _modules(history: Any) -> list[dict[str, Any]]:
    types, children, passes, nparams = (
        history.module_types, history.module_children, history.module_num_passes,
        history.module_nparams
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
    """A value as JSON: itself, or its `repr` (a symbolic size is its expression). A function is its
    name, because its `repr` contains an address in memory. Long text is cut, as in a file of
    `save`.
    """
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    if type(value) in _ITSELF or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [item if type(item) in _ITSELF else _plain(item) for item in value]
    return reference_to(value).text if isinstance(value, FUNCTIONS) else text_of(value)


def _plain_lists(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The same for many lists, nearly all of which hold only plain values."""
    if _ITSELF.issuperset(map(type, chain.from_iterable(values))):
        return list(map(list, values))
    return [list(own) if _ITSELF.issuperset(map(type, own)) else _plain(own) for own in values]
