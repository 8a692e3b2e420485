"""Every snippet in the README and the docs runs, and prints what the page says it prints.

A ```python block is run; the blocks of a page share one namespace, in order. A ```text block that
follows one directly (with nothing but blank lines between) is what it must print, to the letter;
`...` stands for anything, as in doctest. Blocks in any other language are for reading only.
"""

import contextlib
import doctest
import io
import random
import re
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```\n?", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    """A block of code, the line it starts on, and what it must print (None: nothing is said)."""

    code: str
    line: int
    expected: str | None


def snippets_of(text: str) -> list[Snippet]:
    """The python blocks of a page, each with the text block that follows it directly."""
    blocks = list(_BLOCK.finditer(text))
    found = []
    for number, block in enumerate(blocks):
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        if block["language"] != "python":
            continue
        expected = None
        if (
            following is not None
            and following["language"] == "text"
            and not text[block.end() : following.start()].strip()
        ):
            expected = following["body"]
        found.append(Snippet(block["body"], text.count("\n", 0, block.start("body")), expected))
    return found


def run_page(page: Path) -> None:
    """Runs the snippets of a page; raises at the first that fails or prints something else."""
    # A module of its own, so that dataclasses and the like find their namespace.
    module = types.ModuleType("page")
    for snippet in snippets_of(page.read_text()):
        printed = io.StringIO()
        # Blank lines in front make line numbers those of the page.
        code = compile("\n" * snippet.line + snippet.code, page.name, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        if snippet.expected is not None:
            _check_printed(page.name, snippet, printed.getvalue())


def _check_printed(page: str, snippet: Snippet, printed: str) -> None:
    expected, got = (_comparable(text) for text in (snippet.expected or "", printed))
    if not doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS):
        raise AssertionError(
            f"{page}, the snippet at line {snippet.line + 1} should print\n\n{expected}\nand "
            f"prints\n\n{got}"
        )


def _comparable(text: str) -> str:
    """Tabs as four spaces, without blanks at line ends."""
    return "\n".join(line.expandtabs(4).rstrip() for line in text.strip("\n").splitlines()) + "\n"


@pytest.fixture
def _as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Snippets run in an empty folder, and leave generators and grad mode as they were."""
    monkeypatch.chdir(tmp_path)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run_and_print_what_the_page_says(page: Path):
    run_page(page)


def test_a_snippet_that_prints_something_else_is_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(
        AssertionError,
        match=r"page\.md, the snippet at line 2 should print\n\n2\n\nand prints\n\n1\n",
    ):
        run_page(page)


def test_snippets_of_a_page_share_a_namespace_and_other_blocks_do_not_run(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\n```sh\nraise\n```\n\n```python\nprint(a, [2, "
        "3])\n```\n```text\n1 [...]\n```\n"
    )
    run_page(page)


def headings_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = [
        re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.M)
    ]
    return {heading.replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for target, anchor in re.findall(
            r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")
        ):
            if target.startswith(("http:", "https:")):
                continue
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in headings_of(file)):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


def test_the_index_lists_every_page():
    listed = set(
        re.findall(r"\]\((\w[^)]*\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    )
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
