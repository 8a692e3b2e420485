"""Takes the pictures of the viewer that the docs show: python -m tests.page.pictures [name ...]"""

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from playwright.sync_api import Browser, sync_playwright

import torchlens as tl
from benchmarks.pages import MODELS
from tests.page.conftest import _FLAGS, Tab, chromium
from tests.page.viewer_models import ResNet18, history_of
from torchlens._page.page import explore
from torchlens._page.together import explore_together

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


_INTO_LAYER2 = [
    f"torchlens.panes[0].toggle(torchlens.panes[0].find('{title}'))"
    for title in ("layer2", "layer2.0")
]
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
        [
            *_open(_BLOCKS, "transformer.h.0"),
            *_select("transformer.h.0.mlp"),
            "torchlens.state.view.y += 170",
        ],
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
    "encoder-decoder": ("t5", "light", []),
    "together": ("together", "light", [*_INTO_LAYER2, "torchlens.goTo(1)"]),
}


def _write_two(path: Path) -> None:
    """ResNet-18, and the same with another stride in its second stage."""
    logs = []
    for stride in (2, 1):
        torch.manual_seed(0)
        model = ResNet18().eval()
        model.layer2[0].conv1.stride = model.layer2[0].downsample[0].stride = (stride, stride)
        logs.append(tl.log_forward_pass(model, torch.randn(1, 3, 64, 64)))
    explore_together(logs[0], logs[1], path, names=("ResNet-18", "stride 1 in layer2"))


_DYING = [
    (
        "torchlens.goToFinding(torchlens.active, torchlens.active.findings.find(each => each.kind "
        "=== 'dead units'))"
    )
]
# Pages of runs: which one, what is chosen in it, and what is done.
RUN_PICTURES: dict[str, tuple[str, str, list[str]]] = {
    "findings": ("dying", "by=outputs/zero", _DYING),
    "modules": ("both", "view=modules&by=outputs/rms&tab=module&shape=ridge&module=3.0", []),
}


def _write_runs(folder: Path) -> None:
    """Of the example in which a layer dies, and of the same training without the accident."""
    dying_layer: Any = import_module("examples.dying_layer")
    dying_layer.main(folder)
    dying_layer.ACCIDENT, accident = -1, dying_layer.ACCIDENT
    try:
        dying_layer.main(folder / "well")
    finally:
        dying_layer.ACCIDENT = accident
    (folder / "well" / "dying").rename(folder / "well" / "well")
    tl.open_run(folder / "dying").explore(
        folder / "both.html", compare=[folder / "well" / "well"], title="two runs"
    )


def take_runs(browser: Browser, folder: Path, names: Sequence[str]) -> None:
    """Pictures of runs."""
    _write_runs(folder)
    for name in names:
        file, chosen, steps = RUN_PICTURES[name]
        page = browser.new_page(viewport={"width": 1500, "height": 900})
        tab = Tab(page, folder / f"{file}.html")
        page.goto(f"{tab.path.as_uri()}#{chosen}")
        tab.until("window.torchlens && torchlens.isReady === true")
        for step in steps:
            tab.run(step)
        tab.until("!torchlens.isShowing")
        page.wait_for_timeout(300)
        page.screenshot(path=IMAGES / f"runs-{name}.png")
        page.close()
        assert tab.complaints == [], tab.complaints


def main() -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium(), args=_FLAGS)
        asked = sys.argv[1:] or [*PICTURES, *(f"runs-{name}" for name in RUN_PICTURES)]
        of_runs = [name.removeprefix("runs-") for name in asked if name.startswith("runs-")]
        if of_runs:
            take_runs(browser, Path(folder), of_runs)
        for name in asked:
            if name.startswith("runs-"):
                continue
            model, scheme, steps = PICTURES[name]
            path = Path(folder) / f"{model}.html"
            if model == "together":
                _write_two(path)
            elif not path.exists():
                torch.manual_seed(0)
                explore(MODELS[model]() if model in MODELS else history_of(model), path)
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
