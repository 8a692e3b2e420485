"""Edges that pass many nodes: if there are too many, they are written as text instead of drawn.

Graphviz puts an invisible node wherever an edge passes a row of nodes, and its time goes with their
number: a DenseNet of 500 nodes has 10,000 of them. The picture would be a bundle of lines nobody
can follow.
"""

from dataclasses import replace

from torchlens._draw.scene import Edge, EdgeKind, Node

# Rows of nodes that all edges together may pass, and that an edge must pass to count as long.
MAX_PASSED = 1500
_LONG = 8
_NAMED = 4


def thin_out(nodes: list[Node], edges: list[Edge]) -> tuple[list[Node], list[Edge], str | None]:
    """The nodes and edges to draw, and a sentence about the edges that became text, if any did.

    The longest go first, until the rest passes few enough rows; every node keeps its shortest way
    in.
    """
    rows = _rows(len(nodes), edges)
    passed = [max(rows[edge.target] - rows[edge.source] - 1, 0) for edge in edges]
    total = sum(passed)
    if total <= MAX_PASSED:
        return nodes, edges, None
    shortest: dict[int, int] = {}
    for number, edge in enumerate(edges):
        best = shortest.get(edge.target)
        if best is None or passed[number] < passed[best]:
            shortest[edge.target] = number
    kept = set(shortest.values())
    written: set[int] = set()
    for number in sorted(range(len(edges)), key=lambda number: -passed[number]):
        if total <= MAX_PASSED or passed[number] < _LONG:
            break
        if number not in kept:
            written.add(number)
            total -= passed[number]
    return (
        _with_texts(nodes, [edges[number] for number in sorted(written)]),
        [edge for number, edge in enumerate(edges) if number not in written],
        f"{len(written):,} long edges are written into the nodes they enter (+ …)."
        if written
        else None,
    )


def _rows(count: int, edges: list[Edge]) -> list[int]:
    """The row each node will stand in: below all its parents. Edges back to an earlier node, as in
    a loop, do not count.
    """
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
