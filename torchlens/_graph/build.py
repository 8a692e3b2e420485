"""The steps from a recording to a graph, in order."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torchlens._graph.edges import find_edges, order_of_rows, own_references
from torchlens._graph.labels import Layer, number_layers, pass_numbers
from torchlens._graph.loops import TAKING_A_PART, group_into_layers
from torchlens._graph.paths import (
    ancestors_of,
    children_of,
    connected,
    descendants_of,
    find_conditions,
)
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import ModuleCall, Recording, Row, located

_BOUNDARIES = (INPUT, BUFFER, OUTPUT)


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The modules that ran, by address: how often, and which ran inside which."""

    num_passes: dict[str, int]
    children: dict[str, list[str]]
    top_level: list[str]


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward pass as a graph of entries: one list per fact, indexed by entry, in the order of
    the log.

    The entries are the rows of the recording that belong to the log: `recorded` has the number of
    each row, and `entry_of` is the inverse. `first_exit` has the first tensor that each module call
    returned. `located_reads` (in numbers of the recording) and `is_exact` are those of `Edges`.
    `part_of` is the number of entries of the whole graph if this is a part of one.
    """

    recorded: list[int]
    entry_of: dict[int, int]
    parents: list[tuple[int, ...]]
    children: list[list[int]]
    located_reads: dict[int, list[tuple[Any, int]]]
    params: list[tuple[int, ...]]
    layers: list[Layer]
    layer_of: list[int]
    pass_of: list[int]
    has_input_ancestor: list[bool]
    is_output_ancestor: list[bool]
    inputs: list[int]
    outputs: list[int]
    buffers: list[int]
    booleans: dict[int, bool]
    condition_entries: set[int]
    condition_edges: list[tuple[int, int]]
    module_tree: ModuleTree
    module_chains: list[tuple[int, ...]]
    modules_entered: dict[int, list[int]]
    modules_exited: dict[int, list[int]]
    first_exit: dict[int, int]
    num_left_out: int
    is_exact: bool = True
    part_of: int | None = None


@dataclass(frozen=True, slots=True)
class Decisions:
    """The part of a graph that takes analysis; the rest follows from it and from the rows. Trace
    files store it.

    For each entry: its number in the recording, the entries it reads, the first entry of its layer.
    The other fields are those of `Graph`.
    """

    recorded: list[int]
    reads: list[tuple[int, ...]]
    first_of_layer: list[int]
    located_reads: dict[int, list[tuple[Any, int]]]
    is_exact: bool = True


def build_graph(recording: Recording) -> Graph:
    """Edges, then what belongs to the log, then layers and their numbers, then modules and
    conditions.
    """
    edges = find_edges(recording)
    recorded = _choose_entries(recording, edges.parents)
    entry_of = {number: entry for entry, number in enumerate(recorded)}
    reads = [tuple([entry_of[parent] for parent in edges.parents[number]]) for number in recorded]
    rows = [recording.rows[number] for number in recorded]
    sources = sum(row.operation is INPUT or row.operation is BUFFER for row in rows)
    operations = range(sources, len(rows) - sum(row.operation is OUTPUT for row in rows))
    first_of_layer = list(range(len(rows)))
    params = _params_of_all(recording, recorded)
    first_of_layer[operations.start : operations.stop] = _group(
        recording, rows, reads, params, operations
    )
    decisions = Decisions(recorded, reads, first_of_layer, edges.located_reads, edges.is_exact)
    return assemble_graph(recording, decisions, params)


def decided(graph: Graph) -> Decisions:
    """The decisions that `assemble_graph` makes this graph of."""
    first_of_layer = [graph.layers[layer].entries[0] for layer in graph.layer_of]
    return Decisions(
        graph.recorded, graph.parents, first_of_layer, graph.located_reads, graph.is_exact
    )


def assemble_graph(
    recording: Recording, decisions: Decisions, params: list[tuple[int, ...]] | None = None
) -> Graph:
    """The graph that follows from the decisions. `params` are those of each entry, if already
    known.
    """
    recorded = decisions.recorded
    entry_of = dict(zip(recorded, range(len(recorded)), strict=True))
    parents = [read if len(read) < 2 else tuple(dict.fromkeys(read)) for read in decisions.reads]
    rows = list(map(recording.rows.__getitem__, recorded))
    inputs, buffers, outputs = _boundaries_of(rows)
    types = [row.operation.layer_type for row in rows]
    layers, layer_of = number_layers(types, decisions.first_of_layer, len(inputs) + len(buffers))
    is_output_ancestor = ancestors_of(outputs, parents)
    booleans = {
        entry_of[number]: value
        for number, value in recording.booleans.items()
        if number in entry_of
    }
    leads_on = is_output_ancestor
    if recording.returns_data:  # an entry that such data was read from is more than a condition
        leads_on = ancestors_of([*outputs, *_listed(recording.reads, entry_of)], parents)
    condition_entries, condition_edges = find_conditions(booleans, parents, leads_on)
    return Graph(
        recorded=recorded,
        entry_of=entry_of,
        parents=parents,
        children=children_of(parents),
        located_reads=decisions.located_reads,
        params=params or _params_of_all(recording, recorded),
        layers=layers,
        layer_of=layer_of,
        pass_of=pass_numbers(layers, len(rows)),
        has_input_ancestor=descendants_of(inputs, parents),
        is_output_ancestor=is_output_ancestor,
        inputs=inputs,
        outputs=outputs,
        buffers=buffers,
        booleans=booleans,
        condition_entries=condition_entries,
        condition_edges=condition_edges,
        module_tree=module_tree(recording.module_calls),
        module_chains=call_chains(recording.module_calls),
        modules_entered=calls_by_entry(recording.module_entries, entry_of),
        modules_exited=calls_by_entry(recording.module_exits, entry_of),
        first_exit=first_exits(recording.module_exits, entry_of),
        num_left_out=_num_left_out(recording.rows, entry_of),
        is_exact=decisions.is_exact,
    )


def _boundaries_of(rows: Sequence[Row]) -> list[list[int]]:
    """The inputs, the buffers and the outputs."""
    found: list[list[int]] = [[], [], []]
    for entry, row in enumerate(rows):
        if row.operation in _BOUNDARIES:
            found[_BOUNDARIES.index(row.operation)].append(entry)
    return found


def _listed(numbers: Iterable[int], entry_of: dict[int, int]) -> list[int]:
    return [entry_of[number] for number in numbers if number in entry_of]


def _num_left_out(rows: Sequence[Row], entry_of: dict[int, int]) -> int:
    if len(entry_of) == len(rows):
        return 0
    return sum(
        row.operation is not BUFFER for number, row in enumerate(rows) if number not in entry_of
    )


def _choose_entries(recording: Recording, parents: Sequence[Sequence[int]]) -> list[int]:
    """Inputs first, then the buffers in the order in which they are read, then operations, then
    outputs.
    """
    inputs = list(dict.fromkeys(number for _, number in recording.inputs))
    buffers = {number for _, number in recording.buffers}
    belongs = _connected(recording, inputs, parents)
    operations = [
        number
        for number in order_of_rows(recording, parents)
        if number >= len(inputs) and number not in buffers and belongs[number]
    ]
    read = chain.from_iterable(parents[number] for number in operations)
    return [*inputs, *filter(buffers.__contains__, dict.fromkeys(read)), *operations]


def _connected(
    recording: Recording, inputs: Sequence[int], parents: Sequence[Sequence[int]]
) -> list[bool]:
    """For each row, whether it is connected to an input or output.

    If no tensor goes in, or none comes out (text, an action), every row counts as connected. If a
    model returns numbers or text beside tensors, the entries that it read them from count as
    outputs. Tensors received from another process count as inputs, and those sent to one as
    outputs.
    """
    sources = [*inputs, *recording.received]
    targets = [*(number for _, number in recording.outputs), *recording.sent]
    if not sources or not targets:
        return [True] * len(parents)
    if recording.returns_data:
        targets += [*recording.reads, *recording.booleans]
    return connected(sources, targets, parents)


def _params_of_all(recording: Recording, recorded: Sequence[int]) -> list[tuple[int, ...]]:
    num_params = len(recording.params)
    if not num_params:
        return [()] * len(recorded)
    found = [_params_of(recording.rows[number], num_params) for number in recorded]
    if recording.other_params:
        others = [recording.other_params.get(number, ()) for number in recorded]
        found = [(*own, *more) for own, more in zip(found, others, strict=True)]
    return found


def _params_of(row: Row, num_params: int) -> tuple[int, ...]:
    references = row.references
    found = references.values() if isinstance(references, dict) else references
    own = [-1 - number for number in found if number is not None and -num_params <= number < 0]
    if own and row.output_index is not None:
        mine = {-1 - number for _, number in own_references(row)}
        own = [number for number in own if number in mine]
    return tuple(dict.fromkeys(own)) if own else ()


def _group(
    recording: Recording,
    rows: Sequence[Row],
    reads: Sequence[Sequence[int]],
    params: Sequence[tuple[int, ...]],
    operations: range,
) -> list[int]:
    """The first entry of each operation's layer."""
    start = operations.start
    keys: list[tuple[Hashable, ...]] = []
    steps: list[Hashable] = []
    for entry in operations:
        key = key_of(recording, rows[entry], params[entry])
        keys.append(key)
        steps.append(_step_key(rows[entry], key, params[entry]))
    has_params = [bool(params[entry]) for entry in operations]
    # Coarser keys: what is done without parameters is told apart by the function alone.
    kinds = [key if own else key[:2] for key, own in zip(keys, has_params, strict=True)]
    shifted = [[parent - start for parent in reads[entry]] for entry in operations]
    calls = [rows[entry].module_call for entry in operations]
    numbered = group_into_layers(
        _numbered(keys),
        has_params,
        _numbered(kinds),
        shifted,
        _numbered(steps),
        calls,
        _calls_of_repeated_modules(recording.module_calls, calls),
    )
    return [start + first for first in numbered]


