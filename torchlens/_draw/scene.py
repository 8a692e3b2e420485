"""What to draw, independent of how: plain nodes, edges and boxes."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class NodeShape(Enum):
    """The outlines of nodes, by what a node is."""

    OPERATION = "oval"
    MODULE_OUTPUT = "box"  # the output of a module without modules inside
    COLLAPSED = "box3d"  # more than one operation: a module, or a run of operations
    FAILURE = "failure"


class EdgeKind(Enum):
    """The kinds of edges."""

    FORWARD = "forward"  # a value that is read
    GRADIENT = "gradient"
    FAILURE = "failure"  # a value that the operation that raised was given
    ORDER_OF_FAILURE = "order of failure"  # from the last operation before the model raised


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `box` is the number of the innermost box around it, -1 if there is none."""

    name: str
    title: str
    lines: tuple[str, ...]
    shape: NodeShape
    fill: str
    box: int = -1
    is_dashed: bool = False
    has_light_text: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge from the node `source` to the node `target` (their numbers). `is_loop`: it closes a
    loop.
    """

    source: int
    target: int
    lines: tuple[str, ...] = ()
    kind: EdgeKind = EdgeKind.FORWARD
    is_loop: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Box:
    """One module around nodes and other boxes. `parent` is the number of the box around it, -1 if
    there is none. The title is at the left ('l'), at the right ('r') or in the middle ('c');
    `title_room` points are kept free for it.
    """

    title: str
    subtitle: str
    parent: int = -1
    depth: int = 0
    is_stack: bool = False  # shows several identical modules
    title_side: str = "l"
    title_room: float = 0.0
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Legend:
    """What the colours mean: a title, and (colour, text) from low to high."""

    title: str
    steps: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything in a drawing. `simplification` says what was drawn as one to keep it readable,
    `notes` what else.
    """

    title: str
    lines: tuple[str, ...]
    simplification: str | None
    notes: tuple[str, ...]
    direction: str
    nodes: list[Node]
    edges: list[Edge]
    boxes: list[Box]
    legend: Legend | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
