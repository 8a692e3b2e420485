"""A history as an outline: nested boxes with few enough things in each that a page can show any of them at once.

The outline is rolled: the passes of one layer are one operation of it. Boxes are the modules, and where they do not divide
the operations finely enough, loops, repeats of identical parts, and spans of many small things.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torchlens.history.log import Log

__all__ = ["FailedCall", "Part", "outline"]

_MOST_CHILDREN = 40
_SPANS_PER_BOX = 24
_LONGEST_PERIOD = 8
_FEWEST_REPEATED_MODULES = 3
_FEWEST_REPEATED_OPERATIONS = 8


@dataclass(slots=True, eq=False)
class Part:
    """One operation or one box of the outline.

    `kind` is 'operation', 'module', 'loop', 'repeat' (identical parts), 'step' (one of them) or 'span'. Parts are in the
    order in which they first ran. `passes` has the entries of each pass of an operation; `buffers` are entries that live
    in it.
    `edges` are between children, by their `number`; an edge to an earlier or the same child is a loop's way back.
    """

    kind: str
    number: int
    order: float
    address: str = ""
    num_passes: int = 1
    pass_num: int = 0  # of a module that ran several times and is shown each time
    calls: list[int] = field(default_factory=list)
    children: list["Part"] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    edges: set[tuple[int, int]] = field(default_factory=set)
    shape: Hashable = None  # what makes it identical to another


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The operation that raised, as one more entry: in which module call it ran and what it read."""

    module_call: int
    parents: tuple[int, ...]


def outline(log: Log, failed: FailedCall | None = None) -> Part:
    """The root of the outline. A failed call is the entry after the last."""
    return _Builder(log, failed).build()


