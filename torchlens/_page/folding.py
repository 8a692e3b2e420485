"""Folds an outline: identical parts in a row become one, and parts that no screen holds are
grouped.

Only what is identical folds: the same operations with the same arguments, shapes and connections.
Two branches of different dilation do not.
"""

import re
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from torchlens._history.log import Log
from torchlens._page.parts import Outline, Part
from torchlens._recording.operations import IDENTITY

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
        self.shapes: dict[Hashable, int] = {}

    def fold(self, box: Part) -> None:
        for part in box.children:
            if part.kind == "operation":
                part.shape = self._shape_of(part)
            else:
                self.fold(part)
        edges = self.edges_in.get(id(box), set())
        if box.above is not None:
            name = (
                self.log.recording.module_classes.get(box.address, "")
                if box.kind == "module"
                else box.kind
            )
            box.shape = self._known((name, box.num_passes, self._shapes_of(box.children, edges)))
        self._fold_constants(box, edges)
        if self.has_repeats:
            self._fold_repeats(box)
        if box.above is None:
            self._fold_boundary(box)
        self._put_together(box)

    def _fold_boundary(self, box: Part) -> None:
        """Inputs or outputs of one name (the keys and values of a cache) are one thing, if they are
        many.
        """
        groups: dict[str, list[Part]] = {}
        for part in box.children:
            first = part.children[0] if part.kind == "repeat" else part
            first = first.children[0] if first.kind == "step" else first
            if first.kind == "operation" and first.passes[0][0] in self.boundary:
                address = self.log.boundary_addresses[first.passes[0][0]][0]
                groups.setdefault(".".join(address.split(".")[:2]), []).append(part)
        for own in groups.values():
            if (
                len(own) > 1
                and sum(max(1, len(part.children)) for part in own) >= _FEWEST_REPEATED_MODULES
            ):
                _group(box, "range", [own])

    def _shapes_of(self, parts: Sequence[Part], edges: set[tuple[Part, Part]]) -> Hashable:
        """What makes parts, together, identical to others.

        A tensor that a module hands on to the next one leaves a mark in the log, but in the last
        module of a row, where nobody reads it: it does not make that module another one.
        """
        touched = {id(part) for edge in edges for part in edge}
        parts = [part for part in parts if id(part) in touched or not self._is_handed_on(part)]
        position = {id(part): index for index, part in enumerate(parts)}
        return tuple([part.shape for part in parts]), tuple(
            sorted((position[id(a)], position[id(b)]) for a, b in edges)
        )

    def _is_handed_on(self, part: Part) -> bool:
        if (
            part.kind != "operation"
            or part.address
            or part.passes[0][0] >= len(self.log.graph.recorded)
        ):
            return False
        return self.log.row(part.passes[0][0]).operation is IDENTITY

    # -- constants
    # ----------------------------------------------------------------------------------------------

    def _fold_constants(self, box: Part, edges: set[tuple[Part, Part]]) -> None:
        """What is computed from nothing that goes into the model (masks, positions) is one thing,
        if it hangs together.
        """
        position = {id(part): index for index, part in enumerate(box.children)}
        own = {id(part): part for part in box.children if self._is_constant(part)}
        others = (part for part in box.children if id(part) not in own)
        if len(own) < _FEWEST_CONSTANTS or all(
            part.kind == "operation" and self._is_boundary(part) for part in others
        ):
            return  # nothing would be left to be seen
        joined = {number: number for number in own}

        def find(number: int) -> int:
            while joined[number] != number:
                joined[number] = joined[joined[number]]
                number = joined[number]
            return number

        for a, b in edges:
            if id(a) in own and id(b) in own:
                joined[find(id(a))] = find(id(b))
        groups: dict[int, list[Part]] = {}
        for number, part in own.items():
            groups.setdefault(find(number), []).append(part)
        # A group stands where its first part stood, so it must not read what comes after that.
        late = {
            find(id(b))
            for a, b in edges
            if id(b) in own
            and id(a) not in own
            and position[id(a)] > position[id(groups[find(id(b))][0])]
        }
        found = [
            members
            for number, members in groups.items()
            if sum(map(_num_operations, members)) >= _FEWEST_CONSTANTS
            and number not in late
            and len(members) > 1
        ]
        for group, members in zip(_group(box, "constants", found), found, strict=True):
            inner = {id(part) for part in members}
            group.shape = self._known(
                (
                    "constants",
                    self._shapes_of(
                        members, {(a, b) for a, b in edges if id(a) in inner and id(b) in inner}
                    ),
                )
            )

    def _is_constant(self, part: Part) -> bool:
        """Whether no input leads to it. Modules and what has parameters are worth being seen."""
        if part.address or part.kind not in ("operation", "loop"):
            return False
        graph = self.log.graph
        return all(self._is_constant(inner) for inner in part.children) and not any(
            entry >= len(graph.recorded)
            or entry in self.boundary
            or graph.has_input_ancestor[entry]
            or graph.params[entry]
            for own in part.passes
            for entry in own
        )

    def _shape_of(self, part: Part) -> Hashable:
        entry = part.passes[0][0]
        if entry >= len(self.log.graph.recorded):
            return self._known(("failed", entry))
        row = self.log.row(entry)
        numbers = self.log.graph.params[entry]
        params = (
            tuple([tuple(self.log.recording.params[number].shape) for number in numbers])
            if numbers
            else ()
        )
        same = (
            row.operation.name,
            row.shape,
            row.dtype,
            params,
            part.num_passes,
            len(part.passes[0]),
            len(part.buffers),
        )
        return self._known((same, _hashable(row.args), _hashable(row.kwargs)))

    def _known(self, what: Hashable) -> int:
        """A number for it: equal things have equal numbers."""
        return self.shapes.setdefault(what, len(self.shapes))

    # -- repeats
    # ----------------------------------------------------------------------------------------------

    def _fold_repeats(self, box: Part) -> None:
        children = box.children
        runs = _runs([self._pattern(part) for part in children])
        if not runs:
            return
        repeats = _group(
            box, "repeat", [children[start : start + n * count] for start, n, count in runs]
        )
        for repeat, (start, period, count) in zip(repeats, runs, strict=True):
            repeat.num_passes = count
            if period > 1:
                _group(
                    repeat,
                    "step",
                    [
                        children[at : at + period]
                        for at in range(start, start + period * count, period)
                    ],
                )
            self._put_together(repeat)

    def _pattern(self, part: Part) -> tuple[str, Hashable]:
        """What repeats of a part have in common: the address but for numbers, and the shape."""
        if part.kind == "operation" and self._is_boundary(part):
            address = self.log.boundary_addresses.get(part.passes[0][0], [""])[0]
            name = re.sub(r"\d+", "#", address)
            return (name, (name, part.shape)) if "#" in name else ("", ("boundary", id(part)))
        return re.sub(r"\d+", "#", part.address) if part.address else "", part.shape

    def _is_boundary(self, part: Part) -> bool:
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
        inner = [
            part
            for part in box.children
            if not (part.kind == "operation" and self._is_boundary(part))
        ]
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


