"""Folds an outline: identical parts in a row become one, and boxes with many parts are grouped.

Parts are identical if they have the same operations with the same arguments, shapes and
connections. Two branches of different dilation are not.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from torchlens._graph.alike import AlikeCalls
from torchlens._graph.repeats import UnionFind, find_runs
from torchlens._history.log import Log
from torchlens._page.parts import Outline, Part

_MOST_CHILDREN = 120
_GROUPS_PER_BOX = 24
_LONGEST_PERIOD = 8
_FEWEST_REPEATED_MODULES = 3
_FEWEST_REPEATED_OPERATIONS = 8
_FEWEST_CONSTANTS = 4


def fold(log: Log, outline: Outline, has_repeats: bool = True) -> None:
    """Folds all boxes of an outline, in place; identical parts only with `has_repeats`."""
    _Folder(log, outline, has_repeats).fold(outline.root)


class _Folder:
    def __init__(self, log: Log, outline: Outline, has_repeats: bool) -> None:
        self.log = log
        self.has_repeats = has_repeats
        self.boundary = {*log.graph.inputs, *log.graph.outputs}
        self.edges_in = _edges_in(outline)
        self.alike = AlikeCalls(log.recording, log.graph)

    def fold(self, box: Part) -> None:
        for part in box.children:
            if part.kind != "operation":
                self.fold(part)
        self._fold_constants(box, self.edges_in.get(id(box), set()))
        if self.has_repeats:
            self._fold_repeats(box)
        if box.above is None:
            self._fold_boundary(box)
        self._put_together(box)

    def _fold_boundary(self, box: Part) -> None:
        """Groups inputs or outputs of the same name, such as the keys and values of a cache."""
        groups: dict[str, list[Part]] = {}
        for part in box.children:
            first = part.children[0] if part.kind == "repeat" else part
            first = first.children[0] if first.kind == "step" else first
            if first.kind == "operation" and first.passes[0][0] in self.boundary:
                address = self.log.boundary_addresses[first.passes[0][0]][0]
                groups.setdefault(".".join(address.split(".")[:2]), []).append(part)
        for own in groups.values():
            count = sum(max(1, len(part.children)) for part in own)
            if len(own) > 1 and count >= _FEWEST_REPEATED_MODULES:
                _group(box, "range", [own])

    # -- constants ---------------------------------------------------------------------------------

    def _fold_constants(self, box: Part, edges: Collection[tuple[Part, Part]]) -> None:
        """Groups connected operations that do not depend on the model's input (masks, positions),
        unless nothing else would remain.
        """
        number_of = {id(part): number for number, part in enumerate(box.children)}
        constants = {number_of[id(part)] for part in filter(self._is_constant, box.children)}
        others = [part for part in box.children if number_of[id(part)] not in constants]
        if len(constants) < _FEWEST_CONSTANTS or all(map(self._is_boundary, others)):
            return
        numbered = [(number_of[id(a)], number_of[id(b)]) for a, b in edges]
        connected = _connected(constants, numbered)
        groups = [[box.children[number] for number in numbers] for numbers in connected]
        _group(box, "constants", list(filter(_is_large, groups)))

    def _is_constant(self, part: Part) -> bool:
        """True if a part does not depend on the model's input, has no parameters and is not a
        module. Parameters and modules are shown individually.
        """
        if part.address or part.kind not in ("operation", "loop"):
            return False
        if part.children:
            return all(map(self._is_constant, part.children))
        graph, entries = self.log.graph, [entry for own in part.passes for entry in own]
        return not self._is_boundary(part) and not any(
            graph.has_input_ancestor[entry] or graph.params[entry] for entry in entries
        )

    # -- repeats -----------------------------------------------------------------------------------

    def _fold_repeats(self, box: Part) -> None:
        children = box.children
        names = [self._name(part) for part in children]
        keys = self._keys(children, names)

        def fewest(start: int, stop: int) -> int:
            own = [name for name in names[start:stop] if name]
            if not all("#" in name for name in own):
                return len(children) + 1  # modules whose names are not numbered do not fold
            return _FEWEST_REPEATED_MODULES if own else _FEWEST_REPEATED_OPERATIONS

        runs = find_runs(keys, _LONGEST_PERIOD, fewest)
        repeats = _group(box, "repeat", [children[run.start : run.stop] for run in runs])
        for repeat, run in zip(repeats, runs, strict=True):
            repeat.num_passes = run.times
            if run.period > 1:
                starts = range(run.start, run.stop, run.period)
                _group(repeat, "step", [children[at : at + run.period] for at in starts])
            self._put_together(repeat)

    def _keys(self, parts: Sequence[Part], names: Sequence[str]) -> list[int]:
        """A number for each part, equal for parts that fold if they repeat."""
        found: list[int] = []
        works = [(name, self._work(part)) for name, part in zip(names, parts, strict=True)]
        unlike = 0  # counts consecutive modules that do the same but are used differently
        for number, part in enumerate(parts):
            before = parts[number - 1] if number else part
            if number and works[number - 1] == works[number] and before.calls and part.calls:
                unlike += not self.alike.are_copies(before.calls[0], part.calls[0])
            else:
                unlike = 0
            found.append(self.alike.number((*works[number], unlike)))
        return found

    def _name(self, part: Part) -> str:
        """The address with `#` for numbers; empty if the part has no name."""
        if part.kind == "operation" and self._is_boundary(part):
            address = self.log.boundary_addresses.get(part.passes[0][0], [""])[0]
            name = re.sub(r"\d+", "#", address)
            return name if "#" in name else ""
        return re.sub(r"\d+", "#", part.address)

    def _work(self, part: Part) -> int:
        """A number for the computation of a part, equal for equal computations."""
        alike = self.alike
        if part.kind == "module":
            return alike.number(("module", *map(alike.work, part.calls)))
        if part.children:
            return alike.number((part.kind, part.num_passes, *map(self._work, part.children)))
        entry = part.passes[0][0]
        if self._is_boundary(part) and not self._name(part):
            return alike.number(("boundary", entry))
        counts = part.num_passes, len(part.passes[0]), len(part.buffers)
        return alike.number(("operation", alike.work_of_entry[entry], *counts))

    def _is_boundary(self, part: Part) -> bool:
        """True for inputs, outputs and the call that failed."""
        if part.kind != "operation":
            return False
        entry = part.passes[0][0]
        return entry in self.boundary or entry >= len(self.log.graph.recorded)

    # -- many children -----------------------------------------------------------------------------

    def _put_together(self, box: Part) -> None:
        """Groups the children of a box with too many: consecutive operations become spans and, if
        that is not enough, all children become ranges.
        """
        if len(box.children) > _MOST_CHILDREN:
            rows = [box.children] if box.kind == "span" else self._rows_of_operations(box)
            size = max(2, -(-sum(map(len, rows)) // _GROUPS_PER_BOX))
            self._group_in_turn(
                box, "span", [piece for row in rows for piece in _pieces(row, size)]
            )
        if len(box.children) > _MOST_CHILDREN:
            inner = [part for part in box.children if not self._is_boundary(part)]
            if len(inner) > _GROUPS_PER_BOX:
                self._group_in_turn(box, "range", _slices(inner, -(-len(inner) // _GROUPS_PER_BOX)))

    def _group_in_turn(self, box: Part, kind: str, groups: Sequence[list[Part]]) -> None:
        for group in _group(box, kind, [own for own in groups if len(own) > 1]):
            self._put_together(group)

    def _rows_of_operations(self, box: Part) -> list[list[Part]]:
        rows: list[list[Part]] = [[]]
        for part in box.children:
            if part.kind == "operation" and not part.address and not self._is_boundary(part):
                rows[-1].append(part)
            elif rows[-1]:
                rows.append([])
        return [row for row in rows if len(row) > 3]


def _connected(constants: set[int], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The sets of at least two connected constants, as numbers of children. A set is shown at the
    place of its first member, so it must read nothing that comes later.
    """
    joined = UnionFind()
    for edge in filter(constants.issuperset, edges):
        joined.join(*edge)
    into = [(a, b) for a, b in edges if a not in constants and b in constants]
    late = {joined.find(b) for a, b in into if a > joined.find(b)}
    sets = joined.sets(sorted(constants))
    return [members for first, members in sets.items() if first not in late and len(members) > 1]


