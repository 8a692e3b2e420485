"""The parts of an outline (operations and boxes), the links between them, and which of them a page
carries.

The page of a long log carries only a selection. Boxes are opened from the outside in until there
are many thousand parts; those that stay closed only know how much is inside. An operation with many
passes keeps the first and the last ones. Totals are always those of the whole log.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_OPERATIONS = 100_000  # a log of up to so many is carried whole
_MOST_PARTS = 8_000
_MOST_CARRIED = 16_000
_MOST_PASSES = 1_000


@dataclass(slots=True, eq=False)
class Part:
    """One operation or one box of the outline.

    `kind` is 'operation', 'module', 'loop', 'repeat' (identical parts), 'step' (one of them),
    'span', 'range' or 'constants'. Parts are in the order in which they first ran. `passes` has the
    entries of each pass of an operation, `buffers` those of the buffers of a module shown as one
    operation. `num_passes` counts the passes in all passes of the box around it. `num_each` is how
    often a loop runs in each pass of that box; 0 if there is only one, or they differ.
    """

    kind: str
    order: float
    address: str = ""
    num_passes: int = 1
    calls: Sequence[int] = ()
    children: list["Part"] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)
    buffers: Sequence[int] = ()
    above: "Part | None" = None
    num_each: int = 0


class Link(NamedTuple):
    """An edge between two operations. `around` is the box in whose next pass it ends, if any."""

    source: Part
    target: Part
    around: Part | None


class Outline(NamedTuple):
    """The outermost box, and every edge once."""

    root: Part
    links: list[Link]


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The operation that raised, as an additional entry: its module call and what it read."""

    module_call: int
    parents: tuple[int, ...]


def walk(root: Part, visit: Callable[[Part, int], None]) -> None:
    """Calls `visit(part, number of its parent)` for each part, parents first, children in order."""
    pending: list[tuple[Part, int]] = [(root, -1)]
    count = 0
    while pending:
        part, parent = pending.pop()
        visit(part, parent)
        own, count = count, count + 1
        pending.extend((child, own) for child in reversed(part.children))


def entries_in(part: Part) -> list[int]:
    """The entries of a part and of all parts inside it."""
    found: list[int] = []
    pending = [part]
    while pending:
        inner = pending.pop()
        pending += inner.children
        found += [entry for own in inner.passes for entry in own]
    return found


def boxes_in(root: Part) -> list[Part]:
    """All parts that have parts inside, the outermost first."""
    found, pending = [], [root]
    while pending:
        box = pending.pop()
        if box.children:
            found.append(box)
            pending += box.children
    return found


# -- what a page carries ---------------------------------------------------------------------------


@dataclass(slots=True)
class ChosenParts:
    """Which entries are carried, and the entries left out of each part, by the part's `id`.

    `sealed` parts are carried without the parts inside them.
    """

    num_entries: int
    entries: Sequence[int] = ()
    number_of: dict[int, int] | None = None  # None: all are carried, by their own numbers
    sealed: set[int] = field(default_factory=set)
    left_out: dict[int, list[int]] = field(default_factory=dict)
    passes_left_out: dict[int, int] = field(default_factory=dict)
    kept_passes: dict[int, list[list[int]]] = field(default_factory=dict)  # in the page's numbers

    def numbers(self, entries: Sequence[int]) -> Sequence[int]:
        """The page's numbers of those entries that are carried."""
        number_of = self.number_of
        if number_of is None:
            return entries
        return [number_of[entry] for entry in entries if entry in number_of]

    def children(self, part: Part) -> list[Part]:
        return [] if id(part) in self.sealed else part.children

    def passes(self, part: Part) -> list[list[int]]:
        """The entries of the passes that are carried, in the page's numbers."""
        return part.passes if self.number_of is None else self.kept_passes.get(id(part), [])

    def walk(self, root: Part) -> Iterator[tuple[Part, int]]:
        """Each carried part with the number of its parent, parents first, children in order."""
        pending: list[tuple[Part, int]] = [(root, -1)]
        count = 0
        while pending:
            part, parent = pending.pop()
            yield part, parent
            pending.extend((child, count) for child in reversed(self.children(part)))
            count += 1


def select(root: Part, num_entries: int, num_operations: int, always: int = -1) -> ChosenParts:
    """Chooses what is carried. The entry `always` is carried in any case."""
    if num_operations <= MOST_OPERATIONS:
        return ChosenParts(num_entries, range(num_entries))
    found = ChosenParts(num_entries, number_of={})
    units = [part for part in _open(root, found, always) if part.kind == "operation"]
    in_one_pass = sum(len(part.passes[0]) for part in units)
    most = max(2, min(_MOST_PASSES, _MOST_CARRIED // max(1, in_one_pass)))
    carried: set[int] = set()
    kept_of: dict[int, list[list[int]]] = {}
    for part in units:
        kept = kept_of[id(part)] = _keep_passes(part, most, found)
        carried.update(part.buffers, *kept)
    found.entries = sorted(carried)
    found.number_of = number_of = {entry: number for number, entry in enumerate(found.entries)}
    found.kept_passes = {
        key: [[number_of[entry] for entry in own] for own in kept] for key, kept in kept_of.items()
    }
    return found


def _keep_passes(part: Part, most: int, found: ChosenParts) -> list[list[int]]:
    """The first and the last passes of an operation; the others are noted as left out."""
    if len(part.passes) <= most:
        return part.passes
    first, last = (most + 1) // 2, len(part.passes) - most // 2
    left = part.passes[first:last]
    found.left_out[id(part)] = [entry for own in left for entry in own]
    found.passes_left_out[id(part)] = len(left)
    return part.passes[:first] + part.passes[last:]


def _open(root: Part, found: ChosenParts, always: int) -> list[Part]:
    """The parts that are carried. Boxes are opened level by level, and sealed if they hold too
    many parts; those around the entry `always` are opened in any case.
    """
    must = {id(root)} if always < 0 else _boxes_around_entry(root, always)
    shown, level = [root], [root]
    while level:
        below: list[Part] = []
        for box in level:
            is_too_many = len(shown) + len(below) + len(box.children) > _MOST_PARTS
            if is_too_many and id(box) not in must:
                _seal(box, found)
            else:
                below += box.children
        shown += below
        level = [part for part in below if part.children]
    return shown


def _boxes_around_entry(root: Part, entry: int) -> set[int]:
    """The boxes around the operation of an entry, by `id`, and the outermost box."""
    found = {id(root)}
    for part in _parts_under(root):
        if any(entry in own for own in part.passes):
            while part.above is not None:
                part = part.above
                found.add(id(part))
    return found


def _seal(box: Part, found: ChosenParts) -> None:
    units = [part for part in _parts_under(box) if part.kind == "operation"]
    found.sealed.add(id(box))
    found.left_out[id(box)] = [
        entry for part in units for own in (*part.passes, part.buffers) for entry in own
    ]
    found.passes_left_out[id(box)] = sum(len(part.passes) for part in units)


def _parts_under(box: Part) -> Iterator[Part]:
    pending = list(box.children)
    while pending:
        part = pending.pop()
        yield part
        pending += part.children
