"""The edges between nodes, and their texts."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torchlens._draw.items import Grouping, ItemKind
from torchlens._history.log import Log
from torchlens._recording.operation_kinds import COMMUTATIVE
from torchlens._recording.recording import located

_MOST_ARGUMENTS_NAMED = 3


@dataclass(slots=True)
class DrawnLink:
    """An edge between two items: the passes it connects, the arguments it is given as, whether it
    leads to a condition, whether a gradient flowed along it.
    """

    parent: int  # of the first edge between two entries that it shows
    child: int
    out_passes: set[int] = field(default_factory=set)
    in_passes: set[int] = field(default_factory=set)
    locations: dict[Any, None] = field(default_factory=dict)
    is_condition: bool = False
    has_gradient: bool = False

    def lines(self, grouping: Grouping, source: int, target: int) -> tuple[str, ...]:
        """The text beside the edge."""
        found = ["IF"] if self.is_condition else []
        if self.locations:
            found.append(arguments_text(self.locations))
        if self.out_passes != grouping.items[source].passes:
            found.append(f"Out {number_ranges(self.out_passes)}")
        if self.in_passes != grouping.items[target].passes:
            found.append(f"In {number_ranges(self.in_passes)}")
        return tuple(found)


def find_links(log: Log, grouping: Grouping) -> dict[tuple[int, int], DrawnLink]:
    """The edges between items, in order of execution."""
    graph, item_of, pass_of = log.graph, grouping.item_of, grouping.pass_of
    conditions, gradients = set(graph.condition_edges), log.recording.gradients
    has_gradient = [number in gradients for number in graph.recorded]
    links: dict[tuple[int, int], DrawnLink] = {}
    for child, target in enumerate(item_of):
        parents = [parent for parent in graph.parents[child] if _is_drawn(grouping, parent, child)]
        if not parents:
            continue
        is_operation = grouping.items[target].kind is ItemKind.OPERATION
        places = _argument_places(log, grouping, child) if is_operation else {}
        for parent in parents:
            link = links.setdefault((item_of[parent], target), DrawnLink(parent, child))
            link.out_passes.add(pass_of[parent])
            link.in_passes.add(pass_of[child])
            link.is_condition |= (parent, child) in conditions
            link.has_gradient |= has_gradient[parent] and has_gradient[child]
            link.locations.update(dict.fromkeys(places.get(parent, ())))
    return links


def _is_drawn(grouping: Grouping, parent: int, child: int) -> bool:
    """True if an edge is drawn: both ends are, it is not between copies of one module, and it does
    not lie inside one pass of a node.
    """
    folding, pass_of = grouping.choices.folding, grouping.pass_of
    source, target = grouping.item_of[parent], grouping.item_of[child]
    if source < 0 or target < 0:
        return False
    if folding is not None and folding.edge_between(parent, child) is None:
        return False
    kind = grouping.items[source].kind
    if source != target or kind is ItemKind.OPERATION:
        return True
    return kind is not ItemKind.RUN and pass_of[parent] != pass_of[child]


def closing_loops(links: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """The edges that close a loop: they lead to an earlier node, from which they are reached."""
    children: dict[int, list[int]] = {}
    backward: dict[int, list[int]] = {}  # by target
    for source, target in links:
        children.setdefault(source, []).append(target)
        if source > target:
            backward.setdefault(target, []).append(source)
    found = set()
    for target, sources in backward.items():
        seen, pending = {target}, [target]
        while pending:
            for child in children.get(pending.pop(), ()):
                if child not in seen:
                    seen.add(child)
                    pending.append(child)
        found |= {(source, target) for source in sources if source in seen}
    return found


def _argument_places(log: Log, grouping: Grouping, entry: int) -> dict[int, list[Any]]:
    """Parent → the arguments of the operation that it is; empty if there is only one argument, or
    their order does not matter.
    """
    row, graph = log.row(entry), log.graph
    if row.operation.layer_type in COMMUTATIVE:
        return {}
    reads = graph.located_reads.get(graph.recorded[entry]) or located(row.references)
    found: dict[int, list[Any]] = {}
    for location, number in reads:
        parent = graph.entry_of.get(number, -1) if number >= 0 else -1
        if parent >= 0 and grouping.item_of[parent] >= 0:
            found.setdefault(parent, []).append(location)
    locations = {location for own in found.values() for location in own}
    return found if len(locations) > 1 else {}


def argument_text(location: Any) -> str:
    """`arg 0`, `arg (0, 1)`, or the keyword."""
    if isinstance(location, str):
        return location
    if isinstance(location, tuple) and isinstance(location[0], str):
        return location[0] + "".join(f"[{part!r}]" for part in location[1:])
    return f"arg {location}"


def arguments_text(locations: Iterable[Any]) -> str:
    """The arguments that an edge is given as, consecutive ones as `arg (0, 0-49)`."""
    found: dict[Any, list[Any]] = {}  # by all but the last number, where there is one
    for location in locations:
        is_listed = isinstance(location, tuple) and isinstance(location[-1], int)
        found.setdefault(location[:-1] if is_listed else location, []).append(location)
    words = []
    for place, own in found.items():
        if len(own) <= _MOST_ARGUMENTS_NAMED:
            words += [argument_text(location) for location in own]
        else:
            numbers = number_ranges(location[-1] for location in own)
            inside = ", ".join([*map(str, place), numbers])
            words.append(
                f"{place[0]}[{numbers}]" if isinstance(place[0], str) else f"arg ({inside})"
            )
    return ", ".join(words)


def number_ranges(numbers: Iterable[int]) -> str:
    """`1-3,5` for 1, 2, 3, 5; long lists are cut."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ",".join(texts) if len(texts) <= 6 else f"{','.join(texts[:4])},…,{texts[-1]}"
