"""The figures of the recipes are those that the page's own snippets draw."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_figure_of_the_page_is_drawn_by_the_page_and_small() -> None:
    text = (ROOT / "docs" / "intervention-recipes.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r'"(recipes-[a-z-]+\.png)"', text))
    assert drawn == set(re.findall(r"\(\.\./images/(recipes-[a-z-]+\.png)\)", text))
    assert drawn == {path.name for path in (ROOT / "images").glob("recipes-*.png")}
    assert all((ROOT / "images" / name).stat().st_size < 100 * 1024 for name in drawn)
