"""An encoder and its decoder stand side by side."""

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._page.page import explore


class Block(nn.Module):
    def __init__(self, reads_memory: bool):
        super().__init__()
        self.self_attn, self.ff = (
            nn.Linear(4, 4),
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        )
        self.cross_attn, self.reads_memory = nn.Linear(4, 4), reads_memory

    def forward(self, x, memory=None):
        x = x + self.self_attn(x)
        if self.reads_memory:
            x = x + self.cross_attn(memory).mean(0, keepdim=True)
        return x + self.ff(x)


class Stack(nn.Module):
    def __init__(self, reads_memory: bool):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Block(reads_memory) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x, memory=None):
        x = self.embed(x)
        states = []
        for layer in self.layers:
            x = layer(x, memory)
            states.append({"keys": x * 2, "values": x * 3})
        return self.norm(x), states


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Stack(False), Stack(True)

    def forward(self, source, target):
        memory, _ = self.encoder(source)
        result, states = self.decoder(target, memory)
        return {
            "result": result,
            "cache": {"own": states, "cross": [{"keys": memory * number} for number in range(4)]},
        }


@pytest.fixture
def page(visit, tmp_path):
    history = tl.log_forward_pass(Translator(), [torch.tensor([1, 2]), torch.tensor([3])])
    explore(history, tmp_path / "page.html")
    return visit(tmp_path / "page.html")


def test_encoder_and_decoder_open_as_two_columns(page):
    encoder, decoder = (
        page.run(f"torchlens.scene.nodes.get({page.find(name)})") for name in ("encoder", "decoder")
    )
    assert encoder["isBox"]
    assert decoder["isBox"]
    assert encoder["y"] == decoder["y"]
    assert encoder["x"] + encoder["w"] < decoder["x"]
    assert page.overlaps() == []


def test_the_way_between_the_columns_crosses_neither(page):
    encoder, decoder = page.find("encoder"), page.find("decoder")
    lane = page.run(f"""(() => {{
      const [a, b] = [{encoder}, {decoder}].map(i => torchlens.scene.nodes.get(i));
      const within = (i, box) => {{ while (i > box) i = torchlens.D.parts.parent[i]; return i === box; }};
      const pointsOf = e => [...e.d.matchAll(/(-?[\\d.]+) (-?[\\d.]+)(?=[A-Z]|$)/g)].map(m => [+m[1], +m[2]]);
      const isBetween = e => e.ends.some(p => within(p.s, {encoder}) && within(p.t, {decoder}));
      const points = torchlens.scene.edges.filter(isBetween).map(pointsOf).find(p => Math.abs(p[0][1] - a.y - a.h) < 1);
      const inside = (p, n) => p[0] > n.x && p[0] < n.x + n.w && p[1] > n.y + 30 && p[1] < n.y + n.h - 1;
      return points.filter(p => inside(p, a) || inside(p, b)).length;
    }})()""")
    assert lane == 0


def test_many_outputs_of_one_name_are_one_node(page):
    assert [title for title in page.titles() if title.startswith("output")] == [
        "output.result",
        "output.cache",
    ]
    page.click("output.cache")
    assert len([title for title in page.titles() if title.startswith("output.cache.")]) >= 2


def test_a_closed_column_stands_below_again(page):
    for name in ("encoder", "decoder"):
        page.run(f"torchlens.toggle({page.find(name)})")
    encoder, decoder = (
        page.run(f"torchlens.scene.nodes.get({page.find(name)})") for name in ("encoder", "decoder")
    )
    assert encoder["y"] < decoder["y"]


def test_self_and_cross_attention_have_titles_of_their_own(page):
    page.run(f"torchlens.toggle({page.find('decoder.layers.0')})")
    shown = page.run("[...document.querySelectorAll('.node text.title')].map(t => t.textContent)")
    assert "decoder.layers.0.self_attn" in shown
    assert "decoder.layers.0.cross_attn" in shown


def test_stages_after_each_other_are_no_columns(visit):
    tab = visit("resnet18")
    for name in ("layer1", "layer2"):
        tab.run(f"torchlens.toggle({tab.find(name)})")
    first, second = (
        tab.run(f"torchlens.scene.nodes.get({tab.find(name)})") for name in ("layer1", "layer2")
    )
    assert first["y"] + first["h"] < second["y"]


class Shifted(nn.Module):
    """Makes the decoder's input of the encoder's, in some steps, as BART does; its cache is the
    states alone.
    """

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Stack(False), Stack(True)

    def forward(self, source):
        target = (source.roll(1) + 1).clamp(max=9)
        memory, _ = self.encoder(source)
        result, states = self.decoder(target, memory)
        return {"result": result, "cache": states}


def test_columns_begin_together_where_the_second_reads_what_takes_rows_of_its_own(visit, tmp_path):
    model = Shifted()
    model.decoder.layers.append(Block(True))
    explore(tl.log_forward_pass(model, torch.tensor([1, 2])), tmp_path / "page.html")
    page = visit(tmp_path / "page.html")
    encoder, decoder = (
        page.run(f"torchlens.scene.nodes.get({page.find(name)})") for name in ("encoder", "decoder")
    )
    assert encoder["isBox"]
    assert decoder["isBox"]
    assert encoder["y"] == decoder["y"]
    # Three steps of keys and values are one output, by its name.
    assert "output.cache" in page.titles()


class WithLoss(nn.Module):
    """Makes the decoder's input outside of the module that holds both columns, in many steps, as
    BART does with labels.
    """

    def __init__(self):
        super().__init__()
        self.model, self.head = Translator(), nn.Linear(4, 10)

    def forward(self, source, labels):
        target = labels
        for shift in (1, 2, 3):
            target = (target.roll(shift) + shift).clamp(max=9).abs()
        result = self.head(self.model(source, target)["result"])
        return {"loss": nn.functional.cross_entropy(result, labels), "logits": result}


def test_columns_open_inside_a_module_that_holds_nearly_everything(visit, tmp_path):
    history = tl.log_forward_pass(WithLoss(), [torch.tensor([1, 2]), torch.tensor([3])])
    explore(history, tmp_path / "page.html")
    page = visit(tmp_path / "page.html")
    encoder, decoder = (
        page.run(f"torchlens.scene.nodes.get({page.find(name)})")
        for name in ("model.encoder", "model.decoder")
    )
    assert encoder["isBox"]
    assert decoder["isBox"]
    assert encoder["y"] == decoder["y"]


def test_folded_outputs_are_not_called_operations(page):
    text = page.run(
        f"document.querySelector('[data-id=\"{page.find('output.cache')}\"]').textContent"
    )
    assert "outputs" in text
    assert " ops" not in text