def _is_large(constants: Sequence[Part]) -> bool:
    return sum(map(_num_operations, constants)) >= _FEWEST_CONSTANTS


def _slices(parts: list[Part], size: int) -> list[list[Part]]:
    return [parts[start : start + size] for start in range(0, len(parts), size)]


def _pieces(row: list[Part], size: int) -> list[list[Part]]:
    """Pieces of nearly equal length, about `size`."""
    return _slices(row, -(-len(row) // max(1, round(len(row) / size))))


def _group(box: Part, kind: str, groups: Sequence[Sequence[Part]]) -> list[Part]:
    """Moves groups of children into new boxes, each at the place of its first member."""
    made = []
    group_of: dict[int, Part] = {}
    for members in groups:
        group = Part(kind, members[0].order, children=list(members), above=box)
        for part in members:
            part.above = group
            group_of[id(part)] = group
        made.append(group)
    shown = {id(part): part for part in (group_of.get(id(part), part) for part in box.children)}
    box.children = list(shown.values())
    return made


def _num_operations(part: Part) -> int:
    return sum(map(_num_operations, part.children)) if part.children else 1


def _edges_in(outline: Outline) -> dict[int, set[tuple[Part, Part]]]:
    """The edges between the children of each box."""
    depth = {id(outline.root): 0}
    pending = [outline.root]
    while pending:
        box = pending.pop()
        for part in box.children:
            depth[id(part)] = depth[id(box)] + 1
            if part.children:
                pending.append(part)
    found: dict[int, set[tuple[Part, Part]]] = {}
    for source, target, _ in outline.links:
        a: Any = source
        b: Any = target
        while depth[id(a)] > depth[id(b)]:
            a = a.above
        while depth[id(b)] > depth[id(a)]:
            b = b.above
        while a is not b and a.above is not b.above:
            a, b = a.above, b.above
        if a is not b:
            found.setdefault(id(a.above), set()).add((a, b))
    return found
