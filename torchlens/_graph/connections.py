"""Which entries belong to the log: those connected to an input or an output."""

from collections.abc import Iterable, Sequence


def descendants_of(sources: Iterable[int], parents: Sequence[Sequence[int]]) -> list[bool]:
    """For each entry, whether one of `sources` leads to it (each to itself). Parents come before
    their children.
    """
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


def connected(
    inputs: Iterable[int], outputs: Iterable[int], parents: Sequence[Sequence[int]]
) -> list[bool]:
    """Entries that input leads to or that lead to output, and whatever those are made from."""
    from_input = descendants_of(inputs, parents)
    return ancestors_of(
        [*(entry for entry, is_reached in enumerate(from_input) if is_reached), *outputs], parents
    )


def children_of(parents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Edges the other way round."""
    children: list[list[int]] = [[] for _ in parents]
    for entry, own in enumerate(parents):
        for parent in own:
            children[parent].append(entry)
    return children
