"""Kills processes that write traces, at random moments, and reads what they leave: `python -m
benchmarks.kills`.

Each tensor in a finished shard must be read with its numbers, and each complete call must load with
its operations and modules.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

import torchlens as tl
from torchlens._capture.memory import outflow
from torchlens._trace import call_writer
from torchlens._trace import tail as tailing
from torchlens.errors import TraceError

KINDS = ("small", "in the background", "while it runs", "modules", "one after another")
_CALLS = 12  # of each trace, where there is one after another


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))


def write(path: Path, kind: str) -> None:
    """Writes for ever: call `n` is given the number `n`."""
    call_writer._FLUSH_SECONDS = 0.02
    if kind == "in the background":
        call_writer._SMALL_BYTES = -1
    if kind in ("while it runs", "modules"):
        tailing._Outflow.limit = 3_000
        outflow._INTERVAL = 0.0
        outflow.OutflowWatch.interval = -1.0
    own = model()
    while True:
        with tl.tail(
            own, path, "*.1" if kind == "modules" else "all", max_shard_bytes=200_000
        ) as m:
            call = 0
            while kind != "one after another" or call < _CALLS:
                call += 1
                m(torch.full((8, 16), float(call)))


def kill(path: Path, kind: str, seconds: float) -> None:
    """Lets a process write that long."""
    child = os.fork()
    if not child:
        try:
            write(path, kind)
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def problems_of(path: Path) -> tuple[list[str], int]:
    """What is wrong with what was left behind, and how many tensors were read."""
    folder = path.with_name(f"{path.name}.partial")
    shards = sorted(folder.glob("*.safetensors"))
    names = [name for shard in shards for name in safe_open(shard, "pt").keys()]  # noqa: SIM118
    own = {name for name in names if not name.startswith("torchlens/")}
    if not names and not path.exists() and not path.with_name(f"{path.name}.index.json").exists():
        return [], 0  # nothing was written yet
    try:
        values = tl.read_trace(path)
        calls = sorted({int(name.partition("/")[0]) for name in values})
        whole = {int(name.rpartition("/")[2]) for name in names if "torchlens/call/" in name}
        histories = {call: tl.load(path, call=call) for call in (whole if names else calls)}
    except (TraceError, OSError) as error:
        return [f"{type(error).__name__}: {error}"], 0
    found = [f"{name} is in a shard and was not read" for name in own if name not in values]
    expected = {call: _expected(float(call)) for call in calls}
    for name, value in values.items():
        call, _, rest = name.partition("/")
        if not torch.allclose(value, expected[int(call)][rest], atol=1e-6):
            found.append(f"{name} has other numbers")
    for number, history in histories.items():
        for entry in history:
            where = (entry.containing_module_origin or "").partition(":")[0]
            name = f"{where}/{entry.layer_type}"
            if entry.layer_type not in ("input", "output") and name not in expected[number]:
                found.append(f"call {number}: {entry.layer_label} is said to be in {where!r}")
            elif (
                where
                and entry.has_saved_activations
                and not torch.equal(entry.tensor_contents, values[f"{number}/{name}"])
            ):
                found.append(f"call {number}: {entry.layer_label} is another tensor")
    return found, len(values)


def _expected(number: float) -> dict[str, torch.Tensor]:
    x = torch.full((8, 16), number)
    found = {"input.input": x}
    with torch.no_grad():
        for place, block in enumerate(model()):
            for part, (module, kind) in enumerate(
                zip(block.children(), ("linear", "relu"), strict=True)
            ):
                x = found[f"{place}.{part}/{kind}"] = module(x)
    return found | {"output": x}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    moments = random.Random(seed)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    num_tensors = num_problems = 0
    for number in range(options.kills):
        kind = KINDS[number % len(KINDS)]
        seconds = moments.uniform(0.0, 0.4)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.safetensors"
            kill(path, kind, seconds)
            problems, count = problems_of(path)
        num_tensors += count
        num_problems += bool(problems)
        if problems:
            print(
                f"{kind}, killed after {seconds:.3f} s: {len(problems)} problems, such as "
                f"{problems[0]}",
                flush=True,
            )
    print(
        f"{options.kills} kills, {num_tensors} tensors read, {num_problems} of the traces with "
        "problems"
    )
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
