import json

import pytest
import torch
from playwright.sync_api import Page
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.page.viewer_models import LoopInLoop, ResNet18, history_of
from torchlens._page.page import explore

MODELS = ["resnet18", "gpt2", "recurrent", "plain_loop", "nested_loop", "failed"]
LARGE = ["resnet18", "gpt2", "nested_loop"]


def test_page_is_one_file_of_at_most_300_kb_beside_its_data(pages):
    text = pages["gpt2"].read_text(encoding="utf-8")
    data = text.split('type="application/json">')[1].split("</script>")[0]
    assert len(text.encode()) - len(data.encode()) <= 300 * 1024
    assert json.loads(data)["tensors"] == len(history_of("gpt2"))
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


@pytest.mark.parametrize("name", MODELS)
def test_page_opens_expands_searches_and_is_driven_without_complaint(visit, name):
    tab = visit(name)
    before = tab.run("torchlens.shown()")
    closed = tab.run(
        "[...torchlens.scene.nodes.keys()].filter(i => torchlens.D.parts.part[i] > 0 && "
        "!torchlens.state.open[i])"
    )
    for number in closed[:3]:
        tab.run(f"torchlens.toggle({number})")
    assert tab.run("torchlens.shown()") > before or not closed
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("(linear|sin|conv)")
    assert tab.run("torchlens.state.hits.length") > 0
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("Escape")
    for key in (
        "ArrowDown",
        "ArrowUp",
        "ArrowLeft",
        "ArrowRight",
        "Enter",
        "Backspace",
        "f",
        "+",
        "-",
        "?",
    ):
        tab.page.keyboard.press(key)
    assert tab.page.locator("#keys").is_visible()
    for name in ("time", "memory", ""):
        tab.run(f"document.getElementById('overlay').value = '{name}'")
        tab.run("document.getElementById('overlay').dispatchEvent(new Event('change'))")


