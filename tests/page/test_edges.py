"""Arguments by name, parameters with shapes, and edges that tell what goes along them."""

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model
from torchlens._history.argument_words import argument_words
from torchlens._page.page import explore


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3, 2, 1, groups=8, bias=False)
        self.wide = nn.Conv2d(32, 8, (1, 3))
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        x = self.pool(self.wide(self.conv(x)))
        x = torch.cat([x, x * 2.5], dim=1).flatten(2).softmax(-1)
        x = x.view(2, 2, 2, -1).permute(0, 2, 1, 3).mean((1, 2), keepdim=True)
        return nn.functional.dropout(x[:, 0], 0.3)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("conv2d_1", "kernel 3×3, stride 2, padding 1, groups 8"),
        ("conv2d_2", "kernel 1×3"),
        ("maxpool2d_1", "kernel 3, stride 2, padding 1"),
        ("mul_1", "2.5"),
        ("cat_1", "dim 1"),
        ("flatten_1", "start dim 2"),
        ("softmax_1", "dim −1"),
        ("view_1", "size 2×2×2×−1"),
        ("permute_1", "dims (0, 2, 1, 3)"),
        ("mean_1", "dim (1, 2), keepdim"),
        ("getitem_1", "(:, 0)"),
        ("dropout_1", "p 0.3, train"),
    ],
)
def test_arguments_are_told_by_name_and_defaults_left_out(label, text):
    history = tl.log_forward_pass(Calls(), torch.rand(2, 8, 16, 16))
    entry = history[label]
    found = argument_words(history._log.recording, history._log.row(entry._entry))
    assert found == text


def test_arrays_among_the_arguments_are_shown(tmp_path):
    model = Model(lambda self, x: x[np.array([0, 1])] * np.float32(2))
    history = tl.log_forward_pass(model, torch.rand(3))
    explore(history, tmp_path / "page.html")
    assert "getitem" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_panel_and_nodes_show_arguments_and_parameters(visit, tmp_path):
    explore(tl.log_forward_pass(Calls(), torch.rand(2, 8, 16, 16)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    assert "stride" not in tab.node("conv").text_content()
    tab.click("conv")
    panel = tab.page.locator("#panel").text_content()
    assert "kernel 3×3, stride 2, padding 1, groups 8" in panel
    assert "conv.weight 32×1×3×3" in panel
    tab.page.locator("#options summary").click()
    tab.page.get_by_label("Arguments on nodes").check()
    tab.page.get_by_label("Parameters on nodes").check()
    text = tab.node("wide").text_content()
    assert "kernel 1×3" in text
    assert "weight  8×32×1×3" in text
    assert "bias  (8,)" in text
    assert tab.run("""(() => {
      const nodes = [...torchlens.scene.nodes.values()];
      const apart = (a, b) => a.y + a.h <= b.y || b.y + b.h <= a.y || a.x + a.w <= b.x || b.x + b.w <= a.x;
      return nodes.every(a => nodes.every(b => a === b || apart(a, b)));
    })()""")
    tab.until("location.hash.includes('x=args,params')")
    again = visit(tmp_path / "page.html", tab.run("location.hash"))
    assert "kernel 1×3" in again.node("wide").text_content()


def test_shapes_on_edges(visit):
    tab = visit("resnet18")
    tab.page.locator("#options summary").click()
    tab.page.get_by_label("Shapes on edges").check()
    shapes = tab.run("[...document.querySelectorAll('.edge-shape')].map(t => t.textContent)")
    assert shapes[:2] == ["1×3×64×64", "1×16×32×32"]
    assert len(shapes) == tab.run("torchlens.shown()") - 1


def click_middle(tab, edge: str) -> None:
    """Clicks the middle of the first edge of which something is true."""
    at = tab.run(f"""(() => {{
      const k = torchlens.scene.edges.findIndex(e => {edge});
      const line = document.querySelector(`[data-edge="${{k}}"]`), m = line.getScreenCTM();
      const p = line.getPointAtLength(line.getTotalLength() / 2);
      return [m.a * p.x + m.e, m.d * p.y + m.f];
    }})()""")
    tab.page.mouse.click(*at)


@pytest.mark.parametrize(
    ("model", "opened", "title", "tensor"),
    [
        ("recurrent", [], "cell → cell", "4×32  float32, 512 B"),
        ("recurrent", ["cell"], "cell → cell", "4×32  float32, 512 B"),
        ("plain_loop", [], "loop of 3 → loop of 3", "4×8  float32, 128 B"),
        ("plain_loop", ["loop of 3"], "add_1_3 → fc", "4×8  float32, 128 B"),
    ],
)
def test_a_loop_edge_can_be_clicked_like_any_other(visit, model, opened, title, tensor):
    tab = visit(model)
    for name in opened:
        tab.run(f"torchlens.toggle({tab.find(name)})")
    click_middle(tab, "e.kind === 'loop'")
    panel = tab.page.locator("#panel")
    assert panel.locator("h2").text_content() == title
    assert "loop edge, 1 tensor" in panel.text_content()
    assert tensor in panel.text_content()
    assert tab.run("document.querySelectorAll('.edge.way').length") == 1


def test_a_clicked_edge_tells_which_tensors_go_where(visit):
    tab = visit("resnet18")
    ends = [tab.find("layer1"), tab.find("layer2")]
    click_middle(tab, f"e.ends.some(({{s, t}}) => s === {ends[0]} && t === {ends[1]})")
    panel = tab.page.locator("#panel")
    assert panel.locator("h2").text_content() == "layer1 → layer2"
    assert "1×16×16×16  float32, 16.0 KB" in panel.text_content()
    buttons = panel.locator(".links button").all_text_contents()
    assert buttons[0].startswith("relu_")
    assert {name.rsplit("_", 2)[0] for name in buttons[1:]} == {"conv2d"}
    assert len(buttons) == 3  # the block's first convolution and that beside it
    assert tab.run("document.querySelectorAll('.edge.way').length") == 1
    panel.locator(".links button").nth(1).click()
    assert tab.page.locator("#panel h2").text_content() == "layer2.0.downsample.0"
    tab.page.keyboard.press("Escape")
    assert tab.run("document.querySelectorAll('.edge.way').length") == 0
