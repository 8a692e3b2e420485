"""Overlays of what a profile and a backward pass told."""

import torch

import torchlens as tl
from tests.networks import MLP
from torchlens._history.overlay import Overlay
from torchlens._page.page import explore
from torchlens._page.page_data import page_data


def test_an_overlay_shows_its_unit_and_what_was_measured_of_a_module(visit, tmp_path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    values = Overlay(
        {"": 0.01, "fc1": 0.002, "fc2": 0.004},
        title="time",
        unit="seconds",
        is_sum=True,
        own={"": 0.003},
    )
    explore(history, tmp_path / "page.html", overlays={"forward": values})
    tab = visit(tmp_path / "page.html")
    tab.page.locator("#overlay").select_option("forward")
    legend = tab.page.locator("#legend").text_content()
    assert legend == "forward, sum of what is inside2 ms4 ms"
    assert "4 ms" in tab.node("fc2").text_content()
    tab.click("fc2")
    assert "forward4 ms" in tab.page.locator("#panel").text_content()


def test_a_logged_backward_pass_can_be_coloured_by(visit, tmp_path):
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    explore(history, tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    for name in ("backward time", "gradient norm"):
        tab.page.locator("#overlay").select_option(name)
        assert tab.page.locator("#legend").text_content().startswith(name)
    tab.click("fc1")
    assert "Backward" in tab.page.locator("#panel").text_content()


def test_without_a_backward_pass_there_is_nothing_of_it(visit, tmp_path):
    explore(tl.get_model_metadata(MLP(), torch.rand(2, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    names = tab.run("[...document.getElementById('overlay').options].map(o => o.value)")
    assert names == ["", "time", "memory", "FLOPs"]


FILLS = """[...document.querySelectorAll('.node')].map(g => [torchlens.title(g.dataset.id),
  getComputedStyle(g.querySelector('rect.body')).fill, getComputedStyle(g.querySelector('.bar-fill')).fill])"""


def lightness(colour: str) -> float:
    return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_darkest_is_most_the_whole_node_takes_the_colour_and_nothing_moves(visit, tmp_path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    values = {layer.layer_label: float(number) for number, layer in enumerate(history)}
    explore(history, tmp_path / "page.html", overlays={"number": values})
    tab = visit(tmp_path / "page.html")
    places = "[...torchlens.scene.nodes.values()].map(n => [n.id, n.x, n.y, n.w, n.h])"
    before, view = tab.run(places), tab.run("({...torchlens.state.view})")
    tab.page.locator("#overlay").select_option("number")
    assert tab.run(places) == before
    assert tab.run("({...torchlens.state.view})") == view
    found = tab.run(FILLS)
    assert all(body == bar for _, body, bar in found)
    shades = [lightness(body) for _, body, _ in found]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades) > 3


def test_scale_is_linear_or_logarithmic_and_per_operation_or_total(visit, tmp_path):
    history = tl.get_model_metadata(
        torch.nn.Sequential(
            torch.nn.Linear(2, 2), torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(300)])
        ),
        torch.rand(1, 2),
    )
    explore(history, tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    tab.run("torchlens.openTo(1)")
    tab.page.locator("#overlay").select_option("memory")
    shade = "getComputedStyle(document.querySelector('[data-id=\"%d\"] rect.body')).fill"
    first = shade % tab.find("0")
    assert (
        tab.page.locator("#legend")
        .text_content()
        .startswith("memory, sum of what is inside, logarithmic")
    )
    tab.page.locator("#options summary").click()
    tab.page.get_by_label("Scale", exact=True).select_option("linear")
    assert "logarithmic" not in tab.page.locator("#legend").text_content()
    faint = tab.run(first)
    tab.page.get_by_label("Modules by").select_option("operation")
    assert tab.page.locator("#legend").text_content().startswith("memory, per operation")
    assert tab.run(first) != faint  # as large as any operation, which 300 of them together hid
    folded = tab.page.locator('.node[aria-expanded="false"]')
    assert "8 B / op" in folded.text_content()  # the number that gives the colour
    tab.until("location.hash.includes('c=linear,operation')")


class Decides(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        y = x / 0.0
        return (y - y).relu()


def test_conditions_and_nan_are_marked(visit, tmp_path):
    explore(tl.log_forward_pass(Decides(), torch.ones(3)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    assert tab.page.locator("text.if").all_text_contents() == ["IF"]
    read = tab.page.locator(".is-read")
    assert [node.locator("text").all_text_contents() for node in read.all()] == [
        ["gt_1_2", "gt is True", "scalar"]
    ]
    assert "read by an if" in tab.page.locator("#legend").text_content()
    marked = tab.run(
        "[...document.querySelectorAll('.bad-badge')].map(b => [b.parentNode.dataset.id, "
        "b.children[1].textContent])"
    )
    found = {tab.run(f"torchlens.title({number})").split("_")[0]: text for number, text in marked}
    assert found["truediv"] == "∞"
    assert found["sub"] == found["relu"] == "NaN"
    assert "mul" not in found


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return self.experts[1](x) + self.experts[2](x)


def test_what_did_not_run_is_told_and_the_call_stack_has_its_source(visit, tmp_path):
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = Experts()

        def forward(self, x):
            return self.moe(x).relu()

    explore(tl.log_forward_pass(Outer(), torch.ones(1, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    tab.run(f"torchlens.select({tab.find('moe')})")
    assert tab.page.locator("#panel .idle span").all_text_contents() == [
        "moe.experts.0",
        "moe.experts.3",
    ]
    tab.run("torchlens.openTo(2)")
    ghosts = tab.page.locator(".ghost")
    assert [ghost.locator("text").all_text_contents() for ghost in ghosts.all()] == [
        ["experts.0", "Linear · did not run"],
        ["experts.3", "Linear · did not run"],
    ]
    moe = tab.run(f"torchlens.scene.nodes.get({tab.find('moe')})")
    nodes = tab.run("[...torchlens.scene.nodes.values()].filter(n => !n.isBox)")
    for ghost in tab.run("torchlens.scene.idle"):
        assert moe["x"] <= ghost["x"]
        assert ghost["x"] + ghost["w"] <= moe["x"] + moe["w"]
        assert ghost["y"] + ghost["h"] <= moe["y"] + moe["h"]
        for node in nodes:
            assert (
                ghost["y"] >= node["y"] + node["h"]
                or node["y"] >= ghost["y"] + ghost["h"]
                or node["x"] >= ghost["x"] + ghost["w"]
                or ghost["x"] >= node["x"] + node["w"]
            )
    tab.run(f"torchlens.select({tab.find('moe.experts.1')})")
    codes = tab.page.locator("#panel code").all_text_contents()
    lines = [code.partition(")")[0] for code in codes if code.startswith("return ")]
    assert lines == ["return self.experts[1](x", "return self.moe(x"]
    assert "Called from" in tab.page.locator("#panel").text_content()


def test_a_module_whose_parameters_are_read_is_not_said_to_be_idle(tmp_path):
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.rand(1, 3, 8)
    page = explore(tl.log_forward_pass(attention, [x, x, x]), None)
    assert '"idle":[]' in page.html


def test_what_only_holds_others_is_not_said_to_be_idle_nor_is_one_whose_buffer_is_read():
    class Holding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            rows = [torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)) for _ in range(2)]
            self.rows, self.table, self.spare = (
                torch.nn.ModuleList(rows),
                torch.nn.BatchNorm1d(4),
                torch.nn.ReLU(),
            )

        def forward(self, x):
            for row in self.rows:
                x = row[1](row[0](x))
            return x + self.table.running_mean

    data = page_data(tl.log_forward_pass(Holding(), torch.ones(1, 4)), {}, None)
    assert [[data["strings"][name] for name in names] for _, names, _ in data["idle"]] == [
        ["spare"]
    ]
