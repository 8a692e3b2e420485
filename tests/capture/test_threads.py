"""Promise 5: private to the calling thread."""

import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, ConvNet, Model
from torchlens._capture.current import CURRENT
from torchlens._capture.module_tracker import patched_call_impl

PATIENCE = 600.0  # seconds; only so that a test that fails ends


def stepwise(barrier: threading.Barrier, function: Callable[[torch.Tensor], torch.Tensor]) -> Model:
    """A model that waits for the others before each of its steps."""

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            barrier.wait(PATIENCE)
            x = function(self.fc(x))
        return x

    return Model(forward, fc=nn.Linear(4, 4))


def test_two_threads_may_log_at_once() -> None:
    barrier = threading.Barrier(2)
    models = [stepwise(barrier, torch.sin), stepwise(barrier, torch.tanh)]
    x = torch.rand(2, 4)
    add, call = torch.Tensor.__iadd__, nn.Module._call_impl.__code__
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda model: tl.log_forward_pass(model, x), models)
    assert {entry.layer_type for entry in first} == {"input", "linear", "sin", "output"}
    assert {entry.layer_type for entry in second} == {"input", "linear", "tanh", "output"}
    assert len(first) == len(second) == 42
    assert torch.Tensor.__iadd__ is add
    assert nn.Module._call_impl.__code__ is call


def test_a_module_called_just_before_another_threads_log_ends_runs_as_ever() -> None:
    """The thread stands at the first instruction of the patched call when the log ends and takes
    the patch away.
    """
    module = nn.Linear(4, 4)
    x = torch.rand(2, 4)
    late = FunctionType(patched_call_impl.__code__, nn.Module._call_impl.__globals__)
    assert torch.equal(late(module, x), module(x))


def test_logs_that_overlap_leave_the_compiler_as_it_was() -> None:
    eval_frame = importlib.import_module("torch._dynamo.eval_frame")
    before = eval_frame._stance
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def forward_first(self: Model, x: torch.Tensor) -> torch.Tensor:
        first_is_in.set()
        second_is_in.wait(PATIENCE)
        return x + 1

    def forward_second(self: Model, x: torch.Tensor) -> torch.Tensor:
        second_is_in.set()
        first.result(PATIENCE)  # the first to begin is the first to end
        assert eval_frame._stance.stance == "force_eager"
        return x + 1

    x = torch.rand(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tl.log_forward_pass, Model(forward_first), x)
        first_is_in.wait(PATIENCE)
        pool.submit(tl.log_forward_pass, Model(forward_second), x).result(PATIENCE)
    assert eval_frame._stance is before


def test_a_busy_third_thread_stays_correct_and_unlogged() -> None:
    started, done = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []
    worker_model, x = ConvNet().eval(), torch.rand(2, 3, 8, 8)
    expected = worker_model(x)

    def work() -> None:
        while not done.is_set():
            y = worker_model(x)
            y += 1
            y = y / 2
            results.append(y)
            started.set()

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        started.wait(PATIENCE)
        before = len(results)
        while len(results) < before + 3:
            x = torch.sin(x)
        return x

    thread = threading.Thread(target=work)
    thread.start()
    try:
        history = tl.log_forward_pass(Model(forward), torch.rand(3))
    finally:
        done.set()
        thread.join()
    assert {entry.layer_type for entry in history} == {"input", "sin", "output"}
    for result in results:
        assert torch.allclose(
            result, (expected + 1) / 2
        )  # to rounding: torch sums differently in another thread


def test_a_log_that_ends_while_another_runs_leaves_it_working() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        inside.set()
        go_on.wait(PATIENCE)
        x += 1
        return self.fc(x)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(
            tl.log_forward_pass, Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4)
        )
        inside.wait(PATIENCE)
        short = tl.log_forward_pass(MLP(), torch.rand(2, 4))
        go_on.set()
        history = future.result()
    assert len(short) == 5
    assert [entry.layer_label for entry in history] == [
        "input_1_0",
        "iadd_1_1",
        "linear_1_2",
        "output_1_3",
    ]
    assert history["fc"].layer_type == "linear"


def test_a_log_inside_a_log_is_a_clear_error() -> None:
    inner = MLP()
    model = Model(lambda self, x: tl.log_forward_pass(inner, x)["output_1"].tensor_contents)
    with pytest.raises(tl.NestedLogError, match="already logging a forward pass"):
        tl.log_forward_pass(model, torch.rand(2, 4))
    assert CURRENT.tracker is None
    assert len(tl.log_forward_pass(inner, torch.rand(2, 4))) == 5


def test_a_model_may_go_on_after_a_refused_inner_log() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(tl.NestedLogError):
            tl.log_forward_pass(MLP(), x)
        return x * 2

    history = tl.log_forward_pass(Model(forward), torch.rand(2, 4))
    assert [entry.layer_type for entry in history] == ["input", "mul", "output"]
