"""Edges and titles keep out of each other's way, and a shape is not taken for a number of
passes.
"""

import pytest
import torch

import torchlens as tl
from tests.networks import MLP
from torchlens._draw.draw_options import DrawOptions
from torchlens._page.page import explore


def test_no_edge_runs_through_the_title_of_a_box(visit):
    for name in ("gpt2", "resnet18", "recurrent"):
        tab = visit(name)
        tab.page.keyboard.press("0")
        tab.page.keyboard.press("f")  # all of it is seen, so all of it is drawn
        crossed = tab.run("""(() => {
          const heads = [...torchlens.scene.nodes.values()].filter(n => n.isBox), found = [];
          for (const edge of torchlens.scene.edges) {
            const line = edge.el, length = line.getTotalLength();
            for (let at = 0; at <= length; at += 4) {
              const p = line.getPointAtLength(at);
              for (const b of heads) if (p.x > b.x + 1 && p.x < b.x + b.w - 1 && p.y > b.y + 1 && p.y < b.y + 25)
                found.push([torchlens.title(b.id), edge.kind]);
            }
          }
          return [heads.length, found];
        })()""")
        assert crossed[0] >= 1
        assert crossed[1] == [], name


def test_a_shape_of_one_dimension_is_told_apart_from_a_number_of_passes(visit, tmp_path):
    history = tl.log_forward_pass(MLP(), torch.rand(4))
    explore(history, tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    assert "(4,)" in tab.node("input.x").text_content()
    history.render_graph(
        vis_outpath=str(tmp_path / "graph"), vis_fileformat="svg", vis_save_only=True
    )
    drawn = next(tmp_path.glob("graph*.svg")).read_text()
    assert "(4,)" in drawn
    assert ">x4" not in drawn


def test_drawings_and_page_go_the_same_way(visit):
    assert DrawOptions().vis_direction == "topdown"
    tab = visit("resnet18")
    tops = tab.run(
        "torchlens.scene.links.map(e => [torchlens.scene.nodes.get(e.s).y, "
        "torchlens.scene.nodes.get(e.t).y])"
    )
    assert all(above < below for above, below in tops)


@pytest.mark.parametrize("size", [(1280, 800), (1920, 1080), (390, 844)])
def test_neither_legend_nor_map_covers_a_node_of_a_graph_that_fits(visit, size):
    tab = visit("resnet18", viewport={"width": size[0], "height": size[1]})
    for key in ("1", "f"):
        tab.page.keyboard.press(key)
    graph = tab.page.locator("#graph").bounding_box()
    boxes = tab.run("[...torchlens.scene.nodes.keys()].map(i => torchlens.screen(i))")
    assert len(boxes) > 5
    assert all(box["y"] + box["h"] <= graph["y"] + graph["height"] for box in boxes)
    assert tab.run("getComputedStyle(document.getElementById('map')).visibility") == "hidden"
    legend = tab.page.locator("#legend").bounding_box()  # none on a phone
    assert (legend is None) == (size[0] < 700)
    assert legend is None or legend["y"] >= graph["y"] + graph["height"]
    tab.page.keyboard.press("0")
    assert tab.run("getComputedStyle(document.getElementById('map')).visibility") == "visible"
