"""Nothing is left on the model or in torch, whatever happens; nothing is waited for; what fails of
ours fails alone.
"""

import contextlib
import copy
import gc
import io
import itertools
import multiprocessing
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode

import torchlens as tl
from torchlens._capture.current import CURRENT, WatcherGroup
from torchlens._monitor.record import collector, graph, parameters, samples, stepping
from torchlens._monitor.record import run as run_module
from torchlens._recording import unseen


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(64, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(model: nn.Module, num_steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        step(model, optimizer)


ORIGINAL = torch.nn.Module._call_impl.__code__


def is_clean() -> bool:
    return (
        torch.nn.Module._call_impl.__code__ is ORIGINAL
        and CURRENT.watcher is None
        and not optimizers._global_optimizer_pre_hooks
        and not optimizers._global_optimizer_post_hooks
    )


# -- nothing is left
# --------------------------------------------------------------------------------------------------


class Stops(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(6, 2), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        raise self.error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_exception_or_an_interrupt_nothing_is_left(
    error: type[BaseException], tmp_path: Path
) -> None:
    model = Stops(error)
    with pytest.raises(error), tl.monitor(model, tmp_path):
        train(model)
    assert is_clean()
    assert tl.open_run(tmp_path).is_finished


def test_torch_is_patched_only_in_steps_that_are_recorded(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patched = []
    with tl.monitor(model, tmp_path, every=3):
        for _ in range(7):
            patched.append(torch.nn.Module._call_impl.__code__ is not ORIGINAL)
            step(model, optimizer)
    assert patched == [True, False, False, True, False, False, True]


def test_pickles_copies_and_state_are_as_without_a_monitor(tmp_path: Path) -> None:
    model = network()

    def seen() -> list[Any]:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        names = [
            sorted(vars(module)) for module in (*model.modules(), *copy.deepcopy(model).modules())
        ]
        return [pickle.dumps(model), names, len(buffer.getvalue())]

    before = seen()
    with tl.monitor(model, tmp_path):
        model(torch.randn(2, 6)).sum().backward()
        model.zero_grad()
        assert seen() == before
    assert seen() == before


def test_hooks_on_a_graph_that_lives_on_are_taken_off(tmp_path: Path) -> None:
    model = network()
    run = tl.monitor(model, tmp_path)
    output = model(torch.randn(3, 6))
    hooks = [reference() for reference in run._collector._hooks]
    assert hooks
    run.finish()
    watched = weakref.ref(run._collector)
    del run
    gc.collect()
    assert watched() is None
    output.sum().backward()  # not recorded


def test_a_model_that_is_dropped_is_freed_and_its_run_lets_go(tmp_path: Path) -> None:
    model = network()
    run = tl.monitor(model, tmp_path)
    train(model)
    reference = weakref.ref(model[0])
    del model
    gc.collect()
    assert reference() is None
    assert is_clean()
    run.finish()
    assert tl.open_run(tmp_path).steps == [0, 1, 2]


def _look(connection: Any) -> None:
    connection.send(
        (
            is_clean(),
            {thread.name for thread in threading.enumerate() if "torchlens" in thread.name},
        )
    )


def test_a_forked_process_does_not_inherit_the_monitor(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    model = network()
    with tl.monitor(model, tmp_path):
        assert not is_clean()
        receiver, sender = context.Pipe()
        process = context.Process(target=_look, args=(sender,))
        process.start()
        assert any("torchlens" in thread.name for thread in threading.enumerate())
        assert receiver.recv() == (True, set())
        process.join()
        train(model)
    assert tl.open_run(tmp_path).steps == [0, 1, 2]
    assert tl.open_run(tmp_path).damage == []


@pytest.mark.slow
def test_the_end_of_the_program_finishes_the_run(tmp_path: Path) -> None:
    code = f"""
import torch, torchlens
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = torchlens.monitor(model, {str(tmp_path)!r})
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    run.log(loss=1)
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, cwd=Path(tl.__file__).parents[1]
    )
    r = tl.open_run(tmp_path)
    assert r.is_finished
    assert r.steps == r.scalars["loss"].steps.tolist() == [0, 1, 2, 3, 4]


# -- ours fails alone
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (samples.Sampler, "take"),
        (collector.Collector, "follow_gradient"),
        (collector.Collector, "on_gradient"),
        (stepping.Steps, "_offer"),
        (stepping.Steps, "arm_or_disarm"),
        (parameters.ParameterWatch, "note_before"),
        (parameters.ParameterWatch, "is_in"),
        (graph.GraphMaker, "enter"),
        (graph.GraphMaker, "finished"),
    ],
)
def test_whatever_fails_of_ours_the_training_goes_on(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training(folder: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = None if folder is None else tl.monitor(model, folder)
        if folder is not None:

            def fails(*args: Any, **kwargs: Any) -> None:
                raise ZeroDivisionError("on purpose")

            monkeypatch.setattr(owner, name, fails)
        losses = [step(model, optimizer).item() for _ in range(3)]
        if run is not None:
            monkeypatch.undo()
            run.finish()
            assert "ZeroDivisionError: on purpose" in run.problems[0]
        return losses

    assert training(None) == training(tmp_path)
    assert any("ZeroDivisionError" in problem for problem in tl.open_run(tmp_path).problems)


# -- nothing is waited for
# ---------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_on_another_device_one_copy_is_made_for_each_step_and_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would lie on CUDA is stacked and copied at once: here everything is taken to lie there,
    and counted.
    """

    def training(folder: Path | None) -> Counter[str]:
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = None if folder is None else tl.monitor(model, folder, graph="modules")
        with Counting() as counting:
            for _ in range(3):
                step(model, optimizer)
        if run is not None:
            run.finish()
            assert run.problems == []
        return counting.counts

    training(tmp_path / "plain")
    monkeypatch.setattr(
        unseen, "_disable_current_modes", contextlib.nullcontext
    )  # so that the mode sees us
    monkeypatch.setattr(stepping, "to_host", partial(samples.to_host, every_device=True))
    monkeypatch.setattr(samples.Sampler, "uses_numpy", False)
    before = training(None)
    counts = training(tmp_path / "stacked")
    counts.subtract(before)
    assert counts["take"] > 0  # we are seen
    assert counts["aminmax"] > 0
    assert counts["cat"] == 3
    for name in (
        "_local_scalar_dense",
        "item",
        "copy_",
        "_to_copy",
        "nonzero",
        "index",
        "sort",
        "var_mean",
        "histc",
    ):
        assert counts[name] == 0, name
    first, second = (tl.open_run(tmp_path / name).to_pandas() for name in ("plain", "stacked"))
    assert first.equals(second)


def test_modes_of_the_users_own_do_not_see_us(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Counting() as plain:
        step(model, optimizer)
    with tl.monitor(model, tmp_path, graph="modules"), Counting() as monitored:
        step(model, optimizer)
    assert plain.counts == monitored.counts


# -- on, off, where, how long
# ------------------------------------------------------------------------------------------


def test_pausing_a_time_limit_and_a_choice_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(stepping, "monotonic", lambda: now[0])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path, modules=["0", "4*"], seconds=60) as run:
        for number in range(8):
            if number == 2:
                run.pause()
            if number == 4:
                run.resume()
            if number == 6:
                now[0] = 61.0
            step(model, optimizer)
    r = tl.open_run(tmp_path)
    assert r.modules == ["0", "4"]
    # Resumed in step 4 and past the limit in step 6: from the next step on, each.
    assert r.steps == [0, 1, 5, 6]
    assert "The time limit was reached" in r.problems[0]


def test_training_in_another_thread_is_seen_from_its_first_step_on(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path / "one") as run:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 6))  # evaluation does not say which thread trains
        model.train()
        for _ in range(4):
            in_another_thread(step, model, optimizer)
        step(model, optimizer)
    assert run.problems == []
    assert is_clean()
    r = tl.open_run(tmp_path / "one")
    assert (
        r["0"].outputs.steps.tolist()
        == r["0"].parameters["weight"].steps.tolist()
        == [0, 1, 2, 3, 4]
    )
    assert r["0"].outputs.num_calls.tolist() == [1, 1, 1, 1, 1]
    assert (tmp_path / "one" / "graph.json").exists()


def test_a_step_over_two_threads_says_that_only_one_of_them_is_seen(tmp_path: Path) -> None:
    model = network()
    with tl.monitor(model, tmp_path) as run:
        model(torch.ones(2, 6))
        in_another_thread(train, model, 1)
    assert "only the calls of the thread that called first are recorded" in run.problems[0]
    assert tl.open_run(tmp_path)["0"].outputs.num_calls.tolist() == [1]


def test_a_profile_of_another_thread_sees_a_run_come_and_go(tmp_path: Path) -> None:
    """Whether it began before the run or after: what its thread calls is recorded, and nothing of
    the run is left there.
    """
    model, other = network(), network()
    turn = threading.Barrier(2, timeout=60)
    done: list[bool] = []

    def profiled() -> None:
        for begins_first in (True, False):
            if not begins_first:
                turn.wait()  # the run has begun
            with tl.profile(other):
                other(torch.ones(2, 6))
                if begins_first:
                    turn.wait()
                turn.wait()  # the run has begun
                model(torch.ones(2, 6))
                turn.wait()
                turn.wait()  # it has ended
                done.append(
                    "ModuleWatcher" not in str(vars(CURRENT))
                    and not isinstance(CURRENT.watcher, WatcherGroup)
                )
            done.append("watcher" not in vars(CURRENT))  # it has none of its own
            turn.wait()

    thread = threading.Thread(target=profiled)
    thread.start()
    for name in ("after", "before"):
        if name == "after":
            turn.wait()
        run = tl.monitor(model, tmp_path / name, graph="modules")
        if name == "before":
            turn.wait()
        turn.wait()
        turn.wait()
        run.finish()
        turn.wait()
        turn.wait()  # it was looked at, and the next run may begin
    thread.join()
    assert done == [True] * 4
    assert is_clean()
    for name in ("after", "before"):
        assert tl.open_run(tmp_path / name)["0"].outputs.num_calls.tolist() == [1]


def in_another_thread(function: Any, *args: Any) -> None:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_optimizer_that_takes_the_place_of_another_begins_no_step_late(
    tmp_path: Path, is_kept: bool
) -> None:
    """As when layers are unfrozen: its first step is a step like any other, whether or not the old
    one still lives.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    kept = []
    with tl.monitor(model, tmp_path, graph="modules") as run:
        for number in range(6):
            if number % 2 == 0:
                optimizer = torch.optim.SGD(model[1 if number < 2 else 0 :].parameters(), lr=0.1)
                if is_kept:
                    kept.append(optimizer)
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            assert run.current_step == number + 1
    assert tl.open_run(tmp_path).steps == [0, 1, 2, 3, 4, 5]


def test_optimizers_with_common_parameters_take_turns(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizers = [
        torch.optim.SGD(model[:1].parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
    ]
    with tl.monitor(model, tmp_path, graph="modules") as run:
        ended = []
        for _ in range(6):
            for optimizer in optimizers:
                model(torch.randn(3, 4)).sum().backward()
                optimizer.step()
            ended.append(run.current_step)
    assert [later - before for before, later in itertools.pairwise(ended[1:])] == [1, 1, 1, 1]


def test_two_models_are_monitored_at_once(tmp_path: Path) -> None:
    one, two = network(), network()
    with (
        tl.monitor(one, tmp_path / "one") as first,
        tl.monitor(two, tmp_path / "two", every=2) as second,
    ):
        train(one, 2)
        train(two, 3)
    assert first.problems == second.problems == []
    assert tl.open_run(tmp_path / "one").steps == [0, 1]
    assert tl.open_run(tmp_path / "two").steps == [0, 2]
    for name in ("one", "two"):
        assert tl.open_run(tmp_path / name)["0"].outputs.num_calls.max() == 1


def test_logs_and_profiles_go_on_beside_it(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, tmp_path) as run:
        with tl.profile(model, level="module") as profile:
            step(model, optimizer)
        history = tl.log_forward_pass(model, torch.randn(3, 6))
        step(model, optimizer)
    assert run.problems == []
    assert len(profile.steps) == 1
    assert len(history.layer_labels) == 7
    assert tl.open_run(tmp_path).steps == [0, 1]


def test_a_model_that_is_never_trained_is_recorded_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_MOST_PENDING", 30)
    model = network().eval()
    with (
        tl.monitor(model, tmp_path, evaluation=True, log=("inputs", "outputs")) as run,
        torch.no_grad(),
    ):
        for _ in range(50):
            model(torch.randn(4, 6))
        assert len(run._collector.pending) <= 42
    r = tl.open_run(tmp_path)
    assert r.steps == [0]
    assert r["2"].outputs.num_calls.tolist() == [50]
    assert r["2"].outputs.num_elements.tolist() == [50 * 4 * 40]


@pytest.mark.parametrize("where", ["write_json_file", "arm_or_disarm"])
def test_nothing_is_left_of_a_monitor_that_was_interrupted_as_it_began(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    threads, hooks = set(threading.enumerate()), len(optimizers._global_optimizer_pre_hooks)
    opened = Path("/proc/self/fd")
    files = len(list(opened.iterdir())) if opened.exists() else 0
    call_impl = nn.Module._call_impl

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        run_module if where == "write_json_file" else stepping.Steps, where, interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        tl.monitor(model, tmp_path)
    assert set(threading.enumerate()) == threads
    assert len(optimizers._global_optimizer_pre_hooks) == hooks
    assert nn.Module._call_impl is call_impl
    with pytest.raises(RuntimeError, match="No run is being recorded"):
        tl.current_run()
    if files:
        assert len(list(opened.iterdir())) == files
