"""The parts of an outline and the links between them, as columns for the page."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torchlens._history.log import Log
from torchlens._history.residuals import ResidualFinder
from torchlens._page.entry_columns import Costs, Places, Strings
from torchlens._page.part_names import KINDS, PARTS, SIDES, PartNames
from torchlens._page.parts import ChosenParts, Outline, Part, entries_in

_PASSES_READ = 2  # of each part, to find the residual connections


class PartColumns:
    """The columns with what the page shows of each part of the outline."""

    def __init__(self, log: Log, strings: Strings, places: Places) -> None:
        self._log, self._strings, self._places = log, strings, places
        self._names = PartNames(log)

    def columns(
        self, chosen: ChosenParts, parts: Sequence[tuple[Part, int]]
    ) -> dict[str, list[Any]]:
        """Name → one value for each carried part. Parts come with the number of their parent."""
        rows = [self._values(part, parent, chosen) for part, parent in parts]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _values(self, part: Part, parent: int, chosen: ChosenParts) -> dict[str, Any]:
        strings, names = self._strings, self._names
        return {
            "part": PARTS.index(part.kind),
            "parent": parent,
            "title": strings(names.title(part)),
            "path": strings(names.path(part)),
            "type": strings(names.type(part)),
            "kind": KINDS.index(names.kind(part)),
            "isModule": int(bool(part.address)),
            "side": SIDES.index(names.side(part)),
            "passes": part.num_passes,
            "each": part.num_each,
            "entries": chosen.passes(part),
            "buffers": chosen.numbers(part.buffers),
            "params": self._params(part, chosen),
            "place": self._place(part),
        }

    def _params(self, part: Part, chosen: ChosenParts) -> list[int]:
        """The numbers of the parameters of an operation, or of a box whose inside is left out."""
        graph = self._log.graph
        is_sealed = id(part) in chosen.sealed
        entries = chosen.left_out[id(part)] if is_sealed else chain.from_iterable(part.passes)
        params = [graph.params[entry] for entry in entries if entry < len(graph.recorded)]
        return list(dict.fromkeys(chain.from_iterable(params)))

    def _place(self, part: Part) -> int:
        """The line of code that called a module; -1 for others."""
        if not part.calls or not part.calls[0]:
            return -1
        record = self._log.recording.module_calls[part.calls[0]]
        return self._places(record.code, record.instruction)

    def conditions(self, chosen: ChosenParts) -> dict[str, list[Any]]:
        """The values that conditions read, and the edges at which their computation begins."""
        carried = chosen.number_of
        edges, booleans = self._log.graph.condition_edges, self._log.graph.booleans.items()
        if carried is None:
            return {
                "edges": [list(edge) for edge in edges],
                "read": [[entry, int(value)] for entry, value in booleans],
            }
        return {
            "edges": [[carried[a], carried[b]] for a, b in edges if a in carried and b in carried],
            "read": [[carried[entry], int(value)] for entry, value in booleans if entry in carried],
        }

    def idle(self, parts: Sequence[Part]) -> list[list[Any]]:
        """For each shown module, the modules in it that did not run, such as experts that were not
        chosen.
        """
        classes = self._log.recording.module_classes
        box_of = {
            part.address: number
            for number, part in reversed(list(enumerate(parts)))
            if part.kind == "module"
        }
        found: dict[int, list[str]] = {}
        for address in self._idle_modules():
            box = next(box_of[above] for above in _modules_around(address) if above in box_of)
            found.setdefault(box, []).append(address)
        columns = []
        for number, names in found.items():
            types = [classes[name] for name in names]
            columns.append([number, [*map(self._strings, names)], [*map(self._strings, types)]])
        return columns

    def _idle_modules(self) -> list[str]:
        """The addresses of the modules that did not run, without those inside them; none in a part
        of a log, which leaves out modules that ran.
        """
        if self._log.graph.part_of is not None:
            return []
        ran = self._modules_that_ran()
        # Modules in which something ran.
        holders = {"", *(above for address in ran for above in _modules_around(address))}
        idle = [
            address
            for address in self._log.recording.module_classes
            if address not in ran and address not in holders
        ]
        return [address for address in idle if next(_modules_around(address)) in holders]

    def _modules_that_ran(self) -> set[str]:
        """The addresses of the modules that were called, or whose parameters or buffers were read:
        MultiheadAttention reads those of its `out_proj`, and never calls it.
        """
        recording, graph = self._log.recording, self._log.graph
        read = [recording.param_addresses[number] for own in graph.params for number in own]
        read += [self._log.boundary_addresses[entry][0] for entry in graph.buffers]
        called = {record.address for record in recording.module_calls}
        return called | {address.rpartition(".")[0] for address in read}

    def left_out(
        self, chosen: ChosenParts, costs: Costs, number_of: Mapping[int, int]
    ) -> dict[str, Any] | None:
        """How much of each part the page does not carry; None if it carries everything."""
        if chosen.number_of is None:
            return None
        left_out = chosen.left_out
        sums: dict[str, Any] = {}
        for name in costs._fields:
            of_entry: list[float | None] = getattr(costs, name)
            sums[name] = [
                round(sum(of_entry[at] or 0 for at in own), 1) for own in left_out.values()
            ]
        return sums | {
            "part": [number_of[key] for key in left_out],
            "passes": [chosen.passes_left_out[key] for key in left_out],
            "carried": len(chosen.entries),
            "parents": self._num_absent(self._log.graph.parents, chosen.number_of),
            "children": self._num_absent(self._log.graph.children, chosen.number_of),
        }

    def _num_absent(
        self, neighbours: Sequence[Sequence[int]], carried: Mapping[int, int]
    ) -> dict[int, int]:
        """Carried entry → how many of its parents or children the page does not carry."""
        counts = {
            number: sum(other not in carried for other in neighbours[entry])
            for entry, number in carried.items()
            if entry < len(self._log.graph.recorded)
        }
        return {number: count for number, count in counts.items() if count}


def _modules_around(address: str) -> Iterator[str]:
    """The addresses of the modules around one, from inside to outside; the last is the model's."""
    while address:
        address = address.rpartition(".")[0]
        yield address


