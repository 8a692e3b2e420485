"""A history and its entries as printed text."""

import textwrap
from itertools import compress, repeat
from typing import Any

import torch

from torchlens._history.backward import backward_times
from torchlens._history.log import Log, picked
from torchlens._history.lookup import lookup_keys
from torchlens._recording.regions import shape_of
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._recording.wrappers import (
    BELOW_A_BYTE,
    holds_others,
    inner_of,
    local_value,
    why_valueless,
)
from torchlens._text.numbers import bytes_text
from torchlens.errors import ValueChangedError

_WIDTH = 100
_MAX_READ = 5
_PREVIEW = 5
# A list of more layers is shortened to its ends.
_LONG, _AT_EITHER_END = 10_000, 500


def history_text(log: Log, name: str, *, is_whole: bool) -> str:
    """A forward pass at a glance, then its modules and layers; unless `is_whole`, a very long list
    of layers is shortened.
    """
    recording, graph = log.recording, log.graph
    entries = range(len(graph.recorded))
    are_saved, sizes = log.are_saved(entries), log.sizes(entries)
    num_saved = sum(are_saved)
    total_bytes, saved_bytes = sum(sizes), sum(compress(sizes, are_saved))
    layers = _layer_lines(log, is_marked=num_saved < len(entries))
    if len(layers) > _LONG and not is_whole:
        left_out = f"\t\t... {len(layers) - 2 * _AT_EITHER_END:,} more: print(history.to_text())"
        layers[_AT_EITHER_END:-_AT_EITHER_END] = [left_out]
    params = recording.params
    param_bytes = sum(p.numel() * p.element_size() for p in params)
    tree = graph.module_tree
    failure = recording.failure
    computed = f"{len(entries)} tensors ({bytes_text(total_bytes)}) computed in forward pass"
    param_size = f"{sum(p.numel() for p in params)} params total; {bytes_text(param_bytes)}"
    lines = [
        f"Log of {name} forward pass{'' if failure is None else ' (it failed)'}:",
        f"\tModel structure: {_structure(log)}; {len(tree.num_passes)} total modules.",
        (
            f"\t{computed}; {num_saved} tensors ({bytes_text(saved_bytes)}) "
            f"saved{valueless_text(log)}."
        ),
        *_boundary_lines(log),
        f"\t{len(params)} parameter operations ({param_size}).",
        f"\tRandom seed: {recording.random_seed}",
        f"\tTime elapsed: {recording.seconds_total:.3f}s",
        *([] if failure is None else [f"\tFailed: {failure.message.splitlines()[0]}"]),
        *(f"\tWarning: {message}." for message in recording.warnings),
        "\tModule Hierarchy:",
        *(f"\t\t{line}" for line in _hierarchy(tree.top_level, tree.children, 0, set())),
        "\tLayers:" if num_saved == len(entries) else "\tLayers (* means saved):",
        *layers,
    ]
    return "\n".join(lines)


def valueless_text(log: Log) -> str:
    """`, without values (on the meta device)` if saved tensors have none; empty otherwise."""
    reasons = log.valueless_entries()
    if not reasons:
        return ""
    number = sum(log.are_saved(range(len(log.graph.recorded))))
    which = "" if len(reasons) == number else f"{len(reasons)} of them "
    return f", {which}without values ({', '.join(dict.fromkeys(reasons.values()))})"


def _boundary_lines(log: Log) -> list[str]:
    """That it is a part of a log, that no tensor goes in or comes out, or that entries are left
    out; usually nothing.
    """
    graph, lines = log.graph, []
    if graph.part_of is not None:
        return [f"\tA part of the log: {len(graph.recorded)} of {graph.part_of} tensors."]
    returns_none = not graph.outputs and log.recording.failure is None
    sides = (["goes in"] if not graph.inputs else []) + (["comes out"] if returns_none else [])
    if sides:
        read = _values_read(log) if returns_none else ""
        lines.append(f"\tNo tensor {' or '.join(sides)}{read}.")
    if graph.num_left_out:
        lines.append(
            f"\t{graph.num_left_out} tensors that have to do with neither input nor output are "
            "left out."
        )
    return lines


