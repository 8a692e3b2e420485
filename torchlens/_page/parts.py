"""The parts of an outline: operations and boxes, the links between them, and which of them a page
carries.

The page of a long log carries what can be read of it. Boxes are opened from the outside in until
there are many thousand parts; those that are left stay closed, and know only how much is inside. Of
an operation with many passes the first and the last ones are carried. Numbers are always those of
all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_OPERATIONS = 100_000  # a log of so many is carried whole
_MOST_PARTS = 8_000
_MOST_CARRIED = 16_000
_MOST_PASSES = 1_000


@dataclass(slots=True, eq=False)
class Part:
    """One operation or one box of the outline.

    `kind` is 'operation', 'module', 'loop', 'repeat' (identical parts), 'step' (one of them),
    'span', 'range' or 'constants'. Parts are in the order in which they first ran. `passes` has the
    entries of each pass of an operation; `buffers` are entries that live in it. `num_passes` counts
    all, over all passes of what is around it; `num_each` says how many a loop has in each of those,
    if they are several and agree, else 0.
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
    """An edge between two parts without parts inside. `around` is what it goes round to the next
    pass of, if it does.
    """

    source: Part
    target: Part
    around: Part | None


class Outline(NamedTuple):
    """The outermost box, and every edge once."""

    root: Part
    links: list[Link]


@dataclass(frozen=True, slots=True)
class FailedCall:
    """The operation that raised, as one more entry: in which module call it ran and what it
    read.
    """

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


def boxes_in(root: Part) -> list[Part]:
    """All parts that have parts inside, the outermost first."""
    found, pending = [], [root]
    while pending:
        box = pending.pop()
        if box.children:
            found.append(box)
            pending += box.children
    return found


# -- what a page carries
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Selection:
    """Which entries are carried, and what is left out of each part, by its `id`.

    `sealed` parts have more inside than the page can open. `left_out` has entries.
    """

    num_entries: int
    entries: Sequence[int] = ()
    number_of: dict[int, int] | None = None  # None: all are carried, by their own numbers
    sealed: set[int] = field(default_factory=set)
    left_out: dict[int, list[int]] = field(default_factory=dict)
    passes_left_out: dict[int, int] = field(default_factory=dict)
    kept_passes: dict[int, list[list[int]]] = field(default_factory=dict)  # in the page's numbers

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


def select(root: Part, num_entries: int, num_operations: int, always: int = -1) -> Selection:
    """Chooses what is carried. `always` is an entry that must be."""
    if num_operations <= MOST_OPERATIONS:
        return Selection(num_entries, range(num_entries))
    found = Selection(num_entries, number_of={})
    shown = _open(root, found, always)
    units = [part for part in shown if part.kind == "operation"]
    most = max(
        2, min(_MOST_PASSES, _MOST_CARRIED // max(1, sum(len(part.passes[0]) for part in units)))
    )
    kept_of: dict[int, list[list[int]]] = {}
    for part in units:
        kept, left = part.passes, []
        if len(kept) > most:
            first = (most + 1) // 2
            left = kept[first : len(kept) - most // 2]
            kept = kept[:first] + kept[len(kept) - most // 2 :]
            found.left_out[id(part)] = [entry for own in left for entry in own]
            found.passes_left_out[id(part)] = len(left)
        kept_of[id(part)] = kept
    carried = sorted(
        {entry for kept in kept_of.values() for own in kept for entry in own}
        | {e for part in units for e in part.buffers}
    )
    found.entries = carried
    found.number_of = {entry: number for number, entry in enumerate(carried)}
    found.kept_passes = {
        key: [[found.number_of[entry] for entry in own] for own in kept]
        for key, kept in kept_of.items()
    }
    return found


def _open(root: Part, found: Selection, always: int) -> list[Part]:
    """The parts that are carried. Boxes are opened level by level; those that would be too many are
    sealed.
    """
    must: set[int] = set()
    for part in _parts_under(root):
        if (
            part.passes
            and part.passes[-1][-1] >= always >= 0
            and any(always in own for own in part.passes)
        ):
            while part.above is not None:
                part = part.above
                must.add(id(part))
    shown, level = [root], [root]
    while level:
        below: list[Part] = []
        for box in level:
            if (
                id(box) not in must
                and len(shown) + len(below) + len(box.children) > _MOST_PARTS
                and box is not root
            ):
                _seal(box, found)
            else:
                below += box.children
        shown += below
        level = [part for part in below if part.children]
    return shown


def _seal(box: Part, found: Selection) -> None:
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
