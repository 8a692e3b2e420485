"""The page on a phone."""

import pytest

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def phone(visit):
    def open_(name: str):
        tab = visit(name, **PHONE)
        tab.touch = tab.page.context.new_cdp_session(tab.page)
        return tab

    return open_


def fingers(tab, kind: str, *points: tuple[float, float]) -> None:
    touches = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
    tab.touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})


def test_graph_has_the_full_width_and_nothing_is_out_of_reach(phone):
    tab = phone("gpt2")
    stage = tab.page.locator("#stage").bounding_box()
    assert stage["width"] == 390
    assert stage["height"] > 844 / 2
    assert tab.run("document.documentElement.scrollWidth") == 390
    for name in (
        "#query",
        "#overlay",
        "#options summary",
        "#fit",
        "#help",
        "#back",
        "#forward",
        "#grip",
    ):
        box = tab.page.locator(name).bounding_box()
        assert box["x"] >= 0, name
        assert box["x"] + box["width"] <= 390, name
        assert box["y"] + box["height"] <= 844, name
        assert box["height"] >= 26, name
    tab.page.locator("#options summary").tap()
    for button in tab.page.locator("#menu button, #menu select, #menu input").all():
        button.scroll_into_view_if_needed()
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert box["y"] + box["height"] <= 844
    assert tab.page.locator("#legend").is_visible()


def test_panel_is_a_sheet_that_is_drawn_up(phone):
    tab = phone("resnet18")
    tab.run(f"torchlens.select({tab.find('layer2')})")
    side, grip = tab.page.locator("#side"), tab.page.locator("#grip")
    low = side.bounding_box()
    assert low["width"] == 390
    assert low["height"] < 100
    title = tab.page.locator("#panel h2").bounding_box()
    assert title["y"] + title["height"] <= 844
    grip.tap()
    half = side.bounding_box()["height"]
    assert half > 300
    chosen = tab.run(f"torchlens.screen({tab.find('layer2')})")
    assert chosen["y"] + 30 < 844 - half  # what is selected is not covered
    grip.tap()
    assert side.bounding_box()["height"] > half + 200
    tab.page.locator("#panel .links button").last.scroll_into_view_if_needed()
    grip.tap()
    assert side.bounding_box()["height"] == low["height"]
    at = grip.bounding_box()
    x, y = at["x"] + at["width"] / 2, at["y"] + 10
    fingers(tab, "touchStart", (x, y))
    fingers(tab, "touchMove", (x, y - 150))
    fingers(tab, "touchMove", (x, y - 330))
    fingers(tab, "touchEnd")
    assert side.bounding_box()["height"] == half


def test_two_fingers_zoom_and_one_moves(phone):
    tab = phone("resnet18")
    before = tab.run("({...torchlens.state.view})")
    stage = tab.page.locator("#stage").bounding_box()
    x, y = 195, stage["y"] + 200
    fingers(tab, "touchStart", (x - 50, y), (x + 50, y))
    fingers(tab, "touchMove", (x - 75, y), (x + 75, y))
    fingers(tab, "touchMove", (x - 100, y), (x + 100, y))
    fingers(tab, "touchEnd")
    after = tab.run("({...torchlens.state.view})")
    assert after["k"] == pytest.approx(2 * before["k"], rel=0.02)
    here = [(x - view["x"]) / view["k"] for view in (before, after)]
    assert here[0] == pytest.approx(here[1], abs=1)  # what is between the fingers stays there
    assert tab.run("visualViewport.scale") == 1
    fingers(tab, "touchStart", (300, y))
    fingers(tab, "touchMove", (280, y - 20))
    fingers(tab, "touchMove", (260, y - 40))
    fingers(tab, "touchEnd")
    moved = tab.run("({...torchlens.state.view})")
    assert moved["x"] == pytest.approx(after["x"] - 40, abs=1)
    assert moved["y"] == pytest.approx(after["y"] - 40, abs=1)
    assert tab.run("torchlens.state.selected") == -1


def test_a_tap_opens_and_a_long_press_only_selects(phone):
    tab = phone("resnet18")
    box = tab.run(f"torchlens.screen({tab.find('layer1')})")
    at = (box["x"] + box["w"] / 2, box["y"] + 8)
    fingers(tab, "touchStart", at)
    tab.until(f"torchlens.state.selected === {tab.find('layer1')}")
    fingers(tab, "touchEnd")
    assert "layer1.0" not in tab.titles()
    tab.page.touchscreen.tap(*at)
    assert "layer1.0" in tab.titles()


def test_the_way_to_the_selection_does_not_stand_on_what_failed(phone):
    tab = phone("failed")
    crumbs, failure = (
        tab.page.locator("#crumbs").bounding_box(),
        tab.page.locator("#failure").bounding_box(),
    )
    assert crumbs["height"] > 0
    assert crumbs["y"] + crumbs["height"] <= failure["y"] + 1