def _values_read(log: Log) -> str:
    """The layers whose values Python reads, as text; empty if it reads none."""
    numbers = {*log.recording.reads, *log.recording.booleans}
    entry_of = log.graph.entry_of
    entries = sorted(entry_of[number] for number in numbers if number in entry_of)
    read = list(dict.fromkeys(map(log.label_no_pass, entries)))
    if not read:
        return ""
    more = f" and {len(read) - _MAX_READ} more" if len(read) > _MAX_READ else ""
    return f"; Python reads the values of {', '.join(read[:_MAX_READ])}{more}"


def _structure(log: Log) -> str:
    kind = "purely feedforward"
    passes = max((layer.num_passes for layer in log.graph.layers), default=1)
    if log.most_loops > 1:
        kind = f"recurrent (at most {log.most_loops} loops)"
    elif passes > 1:
        kind = f"feedforward, with shared layers (at most {passes} passes)"
    branching = "with" if max(map(len, log.graph.children), default=0) > 1 else "without"
    conditions = ", with conditions" if log.graph.booleans else ""
    return f"{kind}, {branching} branching{conditions}"


def _hierarchy(
    addresses: list[str], children: dict[str, list[str]], depth: int, shown: set[str]
) -> list[str]:
    """Modules with modules inside as headings, the others in flowing lists.

    What is inside a module that several others call, or that calls itself, is shown once.
    """
    indent = "    " * depth
    lines: list[str] = []
    leaves: list[str] = []

    def flush() -> None:
        wrapper = textwrap.TextWrapper(
            _WIDTH, indent, indent, break_long_words=False, break_on_hyphens=False
        )
        lines.extend(wrapper.wrap(", ".join(leaves)))
        leaves.clear()

    for address in addresses:
        inside = children.get(address)
        if inside and depth < 50 and address not in shown:
            shown.add(address)
            flush()
            lines.append(f"{indent}{address}:")
            lines.extend(_hierarchy(inside, children, depth + 1, shown))
        else:
            leaves.append(address)
    flush()
    return lines


def _layer_lines(log: Log, is_marked: bool) -> list[str]:
    visible, graph = log.visible, log.graph
    layers, passes = picked(graph.layer_of, visible), picked(graph.pass_of, visible)
    labels = log.layer_labels
    notes = [
        f"/{count} passes)" if (count := layer.num_passes) > 1 else "" for layer in graph.layers
    ]
    marks = (
        ["* " if is_saved else "  " for is_saved in log.are_saved(visible)]
        if is_marked
        else repeat("", len(visible))
    )
    columns = zip(range(len(visible)), layers, passes, marks, strict=True)
    return [
        f"\t\t{mark}{position}: {labels[layer]}:{number} ({number}{note}"
        if (note := notes[layer])
        else f"\t\t{mark}{position}: {labels[layer]}"
        for position, layer, number, mark in columns
    ]


def entry_text(log: Log, entry: int) -> str:
    """Everything about one entry that fits a screen."""
    row, graph = log.row(entry), log.graph
    passes = log.num_passes(entry)
    note = f" ({graph.pass_of[entry]}/{passes} passes)" if passes > 1 else ""
    size = bytes_text(log.num_bytes(entry))
    chain, exited = log.module_chain(entry), graph.modules_exited.get(entry, [])
    children, addresses = graph.module_tree.children, log.module_call_addresses
    bottom = [call for call in exited if not children[addresses[call]]]
    inside = _modules(log, chain[-1:]) or "not computed inside a module"
    lines = [
        f"Layer {log.label(entry)}{note}, operation {entry + 1}/{len(graph.recorded)}:",
        f"\tOutput tensor: shape={tuple(row.shape)}, dtype={row.dtype}, size={size}",
        *_saved_lines(log, entry),
        *_gradient_lines(log, entry),
        f"\tParams: {_params_text(log, entry)}",
        f"\tParent Layers: {_labels(log, graph.parents[entry])}",
        f"\tChild Layers: {_labels(log, graph.children[entry])}",
        f"\tFunction: {row.operation.name} (gradfunc={row.gradfunc})",
        f"\tComputed inside module: {inside}",
        f"\tTime elapsed: {row.seconds: .3E}s{_backward_text(log, entry)}",
        f"\tOutput of modules: {_modules(log, exited) or 'none'}",
        f"\tOutput of bottom-level module: {_modules(log, bottom[:1]) or 'none'}",
        *(f"\tCalled at: {line}" for line in log.call_stack(entry)[:1]),
        f"\tLookup keys: {_keys_text(log, entry)}",
    ]
    return "\n".join(lines)