def _step_key(row: Row, key: tuple[Hashable, ...], params: tuple[int, ...]) -> Hashable:
    """The key by which an operation is the same in each step of a loop: of one that takes a part,
    its place in the code replaces its arguments, such as an index.
    """
    if row.operation.layer_type in TAKING_A_PART and not params:
        return (*key[:2], *key[4:], (id(row.code), row.instruction))
    return key


def _calls_of_repeated_modules(
    module_calls: Sequence[ModuleCall], calls: Sequence[int]
) -> list[list[list[int]]]:
    """For each module that ran more than once, the operations in each of its calls.

    `calls` is the innermost call of each operation.
    """
    repeated = {call.address for call in module_calls if call.pass_num > 1}
    if not repeated:
        return []
    chains = call_chains(module_calls)
    made: dict[int, list[int]] = {}
    for operation, innermost in enumerate(calls):
        for call in chains[innermost]:
            if module_calls[call].address in repeated:
                made.setdefault(call, []).append(operation)
    found: dict[str, list[list[int]]] = {}
    for call, operations in made.items():
        found.setdefault(module_calls[call].address, []).append(operations)
    return list(found.values())


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """A number for each key, the same for equal keys: numbers are fast to compare and look up."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def key_of(recording: Recording, row: Row, params: tuple[int, ...]) -> tuple[Hashable, ...]:
    """What an operation does: see `loops.py`."""
    name: Hashable = row.operation.name
    if params and recording.joint_params.isdisjoint(params):
        # In JAX, a primitive may run in two operations: it computes gradients too.
        what = name if recording.framework == "torch" else row.operation
        return what, row.output_index, params, hashable(row.args), hashable(row.kwargs)
    shapes = tuple(
        [recording.rows[number].shape for _, number in located(row.references) if number >= 0]
    )
    module = recording.module_calls[row.module_call].address
    return name, row.output_index, hashable(row.args), hashable(row.kwargs), shapes, module


def hashable(arguments: Any) -> Hashable:
    if not arguments:
        return None
    try:
        hash(arguments)
    except TypeError:  # slices and lists
        return repr(arguments)
    return arguments


# -- modules ---------------------------------------------------------------------------------------


def module_tree(calls: Sequence[ModuleCall]) -> ModuleTree:
    """The modules in order of their first call. The root (call 0) is none of them."""
    num_passes: dict[str, int] = {}
    children: dict[str, dict[str, None]] = {"": {}}
    for call in calls[1:]:
        num_passes[call.address] = call.pass_num
        children.setdefault(call.address, {})
        above = calls[call.parent].address
        if above != call.address:
            children[above][call.address] = None
    return ModuleTree(
        num_passes,
        {address: list(below) for address, below in children.items() if address},
        list(children[""]),
    )


def call_chains(calls: Sequence[ModuleCall]) -> list[tuple[int, ...]]:
    """For each module call, the calls it is nested in, outermost first, itself last; the root is
    left out.
    """
    chains: list[tuple[int, ...]] = [()]
    for number, call in enumerate(calls[1:], start=1):
        chains.append((*chains[call.parent], number))
    return chains


def calls_by_entry(
    calls: Sequence[tuple[int, list[int]]], entry_of: dict[int, int]
) -> dict[int, list[int]]:
    """For each entry, the module calls it is listed with."""
    found: dict[int, list[int]] = {}
    for call, numbers in calls:
        for number in dict.fromkeys(numbers):
            entry = entry_of.get(number)
            if entry is not None:
                found.setdefault(entry, []).append(call)
    return found


def first_exits(calls: Sequence[tuple[int, list[int]]], entry_of: dict[int, int]) -> dict[int, int]:
    """For each module call, the first of the entries it returned."""
    found = {}
    for call, numbers in calls:
        entries = [entry_of[number] for number in numbers if number in entry_of]
        if entries:
            found[call] = entries[0]
    return found
