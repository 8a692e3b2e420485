"""Logging under load and interruption: `python benchmarks/soak.py [--seconds N] [--interrupts N] [--logs N]`.

Threads log different models while others train; interrupts strike at random, and at each moment that Python has for them;
models raise at random operations; and a thousand logs run in a row without the garbage collector. After each, torch is
compared with what it was object by object, the model likewise, and the results with those of a plain run. Last, a hundred
models of the zoo are logged and validated in one process, and a large one three times: it must not stay larger than one
that only ran them.
"""

import argparse
import ctypes
import gc
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import torchlens as tl

if __name__ == "__main__":  # run as a script, Python does not know the folder above
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.resident import MOST_BYTES, grown_bytes, resident_bytes
from benchmarks.zoo.torch_state import changes_of_model, changes_of_torch, state_of_model, state_of_torch

__all__ = ["Figures", "soak"]


class Interrupt(KeyboardInterrupt):
    """Our own Ctrl-C, so that the user's is not mistaken for it."""


class InjectedError(RuntimeError):
    """What a faulty model raises."""


@dataclass(slots=True)
class Figures:
    """What was done and what went wrong."""

    logs: int = 0
    interrupts: int = 0
    interrupts_in_log: int = 0
    moments: int = 0
    faults: int = 0
    training_steps: int = 0
    models: int = 0
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        if not holds and len(self.problems) < 100:
            self.problems.append(problem)

    def __str__(self) -> str:
        lines = [
            f"logs made                      {self.logs}",
            f"interrupts delivered           {self.interrupts} ({self.interrupts_in_log} cut a log short)",
            f"moments interrupted one by one  {self.moments}",
            f"faults raised by models        {self.faults}",
            f"training steps alongside       {self.training_steps}",
            f"models in one process          {self.models}",
        ]
        if self.problems:
            lines += [f"{len(self.problems)} PROBLEMS:", *(f"  {problem}" for problem in self.problems)]
        else:
            lines.append("nothing lost: torch, models, generators, results and memory are as they should be")
        return "\n".join(lines)


# -- models ------------------------------------------------------------------------------------------------------------


class _Views(nn.Module):
    """Writes through views, into parts, and with `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y[:, 0].add_(1)
        view = y.view(-1)
        y.mul_(2)
        total = torch.empty_like(view.detach())
        torch.add(view.detach(), 1, out=total)
        y[0] = 3
        return total.view_as(y) + y


class _Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(5):
            state = self.cell(x, state)
        return state


def _models() -> list[tuple[nn.Module, torch.Tensor]]:
    """Models of different kinds, each with an input."""
    torch.manual_seed(0)
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return [
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Softmax(-1)).eval(), torch.randn(4, 8)),
        (cnn.eval(), torch.randn(2, 3, 8, 8)),
        (nn.LSTM(8, 8, 2).eval(), torch.randn(5, 2, 8)),
        (layer.eval(), torch.randn(2, 5, 8)),
        (_Views().eval(), torch.randn(4, 8)),
        (_Loop().eval(), torch.randn(4, 8)),
    ]


class _Subject:
    """A model, what it returns, and how its log looks when nothing disturbs it."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        result = model(x)
        self.expected = (result[0] if isinstance(result, tuple) else result).detach()
        self.state = state_of_model(model)
        self.labels = self.log().layer_labels_w_pass

    def log(self) -> tl.ModelHistory:
        return tl.log_forward_pass(self.model, self.x)

    def check(self, history: tl.ModelHistory, figures: Figures) -> None:
        name = type(self.model).__name__
        figures.expect(history.layer_labels_w_pass == self.labels, f"{name}: the log has other layers than before")
        value = history[history.output_layers[0]].tensor_contents
        # To rounding: how torch splits a sum depends on the thread, with or without a log.
        is_same = torch.allclose(value, self.expected, rtol=1e-4, atol=1e-5)
        figures.expect(is_same, f"{name}: the log holds another output than before")
        figures.expect(history.num_tensors_saved == history.num_tensors_total, f"{name}: not every tensor is saved")

    def check_model(self, figures: Figures) -> None:
        for change in changes_of_model(self.state, self.model):
            figures.expect(False, f"{type(self.model).__name__}: {change}")


def _check_torch(before: Any, figures: Figures, when: str) -> None:
    for change in changes_of_torch(before):
        figures.expect(False, f"after {when}: {change}")
    if not gc.isenabled():
        gc.enable()  # so that it is told once, not ever after


# -- a thousand in a row -----------------------------------------------------------------------------------------------


