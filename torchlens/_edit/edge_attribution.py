"""Edge attribution: how much of an edit's effect passes from each site straight to each other one.

The sites cut the graph into regions: what lies between a site and those before it. A replay with
every site replaced by a leaf gives an autograd graph for each region, and going back over them one
by one gives a gradient for each edge.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchlens._edit.attribution import Changed, Metric, changed_at, scalar
from torchlens._edit.replayer import Replayer
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._text.error_wording import is_whole

if TYPE_CHECKING:
    import pandas

Tensor = torch.Tensor
OUTPUT = "output"
Edges = dict[tuple[int, int], float]  # source, target → score; the last target is the metric


def edge_attribution(
    history: ModelHistory,
    sites: Iterable[Any],
    edit: Any,
    metric: Metric,
    *,
    steps: int = 0,
) -> "pandas.DataFrame":
    """As `torchlens.edits.edge_attribution`."""
    import pandas as pd

    if not is_whole(steps) or steps < 0:
        raise ValueError(f"steps must be a number from 0 on, got {steps!r}.")
    nodes = _nodes(history._replayer, sites, edit)
    shares = [(number + 0.5) / steps for number in range(steps)] or [0.0]
    passes = [_scores(history._replayer, nodes, metric, share) for share in shares]
    edges = {edge: sum(one[edge] for one in passes) / len(passes) for edge in passes[0]}
    names = [*(str(node.site) for node in nodes), OUTPUT]
    table = pd.DataFrame(
        [(names[source], names[target], score) for (source, target), score in edges.items()],
        columns=["source", "target", "score"],
    )
    return table.sort_values("score", key=abs, ascending=False, ignore_index=True)


def _nodes(replayer: Replayer, sites: Iterable[Any], edit: Any) -> list[Changed]:
    """The sites in the order in which the model computes them."""
    nodes = changed_at(replayer, sites, edit)
    names = [str(node.site) for node in nodes]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"The site {twice} is given twice.")
    return sorted(nodes, key=lambda node: node.place.entry)


def _scores(
    replayer: Replayer,
    nodes: Sequence[Changed],
    metric: Metric,
    share: float,
) -> Edges:
    """The score of each edge: what the source changes, times the gradient on its way to the target.

    share: how far the sites that no other leads to go towards their edited values, from 0 to 1.
    """
    raw: dict[int, Tensor] = {}
    leaves: dict[int, Tensor] = {}
    sources_of = _sources(replayer.log, nodes)

    def cutting(number: int) -> Callable[[Tensor], Tensor]:
        def cut(part: Tensor) -> Tensor:
            raw[number] = part
            value = part.detach()
            if share and not sources_of[number]:
                value = value + share * nodes[number].place.read(nodes[number].difference)
            leaves[number] = value.clone().requires_grad_()
            return leaves[number].clone()  # the model may write to it

        return cut

    edits = {node.site: cutting(number) for number, node in enumerate(nodes)}
    output = scalar(metric, replayer.replay(edits, grad=True).output)
    changes = [node.place.read(node.difference).double() for node in nodes]
    gradients = {len(nodes): torch.ones_like(output)}
    ends, edges = {**raw, len(nodes): output}, {}
    for target, sources in reversed(sources_of.items()):
        starts = [leaves[number] for number in sources]
        found: Sequence[Tensor | None] = [None] * len(starts)
        if starts and target in gradients and ends[target].requires_grad:
            found = torch.autograd.grad(
                ends[target], starts, gradients[target], retain_graph=True, allow_unused=True
            )
        for number, gradient in zip(sources, found, strict=True):
            edges[number, target] = 0.0
            if gradient is not None:
                edges[number, target] = float((changes[number] * gradient.double()).sum())
                gradients[number] = gradients.get(number, 0) + gradient
    return dict(sorted(edges.items()))


def _sources(log: Log, nodes: Sequence[Changed]) -> dict[int, list[int]]:
    """For each site, and for the output, those that lead to it without passing another."""
    at: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        at.setdefault(node.place.entry, []).append(number)
    closed = {entry for entry, own in at.items() if _is_covered([nodes[one] for one in own])}
    starts = [log.graph.parents[node.place.entry] for node in nodes]
    found = {}
    for target, start in enumerate([*starts, log.graph.outputs[:1]]):
        seen = _leading_to(log, start, closed)
        found[target] = [number for number, node in enumerate(nodes) if node.place.entry in seen]
    return found


def _leading_to(log: Log, start: Sequence[int], closed: set[int]) -> set[int]:
    """The entries on the ways back from some, up to closed ones."""
    seen: set[int] = set()
    pending = list(start)
    while pending:
        entry = pending.pop()
        if entry not in seen:
            seen.add(entry)
            pending += [] if entry in closed else log.graph.parents[entry]
    return seen


def _is_covered(nodes: Sequence[Changed]) -> bool:
    """True if the sites at one value are all of it: nothing passes beside them."""
    if any(node.site.directions is not None for node in nodes):
        return False
    mask = torch.zeros_like(nodes[0].difference)
    for node in nodes:
        mask = node.place.write(mask, torch.ones_like(node.place.read(mask)))
    return bool(mask.all())


# -- how well some edges do it alone
# --------------------------------------------------------------------------------------------------


def faithfulness(
    history: ModelHistory,
    sites: Iterable[Any],
    edit: Any,
    metric: Metric,
    edges: "pandas.DataFrame",
    counts: Sequence[int],
    *,
    seed: int = 0,
) -> "pandas.DataFrame":
    """As `torchlens.edits.faithfulness`."""
    import pandas as pd

    nodes = _nodes(history._replayer, sites, edit)
    numbers = {str(node.site): number for number, node in enumerate(nodes)} | {OUTPUT: len(nodes)}
    pairs = [
        (numbers[source], numbers[target])
        for source, target in zip(edges["source"], edges["target"], strict=True)
    ]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    circuits = [{*pairs[:count]} for count in counts]
    circuits += [{pairs[number] for number in order[:count]} for count in counts]
    circuits += [set(), {*pairs}]
    *values, none, full = _through(history._replayer, nodes, metric, pairs, circuits)
    shares = [(value - none) / (full - none) for value in values]
    return pd.DataFrame(
        {
            "edges": list(counts),
            "faithfulness": shares[: len(counts)],
            "control": shares[len(counts) :],
        }
    )


def _through(
    replayer: Replayer,
    nodes: Sequence[Changed],
    metric: Metric,
    pairs: Sequence[tuple[int, int]],
    circuits: Sequence[set[tuple[int, int]]],
) -> list[float]:
    """The metric where only the edges of a circuit carry what was recorded, for each circuit.

    Each site is computed from those before it: over an edge of the circuit from the value that they
    have in the circuit, over any other from the edited value.
    """
    recorded = [node.place.read(node.target.edited.recorded().detach()) for node in nodes]
    edited = [
        part + node.place.read(node.difference) for part, node in zip(recorded, nodes, strict=True)
    ]
    values: list[list[Tensor]] = [[] for _ in circuits]
    for target in range(len(nodes) + 1):
        sources = sorted({source for source, own in pairs if own == target})
        outputs = None if target == len(nodes) else [nodes[target].site]
        for circuit, own in zip(circuits, values, strict=True):
            given = [
                own[source] if (source, target) in circuit else edited[source] for source in sources
            ]
            changes = {nodes[source].site: new for source, new in zip(sources, given, strict=True)}
            # Where the edit begins, the circuit starts from what was recorded.
            own.append(
                replayer.replay(changes, outputs, grad=False).output if changes
                else recorded[target]
            )  # fmt: skip
    return [float(metric(own[-1])) for own in values]
