"""A part of a graph as a graph of its own, under the same labels."""

from collections.abc import Mapping, Sequence
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
    recorded = [graph.recorded[entry] for entry in chosen]
    parents = [_kept(graph.parents[entry], place_of) for entry in chosen]
    layer_numbers = sorted({graph.layer_of[entry] for entry in chosen})
    new_number = {number: place for place, number in enumerate(layer_numbers)}
    whole = [graph.layers[number] for number in layer_numbers]
    return Graph(
        recorded=recorded,
        entry_of={number: entry for entry, number in enumerate(recorded)},
        parents=parents,
        children=children_of(parents),
        located_reads=graph.located_reads,
        params=[graph.params[entry] for entry in chosen],
        layers=[replace(layer, entries=_kept(layer.entries, place_of)) for layer in whole],
        layer_of=[new_number[graph.layer_of[entry]] for entry in chosen],
        pass_of=[graph.pass_of[entry] for entry in chosen],
        has_input_ancestor=[graph.has_input_ancestor[entry] for entry in chosen],
        is_output_ancestor=[graph.is_output_ancestor[entry] for entry in chosen],
        inputs=list(_kept(graph.inputs, place_of)),
        outputs=list(_kept(graph.outputs, place_of)),
        buffers=list(_kept(graph.buffers, place_of)),
        booleans=_moved(graph.booleans, place_of),
        condition_entries=set(_kept(graph.condition_entries, place_of)),
        condition_edges=[
            (place_of[parent], place_of[child])
            for parent, child in graph.condition_edges
            if parent in place_of and child in place_of
        ],
        module_tree=_tree_around(recording, graph, chosen),
        module_chains=graph.module_chains,
        modules_entered=_moved(graph.modules_entered, place_of),
        modules_exited=_moved(graph.modules_exited, place_of),
        first_exit={
            call: place_of[entry] for call, entry in graph.first_exit.items() if entry in place_of
        },
        num_left_out=0,
        is_exact=graph.is_exact,
        part_of=graph.part_of or len(graph.recorded),
    )


def _kept(entries: "Sequence[int] | set[int]", place_of: Mapping[int, int]) -> tuple[int, ...]:
    return tuple([place_of[entry] for entry in entries if entry in place_of])


def _moved(facts: Mapping[int, _Value], place_of: Mapping[int, int]) -> dict[int, _Value]:
    return {place_of[entry]: fact for entry, fact in facts.items() if entry in place_of}


def _tree_around(recording: Recording, graph: Graph, chosen: Sequence[int]) -> ModuleTree:
    """The modules that the chosen entries were computed in or returned by."""
    rows, calls, chains = recording.rows, recording.module_calls, graph.module_chains
    around = {rows[graph.recorded[entry]].module_call for entry in chosen}
    around.update(call for entry in chosen for call in graph.modules_exited.get(entry, ()))
    kept = {calls[outer].address for call in around for outer in chains[call]}
    tree = graph.module_tree
    return ModuleTree(
        {address: count for address, count in tree.num_passes.items() if address in kept},
        {
            address: [child for child in children if child in kept]
            for address, children in tree.children.items()
            if address in kept
        },
        [address for address in tree.top_level if address in kept],
    )