def _shown(part: Part, number_of: Mapping[int, int]) -> int:
    """The number of a part if the page carries it, else of the sealed box around it."""
    while id(part) not in number_of:
        assert part.above is not None
        part = part.above
    return number_of[id(part)]


def part_of_entries(root: Part, number_of: Mapping[int, int]) -> dict[int, int]:
    """Entry → the number of the part that shows it."""
    found: dict[int, int] = {}
    pending = [root]
    while pending:
        part = pending.pop()
        pending += part.children
        for own in (*part.passes, part.buffers):
            for entry in own:
                found[entry] = _shown(part, number_of)
    return found


def link_columns(
    found: Outline, number_of: Mapping[int, int], residual: Collection[int]
) -> dict[str, list[int]]:
    """The edges between carried parts, each once. `around` is the box in whose next pass an edge
    ends, -1 for an edge within one pass.
    """

    def shown(part: Part) -> int:
        return _shown(part, number_of)

    is_residual: dict[tuple[int, int, int], bool] = {}
    for number, (source, target, around) in enumerate(found.links):
        link = (shown(source), shown(target), -1 if around is None else shown(around))
        if link[0] != link[1] or link[2] == link[0]:
            is_residual[link] = is_residual.get(link, True) and number in residual
    columns = {
        name: [link[at] for link in is_residual] for at, name in enumerate(("from", "to", "around"))
    }
    return columns | {"residual": [int(is_one) for is_one in is_residual.values()]}


def residual_links(log: Log, outline: Outline) -> set[int]:
    """The numbers of the links that are residual connections, or parts of one."""
    finder = ResidualFinder(log)
    parts = {id(part): part for link in outline.links for part in link[:2]}
    part_of: dict[int, int] = {}
    first_of: list[int] = []
    for key, part in parts.items():
        part_of.update(dict.fromkeys(entries_in(part), key))
        first_of += [own[0] for own in part.passes[:_PASSES_READ]]
    ends: set[tuple[int, int]] = set()
    for child in sorted(first_of):
        ends.update((part_of[parent], part_of[own]) for parent, own in finder.edges_into(child))
    return {
        number
        for number, (source, target, around) in enumerate(outline.links)
        if around is None and (id(source), id(target)) in ends
    }