def _runs(patterns: Sequence[tuple[str, Hashable]]) -> list[tuple[int, int, int]]:
    """Where steps of some children come several times in a row: start, children per step, times."""
    total = len(patterns)
    if total < _FEWEST_REPEATED_MODULES:
        return []
    known: dict[Hashable, int] = {}
    ids = np.array([known.setdefault(pattern, len(known)) for pattern in patterns])
    if len(known) == total:
        return []
    is_named = np.array([bool(name) for name, _ in patterns])
    is_numbered = np.array([not name or "#" in name for name, _ in patterns])
    best, best_period = np.zeros(total, int), np.zeros(total, int)
    window_numbered, window_named = np.ones(total, bool), np.zeros(total, bool)
    for period in range(1, min(_LONGEST_PERIOD, total // 2) + 1):
        shift = period - 1
        window_numbered[: total - shift] &= is_numbered[shift:]
        window_named[: total - shift] |= is_named[shift:]
        is_same = ids[:-period] == ids[period:]
        breaks = np.flatnonzero(~is_same)
        ends = np.append(breaks, total - period)[np.searchsorted(breaks, np.arange(total - period))]
        counts = 1 + (ends - np.arange(total - period)) // period
        fewest = np.where(
            window_named[: total - period], _FEWEST_REPEATED_MODULES, _FEWEST_REPEATED_OPERATIONS
        )
        covered = np.where(
            (counts >= fewest) & window_numbered[: total - period], counts * period, 0
        )
        is_better = covered > best[: total - period]
        best[: total - period][is_better] = covered[is_better]
        best_period[: total - period][is_better] = period
    found: list[tuple[int, int, int]] = []
    end = 0
    for start in np.flatnonzero(best).tolist():
        if start >= end:
            period, length = int(best_period[start]), int(best[start])
            found.append((start, period, length // period))
            end = start + length
    return found


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


def _hashable(value: Any) -> Hashable:
    """Equal for equal arguments."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple([_hashable(one) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _hashable(one)) for name, one in value.items()])
    try:
        hash(value)
    except TypeError:  # slices, before Python 3.12
        return repr(value)
    return value