def _gradient_lines(log: Log, entry: int) -> list[str]:
    gradient, reason = log.gradient(entry), log.missing_gradient(entry)
    if gradient is not None:
        shape = tuple(shape_of(gradient))
        return [f"\tGradient: shape={shape}, dtype={gradient.dtype}", *_value_lines(gradient)]
    return [] if reason is None else [f"\tGradient: none, because {reason}"]


def _keys_text(log: Log, entry: int) -> str:
    """The lookup keys, without the short label, which can be seen from the long one."""
    graph = log.graph
    short = graph.layers[graph.layer_of[entry]].label_short
    hidden = (short, f"{short}:{graph.pass_of[entry]}")
    return ", ".join(str(key) for key in lookup_keys(log, entry) if key not in hidden)


def _saved_lines(log: Log, entry: int) -> list[str]:
    try:
        return _value_lines(log.value(entry))
    except ValueChangedError:
        return ["\t\t(changed in place since it was saved)"]


def _value_lines(value: Any) -> list[str]:
    """A corner of the tensor, at most five by five."""
    if value is None:
        return ["\t\t(not saved)"]
    if not isinstance(value, torch.Tensor):
        return [f"\t\t{value!r}"]
    # Of a tensor that is spread over processes, only the part on this rank can be read here.
    part = [] if inner_of(value) is None else [_part_text(value)]
    reason = why_valueless(value)
    if reason is not None:
        return [*part, f"\t\t(no values: the tensor is {reason})"]
    with unseen(), NoTorchFunction():
        return [*part, *_corner_lines(local_value(value).detach())]


def _corner_lines(value: torch.Tensor) -> list[str]:
    if value.layout is not torch.strided or value.is_nested:
        return [f"\t\t{type(value).__name__} of layout {value.layout} on {value.device}"]
    if holds_others(value):
        text = textwrap.indent(repr(value), "\t\t").splitlines()
        return text if len(text) <= _PREVIEW else [*text[:_PREVIEW], "\t\t..."]
    corner = _corner(value)
    ending = "..." if corner.numel() < value.numel() else ""
    if value.dtype in BELOW_A_BYTE:
        return [f"\t\t(torch cannot print numbers of type {value.dtype})"]
    return [f"\t\t{corner}{ending}"]


def _corner(value: torch.Tensor) -> torch.Tensor:
    """The first rows and columns; the whole if torch cannot index it (some quantized tensors)."""
    corner = value
    try:
        while corner.dim() > 2 and corner.shape[0]:
            corner = corner[0]
        return corner[(slice(_PREVIEW),) * corner.dim()].cpu()
    except RuntimeError:
        if not value.is_quantized:
            raise
        return value.cpu()


def _part_text(value: torch.Tensor) -> str:
    placements = ", ".join(map(str, getattr(value, "placements", ())))
    shape = tuple(local_value(value).shape)
    return (
        f"\t\t{type(value).__name__}{f' ({placements})' if placements else ''}; on this rank, "
        f"shape={shape}:"
    )


def _backward_text(log: Log, entry: int) -> str:
    seconds = backward_times(log).seconds.get(entry)
    return "" if seconds is None else f" ({seconds:.3E}s in the backward pass)"


def _params_text(log: Log, entry: int) -> str:
    params = [log.recording.params[number] for number in log.graph.params[entry]]
    if not params:
        return "no params used"
    shapes = ", ".join(str(tuple(p.shape)) for p in sorted(params, key=lambda p: p.dim()))
    num_bytes = sum(p.numel() * p.element_size() for p in params)
    total = sum(p.numel() for p in params)
    return (
        f"Computed from params with shape {shapes}; {total} params total ({bytes_text(num_bytes)})"
    )


def _labels(log: Log, entries: Any) -> str:
    return ", ".join(map(log.label, entries)) or "none"


def _modules(log: Log, calls: Any) -> str:
    """Module addresses, with the pass where there are several."""
    names = []
    for call in calls:
        address = log.recording.module_calls[call].address
        names.append(
            address if log.graph.module_tree.num_passes[address] == 1 else log.module_pass(call)
        )
    return ", ".join(names)
