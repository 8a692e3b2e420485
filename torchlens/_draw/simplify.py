"""Simplifies a drawing that is too large to read or to lay out.

Graphviz inserts an invisible node wherever an edge passes a row of nodes, and its time grows with
their number: a DenseNet of 500 nodes has 10,000 of them. If edges pass too many rows, the longest
are written as text.
"""

from collections.abc import Iterator
from dataclasses import replace

from torchlens._draw.items import Choices, Grouping, ItemKind, group_entries
from torchlens._draw.repeated_modules import find_repeats
from torchlens._draw.scene import Edge, EdgeKind, Node
from torchlens._history.log import Log

# A drawing with fewer nodes says too little about thousands of operations.
_MIN_NODES = 10
# Rows of nodes that all edges together may pass, and that an edge must pass to count as long.
MAX_PASSED = 1500
_LONG = 8
_NAMED = 4


def group_within(
    log: Log, choices: Choices, max_nodes: int, reason: str | None = None
) -> tuple[Grouping, str | None]:
    """The items to draw, at most `max_nodes`; and, if the drawing was simplified, a sentence that
    says how and why.

    Tried in turn: folding repeats, drawing inner modules as one box, rolling loops, both, and
    finally drawing runs of consecutive operations as one box, which is always enough.
    """
    grouping = group_entries(log, choices)
    num_wanted = len(grouping.items)
    if num_wanted <= max_nodes:
        return grouping, None
    why = f"as {reason or f'{num_wanted:,} nodes would be too many to read'}"
    for tried in _simpler(log, choices):
        grouping = group_entries(log, tried)
        if len(grouping.items) <= max_nodes and (
            tried.is_rolled or len(grouping.items) >= min(_MIN_NODES, max_nodes)
        ):
            return grouping, f"Simplified, {why}: {_done(choices, grouping)}."
    run_length = 2
    while True:
        grouping = group_entries(
            log, replace(choices, is_rolled=False, folding=None, run_length=run_length)
        )
        if len(grouping.items) <= max_nodes or run_length > num_wanted:
            return (
                grouping,
                f"Simplified, {why}: runs of up to {run_length} operations are drawn as one box.",
            )
        run_length *= 2


def _simpler(log: Log, choices: Choices) -> Iterator[Choices]:
    deepest = max((len(chain) for chain in log.graph.module_chains), default=0)
    depths = range(min(deepest, choices.depth - 1), 0, -1)
    for is_rolled in (False, True) if not choices.is_rolled else (True,):
        folding = choices.folding if is_rolled == choices.is_rolled else None
        folded = replace(
            choices, is_rolled=is_rolled, folding=folding or find_repeats(log, is_rolled)
        )
        if is_rolled != choices.is_rolled:
            yield replace(choices, is_rolled=is_rolled, folding=folding)
        yield folded
        for depth in depths:
            yield replace(folded, depth=depth)


def _done(wanted: Choices, grouping: Grouping) -> str:
    """The simplifications that are visible in the drawing, as text."""
    choices, words = grouping.choices, []
    if choices.is_rolled != wanted.is_rolled and any(
        len(item.passes) > 1 for item in grouping.items
    ):
        words.append("passes of one layer are drawn as one node")
    if wanted.folding is None and choices.folding is not None and choices.folding.folds:
        words.append("repeated modules are folded")
    if choices.depth != wanted.depth and any(
        item.kind is ItemKind.MODULE for item in grouping.items
    ):
        words.append(f"modules at level {choices.depth} are one box")
    return ", ".join(words)


# -- edges
# --------------------------------------------------------------------------------------------------


def thin_out(nodes: list[Node], edges: list[Edge]) -> tuple[list[Node], list[Edge], str | None]:
    """The nodes and edges to draw, and a sentence about the edges that became text, if any.

    The longest edges become text, until the others pass few enough rows. Every node keeps the
    shortest edge into it.
    """
    rows = _rows(len(nodes), edges)
    passed = [max(rows[edge.target] - rows[edge.source] - 1, 0) for edge in edges]
    total = sum(passed)
    if total <= MAX_PASSED:
        return nodes, edges, None
    written: set[int] = set()
    for number in _removable(edges, passed):
        if total <= MAX_PASSED:
            break
        written.add(number)
        total -= passed[number]
    if not written:
        return nodes, edges, None
    return (
        _with_texts(nodes, [edges[number] for number in sorted(written)]),
        [edge for number, edge in enumerate(edges) if number not in written],
        f"{len(written):,} long edges are written into the nodes they enter (+ …).",
    )


def _removable(edges: list[Edge], passed: list[int]) -> list[int]:
    """The numbers of long edges, the longest first, without the shortest into each node."""
    shortest: dict[int, int] = {}
    for number, edge in enumerate(edges):
        best = shortest.setdefault(edge.target, number)
        if passed[number] < passed[best]:
            shortest[edge.target] = number
    kept = set(shortest.values())
    long = [number for number in range(len(edges)) if passed[number] >= _LONG]
    return sorted((number for number in long if number not in kept), key=lambda at: -passed[at])


def _rows(count: int, edges: list[Edge]) -> list[int]:
    """The row of each node: below all its parents, not counting edges back to an earlier node."""
    rows = [0] * count
    below: list[list[int]] = [[] for _ in range(count)]
    for edge in edges:
        if edge.source < edge.target:
            below[edge.source].append(edge.target)
    for source in range(count):
        for target in below[source]:
            rows[target] = max(rows[target], rows[source] + 1)
    return rows


def _with_texts(nodes: list[Node], written: list[Edge]) -> list[Node]:
    sources: dict[int, list[str]] = {}
    for edge in written:
        if edge.kind is not EdgeKind.GRADIENT:
            sources.setdefault(edge.target, []).append(nodes[edge.source].title)
    found = list(nodes)
    for number, names in sources.items():
        more = "" if len(names) <= _NAMED else f", … {names[-1]} ({len(names)} in all)"
        shown = names if len(names) <= _NAMED else names[: _NAMED - 1]
        found[number] = replace(
            nodes[number], lines=(*nodes[number].lines, f"+ {', '.join(shown)}{more}")
        )
    return found
