"""How much larger a process is for having logged and validated models: `python -m
benchmarks.resident [--models N]`.

Two new processes take the same models in the same order. One only runs them, the other also logs
and validates each, and drops what it got. The difference, as the system sees it, is what the logs
left behind.
"""

import argparse
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import torchlens as tl
from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.libraries import import_transformers
from benchmarks.zoo.specimen import Absent, Case

__all__ = ["MOST_BYTES", "grown_bytes", "resident_bytes"]

MOST_BYTES = 512 * 2**20
ROOT = Path(__file__).resolve().parents[1]
_LARGE = "a video transformer, 1.2 GB of activations"


def resident_bytes() -> int:
    """Memory of this process: what it is where the system says (Linux), otherwise the most it has
    been.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def grown_bytes(num_models: int, num_large: int) -> dict[str, int]:
    """After each model, by how much the process that logs is larger than the one that only runs."""
    plain, logged = (_run_child(kind, num_models, num_large) for kind in ("plain", "logged"))
    return {name: logged[name] - plain[name] for name in plain}


def _run_child(kind: str, num_models: int, num_large: int) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.resident",
        "--child",
        kind,
        "--models",
        str(num_models),
    ]
    command += ["--large", str(num_large)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def _cases(num_models: int, num_large: int) -> Iterator[tuple[str, Case]]:
    """Models from all over the zoo; then a large one, as often as it is wanted."""
    step = max(1, len(SPECIMENS) // max(1, num_models))
    for name in list(SPECIMENS)[::step][:num_models]:
        try:
            yield name, SPECIMENS[name].make()
        except Absent:
            continue
    for number in range(num_large):
        yield f"{_LARGE}, time {number + 1}", _large()


def _large() -> Case:
    import_transformers()
    from transformers import VideoMAEConfig, VideoMAEModel

    config = VideoMAEConfig()
    return Case(
        VideoMAEModel(config), (torch.rand(1, config.num_frames, config.num_channels, 224, 224),)
    )


def _measure(kind: str, num_models: int, num_large: int) -> dict[str, int]:
    found = {}
    for name, case in _cases(num_models, num_large):
        model, args, kwargs = case.model.eval(), case.args, case.kwargs
        del case
        with torch.no_grad():
            model(*args, **kwargs)
            if kind == "logged":
                history = tl.log_forward_pass(model, list(args), kwargs)
                assert history.layer_labels
                del history
                print(
                    f"  {name}: {tl.validate_saved_activations(model, list(args), kwargs)}",
                    file=sys.stderr,
                    flush=True,
                )
        del model, args, kwargs
        gc.collect()
        found[name] = resident_bytes()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", type=int, default=100, help="how many models of the zoo (default 100)"
    )
    parser.add_argument(
        "--large", type=int, default=3, help="how often a large one at the end (default 3)"
    )
    parser.add_argument("--child", choices=["plain", "logged"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries
            print(json.dumps(_measure(options.child, options.models, options.large)))
        return 0
    grown = grown_bytes(options.models, options.large)
    for name, num_bytes in grown.items():
        print(f"{num_bytes / 2**20:+8.0f} MB after {name}")
    print(f"at most {max(grown.values()) / 2**20:+.0f} MB")
    return 0 if max(grown.values()) <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