def run_in_a_row(figures: Figures, num_logs: int) -> None:
    """Memory stays flat over many logs although nothing collects garbage."""
    subjects = [_Subject(model, x) for model, x in _models()]
    before = state_of_torch()
    gc.collect()
    gc.disable()
    try:
        for number in range(num_logs):
            if number == min(200, num_logs // 4):  # the allocator has found its level
                rss, tensors = resident_bytes(), _num_tensors()
            subject = subjects[number % len(subjects)]
            history = subject.log()
            if number % 10 == 0:
                subject.check(history, figures)
            del history
            figures.logs += 1
        grown, more = resident_bytes() - rss, _num_tensors() - tensors
    finally:
        gc.enable()
    print(f"  {num_logs} logs in a row: memory {grown / 2**20:+.1f} MB, live tensors {more:+d}", flush=True)
    figures.expect(grown < 8 * 2**20, f"memory grew by {grown / 2**20:.1f} MB over {num_logs} logs")
    figures.expect(more <= 0, f"{more} tensors are left of {num_logs} logs")
    _check_torch(before, figures, "logs in a row")
    for subject in subjects:
        subject.check_model(figures)


def _num_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


# -- models that raise -------------------------------------------------------------------------------------------------


class _Faulty(nn.Module):
    """Raises at operation `at`: by itself, or (`by_shape`) by asking torch for something impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.at, self.by_shape = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for number in range(20):
            if number == self.at:
                if not self.by_shape:
                    raise InjectedError(f"at {number}")
                y = y @ x
            y = (y * 2).relu_() if number % 2 else self.linear(y).view(-1).view(4, 8)
        return y


def run_faults(figures: Figures, num_faults: int) -> None:
    """The model's own exception comes through with the log so far, and everything is put back."""
    model, x = _Faulty(), torch.randn(4, 8)
    state, before = state_of_model(model), state_of_torch()
    sound = _Subject(*_models()[0])
    for _ in range(num_faults):
        model.at, model.by_shape = random.randrange(20), random.random() < 0.5
        options = random.choice([{}, {"save_function_args": True}, {"save_gradients": True}, {"layers_to_save": "linear"}])
        try:
            tl.log_forward_pass(model, x, **options)
        except (InjectedError, RuntimeError) as error:
            figures.faults += 1
            kind = RuntimeError if model.by_shape else InjectedError
            figures.expect(type(error) is kind, f"a fault came out as {type(error).__name__}: {error}")
            partial = getattr(error, "partial_history", None)
            figures.expect(
                partial is not None and len(partial) >= 2, f"the partial log of a fault at {model.at} is missing"
            )
        else:
            figures.expect(False, f"the fault at {model.at} did not come through")
        _check_torch(before, figures, "a fault")
        for change in changes_of_model(state, model):
            figures.expect(False, f"after a fault: {change}")
    sound.check(sound.log(), figures)
    figures.logs += 1
    print(f"  {num_faults} faults raised by models", flush=True)


# -- interrupts --------------------------------------------------------------------------------------------------------


class _Target:
    """Lets at most one interrupt strike a piece of work, and waits for it if it is on its way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_open = self._is_fired = self._is_dropped = False

    def strike(self, send: Callable[[], None]) -> bool:
        """Sends the interrupt, unless the work is over."""
        with self._lock:
            if self._is_open and not self._is_fired:
                self._is_fired = True
                send()
                return True
        return False

    def drop(self) -> None:
        """Python itself drops what is raised while it finalizes an object; that is no loss of ours."""
        self._is_dropped = True

    def run(self, work: Callable[[], Any], figures: Figures) -> tuple[Any, bool]:
        """What `work` returned, and whether an interrupt arrived; None as the result if it cut the work short."""
        result = None
        try:
            with self._lock:
                self._is_open, self._is_fired, self._is_dropped = True, False, False
            result = work()
            with self._lock:
                self._is_open = False
            if self._is_fired:
                for _ in range(1000):  # it was sent before now, and strikes the next time that this thread looks
                    time.sleep(0)
                figures.expect(self._is_dropped, "an interrupt was lost")
        except Interrupt:
            self._is_open = False
            return result, True
        return result, False


def run_signals(figures: Figures, num_interrupts: int) -> None:
    """Ctrl-C in the main thread at random moments."""
    subjects = [_Subject(model, x) for model, x in _models()]
    before = state_of_torch()
    target = _Target()
    is_armed = False

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            raise Interrupt

    previous = signal.signal(signal.SIGALRM, raise_interrupt)
    done = cut = 0
    try:
        while done < num_interrupts:
            subject = random.choice(subjects)
            seconds = _duration(subject)

            def work(subject: _Subject = subject, seconds: float = seconds) -> Any:
                nonlocal is_armed
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, random.random() * seconds * 1.1))
                history = subject.log()
                is_armed = False
                return history

            history, is_struck = target.run(work, figures)
            is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            done += is_struck
            cut += is_struck and history is None
            _check_torch(before, figures, "a signal")
            subject.check_model(figures)
            again = subject.log()
            subject.check(again, figures)
            figures.logs += 1 + (history is not None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    figures.interrupts += done
    figures.interrupts_in_log += cut
    print(f"  {done} signals in the main thread", flush=True)


def _duration(subject: _Subject) -> float:
    start = time.perf_counter()
    subject.log()
    return time.perf_counter() - start


def run_moments(figures: Figures, max_moments: int) -> None:
    """An interrupt at each moment, from the call of a log to its return, at which Python would let one in.

    Python looks for interrupts when a function begins and when a call has returned, so these moments can be visited one by
    one, a log for each, instead of waiting for chance to find the bad one.
    """
    subject = _Subject(*_models()[4])
    before = state_of_torch()
    total, _ = _interrupt_at(-1, subject.log)
    step = -(-total // max_moments)
    dropped: list[Any] = []
    with _told_of_dropped(lambda: dropped.append(None)):
        num_done = _visit(subject, range(random.randrange(step), total, step), dropped, before, figures)
    subject.check(subject.log(), figures)
    figures.logs += 1
    figures.moments += num_done
    print(f"  {num_done} interrupts, at one of every {step} of the {total} moments that there are", flush=True)


@contextmanager
def _told_of_dropped(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell`, in the thread that was struck, when Python drops an interrupt because it struck a finalizer."""
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, Interrupt):
            tell()
        else:
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous


