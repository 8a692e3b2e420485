"""How far an entry is from input and output, by the shortest and the longest path."""

from collections.abc import Iterable, Sequence

# For each entry (shortest, longest), or None where there is no way.
Distances = list[tuple[int, int] | None]


def distances_from_inputs(inputs: Iterable[int], parents: Sequence[Sequence[int]]) -> Distances:
    distances: Distances = [None] * len(parents)
    for entry in inputs:
        distances[entry] = (0, 0)
    for entry, own in enumerate(parents):
        known = [distance for parent in own if (distance := distances[parent]) is not None]
        if known and distances[entry] is None:
            distances[entry] = (
                1 + min(near for near, _ in known),
                1 + max(far for _, far in known),
            )
    return distances


def distances_to_outputs(outputs: Iterable[int], children: Sequence[Sequence[int]]) -> Distances:
    distances: Distances = [None] * len(children)
    for entry in outputs:
        distances[entry] = (0, 0)
    for entry in range(len(children) - 1, -1, -1):
        known = [
            distance for child in children[entry] if (distance := distances[child]) is not None
        ]
        if known and distances[entry] is None:
            distances[entry] = (
                1 + min(near for near, _ in known),
                1 + max(far for _, far in known),
            )
    return distances
