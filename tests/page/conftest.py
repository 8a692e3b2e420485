import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from tests.page.viewer_models import history_of
from torchlens._page.page import explore

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

_PATIENCE = 600_000.0  # milliseconds; only so that a test that fails ends


def chromium() -> str:
    found = (
        os.environ.get("TORCHLENS_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
    )
    assert found, "The viewer is tested in Chromium, and there is none: apt-get install chromium."
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium(), args=_FLAGS, timeout=_PATIENCE
        )
        yield launched
        launched.close()


class Tab:
    """An open page, with everything it asked for and complained about."""

    def __init__(self, page: Page, path: Path):
        self.page = page
        self.path = path
        self._profiler: CDPSession | None = None
        page.set_default_timeout(_PATIENCE)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def run(self, script: str):
        return self.page.evaluate(script)

    def until(self, fact: str) -> None:
        """Waits for what the page does a moment later. (The page allows no evaluation inside, so it
        is asked from here.)
        """
        for _ in range(int(_PATIENCE / 20)):
            assert self.complaints == []
            if self.run(fact):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never came true: {fact}")

    def overlaps(self) -> list[list[int]]:
        """Pairs of nodes that cover each other."""
        found: list[list[int]] = self.run("""(() => {
          const nodes = [...torchlens.scene.nodes.values()].filter(n => !n.isBox), found = [];
          for (const a of nodes) for (const b of nodes)
            if (a.id < b.id && a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h)
              found.push([a.id, b.id]);
          return found;
        })()""")
        return found

    def find(self, title: str) -> int:
        number = self.page.evaluate("title => torchlens.find(title)", title)
        assert number > 0, title
        return number

    def node(self, title: str):
        return self.page.locator(f'[data-id="{self.find(title)}"]')

    def click(self, title: str, **options) -> None:
        box = self.run(f"torchlens.screen({self.find(title)})")
        assert box, f"{title} is not shown"
        if options.get("shift"):
            self.page.keyboard.down("Shift")
        self.page.mouse.click(box["x"] + box["w"] / 2, box["y"] + 10)
        if options.get("shift"):
            self.page.keyboard.up("Shift")

    def count_blocks(self) -> None:
        """From now on the browser counts how often each block of the page's script is run."""
        self._profiler = self.page.context.new_cdp_session(self.page)
        self._profiler.send("Profiler.enable")
        self._profiler.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})

    def blocks_run(self) -> int:
        """How many blocks of script were run since it was last asked: a measure of work that no
        other process changes.
        """
        assert self._profiler is not None
        scripts = self._profiler.send("Profiler.takePreciseCoverage")["result"]
        return sum(
            block["count"]
            for script in scripts
            for own in script["functions"]
            for block in own["ranges"]
        )

    def titles(self) -> list[str]:
        return self.run(
            "[...torchlens.scene.nodes.values()].filter(n => !n.isBox).map(n => "
            "torchlens.title(n.id))"
        )


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name in ("resnet18", "gpt2", "recurrent", "plain_loop", "nested_loop", "failed"):
        found[name] = folder / f"{name}.html"
        explore(history_of(name), found[name])
    return found


@pytest.fixture
def visit(browser, pages):
    """Opens a page; afterwards nothing may have been complained about or asked for."""
    opened: list[Tab] = []

    def visit(where: str | Path, fragment: str = "", is_counted: bool = False, **options) -> Tab:
        path = pages[where] if isinstance(where, str) else where
        page = browser.new_page(**{"viewport": {"width": 1600, "height": 1000}} | options)
        tab = Tab(page, path)
        opened.append(tab)
        if is_counted:
            tab.count_blocks()
        page.goto(path.as_uri() + fragment)
        return tab

    yield visit
    for tab in opened:
        tab.page.close()
        assert tab.complaints == []
        assert [
            url for url in tab.requests if not url.startswith(("data:", tab.path.as_uri()))
        ] == []