def _visit(subject: _Subject, moments: range, dropped: list[Any], before: Any, figures: Figures) -> int:
    num_done = 0
    for number in moments:
        place = ""
        try:
            _, place = _interrupt_at(number, subject.log)
        except Interrupt as interrupt:
            place = str(interrupt)
            num_done += 1
        else:
            figures.expect(bool(dropped), f"an interrupt at {place} was lost")
        dropped.clear()
        problems = len(figures.problems)
        _check_torch(before, figures, f"an interrupt at {place}")
        subject.check_model(figures)
        if len(figures.problems) > problems:
            break  # whatever comes next would only repeat it
    return num_done


def _interrupt_at(number: int, work: Callable[[], Any]) -> tuple[int, str]:
    """Runs `work`, raising Interrupt at one moment in the package's code; answers how many there were, and where it was."""
    package = str(Path(tl.__file__).parent) + os.sep
    num_seen = 0
    place = ""

    def is_ours(frame: FrameType | None) -> bool:
        return frame is not None and frame.f_code.co_filename.startswith(package)

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal num_seen, place
        if event == "c_call" or event == "c_exception" or not (is_ours(frame) or is_ours(frame.f_back)):
            return
        num_seen += 1
        if num_seen == number + 1:
            sys.setprofile(None)
            place = f"{frame.f_code.co_filename.removeprefix(package)}:{frame.f_lineno} ({event})"
            raise Interrupt(place)

    sys.setprofile(watch)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    del result  # now: what strikes while a log is freed is raised a moment later, and not here
    return num_seen, place


# -- threads -----------------------------------------------------------------------------------------------------------


def run_threads(figures: Figures, seconds: float, min_interrupts: int) -> None:
    """Threads that log at once, struck by interrupts, while others train."""
    subjects = [_Subject(model, x) for model, x in _models()]
    expected_losses = _train(_NUM_STEPS)
    before = state_of_torch()  # after a training: the first optimizer imports a part of torch that changes others
    deadline = time.monotonic() + seconds
    struck = rounds = 0
    while time.monotonic() < deadline or struck < min_interrupts:
        stop = threading.Event()
        counts = [Figures() for _ in range(len(subjects) + 2)]
        targets = [_Target() for _ in subjects]
        threads = [
            threading.Thread(target=_log_until, args=(stop, subject, target, count), name=f"log {number}")
            for number, (subject, target, count) in enumerate(zip(subjects, targets, counts, strict=False))
        ]
        threads += [
            threading.Thread(target=_train_until, args=(stop, expected_losses, count), name="train")
            for count in counts[-2:]
        ]
        for thread in threads:
            thread.start()
        targets_of = {thread.ident: target for thread, target in zip(threads, targets, strict=False)}
        with _told_of_dropped(lambda found=targets_of: found[threading.get_ident()].drop()):
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                number = random.randrange(len(subjects))
                thread_id = threads[number].ident
                targets[number].strike(lambda thread_id=thread_id: _raise_in(thread_id))
                time.sleep(random.random() * 0.01)
            stop.set()
            for thread in threads:
                thread.join(_PATIENCE)
                figures.expect(not thread.is_alive(), f"thread {thread.name} hangs")
        for count in counts:
            figures.logs += count.logs
            figures.interrupts += count.interrupts
            figures.interrupts_in_log += count.interrupts_in_log
            figures.training_steps += count.training_steps
            figures.problems += count.problems
            struck += count.interrupts
        _check_torch(before, figures, "threads")
        for subject in subjects:
            subject.check_model(figures)
        rounds += 1
        if figures.problems or (rounds > 400 and not struck):
            break
    print(f"  {rounds} rounds of {len(subjects)} logging and 2 training threads, {struck} interrupts", flush=True)


