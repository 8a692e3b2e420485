"""On which side of its frame a title goes: where no edge runs through it.

Graphviz leads edges around nodes, not around titles. Where a title stands does not change the
layout, so the layout can be made first.
"""

from dataclasses import replace

import numpy as np

from torchlens._draw.layout import Frame, Layout
from torchlens._draw.scene import Scene

_APART = 2.0  # points between a title and an edge


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
