"""Ctrl-C in the main thread, at random moments."""

import random
import signal
import time
from types import FrameType
from typing import Any

from benchmarks.soak.figures import Figures
from benchmarks.soak.interrupts import Interrupt, Target
from benchmarks.soak.subjects import Subject, all_subjects, check_torch
from benchmarks.zoo.torch_state import state_of_torch

__all__ = ["run_signals"]


def run_signals(figures: Figures, num_interrupts: int) -> None:
    """Ctrl-C in the main thread at random moments."""
    subjects = all_subjects()
    before = state_of_torch()
    target = Target()
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

            def work(subject: Subject = subject, seconds: float = seconds) -> Any:
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
            check_torch(before, figures, "a signal")
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


def _duration(subject: Subject) -> float:
    start = time.perf_counter()
    subject.log()
    return time.perf_counter() - start
