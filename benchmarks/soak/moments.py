"""An interrupt at each place of the package where Python lets one in, for every public function:
`python -m benchmarks.soak.moments [NAME ...] [--most N]`.

Python looks for interrupts when a function begins, and when a call of a class or of a function that
is written in C has returned. So these moments are visited one by one, with a call of the public function for each, instead of waiting for chance
to find the bad one. A place that is passed several times is interrupted the first time.
"""

import argparse
import gc
import itertools
import math
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import torchlens as tl
from benchmarks.soak.figures import Figures
from benchmarks.soak.interrupts import Interrupt, told_of_dropped
from benchmarks.zoo.torch_state import (
    changes_of_model,
    changes_of_torch,
    state_of_model,
    state_of_torch,
)
from torchlens._capture.current import CURRENT

PACKAGE = str(Path(tl.__file__).parent) + os.sep
# Files of others whose functions change a state of the thread, and give it back, for us.
_CONTEXTS = (
    "contextlib.py", "grad_mode.py", "_contextlib.py", "_python_dispatch.py", "overrides.py",
)  # fmt: skip
_DRAWS = ("extract",)  # torch's DataLoader takes a random number
_Place = tuple[Any, int, str]  # code, instruction, event


class Cases:
    """One small use of each public function."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        self.other = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.x = torch.rand(2, 4)
        self.numbers = itertools.count()
        self.folder = Path(tempfile.mkdtemp())
        self.history = tl.log_forward_pass(self.model, self.x, save_function_args=True)
        self.changed = tl.log_forward_pass(self.other, self.x, save_function_args=True)
        self.history.save(self.folder / "saved.safetensors")

    def log(self) -> None:
        tl.log_forward_pass(self.model, self.x)

    def log_by_label(self) -> None:
        tl.log_forward_pass(self.model, self.x, layers_to_save=["relu_1", "linear_1_1"])

    def log_calls(self) -> None:
        with tl.log_calls(self.model):
            self.model(self.x)

    def gradients(self) -> None:
        history = tl.log_forward_pass(self.model, self.x, save_gradients=True)
        history.log_backward(history["output_1"].tensor_contents.sum())

    def validate(self) -> None:
        tl.validate_forward_pass(self.model, self.x)

    def tail(self) -> None:
        with tl.tail(self.model, self.folder / "tail.safetensors") as model:
            model(self.x)

    def monitor(self) -> None:
        optimizer = torch.optim.SGD(self.other.parameters(), lr=0.0)
        folder = self.folder / f"run{next(self.numbers)}"
        with tl.monitor(self.other, folder) as run:
            self.other(self.x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=1.0)

    def profile(self) -> None:
        tl.profile(self.model, self.x)

    def diff(self) -> None:
        tl.diff(self.history, self.changed)

    def edit(self) -> None:
        with tl.edit(self.model, {"1": torch.zeros_like}):
            self.model(self.x)

    def rerun(self) -> None:
        self.history.rerun(self.model, self.x, edits={"relu_1": torch.zeros_like})

    def extract(self) -> None:
        tl.extract(self.model, [self.x], ["1"], self.folder / f"features{next(self.numbers)}")

    def save(self) -> None:
        self.history.save(self.folder / "again.safetensors")

    def load(self) -> None:
        history = tl.load(self.folder / "saved.safetensors")
        assert history["relu_1"].tensor_contents is not None

    def explore(self) -> None:
        self.history.explore(str(self.folder / "page.html"))

    def render(self) -> None:
        self.history.render_graph(vis_opt="unrolled", vis_outpath=str(self.folder / "graph.gv"))


CASES = [name for name in vars(Cases) if not name.startswith("_")]


class _State:
    """What an interrupt must leave as it was."""

    def __init__(self, cases: Cases) -> None:
        self._models = [cases.model, cases.other]
        self._torch = state_of_torch()
        self._own = [state_of_model(model) for model in self._models]
        self._thread = self._of_thread()
        self._generators = self._of_generators()

    @staticmethod
    def _of_thread() -> dict[str, Any]:
        return {
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "function modes": torch._C._len_torch_function_stack(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "torch function": torch._C._is_torch_function_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "recorder": CURRENT.tracker,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    @staticmethod
    def _of_generators() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    def changes(self, draws: bool) -> list[str]:
        """What is no longer as it was; the state of the thread is put right."""
        found = list(changes_of_torch(self._torch))
        for state, model in zip(self._own, self._models, strict=True):
            found += [f"the model: {change}" for change in changes_of_model(state, model)]
        now = self._of_thread()
        found += [f"{what} is {now[what]}" for what in now if now[what] != self._thread[what]]
        gc.enable()
        torch.set_grad_enabled(True)
        torch.autograd.grad_mode.inference_mode(False).__enter__()
        if not draws and self._of_generators() != self._generators:
            found.append("a generator moved on")
        return found


def places_of(work: Callable[[], Any]) -> list[_Place]:
    """The places that a call passes, each once."""
    found: dict[_Place, None] = {}

    def note(place: _Place, frame: FrameType) -> None:
        found.setdefault(place)

    _run_watched(work, note)
    return list(found)


def interrupt_at(place: _Place, work: Callable[[], Any]) -> str:
    """Runs `work` with an interrupt at one place; returns where it was raised, "" if nowhere."""
    where = ""

    def strike(here: _Place, frame: FrameType) -> None:
        nonlocal where
        if here == place:
            sys.setprofile(None)
            where = f"{place[0].co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} ({place[2]})"
            raise Interrupt(where)

    try:
        _run_watched(work, strike)
        if where:  # in a finalizer, it is raised a moment later
            time.sleep(0.05)
    except BaseException as error:
        if not _comes_of_interrupt(error):
            raise
        return f"raised {where}"
    return where


def _comes_of_interrupt(error: BaseException | None) -> bool:
    """True for an interrupt, and for what a library made of it in an `except` of its own."""
    while error is not None and not isinstance(error, Interrupt):
        error = error.__context__
    return error is not None


def _run_watched(work: Callable[[], Any], meet: Callable[[_Place, FrameType], None]) -> None:
    """Calls `meet` at each place of this thread where Python would let an interrupt in."""

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event != "c_call" and event != "c_exception" and _counts(frame, event):
            meet((frame.f_code, frame.f_lasti, event), frame)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)


def _counts(frame: FrameType, event: str) -> bool:
    """True in the package, and in functions that it calls to change the state of the thread.

    Not where an `__exit__` that the user's own `with` calls begins, or `__enter__` of a run, which
    has started before: no class written in Python can do anything about an interrupt there.
    """
    if event == "return" and frame.f_code.co_name != "__init__":
        return False
    file, caller = frame.f_code.co_filename, frame.f_back
    if file.startswith(PACKAGE):
        is_outermost = caller is None or caller.f_code.co_filename == __file__
        is_with = frame.f_code.co_name in ("__enter__", "__exit__")
        return not (is_outermost and is_with and event == "call")
    if caller is not None and caller.f_code.co_filename.startswith(PACKAGE):
        return True
    if not file.endswith(_CONTEXTS):
        return False
    while caller is not None and caller.f_code.co_filename.endswith(_CONTEXTS):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(PACKAGE)


def run_moments(
    figures: Figures,
    most: int = 1 << 30,
    names: Sequence[str] = CASES,
    seconds: float = math.inf,
) -> None:
    """Interrupts the public functions at every place, or each at about `most` places."""
    warnings.simplefilter("ignore")
    cases = Cases()
    for name in names:
        work = getattr(cases, name)
        work()  # what is imported at the first call
        work()
        found = places_of(work)
        step = -(-len(found) // most)
        places = found[random.randrange(step) :: step]
        state, end = _State(cases), time.monotonic() + seconds
        dropped: list[None] = []
        num_done, problems = 0, len(figures.problems)
        with told_of_dropped(lambda: dropped.append(None)):  # noqa: B023
            for place in places:
                if time.monotonic() > end:
                    break
                where = interrupt_at(place, work)
                num_done += bool(where)
                is_lost = bool(where) and not where.startswith("raised") and not dropped
                figures.expect(not is_lost, f"{name}: an interrupt at {where} was lost")
                dropped.clear()
                changes = state.changes(name in _DRAWS)
                for change in changes:
                    figures.expect(False, f"{name}: after an interrupt {where}: {change}")
                if changes:  # whatever comes next would only repeat them
                    work()
                    state = _State(cases)
        figures.moments += num_done
        num_new = len(figures.problems) - problems
        print(
            f"  {name}: {num_done} interrupts at {len(found)} places, {num_new} problems",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--most", type=int, default=1 << 30, help="places, for each function")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="at most, for each function"
    )
    options = parser.parse_args()
    figures = Figures()
    run_moments(figures, options.most, options.names or CASES, options.seconds)
    print("\n".join(dict.fromkeys(figures.problems)))
    print(f"{threading.active_count()} threads at the end")
    return 1 if figures.problems else 0


if __name__ == "__main__":
    sys.exit(main())
