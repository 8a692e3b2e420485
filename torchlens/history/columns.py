"""The fields of entries as columns: one function per field, which gives the values of many entries at once.

A field of a `LayerEntry` is a column of one entry; tables and JSON are made of columns of a million. So what a field means
is said once, here, and what it is for users is said at `LayerEntry`. What is the same for all entries is looked up before
the loop, and what is the same for many of them is made once: half a microsecond per value is half a minute per table.

Lists and dicts are made anew for every entry: they belong to who asked for them.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar

import torch

from torchlens.capture.arguments import shape_of
from torchlens.capture.operations import BUFFER, INPUT, OUTPUT
from torchlens.capture.recording import Row
from torchlens.capture.symbolic import SymbolicInt
from torchlens.graph.costs import flops_of_all
from torchlens.graph.distances import Distances
from torchlens.graph.edges import located
from torchlens.graph.labels import Layer
from torchlens.history.backward import backward_times
from torchlens.history.log import Log, nice_bytes, picked, source_line

Entries = Sequence[int]
_BOUNDARIES = (INPUT, OUTPUT, BUFFER)
_Key = TypeVar("_Key", bound=Hashable)
_Place = TypeVar("_Place", int, str)
_Value = TypeVar("_Value")


def _once(keys: Iterable[_Key], make: Callable[[_Key], _Value]) -> list[_Value]:
    """What `make` makes of each key; of keys that are equal only once."""
    known: dict[_Key, _Value] = {}
    found = []
    for key in keys:
        if key not in known:
            known[key] = make(key)
        found.append(known[key])
    return found


# -- labels ------------------------------------------------------------------------------------------------------------


def layer_label(log: Log, entries: Entries) -> list[str]:
    return log.labels(entries)


def layer_label_w_pass(log: Log, entries: Entries) -> list[str]:
    return log.labels_w_pass(entries)


def layer_label_no_pass(log: Log, entries: Entries) -> list[str]:
    return picked(log.layer_labels, picked(log.graph.layer_of, entries))


def layer_label_short(log: Log, entries: Entries) -> list[str]:
    names, repeats = layer_label_no_pass_short(log, entries), picked(log.repeats, picked(log.graph.layer_of, entries))
    passes = zip(names, repeats, pass_num(log, entries), strict=True)
    return [f"{name}:{number}" if is_repeated else name for name, is_repeated, number in passes]


def layer_label_w_pass_short(log: Log, entries: Entries) -> list[str]:
    names = zip(layer_label_no_pass_short(log, entries), pass_num(log, entries), strict=True)
    return [f"{name}:{number}" for name, number in names]


def layer_label_no_pass_short(log: Log, entries: Entries) -> list[str]:
    layers = log.graph.layers
    return _once(picked(log.graph.layer_of, entries), lambda number: layers[number].label_short)


def _layers(log: Log, entries: Entries) -> list[Layer]:
    return picked(log.graph.layers, picked(log.graph.layer_of, entries))


def layer_type(log: Log, entries: Entries) -> list[str]:
    return [layer.type for layer in _layers(log, entries)]


def layer_type_num(log: Log, entries: Entries) -> list[int]:
    return [layer.type_num for layer in _layers(log, entries)]


def layer_total_num(log: Log, entries: Entries) -> list[int]:
    return [layer.total_num for layer in _layers(log, entries)]


def pass_num(log: Log, entries: Entries) -> list[int]:
    return picked(log.graph.pass_of, entries)


def layer_passes_total(log: Log, entries: Entries) -> list[int]:
    return [len(layer.entries) for layer in _layers(log, entries)]


def operation_num(log: Log, entries: Entries) -> list[int]:
    return [entry + 1 for entry in entries]


# -- the tensor --------------------------------------------------------------------------------------------------------


def has_saved_activations(log: Log, entries: Entries) -> list[bool]:
    return [value is not None for value in picked(log.recording.values, picked(log.graph.recorded, entries))]


def tensor_shape(log: Log, entries: Entries) -> list[tuple[int, ...]]:
    return [tuple(row.shape) for row in log.rows(entries)]


def tensor_dtype(log: Log, entries: Entries) -> list[torch.dtype]:
    return [row.dtype for row in log.rows(entries)]


def tensor_fsize(log: Log, entries: Entries) -> list[int]:
    return log.sizes(entries)


def tensor_fsize_nice(log: Log, entries: Entries) -> list[str]:
    return _nice(log.sizes(entries))


def _nice(sizes: list[int]) -> list[str]:
    if SymbolicInt in set(map(type, sizes)):  # may be equal to a number, and reads differently
        return list(map(nice_bytes, sizes))
    return _once(sizes, nice_bytes)


def grad_contents(log: Log, entries: Entries) -> list[torch.Tensor | None]:
    return [log.gradient(entry) for entry in entries] if log.recording.gradients else [None] * len(entries)


def has_saved_grad(log: Log, entries: Entries) -> list[bool]:
    return [gradient is not None for gradient in grad_contents(log, entries)]


def grad_shape(log: Log, entries: Entries) -> list[tuple[int, ...] | None]:
    return [None if gradient is None else tuple(shape_of(gradient)) for gradient in grad_contents(log, entries)]


def backward_time_elapsed(log: Log, entries: Entries) -> list[float | None]:
    return list(map(backward_times(log).seconds.get, entries))


def backward_order(log: Log, entries: Entries) -> list[int | None]:
    return list(map(backward_times(log).order.get, entries))


# -- the operation -----------------------------------------------------------------------------------------------------


def func_applied_name(log: Log, entries: Entries) -> list[str]:
    return [row.operation.name for row in log.rows(entries)]


def source(log: Log, entries: Entries) -> list[str | None]:
    """The innermost line of the user's code that led to each operation; None where there is none."""
    found: list[str | None] = []
    known: dict[tuple[int, int], str] = {}  # by id: hashing a code object means reading it all
    for row in log.rows(entries):
        code, instruction = (row.code, row.instruction) if row.code is not None else log.innermost_place(row)
        if code is None:
            found.append(None)
            continue
        line = known.get((id(code), instruction))
        if line is None:
            line = known[id(code), instruction] = str(source_line(code, instruction))
        found.append(line)
    return found


