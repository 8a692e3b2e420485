"""A short form of `make soak`."""

import gc
import random
from collections.abc import Iterator

import pytest

from benchmarks.soak import soak


@pytest.fixture(autouse=True)
def _no_callbacks() -> Iterator[None]:
    """hypothesis listens to the garbage collector, and an interrupt that strikes it there would be
    lost.
    """
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@pytest.mark.soak
def test_nothing_is_lost_by_faults_and_interruption() -> None:
    random.seed(7)
    figures = soak(
        seconds=0.3,
        num_logs=40,
        num_interrupts=8,
        num_faults=8,
        max_moments=40,
        num_models=0,
        num_large=0,
    )
    assert figures.problems == []
    assert figures.faults == 8
    assert figures.moments >= 30
    assert figures.interrupts >= 8
    assert figures.logs >= 40  # in a row, and after each interrupt, fault and moment


@pytest.mark.soak
def test_nothing_is_lost_under_load_and_interruption() -> None:
    random.seed(7)
    figures = soak(
        seconds=1,
        num_logs=120,
        num_interrupts=20,
        num_faults=20,
        max_moments=120,
        num_models=3,
        num_large=0,
    )
    assert figures.problems == []
    assert figures.interrupts >= 20
    assert figures.faults == 20
    assert figures.models == 3
    assert figures.moments >= 100
    assert (
        figures.logs >= 120 + 10 + 2
    )  # in a row; after each interrupt of the main thread; after the faults and moments
