"""A short form of `make soak`."""

import random

from benchmarks.soak import soak


def test_nothing_is_lost_under_load_and_interruption() -> None:
    random.seed(7)
    figures = soak(seconds=1, num_logs=120, num_interrupts=20, num_faults=20, max_moments=120)
    assert figures.problems == []
    assert figures.interrupts >= 20
    assert figures.faults == 20
    assert figures.logs > 140
