"""Logging under load and interruption.

Threads log different models while others train; interrupts strike at random, and at each moment
that Python has for them; models raise at random operations; and a thousand logs run in a row
without the garbage collector. After each, torch is compared with what it was object by object, the
model likewise, and the results with those of a plain run. Last, a hundred models of the zoo are
logged and validated in one process, and a large one three times: it must not stay larger than one
that only ran them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.soak.faults import run_faults
from benchmarks.soak.figures import Figures
from benchmarks.soak.in_a_row import run_in_a_row, run_models
from benchmarks.soak.moments import CASES, run_moments
from benchmarks.soak.signals import run_signals
from benchmarks.soak.threads import run_threads

__all__ = ["Figures", "soak"]


@contextmanager
def _crowded() -> Iterator[None]:
    """Python switches between threads fifty times as often as usual, and torch adds none of its
    own.
    """
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
    """Runs everything; the thread part for `seconds`, at least until half of the interrupts have
    struck.
    """
    figures = Figures()
    with _crowded():
        run_in_a_row(figures, num_logs)
        run_faults(figures, num_faults)
        run_signals(figures, num_interrupts - num_interrupts // 2)
        run_moments(figures, max(1, max_moments // len(CASES)))
        run_threads(figures, seconds, num_interrupts // 2)
    if num_models or num_large:
        run_models(figures, num_models, num_large)
    return figures
