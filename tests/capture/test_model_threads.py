"""Threads that the model starts log with it; each test compares with the same model in one thread,
or runs it often.
"""

import asyncio
import gc
import pickle
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
from torch import nn
from torch.masked import masked_tensor

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._capture.current import CURRENT
from torchlens._recording.unseen import NoTorchFunction

PATIENCE = 600.0  # seconds; only so that a test that fails ends

Work = Callable[[int], torch.Tensor]
Run = Callable[[Work, int], list[torch.Tensor]]


def in_threads(work: Work, count: int) -> list[torch.Tensor]:
    results: dict[int, torch.Tensor] = {}

    def put(number: int) -> None:
        results[number] = work(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(count)]


class Subclass(threading.Thread):
    def __init__(self, work: Work, number: int) -> None:
        super().__init__()
        self.work, self.number = work, number

    def run(self) -> None:
        self.result = self.work(self.number)


def in_a_subclass(work: Work, count: int) -> list[torch.Tensor]:
    threads = [Subclass(work, number) for number in range(count)]
    for thread in threads:
        thread.start()
        assert "run" not in vars(thread) or thread.is_alive()
    for thread in threads:
        thread.join()
        assert "run" not in vars(thread)
    return [thread.result for thread in threads]


def in_a_pool(work: Work, count: int) -> list[torch.Tensor]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, range(count)))


def by_submitting(work: Work, count: int) -> list[torch.Tensor]:
    with ThreadPoolExecutor(3) as pool:
        return [
            future.result() for future in [pool.submit(work, number) for number in range(count)]
        ]


def in_asyncio(work: Work, count: int) -> list[torch.Tensor]:
    async def gather() -> list[torch.Tensor]:
        return list(
            await asyncio.gather(*(asyncio.to_thread(work, number) for number in range(count)))
        )

    return asyncio.run(gather())


def in_nested_threads(work: Work, count: int) -> list[torch.Tensor]:
    return in_threads(lambda number: in_threads(lambda _: work(number), 1)[0], count)


def by_applying(work: Work, count: int) -> list[torch.Tensor]:
    with ThreadPool(3) as pool:
        return [
            result.get()
            for result in [pool.apply_async(work, (number,)) for number in range(count)]
        ]


WAYS: dict[str, Run] = {
    way.__name__: way
    for way in (
        in_threads,
        in_a_subclass,
        in_a_pool,
        by_submitting,
        in_asyncio,
        in_nested_threads,
        by_applying,
    )
}


def parts() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "fcs": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        "norm": nn.BatchNorm1d(4).eval(),
    }


def model_with(run: Run, count: int = 4) -> Model:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        def work(number: int) -> torch.Tensor:
            y = self.fcs[number % 2](x + number)
            y.mul_(2)
            return self.norm(torch.sin(y) if number % 2 else torch.cos(y))

        return sum(run(work, count)) + x.exp()

    return Model(forward, **parts())


def one_by_one(work: Work, count: int) -> list[torch.Tensor]:
    return [work(number) for number in range(count)]


def facts_of(history: tl.ModelHistory) -> list[Any]:
    return [
        (
            entry.layer_label_w_pass,
            entry.parent_layers,
            entry.containing_modules_origin_nested,
            entry.module_passes_exited,
            entry.module_passes_entered,
            entry.func_call_stack[0].function if entry.func_call_stack else None,
            None if entry.tensor_contents is None else entry.tensor_contents.tolist(),
        )
        for entry in history
    ]


# -- they are logged
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_threads_give_the_log_that_one_thread_gives(way: str) -> None:
    x = torch.rand(2, 4)
    expected = tl.log_forward_pass(model_with(one_by_one), x)
    for _ in range(3):
        history = tl.log_forward_pass(model_with(WAYS[way]), x)
        assert facts_of(history) == facts_of(expected)
        assert history.module_passes == expected.module_passes
        assert history.module_children == expected.module_children
        assert history.total_flops == expected.total_flops


@pytest.mark.parametrize("way", WAYS)
def test_validation_proves_the_log_of_threads(way: str) -> None:
    report = tl.validate_forward_pass(model_with(WAYS[way]), torch.rand(2, 4))
    assert report.passed, report
    assert report.num_checked["replay"] >= 20


def test_validation_finds_what_a_thread_does_outside_the_log() -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        with NoTorchFunction():
            return x + 1

    model = Model(lambda self, x: in_a_pool(lambda _: work(x) * 2, 1)[0])
    report = tl.validate_forward_pass(model, torch.rand(3))
    assert {finding.check for finding in report.findings} == {"completeness"}
    assert "aten::add" in str(report)


