"""Reads Graphviz's layout, and moves the titles of frames so that no edge runs through them.

Graphviz routes edges around nodes, not around titles. Titles do not change the layout, so the
layout can be made first.
"""

import json
from dataclasses import dataclass, replace

import numpy as np

from torchlens._draw.render import render
from torchlens._draw.scene import Scene

_STEPS = 12  # points along each piece of an edge
_APART = 2.0  # points between a title and an edge


@dataclass(frozen=True, slots=True)
class Frame:
    """A box as it will be drawn, in points: its sides, and the centre and size of its title."""

    left: float
    right: float
    title_x: float
    title_y: float
    title_width: float
    title_height: float


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a picture: `frames` by the number of the box, and `points` along the edges."""

    width: float
    height: float
    frames: dict[int, Frame]
    points: np.ndarray


def lay_out(source: str) -> Layout:
    """Lays out a source; no picture is made."""
    found = json.loads(render(source, "json0"))
    left, bottom, right, top = map(float, found["bb"].split(","))
    objects = [
        thing
        for thing in found.get("objects", ())
        if thing["name"].startswith("cluster_") and "lp" in thing
    ]
    frames = {int(thing["name"].removeprefix("cluster_")): _frame(thing) for thing in objects}
    ways = [
        edge["pos"]
        for edge in found.get("edges", ())
        if edge.get("style") != "invis" and "pos" in edge
    ]
    points = np.concatenate([_points_along(way) for way in ways]) if ways else np.zeros((0, 2))
    return Layout(right - left, top - bottom, frames, points)


def _frame(thing: dict[str, str]) -> Frame:
    left, _, right, _ = map(float, thing["bb"].split(","))
    x, y = map(float, thing["lp"].split(","))
    return Frame(left, right, x, y, float(thing["lwidth"]) * 72, float(thing["lheight"]) * 72)


def _points_along(way: str) -> np.ndarray:
    """Graphviz writes `e,x,y` or `s,x,y` for a tip, then the points of cubic curves, each beginning
    where one ends.
    """
    t = np.linspace(0, 1, _STEPS)[:, None, None]
    u = 1 - t
    pieces = []
    for spline in way.split(";"):
        given = np.array(
            [[float(x) for x in word.split(",")] for word in spline.split() if word[0] not in "es"]
        )
        a, b, c, d = (given[k : len(given) - 3 + k : 3] for k in range(4))
        pieces.append((u**3 * a + 3 * u * u * t * b + 3 * u * t * t * c + t**3 * d).reshape(-1, 2))
    return np.concatenate(pieces)


# -- titles
# --------------------------------------------------------------------------------------------------


def clear_of_edges(scene: Scene, layout: Layout) -> tuple[Scene, list[int]]:
    """The scene with titles that an edge runs through at the right of their frames, or in the
    middle, if that is free.

    Also the numbers of the boxes of which no side is free.
    """
    boxes, crowded = list(scene.boxes), []
    for number, frame in layout.frames.items():
        if "labeljust" in boxes[number].attributes:
            continue
        side = _free_side(frame, layout.points)
        if side is None:
            crowded.append(number)
        elif side != "l":
            boxes[number] = replace(boxes[number], title_side=side)
    return replace(scene, boxes=boxes), crowded


def with_room(scene: Scene, layout: Layout, crowded: list[int]) -> Scene:
    """The scene, to be laid out again, with more room for titles beside the first node of some
    boxes.
    """
    boxes = [replace(box, title_side="l") for box in scene.boxes]
    for number in crowded:
        boxes[number] = replace(
            boxes[number],
            title_room=boxes[number].title_room + layout.frames[number].title_width / 2,
        )
    return replace(scene, boxes=boxes)


def _free_side(frame: Frame, points: np.ndarray) -> str | None:
    """'l', 'r' or 'c': the first of them at which no edge meets the title."""
    is_beside = np.abs(points[:, 1] - frame.title_y) < frame.title_height / 2 + _APART
    met = points[is_beside & (points[:, 0] > frame.left) & (points[:, 0] < frame.right), 0]
    middle = (frame.left + frame.right) / 2
    for side, x in (("l", frame.title_x), ("r", 2 * middle - frame.title_x), ("c", middle)):
        if not np.any(np.abs(met - x) < frame.title_width / 2 + _APART):
            return side
    return None
