"""Paths through the graph: what leads where, and how far; which entries belong to the log, and
which were computed only to decide an `if`.

Entries are in the order of the log, so parents come before their children.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

# As many layers as are followed in one walk over the graph, so that memory stays small.
_LAYERS_AT_ONCE = 512

# For each entry (shortest, longest), or None where there is no path.
Distances = list[tuple[int, int] | None]


def descendants_of(sources: Iterable[int], parents: Sequence[Sequence[int]]) -> list[bool]:
    """For each entry, whether one of `sources` leads to it (each to itself)."""
    reached = [False] * len(parents)
    for source in sources:
        reached[source] = True
    for entry, own in enumerate(parents):
        if not reached[entry]:
            for parent in own:
                if reached[parent]:
                    reached[entry] = True
                    break
    return reached


def ancestors_of(targets: Iterable[int], parents: Sequence[Sequence[int]]) -> list[bool]:
    """For each entry, whether it leads to one of `targets` (each to itself)."""
    reached = [False] * len(parents)
    for target in targets:
        reached[target] = True
    for entry in range(len(parents) - 1, -1, -1):
        if reached[entry]:
            for parent in parents[entry]:
                reached[parent] = True
    return reached


def sets_behind(
    ends: Sequence[int], neighbours: Sequence[Sequence[int]], order: Iterable[int]
) -> list[int]:
    """For each entry, which of `ends` lead to it (each to itself): bit k stands for the k-th.

    `neighbours` are the parents or the children of each entry; they come first in `order`.
    """
    behind = [0] * len(neighbours)
    for number, end in enumerate(ends):
        behind[end] = 1 << number
    for entry in order:
        for neighbour in neighbours[entry]:
            behind[entry] |= behind[neighbour]
    return behind


def connected(
    inputs: Iterable[int], outputs: Iterable[int], parents: Sequence[Sequence[int]]
) -> list[bool]:
    """Entries that input leads to or that lead to output, and whatever those are made from."""
    from_input = descendants_of(inputs, parents)
    return ancestors_of(
        [*(entry for entry, is_reached in enumerate(from_input) if is_reached), *outputs], parents
    )


def children_of(parents: Sequence[Sequence[int]]) -> list[list[int]]:
    """The children of each entry, from the parents."""
    children: list[list[int]] = [[] for _ in parents]
    for entry, own in enumerate(parents):
        for parent in own:
            children[parent].append(entry)
    return children


def find_conditions(
    booleans: Iterable[int], parents: Sequence[Sequence[int]], is_output_ancestor: Sequence[bool]
) -> tuple[set[int], list[tuple[int, int]]]:
    """Entries that lead to a condition and not to the output, and the edges into them."""
    branch: set[int] = set()
    pending = [entry for entry in booleans if not is_output_ancestor[entry]]
    while pending:
        entry = pending.pop()
        if entry not in branch:
            branch.add(entry)
            pending += [parent for parent in parents[entry] if not is_output_ancestor[parent]]
    edges = [
        (parent, entry)
        for entry in sorted(branch)
        for parent in parents[entry]
        if parent not in branch
    ]
    return branch, edges


def distances_from_inputs(inputs: Iterable[int], parents: Sequence[Sequence[int]]) -> Distances:
    return _distances(inputs, range(len(parents)), parents)


def distances_to_outputs(outputs: Iterable[int], children: Sequence[Sequence[int]]) -> Distances:
    return _distances(outputs, reversed(range(len(children))), children)


def _distances(
    ends: Iterable[int], order: Iterable[int], neighbours: Sequence[Sequence[int]]
) -> Distances:
    """By the shortest and the longest path to one of the ends; neighbours come first in `order`."""
    distances: Distances = [None] * len(neighbours)
    for entry in ends:
        distances[entry] = (0, 0)
    for entry in order:
        known = [own for other in neighbours[entry] if (own := distances[other]) is not None]
        if known and distances[entry] is None:
            shortest, longest = zip(*known, strict=True)
            distances[entry] = 1 + min(shortest), 1 + max(longest)
    return distances


def most_passes_of_a_loop(layers: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> int:
    """The largest number of passes among the layers of which one pass leads to a later one; 1 if
    there are none.

    `layers` has the entries of each layer. Bit k of a number stands for the k-th layer.
    """
    several = sorted((own for own in layers if len(own) > 1), key=len, reverse=True)
    for start in range(0, len(several), _LAYERS_AT_ONCE):
        some = several[start : start + _LAYERS_AT_ONCE]
        own_bit = {entry: 1 << number for number, own in enumerate(some) for entry in own}
        behind: list[int] = []  # for each entry, the layers that lead to it, itself included
        looped = 0
        for entry, above in enumerate(parents):
            reached = 0
            for parent in above:
                reached |= behind[parent]
            bit = own_bit.get(entry, 0)
            looped |= reached & bit
            behind.append(reached | bit)
        if looped:
            first = (looped & -looped).bit_length() - 1
            return len(some[first])
    return 1


def topological_order(children: Sequence[Iterable[int]]) -> list[int]:
    """An order in which parents come before their children, and otherwise smaller numbers first.

    What is on a circle, and what comes after it, is missing.
    """
    num_awaited = [0] * len(children)
    for own in children:
        for child in own:
            num_awaited[child] += 1
    ready = [number for number, count in enumerate(num_awaited) if not count]
    heapify(ready)
    found = []
    while ready:
        found.append(heappop(ready))
        for child in children[found[-1]]:
            num_awaited[child] -= 1
            if not num_awaited[child]:
                heappush(ready, child)
    return found