def _raise_in(thread_id: int | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id or 0), ctypes.py_object(Interrupt))


def _log_until(stop: threading.Event, subject: _Subject, target: _Target, figures: Figures) -> None:
    while not stop.is_set():
        history, is_struck = target.run(subject.log, figures)
        figures.interrupts += is_struck
        figures.interrupts_in_log += is_struck and history is None
        figures.expect(torch._C._len_torch_function_stack() == 0, "a thread was left with a torch function mode on")
        if history is not None:
            figures.logs += 1
            subject.check(history, figures)
        del history


_NUM_STEPS = 5
_PATIENCE = 600.0  # seconds, for threads that have been told to stop; on a busy machine they are slow to hear it


def _train(num_steps: int) -> list[float]:
    """The losses of a small training that draws no random numbers."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    x = torch.linspace(-1, 1, 64).view(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train_until(stop: threading.Event, expected: list[float], figures: Figures) -> None:
    while not stop.is_set():
        losses = _train(_NUM_STEPS)
        is_same = all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(losses, expected, strict=True))
        figures.expect(is_same, "a training alongside logs took another course")
        figures.training_steps += _NUM_STEPS


# -- resident memory ---------------------------------------------------------------------------------------------------


def run_models(figures: Figures, num_models: int, num_large: int) -> None:
    """A process that logs and validates many models stays about as small as one that only runs them."""
    grown = grown_bytes(num_models, num_large)
    for name, num_bytes in grown.items():
        figures.expect(num_bytes <= MOST_BYTES, f"{num_bytes / 2**20:.0f} MB more than a plain run, after {name}")
    figures.models += len(grown)
    print(f"  {len(grown)} models in one process, at most {max(grown.values()) / 2**20:+.0f} MB of memory left", flush=True)


# -- everything --------------------------------------------------------------------------------------------------------


@contextmanager
def _crowded() -> Iterator[None]:
    """Python switches between threads fifty times as often as usual, and torch adds none of its own."""
    num_threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(interval / 50)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        sys.setswitchinterval(interval)


def soak(
    seconds: float = 60,
    num_logs: int = 1000,
    num_interrupts: int = 300,
    num_faults: int = 200,
    max_moments: int = 1500,
    num_models: int = 100,
    num_large: int = 3,
) -> Figures:
    """Runs everything; the thread part for `seconds`, at least until half of the interrupts have struck."""
    figures = Figures()
    with _crowded():
        run_in_a_row(figures, num_logs)
        run_faults(figures, num_faults)
        run_signals(figures, num_interrupts - num_interrupts // 2)
        run_moments(figures, max_moments)
        run_threads(figures, seconds, num_interrupts // 2)
    if num_models or num_large:
        run_models(figures, num_models, num_large)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Logs under load and interruption; exit code 0 if nothing was lost.")
    parser.add_argument("--seconds", type=float, default=60, help="how long the threads run (default 60)")
    parser.add_argument("--logs", type=int, default=1000, help="logs in a row (default 1000)")
    parser.add_argument("--interrupts", type=int, default=400, help="random interrupts, at least (default 400)")
    parser.add_argument("--faults", type=int, default=300, help="faults raised by models (default 300)")
    parser.add_argument("--models", type=int, default=100, help="models of the zoo in one process (default 100)")
    parser.add_argument("--large", type=int, default=3, help="how often a large one at their end (default 3)")
    parser.add_argument("--seed", type=int, default=None, help="for the random moments; a new one each time by default")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    random.seed(seed)
    print(f"seed {seed}", flush=True)
    figures = soak(
        options.seconds,
        options.logs,
        options.interrupts,
        options.faults,
        num_models=options.models,
        num_large=options.large,
    )
    print(figures)
    return 1 if figures.problems else 0


if __name__ == "__main__":
    sys.exit(main())
