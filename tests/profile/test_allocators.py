"""Memory is what the allocator gave and took back, to the byte."""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._capture import recorder
from torchlens._profile import allocators, logged_steps

MB = 2**20


@pytest.fixture(autouse=True, scope="module")
def _others_are_frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # so that collecting takes no time
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    gc.collect()  # of other tests; freeing their tensors in the middle of a test would count


def test_peak_and_remainder_are_those_of_the_allocator():
    def forward(self, x):
        first = torch.empty(4 * MB, dtype=torch.uint8)
        second = torch.empty(2 * MB, dtype=torch.uint8)
        del first
        third = torch.empty(1 * MB, dtype=torch.uint8)
        del second
        return third

    model = Model(
        lambda self, x: (torch.empty(8 * MB, dtype=torch.uint8), self.inner(x)),
        inner=Model(forward),
    )
    with tl.profile(model) as p:
        kept = model(torch.rand(1))
    inner, outer = p["inner"].calls[0], p.root.calls[0]
    assert (inner.peak_bytes, inner.added_bytes) == (6 * MB, 1 * MB)
    assert (outer.peak_bytes, outer.added_bytes) == (14 * MB, 9 * MB)
    assert (p.steps[0].peak_bytes, p.steps[0].added_bytes) == (14 * MB, 9 * MB)
    del kept


def test_freed_memory_counts_as_negative():
    held = []

    def forward(self, x):
        if x == "hold":
            held.append(torch.empty(3 * MB, dtype=torch.uint8))
        elif x == "free":
            held.clear()

    model = Model(forward)
    with tl.profile(model) as p:
        for x in ("hold", "nothing", "free"):  # the second step is timed
            model(x)
    found = [(call.peak_bytes, call.added_bytes) for call in p.calls]
    assert found == [(3 * MB, 3 * MB), (None, None), (0, -3 * MB)]


def test_memory_from_before_the_profile_does_not_count():
    held = [torch.empty(8 * MB, dtype=torch.uint8)]
    with tl.profile(model := Model(lambda self, x: held.append(torch.empty(x, dtype=torch.uint8)))):
        model(8 * MB)  # torch goes on to believe that there are 8 MB at this address
    held.clear()
    held.append(torch.empty(3 * MB, dtype=torch.uint8))
    with tl.profile(model := Model(lambda self, x: held.clear())) as p:
        model(1)
    assert (p.calls[0].peak_bytes, p.calls[0].added_bytes) == (0, 0)


def test_every_step_starts_anew():
    model = Model(lambda self, n: torch.empty(n, dtype=torch.uint8))
    with tl.profile(model) as p:
        for n in (MB, 7, 2 * MB, 7, 3 * MB):
            model(n)
    assert [call.peak_bytes for call in p.calls] == [MB, None, 2 * MB, None, 3 * MB]
    assert [step.peak_bytes for step in p.steps] == [MB, None, 2 * MB, None, 3 * MB]


@pytest.mark.parametrize("level", ["module", "operation"])
def test_backward_memory_of_a_linear_layer_is_its_gradients(level):
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False))
    x = torch.rand(16, 64, requires_grad=True)
    with tl.profile(model, level=level) as p:
        y = model(x)
        y.backward(torch.ones_like(y))
    second, first = p["1"].calls[0], p["0"].calls[0]
    assert (second.peak_bytes, second.added_bytes) == (16 * 32 * 4, 16 * 32 * 4)
    gradients = 4 * (16 * 128 + 128 * 32)  # of its input and of its weight
    assert second.peak_bytes_backward == gradients
    # The activation between the two is not needed any more.
    assert second.added_bytes_backward == gradients - 4 * 16 * 128
    assert first.peak_bytes_backward == 4 * (64 * 128 + 16 * 64)
    # Nor is the gradient that came in.
    assert first.added_bytes_backward == 4 * (64 * 128 + 16 * 64) - 4 * 16 * 128
    assert (
        p.root.calls[0].added_bytes_backward
        == second.added_bytes_backward + first.added_bytes_backward
    )


def test_a_checked_profile_measures_the_same_bytes():
    def bytes_with(**options):
        torch.manual_seed(0)
        model = MLP()
        with tl.profile(model, **options) as p:
            model(torch.rand(64, 4)).sum().backward()
        return [(call.peak_bytes, call.added_bytes, call.peak_bytes_backward) for call in p.calls]

    assert (
        bytes_with() == bytes_with(check="nonfinite", level="module") == bytes_with(check="health")
    )


@pytest.mark.parametrize(
    "options", [{}, {"check": "nonfinite"}, {"check": "health", "level": "module"}], ids=str
)
def test_memory_of_the_profile_itself_is_left_out(options, monkeypatch):
    def keep(session):
        torch.rand(MB)  # as capture does once in a process

    monkeypatch.setattr(
        logged_steps.LoggedSession,
        "_add_sources",
        _before(keep, logged_steps.LoggedSession._add_sources),
    )
    monkeypatch.setattr(recorder.Recorder, "finish", _before(keep, recorder.Recorder.finish))
    with tl.profile(model := MLP(), **options) as p:
        model(torch.rand(2, 4))
    assert p.steps[0].peak_bytes == p.calls[0].peak_bytes < 1000


def _before(first, then):
    def both(self, *args):
        first(self)
        return then(self, *args)

    return both


