"""Converts a scene to Graphviz source."""

import html
import re
from typing import Any

from torchlens._draw.colors import FAILURE_FILL, GRADIENT_COLOR
from torchlens._draw.scene import Box, Edge, EdgeKind, Legend, Node, NodeShape, Scene

_RANKDIR = {"bottomup": "BT", "topdown": "TB", "leftright": "LR"}
_FONT = "Helvetica,Arial,sans-serif"
_BOX_FILLS = ("#F7F9FC", "#EEF2F8")  # in turn, the deeper the modules are nested

# Above these numbers of nodes, the layout is less polished, to take less time (Graphviz 14).
_MANY_NODES = 300
_TOO_MANY_FOR_LABELS = 800

_BOX_MARGIN = 16  # points

_NODE = {
    "fontname": _FONT,
    "fontsize": 12,
    "style": "filled",
    "margin": "0.14,0.06",
    "color": "#3C3C3C",
}
_EDGE = {"fontname": _FONT, "fontsize": 10, "color": "#3C3C3C", "arrowsize": 0.8}

_KEYWORDS = frozenset({"digraph", "edge", "graph", "node", "strict", "subgraph"})

_SHAPES: dict[NodeShape, dict[str, Any]] = {
    NodeShape.OPERATION: {"shape": "oval"},
    NodeShape.MODULE_OUTPUT: {"shape": "box"},
    NodeShape.COLLAPSED: {"shape": "box3d"},
    NodeShape.FAILURE: {"shape": "box", "style": "filled,rounded", "color": FAILURE_FILL},
}


def dot_source(scene: Scene) -> str:
    """The source that `dot` reads; equal for equal scenes."""
    names = _unique_names(scene.nodes)
    has_labels = len(scene.nodes) <= _TOO_MANY_FOR_LABELS
    lines = [
        "digraph {",
        f"  graph {_attributes({**_graph_attributes(scene), **scene.attributes})}",
        f"  node {_attributes(_NODE)}",
        f"  edge {_attributes(_EDGE)}",
    ]
    lines += _box_lines(scene, names, -1, "  ")
    lines += [f"  {_edge(edge, names, has_labels)}" for edge in scene.edges]
    lines.append("}")
    return "\n".join(lines) + "\n"


def _graph_attributes(scene: Scene) -> dict[str, Any]:
    found: dict[str, Any] = {
        "label": _caption(scene),
        "labelloc": "t",
        "labeljust": "l",
        "rankdir": _RANKDIR[scene.direction],
        "fontname": _FONT,
        "fontsize": 13,
        "ranksep": 0.35,
        "nodesep": 0.3,
    }
    if len(scene.nodes) > _MANY_NODES or len(scene.edges) > 2 * _MANY_NODES:
        found |= {"nslimit": 1, "nslimit1": 1, "mclimit": 0.1}
    return found


def _caption(scene: Scene) -> str:
    notes = [note for note in (scene.simplification, *scene.notes) if note is not None]
    lines = [
        f"<B>{_text(scene.title)}</B>",
        *map(_text, scene.lines),
        *(f"<I>{_text(note)}</I>" for note in notes),
    ]
    caption = '<BR ALIGN="LEFT"/>'.join(lines) + '<BR ALIGN="LEFT"/>'
    if scene.legend is None:
        return f"<{caption}>"
    rows = (
        f'<TR><TD ALIGN="LEFT" BALIGN="LEFT">{caption}</TD></TR>'
        f'<TR><TD ALIGN="LEFT">{_legend(scene.legend)}</TD></TR>'
    )
    return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="2">{rows}</TABLE>>'


def _legend(legend: Legend) -> str:
    colors = "".join(
        f'<TD BGCOLOR="{color}" WIDTH="60" HEIGHT="12"></TD>' for color, _ in legend.steps
    )
    texts = "".join(f'<TD BORDER="0">{_text(text)}</TD>' for _, text in legend.steps)
    title = (
        f'<TD BORDER="0" ROWSPAN="2" ALIGN="LEFT" CELLPADDING="6"><B>{_text(legend.title)}</B></TD>'
    )
    return (
        '<TABLE BORDER="0" CELLBORDER="1" CELLSPACING="0" CELLPADDING="2" COLOR="#808080">'
        f"<TR>{title}{colors}</TR><TR>{texts}</TR></TABLE>"
    )