def func_time_elapsed(log: Log, entries: Entries) -> list[float]:
    return [row.seconds for row in log.rows(entries)]


def flops(log: Log, entries: Entries) -> list[int | None]:
    return flops_of_all(log.recording, log.rows(entries))


def flops_backward(log: Log, entries: Entries) -> list[int | None]:
    return log.flops_backward(entries)


def func_position_args_non_tensor(log: Log, entries: Entries) -> list[list[Any]]:
    found: list[list[Any]] = []
    for row in log.rows(entries):
        args, references = row.args, row.references
        if not args:
            found.append([])
        elif type(references) is not tuple:  # tensors inside arguments
            found.append([arg for _, arg in _non_tensors(row, enumerate(args))])
        elif None in references:
            found.append([args[place] for place, reference in enumerate(references) if reference is None])
        else:
            found.append([])
    return found


def func_keyword_args_non_tensor(log: Log, entries: Entries) -> list[dict[str, Any]]:
    return [dict(_non_tensors(row, row.kwargs.items())) if row.kwargs else {} for row in log.rows(entries)]


def _non_tensors(row: Row, arguments: Iterable[tuple[_Place, Any]]) -> list[tuple[_Place, Any]]:
    """Those that are no tensor and no list of nothing but tensors, which stand there as None."""
    tensors = {location for location, _ in located(row.references)}

    def is_tensors(place: _Place, argument: Any) -> bool:
        if not isinstance(argument, list | tuple) or not argument:
            return place in tensors
        return all((place, index) in tensors for index in range(len(argument)))

    return [(place, argument) for place, argument in arguments if not is_tensors(place, argument)]


def function_is_inplace(log: Log, entries: Entries) -> list[bool]:
    return _once([row.operation for row in log.rows(entries)], lambda operation: operation.is_inplace)


def gradfunc(log: Log, entries: Entries) -> list[str | None]:
    return [row.gradfunc for row in log.rows(entries)]


def is_part_of_iterable_output(log: Log, entries: Entries) -> list[bool]:
    return [row.output_index is not None for row in log.rows(entries)]


