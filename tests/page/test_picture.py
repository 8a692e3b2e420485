"""The graph as it is opened, saved from the page as a picture."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"


def saved(tab, kind: str) -> tuple[str, bytes]:
    tab.page.locator("#options summary").click()
    with tab.page.expect_download() as started:
        tab.page.locator("#save button", has_text=kind).click()
    tab.page.locator("#options summary").click()
    return started.value.suggested_filename, Path(started.value.path()).read_bytes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_svg_is_whole_and_needs_nothing_else(visit, browser, scheme):
    tab = visit("gpt2", color_scheme=scheme)
    tab.click("transformer.h.0 … 11")
    name, content = saved(tab, "SVG")
    assert name == "GPT2.svg"
    root = ET.fromstring(content)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for title in ("transformer.h.7", "lm_head", "Embedding"):
        assert title in texts
    assert not [element for element in root.iter() if element.get("class") or element.get("style")]
    assert b"var(" not in content
    assert all(
        element.get("fill") and element.get("font-size") for element in root.iter(f"{SVG}text")
    )
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_content(content.decode())
    boxes = page.evaluate(
        "[...document.querySelectorAll('text')].map(t => t.getBoundingClientRect().toJSON())"
    )
    page.close()
    width, height = (float(root.get(side) or 0) for side in ("width", "height"))
    assert all(
        box["left"] >= 0 and box["right"] <= width + 20 and box["bottom"] <= height + 20
        for box in boxes
    )


def test_svg_has_the_colours_of_an_overlay_and_its_scale(visit):
    tab = visit("resnet18")
    tab.page.locator("#overlay").select_option("FLOPs")
    root = ET.fromstring(saved(tab, "SVG")[1])
    shown = set(
        tab.run(
            "[...document.querySelectorAll('.node rect.body')].map(e => getComputedStyle(e).fill)"
        )
    )
    assert shown <= {element.get("fill") for element in root.iter(f"{SVG}rect")}
    assert any((element.text or "").startswith("FLOPs") for element in root.iter(f"{SVG}text"))
    assert root.find(f".//{SVG}linearGradient") is not None


def test_png_is_the_whole_graph_at_twice_its_size(visit):
    tab = visit("resnet18")
    name, content = saved(tab, "PNG")
    assert name == "ResNet18.png"
    image = Image.open(io.BytesIO(content)).convert("RGB")
    width, height = tab.run("[torchlens.scene.width, torchlens.scene.height]")
    assert image.width == pytest.approx(2 * (width + 40), abs=4)
    assert image.height == pytest.approx(2 * (height + 40), abs=4)
    colours = {colour for _, colour in image.getcolors(1 << 24)}
    assert {
        (246, 247, 249),
        (255, 255, 255),
        (220, 214, 247),
    } <= colours  # paper, nodes, layers with weights


def test_png_of_a_very_large_graph_is_scaled_and_says_so(visit):
    tab = visit("nested_loop")
    tab.run("torchlens.openTo(2)")
    assert tab.run("torchlens.scene.height") > 1000
    tab.run("torchlens.scene.height = 60000")
    _, content = saved(tab, "PNG")
    assert Image.open(io.BytesIO(content)).height <= 16000
    assert "scaled down" in tab.page.locator("#notice").text_content()
