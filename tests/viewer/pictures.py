"""Takes the pictures of the viewer that the docs show: python -m tests.viewer.pictures"""

import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

from tests.viewer.conftest import _FLAGS, Tab, chromium
from tests.viewer.viewer_models import history_of
from torchlens.viewer import explore

IMAGES = Path(__file__).parents[2] / "images"


def _open(*titles: str) -> list[str]:
    return [f"torchlens.toggle(torchlens.find('{title}'))" for title in titles]


def _select(title: str) -> list[str]:
    return [f"torchlens.select(torchlens.find('{title}'))"]


def _colour_by(name: str) -> list[str]:
    choose = f"document.getElementById('overlay').value = '{name}'"
    return [choose, "document.getElementById('overlay').dispatchEvent(new Event('change'))"]


def _look_for(query: str) -> list[str]:
    return [f"document.getElementById('query').value = '{query}'", f"torchlens.search('{query}')"]


_BLOCKS = "transformer.h.0 … 11"
_ATTENTION = "transformer.h.0.attn"
PICTURES: dict[str, tuple[str, Literal["light", "dark"], list[str]]] = {
    "gpt2": ("gpt2", "light", []),
    "gpt2-attention": (
        "gpt2",
        "light",
        [*_open(_BLOCKS, "transformer.h.0", _ATTENTION), *_select("transformer.h.0.attn.c_attn")],
    ),
    "gpt2-block-dark": (
        "gpt2",
        "dark",
        [*_open(_BLOCKS, "transformer.h.0"), *_select("transformer.h.0.mlp"), "torchlens.state.view.y += 170"],
    ),
    "search": ("gpt2", "light", [*_open(_BLOCKS), *_look_for("c_fc|softmax"), "torchlens.walk(1)"]),
    "overlay": ("resnet18", "light", [*_open("layer2", "layer2.0"), *_colour_by("FLOPs")]),
    "resnet18": ("resnet18", "light", []),
    "residual": ("resnet18", "light", [*_open("layer1", "layer1.0"), *_select("layer1.0.bn1")]),
    "recurrent": ("recurrent", "light", [*_select("cell")]),
    "recurrent-open": (
        "recurrent",
        "light",
        [*_open("cell"), *_select("tanh_1_6"), "document.getElementById('pass-next').click()"],
    ),
    "ten-thousand": ("nested_loop", "light", _open("sin, add 418 … 834")),
    "failed": ("failed", "light", []),
}


def main() -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_FLAGS)
        for name, (model, scheme, steps) in PICTURES.items():
            path = Path(folder) / f"{model}.html"
            if not path.exists():
                explore(history_of(model), path)
            page = browser.new_page(viewport={"width": 1600, "height": 1000}, color_scheme=scheme)
            tab = Tab(page, path)
            page.goto(path.as_uri())
            for step in steps:
                tab.run(step)
            page.wait_for_timeout(300)
            page.screenshot(path=IMAGES / f"viewer-{name}.png")
            page.close()
            assert tab.complaints == [], tab.complaints
        browser.close()


if __name__ == "__main__":
    main()
