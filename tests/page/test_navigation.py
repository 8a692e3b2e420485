"""Getting around in the page: depth, back and forward, selecting, wheel and search."""

import pytest

OPEN = "[...torchlens.state.open].reduce((a, b) => a + b) - 1"
BOXES = (
    "[...Array(torchlens.D.parts.part.length).keys()].filter(i => i && "
    "torchlens.D.parts.parent.includes(i)).length"
)
SELECTED = "torchlens.title(torchlens.state.selected)"


def test_all_boxes_open_and_close_and_open_to_a_depth(visit):
    tab = visit("resnet18")
    tab.page.locator("#options summary").click()
    tab.page.locator("#levels button", has_text="Expand all").click()
    assert tab.run(OPEN) == tab.run(BOXES) > 8
    assert "layer4.1.conv2" in tab.titles()
    tab.page.locator("#levels button", has_text="Collapse all").click()
    assert tab.run(OPEN) == 0
    assert "layer1" in tab.titles()
    tab.page.locator("#levels button", has_text="2").click()
    assert "layer1.0" in tab.titles()
    assert "layer1.0.conv1" not in tab.titles()
    tab.page.locator("#graph").click(position={"x": 5, "y": 5})
    assert not tab.page.locator("#menu").is_visible()
    tab.page.keyboard.press("0")
    assert tab.run(OPEN) == tab.run(BOXES)
    tab.page.keyboard.press("1")
    assert tab.run(OPEN) == 0


def test_one_box_opens_with_all_that_is_inside(visit):
    tab = visit("gpt2")
    tab.run(f"torchlens.select({tab.find('transformer.h.3')})")
    tab.page.locator("#panel button", has_text="Expand all inside").click()
    assert {"transformer.h.3.mlp.c_fc", "transformer.h.3.attn.c_attn"} <= set(tab.titles())
    assert "transformer.h.4.mlp.c_fc" not in tab.titles()


def test_what_no_screen_shows_opens_as_deep_as_it_can_and_says_so(visit):
    tab = visit("nested_loop")
    tab.page.keyboard.press("0")
    word = tab.page.locator("#notice").text_content()
    assert word.startswith("Open to depth ")
    assert " nodes" in word
    assert tab.run("torchlens.shown()") <= 1500


def test_back_and_forward_go_through_what_was_opened_and_selected(visit):
    tab = visit("resnet18")
    back, forward = tab.page.locator("#back"), tab.page.locator("#forward")
    tab.until("location.hash.includes('e=')")
    assert back.is_disabled()
    assert forward.is_disabled()
    tab.click("layer1")
    tab.until("!document.getElementById('back').disabled")
    opened = tab.run("location.hash.split('&')[0]")
    tab.run(f"torchlens.select({tab.find('fc')})")
    tab.until(f"location.hash.includes('s={_base36(tab.find('fc'))}')")
    back.click()
    tab.until(f"torchlens.state.selected === {tab.find('layer1')}")
    assert tab.run("location.hash.split('&')[0]") == opened
    assert "layer1.0" in tab.titles()
    tab.run("history.back()")
    tab.until("torchlens.state.selected < 1")
    assert "layer1.0" not in tab.titles()
    tab.until("document.getElementById('back').disabled")
    forward.click()
    tab.until(f"torchlens.state.selected === {tab.find('layer1')}")
    tab.run("history.forward()")
    tab.until(f"torchlens.state.selected === {tab.find('fc')}")
    tab.until("document.getElementById('forward').disabled")


def test_the_arrow_keys_with_alt_go_back_and_forward(visit):
    tab = visit("resnet18")
    tab.until("location.hash.includes('e=')")
    _select_in_turn(tab, "conv1", "bn1")
    tab.page.keyboard.press("Alt+ArrowLeft")
    tab.until(f"torchlens.state.selected === {tab.find('conv1')}")
    tab.page.keyboard.press("Alt+ArrowRight")
    tab.until(f"torchlens.state.selected === {tab.find('bn1')}")


def test_a_step_back_forgets_what_came_after_once_another_is_taken(visit):
    tab = visit("resnet18")
    tab.until("location.hash.includes('e=')")
    _select_in_turn(tab, "conv1", "bn1")
    tab.page.locator("#back").click()
    tab.until(f"torchlens.state.selected === {tab.find('conv1')}")
    tab.run(f"torchlens.select({tab.find('fc')})")
    tab.until("document.getElementById('forward').disabled")
    tab.page.locator("#back").click()
    tab.until(f"torchlens.state.selected === {tab.find('conv1')}")


@pytest.mark.parametrize("way", ["control", "button"])
def test_a_closed_module_is_selected_without_opening_it(visit, way):
    tab = visit("resnet18")
    box = tab.run(f"torchlens.screen({tab.find('layer2')})")
    if way == "control":
        tab.page.keyboard.down("Control")
        tab.page.mouse.click(box["x"] + 20, box["y"] + 10)
        tab.page.keyboard.up("Control")
    else:
        tab.page.mouse.move(box["x"] + 20, box["y"] + 10)
        pick = tab.page.locator(f'[data-id="{tab.find("layer2")}"] .pick')
        assert (
            tab.run("getComputedStyle(document.querySelector('.node:hover .pick')).opacity") == "1"
        )
        at = pick.bounding_box()
        tab.page.mouse.click(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2)
    assert tab.run(SELECTED) == "layer2"
    assert tab.page.locator("#panel h2").text_content() == "layer2"
    assert tab.run(OPEN) == 0 or "layer2.0" not in tab.titles()


