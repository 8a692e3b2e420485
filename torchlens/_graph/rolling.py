"""Groups the entries that a rolled picture shows as one node: the passes of a layer, and the
operations that every step of a loop does with its own index.

`x[:, t]` in a loop is a separate layer for each `t`, because the argument differs. To avoid a
picture of fifty slices, slices with the same relation to the passes of one layer are rolled
together, if each reads, or is read by, other passes.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchlens._graph.build import Graph
from torchlens._graph.loops import TAKING_A_PART
from torchlens._recording.recording import Recording, Row

# Slices and the like are rolled from two on; other operations from this many on, and only if they
# come from the same source line.
_FEWEST_OTHERS = 3
_MOST_ROUNDS = 4  # each round rolls operations that are one step further away


class _Role(NamedTuple):
    """The relation of an operation to the passes of one layer, the anchor: what it does, where, and
    on which side.
    """

    name: str
    anchor: int
    is_below: bool
    address: str
    place: Hashable


@dataclass(frozen=True, slots=True)
class Rolled:
    """For each entry: the first entry of its group, its number in the group (from 1), and the size
    of the group.
    """

    first_of: list[int]
    pass_of: list[int]
    counts: dict[int, int]  # by first entry


def roll(recording: Recording, graph: Graph) -> Rolled:
    """The groups to show as one node: layers, some of them joined."""
    group_of = list(graph.layer_of)
    members = {number: list(layer.entries) for number, layer in enumerate(graph.layers)}
    if any(len(own) > 1 for own in members.values()):
        operations = range(
            len(graph.inputs) + len(graph.buffers), len(group_of) - len(graph.outputs)
        )
        candidates = {group_of[entry] for entry in operations if not graph.params[entry]}
        for _ in range(_MOST_ROUNDS):
            if not _join_round(recording, graph, group_of, members, candidates):
                break
    first_of, pass_of, counts = [0] * len(group_of), [1] * len(group_of), {}
    for own in members.values():
        own.sort()
        counts[own[0]] = len(own)
        for number, entry in enumerate(own, start=1):
            first_of[entry], pass_of[entry] = own[0], number
    return Rolled(first_of, pass_of, counts)


def _join_round(
    recording: Recording,
    graph: Graph,
    group_of: list[int],
    members: dict[int, list[int]],
    candidates: set[int],
) -> bool:
    """Joins groups around the groups that have several members already. Returns whether any were
    joined.
    """
    is_joined = False
    around = _groups_around(recording, graph, group_of, members, candidates)
    for role, groups in around.items():
        found = [group for group in groups if group in members]
        fewest = 2 if role.name in TAKING_A_PART else _FEWEST_OTHERS
        if len(found) < fewest or not _apart(groups[group] for group in found):
            continue
        for group in found[1:]:
            for entry in members[group]:
                group_of[entry] = found[0]
            members[found[0]] += members.pop(group)
        members[found[0]].sort()
        is_joined = True
    return is_joined


def _groups_around(
    recording: Recording,
    graph: Graph,
    group_of: list[int],
    members: dict[int, list[int]],
    candidates: set[int],
) -> dict[_Role, dict[int, list[int]]]:
    """Role → group → the numbers, among the members of the anchor, of the neighbours of the group.

    An anchor has at least twice as many members as the group.
    """
    several = [own for own in members.values() if len(own) > 1]
    rank = {entry: number for own in several for number, entry in enumerate(own)}
    largest = max(map(len, members.values()))
    around: dict[_Role, dict[int, list[int]]] = {}
    for group in sorted(candidates & members.keys()):
        size = len(members[group])
        if 2 * size > largest:
            continue
        for entry in members[group]:
            row = recording.rows[graph.recorded[entry]]
            for is_below, neighbour in _neighbours(graph, entry):
                anchor = group_of[neighbour]
                if neighbour in rank and anchor != group and len(members[anchor]) >= 2 * size:
                    role = _role(recording, row, anchor, is_below)
                    around.setdefault(role, {}).setdefault(group, []).append(rank[neighbour])
    return around


def _neighbours(graph: Graph, entry: int) -> Iterator[tuple[bool, int]]:
    """The parents and children of an entry, each with whether the entry is below it."""
    yield from ((True, parent) for parent in graph.parents[entry])
    yield from ((False, child) for child in graph.children[entry])


def _role(recording: Recording, row: Row, anchor: int, is_below: bool) -> _Role:
    name = row.operation.layer_type
    place: Hashable = (row.code, row.instruction)
    if name in TAKING_A_PART:
        place = (row.shape, row.output_index is None)
    return _Role(name, anchor, is_below, recording.module_calls[row.module_call].address, place)


def _apart(ranks: Iterable[Sequence[int]]) -> bool:
    """Whether no pass of the anchor is a neighbour of two of the groups."""
    seen: set[int] = set()
    for own in ranks:
        if not seen.isdisjoint(own):
            return False
        seen.update(own)
    return True