def _box_lines(scene: Scene, names: list[str], parent: int, indent: str) -> list[str]:
    """The nodes and boxes in a box, in order of first appearance."""
    inside = _contents(scene)
    spaces = _spaces_under_titles(scene)
    lines: list[str] = []
    pending: list[tuple[str, int, str]] = [("open", parent, indent)]
    while pending:
        what, number, space = pending.pop()
        if what == "node":
            if number in spaces:
                lines += [
                    f"{space}{line}" for line in _space(number, spaces[number], names[number])
                ]
            lines.append(f"{space}{_node(scene.nodes[number], names[number])}")
        elif what == "close":
            lines.append(f"{space}}}")
        else:
            if number >= 0:
                lines.append(f"{space}subgraph {_quoted(f'cluster_{number}')} {{")
                pending.append(("close", number, space))
                space += "  "
                lines.append(f"{space}graph {_attributes(_box_attributes(scene.boxes[number]))}")
            for inner_node, inner_box in reversed(inside.get(number, [])):
                pending.append(
                    ("node", inner_node, space) if inner_node >= 0 else ("open", inner_box, space)
                )
    return lines


def _contents(scene: Scene) -> dict[int, list[tuple[int, int]]]:
    """Box (-1: the drawing) → what is directly in it, in order: (node, -1) or (-1, box)."""
    found: dict[int, list[tuple[int, int]]] = {}
    placed: set[int] = set()
    for number, node in enumerate(scene.nodes):
        box = node.box
        found.setdefault(box, []).append((number, -1))
        while box >= 0 and box not in placed:
            placed.add(box)
            above = scene.boxes[box].parent
            found.setdefault(above, []).append((-1, box))
            box = above
    return found


def _spaces_under_titles(scene: Scene) -> dict[int, float]:
    """Node → the points to keep free to its left, so that an edge into the box passes beside the
    title, not through it.

    A title is at the left above the first node of its box, and Graphviz leads edges around nodes,
    but not around titles. In a drawing from left to right, edges pass beside titles anyway.
    """
    if scene.direction == "leftright" or len(scene.nodes) > _TOO_MANY_FOR_LABELS:
        return {}
    spaces: dict[int, float] = {}
    entered: set[int] = set()
    for number, node in enumerate(scene.nodes):
        box = node.box
        while box >= 0 and box not in entered:
            entered.add(box)
            title = _text_width(scene.boxes[box].title, (scene.boxes[box].subtitle,), 13) + 12
            half = (
                (_text_width(node.title, node.lines, 12) + 20)
                / 2
                * (1.35 if node.shape is NodeShape.OPERATION else 1)
            )
            missing = title - half - _BOX_MARGIN - 6 + scene.boxes[box].title_room
            if missing > 0:
                spaces[number] = max(missing, spaces.get(number, 0.0))
            box = scene.boxes[box].parent
    return spaces


def _text_width(title: str, lines: tuple[str, ...], fontsize: int) -> float:
    """Points, about: the first line is bold."""
    return fontsize * max(0.58 * len(title), *(0.5 * len(line) for line in lines), 0.0)


def _space(number: int, width: float, name: str) -> list[str]:
    """An invisible node on the same rank; an invisible edge keeps it at the left."""
    space = _quoted(f"space {number}")
    size = {
        "shape": "box",
        "style": "invis",
        "label": "",
        "fixedsize": True,
        "height": 0.1,
        "width": f"{width / 72:.2f}",
    }
    edge = {"style": "invis", "minlen": 0, "weight": 3}
    return [f"{space} {_attributes(size)}", f"{space} -> {_quoted(name)} {_attributes(edge)}"]


