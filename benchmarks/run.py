"""The table of costs: `make bench`.

Each peer runs in an environment of its own under `.venvs`, made at the first run. Every figure is a
ratio measured in one process, the tool and the plain forward pass taking turns. The table is
printed, and written into docs/costs.md with --write.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
MODELS = ["transformers==5.22.2"]
# tool → what is installed beside torch and the models
PEERS = {
    "classic": ["torchlens==0.1.36"],
    "newest": ["torchlens==2.36.1"],
    "clouseau": ["clouseau==0.2", "jax"],
    "nnsight": ["nnsight==0.8.1"],
    "transformerlens": ["transformer_lens==3.9.0"],
}
OWN = ["numpy", "pandas", "graphviz", "safetensors"]
# environment → what is installed there for our own runs
ENVIRONMENTS = {"jax": [*OWN, "jax>=0.10,<0.11", "equinox"]}
# Peers of the monitor, which need no models: see `benchmarks/watchers.py`. torchexplorer also needs
# Graphviz's `dot`.
WATCHERS = {
    "torchexplorer": ["torchexplorer==1.1.2", "wandb==0.31.0"],
    "wandb": ["wandb==0.31.0"],
    "tensorboard": ["tensorboard==2.21.0"],
}
# Peers of extraction: see `benchmarks/extraction.py`. thingsvision brings the torch that it needs.
EXTRACTORS = {"thingsvision": ["thingsvision==2.7.3"], "captum": ["captum==0.9.0"]}
EXTRACTOR_NAMES = {
    "torchlens": "ours",
    "stored": "ours, written to disk",
    "hooks": "forward hooks",
    "newest": "torchlens 2.36.1",
    "thingsvision": "thingsvision 2.7.3 (a run for each layer)",
    "captum": "captum",
}
EXTRACTIONS = [
    "five layers, batches of 32",
    "five layers, one by one",
    "`layer3` alone, batches of 32",
    "`layer3` alone, one by one",
]
NAMES = {
    "torchlens": "torchlens (ours)",
    "labelled": "ours, labels included",
    "keeper": "only keeping every result",
    "hooks": "forward hooks, module outputs only",
    "classic": "torchlens 0.1.36",
    "newest": "torchlens 2.36.1",
}
WORKLOADS = [
    "AlexNet 224",
    "ResNet-18 224",
    "GPT-2, 128 tokens",
    "loop of 10,000 operations",
    "diffusion, 100 steps",
]
LISTINGS = {
    "labels": "labels (`layer_labels`)",
    "table": "a table (`to_pandas`)",
    "json": "JSON (`to_json`)",
}
TRAINING = ["small CNN, 32 images of 32×32", "ResNet-18, 8 images of 112×112"]
PROFILES = {
    "module": "modules",
    "nonfinite": "operations, checked for NaN and Inf",
    "health": "operations, with all health checks",
}
WATCHER_NAMES = {
    "torchexplorer": "torchexplorer (no updates)",
    "wandb": "`wandb.watch` (parameters and their gradients)",
    "tensorboard": "TensorBoard's `add_histogram`, all six",
}
START, END = "<!-- bench:start -->", "<!-- bench:end -->"


def python_of(tool: str) -> str:
    """The interpreter a tool runs in, its environment made if it is not there."""
    folder = (
        ROOT
        / ".venvs"
        / (tool if tool in {*PEERS, *WATCHERS, *EXTRACTORS, *ENVIRONMENTS} else "ours")
    )
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"setting up {folder.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, TORCH], check=True)
        needed = (
            WATCHERS.get(tool)
            or EXTRACTORS.get(tool)
            or [*MODELS, *PEERS.get(tool, ENVIRONMENTS.get(tool, OWN))]
        )
        subprocess.run([*pip, *needed], check=True)
        (folder / "ready").touch()
    return str(python)


def measure(
    tool: str, *arguments: str, script: str = "benchmarks.measure", timeout: float = 150
) -> dict[str, float] | str:
    """The measured figures, or the reason there are none."""
    code = (
        f"import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('{script}', "
        "run_name='__main__')"
    )
    # The repository is first on the path for our own runs, last for a peer of the same name.
    is_peer = tool in {*PEERS, *WATCHERS, *EXTRACTORS}
    paths = {**os.environ, "PYTHONPATH": "" if is_peer else str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [python_of(tool), "-c", code, str(ROOT), tool, *arguments]
    print(f"measuring {tool} {' '.join(arguments)} ...", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=paths,
            cwd=ROOT / ".venvs",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"over {timeout / 60:.0f} min"
    if done.returncode != 0:
        lines = [
            line
            for line in done.stderr.strip().splitlines()
            if re.match(r"\w*(Error|Exception)", line)
        ]
        print(done.stderr[-2000:], file=sys.stderr)
        return f"fails ({lines[-1].split(':')[0]})" if lines else "fails"
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        f"  {figures}", file=sys.stderr, flush=True
    )  # so that they are there if the run is broken off
    return figures


def ratio(result: dict[str, float] | str) -> str:
    if isinstance(result, str):
        return result
    value = result["ratio"]
    return f"{value:.2f}×" if value < 20 else f"{value:,.0f}×"


def ratio_and_end(result: dict[str, float] | str) -> str:
    """With what is left to do for each step when the profile ends."""
    return (
        result
        if isinstance(result, str)
        else f"{ratio(result)}, and {result['end'] * 1000:.1f} ms at the end"
    )


def ratio_and_clock(result: dict[str, float] | str) -> str:
    """With the ratio of the times that passed."""
    return (
        result
        if isinstance(result, str)
        else f"{ratio(result)} ({ratio({'ratio': result['wall']})})"
    )


def listing(result: dict[str, float] | str) -> str:
    """With the time per operation."""
    return (
        result
        if isinstance(result, str)
        else f"{ratio(result)}, {result['logged'] * 10:.2f} µs each"
    )


def training_rows(seconds: float) -> list[str]:
    rows = [
        f"| a training step under the profile | {' | '.join(PROFILES.values())} |",
        "|---|" + "---|" * len(PROFILES),
    ]
    for workload in TRAINING:
        results = [
            measure("training", workload, "--profile", name, "--seconds", str(seconds))
            for name in PROFILES
        ]
        rows.append(f"| {workload} | {' | '.join(map(ratio_and_end, results))} |")
    return rows


def trace_rows(seconds: float, with_peers: bool) -> list[str]:
    """What files cost: see `benchmarks/traces.py`."""
    peer = ["--peer", python_of("clouseau")] if with_peers else []
    return own_rows("torchlens", "benchmarks.traces", "--seconds", str(seconds), *peer)


def own_rows(environment: str, module: str, *arguments: str) -> list[str]:
    """The rows that a file of this folder prints."""
    print(f"measuring {module} ...", file=sys.stderr, flush=True)
    command = [python_of(environment), "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=900
    )
    return done.stdout.strip().splitlines()


def monitoring_rows(seconds: float, with_peers: bool) -> list[str]:
    """In each cell: recording every step, and every tenth."""
    tools = {"torchlens": "ours", **{name: WATCHER_NAMES[name] for name in WATCHERS if with_peers}}
    head = (
        "a training step watched, `every=1` and `every=10`, CPU time of the thread (and on the "
        "clock)"
    )
    rows = [f"| {head} | {' | '.join(tools.values())} |", "|---|" + "---|" * len(tools)]
    for workload in (*TRAINING, "GPT of 6 layers, 8 × 64 tokens"):
        cells = []
        for tool in tools:
            arguments = [workload, "--seconds", str(seconds), "--every"]
            found = [
                ratio_and_clock(measure(tool, *arguments, every, script="benchmarks.watchers"))
                for every in ("1", "10")
            ]
            cells.append(" and ".join(dict.fromkeys(found)))
        rows.append(f"| {workload} | {' | '.join(cells)} |")
    return rows


def extraction_rows(seconds: float, with_peers: bool) -> list[str]:
    """See `benchmarks/extraction.py`."""
    is_there = {tool: with_peers or tool not in {*PEERS, *EXTRACTORS} for tool in EXTRACTOR_NAMES}
    tools = [tool for tool in EXTRACTOR_NAMES if is_there[tool]]
    head = "extraction from ResNet-18, processor time of a further batch"
    rows = [
        f"| {head} | {' | '.join(EXTRACTOR_NAMES[tool] for tool in tools)} |",
        "|---|" + "---|" * len(tools),
    ]
    for workload in EXTRACTIONS:
        options = ("--seconds", str(seconds))
        results = [
            measure(tool, workload, *options, script="benchmarks.extraction", timeout=600)
            for tool in tools
        ]
        rows.append(f"| {workload} | {' | '.join(map(ratio, results))} |")
    return rows


def make_table(seconds: float, with_peers: bool) -> str:
    tools = [tool for tool in NAMES if with_peers or tool not in PEERS]
    rows = [
        f"| everything saved, no_grad | {' | '.join(NAMES[tool] for tool in tools)} |",
        "|---|" + "---|" * len(tools),
    ]
    plain = []
    for workload in WORKLOADS:
        results = {tool: measure(tool, workload, "--seconds", str(seconds)) for tool in tools}
        own = results["torchlens"]
        if not isinstance(own, str):
            plain.append(f"{workload} {own['plain'] * 1000:.1f} ms")
        rows.append(f"| {workload} | {' | '.join(ratio(results[tool]) for tool in tools)} |")
    dropped, kept = (
        measure(tool, "--seconds", str(seconds)) for tool in ("dropped", "dropped-kept")
    )
    others = {
        "a log of 0.9 GB (GPT-2, 4 × 128 tokens), dropped, its memory given back to the system": ratio(
            dropped
        ),
        "the same, if its memory were kept": ratio(kept),
        "100,000 operations against 10,000 (time)": ratio(measure("scaling")),
        "one layer of ResNet-18 again (`save_new_activations`) against one forward hook": ratio(
            measure("extraction", "--seconds", str(seconds))
        ),
    }
    for kind, name in LISTINGS.items():
        others[f"{name} of 100,000 operations against 10,000 (time)"] = listing(
            measure("listing", kind)
        )
    rows += ["", *training_rows(seconds), "", *monitoring_rows(seconds, with_peers)]
    rows += ["", *extraction_rows(seconds, with_peers)]
    memory, imports = measure("memory"), measure("import")
    if isinstance(memory, str) or isinstance(imports, str):
        raise SystemExit(f"memory: {memory}; import: {imports}")
    others["memory beyond the saved tensors"] = f"{memory['extra'] / 1024:.2f} KB per operation"
    others["`import torchlens` after `import torch`"] = f"{imports['seconds'] * 1000:.0f} ms"
    rows += [
        "",
        "| more | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in others.items()),
    ]
    rows += trace_rows(seconds, with_peers)
    rows += own_rows("jax", "benchmarks.jax_costs", "--seconds", str(seconds))
    rows += [
        "",
        (
            f"1× is the plain forward pass: {', '.join(plain)}. Measured on {os.cpu_count()} cores "
            "by `make bench`."
        ),
    ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="per cell, at least three runs")
    parser.add_argument("--no-peers", action="store_true", help="only torchlens and hooks")
    parser.add_argument(
        "--monitoring", action="store_true", help="only the table of the monitor and its peers"
    )
    parser.add_argument("--write", action="store_true", help="put the table into docs/costs.md")
    options = parser.parse_args()
    if options.monitoring:
        print("\n".join(monitoring_rows(options.seconds, not options.no_peers)))
        return
    table = make_table(options.seconds, not options.no_peers)
    print(table)
    if options.write:
        page = ROOT / "docs" / "costs.md"
        text = page.read_text()
        before, after = text.index(START) + len(START), text.index(END)
        page.write_text(f"{text[:before]}\n{table}\n{text[after:]}")


if __name__ == "__main__":
    main()
