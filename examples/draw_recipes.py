"""Draws the figures of docs/intervention-recipes.md into images/, by running the page.

python examples/draw_recipes.py
"""

import contextlib
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "intervention-recipes.md"


def main(target: Path = ROOT / "images") -> None:
    import matplotlib

    matplotlib.use("agg")
    target, page = target.resolve(), types.ModuleType("page")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S):
            exec(code, page.__dict__)
        for picture in Path(folder).glob("recipes-*.png"):
            shutil.copy(picture, target / picture.name)
            print(target / picture.name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
