"""The pictures in `images/` are those that the script draws, and the pages show pictures that
exist.
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from torchlens._draw.render import is_graphviz_there

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("draw_gallery")


def test_every_picture_of_the_script_is_there_and_small(gallery: ModuleType):
    for name in gallery.PICTURES:
        assert 0 < (ROOT / "images" / f"{name}.png").stat().st_size < 300 * 1024, name


@pytest.mark.skipif(not is_graphviz_there(), reason="there is no Graphviz on this machine")
def test_the_script_draws(gallery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few = {
        name: gallery.PICTURES[name]
        for name in ("conditional", "failing", "buffers_and_gradients", "gpt_folded")
    }
    monkeypatch.setattr(gallery, "PICTURES", few)
    gallery.main(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(few)


def test_pages_show_pictures_that_exist():
    shown = [
        (page, path)
        for page in (ROOT / "docs").glob("*.md")
        for path in re.findall(r'src="([^":]+)"', page.read_text())
    ]
    assert shown
    assert [str(path) for page, path in shown if not (page.parent / path).exists()] == []