def iterable_output_index(log: Log, entries: Entries) -> list[int | None]:
    return [row.output_index for row in log.rows(entries)]


# -- parameters --------------------------------------------------------------------------------------------------------


def _of_params(log: Log, entries: Entries, make: Callable[[list[torch.nn.Parameter]], _Value]) -> list[_Value]:
    """What `make` makes of the parameters of each entry."""
    params, numbers = log.recording.params, log.graph.params
    return _once(picked(numbers, entries), lambda own: make([params[number] for number in own]))


def parent_param_addresses(log: Log, entries: Entries) -> list[list[str]]:
    addresses, params = log.recording.param_addresses, log.graph.params
    return [[addresses[number] for number in own] if own else [] for own in picked(params, entries)]


def parent_param_shapes(log: Log, entries: Entries) -> list[list[tuple[int, ...]]]:
    return list(map(list, _of_params(log, entries, lambda own: [tuple(parameter.shape) for parameter in own])))


def computed_with_params(log: Log, entries: Entries) -> list[bool]:
    return list(map(bool, picked(log.graph.params, entries)))


def num_param_tensors(log: Log, entries: Entries) -> list[int]:
    return list(map(len, picked(log.graph.params, entries)))


def num_params_total(log: Log, entries: Entries) -> list[int]:
    return _of_params(log, entries, lambda own: sum(parameter.numel() for parameter in own))


def parent_params_fsize(log: Log, entries: Entries) -> list[int]:
    return _of_params(log, entries, lambda own: sum(parameter.numel() * parameter.element_size() for parameter in own))


def parent_params_fsize_nice(log: Log, entries: Entries) -> list[str]:
    return _nice(parent_params_fsize(log, entries))


# -- the graph around it -----------------------------------------------------------------------------------------------


def parent_layers(log: Log, entries: Entries) -> list[list[str]]:
    return _labels(log, picked(log.graph.parents, entries))


def child_layers(log: Log, entries: Entries) -> list[list[str]]:
    return _labels(log, picked(log.graph.children, entries))


def _labels(log: Log, groups: Sequence[Sequence[int]]) -> list[list[str]]:
    """The labels of each group; all of them are made at once, then cut."""
    labels = log.labels(list(chain.from_iterable(groups)))
    sizes = list(map(len, groups))
    return [labels[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def located_parents(log: Log, entries: Entries) -> list[list[tuple[Any, int]]]:
    """The entries that each reads, and as which argument."""
    entry_of, located_reads = log.graph.entry_of, log.graph.located_reads
    found = []
    for number, row in zip(picked(log.graph.recorded, entries), log.rows(entries), strict=True):
        references = row.references
        reads: Iterable[tuple[Any, int | None]]
        if number in located_reads:
            reads = located_reads[number]
        else:
            reads = enumerate(references) if type(references) is tuple else located(references)
        found.append([(location, entry_of[parent]) for location, parent in reads if parent is not None and parent >= 0])
    return found


def has_input_ancestor(log: Log, entries: Entries) -> list[bool]:
    return picked(log.graph.has_input_ancestor, entries)


def is_output_ancestor(log: Log, entries: Entries) -> list[bool]:
    return picked(log.graph.is_output_ancestor, entries)


def min_distance_from_input(log: Log, entries: Entries) -> list[int | None]:
    return _distances(log.from_input, entries, 0)


def max_distance_from_input(log: Log, entries: Entries) -> list[int | None]:
    return _distances(log.from_input, entries, 1)


def min_distance_from_output(log: Log, entries: Entries) -> list[int | None]:
    return _distances(log.to_output, entries, 0)


def max_distance_from_output(log: Log, entries: Entries) -> list[int | None]:
    return _distances(log.to_output, entries, 1)


def _distances(distances: Distances | None, entries: Entries, which: int) -> list[int | None]:
    if distances is None:
        return [None] * len(entries)
    return [None if known is None else known[which] for known in picked(distances, entries)]


# -- where it begins and ends ------------------------------------------------------------------------------------------


def is_input_layer(log: Log, entries: Entries) -> list[bool]:
    return [row.operation is INPUT for row in log.rows(entries)]


def is_output_layer(log: Log, entries: Entries) -> list[bool]:
    return [row.operation is OUTPUT for row in log.rows(entries)]


def is_buffer_layer(log: Log, entries: Entries) -> list[bool]:
    return [row.operation is BUFFER for row in log.rows(entries)]


def address(log: Log, entries: Entries) -> list[str | None]:
    """Of an input, an output or a buffer."""
    addresses = log.boundary_addresses
    return [addresses[entry][0] if entry in addresses else None for entry in entries]


def input_output_address(log: Log, entries: Entries) -> list[str | None]:
    addresses = zip(entries, address(log, entries), strict=True)
    return [None if own is None or log.row(entry).operation is BUFFER else own for entry, own in addresses]


def buffer_address(log: Log, entries: Entries) -> list[str | None]:
    addresses = zip(entries, address(log, entries), strict=True)
    return [own if own is not None and log.row(entry).operation is BUFFER else None for entry, own in addresses]


def initialized_inside_model(log: Log, entries: Entries) -> list[bool]:
    parents, rows = picked(log.graph.parents, entries), log.rows(entries)
    return [not own and row.operation not in _BOUNDARIES for own, row in zip(parents, rows, strict=True)]


def terminated_inside_model(log: Log, entries: Entries) -> list[bool]:
    children, rows = picked(log.graph.children, entries), log.rows(entries)
    return [not own and row.operation is not OUTPUT for own, row in zip(children, rows, strict=True)]


# -- conditions --------------------------------------------------------------------------------------------------------


def is_terminal_bool_layer(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.booleans.__contains__, entries))


def atomic_bool_val(log: Log, entries: Entries) -> list[bool | None]:
    return list(map(log.recording.booleans.get, picked(log.graph.recorded, entries)))


def in_cond_branch(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.condition_entries.__contains__, entries))


