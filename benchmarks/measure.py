"""Times one tool on one workload, in the process and environment it is run in; prints one line of
JSON.

    python -m benchmarks.measure TOOL WORKLOAD [--seconds 20]

Plain and logged runs take turns, so that whatever else the machine does hits both; the medians are
compared.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.workloads import TRAINING_WORKLOADS, WORKLOADS

Run = Callable[[], Any]


def median_ratio(plain: Run, logged: Run, seconds: float) -> dict[str, float]:
    """Medians of the two, alternating, after one run each to warm up."""
    plain()
    logged()
    times: dict[str, list[float]] = {"plain": [], "logged": []}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times["plain"]) < 3:
        for name, run in (("plain", plain), ("logged", logged)):
            start = time.perf_counter()
            result = run()
            times[name].append(time.perf_counter() - start)
            del result
            if len(times["plain"]) < 3 and name == "logged":
                gc.collect()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "ratio": medians["logged"] / medians["plain"], "runs": len(times["plain"])}


def log_with_torchlens(model: torch.nn.Module, x: Any) -> Run:
    import torchlens

    return lambda: torchlens.log_forward_pass(model, x)


def log_and_label(model: torch.nn.Module, x: Any) -> Run:
    """With the graph, layers and labels that are made at the first look into the history."""
    import torchlens

    def run() -> Any:
        history = torchlens.log_forward_pass(model, x)
        assert history.layer_labels
        return history

    return run


def log_with_classic(model: torch.nn.Module, x: Any) -> Run:
    import torchlens

    return lambda: torchlens.log_forward_pass(model, x, layers_to_save="all", vis_opt="none")


def log_with_newest(model: torch.nn.Module, x: Any) -> Run:
    import torchlens

    return lambda: torchlens._trace(model, x)  # what log_forward_pass is called since its version 2


def save_with_hooks(model: torch.nn.Module, x: Any) -> Run:
    """The least a user would write by hand: the output of every module."""

    def run() -> Any:
        saved: dict[str, Any] = {}
        handles = [
            module.register_forward_hook(
                lambda _module, _args, output, name=name: saved.__setitem__(name, output)
            )
            for name, module in model.named_modules()
        ]
        try:
            model(x)
        finally:
            for handle in handles:
                handle.remove()
        return saved

    return run


class Keeper(TorchFunctionMode):
    """Keeps the result of every call, and does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept.append(result)
        return result


def keep_everything(model: torch.nn.Module, x: Any) -> Run:
    """What it costs that no memory is used twice: the least that saving everything can cost.
    (In-place operations aside, before which a log must copy as well.)"""

    def run() -> Any:
        with Keeper() as keeper:
            model(x)
        return keeper.kept

    return run


TOOLS: dict[str, Callable[[torch.nn.Module, Any], Run]] = {
    "torchlens": log_with_torchlens,
    "labelled": log_and_label,
    "keeper": keep_everything,
    "hooks": save_with_hooks,
    "classic": log_with_classic,
    "newest": log_with_newest,
}


def measure_forward(tool: str, workload: str, seconds: float) -> dict[str, float]:
    model, x = WORKLOADS[workload]()
    with torch.no_grad():
        return median_ratio(lambda: model(x), TOOLS[tool](model, x), seconds)


def measure_dropping(is_kept: bool, seconds: float) -> dict[str, float]:
    """A log of 0.9 GB that is dropped before the next: with its memory given back to the system, or
    all of it kept.
    """
    import torchlens
    from torchlens._capture.memory import process_memory

    if is_kept:
        process_memory.freed_memory()._most_kept = sys.maxsize
    model, x = WORKLOADS["GPT-2, 4 × 128 tokens"]()

    def log_and_drop() -> None:
        torchlens.log_forward_pass(model, x)

    with torch.no_grad():
        return median_ratio(lambda: model(x), log_and_drop, seconds)


def measure_extraction(seconds: float) -> dict[str, float]:
    """One layer of ResNet-18 from a new input: `save_new_activations` against one forward hook."""
    import torchlens

    model, x = WORKLOADS["ResNet-18 224"]()
    saved: list[Any] = []

    def with_hook() -> None:
        handle = model.get_submodule("layer3").register_forward_hook(
            lambda _m, _a, output: saved.append(output)
        )
        model(x)
        handle.remove()
        saved.clear()

    with torch.no_grad():
        history = torchlens.log_forward_pass(model, x, layers_to_save="layer3")

        def with_history() -> None:
            history.save_new_activations(model, x, layers_to_save="layer3")

        return median_ratio(with_hook, with_history, seconds)


STEPS_IN_TURN = 20