def test_activations_kept_for_backward_are_those_of_the_nodes_each_storage_once():
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4), nn.Flatten(), nn.Identity(), nn.Sigmoid()
    )
    with tl.profile(model) as p:
        model(torch.rand(32, 8))
    kept = {address: record.calls[0].saved_bytes for address, record in p.modules.items()}
    assert kept == {
        "": 4 * 32 * (8 + 16 + 4),  # the input, and the results of the sigmoids; no parameter
        "0": 4 * 32 * 8,
        "1": 4 * 32 * 16,
        "2": 4 * 32 * 16,  # the same storage as that of "1"
        "3": 0,
        "4": 0,
        "5": 4 * 32 * 4,
    }


def test_checkpointing_keeps_less():
    def run(function):
        model = Model(
            function,
            block=nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid()),
        )
        with tl.profile(model) as p:
            model(torch.rand(16, 8, requires_grad=True)).sum().backward()
        assert p.problems == []
        return p.root.calls[0].saved_bytes

    plain = run(lambda self, x: self.block(x))
    checkpointed = run(
        lambda self, x: torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
    )
    assert plain == 4 * 16 * 8 * 3
    assert checkpointed == 4 * 16 * 8  # what it is run again with


@pytest.mark.parametrize("level", ["module", "operation"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_memory_that_checkpoints_keep_agrees_with_the_allocator(level, use_reentrant):
    blocks = nn.ModuleList(
        [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    )
    scale = torch.rand(32, 64)

    def forward(self, x):
        for block in self.blocks:
            run = partial(lambda block, x, scale: block(x) * scale, block, scale=scale)
            x = checkpoint(run, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        return x

    model, x = Model(forward, blocks=blocks), torch.rand(32, 64, requires_grad=True)
    with tl.profile(model, level=level) as p:
        for _ in range(3):
            model(x).sum().backward()
        if not use_reentrant:  # which warns that it is of no use
            with torch.no_grad():
                model(x)
    num_bytes = x.nbytes
    for step in (1, 3):
        call = next(call for call in p.root.calls if call.step == step)
        assert (
            call.added_bytes == 3 * num_bytes
        )  # the results of the blocks, of which the last is the model's
        outside = (
            num_bytes if use_reentrant else 2 * num_bytes
        )  # x, and the scale, which a closure holds anyway
        assert call.saved_bytes - outside + num_bytes == call.added_bytes
    assert use_reentrant or p.root.calls[-1].saved_bytes == 0


def test_memory_can_be_left_out():
    with tl.profile(model := MLP(), memory=False) as p:
        model(torch.rand(2, 4)).sum().backward()
    assert {call.peak_bytes for call in p.calls} == {None}
    assert p.steps[0].peak_bytes is None
    assert p.problems == []
    assert p.calls[0].backward_spans


def test_without_the_allocators_everything_else_is_measured(monkeypatch):
    def fail(config):
        raise TypeError("another version of torch")

    monkeypatch.setattr(allocators, "_enable", fail)
    with tl.profile(model := MLP()) as p:
        for _ in range(2):
            model(torch.rand(2, 4)).sum().backward()
    assert [call.peak_bytes for call in p.root.calls] == [None, None]
    assert p.root.calls[1].backward_spans
    assert p.root.calls[0].flops > 0
    assert len(p.problems) == 1
    assert p.problems[0].startswith(
        "Memory was not measured: the profile itself failed (TypeError: another version"
    )


def test_a_profiler_of_the_users_own_that_runs_already_is_left_alone():
    model = MLP()
    with torch.autograd.profiler.profile(use_kineto=False) as theirs, tl.profile(model) as p:
        model(torch.rand(2, 4)).sum().backward()
    assert any(event.name == "aten::linear" for event in theirs.function_events)
    assert {call.peak_bytes for call in p.calls} == {None}
    assert "another profiler" in p.problems[0]
    assert p.calls[0].flops > 0


def test_a_profiler_that_the_user_starts_meanwhile_takes_over():
    model = MLP()
    with tl.profile(model) as p:
        model(torch.rand(2, 4)).sum().backward()
        with torch.profiler.profile() as theirs:
            model(torch.rand(2, 4)).sum().backward()
        model(torch.rand(2, 4)).sum().backward()
    assert any(event.key == "aten::linear" for event in theirs.key_averages())
    assert [call.peak_bytes is None for call in p.root.calls] == [False, True, False]
    assert [step.peak_bytes is None for step in p.steps][2] is False


def test_nothing_is_said_on_the_terminal(capfd):
    held = [torch.rand(10) for _ in range(2000)]  # torch warns of each thousandth that is freed
    model = Model(lambda self, x: held.clear())
    with tl.profile(model) as p:
        model(1)
    assert p.calls[0].added_bytes == 0
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_as_listening_ends_leaves_nothing_in_torch(monkeypatch):
    model = MLP()
    take_away, num_calls = allocators._take_away, [0]

    def interrupted():
        num_calls[0] += 1
        if num_calls[0] == 2:  # the first was to begin with
            raise KeyboardInterrupt
        take_away()

    monkeypatch.setattr(allocators, "_take_away", interrupted)
    module: Any = torch.autograd.profiler
    before = module._enable_profiler
    with pytest.raises(KeyboardInterrupt), tl.profile(model):
        model(torch.rand(2, 4)).sum().backward()
    assert module._enable_profiler is before
