"""Edges come down beside the titles of frames, as Graphviz itself lays them out."""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model
from tests.page.viewer_models import ResNet18
from torchlens._draw.draw_options import Direction, DrawOptions
from torchlens._draw.drawing import make_drawing
from torchlens._draw.render import is_graphviz_there, render

pytestmark = pytest.mark.skipif(
    not is_graphviz_there(), reason="there is no Graphviz on this machine"
)

Point = tuple[float, float]


def _narrow() -> tuple[nn.Module, torch.Tensor]:
    """Frames whose titles are wider than their nodes."""
    stages = {
        name: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        for name in ("first_stage_of_the_encoder", "projection_of_the_output")
    }
    return nn.Sequential(OrderedDict(stages)), torch.rand(2, 4)


def _residual() -> tuple[nn.Module, torch.Tensor]:
    return ResNet18(), torch.rand(1, 3, 64, 64)


def _points_along(position: str) -> Iterator[Point]:
    """Points along an edge: Graphviz writes `e,x,y` for its tip, then the control points of cubic
    curves.
    """
    points = [
        (float(x), float(y))
        for x, y in (word.split(",") for word in position.split() if word[0] not in "es")
    ]
    for start in range(0, len(points) - 3, 3):
        (ax, ay), (bx, by), (cx, cy), (dx, dy) = points[start : start + 4]
        for step in range(41):
            t, u = step / 40, 1 - step / 40
            a, b, c, d = u**3, 3 * u * u * t, 3 * u * t * t, t**3
            yield a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy


def _crossed_titles(source: str) -> tuple[list[str], int]:
    """The frames whose title an edge runs through, and the number of frames."""
    laid_out = json.loads(render(source, "json0"))
    frames = [thing for thing in laid_out["objects"] if thing["name"].startswith("cluster")]
    edges = [
        list(_points_along(edge["pos"]))
        for edge in laid_out["edges"]
        if edge.get("style") != "invis"
    ]
    crossed = []
    for frame in frames:
        x, y = map(float, frame["lp"].split(","))
        half_width, half_height = float(frame["lwidth"]) * 36, float(frame["lheight"]) * 36
        if any(
            abs(px - x) < half_width and abs(py - y) < half_height
            for edge in edges
            for px, py in edge
        ):
            crossed.append(frame["name"])
    return crossed, len(frames)


@pytest.mark.parametrize("make", [_narrow, _residual])
@pytest.mark.parametrize("direction", ["topdown", "bottomup"])
def test_edges_come_down_beside_the_titles_of_frames(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], direction: Direction
):
    model, x = make()
    source = make_drawing(
        tl.get_model_metadata(model.eval(), x), DrawOptions(vis_direction=direction)
    ).source
    crossed, num_frames = _crossed_titles(source)
    assert crossed == []
    assert num_frames > 1
    without_spaces = "\n".join(
        line for line in source.splitlines() if not line.strip().startswith('"space ')
    )
    assert _crossed_titles(without_spaces)[0] != []


def _cells() -> tuple[nn.Module, torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(2, 16), torch.zeros(2, 16)
        for step in range(3):
            state = self.cell(x[:, step], state)
        return self.head(state[0])

    return Model(forward, cell=nn.LSTMCell(8, 16), head=nn.Linear(16, 4)), torch.randn(2, 3, 8)


@pytest.mark.parametrize(("make", "direction"), [(_residual, "leftright"), (_cells, "topdown")])
def test_a_title_that_an_edge_would_run_through_stands_at_another_side(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], direction: Direction
):
    model, x = make()
    drawing = make_drawing(
        tl.get_model_metadata(model.eval(), x),
        DrawOptions(vis_opt="rolled", vis_direction=direction),
    )
    assert _crossed_titles(drawing.source)[0] != []
    assert b"<svg" in drawing.to_bytes("svg")
    assert _crossed_titles(drawing.source)[0] == []
