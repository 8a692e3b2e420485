"""Columns of what is around an entry: edges, where the graph begins and ends, conditions."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from torchlens._history.columns.making import Entries
from torchlens._history.log import Log, picked
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import located

if TYPE_CHECKING:
    from torchlens._graph.distances import Distances

_BOUNDARIES = (INPUT, OUTPUT, BUFFER)


# -- the graph around it
# -----------------------------------------------------------------------------------------------


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
    for number, references in zip(
        picked(log.graph.recorded, entries), log.fields(entries).references, strict=True
    ):
        reads: Iterable[tuple[Any, int | None]]
        if number in located_reads:
            reads = located_reads[number]
        else:
            reads = enumerate(references) if type(references) is tuple else located(references)
        found.append(
            [
                (location, entry_of[parent])
                for location, parent in reads
                if parent is not None and parent >= 0
            ]
        )
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


def _distances(distances: "Distances | None", entries: Entries, which: int) -> list[int | None]:
    if distances is None:
        return [None] * len(entries)
    return [None if known is None else known[which] for known in picked(distances, entries)]


# -- where it begins and ends
# ------------------------------------------------------------------------------------------


def is_input_layer(log: Log, entries: Entries) -> list[bool]:
    return [operation is INPUT for operation in log.fields(entries).operation]


def is_output_layer(log: Log, entries: Entries) -> list[bool]:
    return [operation is OUTPUT for operation in log.fields(entries).operation]


def is_buffer_layer(log: Log, entries: Entries) -> list[bool]:
    return [operation is BUFFER for operation in log.fields(entries).operation]


def address(log: Log, entries: Entries) -> list[str | None]:
    """Of an input, an output or a buffer."""
    addresses = log.boundary_addresses
    return [addresses[entry][0] if entry in addresses else None for entry in entries]


def input_output_address(log: Log, entries: Entries) -> list[str | None]:
    addresses = zip(entries, address(log, entries), strict=True)
    return [
        None if own is None or log.row(entry).operation is BUFFER else own
        for entry, own in addresses
    ]


def buffer_address(log: Log, entries: Entries) -> list[str | None]:
    addresses = zip(entries, address(log, entries), strict=True)
    return [
        own if own is not None and log.row(entry).operation is BUFFER else None
        for entry, own in addresses
    ]


def initialized_inside_model(log: Log, entries: Entries) -> list[bool]:
    parents, operations = picked(log.graph.parents, entries), log.fields(entries).operation
    return [
        not own and operation not in _BOUNDARIES
        for own, operation in zip(parents, operations, strict=True)
    ]


def terminated_inside_model(log: Log, entries: Entries) -> list[bool]:
    children, operations = picked(log.graph.children, entries), log.fields(entries).operation
    return [
        not own and operation is not OUTPUT
        for own, operation in zip(children, operations, strict=True)
    ]


# -- conditions
# --------------------------------------------------------------------------------------------------


def is_terminal_bool_layer(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.booleans.__contains__, entries))


def atomic_bool_val(log: Log, entries: Entries) -> list[bool | None]:
    return list(map(log.recording.booleans.get, picked(log.graph.recorded, entries)))


def in_cond_branch(log: Log, entries: Entries) -> list[bool]:
    return list(map(log.graph.condition_entries.__contains__, entries))