class _Builder:
    def __init__(self, log: Log, failed: FailedCall | None) -> None:
        self.log = log
        self.num_parts = 0
        graph = log.graph
        self.parents: list[Sequence[int]] = list(graph.parents)
        self.children: list[Sequence[int]] = list(graph.children)
        self.call_of = [log.row(entry).module_call for entry in range(len(graph.recorded))]
        self.order = [float(entry) for entry in range(len(graph.recorded))]
        self.layer_of = list(graph.layer_of)
        self._place_buffers()
        if failed is not None:
            self.parents.append(failed.parents)
            self.children.append(())
            self.call_of.append(failed.module_call)
            self.order.append(float(len(self.order)))
            self.layer_of.append(len(graph.layers))
        self.head_of = self._heads()
        self.entries_of_call: dict[int, list[int]] = {}
        for entry, call in enumerate(self.call_of):
            self.entries_of_call.setdefault(call, []).append(entry)
        self.calls_in: dict[int, list[int]] = {}
        for number, record in enumerate(log.recording.module_calls):
            if number:
                self.calls_in.setdefault(record.parent, []).append(number)
        self.layers_in = self._layers_in_calls()
        self.unit_of: list[Part] = []
        self.above: dict[int, Part] = {}

    def build(self) -> Part:
        root = self._box([0], "")
        self._connect(root)
        self._fold(root)
        return root

    # -- entries -----------------------------------------------------------------------------------------------------

    def _place_buffers(self) -> None:
        """A buffer stands with the first operation that reads it, in the innermost module that all its readers share."""
        calls, chains = self.log.recording.module_calls, self.log.graph.module_chains
        for entry in self.log.graph.buffers:
            readers = self.children[entry]
            if not readers:
                continue
            first = min(readers)
            shared = chains[self.call_of[first]]
            for reader in readers:
                chain = chains[self.call_of[reader]]
                same = 0
                while same < min(len(chain), len(shared)) and calls[chain[same]].address == calls[shared[same]].address:
                    same += 1
                shared = shared[:same]
            self.call_of[entry] = shared[-1] if shared else 0
            self.order[entry] = first - 0.5

    def _heads(self) -> list[int]:
        """For each entry the first entry of the same call: a `split` is one operation with several results."""
        heads = list(range(len(self.parents)))
        rows, recorded = self.log.recording.rows, self.log.graph.recorded
        for entry in range(1, len(recorded)):
            row, before = rows[recorded[entry]], rows[recorded[entry - 1]]
            if row.output_index and before.output_index is not None:
                step = row.output_index - before.output_index
                if step > 0 and recorded[entry] - recorded[entry - 1] == step and row.operation is before.operation:
                    heads[entry] = heads[entry - 1]
        return heads

    def _layers_in_calls(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        chains = self.log.graph.module_chains
        for entry, call in enumerate(self.call_of):
            for above in chains[call]:
                found.setdefault(above, set()).add(self.layer_of[self.head_of[entry]])
        return found

    # -- modules -----------------------------------------------------------------------------------------------------

    def _part(self, kind: str, order: float) -> Part:
        self.num_parts += 1
        return Part(kind, self.num_parts - 1, order)

    def _box(self, calls: list[int], address: str) -> Part:
        """A module with everything that ran in the given calls of it."""
        box = self._part("module", 0.0)
        box.address, box.calls, box.num_passes = address, calls, len(calls)
        units: dict[int, list[list[int]]] = {}
        for call in calls:
            for entry in self.entries_of_call.get(call, ()):
                head = self.head_of[entry]
                passes = units.setdefault(self.layer_of[head], [])
                if passes and self.head_of[passes[-1][0]] == head:
                    passes[-1].append(entry)
                else:
                    passes.append([entry])
        for passes in self._merged(list(units.values())):
            unit = self._part("operation", min(self.order[own[0]] for own in passes))
            unit.passes, unit.num_passes = passes, len(passes)
            box.children.append(unit)
        inner = [call for outer in calls for call in self.calls_in.get(outer, ()) if call in self.layers_in]
        for group in self._same_module(inner):
            part = self._box(group, self.log.recording.module_calls[group[0]].address)
            part.pass_num = self.log.recording.module_calls[group[0]].pass_num
            box.children.append(_simplified(part, set(self.log.graph.buffers)))
        box.children.sort(key=lambda part: part.order)
        box.order = min((part.order for part in box.children), default=0.0)
        return box

    def _same_module(self, calls: list[int]) -> list[list[int]]:
        """Calls of one module that share a layer are passes of it."""
        group_of: dict[tuple[str, int], int] = {}
        groups: dict[int, list[int]] = {}
        for call in calls:
            address = self.log.recording.module_calls[call].address
            keys = [(address, layer) for layer in self.layers_in[call]]
            found = sorted({group_of[key] for key in keys if key in group_of})
            target = found[0] if found else call
            for other in found[1:]:
                groups[target] += groups.pop(other)
                group_of.update({key: target for key, group in group_of.items() if group == other})
            groups.setdefault(target, []).append(call)
            group_of.update(dict.fromkeys(keys, target))
        return [sorted(group) for group in groups.values()]

    def _merged(self, units: list[list[list[int]]]) -> list[list[list[int]]]:
        """Operations that feed one pass each of the same layer (`x[:, t]` of a recurrent net) count as passes."""
        for _ in range(3):
            owner = {entry: index for index, passes in enumerate(units) for own in passes for entry in own}
            by_key: dict[Hashable, list[int]] = {}
            for index, passes in enumerate(units):
                first = passes[0]
                key: Hashable = index
                if len(passes) == 1 and len(first) == 1 and first[0] < len(self.log.graph.recorded):
                    entry = first[0]
                    readers = self.children[entry]
                    row = self.log.row(entry)
                    if len(readers) == 1 and self.parents[entry]:
                        reader = readers[0]
                        is_repeated = self.log.num_passes(reader) > 1 or any(
                            len(units[owner[child]]) > 1 for child in readers if child in owner
                        )
                        if is_repeated:
                            above = tuple(owner.get(parent, -1 - parent) for parent in self.parents[entry])
                            key = (row.operation.name, row.shape, above, self.layer_of[reader])
                by_key.setdefault(key, []).append(index)
            merged = [
                [passes for index in found for passes in units[index]] for found in by_key.values() if len(found) >= 3
            ]
            if not merged:
                break
            kept = [units[index] for found in by_key.values() if len(found) < 3 for index in found]
            units = kept + merged
        return units

    # -- edges between the children of a box ---------------------------------------------------------------------------

    def _connect(self, root: Part) -> None:
        units: list[Part | None] = [None] * len(self.parents)
        depth = {root.number: 0}
        pending = [root]
        while pending:
            box = pending.pop()
            for part in box.children:
                self.above[part.number] = box
                depth[part.number] = depth[box.number] + 1
                pending.append(part)
                for own in (*part.passes, part.buffers):
                    for entry in own:
                        units[entry] = part
        self.unit_of = [unit if unit is not None else root for unit in units]
        known: dict[tuple[int, int], tuple[Part, Part] | None] = {}
        for entry, parents in enumerate(self.parents):
            for parent in parents:
                a, b = self.unit_of[parent], self.unit_of[entry]
                key = a.number, b.number
                if key not in known:
                    known[key] = self._siblings(a, b, depth)
                siblings = known[key]
                if siblings is not None:
                    box = self.above[siblings[0].number]
                    if box.num_passes == 1 or self._call_in(box, parent) == self._call_in(box, entry):
                        box.edges.add((siblings[0].number, siblings[1].number))

    def _siblings(self, a: Part, b: Part, depth: dict[int, int]) -> tuple[Part, Part] | None:
        """The parts above `a` and `b` that stand in one box; none where one of them is, or is in, the other."""
        while depth[a.number] > depth[b.number]:
            a = self.above[a.number]
        while depth[b.number] > depth[a.number]:
            b = self.above[b.number]
        while a is not b and self.above[a.number] is not self.above[b.number]:
            a, b = self.above[a.number], self.above[b.number]
        return None if a is b else (a, b)

    def _call_in(self, box: Part, entry: int) -> int:
        """In which pass of a module an entry was made. What goes from one pass to the next is no loop inside of it."""
        calls = set(box.calls)
        return next((call for call in self.log.graph.module_chains[self.call_of[entry]] if call in calls), -1)

    # -- loops, repeats and spans --------------------------------------------------------------------------------------

    def _fold(self, box: Part) -> None:
        for part in box.children:
            if part.kind == "operation":
                part.shape = self._shape_of(part)
            else:
                self._fold(part)
        self._fold_loops(box)
        self._fold_repeats(box)
        position = {part.number: index for index, part in enumerate(box.children)}
        edges = tuple(sorted((position[a], position[b]) for a, b in box.edges))
        name = self.log.recording.module_classes.get(box.address, "") if box.kind == "module" else box.kind
        box.shape = (name, box.num_passes, tuple(part.shape for part in box.children), edges)
        box.shape = hash(box.shape)
        self._fold_spans(box)

    def _shape_of(self, part: Part) -> Hashable:
        entry = part.passes[0][0]
        if entry >= len(self.log.graph.recorded):
            return ("failed", entry)
        row = self.log.row(entry)
        params = [tuple(self.log.recording.params[number].shape) for number in self.log.graph.params[entry]]
        return hash((row.operation.name, tuple(row.shape), tuple(params), part.num_passes, len(part.buffers)))

    def _group(self, box: Part, kind: str, groups: Sequence[Sequence[Part]]) -> list[Part]:
        """Puts some children of a box into boxes of their own, in their place."""
        made = []
        group_of: dict[int, Part] = {}
        for members in groups:
            group = self._part(kind, min(part.order for part in members))
            group.children = sorted(members, key=lambda part: part.order)
            group_of.update({part.number: group for part in members})
            made.append(group)
        edges = set()
        for a, b in box.edges:
            above_a, above_b = group_of.get(a), group_of.get(b)
            if above_a is not None and above_a is above_b:
                above_a.edges.add((a, b))
            else:
                edges.add((above_a.number if above_a else a, above_b.number if above_b else b))
        box.edges = edges
        kept = [part for part in box.children if part.number not in group_of]
        box.children = sorted([*made, *kept], key=lambda part: part.order)
        return made

    def _fold_loops(self, box: Part, headers: frozenset[int] = frozenset()) -> None:
        """Children that feed each other in a circle are a loop; loops inside it go around without its first child."""
        numbers = [part.number for part in box.children]
        for circle in _circles(numbers, [(a, b) for a, b in box.edges if b not in headers]):
            by_number = {part.number: part for part in box.children}
            header = min((by_number[number] for number in circle), key=lambda part: part.order)
            inside, is_growing = set(circle), True
            while is_growing:
                near = {n for edge in box.edges if inside.intersection(edge) for n in edge} - inside
                more = {n for n in near if by_number[n].num_passes == header.num_passes > 1}
                inside |= more
                is_growing = bool(more)
            if headers and len(inside) == len(box.children):
                continue
            (loop,) = self._group(box, "loop", [[by_number[number] for number in inside]])
            loop.num_passes = max(header.num_passes, 2)
            self._fold_loops(loop, headers | {header.number})
            loop.shape = hash(("loop", loop.num_passes, tuple(part.shape for part in loop.children)))

    def _fold_repeats(self, box: Part) -> None:
        children = box.children
        patterns = [self._pattern(part) for part in children]
        runs: list[tuple[int, int, int]] = []
        index = 0
        while index < len(children):
            period, count = _longest_run(patterns, index)
            if count:
                runs.append((index, period, count))
            index += max(1, period * count)
        repeats = self._group(box, "repeat", [children[start : start + n * count] for start, n, count in runs])
        for repeat, (start, period, count) in zip(repeats, runs, strict=True):
            repeat.num_passes = count
            if period > 1:
                ends = range(start, start + period * count, period)
                for step in self._group(repeat, "step", [children[at : at + period] for at in ends]):
                    step.shape = hash(tuple(part.shape for part in step.children))
            repeat.shape = hash(("repeat", count, repeat.children[0].shape))
            self._fold_spans(repeat)

    def _pattern(self, part: Part) -> tuple[str, Hashable]:
        """What repeats of a part have in common: the address but for numbers, and the shape."""
        if part.kind == "operation" and self._is_boundary(part):
            entry = part.passes[0][0]
            address = self.log.boundary_addresses.get(entry, [""])[0]
            name = re.sub(r"\d+", "#", address)
            return (name, (name, part.shape)) if "#" in name else ("", ("boundary", part.number))
        return re.sub(r"\d+", "#", part.address), part.shape

    def _is_boundary(self, part: Part) -> bool:
        graph = self.log.graph
        entry = part.passes[0][0]
        return entry in graph.inputs or entry in graph.outputs or entry >= len(graph.recorded)

    def _fold_spans(self, box: Part) -> None:
        """So many children that no screen holds them are put together by the dozen."""
        if len(box.children) <= _MOST_CHILDREN:
            return
        inner = [part for part in box.children if not (part.kind == "operation" and self._is_boundary(part))]
        size = max(2, -(-len(inner) // _SPANS_PER_BOX))
        groups = [inner[start : start + size] for start in range(0, len(inner), size)]
        for span in self._group(box, "span", groups):
            span.shape = hash(tuple(part.shape for part in span.children))
            self._fold_spans(span)


def _longest_run(patterns: Sequence[tuple[str, Hashable]], start: int) -> tuple[int, int]:
    """How many children at `start` make one step, and how often that step comes in a row; 0, 0 where it does not."""
    best = (0, 0)
    for period in range(1, min(_LONGEST_PERIOD, (len(patterns) - start) // 2) + 1):
        pattern = patterns[start : start + period]
        is_numbered = all("#" in name or not name for name, _ in pattern)
        if not is_numbered:
            break
        count = 1
        while patterns[start + period * count : start + period * (count + 1)] == pattern:
            count += 1
        fewest = _FEWEST_REPEATED_MODULES if any(name for name, _ in pattern) else _FEWEST_REPEATED_OPERATIONS
        if count >= fewest and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _simplified(box: Part, buffers: set[int]) -> Part:
    """A module that is one operation, its buffers aside, is shown as that operation."""
    operations = [part for part in box.children if not (part.kind == "operation" and part.passes[0][0] in buffers)]
    if len(operations) != 1 or operations[0].kind != "operation" or operations[0].address:
        return box
    unit = operations[0]
    unit.buffers = [entry for part in box.children if part is not unit for own in part.passes for entry in own]
    unit.address, unit.calls, unit.pass_num = box.address, box.calls, box.pass_num
    return unit


def _circles(numbers: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The strongly connected sets of more than one number (Tarjan's algorithm, without recursion)."""
    below: dict[int, list[int]] = {number: [] for number in numbers}
    for a, b in edges:
        below[a].append(b)
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for root in below:
        if root in index:
            continue
        work = [(root, iter(below[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            number, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    on_stack.add(child)
                    work.append((child, iter(below[child])))
                    break
                if child in on_stack:
                    low[number] = min(low[number], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[number])
                if low[number] == index[number]:
                    circle = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        circle.append(member)
                        if member == number:
                            break
                    if len(circle) > 1:
                        found.append(circle)
    return found


def walk(root: Part, visit: Callable[[Part, int], None]) -> None:
    """Calls `visit(part, number of its parent)` for each part, parents first, children in order."""
    pending: list[tuple[Part, int]] = [(root, -1)]
    count = 0
    while pending:
        part, parent = pending.pop()
        visit(part, parent)
        own, count = count, count + 1
        pending.extend((child, own) for child in reversed(part.children))