def test_a_pool_that_was_there_before_works_for_the_model() -> None:
    started = threading.Event()

    def warm(_: int) -> None:
        started.wait(PATIENCE)

    with ThreadPoolExecutor(2) as pool, ThreadPool(2) as other:
        waiting = [pool.submit(warm, number) for number in range(2)]
        started.set()
        for future in waiting:
            future.result()
        model = Model(
            lambda self, x: pool.submit(self.fc, x).result() + sum(other.map(torch.exp, [x])),
            fc=nn.Linear(4, 4),
        )
        history = tl.log_forward_pass(model, torch.rand(4))
        assert history["linear_1"].parent_layers == ["input_1_0"]
        assert history["linear_1"].containing_module_origin == "fc:1"
        assert history["exp_1"].parent_layers == ["input_1_0"]
        assert tl.validate_saved_activations(model, torch.rand(4))
        # What others give the same pool to do afterwards is no business of the log.
        assert pool.submit(
            lambda: (CURRENT.tracker, torch._C._len_torch_function_stack())
        ).result() == (None, 0)


def test_jobs_of_others_in_the_same_pool_stay_unlogged() -> None:
    inside, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def other_job() -> torch.Tensor:
        found.append(CURRENT.tracker)
        return torch.tanh(torch.ones(3))

    def submit_from_outside(pool: ThreadPoolExecutor) -> None:
        inside.wait(PATIENCE)
        pool.submit(other_job).result()
        done.set()

    with ThreadPoolExecutor(2) as pool:

        def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            done.wait(PATIENCE)
            return pool.submit(torch.sin, x).result()

        outsider = threading.Thread(target=submit_from_outside, args=(pool,))
        outsider.start()
        history = tl.log_forward_pass(Model(forward), torch.rand(3))
        outsider.join()
    assert found == [None]
    assert history.layer_labels == ["input_1_0", "sin_1_1", "output_1_2"]


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
def test_forks_are_logged() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        futures = [torch.jit.fork(module, x) for module in (self.a, self.b)]
        return torch.jit.wait(futures[0]) + torch.jit.wait(futures[1])

    model, x = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x)
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert history.module_passes == ["a:1", "b:1"]
    assert history["add_1"].parent_layers == ["linear_1_1", "linear_2_2"]


# -- what the options do
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "saved",
    [["sin", "output_1"], ["fcs.1"], ["fcs.1:2"], lambda entry: entry.layer_type == "cos", "none"],
)
def test_layers_that_are_to_be_saved_are(saved: Any) -> None:
    x = torch.rand(2, 4)
    model = model_with(in_a_pool)
    everything = tl.log_forward_pass(model, x)
    wanted = tl.log_forward_pass(model_with(one_by_one), x, layers_to_save=saved)
    for _ in range(3):
        history = tl.log_forward_pass(model, x, layers_to_save=saved)
        assert history.layer_labels == everything.layer_labels
        assert history.layers_with_saved_activations == wanted.layers_with_saved_activations
        for label in history.layers_with_saved_activations:
            assert torch.equal(history[label].tensor_contents, everything[label].tensor_contents)


def test_a_new_input_goes_through_the_same_threads() -> None:
    model, x = model_with(in_a_pool), torch.rand(2, 4)
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    history.save_new_activations(model, x)
    assert facts_of(history) == facts_of(tl.log_forward_pass(model, x))
    with pytest.raises(tl.DifferentGraphError):
        history.save_new_activations(model_with(in_a_pool, count=3), x)


def test_gradients_of_threads() -> None:
    found = []
    for run in (in_a_pool, one_by_one):
        torch.manual_seed(5)
        model, x = model_with(run), (torch.rand(2, 4, requires_grad=True) * 1).neg()
        history = tl.log_forward_pass(model, x, save_gradients=True, save_function_args=True)
        history["output_1"].tensor_contents.sum().backward()
        found.append({entry.layer_label_w_pass: entry.grad_contents for entry in history})
    assert found[0].keys() == found[1].keys()
    assert sum(gradient is not None for gradient in found[0].values()) > 20
    for label, gradient in found[0].items():
        other = found[1][label]
        torch.testing.assert_close(gradient, other)  # autograd adds them in another order


