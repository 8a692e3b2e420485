"""A thousand logs in a row without the garbage collector, and a hundred models in one process."""

import gc

import torch

from benchmarks.resident import MOST_BYTES, grown_bytes, resident_bytes
from benchmarks.soak.figures import Figures
from benchmarks.soak.subjects import all_subjects, check_torch
from benchmarks.zoo.torch_state import state_of_torch

__all__ = ["run_in_a_row", "run_models"]


def run_in_a_row(figures: Figures, num_logs: int) -> None:
    """Memory stays flat over many logs although nothing collects garbage."""
    subjects = all_subjects()
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
    print(
        f"  {num_logs} logs in a row: memory {grown / 2**20:+.1f} MB, live tensors {more:+d}",
        flush=True,
    )
    figures.expect(grown < 8 * 2**20, f"memory grew by {grown / 2**20:.1f} MB over {num_logs} logs")
    figures.expect(more <= 0, f"{more} tensors are left of {num_logs} logs")
    check_torch(before, figures, "logs in a row")
    for subject in subjects:
        subject.check_model(figures)


def _num_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def run_models(figures: Figures, num_models: int, num_large: int) -> None:
    """A process that logs and validates many models stays about as small as one that only runs
    them.
    """
    grown = grown_bytes(num_models, num_large)
    for name, num_bytes in grown.items():
        figures.expect(
            num_bytes <= MOST_BYTES,
            f"{num_bytes / 2**20:.0f} MB more than a plain run, after {name}",
        )
    figures.models += len(grown)
    print(
        f"  {len(grown)} models in one process, at most {max(grown.values()) / 2**20:+.0f} MB of "
        "memory left",
        flush=True,
    )
