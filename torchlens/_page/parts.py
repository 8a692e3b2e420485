"""The parts of an outline: operations and boxes, and the links between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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