def _box_attributes(box: Box) -> dict[str, Any]:
    return {
        "label": f'<<B>{_text(box.title)}</B><BR ALIGN="LEFT"/>{_text(box.subtitle)}<BR '
        'ALIGN="LEFT"/>>',
        "labeljust": box.title_side,
        "labelloc": "t",
        "style": "filled,rounded",
        "fillcolor": _BOX_FILLS[box.depth % len(_BOX_FILLS)],
        "color": "#8A9BB5",
        "margin": _BOX_MARGIN,
        "penwidth": 3 if box.is_stack else 1.2,
        **box.attributes,
    }


def _node(node: Node, name: str) -> str:
    lines = [f"<B>{_text(node.title)}</B>", *map(_text, node.lines)]
    found: dict[str, Any] = {
        "label": f"<{'<BR/>'.join(lines)}>",
        **_SHAPES[node.shape],
        "fillcolor": node.fill,
    }
    if node.is_dashed:
        found["style"] = "filled,dashed"
    if node.has_light_text:
        found["fontcolor"] = "white"
    return f"{_quoted(name)} {_attributes({**found, **node.attributes})}"


_EDGE_STYLES: dict[EdgeKind, dict[str, Any]] = {
    EdgeKind.FORWARD: {},
    EdgeKind.GRADIENT: {"color": GRADIENT_COLOR},
    EdgeKind.FAILURE: {"color": FAILURE_FILL, "penwidth": 2, "style": "solid"},
    EdgeKind.ORDER_OF_FAILURE: {"color": FAILURE_FILL, "penwidth": 2, "style": "dotted"},
}


def _edge(edge: Edge, names: list[str], has_label: bool) -> str:
    found: dict[str, Any] = {}
    if edge.lines and has_label:
        words = [f"<B>{_text(line)}</B>" if line == "IF" else _text(line) for line in edge.lines]
        # The blank keeps the text off the line.
        found["label"] = f"<{'<BR/>'.join(f'&#160;{word}' for word in words)}>"
    # An edge that closes a loop is laid out from its end to its start, so that nodes stay in the
    # order of execution. A gradient is laid out like its forward edge, so that it moves no node.
    source, target = (edge.target, edge.source) if edge.is_loop else (edge.source, edge.target)
    if edge.is_loop != (edge.kind is EdgeKind.GRADIENT):
        found["dir"] = "back"
    found |= _EDGE_STYLES[edge.kind]
    ends = f"{_quoted(names[source])} -> {_quoted(names[target])}"
    return f"{ends} {_attributes({**found, **edge.attributes})}".rstrip()


def _unique_names(nodes: list[Node]) -> list[str]:
    """Readable names for the source; a number distinguishes nodes with equal names."""
    seen: dict[str, int] = {}
    names = []
    for node in nodes:
        seen[node.name] = seen.get(node.name, 0) + 1
        names.append(node.name if seen[node.name] == 1 else f"{node.name} #{seen[node.name]}")
    return names


def _attributes(attributes: dict[str, Any]) -> str:
    if not attributes:
        return ""
    return f"[{' '.join(f'{_word(name)}={_value(value)}' for name, value in attributes.items())}]"


def _word(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else _quoted(name)


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text.startswith("<") and text.endswith(">"):
        return text
    is_bare = (
        re.fullmatch(r"[A-Za-z_]\w*|-?(\.\d+|\d+(\.\d*)?)", text, re.ASCII)
        and text.lower() not in _KEYWORDS
    )
    return text if is_bare else _quoted(text)


def _quoted(text: str) -> str:
    escaped = text.replace('"', '\\"')
    if escaped.endswith("\\"):  # it would escape the closing quote
        escaped += " "
    return f'"{_printable(escaped)}"'


def _text(text: str) -> str:
    """Text inside an HTML-like label."""
    return html.escape(_printable(text), quote=True)


def _printable(text: str) -> str:
    """The text with `?` for characters that XML forbids."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "?", text)
