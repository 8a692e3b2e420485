"""Two histories in one page: what differs is marked and listed, and what is done in one is done in
the other.
"""

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import torchlens as tl
from tests.networks import Model
from tests.page.test_outline_loops import Program
from tests.page.test_outline_loops import _random_program as random_program
from tests.page.viewer_models import GPT2, Recurrent, ResidualBlock, ResNet18, failed_history
from tests.sampling import first
from torchlens._history.correspondence import match
from torchlens._history.model_history import ModelHistory
from torchlens._page.differences import find_differences
from torchlens._page.page_data import carried_data
from torchlens._page.pairs import ShownPair, Side, matched_pairs
from torchlens._page.together import explore_together

IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 1000, (1, 8), generator=torch.Generator().manual_seed(0))


def resnet(seed: int = 0) -> ResNet18:
    torch.manual_seed(seed)
    return ResNet18(width=4).eval()


def gpt(seed: int = 0) -> GPT2:
    torch.manual_seed(seed)
    return GPT2(size=16, heads=2, layers=3).eval()


def log(model: nn.Module, x: torch.Tensor, **options) -> ModelHistory:
    return tl.log_forward_pass(model, x, **options)


class Renamed(ResNet18):
    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.stage_two(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Both:
    """The open page of two histories."""

    def __init__(self, tab):
        self.tab, self.run = tab, tab.run

    def find(self, side: int, title: str) -> int:
        number = self.tab.page.evaluate(
            "([side, title]) => torchlens.panes[side].find(title)", [side, title]
        )
        assert number > 0, title
        return number

    def click(self, side: int, title: str, is_pick: bool = False) -> None:
        box = self.run(f"torchlens.panes[{side}].screen({self.find(side, title)})")
        assert box, f"{title} is not shown"
        if is_pick:
            self.tab.page.keyboard.down("Control")
        self.tab.page.mouse.click(box["x"] + box["w"] / 2, box["y"] + 10)
        if is_pick:
            self.tab.page.keyboard.up("Control")

    def text(self, name: str) -> str:
        """Of an element of the page itself, not of those in the two panes."""
        return self.run(f"document.getElementById('{name}').innerText")

    def press(self, name: str) -> None:
        self.run(f"document.getElementById('{name}').click()")

    def selected(self) -> list[str]:
        return self.run(
            "torchlens.panes.map(p => p.state.selected > 0 ? p.title(p.state.selected) : '')"
        )

    def is_open(self, side: int, title: str) -> bool:
        return bool(self.run(f"torchlens.panes[{side}].state.open[{self.find(side, title)}]"))

    def listed(self, follows: bool = False) -> list[tuple[str, str, list[str]]]:
        """The differences in the list: what they are called in either, and the kinds."""
        found = self.run("""torchlens.listed.map(d => [
          d.a > 0 ? torchlens.panes[0].title(d.a) : '', d.b > 0 ? torchlens.panes[1].title(d.b) : '',
          d.words.map(([k]) => torchlens.both.kinds[k]), Boolean(d.follows)])""")
        return [(a, b, kinds) for a, b, kinds, is_follower in found if is_follower == follows]

    def words(self, at: int) -> str:
        return self.run(f"torchlens.listed[{at}].words.map(w => w[1]).join('; ')")

    def marks(self, side: int) -> list[str]:
        return self.run(f"""[...document.querySelector('#pane-{"ab"[side]}').shadowRoot.querySelectorAll('.mark')].map(m =>
          torchlens.panes[{side}].title(+m.closest('[data-id]').dataset.id) + ': ' + (m.textContent || ''))""")


@pytest.fixture
def together(visit, tmp_path):
    def together(a, b, **options) -> Both:
        page_options = options.pop("page", {})
        explore_together(a, b, tmp_path / "two.html", **options)
        return Both(visit(tmp_path / "two.html", **page_options))

    return together


def test_a_history_beside_itself_has_no_difference(together):
    history = log(resnet(), IMAGE)
    both = together(history, history)
    assert both.listed() == both.listed(follows=True) == []
    assert both.marks(0) == both.marks(1) == []
    assert "No difference" in both.text("none")
    assert both.run("document.getElementById('next').disabled")


def test_a_changed_stride_is_the_cause_and_other_shapes_follow(together):
    changed = resnet()
    changed.layer2[0].conv1.stride = changed.layer2[0].downsample[0].stride = (1, 1)
    both = together(log(resnet(), IMAGE), log(changed, IMAGE))
    causes = both.listed()
    assert {a for a, _, _ in causes} == {"layer2.0.conv1", "layer2.0.downsample.0"}
    assert all(a == b and kinds == ["argument", "shape"] for a, b, kinds in causes)
    assert "stride 2 →" in both.words(0)
    assert "4×4 → 1×8×8×8" in both.words(0)
    followers = both.listed(follows=True)
    assert ("output", "output", ["values"]) in followers
    assert ("layer2.0.conv2", "layer2.0.conv2", ["shape"]) in followers
    assert "layer2: 2 differences2 differences inside" in both.marks(0)
    assert any(mark.startswith("layer3: follows") for mark in both.marks(1))
    assert not any(mark.startswith(("layer1", "conv1", "bn1")) for mark in both.marks(0))


def test_an_added_block_is_one_difference(together):
    changed = resnet()
    blocks = list(changed.layer1.children())
    changed.layer1 = nn.Sequential(blocks[0], ResidualBlock(4, 4, 1).eval(), blocks[1])
    both = together(log(resnet(), IMAGE), log(changed, IMAGE))
    assert both.listed() == [("", "layer1.1", ["added"])]
    both.run("torchlens.goTo(0)")
    assert both.selected() == ["", "layer1.1"]
    # What stands before it is at the same height in both.
    heights = [
        both.run(f"torchlens.panes[{side}].screen({both.find(side, 'layer1.0')}).y")
        for side in (0, 1)
    ]
    assert heights[0] == pytest.approx(heights[1], abs=1)
    assert any(mark.startswith("layer1.1: added") for mark in both.marks(1))
    back = together(log(changed, IMAGE), log(resnet(), IMAGE))
    assert back.listed() == [("layer1.1", "", ["removed"])]


def test_a_renamed_module_is_followed_inside(together):
    changed = resnet()
    changed.__class__ = Renamed
    changed.stage_two = changed.layer2
    del changed.layer2
    both = together(log(resnet(), IMAGE), log(changed, IMAGE))
    assert both.listed() == [("layer2", "stage_two", ["name"])]
    assert both.listed(follows=True) == []
    both.click(0, "layer2")
    assert both.is_open(1, "stage_two")
    both.click(1, "stage_two.0")
    assert both.is_open(0, "layer2.0")
    both.click(0, "layer2.0.conv2")
    assert both.selected() == ["layer2.0.conv2", "stage_two.0.conv2"]
    both.click(0, "layer2")
    assert not both.is_open(1, "stage_two")


def test_another_activation_is_one_difference_for_each_block(together):
    changed = gpt()
    for block in changed.transformer.h:
        block.mlp.act = nn.ReLU()
    both = together(log(gpt(), IDS), log(changed, IDS))
    names = [f"transformer.h.{number}.mlp.act" for number in range(3)]
    assert both.listed() == [(name, name, ["operation"]) for name in names]
    assert both.words(0) == "NewGELU → ReLU"
    for at, name in enumerate(names):
        both.tab.page.keyboard.press("n")
        assert both.selected() == [name, name]
        assert both.text("at").startswith(f"{at + 1} / ")
    both.tab.page.keyboard.press("p")
    assert both.selected() == [names[1], names[1]]


def test_one_changed_block_of_a_folded_row_says_nothing_of_the_row(together):
    """The others fold to two rows then, which is no difference of the model."""
    torch.manual_seed(0)
    model = GPT2(size=16, heads=2, layers=6).eval()
    before = log(model, IDS)
    model.transformer.h[3].mlp.act = nn.ReLU()
    both = together(before, log(model, IDS))
    assert both.listed() == [("transformer.h.3.mlp.act", "transformer.h.3.mlp.act", ["operation"])]


def test_other_weights_are_told_with_their_error(together):
    both = together(log(resnet(0), IMAGE), log(resnet(1), IMAGE))
    first = both.listed()[0]
    assert first == ("conv1", "conv1", ["weights", "values"])
    assert (
        len(both.listed()) == 21
    )  # the convolutions and the head; the normalisations are all as they began
    mine, theirs = (model.conv1.weight.detach() for model in (resnet(0), resnet(1)))
    error = float((mine - theirs).norm() / mine.norm())
    assert both.words(0).startswith(f"relative error {error:.2g}")
    values = [log(resnet(seed), IMAGE)["conv1"].tensor_contents.detach() for seed in (0, 1)]
    assert both.run("torchlens.listed[0].error") == pytest.approx(
        float((values[0] - values[1]).norm() / values[0].norm()), rel=1e-3
    )


def test_values_that_were_not_saved_are_not_compared(together):
    both = together(log(gpt(0), IDS, layers_to_save="none"), log(gpt(0), IDS + 1))
    assert both.listed() == both.listed(follows=True) == []


def test_selection_follows_both_ways_and_the_panel_compares(together):
    both = together(log(gpt(0), IDS), log(gpt(0), IDS + 1))
    both.click(1, "transformer.wte")
    assert both.selected() == ["transformer.wte", "transformer.wte"]
    rows = both.tab.page.locator("#panel .compared tr").all_inner_texts()
    assert any(row.startswith("Shape") and row.count("1×8×16") == 2 for row in rows)
    assert "other values" in both.text("said")
    both.click(0, "transformer.ln_f")
    assert both.selected() == ["transformer.ln_f"] * 2
    places = [
        both.run(f"torchlens.panes[{side}].drive.placeOf({both.find(side, 'transformer.ln_f')})")
        for side in (0, 1)
    ]
    assert places[0] == pytest.approx(places[1], abs=1)
    both.tab.page.keyboard.press("Escape")
    assert both.selected() == ["", ""]


def test_a_module_and_an_operation_are_compared_by_what_both_have(together):
    changed = gpt()
    changed.transformer.h[0].mlp.act = nn.ReLU()
    both = together(log(gpt(), IDS), log(changed, IDS))
    both.tab.page.keyboard.press("n")
    assert both.selected() == ["transformer.h.0.mlp.act"] * 2
    rows = [
        row.split("\t") for row in both.tab.page.locator("#panel .compared tr").all_inner_texts()
    ]
    found = {name.strip(): [mine.strip(), theirs.strip()] for name, mine, theirs in rows}
    assert found["Dtype"] == ["float32", "float32"]
    assert found["Operations"][1] == "1"
    assert int(found["Operations"][0]) > 1


def test_moving_zooming_depth_colours_and_search_go_together(together):
    both = together(log(resnet(0), IMAGE), log(resnet(1), IMAGE))
    before = both.run("torchlens.panes.map(p => ({...p.state.view}))")
    both.tab.page.mouse.move(300, 500)
    both.tab.page.mouse.wheel(0, 120)
    after = both.run("torchlens.panes.map(p => ({...p.state.view}))")
    assert [b["y"] - a["y"] for a, b in zip(before, after, strict=True)] == [-120, -120]
    both.click(1, "layer1", is_pick=True)
    both.tab.page.keyboard.press("0")
    assert both.run("torchlens.panes.map(p => p.shown())")[0] > 60
    assert both.run(
        "torchlens.panes.map(p => p.shown())[0] === torchlens.panes.map(p => p.shown())[1]"
    )
    both.tab.page.keyboard.press("1")
    both.tab.page.locator("#overlay").first.select_option("FLOPs")
    assert both.run("torchlens.panes.map(p => p.state.overlay)") == ["FLOPs", "FLOPs"]
    both.tab.page.keyboard.press("/")
    both.tab.page.keyboard.type("downsample")
    assert both.text("hits") == "9 hits"
    both.tab.page.keyboard.press("Enter")
    assert both.selected()[0] == both.selected()[1] != ""


def test_fewer_passes_are_one_difference_and_the_pass_follows(together):
    cell = Recurrent()
    x = torch.randn(2, 9, 16)
    both = together(log(cell, x), log(cell, x[:, :5]))
    kinds = {kind for _, _, own in both.listed() for kind in own}
    assert "passes" in kinds
    assert not kinds & {"added", "removed"}
    both.click(0, "cell", is_pick=True)
    assert both.selected()[1].startswith("cell")
    both.run("document.querySelector('#pane-a').shadowRoot.getElementById('pass-next').click()")
    passes = "torchlens.panes.map(p => p.state.pass.get(p.state.selected))"
    assert both.run(passes) == [1, 1]


def test_nothing_in_common_and_failed_histories_open(together):
    both = together(log(gpt(), IDS), log(resnet(), IMAGE))
    kinds = {kind for _, _, own in both.listed() for kind in own}
    assert {"added", "removed"} <= kinds
    assert together(failed_history(), log(resnet(), IMAGE)).listed()
    failed = failed_history()
    both = together(failed, failed)
    assert both.listed() == both.listed(follows=True) == []
    assert both.selected() == ["head.0", "head.0"]  # what failed


def test_an_address_opens_what_was_seen(together, visit):
    history = log(resnet(0), IMAGE)
    both = together(history, log(resnet(1), IMAGE))
    both.click(0, "layer1")
    both.click(1, "layer1.0")
    steps = [
        f"s={both.run(f'torchlens.panes[{side}].state.selected.toString(36)')}" for side in (0, 1)
    ]
    both.tab.until(
        "decodeURIComponent(location.hash).split('&b=').every((own, k) => "
        f"own.includes({steps}[k]))"
    )
    selected = both.selected()
    again = Both(visit(both.tab.path, both.run("location.hash")))
    assert again.selected() == selected
    assert again.is_open(0, "layer1.0")
    assert again.is_open(1, "layer1.0")
    broken = Both(visit(both.tab.path, "#a=%E0%A4%A&b=xyz"))
    assert broken.run("torchlens.panes.length") == 2


def test_a_phone_stacks_the_two(together):
    both = together(
        log(resnet(0), IMAGE),
        log(resnet(1), IMAGE),
        page={"viewport": {"width": 390, "height": 844}},
    )
    boxes = [both.tab.page.locator(f"#pane-{name}").bounding_box() for name in "ab"]
    assert boxes[0]["width"] == boxes[1]["width"] == 390
    assert boxes[0]["y"] + boxes[0]["height"] <= boxes[1]["y"] + 1
    both.press("next")
    assert both.selected()[0] == both.selected()[1] != ""
    both.tab.page.locator("#grip").locator("visible=true").click()
    assert both.tab.page.locator("#differences").first.is_visible()


# -- nothing is passed over
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", first(4, [58, 246, *range(10)]))
def test_whatever_one_of_two_random_models_lacks_is_in_the_list(seed):
    chance = random.Random(seed)
    statements = random_program(chance, [chance.randrange(5) for _ in range(60)])
    changed = list(statements)
    for _ in range(1 + chance.randrange(3)):
        at = chance.randrange(len(changed) + 1)
        if chance.random() < 0.5 and len(changed) > 1:
            changed.pop(min(at, len(changed) - 1))
        else:
            changed.insert(at, chance.choice([0, 1, 2, (2, [1, 2])]))
    logs = []
    for own in (statements, changed):
        torch.manual_seed(seed)
        logs.append(log(Program(own, 5), torch.ones(1, 3)))
    sides = [Side(history, carried_data(history, {}, "")) for history in logs]
    matching = match(logs[0], logs[1])
    found = find_differences(sides[0], sides[1], matched_pairs(sides[0], sides[1], matching))
    told = {"removed", "added", "passes", "operation"}
    for which, side in enumerate(sides):
        parts = {
            (found_one.a, found_one.b)[which]
            for found_one in found
            if found_one.is_listed and told & set(found_one.words)
        }
        above = side.carried.data["parts"]["parent"]
        matched = {pair[which] for pair in matching.entries}
        for entry in set(range(len(side.history))) - matched:
            part = side.carried.part_of[entry]
            while part > 0 and part not in parts:
                part = above[part]
            assert part > 0, side.history[entry].layer_label
    if statements == changed:
        assert found == []


# -- pairs that the caller knows
# ---------------------------------------------------------------------------------------


def port() -> nn.Module:
    def forward(self, x):
        x = self.norm1(x)
        return self.out(self.qkv(x).chunk(3, -1)[0])

    class Norm(nn.Module):
        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()

    return Model(forward, norm1=Norm(), qkv=nn.Linear(4, 12), out=nn.Linear(4, 4))


def reference() -> nn.Module:
    def forward(self, x):
        x = self.ln(x)
        return self.proj(self.drop(self.q(x) + self.k(x)))

    return Model(
        forward,
        ln=nn.LayerNorm(4),
        q=nn.Linear(4, 4),
        k=nn.Linear(4, 4),
        drop=nn.Dropout(),
        proj=nn.Linear(4, 4),
    )


def test_given_pairs_say_what_belongs_together(together):
    x = torch.randn(2, 4)
    pairs = [
        ShownPair(
            "ln", "norm1", note="first divergence: an <eps>?", error=5.6e-3, colour="crimson"
        ),
        ShownPair("q", "qkv", error=1e-7),
        ShownPair("k", "qkv"),
        ShownPair("drop", None, note="the port has none"),
        ShownPair("proj", "out", note="follows"),
    ]
    both = together(
        log(reference(), x), log(port(), x), pairs=pairs, names=("torch", "jax"), title="A port"
    )
    assert both.listed() == [
        ("ln", "norm1", ["note"]),
        ("drop", "", ["removed", "note"]),
        ("proj", "out", ["note"]),
    ]
    assert both.tab.page.title() == "A port"
    both.click(1, "norm1")
    assert both.selected() == ["ln", "norm1"]
    assert "an <eps>?" in both.text("panel")
    assert "0.0056" in both.text("panel")
    colour = (
        "document.querySelector('#pane-a').shadowRoot.querySelector('[data-id=\"%d\"] "
        ".strip').style.fill"
    )
    assert both.run(colour % both.find(0, "ln")) == "crimson"
    both.click(0, "k")
    assert both.selected() == ["k", "qkv"]
    both.click(1, "qkv")
    assert both.selected() == ["q", "qkv"]
    assert not any("chunk" in mark for mark in both.marks(1))


def test_wrong_calls_say_what_is_accepted(tmp_path):
    history = log(reference(), torch.randn(2, 4))
    with pytest.raises(TypeError, match="b must be the result of log_forward_pass, got None"):
        tl.explore_together(history, cast("Any", None), tmp_path / "two.html")
    with pytest.raises(ValueError, match="no layer has that name"):
        explore_together(history, history, None, pairs=[ShownPair("ln", "nowhere")])
    with pytest.raises(TypeError, match=r"tuples \(a, b\) or dicts"):
        explore_together(history, history, None, pairs=cast("Any", ["ln"]))
    with pytest.raises(ValueError, match="at least one of the two"):
        explore_together(history, history, None, pairs=[ShownPair(None, None)])
    with pytest.raises(ValueError, match="two names"):
        explore_together(history, history, None, names=cast("Any", ("one",)))
    assert not list(Path(tmp_path).iterdir())


def test_the_page_beside_its_data_stays_small():
    history = log(reference(), torch.randn(2, 4))
    assert len(tl.explore_together(history, history, None).html) < 300_000


def test_a_pruned_layer_differs_in_what_makes_its_weight_and_in_nothing_else():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.b(self.a(x)))

    torch.manual_seed(0)
    model = Net()
    x = torch.randn(2, 4)
    before = log(model, x)
    prune.l1_unstructured(model.b, "weight", 0.5)
    after = log(model, x)
    sides = [Side(history, carried_data(history, {}, "")) for history in (before, after)]
    found = find_differences(
        sides[0], sides[1], matched_pairs(sides[0], sides[1], match(before, after))
    )
    titles = [
        [side.carried.data["strings"][title] for title in side.carried.data["parts"]["title"]]
        for side in sides
    ]
    listed = [
        (
            titles[0][one.a] if one.a >= 0 else None,
            titles[1][one.b] if one.b >= 0 else None,
            sorted(one.words),
        )
        for one in found
        if one.is_listed and not one.follows
    ]
    assert [(a, words) for a, b, words in listed if b is None] == []
    assert {b: words for a, b, words in listed if a is None} == {
        "b.weight_mask": ["added"],
        "to_1_2": ["added"],
        "mul_1_3": ["added"],
    }
    assert [(a, words) for a, b, words in listed if a is not None] == [
        ("b", ["parameters", "values"])
    ]
