"""Residual connections: edges along which the input of a block comes to be added to its output."""

from collections.abc import Iterator

from torchlens.history.log import Log
from torchlens.viewer.outline import Outline

__all__ = ["residual_links"]

_ADDITIONS = frozenset({"add", "iadd", "radd"})
_PASSES_LOOKED_AT = 2
_MOST_STEPS = 3_000  # from the addition back to where the block begins
_MOST_STEPS_IN_ALL = 3_000_000


def residual_links(log: Log, outline: Outline) -> set[int]:
    """The numbers of the links that are residual: into an addition, from what its other term was made of with weights.

    `x + f(x)` is one if `f` has parameters; `0.5 * x * (1 + x)`, a mask, a table of positions and a concatenation are none.
    """
    found = set()
    left = _MOST_STEPS_IN_ALL
    for number, (source, target, around) in enumerate(outline.links):
        if around is not None or not target.passes or source.kind != "operation":
            continue
        for child in [own[0] for own in target.passes[:_PASSES_LOOKED_AT]]:
            parents = log.graph.parents[child] if child < len(log.graph.recorded) else ()
            if len(parents) != 2 or log.row(child).operation.layer_type not in _ADDITIONS or left <= 0:
                continue
            own = {entry for one in source.passes for entry in one}
            for mine, other in (parents, parents[::-1]):
                if mine in own and mine < other:
                    steps = list(_between(log, mine, other))
                    left -= len(steps)
                    if mine in steps and any(log.graph.params[entry] for entry in steps if entry != mine):
                        found.add(number)
    return found


def _between(log: Log, first: int, last: int) -> Iterator[int]:
    """`last` and what it was made of, back to `first`."""
    seen, pending = {last}, [last]
    while pending and len(seen) < _MOST_STEPS:
        entry = pending.pop()
        yield entry
        for parent in log.graph.parents[entry] if entry > first else ():
            if parent >= first and parent not in seen:
                seen.add(parent)
                pending.append(parent)
