"""A part of a graph as a graph of its own, under the same labels."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torchlens._graph.build import Graph, ModuleTree
from torchlens._graph.paths import children_of
from torchlens._recording.recording import Recording

_Value = TypeVar("_Value")


def restricted_graph(recording: Recording, graph: Graph, chosen: Sequence[int]) -> Graph:
    """The graph of the chosen entries and of the edges between them.

    Labels, passes and what leads to inputs and outputs are those of the whole graph.
    """
    place_of = {entry: place for place, entry in enumerate(chosen)}
    recorded = _of(chosen, graph.recorded)
    parents = [_kept(own, place_of) for own in _of(chosen, graph.parents)]
    layer_numbers = sorted(set(_of(chosen, graph.layer_of)))
    new_number = {number: place for place, number in enumerate(layer_numbers)}
    whole = _of(layer_numbers, graph.layers)
    return Graph(
        recorded=recorded,
        entry_of={number: entry for entry, number in enumerate(recorded)},
        parents=parents,
        children=children_of(parents),
        located_reads=graph.located_reads,
        params=_of(chosen, graph.params),
        layers=[replace(layer, entries=_kept(layer.entries, place_of)) for layer in whole],
        layer_of=[new_number[number] for number in _of(chosen, graph.layer_of)],
        pass_of=_of(chosen, graph.pass_of),
        has_input_ancestor=_of(chosen, graph.has_input_ancestor),
        is_output_ancestor=_of(chosen, graph.is_output_ancestor),
        inputs=list(_kept(graph.inputs, place_of)),
        outputs=list(_kept(graph.outputs, place_of)),
        buffers=list(_kept(graph.buffers, place_of)),
        booleans=_moved(graph.booleans, place_of),
        condition_entries=set(_kept(graph.condition_entries, place_of)),
        condition_edges=_kept_edges(graph.condition_edges, place_of),
        module_tree=_tree_around(recording, graph, chosen),
        module_chains=graph.module_chains,
        modules_entered=_moved(graph.modules_entered, place_of),
        modules_exited=_moved(graph.modules_exited, place_of),
        first_exit=_kept_exits(graph.first_exit, place_of),
        num_left_out=0,
        is_exact=graph.is_exact,
        part_of=graph.part_of or len(graph.recorded),
    )


def _of(numbers: Iterable[int], values: Sequence[_Value]) -> list[_Value]:
    return [values[number] for number in numbers]


def _kept(entries: "Sequence[int] | set[int]", place_of: Mapping[int, int]) -> tuple[int, ...]:
    return tuple([place_of[entry] for entry in entries if entry in place_of])


def _kept_edges(
    edges: Iterable[tuple[int, int]], place_of: Mapping[int, int]
) -> list[tuple[int, int]]:
    kept = [_kept(edge, place_of) for edge in edges]
    return [(ends[0], ends[1]) for ends in kept if len(ends) == 2]


def _kept_exits(first_exit: Mapping[int, int], place_of: Mapping[int, int]) -> dict[int, int]:
    return {call: place_of[entry] for call, entry in first_exit.items() if entry in place_of}


def _moved(facts: Mapping[int, _Value], place_of: Mapping[int, int]) -> dict[int, _Value]:
    return {place_of[entry]: fact for entry, fact in facts.items() if entry in place_of}


def _tree_around(recording: Recording, graph: Graph, chosen: Sequence[int]) -> ModuleTree:
    """The modules that the chosen entries were computed in or returned by."""
    kept, tree = _addresses_around(recording, graph, chosen), graph.module_tree
    return ModuleTree(
        {address: count for address, count in tree.num_passes.items() if address in kept},
        {
            address: [child for child in children if child in kept]
            for address, children in tree.children.items()
            if address in kept
        },
        [address for address in tree.top_level if address in kept],
    )


def _addresses_around(recording: Recording, graph: Graph, chosen: Sequence[int]) -> set[str]:
    rows, calls, chains = recording.rows, recording.module_calls, graph.module_chains
    around = {rows[number].module_call for number in _of(chosen, graph.recorded)}
    for entry in chosen:
        around.update(graph.modules_exited.get(entry, ()))
    return {calls[outer].address for call in around for outer in chains[call]}