def test_a_history_of_threads_can_be_pickled_and_drawn(tmp_path: Any) -> None:
    history = tl.log_forward_pass(model_with(in_a_pool), torch.rand(2, 4))
    assert facts_of(pickle.loads(pickle.dumps(history))) == facts_of(history)
    assert "linear_1_2:1" in str(history)
    history.render_graph(
        "rolled", vis_outpath=str(tmp_path / "graph.gv"), vis_save_only=True, vis_fileformat="svg"
    )


# -- what threads do to each other
# -------------------------------------------------------------------------------------


def test_threads_that_hand_tensors_to_each_other() -> None:
    """A thread may read what another made after it began: parents come first all the same, and
    no thread waits for ever.
    """

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        there: queue.Queue[torch.Tensor] = queue.Queue()
        back: queue.Queue[torch.Tensor] = queue.Queue()

        def work() -> None:
            for _ in range(3):
                back.put(torch.sin(there.get(timeout=PATIENCE)))

        thread = threading.Thread(target=work)
        thread.start()
        for number in range(3):
            there.put(x + number)
            x = back.get(timeout=PATIENCE) * 2
        thread.join()
        return x

    model, x = Model(forward), torch.rand(3)
    for _ in range(3):
        history = tl.log_forward_pass(model, x)
        types = [entry.layer_type for entry in history][1:-1]
        assert types == ["add", "sin", "mul"] * 3
        for before, entry in zip(history, list(history)[1:], strict=False):
            assert entry.parent_layers == [before.layer_label]
    assert tl.validate_saved_activations(model, x)


