"""The parts of an outline and the links between them, as columns for the page."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchlens._history.log import Log
from torchlens._page.entry_columns import EntryColumns, Places, Strings
from torchlens._page.names import KINDS, PARTS, SIDES, Names
from torchlens._page.parts import Outline, Part, Selection


class PartColumns:
    """What the page shows of each part of the outline."""

    def __init__(
        self, log: Log, strings: Strings, places: Places, entry_columns: EntryColumns
    ) -> None:
        self._log, self._strings, self._places, self._entry_columns = (
            log,
            strings,
            places,
            entry_columns,
        )
        self._names = Names(log)

    def columns(self, chosen: Selection, parts: Sequence[tuple[Part, int]]) -> dict[str, list[Any]]:
        """Name → one value per part that the page carries."""
        strings, names, num_entries = self._strings, self._names, len(self._log.graph.recorded)
        columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "part", "parent", "title", "path", "type", "kind", "isModule", "side", "passes",
                "each", "entries",
                "buffers", "params", "place",
            )
        }  # fmt: skip
        for part, parent in parts:
            own = (
                [entry for one in part.passes for entry in one] if part.kind == "operation" else []
            )
            if id(part) in chosen.sealed:
                own = chosen.left_out[id(part)]
            params = [
                number
                for entry in own
                if entry < num_entries
                for number in self._log.graph.params[entry]
            ]
            buffers = part.buffers
            if chosen.number_of is not None:
                buffers = [chosen.number_of[entry] for entry in buffers]
            columns["part"].append(PARTS.index(part.kind))
            columns["parent"].append(parent)
            columns["title"].append(strings(names.title(part)))
            columns["path"].append(strings(names.path(part)))
            columns["type"].append(strings(names.type(part)))
            columns["kind"].append(KINDS.index(names.kind(part)))
            columns["isModule"].append(int(bool(part.address)))
            columns["side"].append(SIDES.index(names.side(part)))
            columns["passes"].append(part.num_passes)
            columns["each"].append(part.num_each)
            columns["entries"].append(chosen.passes(part))
            columns["buffers"].append(buffers)
            columns["params"].append(list(dict.fromkeys(params)))
            record = (
                self._log.recording.module_calls[part.calls[0]]
                if part.calls and part.calls[0]
                else None
            )
            columns["place"].append(self._places(record.code, record.instruction) if record else -1)
        return columns

    def conditions(self, chosen: Selection) -> dict[str, list[Any]]:
        """What an `if` read, with its value, and the edges by which the computation of a condition
        begins.
        """
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
        """For each module that is shown, the modules in it that did not run: experts that were not
        chosen.
        """
        recording = self._log.recording
        called = {record.address for record in recording.module_calls}
        # Some modules only keep parameters or buffers, as MultiheadAttention's out_proj does; what
        # reads those runs.
        read = [
            recording.param_addresses[number] for own in self._log.graph.params for number in own
        ]
        read += [self._log.boundary_addresses[entry][0] for entry in self._log.graph.buffers]
        called |= {address.rpartition(".")[0] for address in read}
        holders = {""}  # what something that ran is in, however deep
        for address in called:
            above = address.rpartition(".")[0]
            while above not in holders:
                holders.add(above)
                above = above.rpartition(".")[0]
        box_of = {
            part.address: number
            for number, part in reversed(list(enumerate(parts)))
            if part.kind == "module"
        }
        found: dict[int, list[str]] = {}
        for address in recording.module_classes:
            above = address.rpartition(".")[0]
            if not address or address in called or above not in holders or address in holders:
                continue
            while above and above not in box_of:
                above = above.rpartition(".")[0]
            found.setdefault(box_of.get(above, 0), []).append(address)
        classes = recording.module_classes
        return [
            [
                number,
                [self._strings(name) for name in names],
                [self._strings(classes[name]) for name in names],
            ]
            for number, names in found.items()
        ]

    def left_out(self, chosen: Selection, number_of: Mapping[int, int]) -> dict[str, Any] | None:
        """How much of each part the page does not carry; None where it carries everything."""
        if chosen.number_of is None:
            return None
        columns: dict[str, Any] = {
            name: [] for name in ("part", "passes", "bytes", "micros", "flops", "backward")
        }
        for key, entries in chosen.left_out.items():
            columns["part"].append(number_of[key])
            columns["passes"].append(chosen.passes_left_out[key])
            columns["bytes"].append(sum(map(self._entry_columns.num_bytes, entries)))
            columns["micros"].append(round(sum(map(self._entry_columns.micros, entries)), 1))
            columns["flops"].append(sum(map(self._entry_columns.flops, entries)))
            columns["backward"].append(
                sum(self._entry_columns.backward(entry) or 0 for entry in entries)
            )
        parents, children = Counter[int](), Counter[int]()
        carried = chosen.number_of
        for entry in chosen.entries:
            if entry < len(self._log.graph.recorded):
                if absent := sum(
                    parent not in carried for parent in self._log.graph.parents[entry]
                ):
                    parents[carried[entry]] = absent
                if absent := sum(child not in carried for child in self._log.graph.children[entry]):
                    children[carried[entry]] = absent
        return columns | {"carried": len(chosen.entries), "parents": parents, "children": children}


def _shown(part: Part, number_of: Mapping[int, int]) -> int:
    """The number of the part that the page carries for one: itself, or what it is closed in."""
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
    """The edges between the parts that the page carries, each once; `around` is -1 for those that
    go round nothing.
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