@pytest.mark.parametrize("name", LARGE)
def test_page_opens_readable(visit, name):
    tab = visit(name)
    assert 10 <= tab.run("torchlens.shown()") <= 40
    scale = tab.run("torchlens.state.view.k")
    texts = tab.run(
        "[...document.querySelectorAll('#world text')].map(t => "
        "parseFloat(getComputedStyle(t).fontSize))"
    )
    sizes = [size * scale for size in texts]
    sizes += tab.run(
        "[...document.querySelectorAll('#bar *, #panel *, #legend *')].map(e => "
        "parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(size for size in sizes if size > 0) >= 10.9
    tops = tab.run(
        "torchlens.scene.links.map(e => [torchlens.scene.nodes.get(e.s).y, "
        "torchlens.scene.nodes.get(e.t).y])"
    )
    assert all(above < below for above, below in tops)


def test_no_two_nodes_overlap(visit):
    tab = visit("gpt2")
    for title in (
        "transformer.h.0 … 11",
        "transformer.h.0",
        "transformer.h.0.attn",
        "transformer.h.3",
        "transformer.h.3.mlp",
    ):
        tab.run(f"torchlens.toggle({tab.find(title)})")
    assert tab.overlaps() == []


# A block of the page's script takes a tenth of a microsecond or so: a million of them are a tenth
# of a second.


def test_gpt2_opens_with_little_work(visit):
    tab = visit("gpt2", is_counted=True)
    assert 0 < tab.blocks_run() < 70_000
    assert tab.run("document.querySelectorAll('*').length") < 1_000


def test_click_expands_with_little_work_at_10_000_operations(visit):
    tab = visit("nested_loop", is_counted=True)
    assert tab.run("torchlens.D.tensors") > 10_000
    assert 0 < tab.blocks_run() < 1_000_000  # to open it
    before = tab.run("torchlens.shown()")
    tab.click("sin, add 418 … 834")
    assert 0 < tab.blocks_run() < 1_000_000
    assert before < tab.run("torchlens.shown()") < before + 100
    assert tab.run("document.querySelectorAll('*').length") < 2_000


@pytest.mark.parametrize("where", [0.2, 0.5, 0.9])
def test_clicked_node_stays_under_the_cursor_and_the_others_in_order(visit, where):
    tab = visit("gpt2")
    title = "transformer.h.0 … 11"
    number = tab.find(title)
    before = tab.titles()
    box = tab.run(f"torchlens.screen({number})")
    x, y = box["x"] + where * box["w"], box["y"] + where * box["h"]
    tab.page.mouse.click(x, y)
    under = f"document.elementFromPoint({x}, {y}).closest('[data-id]')?.dataset.id"
    assert tab.run(under) == str(number)
    after = [own for own in tab.titles() if own in before]
    assert after == [own for own in before if own != title]
    tab.page.mouse.click(x, y)
    assert tab.run(under) == str(number)
    assert tab.titles() == before


def test_siblings_keep_their_places_beside_each_other(visit):
    tab = visit("gpt2")
    for title in ("transformer.h.0 … 11", "transformer.h.0", "transformer.h.0.attn"):
        tab.run(f"torchlens.toggle({tab.find(title)})")
    box = tab.find("transformer.h.0.attn")
    row = f"""[...torchlens.scene.nodes.values()].filter(n => torchlens.D.parts.parent[n.id] === {box})
      .sort((a, b) => a.y - b.y || a.x - b.x).map(n => n.id)"""
    before = tab.run(row)
    tab.run(f"torchlens.toggle({tab.find('transformer.h.0.mlp')})")
    assert tab.run(row) == before


def test_repeats_fold_and_each_instance_is_reachable(visit):
    tab = visit("gpt2")
    title = "transformer.h.0 … 11"
    assert "× 12" in tab.node(title).text_content()
    tab.click(title)
    assert [own for own in tab.titles() if own.startswith("transformer.h.")] == [
        f"transformer.h.{n}" for n in range(12)
    ]
    tab.run(f"torchlens.select({tab.find('transformer.h.7.mlp.c_fc')})")
    assert "transformer.h.7.mlp.c_fc" in tab.titles()
    assert tab.page.locator("#panel h2").text_content() == "transformer.h.7.mlp.c_fc"


def test_residual_edges_differ_from_the_main_line(visit):
    tab = visit("gpt2")
    for title in ("transformer.h.0 … 11", "transformer.h.0"):
        tab.run(f"torchlens.toggle({tab.find(title)})")
    ends = tab.run(
        "torchlens.scene.edges.filter(e => e.kind === 'skip').map(e => "
        "torchlens.title(e.ends[0].t))"
    )
    assert len(ends) == 2
    assert all(end.startswith("add_") for end in ends)
    styles = tab.run(
        "['.edge.skip', '.edge:not(.skip)'].map(s => "
        "getComputedStyle(document.querySelector(s)).stroke)"
    )
    assert styles[0] != styles[1]


def test_nodes_show_path_class_and_shape_and_keep_their_parameters_and_buffers(visit):
    tab = visit("resnet18")
    text = tab.node("bn1").text_content()
    assert "bn1" in text
    assert "BatchNorm2d" in text
    assert "1×16×32×32" in text
    assert "32 params" in text
    assert not any("running_mean" in title for title in tab.titles())
    tab.click("bn1")
    panel = tab.page.locator("#panel").text_content()
    for fact in (
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "float32",
        "Time",
        "viewer_models.py",
        "Parents",
        "conv2d_1_1",
    ):
        assert fact in panel


def test_panel_shows_the_statistics_of_saved_values(visit):
    tab = visit("resnet18")
    tab.click("relu")
    value = history_of("resnet18")["relu_1_3"].tensor_contents.detach()
    numbers = dict(
        tab.run(
            "[...document.querySelectorAll('.nums div')].map(d => [d.firstChild, "
            "d.lastChild].map(e => e.textContent))"
        )
    )
    assert float(numbers["max"]) == pytest.approx(float(value.max()), rel=1e-2)
    assert float(numbers["mean"]) == pytest.approx(float(value.mean()), rel=1e-2)
    assert float(numbers["std"]) == pytest.approx(float(value.std(correction=0)), rel=1e-2)
    assert numbers["zeros"] == f"{float((value == 0).float().mean()) * 100:.1f} %"
    assert numbers["non-finite"] == "0 %"
    assert tab.page.locator("#panel .hist rect").count() > 3
    assert tab.page.locator("#panel canvas").count() == 1


def test_parents_and_children_are_links(visit):
    tab = visit("resnet18")
    tab.click("conv1")
    tab.page.locator("#panel .links button", has_text="batchnorm_1_2").click()
    assert tab.page.locator("#panel h2").text_content() == "bn1"
    assert tab.page.locator("#crumbs").text_content() == "› bn1"


def test_recurrent_module_is_one_node_with_a_loop_edge_and_a_pass_selector(visit):
    tab = visit("recurrent")
    assert "cell" in tab.titles()
    assert "× 12" in tab.node("cell").text_content()
    assert tab.run(
        "torchlens.scene.edges.filter(e => e.kind === 'loop').map(e => e.ends[0].s)"
    ) == [tab.find("cell")]
    tab.run(f"torchlens.select({tab.find('cell')})")
    first = tab.page.locator("#panel .nums").text_content()
    tab.page.locator("#pass-next").click()
    assert "2 / 12" in tab.page.locator("#panel .passes").first.text_content()
    assert tab.page.locator("#panel .nums").text_content() != first
    tab.run(f"torchlens.select({tab.find('tanh_1_6')})")
    assert "tanh_1_6:2" in tab.page.locator("#panel").text_content()


def test_loop_without_a_module_is_one_node_too(visit):
    tab = visit("plain_loop")
    assert len(tab.titles()) == 4
    loop = next(title for title in tab.titles() if title.startswith("loop"))
    assert "× 6" in tab.node(loop).text_content()
    tab.click(loop)
    assert {"fc", "relu_1_2", "add_1_3"} <= set(tab.titles())
    assert tab.run("torchlens.scene.edges.filter(e => e.kind === 'loop').length") == 1


def test_a_loop_in_a_loop_says_how_often_it_runs_each_time(visit, tmp_path):
    explore(tl.log_forward_pass(LoopInLoop(), torch.ones(1, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    outer = tab.run(
        "[...torchlens.scene.nodes.keys()].find(i => torchlens.title(i).startsWith('loop'))"
    )
    tab.run(f"torchlens.toggle({outer})")
    inner = tab.run(
        f"[...torchlens.scene.nodes.keys()].find(i => i > {outer} && "
        "torchlens.title(i).startsWith('loop'))"
    )
    assert "× 2" in tab.page.locator(f'[data-id="{outer}"]').text_content()
    assert "× 3 each" in tab.page.locator(f'[data-id="{inner}"]').text_content()


def test_a_loop_that_runs_more_often_in_one_pass_than_in_another_is_not_said_to_run_so_often_each_time(
    visit, tmp_path
):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for times in (1, 2, 4, 5):
                x = self.a(x)
                for _ in range(times):
                    x = self.c(self.b(x))
            return x

    explore(tl.log_forward_pass(Growing(), torch.ones(1, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    tab.run("torchlens.openTo(2)")
    notes = [node.text_content() for node in tab.page.locator("[aria-expanded]").all()]
    assert [("× 4" in note, "× 12" in note, "each" in note) for note in notes] == [
        (True, False, False),
        (False, True, False),
    ]


class ManyOutputs(nn.Module):
    """A model whose parts all are in one module, with constants around them and more outputs than a
    row holds.
    """

    def __init__(self):
        super().__init__()
        self.body = ConstantsAround()

    def forward(self, x):
        return self.body(x)


class ConstantsAround(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            mask = torch.arange(4)
            for number in range(8):
                mask = mask + torch.full((4,), number)
            x = torch.relu(layer(x + mask)) * place
        return {f"result_{name}": x for name in "abcdefghijkl"} | {"cache": [x] * 24}


def test_a_page_opens_into_the_model_not_into_its_outputs(visit, tmp_path):
    explore(tl.log_forward_pass(ManyOutputs(), torch.ones(1, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    assert {f"body.layers.{number}" for number in range(6)} <= set(tab.titles())
    assert "output.cache" in tab.titles()


def test_many_outputs_stand_in_several_rows(visit, tmp_path):
    explore(tl.log_forward_pass(ManyOutputs(), torch.ones(1, 4)), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    rows = tab.run("""[...torchlens.scene.nodes.values()].filter(n => torchlens.title(n.id).startsWith('output.result'))
      .map(n => n.y)""")
    assert len(rows) == 12
    assert max(rows.count(row) for row in rows) <= 5


def test_search_counts_hits_on_closed_boxes_and_enter_walks_through_them(visit):
    tab = visit("gpt2")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type(r"mlp\.c_(fc|proj)$")
    assert tab.page.locator("#hits").text_content() == "24 hits"
    assert "24 hits" in tab.node("transformer.h.0 … 11").text_content()
    for expected in (
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
        "transformer.h.1.mlp.c_fc",
    ):
        tab.page.keyboard.press("Enter")
        assert tab.page.locator("#panel h2").text_content() == expected
        box = tab.run(f"torchlens.screen({tab.find(expected)})")
        assert 0 < box["x"] < 1250
        assert 46 < box["y"] < 1000
    assert tab.page.locator("#hits").text_content() == "3 of 24"
    tab.page.keyboard.press("Shift+Enter")
    assert tab.page.locator("#panel h2").text_content() == "transformer.h.0.mlp.c_proj"


@pytest.mark.parametrize(
    ("query", "count"),
    [("^layernorm|LayerNorm", 25), ("1×32×384$", 12 * 10), ("[", 0), ("softmax", 12)],
)
def test_search_reads_class_operation_and_shape(visit, query, count):
    tab = visit("gpt2")
    tab.page.locator("#query").fill(query)
    found = tab.run("torchlens.state.hits.length")
    assert found == count if query != "1×32×384$" else found >= 24


def test_keyboard_follows_edges_expands_and_goes_up(visit):
    tab = visit("resnet18")
    chosen = "torchlens.title(torchlens.state.selected)"
    for expected in ("input.x", "conv1", "bn1", "relu", "maxpool", "layer1"):
        tab.page.keyboard.press("ArrowDown")
        assert tab.run(chosen) == expected
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("ArrowDown")
    assert tab.run(chosen) == "layer1.0"
    tab.page.keyboard.press("ArrowDown")
    assert tab.run(chosen) == "layer1.1"
    tab.page.keyboard.press("Backspace")
    assert tab.run(chosen) == "layer1"
    tab.page.keyboard.press("Enter")
    assert "layer1.0" not in tab.titles()
    tab.page.keyboard.press("ArrowUp")
    assert tab.run(chosen) == "maxpool"
    tab.page.keyboard.press("?")
    assert tab.page.locator("#keys").is_visible()
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator("#keys").is_visible()


def test_view_is_kept_in_the_address(visit):
    tab = visit("gpt2")
    tab.click("transformer.h.0 … 11")
    tab.run(f"torchlens.select({tab.find('transformer.h.2')})")
    tab.page.locator("#query").fill("softmax")
    # Written a moment after the last change; the selection and the opened node come before the
    # search.
    tab.page.wait_for_url(lambda url: "q=softmax" in url)
    again = visit("gpt2", tab.run("location.hash"))
    for fact in ("torchlens.state.selected", "torchlens.state.hits.length"):
        assert tab.run(fact) == again.run(fact)
    assert tab.titles() == again.titles()
    here, there = (
        one.run(f"torchlens.screen({tab.find('transformer.h.2')})") for one in (tab, again)
    )
    assert here["x"] == pytest.approx(there["x"], abs=2)
    assert here["y"] == pytest.approx(there["y"], abs=2)


@pytest.mark.parametrize(
    "address",
    [
        "#e=zzzzzz.%3Cb%3E&v=NaN,1,x&s=-5&o=nothing&q=(",
        "#e=&v=0,0,1&q=%E0%A4%A",
        "#e=&v=0,0,1&o=%",
        "#n=zzz&e=1&v=0,0,1",
        "#e=&v=0,0,1&p=__proto__:1.1:x",
        "#nonsense",
    ],
)
def test_a_broken_address_opens_the_page_with_a_word(visit, address):
    tab = visit("gpt2", address)
    assert tab.run("torchlens.shown()") >= 3
    assert tab.page.locator("#notice").is_visible()
    assert "could not be followed" in tab.page.locator("#notice").text_content()


def test_the_pass_is_in_the_address(visit):
    tab = visit("recurrent")
    assert tab.page.locator("#notice").is_hidden()
    tab.run(f"torchlens.select({tab.find('cell')})")
    tab.page.locator("#pass-next").click()
    tab.page.locator("#pass-next").click()
    tab.page.wait_for_url(lambda url: "p=" in url and ":2" in url)
    again = visit("recurrent", tab.run("location.hash"))
    assert again.page.locator("#notice").is_hidden()
    assert "3 / 12" in again.page.locator("#panel .passes").first.text_content()
    again.run(f"torchlens.select({tab.find('tanh_1_6')})")
    assert "tanh_1_6:3" in again.page.locator("#panel").text_content()


def test_classes_keep_their_underscores_and_brackets(visit, tmp_path):
    name = "__Inner_<T>_"
    inner = type(name, (nn.Sequential,), {})
    outer = type("My_<Model>_", (nn.Sequential,), {})
    explore(
        tl.log_forward_pass(outer(inner(nn.Linear(2, 2), nn.ReLU())), torch.ones(1, 2)),
        tmp_path / "page.html",
    )
    tab = visit(tmp_path / "page.html")
    assert tab.page.locator("#name").text_content() == "My_<Model>_"
    assert name in tab.node("0").text_content()


def test_views_and_constants_can_be_hidden_and_edges_bridge_them(visit):
    tab = visit("gpt2")
    for title in ("transformer.h.0 … 11", "transformer.h.0", "transformer.h.0.attn"):
        tab.run(f"torchlens.toggle({tab.find(title)})")
    assert any(title.startswith("view_") for title in tab.titles())
    tab.page.locator("#options summary").click()
    for side in ("Views", "Constants", "Masks", "Buffers"):
        tab.page.locator(f"#sides select[aria-label={side}]").select_option("hide")
    titles = tab.titles()
    assert not any(
        title.startswith(("view_", "transpose_", "split_", "arange")) for title in titles
    )
    linear, product = tab.find("transformer.h.0.attn.c_attn"), tab.find("matmul_1_19")
    assert tab.run(f"torchlens.scene.links.some(e => e.s === {linear} && e.t === {product})")


def test_selection_lights_up_its_line_and_a_second_one_the_paths_between(visit):
    tab = visit("resnet18")
    tab.click("layer1")
    tab.run(f"torchlens.select({tab.find('layer1.0')})")
    lit = "[...document.querySelectorAll('.node:not(.off)')].length"
    assert tab.run(lit) == tab.run("torchlens.shown()")
    tab.run("torchlens.fit()")
    tab.click("conv1")
    tab.click("relu", shift=True)
    on = tab.run(
        "[...document.querySelectorAll('.node:not(.off)')].map(n => torchlens.title(n.dataset.id))"
    )
    assert on == ["conv1", "bn1", "relu"]
    assert tab.run("document.querySelectorAll('.edge.way').length") == 2


def test_constants_are_not_lit_by_what_does_not_use_them(visit):
    tab = visit("gpt2")
    tab.click("transformer.wte")
    off = tab.run(
        "[...document.querySelectorAll('.node.off')].map(n => torchlens.title(n.dataset.id))"
    )
    assert set(off) == {"arange_1_1", "getitem_1_2", "transformer.wpe"}


def test_overlays_of_time_memory_flops_and_the_callers_own(visit, tmp_path):
    history = history_of("resnet18")
    means = {entry.layer_label: entry.tensor_contents.detach().float().mean() for entry in history}
    explore(history, tmp_path / "page.html", overlays={"mean <b>": means})
    tab = visit(tmp_path / "page.html")
    assert tab.run("[...document.getElementById('overlay').options].map(o => o.value)") == [
        "",
        "time",
        "memory",
        "FLOPs",
        "mean <b>",
    ]
    plain = tab.run("getComputedStyle(document.querySelector('.node rect.body')).fill")
    for name in ("time", "memory", "FLOPs", "mean <b>"):
        tab.page.locator("#overlay").select_option(name)
        assert name in tab.page.locator("#legend").text_content()
        fills = tab.run(
            "[...document.querySelectorAll('.node rect.body')].map(r => getComputedStyle(r).fill)"
        )
        assert len(set(fills)) > 3
        assert plain not in fills or name == "FLOPs"
    assert tab.page.locator("#legend .scale").count() == 1


def test_overlay_for_an_unknown_layer_says_so():
    with pytest.raises(ValueError, match=r"overlay 'mine'.*'nowhere'"):
        explore(history_of("plain_loop"), None, overlays={"mine": {"nowhere": 1.0}})
    with pytest.raises(TypeError, match="must be a dict"):
        explore(history_of("plain_loop"), None, overlays={"mine": [1.0]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="log_forward_pass"):
        explore("history", None)  # type: ignore[arg-type]


def test_failed_pass_shows_the_failing_operation_in_red(visit):
    tab = visit("failed")
    failed = tab.page.locator(".node.k-failed")
    assert failed.count() == 1
    assert "head.0" in failed.text_content()
    assert "linear(2x16 float32, 8x8 float32, 8 float32)" in failed.text_content()
    assert (
        tab.run("getComputedStyle(document.querySelector('.k-failed .bar-fill')).fill")
        == "rgb(179, 38, 30)"
    )
    # The node shortens long messages in the middle; newer releases of torch say "addmm: " first.
    for place in ("#failure", "#panel", ".node.k-failed"):
        text = tab.page.locator(place).text_content()
        assert "mat2 shapes cannot be multiplied (2x16 and 8x8)" in text


def test_failure_outside_any_operation_draws_too(visit, tmp_path):
    class Raises(nn.Module):
        def forward(self, x):
            x = x + 1
            raise LookupError("<b>no such thing</b>")

    with pytest.raises(LookupError) as caught:
        tl.log_forward_pass(Raises(), torch.ones(2))
    explore(partial_history(caught.value), tmp_path / "page.html")
    tab = visit(tmp_path / "page.html")
    assert "LookupError: <b>no such thing</b>" in tab.page.locator("#failure").text_content()
    assert tab.page.locator(".node.k-failed").count() == 1


def test_names_with_quotes_brackets_and_scripts_stay_text(visit, tmp_path):
    name = "</script><script>window.broken=1</script><img src=x onerror='window.broken=2'>\"&\u2028"
    model = nn.Sequential()
    model.add_module(name.replace(".", ""), nn.Linear(2, 2))
    model.add_module("ok", nn.Linear(2, 2))
    history = tl.log_forward_pass(model, torch.ones(1, 2))
    label = history[1].layer_label
    explore(history, tmp_path / "page.html", title=name, overlays={name: {label: 1.0}})
    tab = visit(tmp_path / "page.html")
    assert tab.run("window.broken") is None
    assert tab.run("document.images.length") == 0
    assert tab.page.locator("#name").text_content() == name
    assert tab.page.title().startswith("</script><script>")
    module = tab.run("torchlens.D.strings.find(s => s.startsWith('</script>'))")
    tab.run(f"torchlens.select(torchlens.find({json.dumps(module)}))")
    assert tab.page.locator("#panel h2").text_content() == module
    tab.page.locator("#overlay").select_option(name)
    assert tab.run("window.broken") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_at_least_4_5(visit, scheme):
    tab = visit("gpt2", color_scheme=scheme)
    ratios = tab.run("""(() => {
      const style = getComputedStyle(document.documentElement);
      const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      const light = name => {
        probe.fillStyle = style.getPropertyValue(name).trim();
        probe.fillRect(0, 0, 1, 1);
        const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map(v => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const pairs = [['--ink', '--card'], ['--ink', '--paper'], ['--quiet', '--card'], ['--quiet', '--paper'],
        ['--accent', '--card'], ['--danger', '--card'], ['--hit-ink', '--hit']];
      for (const kind of torchlens.D.kinds) if (kind !== 'failed') pairs.push(['--title', '--k-' + kind]);
      return pairs.map(([a, b]) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return [a, b, (x + 0.05) / (y + 0.05)];
      });
    })()""")
    assert [pair for pair in ratios if pair[2] < 4.5] == []


def test_light_and_dark_follow_the_system(visit):
    colours = [
        visit("gpt2", color_scheme=s).run("getComputedStyle(document.body).backgroundColor")
        for s in ("light", "dark")
    ]
    assert colours == ["rgb(246, 247, 249)", "rgb(20, 23, 28)"]


def test_everything_has_a_name_and_tab_goes_from_search_to_graph_to_panel(visit):
    tab = visit("gpt2")
    nameless = tab.run("""[...document.querySelectorAll('button, input, select, summary, [role=button]')]
      .filter(e => !(e.getAttribute('aria-label') || e.title || e.textContent.trim() || e.labels && e.labels.length))
      .map(e => e.outerHTML)""")
    assert nameless == []
    closed = tab.node("transformer.h.0 … 11")
    assert closed.get_attribute("aria-expanded") == "false"
    assert closed.get_attribute("aria-label").startswith(
        "transformer.h.0 … 11, Block, 1 by 32 by 96, 12 times"
    )
    where = []
    for _ in range(8):
        tab.page.keyboard.press("Tab")
        where.append(
            tab.run("(e => e.id || e.tagName + '/' + (e.dataset.id || ''))(document.activeElement)")
        )
    assert where[:2] == ["query", "overlay"]
    graph = next(index for index, name in enumerate(where) if name.startswith("g/"))
    assert where.index("help") < graph < where.index("panel")


def test_minimap_pans(visit):
    tab = visit("nested_loop")
    before = tab.run("torchlens.state.view.y")
    box = tab.page.locator("#map").bounding_box()
    tab.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 10)
    assert tab.run("torchlens.state.view.y") < before - 100


def test_notebook_shows_the_page_inline(browser):
    shown = explore(history_of("recurrent"), None)._repr_html_()
    page: Page = browser.new_page(viewport={"width": 1200, "height": 800})
    page.set_default_timeout(600_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_content(f"<!doctype html><body>{shown}</body>")
    frame = page.frame_locator("iframe")
    frame.locator(".node").first.wait_for()
    assert frame.locator(".node").count() >= 5
    frame.locator(".node", has_text="cell").click()
    frame.locator(".box-head").wait_for()
    assert frame.locator(".box-head").count() == 1
    page.close()
    assert complaints == []


def test_written_page_says_where_it_is(tmp_path):
    history = history_of("plain_loop")
    page = explore(history, tmp_path / "new" / "page.html")
    assert page.path == tmp_path / "new" / "page.html"
    assert page.path.read_text(encoding="utf-8") == page.html
    assert "page.html" in repr(page)
    assert "not written" in repr(explore(history, None))
    with pytest.raises(ValueError, match="path"):
        explore(history, None).open()


def test_model_without_saved_tensors_and_empty_modules_draw(visit, tmp_path):
    explore(
        tl.get_model_metadata(ResNet18().eval(), torch.randn(1, 3, 32, 32)), tmp_path / "page.html"
    )
    tab = visit(tmp_path / "page.html")
    tab.click("relu")
    assert tab.page.locator("#panel .nums").count() == 0
    assert "1×16×16×16" in tab.page.locator("#panel").text_content()