def test_an_operation_may_wait_for_an_operation_of_another_thread() -> None:
    barrier = threading.Barrier(2)

    @torch.library.custom_op("torchlens_tests::meet", mutates_args=())
    def meet(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(PATIENCE)
        return x + 1

    model = Model(lambda self, x: sum(in_threads(lambda number: meet(x * number), 2)))
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [entry.layer_type for entry in history] == [
        "input",
        "mul",
        "meet",
        "mul",
        "meet",
        "radd",
        "add",
        "output",
    ]


def test_writes_of_threads_to_one_tensor_are_followed() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(4, 3)

        def work(number: int) -> torch.Tensor:
            return y[number].copy_(x + number)

        in_a_pool(work, 4)
        return y * 2

    model, x = Model(forward), torch.rand(3)
    history = tl.log_forward_pass(model, x)
    assert [label.partition("_")[0] for label in history["mul_1"].parent_layers] == ["copy"] * 4
    assert torch.equal(history["output_1"].tensor_contents, model(x))
    assert tl.validate_saved_activations(model, x)


def test_many_threads_at_once() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        def work(number: int) -> torch.Tensor:
            y = x + number
            for _ in range(20):
                y = torch.sin(y) * 2
                y.add_(1)
            return y

        results = in_threads(work, 16)
        return torch.stack(results)

    model, x = Model(forward), torch.rand(3)
    expected = model(x)
    history = tl.log_forward_pass(model, x)
    assert torch.equal(history["output_1"].tensor_contents, expected)
    assert history.num_operations == 16 * 61 + 1
    for entry in history:
        if entry.layer_type == "sin":
            (parent,) = entry.parent_layers
            assert torch.equal(torch.sin(history[parent].tensor_contents), entry.tensor_contents)


# -- how they end
# --------------------------------------------------------------------------------------------------


def test_an_exception_in_a_thread_is_placed_there() -> None:
    body = Model(lambda self, x: self.fc(x), fc=nn.Linear(5, 5))
    model = Model(lambda self, x: in_a_pool(lambda _: self.body(x), 1)[0], body=body)
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(model, torch.rand(2, 4))
    (note,) = caught.value.__notes__
    assert "body.fc" in note
    assert "linear" in note
    assert "2x4" in note


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_all_is_as_before_after_threads_and_an_exception(error: type[BaseException]) -> None:
    before = dict(vars(threading.Thread)), dict(vars(ThreadPoolExecutor)), dict(vars(ThreadPool))

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        in_threads(lambda number: x + number, 2)
        assert threading.Thread.start is not before[0]["start"]
        raise error

    with pytest.raises(error):
        tl.log_forward_pass(Model(forward), torch.rand(3))
    assert (
        dict(vars(threading.Thread)),
        dict(vars(ThreadPoolExecutor)),
        dict(vars(ThreadPool)),
    ) == before
    assert CURRENT.tracker is None
    assert torch._C._len_torch_function_stack() == 0


def test_a_thread_that_runs_on_does_so_unlogged_and_holds_nothing() -> None:
    go_on, results = threading.Event(), queue.Queue[Any]()

    def work(x: torch.Tensor) -> None:
        y = torch.sin(x)
        results.put(y)
        go_on.wait(PATIENCE)
        for _ in range(3):
            y = MLP()(torch.relu(y) + 1)[:, :1].expand(2, 4)
            y = y + torch.ones(2, 4).mul_(2)
        inner = tl.log_forward_pass(MLP(), y)
        results.put((y, len(inner)))

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        self.thread = threading.Thread(target=work, args=(x,))
        self.thread.start()
        return results.get(timeout=PATIENCE) * 2

    model = Model(forward)
    gc.disable()
    try:
        history = tl.log_forward_pass(model, torch.rand(2, 4))
        assert [entry.layer_type for entry in history] == ["input", "sin", "mul", "output"]
        held = weakref.ref(history["mul_1"].tensor_contents)
        del history
        assert held() is None
    finally:
        gc.enable()

    def let_go(self: Model, x: torch.Tensor) -> torch.Tensor:
        go_on.set()
        model.thread.join(PATIENCE)
        return x + 1

    other = tl.log_forward_pass(Model(let_go), torch.rand(3))
    y, num_layers = results.get(timeout=PATIENCE)
    assert y.shape == (2, 4)
    assert num_layers == 5
    assert other.layer_labels == ["input_1_0", "add_1_1", "output_1_2"]


@pytest.mark.slow
def test_a_log_of_threads_is_freed_when_dropped() -> None:
    gc.collect()
    gc.disable()
    try:
        history = tl.log_forward_pass(model_with(in_a_pool), torch.rand(2, 4))
        held = [weakref.ref(entry.tensor_contents) for entry in history]
        del history
        assert all(reference() is None for reference in held)
    finally:
        gc.enable()


def test_a_job_that_never_ran_harms_nobody() -> None:
    block = threading.Event()

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            first: Future[Any] = pool.submit(block.wait, PATIENCE)
            second = pool.submit(torch.exp, x)
            assert second.cancel()
            block.set()
            first.result()
        return x + 1

    assert len(tl.log_forward_pass(Model(forward), torch.rand(3))) == 3


def test_a_thread_inside_an_operation_is_part_of_it() -> None:
    @torch.library.custom_op("torchlens_tests::busy_threads", mutates_args=())
    def busy_threads(x: torch.Tensor) -> torch.Tensor:
        return in_a_pool(lambda number: torch.sin(x) + number, 2)[1]

    history = tl.log_forward_pass(Model(lambda self, x: busy_threads(x) * 2), torch.rand(3))
    assert [entry.layer_type for entry in history] == ["input", "busythreads", "mul", "output"]


def test_classes_that_act_like_tensors_do_so_in_threads_too() -> None:
    class Quantity:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> "Quantity":
            return cls(
                func(
                    *[arg.value if isinstance(arg, cls) else arg for arg in args], **(kwargs or {})
                )
            )

    exp: Any = torch.exp  # torch's stubs know only tensors
    model = Model(lambda self, x: in_a_pool(lambda _: exp(x + Quantity(x * 2)).value, 1)[0])
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [entry.layer_type for entry in history] == ["input", "mul", "add", "exp", "output"]


def test_jobs_that_run_when_the_log_has_ended_do_so_unlogged() -> None:
    go_on = threading.Event()

    def late(x: torch.Tensor) -> torch.Tensor:
        go_on.wait(PATIENCE)
        return torch.tanh(x)

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        self.later = [self.pool.submit(late, x) for _ in range(3)]
        self.mapped = self.other.map_async(late, [x] * 3)
        return x + 1

    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        model, x = Model(forward, pool=pool, other=other), torch.rand(3)
        history = tl.log_forward_pass(model, x)
        facts = facts_of(history)
        go_on.set()
        results = [future.result(PATIENCE) for future in model.later] + model.mapped.get(PATIENCE)
        assert all(torch.equal(result, torch.tanh(x)) for result in results)
        assert facts_of(history) == facts
        assert history.layer_labels == ["input_1_0", "add_1_1", "output_1_2"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_tensor_that_is_met_when_the_model_has_returned() -> None:
    def forward(self: Model, x: torch.Tensor) -> Any:
        (y,) = in_a_pool(lambda _: x * 2, 1)
        return masked_tensor(y, y > 0.5)

    history = tl.log_forward_pass(Model(forward), torch.rand(3))
    assert [entry.layer_type for entry in history] == [
        "input",
        "mul",
        "gt",
        "clone",
        "clone",
        "maskedtensor",
        "output",
    ]
    assert history["output_1"].parent_layers == ["maskedtensor_1_5"]
