"""Folds an outline: identical parts in a row become one, and parts that no screen holds are
grouped.

Only what is identical folds: the same operations with the same arguments, shapes and connections.
Two branches of different dilation do not.
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
    """Folds all boxes of an outline, in place. Without repeats, what is identical stays apart."""
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
        """Inputs or outputs of one name (the keys and values of a cache) become one part, if they
        are many.
        """
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

    # -- constants
    # ----------------------------------------------------------------------------------------------

    def _fold_constants(self, box: Part, edges: Collection[tuple[Part, Part]]) -> None:
        """What is computed from nothing that goes into the model (masks, positions) becomes one
        part, if it is connected.
        """
        place = {id(part): number for number, part in enumerate(box.children)}
        own = {place[id(part)] for part in box.children if self._is_constant(part)}
        others = (part for number, part in enumerate(box.children) if number not in own)
        if len(own) < _FEWEST_CONSTANTS or all(map(self._is_boundary, others)):
            return  # nothing else would be left to see
        numbered = [(place[id(a)], place[id(b)]) for a, b in edges]
        joined = UnionFind()
        for a, b in numbered:
            if a in own and b in own:
                joined.join(a, b)
        groups = joined.sets(sorted(own))
        # A group goes where its first part was, so it must not read what comes after that.
        late = {
            joined.find(b) for a, b in numbered if b in own and a not in own and a > joined.find(b)
        }
        members = [
            [box.children[number] for number in numbers]
            for first, numbers in groups.items()
            if first not in late and len(numbers) > 1
        ]
        found = [own for own in members if sum(map(_num_operations, own)) >= _FEWEST_CONSTANTS]
        _group(box, "constants", found)

    def _is_constant(self, part: Part) -> bool:
        """Whether no input leads to it. Modules, and what has parameters, are shown by
        themselves.
        """
        if part.address or part.kind not in ("operation", "loop"):
            return False
        if part.children:
            return all(map(self._is_constant, part.children))
        graph, entries = self.log.graph, [entry for own in part.passes for entry in own]
        return not self._is_boundary(part) and not any(
            graph.has_input_ancestor[entry] or graph.params[entry] for entry in entries
        )

    # -- repeats
    # ----------------------------------------------------------------------------------------------

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
        """For each part a number, equal for parts that fold if they repeat."""
        found: list[int] = []
        works = [(name, self._work(part)) for name, part in zip(names, parts, strict=True)]
        unlike = 0  # modules in a row that do the same, and are read in different ways
        for number, part in enumerate(parts):
            before = parts[number - 1] if number else part
            if number and works[number - 1] == works[number] and before.calls and part.calls:
                unlike += not self.alike.are_copies(before.calls[0], part.calls[0])
            else:
                unlike = 0
            found.append(self.alike.number((*works[number], unlike)))
        return found

    def _name(self, part: Part) -> str:
        """The address but for numbers; empty for what is not named."""
        if part.kind == "operation" and self._is_boundary(part):
            address = self.log.boundary_addresses.get(part.passes[0][0], [""])[0]
            name = re.sub(r"\d+", "#", address)
            return name if "#" in name else ""
        return re.sub(r"\d+", "#", part.address)

    def _work(self, part: Part) -> int:
        """What a part does, as a number that is equal for parts that do the same."""
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
        """Whether it is an input, an output, or the call that failed."""
        if part.kind != "operation":
            return False
        entry = part.passes[0][0]
        return entry in self.boundary or entry >= len(self.log.graph.recorded)

    # -- many children
    # ----------------------------------------------------------------------------------------------

    def _put_together(self, box: Part) -> None:
        """So many children that no screen holds them: first operations in a row become spans, then
        all becomes ranges.
        """
        if len(box.children) <= _MOST_CHILDREN:
            return
        rows = [box.children] if box.kind == "span" else self._rows_of_operations(box)
        num_operations = sum(map(len, rows))
        groups: list[list[Part]] = []
        for row in rows:
            size = max(2, -(-num_operations // _GROUPS_PER_BOX))
            size = -(-len(row) // max(1, round(len(row) / size)))
            groups += [row[start : start + size] for start in range(0, len(row), size)]
        for span in _group(box, "span", [group for group in groups if len(group) > 1]):
            self._put_together(span)
        if len(box.children) <= _MOST_CHILDREN:
            return
        inner = [part for part in box.children if not self._is_boundary(part)]
        if len(inner) > _GROUPS_PER_BOX:
            size = -(-len(inner) // _GROUPS_PER_BOX)
            ranges = [inner[start : start + size] for start in range(0, len(inner), size)]
            for part in _group(box, "range", [own for own in ranges if len(own) > 1]):
                self._put_together(part)

    def _rows_of_operations(self, box: Part) -> list[list[Part]]:
        rows: list[list[Part]] = [[]]
        for part in box.children:
            if part.kind == "operation" and not part.address and not self._is_boundary(part):
                rows[-1].append(part)
            elif rows[-1]:
                rows.append([])
        return [row for row in rows if len(row) > 3]


def _group(box: Part, kind: str, groups: Sequence[Sequence[Part]]) -> list[Part]:
    """Puts some children of a box into boxes of their own, each where the first of its children
    stood.
    """
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
