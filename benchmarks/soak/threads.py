"""Threads that log at once, struck by interrupts, while others train."""

import ctypes
import math
import random
import threading
import time

import torch
from torch import nn

from benchmarks.soak.figures import Figures
from benchmarks.soak.interrupts import Interrupt, Target, told_of_dropped
from benchmarks.soak.subjects import Subject, all_subjects, check_torch
from benchmarks.zoo.torch_state import state_of_torch

__all__ = ["run_threads"]


def run_threads(figures: Figures, seconds: float, min_interrupts: int) -> None:
    """Threads that log at once, struck by interrupts, while others train."""
    subjects = all_subjects()
    expected_losses = _train(_NUM_STEPS)
    before = (
        state_of_torch()
    )  # after a training: the first optimizer imports a part of torch that changes others
    deadline = time.monotonic() + seconds
    struck = rounds = 0
    while time.monotonic() < deadline or struck < min_interrupts:
        stop = threading.Event()
        counts = [Figures() for _ in range(len(subjects) + 2)]
        targets = [Target() for _ in subjects]
        threads = [
            threading.Thread(
                target=_log_until, args=(stop, subject, target, count), name=f"log {number}"
            )
            for number, (subject, target, count) in enumerate(
                zip(subjects, targets, counts, strict=False)
            )
        ]
        threads += [
            threading.Thread(target=_train_until, args=(stop, expected_losses, count), name="train")
            for count in counts[-2:]
        ]
        for thread in threads:
            thread.start()
        targets_of = {
            thread.ident: target for thread, target in zip(threads, targets, strict=False)
        }
        with told_of_dropped(lambda found=targets_of: found[threading.get_ident()].drop()):
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
        check_torch(before, figures, "threads")
        for subject in subjects:
            subject.check_model(figures)
        rounds += 1
        if figures.problems or (rounds > 400 and not struck):
            break
    print(
        f"  {rounds} rounds of {len(subjects)} logging and 2 training threads, {struck} interrupts",
        flush=True,
    )


def _raise_in(thread_id: int | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id or 0), ctypes.py_object(Interrupt)
    )


def _log_until(stop: threading.Event, subject: Subject, target: Target, figures: Figures) -> None:
    while not stop.is_set():
        history, is_struck = target.run(subject.log, figures)
        figures.interrupts += is_struck
        figures.interrupts_in_log += is_struck and history is None
        figures.expect(
            torch._C._len_torch_function_stack() == 0,
            "a thread was left with a torch function mode on",
        )
        if history is not None:
            figures.logs += 1
            subject.check(history, figures)
        del history


_NUM_STEPS = 5
# seconds, for threads that have been told to stop; on a busy machine they are slow to hear it
_PATIENCE = 600.0


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
        try:
            losses = _train(_NUM_STEPS)
        except Exception as error:  # whatever it is, it is ours: nothing in it can fail by itself
            figures.expect(False, f"a training alongside logs raised {error!r}")
            raise
        is_same = all(
            math.isclose(*pair, rel_tol=1e-4) for pair in zip(losses, expected, strict=True)
        )
        figures.expect(is_same, "a training alongside logs took another course")
        figures.training_steps += _NUM_STEPS
