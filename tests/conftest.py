"""What all tests share: golden files, a quiet machine, and generators that start the same
everywhere.
"""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from torchlens._draw import render
from torchlens._monitor.record import writer

# Virtual machines may announce AMX without being able to run it: a product in bfloat16 then ends
# the process, with or without torchlens (torch 2.13). Processes that tests start inherit it. oneDNN
# reads it at its first operation.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files anew from what is printed now",
    )


@pytest.fixture(autouse=True, scope="session")
def _patient() -> Iterator[None]:
    """However busy the machine, Graphviz is waited for, and so is the writer of a run."""
    before = render._PATIENCE, writer.LONGEST_WAIT
    render._PATIENCE, writer.LONGEST_WAIT = 1200.0, float("inf")
    yield
    render._PATIENCE, writer.LONGEST_WAIT = before


@pytest.fixture(autouse=True, scope="session")
def _drawings_go_to_a_temporary_folder() -> Iterator[None]:
    """A test that draws names a path: the default one is in the folder that the tests run in."""
    yield
    assert not Path("graph.gv").exists(), "a test drew without vis_outpath"


@pytest.fixture(autouse=True)
def _as_wide_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is not cut to the terminal that the tests happen to run in."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _no_loop_of_a_browser(request: pytest.FixtureRequest) -> Iterator[None]:
    """A browser, once started, holds an event loop in this thread until the last test; only its own
    tests may see that.
    """
    loop = None if "browser" in request.fixturenames else asyncio._get_running_loop()
    if loop is not None:
        asyncio._set_running_loop(None)
    yield
    if loop is not None:
        asyncio._set_running_loop(loop)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def generated(request: pytest.FixtureRequest) -> Callable[[Path, Callable[[str], str]], None]:
    """Compares a page with what the code makes of it, or writes the page under
    `--update-golden`.
    """

    def compare(path: Path, make: Callable[[str], str]) -> None:
        page = path.read_text(encoding="utf-8")
        if request.config.getoption("--update-golden"):
            path.write_text(page := make(page), encoding="utf-8")
        assert make(page) == page, "run pytest --update-golden and read the difference"

    return compare


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the file of that name in `tests/golden`, or writes the file under
    `--update-golden`.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), (
            f"There is no golden file {path.name} yet: run pytest --update-golden and read what it "
            "wrote."
        )
        assert text == path.read_text(encoding="utf-8")

    return compare