# name → level and check of the profile
PROFILES = {
    "module": ("module", None),
    "nonfinite": ("operation", "nonfinite"),
    "health": ("operation", "health"),
}


def measure_training(workload: str, profile_name: str, seconds: float) -> dict[str, float]:
    """A training step under the profile against the same step without, and what ending the profile
    takes per step.
    """
    import torchlens

    model, images, targets = TRAINING_WORKLOADS[workload]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    level, check = PROFILES[profile_name]

    def steps(times: list[float]) -> None:
        for _ in range(STEPS_IN_TURN):
            start = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
            times.append(time.perf_counter() - start)

    steps([])
    plain: list[float] = []
    profiled: list[float] = []
    ends: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(ends) < 3:
        steps(plain)
        profile = torchlens.profile(model, level=level, check=check).start()
        steps(profiled)
        start = time.perf_counter()
        profile.finish()
        ends.append((time.perf_counter() - start) / STEPS_IN_TURN)
    medians = {
        "plain": statistics.median(plain),
        "logged": statistics.median(profiled),
        "end": statistics.median(ends),
    }
    return {**medians, "ratio": medians["logged"] / medians["plain"], "runs": len(plain)}


def measure_scaling() -> dict[str, float]:
    """The time of 100,000 logged and labelled operations over that of 10,000."""
    (small, x), (large, _) = (
        WORKLOADS["loop of 10,000 operations"](),
        WORKLOADS["loop of 100,000 operations"](),
    )
    with torch.no_grad():
        return median_ratio(log_and_label(small, x), log_and_label(large, x), 0)


def as_labels(history: Any) -> Any:
    return history.layer_labels


def as_table(history: Any) -> Any:
    return history.to_pandas()


def as_json(history: Any) -> Any:
    return history.to_json()


LISTINGS: dict[str, Callable[[Any], Any]] = {
    "labels": as_labels,
    "table": as_table,
    "json": as_json,
}


def measure_listing(kind: str) -> dict[str, float]:
    """The time that a list of 100,000 operations takes over that of one of 10,000."""
    import torchlens

    models = (WORKLOADS[f"loop of {count} operations"] for count in ("10,000", "100,000"))
    small, large = (torchlens.get_model_metadata(*model()) for model in models)
    return median_ratio(lambda: LISTINGS[kind](small), lambda: LISTINGS[kind](large), 0)


def measure_memory() -> dict[str, float]:
    """Bytes per operation that a log of 100,000 of them takes beyond the tensors it saves."""
    import torchlens

    model, x = WORKLOADS["loop of 100,000 operations"]()

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with torch.no_grad():
        torchlens.log_forward_pass(WORKLOADS["loop of 10,000 operations"]()[0], x)
        before = resident()
        kept = [x]
        for _ in range(50_000):
            kept.append(kept[-1] + 1)
            kept.append(torch.sin(kept[-1]))
        tensors = resident() - before
        del kept
        before = resident()
        history = torchlens.log_forward_pass(model, x)
        num_entries = len(history)  # makes the graph
        log = resident() - before
    return {
        "tensors": tensors / 100_000,
        "log": log / 100_000,
        "extra": (log - tensors) / num_entries,
    }


def measure_import() -> dict[str, float]:
    """What `import torchlens` adds to `import torch`, in new processes, once its bytecode is there
    as after installing.
    """
    code = (
        "import time, torch; t = time.perf_counter(); import torchlens; print(time.perf_counter() "
        "- t)"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    times = []
    for _ in range(8):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        times.append(float(done.stdout))
    return {"seconds": statistics.median(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    others = [
        "dropped",
        "dropped-kept",
        "extraction",
        "training",
        "scaling",
        "listing",
        "memory",
        "import",
    ]
    parser.add_argument("tool", choices=[*TOOLS, *others])
    parser.add_argument("workload", nargs="?", choices=[*WORKLOADS, *TRAINING_WORKLOADS, *LISTINGS])
    parser.add_argument("--profile", choices=list(PROFILES), default="module", help="of training")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries that are measured
    torch.manual_seed(0)
    result: dict[str, Any]
    if options.tool in TOOLS:
        result = measure_forward(options.tool, options.workload, options.seconds)
    elif options.tool.startswith("dropped"):
        result = measure_dropping(options.tool == "dropped-kept", options.seconds)
    elif options.tool == "extraction":
        result = measure_extraction(options.seconds)
    elif options.tool == "listing":
        result = measure_listing(options.workload)
    elif options.tool == "training":
        result = measure_training(options.workload, options.profile, options.seconds)
    else:
        result = {"scaling": measure_scaling, "memory": measure_memory, "import": measure_import}[
            options.tool
        ]()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
