"""Edges and titles keep out of each other's way, and a shape is not taken for a number of passes."""

import torch

import torchlens as tl
from tests.networks import MLP
from torchlens.draw.options import DrawOptions
from torchlens.viewer import explore


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
    history.render_graph(vis_outpath=str(tmp_path / "graph"), vis_fileformat="svg", vis_save_only=True)
    drawn = next(tmp_path.glob("graph*.svg")).read_text()
    assert "(4,)" in drawn
    assert ">x4" not in drawn


def test_drawings_and_page_go_the_same_way(visit):
    assert DrawOptions().vis_direction == "topdown"
    tab = visit("resnet18")
    tops = tab.run("torchlens.scene.links.map(e => [torchlens.scene.nodes.get(e.s).y, torchlens.scene.nodes.get(e.t).y])")
    assert all(above < below for above, below in tops)
