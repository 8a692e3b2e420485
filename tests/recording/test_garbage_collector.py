"""The garbage collector is paused while a log is written, and runs as before afterwards."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._recording import garbage_collector
from torchlens._recording.garbage_collector import pause_collector, resume_collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


class Cyclic(nn.Module):
    """Leaves garbage behind that only the collector finds."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = x.detach().clone()
        ring: list[object] = [mine]
        ring.append(ring)
        self.left.append(weakref.ref(mine))
        return x + 1


def test_the_collector_rests_during_the_pass_and_runs_again_afterwards() -> None:
    seen = []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.isenabled())
            return x + 1

    tl.log_forward_pass(Model(), torch.ones(2))
    assert seen == [False]
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    tl.log_forward_pass(nn.ReLU(), torch.ones(2))
    assert not gc.isenabled()


def test_two_users_share_one_pause() -> None:
    first, second = object(), object()
    pause_collector(first)
    pause_collector(second)
    resume_collector(first)
    assert not gc.isenabled()
    resume_collector(second)
    assert gc.isenabled()


def test_what_the_user_froze_stays_frozen_after_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collector, "_MANY_OBJECTS", 0)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        tl.log_forward_pass(nn.ReLU(), torch.ones(2))
        assert gc.get_freeze_count() > frozen / 2
    finally:
        gc.unfreeze()


@pytest.mark.soak
def test_garbage_that_moved_unsearched_is_found_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage_collector, "_MANY_OBJECTS", 0)
    monkeypatch.setattr(garbage_collector, "_COLLECT_AFTER", 1_000)
    monkeypatch.setattr(garbage_collector, "_num_moved", [0])
    gc.collect()
    model = Cyclic()
    tl.log_forward_pass(model, torch.ones(2), layers_to_save="none")
    for _ in range(200):
        tl.log_forward_pass(model, torch.ones(2), layers_to_save="none")
    assert sum(left() is not None for left in model.left) < 200
