"""A history as an outline: nested boxes, each with few enough parts for a page to show at once.

The outline is rolled: an operation that a loop repeats is one operation. Boxes are modules and
loops. Where these hold too many operations, folding adds repeats of identical parts and spans of
many operations.
"""

from collections import Counter
from itertools import chain

from torchlens._history.log import Log
from torchlens._page.loop_tree import LoopTree
from torchlens._page.module_events import Event, ModuleEvents
from torchlens._page.parts import FailedCall, Link, Outline, Part, boxes_in, entries_in, walk


def outline(log: Log, failed: FailedCall | None = None) -> Outline:
    """Modules, loops and operations in execution order, not folded yet. A failed call is the entry
    after the last.
    """
    return _OutlineBuilder(log, failed).build()


class _OutlineBuilder:
    """Builds the boxes from the outside in.

    A frame is one pass of a box: a call of a module, an iteration of a loop. An edge between two
    frames of the same box goes around that box.
    """

    def __init__(self, log: Log, failed: FailedCall | None) -> None:
        self.log = log
        self.events = ModuleEvents(log, failed)
        self.frame_above: list[int] = []
        self.frame_depth: list[int] = []
        self.frame_part: list[Part] = []
        self.frame_of = [0] * len(self.events.parents)
        self.unit_of: list[Part | None] = [None] * len(self.events.parents)

    def build(self) -> Outline:
        root = self._box([0], [-1], "")
        for box in boxes_in(root):
            for part in box.children:
                part.above = box
        self._count_each()
        number_of: dict[int, int] = {}

        def count(part: Part, _: int) -> None:
            number_of[id(part)] = len(number_of)

        walk(root, count)
        return Outline(root, [_against_order(link, number_of) for link in self._links()])

    def _count_each(self) -> None:
        """Sets `num_each` of loops: their iterations per pass of the enclosing box, if constant."""
        num_frames = Counter(map(id, self.frame_part))
        ran: dict[int, Counter[int]] = {}
        for part, above in zip(self.frame_part, self.frame_above, strict=True):
            if part.kind == "loop":
                ran.setdefault(id(part), Counter())[above] += 1
        for part in {id(part): part for part in self.frame_part if part.kind == "loop"}.values():
            counts = ran[id(part)]
            num_around = num_frames[id(self.frame_part[next(iter(counts))])]
            if len(counts) == num_around > 1 and len(set(counts.values())) == 1:
                part.num_each = next(iter(counts.values()))

    # -- boxes -------------------------------------------------------------------------------------

    def _box(self, calls: list[int], frames_above: list[int], address: str) -> Part:
        """A module with everything that ran in the given calls of it."""
        box = Part("module", 0.0, address, len(calls), calls)
        frames = [self._frame(above, box) for above in frames_above]
        events = [self.events.of(call) for call in calls]
        tree = self.events.loop_tree(events)
        boxed = self._boxed_loops(events, tree)
        units = self._units(frames, events, tree, boxed)
        _arrange(box, [self._unit(own) for own in units], tree, boxed)
        for call, frame in zip(calls, frames, strict=True):
            entries = self.events.entries_of_call.get(call, ())
            aside = [entry for entry in entries if entry in self.events.aside]
            box.children += [self._aside(entry, frame) for entry in aside]
        box.children.sort(key=lambda part: part.order)
        box.order = min((part.order for part in box.children), default=0.0)
        return self._simplified(box, frames) if address else box

    def _frame(self, above: int, part: Part) -> int:
        self.frame_above.append(above)
        self.frame_depth.append(0 if above < 0 else self.frame_depth[above] + 1)
        self.frame_part.append(part)
        return len(self.frame_part) - 1

    def _boxed_loops(self, events: list[list[Event]], tree: LoopTree) -> dict[int, Part]:
        """The loops that become boxes: those in which an iteration reads a result of another one,
        and those without a common order of steps.
        """
        if not tree.loop_above:
            return {}
        carried, contents = self._carried(events, tree), tree.contents()
        return {
            loop: Part("loop", 0.0, num_passes=0)
            for loop in range(len(tree.loop_above))
            if (loop in carried or loop not in tree.orders) and len(contents[loop]) > 1
        }

    def _units(
        self,
        frames: list[int],
        events: list[list[Event]],
        tree: LoopTree,
        boxed: dict[int, Part],
    ) -> list[list[tuple[Event, int]]]:
        """The events of each unit, with their frames."""
        frame_of_iteration = self._frames_of_iterations(frames, tree, boxed)
        found: list[list[tuple[Event, int]]] = [[] for _ in tree.loop_of_unit]
        for frame, own, *places in zip(frames, events, tree.units, tree.iterations, strict=True):
            for event, unit, iteration in zip(own, *places, strict=True):
                inner = frame if iteration < 0 else frame_of_iteration[iteration]
                found[unit].append((event, inner))
        return found

    def _frames_of_iterations(
        self, frames: list[int], tree: LoopTree, boxed: dict[int, Part]
    ) -> list[int]:
        """The frame of each iteration: its own if its loop is a box, else the enclosing one."""
        found: list[int] = []
        for iteration, loop in enumerate(tree.loop_of_iteration):
            above = tree.iteration_above[iteration]
            frame = found[above] if above >= 0 else frames[tree.sequence_of_iteration[iteration]]
            if loop in boxed:
                frame = self._frame(frame, boxed[loop])
                boxed[loop].num_passes += 1
            found.append(frame)
        return found

    def _carried(self, events: list[list[Event]], tree: LoopTree) -> set[int]:
        """The loops in which an iteration reads a result of another iteration's other unit.

        A cell that reads only its own last state shows the loop without a box.
        """
        place_of: dict[int, tuple[int, int]] = {}  # entry → iteration, unit
        for own, *places in zip(events, tree.iterations, tree.units, strict=True):
            for event, iteration, unit in zip(own, *places, strict=True):
                if iteration >= 0:
                    is_call = event.call >= 0
                    inside = self.events.entries_under(event.call) if is_call else [event.entry]
                    place_of.update(dict.fromkeys(inside, (iteration, unit)))
        found: set[int] = set()
        for entry, (mine, unit) in place_of.items():
            for parent in self.events.parents[entry]:
                theirs, source = place_of.get(self.events.head_of[parent], (-1, -1))
                if theirs >= 0 and theirs != mine and source != unit:
                    found.add(_outermost_change(tree, mine, theirs))
        return found

    def _unit(self, own: list[tuple[Event, int]]) -> Part:
        """One operation or one module, with all its passes at one place."""
        if own[0][0].call >= 0:
            calls = [event.call for event, _ in own]
            part = self._box(
                calls,
                [frame for _, frame in own],
                self.log.recording.module_calls[calls[0]].address,
            )
            part.order = own[0][0].time
            return part
        part = Part("operation", own[0][0].time, num_passes=len(own))
        heads, count = self.events.head_of, len(self.events.head_of)
        for event, frame in own:
            entries, last = [event.entry], event.entry + 1
            while last < count and heads[last] == event.entry:
                entries.append(last)
                last += 1
            part.passes.append(entries)
            for entry in entries:
                self.unit_of[entry], self.frame_of[entry] = part, frame
        return part

    def _aside(self, entry: int, frame: int) -> Part:
        part = Part("operation", self.events.order[entry], passes=[[entry]])
        self.unit_of[entry], self.frame_of[entry] = part, frame
        return part

    def _is_aside(self, part: Part) -> bool:
        return bool(part.passes) and part.passes[0][0] in self.events.aside

    def _simplified(self, box: Part, frames: list[int]) -> Part:
        """The operation of a module that has only one, apart from buffers; else the box itself."""
        steps = [part for part in box.children if not self._is_aside(part)]
        if len(steps) != 1 or steps[0].kind != "operation" or steps[0].address:
            return box
        unit = steps[0]
        aside = [entries_in(part) for part in box.children if part is not unit]
        unit.buffers = list(chain.from_iterable(aside))
        unit.address, unit.calls = box.address, box.calls
        for entry in unit.buffers:
            self.unit_of[entry] = unit
        for frame in frames:
            self.frame_part[frame] = unit
        return unit

    # -- edges -------------------------------------------------------------------------------------

    def _links(self) -> list[Link]:
        found: dict[tuple[int, int, int], Link] = {}
        for entry, parents in enumerate(self.events.parents):
            target, frame = self.unit_of[entry], self.frame_of[entry]
            for parent in parents:
                source = self.unit_of[parent]
                assert source is not None
                assert target is not None
                around = None
                if parent not in self.events.aside:
                    if self.frame_of[parent] != frame:
                        around = self._gone_round(self.frame_of[parent], frame)
                    if around is None and source is target:
                        around = source
                elif source is target:
                    continue
                key = (id(source), id(target), id(around))
                if key not in found:
                    found[key] = Link(source, target, around)
        return list(found.values())

    def _gone_round(self, one: int, other: int) -> Part | None:
        """The outermost box that has the two frames in different passes; None if there is none."""
        above, depth = self.frame_above, self.frame_depth
        below_one = below_other = -1
        while one != other:
            if depth[one] >= depth[other]:
                if depth[one] > depth[other]:
                    below_one, one = one, above[one]
                    continue
                below_one, one = one, above[one]
            below_other, other = other, above[other]
        if below_one < 0 or below_other < 0:
            return None
        part = self.frame_part[below_one]
        return part if part is self.frame_part[below_other] else None


