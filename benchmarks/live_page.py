"""How smooth the live page of a large run is: python -m benchmarks.live_page [--modules 1000]
[--steps 1000]

Makes a run through the monitor's own writer, serves it by `torchlens serve`, opens it in Chromium,
and does what readers do, while steps come in. For each: milliseconds until the change is painted
(the longest of several), and how long the page was busy without a pause (the longest task, where
that is over 50 ms); for a step that comes in, the seconds from the file to the screen. At last the
memory of the server and of the page.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from playwright.sync_api import Page, sync_playwright
from torch import nn

import torchlens
from tests.page.conftest import _FLAGS, chromium
from torchlens._monitor.record.run import Run
from torchlens._monitor.record.samples import Plan, Sample
from torchlens._monitor.record.statistics import Observation
from torchlens._monitor.record.writer import StepPart

__all__ = ["make_run", "measure"]

_KINDS = ("outputs", "gradients")
_HELP = """
window.tasks = [];
const watch = new PerformanceObserver(list => { for (const task of list.getEntries()) tasks.push(task.duration); });
watch.observe({ entryTypes: ["longtask"] });
window.painted = () => new Promise(done => requestAnimationFrame(() => {
  const gate = new MessageChannel();
  gate.port1.onmessage = done;
  gate.port2.postMessage(0);
}));
window.settled = async () => { do await painted(); while (torchlens.isShowing); };
window.timing = async act => {
  tasks.length = 0;
  const begun = performance.now();
  act();
  await settled();
  const found = performance.now() - begun;
  await new Promise(done => setTimeout(done, 100));
  return [found, Math.max(0, ...tasks)];
};
window.chosen = (id, key, value, event) => {
  document.getElementById(id)[key] = value;
  document.getElementById(id).dispatchEvent(new Event(event));
};
"""
_ACTIONS: dict[str, str] = {
    "slider": "chosen('time', 'value', %d * 37 %% document.getElementById('time').max, 'input')",
    "module": "torchlens.goToModule([...torchlens.active.modules.keys()][%d * 111 %% "
    "torchlens.active.modules.size])",
    "colour by": "chosen('by', 'selectedIndex', %d %% document.getElementById('by').length, "
    "'change')",
    "table of modules": "document.getElementById(%d %% 2 ? 'view-graph' : 'view-modules').click()",
}


def make_run(
    folder: Path, num_modules: int, num_steps: int, budget: int
) -> tuple[Run, Callable[[], None]]:
    """A run with so many steps, and what adds one more. The first is recorded, the others are made
    from it.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(num_modules)]
    blocks = [nn.Sequential(*layers[start : start + 10]) for start in range(0, num_modules, 10)]
    model = nn.Sequential(
        *(nn.Sequential(*blocks[start : start + 10]) for start in range(0, len(blocks), 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = torchlens.monitor(model, folder, log=_KINDS, graph="modules", budget=budget)
    writer = run._writer
    first: list[tuple[int, np.ndarray, Plan]] = []
    own = writer.offer

    def offer(part: StepPart) -> bool:
        first.extend(
            (number, sample.values.copy(), sample.plan) for number, sample, _ in part.observations
        )
        return own(part)

    writer.offer = offer  # type: ignore[method-assign]
    model(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
    writer.offer = own  # type: ignore[method-assign]
    generator, step = np.random.default_rng(0), [run.current_step]

    def add() -> None:
        step[0] += 1
        scales = np.exp(generator.standard_normal(len(first)) * 0.2 + 0.001 * step[0]).astype(
            np.float32
        )
        observations: list[Observation] = [
            (number, Sample(values * scale, None, None, plan), None)
            for (number, values, plan), scale in zip(first, scales, strict=True)
        ]
        while run.counts.pending > 10_000:
            time.sleep(0.01)
        writer.offer(StepPart(step[0], observations, [("loss", step[0], 1 / step[0])]))

    while step[0] < num_steps:
        add()
    while run.counts.pending:
        time.sleep(0.01)
    return run, add


def _until(page: Page, fact: str) -> None:
    end = time.monotonic() + 60
    while not page.evaluate(fact):
        assert time.monotonic() < end, f"never came true: {fact}"
        page.wait_for_timeout(5)


def _arrivals(page: Page, add: Callable[[], None], repeats: int) -> dict[str, float]:
    """Steps that come in while the page follows: seconds until they are on the screen, and the
    longest task.
    """
    seconds = []
    page.evaluate("(() => { torchlens.isFollowing = true; tasks.length = 0; })()")
    for _ in range(repeats):
        last = page.evaluate("torchlens.active.steps[torchlens.active.count - 1]")
        begun = time.monotonic()
        add()
        _until(page, f"torchlens.active.steps[torchlens.active.count - 1] > {last}")
        page.evaluate("settled()")
        seconds.append(time.monotonic() - begun)
    task = page.evaluate("new Promise(done => setTimeout(() => done(Math.max(0, ...tasks)), 100))")
    return {"seconds": round(max(seconds), 2), "task": round(task)}


def measure(page: Page, add: Callable[[], None], repeats: int = 8) -> dict[str, Any]:
    """Milliseconds, by what was done."""
    found: dict[str, Any] = {}

    def tell(name: str, times: list[list[float]]) -> None:
        found[name] = {
            "painted": round(max(each[0] for each in times)),
            "task": round(max(each[1] for each in times)),
        }

    for tab in ("scalars", "module"):
        page.evaluate(f"timing(() => document.getElementById('tab-{tab}').click())")
        for name, action in _ACTIONS.items():
            page.evaluate(f"timing(() => {action % 1})")  # the numbers come from the server once
            tell(
                f"{name}, {tab}",
                [
                    page.evaluate(f"timing(() => {action % number})")
                    for number in range(2, 2 + repeats)
                ],
            )
        for view in ("modules", "graph"):
            page.evaluate(f"timing(() => document.getElementById('view-{view}').click())")
            found[f"new step, {tab}, {view}"] = _arrivals(page, add, repeats)
    return found


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])
        * 1024
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--budget", type=int, default=64 << 20, help="bytes; so that all steps stay, some 1 << 30"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the run is kept; if it is there, it goes on (default: nowhere)",
    )
    parser.add_argument("--only-make", action="store_true", help="make the run, and no more")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        begun = time.monotonic()
        folder = options.folder or Path(temporary)
        run, add = make_run(folder / "a", options.modules, options.steps, options.budget)
        print(
            json.dumps(
                {
                    "making": round(time.monotonic() - begun),
                    "files": sum(f.stat().st_size for f in run.folder.iterdir()),
                }
            )
        )
        if options.only_make:
            run.finish()
            return
        command = [sys.executable, "-m", "torchlens", "serve", str(folder)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            while not (url := re.search(r"http://\S+", server.stdout.readline())):
                assert server.poll() is None, "torchlens serve ended"
            browser = playwright.chromium.launch(executable_path=chromium(), args=_FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.add_init_script(_HELP)
            page.set_default_timeout(120_000)
            begun = time.monotonic()
            page.goto(url[0])
            _until(page, "window.torchlens && torchlens.isReady")
            print(
                json.dumps(
                    {
                        "opening": round(time.monotonic() - begun, 2),
                        "steps": page.evaluate("torchlens.active.count"),
                    }
                )
            )
            for name, times in measure(page, add).items():
                print(name, json.dumps(times), flush=True)
            heap = page.evaluate("performance.memory.usedJSHeapSize")
            print(
                json.dumps({"server MB": _resident_bytes(server.pid) >> 20, "page MB": heap >> 20})
            )
            browser.close()
        finally:
            server.terminate()
            server.wait()
            run.finish()


if __name__ == "__main__":
    main()