# -- modules -----------------------------------------------------------------------------------------------------------


def _addresses(log: Log, found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    records = log.recording.module_calls
    return [[records[call].address for call in own] if own else [] for own in map(found.get, entries)]


def _passes(log: Log, found: dict[int, list[int]], entries: Entries) -> list[list[str]]:
    names = log.module_names
    return [[names[call] for call in own] if own else [] for own in map(found.get, entries)]


def containing_module_origin(log: Log, entries: Entries) -> list[str | None]:
    names = log.module_names
    return [names[row.module_call] if row.module_call else None for row in log.rows(entries)]


def containing_modules_origin_nested(log: Log, entries: Entries) -> list[list[str]]:
    chains, names = log.graph.module_chains, log.module_names
    calls = [row.module_call for row in log.rows(entries)]
    return [[names[outer] for outer in chains[call]] if call else [] for call in calls]


def module_nesting_depth(log: Log, entries: Entries) -> list[int]:
    chains = log.graph.module_chains
    return [len(chains[row.module_call]) for row in log.rows(entries)]


def modules_entered(log: Log, entries: Entries) -> list[list[str]]:
    return _addresses(log, log.graph.modules_entered, entries)


def module_passes_entered(log: Log, entries: Entries) -> list[list[str]]:
    return _passes(log, log.graph.modules_entered, entries)


def modules_exited(log: Log, entries: Entries) -> list[list[str]]:
    return _addresses(log, log.graph.modules_exited, entries)


def module_passes_exited(log: Log, entries: Entries) -> list[list[str]]:
    return _passes(log, log.graph.modules_exited, entries)


def is_submodule_input(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.modules_entered.__contains__, entries))


def is_submodule_output(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.modules_exited.__contains__, entries))


def bottom_level_submodule_pass_exited(log: Log, entries: Entries) -> list[str | None]:
    names = log.module_names
    return [None if call is None else names[call] for call in _bottom_calls_exited(log, entries)]


def is_bottom_level_submodule_output(log: Log, entries: Entries) -> list[bool]:
    return [call is not None for call in _bottom_calls_exited(log, entries)]


def _bottom_calls_exited(log: Log, entries: Entries) -> list[int | None]:
    children, records = log.graph.module_tree.children, log.recording.module_calls
    found: list[int | None] = []
    for calls in map(log.graph.modules_exited.get, entries):
        for call in calls or ():
            if not children[records[call].address]:
                found.append(call)
                break
        else:
            found.append(None)
    return found
