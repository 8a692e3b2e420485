"""Which files of the package a call passes through: what a reader has to follow.

    python -m benchmarks.routes             # how many files each call passes
    python -m benchmarks.routes diff        # the route of one call, file by file, in order

Counted by `sys.setprofile`, on a tiny CNN, with everything that the call imports imported before.
"""

import argparse
import copy
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import torchlens as tl

PACKAGE = str(Path(tl.__file__).parent)


def tiny_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def files_passed(call: Callable[[], Any]) -> list[str]:
    """The files whose functions the call runs, in the order in which they are first reached."""
    found: dict[str, None] = {}

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and frame.f_code.co_name != "<module>":
            found.setdefault(name.removeprefix(PACKAGE + "/"))

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(found)


def calls() -> dict[str, Callable[[], Any]]:
    model, x = tiny_cnn(), torch.randn(2, 3, 8, 8)
    history, other = tl.log_forward_pass(model, x), tl.log_forward_pass(tiny_cnn(), x)
    len(history), len(other)

    def monitor() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tempfile.TemporaryDirectory() as folder, tl.monitor(model, f"{folder}/run"):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            history.save(f"{folder}/trace.safetensors")

    def load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            history.save(f"{folder}/trace.safetensors")
            print(tl.load(f"{folder}/trace.safetensors")["conv2d_1_1"].tensor_contents.shape)

    return {
        "log_forward_pass": lambda: tl.log_forward_pass(model, x),
        "index": lambda: copy.copy(history)["conv2d_1_1"],
        "to_pandas": lambda: history.to_pandas(),
        "diff": lambda: tl.diff(history, other),
        "monitor": monitor,
        "profile": lambda: str(tl.profile(model, x)),
        "validate": lambda: tl.validate_saved_activations(model, x),
        "save": save,
        "save and load": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("call", nargs="?", choices=list(calls()), help="print the whole route")
    chosen = parser.parse_args().call
    for name, call in calls().items():
        if chosen in (None, name):
            call()
            route = files_passed(call)
            print(f"{name:<20}{len(route):>4} files")
            if chosen:
                print("\n".join(f"  {file}" for file in route))


if __name__ == "__main__":
    main()