def _arrange(box: Part, parts: list[Part], tree: LoopTree, boxed: dict[int, Part]) -> None:
    """Puts the parts into the box and its loops, in an order that every pass follows."""
    contents = tree.contents()

    def place(loop: int, home: Part, now: float) -> float:
        for key in tree.orders.get(loop, contents.get(loop, [])):
            if key >= 0:
                part = parts[key]
                now = part.order = max(part.order, now + 1e-6)
                home.children.append(part)
            elif -1 - key in boxed:
                inner = boxed[-1 - key]
                now = place(-1 - key, inner, now)
                inner.order = inner.children[0].order
                home.children.append(inner)
            else:
                now = place(-1 - key, home, now)
        return now

    place(-1, box, -1.0)


def _against_order(link: Link, number_of: dict[int, int]) -> Link:
    """The link, routed around the common box if it leads back: passes with different orders always
    have such links.
    """
    source, target, around = link
    if around is not None or number_of[id(source)] < number_of[id(target)]:
        return link
    above = set()
    part: Part | None = source
    while part is not None:
        above.add(id(part))
        part = part.above
    part = target
    while part is not None and (id(part) not in above or part.num_passes == 1):
        part = part.above
    return Link(source, target, part)


def _outermost_change(tree: LoopTree, one: int, other: int) -> int:
    """The outermost loop that has the two in different iterations; -1 for none."""
    loops, above = tree.loop_of_iteration, tree.iteration_above
    lines: list[dict[int, int]] = []
    for iteration in (one, other):
        line = {}
        while iteration >= 0:
            line[loops[iteration]] = iteration
            iteration = above[iteration]
        lines.append(line)
    changed = -1
    for loop, iteration in lines[0].items():
        if lines[1].get(loop, iteration) != iteration:
            changed = loop
    return changed
