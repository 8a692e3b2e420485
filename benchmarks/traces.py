"""What traces cost: `python -m benchmarks.traces [--gigabytes 4] [--peer PYTHON]`; part of `make
bench`.

Each figure is a ratio or a bound measured in one process, the two that are compared taking turns.
Where the machine may be busy, the time of the processor is counted, not that of the clock.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

_MB = 2**20
_TURNS = 3


class Blocks(nn.Module):
    """Makes `count` results of `num_bytes` each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = x + 1
        return x


class Steps(nn.Module):
    """10,000 small operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2500):
            x = ((x + 1).sin() * 2).relu()
        return x


def small_cnn() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3),
    ]
    model = nn.Sequential(
        *layers, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    )
    return model.eval(), torch.rand(4, 3, 32, 32)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory that the process has while a block runs, beyond what it had before."""

    def __enter__(self) -> "Peak":
        self.most = self.start = resident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def extra(self) -> int:
        return self.most - self.start


def large_trace(folder: Path, gigabytes: float) -> dict[str, float]:
    """A trace of one call with many results of 32 MB: its memory, and its time against writing as
    many bytes.
    """
    import torchlens

    size = 32 * _MB
    count = max(2, int(gigabytes * 2**30 / size) - 2)
    x = torch.rand(size // 4)
    model = Blocks(count)

    def raw() -> None:
        block = x.numpy().data
        with torch.no_grad(), (folder / "raw").open("wb", buffering=0) as file:
            y = x
            for _ in range(count + 2):
                file.write(block)
                y = y + 1

    def traced() -> None:
        with (
            torch.no_grad(),
            torchlens.tail(model, folder / "large.safetensors") as m,
        ):
            m(x)

    seconds: dict[str, list[float]] = {"raw": [], "traced": []}
    extra = 0
    written = 0
    for turn in range(5):
        for name, pattern, run in (("raw", "raw", raw), ("traced", "large*", traced)):
            with Peak() if turn == 0 else nullcontext() as peak:  # which takes time of its own
                start = time.process_time()
                run()
                if peak is None:
                    seconds[name].append(time.process_time() - start)
            if peak is not None and name == "traced":
                extra = peak.extra
            files = list(folder.glob(pattern))
            written = sum(file.stat().st_size for file in files)
            # so that the one does not pay for the other, nor for freeing what was there
            for file in files:
                file.unlink()
            os.sync()
    best = {name: min(own) for name, own in seconds.items()}
    return {"bytes": written, "extra": extra, "ratio": best["traced"] / best["raw"], **best}


def small_tensors(folder: Path) -> dict[str, float]:
    """10,000 results of four numbers: written, opened, and one of them read."""
    import torchlens

    with torch.no_grad():
        history = torchlens.log_forward_pass(Steps(), torch.rand(4))
    assert history.layer_labels
    path = folder / "small.safetensors"
    save = best(lambda: history.save(path), 5)
    opened = best(lambda: torchlens.load(path), 9)

    def look_up() -> Any:
        found = torchlens.load(path)
        return found, found["relu_1:2000"], found.layer_labels

    looked_up = best(look_up, 9)
    loaded = torchlens.load(path)
    assert loaded[7000].tensor_contents is not None
    entries = iter(loaded.layer_list[1000:])
    read = best(lambda: next(entries).tensor_contents, 200)
    per_tensor = save / len(history)
    return {
        "per_tensor": per_tensor,
        "open": opened,
        "label": looked_up,
        "read": read,
        "entries": len(history),
    }


def best(run: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times):
        start = time.process_time()
        result = run()
        found.append(time.process_time() - start)
        del result
    return min(found)


def rounds(plain: Callable[[], Any], traced: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Medians of the two in turns, by the time of the processor, all threads counted."""
    for run in (plain, traced, plain, traced):
        run()
    times: dict[str, list[float]] = {"plain": [], "traced": []}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times["plain"]) < 5:
        for name, run in (("plain", plain), ("traced", traced)):
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(own) for name, own in times.items()}


def tail_of_cnn(folder: Path, seconds: float, tool: str) -> dict[str, float]:
    """One call of a small CNN with the outputs of all its modules recorded: setting up, calling,
    closing the file.
    """
    model, x = small_cnn()
    path = folder / "cnn.safetensors"
    if tool == "clouseau":
        from clouseau import inspector  # type: ignore[import-not-found]

        def traced() -> None:
            with torch.no_grad(), inspector.tail(model, path=str(path)) as m:
                m(x)
    else:
        import torchlens

        layers: Any = "all" if tool == "operations" else lambda path, node: True

        def traced() -> None:
            with torch.no_grad(), torchlens.tail(model, path, layers) as m:
                m(x)

    def plain() -> None:
        with torch.no_grad():
            model(x)

    return rounds(plain, traced, seconds)


def cnn_in_turns(pythons: dict[str, str], seconds: float) -> dict[str, dict[str, float]]:
    """`tail_of_cnn` by each tool, in processes of their own that take turns; the best of each."""
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in pythons}
    for _ in range(_TURNS):
        for tool, python in pythons.items():
            path = str(Path(__file__).resolve().parent.parent) if tool != "clouseau" else ""
            command = [
                python,
                str(Path(__file__)),
                "--cnn",
                tool,
                "--seconds",
                str(seconds / _TURNS),
            ]
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env=environment
            )
            found[tool].append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {tool: min(own, key=lambda times: times["traced"]) for tool, own in found.items()}


def report(gigabytes: float, seconds: float, peer: str | None) -> Iterator[tuple[str, str]]:
    """Rows for the table: what, and how much."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        large = large_trace(folder, gigabytes)
        yield (
            (
                f"a trace of {large['bytes'] / 2**30:.1f} GB (`tail`), one call: memory beyond the "
                "model's own"
            ),
            f"{large['extra'] / _MB:.0f} MB",
        )
        yield (
            "the same, processor time against running the model and a plain `write`",
            f"{large['ratio']:.2f}×",
        )
        small = small_tensors(folder)
        yield "`history.save`, each small tensor", f"{small['per_tensor'] * 1e6:.0f} µs"
        yield (
            f"`torchlens.load` of {small['entries']:,} entries; with the labels; one tensor of it",
            (
                f"{small['open'] * 1000:.0f} ms; {small['label'] * 1000:.0f} ms; "
                f"{small['read'] * 1000:.2f} ms"
            ),
        )
        pythons = {"torchlens": sys.executable, "operations": sys.executable}
        if peer is not None:
            pythons["clouseau"] = peer
        found = cnn_in_turns(pythons, seconds)
        ours = found["torchlens"]
        words = (
            f"{ours['traced'] * 1000:.1f} ms; all operations "
            f"{found['operations']['traced'] * 1000:.1f} ms"
        )
        if peer is not None:
            words += f"; clouseau {found['clouseau']['traced'] * 1000:.1f} ms"
        yield (
            f"`tail` of a small CNN ({ours['plain'] * 1000:.1f} ms), the outputs of its modules",
            words,
        )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--peer", help="the Python that has clouseau")
    parser.add_argument("--cnn", help="only the small CNN, with this tool")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cnn:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(tail_of_cnn(Path(name), options.seconds, options.cnn)))
        return
    for what, much in report(options.gigabytes, options.seconds, options.peer):
        print(f"| {what} | {much} |", flush=True)
    print(
        f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