def test_scrolling_moves_and_with_control_zooms_at_the_pointer(visit):
    tab = visit("resnet18")
    tab.page.mouse.move(400, 500)
    before = tab.run("({...torchlens.state.view})")
    tab.page.mouse.wheel(0, 120)
    tab.until(f"torchlens.state.view.y < {before['y']}")
    after = tab.run("({...torchlens.state.view})")
    assert after == before | {"y": before["y"] - 120}
    tab.page.mouse.wheel(30, 0)
    tab.until(f"torchlens.state.view.x === {before['x'] - 30}")
    here = tab.run("({x: (400 - torchlens.state.view.x) / torchlens.state.view.k})")
    tab.page.keyboard.down("Control")
    tab.page.mouse.wheel(0, -120)
    tab.page.keyboard.up("Control")
    tab.until(f"torchlens.state.view.k > {before['k']}")
    there = tab.run("({x: (400 - torchlens.state.view.x) / torchlens.state.view.k})")
    assert here["x"] == pytest.approx(there["x"])


def test_a_search_marks_hits_and_draws_nothing_anew(visit):
    tab = visit("gpt2")
    tab.page.keyboard.press("0")
    assert tab.run("torchlens.shown()") > 400
    tab.page.keyboard.press("f")  # all of it is seen
    tab.run("window.before = [...document.querySelectorAll('#world [data-id]')]")
    tab.page.locator("#query").fill("c_f")  # what is searched is put together once
    tab.count_blocks()
    tab.page.locator("#query").fill("c_fc")
    assert tab.blocks_run() < 40_000  # a block takes a tenth of a microsecond or so: 4 ms
    assert tab.run("document.querySelectorAll('.node.hit').length") == 12
    assert tab.run("before.every((e, i) => e === document.querySelectorAll('#world [data-id]')[i])")
    tab.page.locator("#query").fill("")
    assert tab.run("document.querySelectorAll('.hit').length") == 0
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("1")
    tab.page.locator("#query").fill("c_fc")
    assert "12 hits" in tab.page.locator(".hit-badge").text_content()
    tab.page.locator("#query").fill("c_fc|c_proj")
    assert tab.page.locator(".hit-badge").count() == 1
    assert "36 hits" in tab.page.locator(".hit-badge").text_content()
    tab.page.locator("#query").fill("nothing")
    assert tab.page.locator(".hit-badge").count() == 0


def test_only_what_is_near_is_drawn_and_the_rest_when_the_reader_comes_to_it(visit):
    tab = visit("gpt2")
    tab.page.keyboard.press("0")
    shown = tab.run("torchlens.scene.nodes.size")
    few = tab.run("document.querySelectorAll('#world [data-id]').length")
    assert 10 < few < shown / 3
    last = tab.run("[...torchlens.scene.nodes.keys()].at(-1)")
    assert tab.page.locator(f'[data-id="{last}"]').count() == 0
    # Every edge and node that the stage shows is there, wherever it is moved to.
    missing = """(() => {
      const { x, y, k } = torchlens.state.view, stage = document.getElementById('stage');
      const isSeen = (left, top, right, bottom) => right * k + x > 0 && bottom * k + y > 0
        && left * k + x < stage.clientWidth && top * k + y < stage.clientHeight;
      const nodes = [...torchlens.scene.nodes.values()].filter(n => isSeen(n.x, n.y, n.x + n.w, n.y + n.h));
      const edges = torchlens.scene.edges.filter(e => isSeen(...e.area));
      const absent = nodes.filter(n => !document.querySelector(`[data-id="${n.id}"]`));
      return [nodes.length, absent.length, edges.filter(e => !e.el).length];
    })()"""
    tab.page.mouse.move(500, 500)
    for _ in range(12):
        tab.page.mouse.wheel(0, 700)
        tab.page.mouse.wheel(35, 0)
        tab.until(f"{missing}[1] === 0")
        seen, *absent = tab.run(missing)
        assert seen > 5
        assert absent == [0, 0]
    # Selecting, and the picture that is saved, reach what was never seen.
    tab.run(f"torchlens.select({last}, {{ isFocused: true }})")
    assert tab.run("document.activeElement.dataset.id") == str(last)
    assert tab.run("document.querySelectorAll('[data-id][tabindex=\"0\"]').length") == 1
    text = tab.run("torchlens.svgText()")
    assert text.count("<title>") > tab.run("torchlens.shown()")
    tab.page.keyboard.press("f")
    assert tab.run("document.querySelectorAll('#world [data-id]').length") == shown


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return (_base36(number // 36) if number >= 36 else "") + digits[number % 36]


def _select_in_turn(tab, *titles: str) -> None:
    for title in titles:
        tab.run(f"torchlens.select({tab.find(title)})")
        tab.until(f"location.hash.includes('s={_base36(tab.find(title))}')")


def test_drawing_asks_the_browser_for_no_layout(visit):
    """Asking for a size or a colour just after drawing makes the browser lay out everything at
    once, and again later.
    """
    tab = visit("gpt2")
    asked = tab.run("""(() => {
      const asked = [], watch = (owner, name) => {
        const own = Object.getOwnPropertyDescriptor(owner, name);
        const note = call => function (...given) { asked.push(name); return call.apply(this, given); };
        const noted = Object.fromEntries(['get', 'set', 'value'].filter(k => own[k]).map(k => [k, note(own[k])]));
        Object.defineProperty(owner, name, { ...own, ...noted });
        return () => Object.defineProperty(owner, name, own);
      };
      const names = ['clientWidth', 'clientHeight', 'scrollTop', 'getBoundingClientRect'];
      const ends = [...names.map(name => watch(Element.prototype, name)), watch(window, 'getComputedStyle')];
      torchlens.openTo(99);
      torchlens.toggle(torchlens.find('transformer'));
      torchlens.toggle(torchlens.find('transformer'));
      for (const end of ends) end();
      return asked;
    })()""")
    assert asked == []
    assert tab.run("torchlens.shown()") > 300
