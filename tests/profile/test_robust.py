"""Training goes on whatever happens, and everything is taken away at the end."""

import copy
import gc
import pickle
import resource
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._capture import recorder
from torchlens._profile import (
    allocators,
    ledger,
    logged_steps,
    make_records,
    model_modules,
    model_watcher,
)
from torchlens._profile import profile as profile_module


def train(model, x, steps=3, **options):
    """Trains, under a profile if there are options; returns the losses and the profile."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def run():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if not options:
        run()
        return losses, None
    with tl.profile(model, **options) as p:
        run()
    return losses, p


@pytest.mark.parametrize(
    "options", [{"level": "module"}, {"level": "operation"}, {"check": "health"}], ids=str
)
def test_training_under_a_profile_is_the_same_training(options):
    def model():
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.ReLU(inplace=True),
            nn.Linear(8, 2),
        )

    x = torch.rand(6, 4)
    plain, _ = train(model(), x)
    profiled, p = train(model(), x, **options)
    assert plain == profiled
    assert p.problems == []
    assert len(p.steps) == 3


FAILURES: list[tuple[Any, str]] = [
    (model_modules.ModelModules, "refresh"),
    (model_watcher.ModelWatcher, "_enter"),
    (model_watcher.ModelWatcher, "_leave"),
    (model_watcher.ModelWatcher, "_begin_step"),
    (model_watcher.ModelWatcher, "_fact_of"),
    (model_watcher, "saved_storages"),
    (ledger, "_note_arrival"),
    (model_watcher, "named_tensors"),
    (logged_steps, "LoggedSession"),
    (logged_steps.LoggedSession, "_add_sources"),
    (logged_steps.Marker, "mark"),
    (recorder.Recorder, "finish"),
    (logged_steps, "MeasuredOperation"),
    (ledger.MeasuredOperation, "describe"),
    (logged_steps, "_what_was_done"),
    (allocators.AllocatorWatch, "start"),
    (allocators.AllocatorWatch, "_is_ours"),
    (profile_module, "label_finder"),
    (make_records, "_complete_call"),
]


@pytest.mark.parametrize(
    ("owner", "name"), FAILURES, ids=[f"{o.__name__}.{n}" for o, n in FAILURES]
)
@pytest.mark.parametrize("times_before", [0, 3])
def test_a_failure_of_the_profile_itself_is_reported_and_training_goes_on(
    owner, name, times_before, monkeypatch
):
    plain, _ = train(MLP(), torch.rand(6, 4))
    original = getattr(owner, name)
    calls = [0]

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] == times_before + 1:
            raise RuntimeError("on purpose")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    torch.manual_seed(0)
    losses, p = train(MLP(), torch.rand(6, 4), check="nonfinite")
    assert losses == plain
    if calls[0] > times_before:
        assert any("on purpose" in problem for problem in p.problems), p.problems
    str(p)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_checkpoint_has_the_flops_of_what_it_holds(use_reentrant, level):
    block, out = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Linear(6, 3)
    plain = Model(lambda self, x: self.out(self.block(x)), block=block, out=out)
    model = Model(
        lambda self, x: self.out(checkpoint(self.block, x, use_reentrant=use_reentrant)),
        block=block, out=out
    )  # fmt: skip
    counts = []
    for each in (plain, model):
        with tl.profile(each, level=level) as p:
            each(torch.rand(2, 6, requires_grad=True)).sum().backward()
        names = ("", "block", "block.0", "block.2", "out")
        counts.append([(p[name].calls[0].flops, p[name].calls[0].flops_backward) for name in names])
    assert counts[0] == counts[1]


def test_the_backward_of_a_custom_function_is_that_of_the_operation_that_made_its_result():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    class ThroughNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    model = Model(
        lambda self, x: ThroughNumpy.apply(Square.apply(self.fc(x))).sum(), fc=nn.Linear(3, 3)
    )
    with tl.profile(model, level="operation") as p:
        model(torch.rand(2, 3)).backward()
    found = {operation.layer_type: operation.backward_seconds for operation in p.operations}
    assert {name for name, seconds in found.items() if seconds is not None} == {
        "linear",
        "mul",
        "throughnumpy",
        "sum",
    }


@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_part_that_is_called_by_itself_is_measured(level):
    class Lightning(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = MLP(), nn.Linear(3, 2)

        def training_step(self, x):
            return self.head(self.net(x)).sum()

    model = Lightning()
    with tl.profile(model, level=level) as p:
        for size in (2, 2, 6):
            model.training_step(torch.rand(size, 4)).backward()
    assert len(p.steps) == 3
    assert len(p["net.fc1"].by_step("backward_seconds")) == 3
    assert p.root.typical_steps.timed == {2, 3}  # the second, and the only one of its size
    assert [call.flops for call in p["net.fc1"].calls] == [2 * 2 * 4 * 5, None, 2 * 6 * 4 * 5]
    assert [call.flops for call in p["net"].calls] == [2 * (40 + 30), None, 6 * (40 + 30)]
    assert [call.flops_backward for call in p["head"].calls] == [
        2 * 2 * 2 * 3 * 2,
        None,
        6 * 2 * 2 * 3 * 2,
    ]
    assert [step.has_flops for step in p.steps] == [True, False, True]
    told = [
        f"'{part}' was called by itself, not by the model: it was measured at module level"
        for part in ("net", "head")
    ]
    assert p.problems == (told if level == "operation" else [])
    assert "FLOPs are those of 2" in str(p).replace("\n  ", " ")


def test_a_failing_checker_is_switched_off(monkeypatch):
    class Failing:
        first_nonfinite = None

        @property
        def origins(self):
            return self

        def on_boundary(self, *arguments):
            pass

        on_step = on_entered = on_boundary

        def on_value(self, *arguments):
            raise ZeroDivisionError("on purpose")

        on_gradient = on_parameter = on_value

        def finish(self, label_of):
            pass

    monkeypatch.setattr(profile_module, "HealthChecker", lambda *arguments: Failing())
    plain, _ = train(MLP(), torch.rand(6, 4))
    torch.manual_seed(0)
    losses, p = train(MLP(), torch.rand(6, 4), check="nonfinite")
    assert losses == plain
    assert len(p.problems) == 1
    assert p.problems[0].startswith(
        "Checking ended: the profile itself failed (ZeroDivisionError: on purpose"
    )


@pytest.mark.parametrize("level", ["module", "operation"])
def test_an_exception_of_the_model_goes_through_and_the_measurements_are_kept(level):
    def forward(self, x):
        y = self.first(x)
        if x.sum() < 0:
            raise KeyError("bad batch")
        return self.second(y)

    model = Model(forward, first=nn.Linear(2, 2), second=nn.Linear(2, 2))
    p = tl.profile(model, level=level)
    with p:
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(KeyError, match="bad batch"):
            model(-torch.ones(1, 2))
    with pytest.raises(KeyError, match="bad batch"), tl.profile(model, level=level):
        model(-torch.ones(1, 2))
    assert [step.raised for step in p.steps] == [None, "KeyError"]
    assert [call.raised for call in p["first"].calls] == [None, None]
    assert len(p["second"].calls) == 1
    assert p.problems == []


@pytest.mark.parametrize("level", ["module", "operation"])
def test_an_exception_that_the_user_handles_does_not_end_the_measuring(level):
    model = nn.Linear(2, 2)
    with tl.profile(model, level=level) as p:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 3))
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            torch.ones(1).backward()
        model(torch.ones(1, 2)).sum().backward()
    assert [step.raised for step in p.steps] == ["RuntimeError", None, None]
    assert [call.backward_seconds is None for call in p.calls] == [True, False, False]


def test_an_exception_in_backward_leaves_nothing_behind():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in backward")

    model = Model(lambda self, x: Failing.apply(self.fc(x)), fc=nn.Linear(2, 2))
    with tl.profile(model, check="nonfinite") as p, pytest.raises(ArithmeticError):
        model(torch.ones(1, 2)).sum().backward()
    assert len(p.steps) == 1


def test_the_model_can_be_copied_and_pickled_during_and_after(tmp_path):
    model = MLP()
    before = set(vars(model))
    x = torch.rand(2, 4)
    with tl.profile(model, check="nonfinite") as p:
        model(x).sum().backward()
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        torch.save(model.state_dict(), tmp_path / "model.pt")
        twin(x)  # another model: not measured
    assert len(p.steps) == 1
    assert set(vars(model)) == set(vars(twin)) == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
        assert "forward" not in vars(module)
    torch.testing.assert_close(again(x), model(x))
    pickle.loads(pickle.dumps(copy.deepcopy(model)))


@pytest.mark.parametrize("options", [{}, {"check": "health"}], ids=str)
def test_a_profile_keeps_neither_the_graph_nor_the_model(options):
    model = MLP()
    reference = weakref.ref(model)
    with tl.profile(model, **options) as p:
        output = model(torch.rand(2, 4))
        hidden = weakref.ref(output)
        output.sum().backward()
        del output
        gc.collect()
        assert hidden() is None
    del model
    gc.collect()
    assert reference() is None
    assert p["fc1"].num_parameters == 25


def test_other_threads_use_the_model_as_ever():
    model = MLP()
    results = []

    def use():
        for _ in range(20):
            results.append(model(torch.ones(2, 4)).sum().item())

    with tl.profile(model, level="operation") as p:
        thread = threading.Thread(target=use)
        thread.start()
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
        thread.join()
    assert len(p.steps) == 5
    assert len(results) == 20
    assert p.problems == []


def state_of_torch():
    """What a profile touches while it measures."""
    owners = (
        torch.autograd,
        torch.autograd.profiler,
        torch.utils.data.dataloader._BaseDataLoaderIter,
        nn.Module,
        torch.Tensor,
    )
    return (
        [dict(vars(owner)) for owner in owners],
        nn.Module._call_impl.__code__,
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
        torch._C._autograd._profiler_enabled(),
        torch._C._len_torch_function_stack(),
    )


@pytest.mark.parametrize("is_first_to_end", [True, False])
@pytest.mark.parametrize("options", [{}, {"level": "operation"}, {"check": "health"}], ids=str)
def test_two_profiles_in_two_threads_that_end_in_either_order_leave_torch_as_it_was(
    options, is_first_to_end
):
    before = state_of_torch()
    began, may_end = threading.Event(), threading.Event()
    found = {}

    def train_other():
        model = MLP()
        with tl.profile(model, **options) as found["other"]:
            model(torch.rand(2, 4)).sum().backward()
            began.set()
            may_end.wait()
            model(torch.rand(2, 4)).sum().backward()

    thread = threading.Thread(target=train_other)
    model = MLP()
    with tl.profile(model, **options) as p:
        model(torch.rand(3, 4)).sum().backward()
        thread.start()
        began.wait()
        model(torch.rand(3, 4)).sum().backward()
        if not is_first_to_end:
            may_end.set()
            thread.join()
    may_end.set()
    thread.join()
    assert state_of_torch() == before
    for each, size in ((p, 3), (found["other"], 2)):
        assert each.problems == []
        assert [step.num_backward_passes for step in each.steps] == [1, 1]
        assert {call.input_shapes[0][0] for call in each.calls} == {size}
        assert all(call.backward_seconds is not None for call in each.calls)
        assert [call.peak_bytes is None for call in each.root.calls] == [False, True]
    with torch.profiler.profile(profile_memory=True) as profiler:  # is the user's, as ever
        model(torch.rand(2, 4))
    assert profiler.key_averages()


def test_backward_nodes_of_another_thread_are_charged_to_no_module():
    """Each thread numbers its nodes from 0: the numbers of one thread's mean other operations in
    the other.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    made = []

    def compute():
        x = torch.rand(2, 4, requires_grad=True)
        for _ in range(50):
            x = x * 1.01
        made.append(x)

    with tl.profile(model, check="nonfinite") as p:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        result = model(torch.rand(2, 4))
        (result + made[0]).sum().backward()
    alone = tl.profile(model, torch.rand(2, 4), check="nonfinite", warmup=0, repeats=1)
    assert p.problems == []
    assert not p.findings()
    charged = [operation.backward_seconds is not None for operation in p.operations]
    assert charged == [operation.backward_seconds is not None for operation in alone.operations]


@pytest.mark.parametrize("by", ["another thread", "a loss of weights"])
def test_backward_passes_that_only_meet_at_the_parameters_are_not_the_models(by):
    model = MLP()

    def other():
        (
            model(torch.rand(2, 4)) if by == "another thread" else model.fc1.weight.pow(2)
        ).sum().backward()

    with tl.profile(model) as p:
        loss = model(
            torch.rand(2, 4)
        ).sum()  # as long as it is there, all give gradients by the same nodes
        if by == "another thread":
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        else:
            other()
        loss.backward()
    assert p.steps[0].num_backward_passes == 1
    assert [len(call.backward_spans) for call in p.calls] == [1] * 4


@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_backward_pass_of_another_thread_through_the_source_of_the_input_is_not_the_models(level):
    """Its nodes have the numbers that those of the model have in this thread."""
    made = []

    def in_thread(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    def compute():
        x = torch.rand(2, 4, requires_grad=True)
        for _ in range(50):
            x = x * 1.01
        made.append(x)

    model = MLP()
    with tl.profile(model, level=level) as p:
        in_thread(compute)
        loss = model(made[0]).sum()
        in_thread(lambda: (made[0] * 1).sum().backward(retain_graph=True))
        loss.backward(retain_graph=True)
    assert p.steps[0].num_backward_passes == 1
    assert [len(call.backward_spans) for call in p.calls] == [1] * 4
    assert p["fc1"].calls[0].grad_in_shapes == [(2, 4)]
    with tl.profile(model, level=level) as p:
        model(made[0])
        in_thread(lambda: (made[0] * 1).sum().backward(retain_graph=True))
    assert [call.backward_seconds for call in p.calls] == [None] * 4


@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_model_that_computes_in_threads_of_its_own_is_a_problem_and_has_no_flops(level):
    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.a(x)))
        thread.start()
        thread.join()
        return self.b(found[0])

    model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with tl.profile(model, level=level) as p:
        for _ in range(2):
            model(torch.rand(2, 4)).sum().backward()
    assert [
        problem.startswith("The model computes in threads of its own") for problem in p.problems
    ] == [True]
    assert [(call.flops, call.flops_backward) for call in p.calls] == [(None, None)] * 4


def test_a_profile_is_finished_by_the_thread_that_started_it():
    p = tl.profile(MLP())
    p.start()
    errors = []

    def finish():
        try:
            p.finish()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    p.finish()
    assert "in the thread that started it" in errors[0]


def test_a_log_inside_a_profile_is_a_step_and_a_full_log():
    model = MLP()
    with tl.profile(model, level="operation") as p:
        history = tl.log_forward_pass(model, torch.rand(2, 4))
        for _ in range(2):
            model(torch.rand(2, 4))
    assert len(history) == len(p.history) == 5
    assert len(p.steps) == 3
    assert [call.flops for call in p.root.calls] == [None, None, 2 * 2 * (4 * 5 + 5 * 3)]
    assert p.problems == ["Step 1 ran inside a log: it was measured at module level, without FLOPs"]


def test_a_profile_inside_a_log_measures_at_module_level():
    inner = MLP()
    found = []

    def forward(self, x):
        with tl.profile(self.inner, level="operation") as p:
            y = self.inner(x)
        found.append(p)
        return y

    history = tl.log_forward_pass(Model(forward, inner=inner), torch.rand(2, 4))
    assert [entry.layer_type for entry in history] == [
        "input",
        "linear",
        "relu",
        "linear",
        "output",
    ]
    assert len(found[0]["fc1"].calls) == 1
    assert "ran inside a log" in found[0].problems[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_parts_are_measured_once_with_their_backward(use_reentrant):
    model = Model(
        lambda self, x: self.last(checkpoint(self.block, x, use_reentrant=use_reentrant)),
        block=nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)),
        last=nn.Linear(4, 2),
    )
    x = torch.rand(3, 4, requires_grad=True)
    with tl.profile(model) as p:
        for _ in range(2):
            model(x).sum().backward()
    assert p.problems == []
    assert len(p.steps) == 2
    first, second = (call for call in p["block.0"].calls if not call.is_recomputed)
    assert first.backward_spans
    assert second.backward_spans
    assert sum(call.is_recomputed for call in p["block.0"].calls) == 2
    assert p["block.0"].num_calls == 1
    assert p["block"].calls[0].backward_seconds >= first.backward_seconds
    assert p.root.calls[0].backward_seconds >= p["block"].calls[0].backward_seconds
    assert p["block.0"].statistic("flops").median == 2 * 3 * 4 * 4
    assert {record.num_gradients for record in p.parameters} == {2}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "options", [{"skip": 1, "measure": 1, "every": 2}, {"max_steps": 2}], ids=str
)
def test_a_checkpoint_of_an_unmeasured_step_is_charged_to_no_module(
    options, use_reentrant, is_whole
):
    def forward(self, x):
        return self.last(
            self.block(x) if is_whole else checkpoint(self.block, x, use_reentrant=use_reentrant)
        )

    block = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    model = Model(forward, block=block, last=nn.Linear(4, 2))
    x = torch.rand(3, 4, requires_grad=True)
    with tl.profile(model, **options) as p:
        for _ in range(5):
            y = checkpoint(model, x, use_reentrant=use_reentrant) if is_whole else model(x)
            y.sum().backward()
    assert [step.position for step in p.steps] == ([2, 4] if "skip" in options else [1, 2])
    assert {step.raised for step in p.steps} == {None}
    num_passes = 2 if use_reentrant and not is_whole else 1
    assert [step.num_backward_passes for step in p.steps] == [num_passes] * 2
    assert {record.num_gradients for record in p.parameters} == {2}
    found = [(call.step, call.is_recomputed) for call in p["block.0"].calls]
    assert found == [(1, False), (1, True), (2, False), (2, True)]


def test_a_backward_pass_after_a_step_that_is_not_measured_belongs_to_the_one_that_is():
    model = MLP()
    with tl.profile(model, skip=0, measure=1, every=2) as p:
        for _ in range(3):
            one, other = model(torch.rand(3, 4)), model(torch.rand(3, 4))
            (one.sum() + other.sum()).backward()
    assert [(step.position, step.num_backward_passes) for step in p.steps] == [
        (1, 1),
        (3, 1),
        (5, 1),
    ]
    assert all(call.backward_seconds is not None for call in p.calls)
    assert {record.num_gradients for record in p.parameters} == {3}


def test_wrappers_like_data_parallel_are_modules_like_others():
    model = nn.DataParallel(MLP())
    with tl.profile(model) as p:
        model(torch.rand(2, 4)).sum().backward()
    assert list(p.modules) == ["", "module", "module.fc1", "module.act", "module.fc2"]
    assert p["module"].calls[0].parent == 0
    with tl.profile(model.module) as p:  # the one inside
        model(torch.rand(2, 4)).sum().backward()
    assert list(p.modules) == ["", "fc1", "act", "fc2"]
    assert len(p.steps) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_scripted_part_is_one_call(level):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    model = Model(
        lambda self, x: self.last(self.scripted(x)), scripted=scripted, last=nn.Linear(4, 2)
    )
    with tl.profile(model, level=level) as p:
        for _ in range(4):
            model(torch.rand(2, 4)).sum().backward()
    assert p.problems == []
    call = p["scripted"].calls[3]
    assert (call.module_type, call.output_shapes) == ("Sequential", [(2, 4)])
    assert call.backward_spans
    assert p.flops_not_counted == {"sequential": 1}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_stays_compiled(in_place):
    torch._dynamo.reset()  # what other tests compiled counts against its limit
    source = MLP()
    model: Any = source
    if in_place:
        source.compile(backend="eager")
    else:
        model = torch.compile(source, backend="eager")
    x = torch.rand(2, 4)
    model(x)
    with tl.profile(model) as p:
        for _ in range(2):
            model(x).sum().backward()
    assert [call.address for call in p.calls] == ["", ""]
    assert p.calls[0].output_shapes == [(2, 3)]
    assert p.calls[0].backward_spans
    assert p.root.num_parameters == 25 + 18
    assert "compiled" in p.problems[0]
    with tl.profile(model, level="operation") as p:
        model(x).sum().backward()
    assert [call.address for call in p.calls] == ["", "fc1", "act", "fc2"]
    assert p.calls[1].flops == 80
    model(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_part_that_is_compiled_meanwhile_is_measured_and_a_problem(in_place):
    torch._dynamo.reset()  # as above
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.rand(2, 4)
    with tl.profile(model) as p:
        model(x).sum().backward()
        if in_place:
            model[0].compile(backend="eager")
        else:
            model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
        compiled = model[0]._compiled_call_impl
        for _ in range(2):
            model(x).sum().backward()
    assert [(call.address, call.flops) for call in p.calls[3:]] == [
        ("", None),
        ("0", None),
        ("1", None),
    ] * 2
    assert "compiled" in p.problems[0]
    assert model[0]._compiled_call_impl is compiled


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(
    "x",
    [
        torch.rand(2, 4, device="meta"),
        torch.rand(2, 4).to_sparse(),
        torch.rand(2, 4).as_subclass(type("Own", (torch.Tensor,), {})),
        torch.rand(2, 4, dtype=torch.complex64),
        torch.rand(0, 4),
        torch.nested.nested_tensor([torch.rand(1, 4), torch.rand(3, 4)], layout=torch.jagged),
    ],
    ids=["meta", "sparse", "subclass", "complex", "empty", "nested"],
)
@pytest.mark.parametrize("options", [{}, {"check": "health"}], ids=str)
def test_tensors_of_every_kind_are_checked(x, options):
    model: nn.Module = Model(lambda self, x: self.inner(x), inner=Model(lambda self, x: x * 2))
    if x.is_meta:
        model = nn.Sequential(nn.Linear(4, 4, device="meta"))
    p = tl.profile(model, x, repeats=1, **options)
    assert p.problems == []
    assert len(p.calls[0].output_shapes) == 1
    str(p)


def test_functorch_transforms_inside_a_model_work_as_ever():
    model = Model(
        lambda self, x: torch.func.vmap(torch.func.grad(lambda row: self.fc(row).pow(2).sum()))(x),
        fc=nn.Linear(3, 3),
    )
    x = torch.rand(4, 3)
    plain = model(x)
    for level in ("module", "operation"):
        with tl.profile(model, level=level) as p:
            torch.testing.assert_close(model(x), plain)
        assert len(p.steps) == 1


def test_double_backward_and_gradients_taken_inside_the_forward():
    def forward(self, x):
        y = self.fc(x).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return self.out(gradient)

    model = Model(forward, fc=nn.Linear(3, 3), out=nn.Linear(3, 1))
    with tl.profile(model, check="nonfinite") as p:
        model(torch.rand(4, 3, requires_grad=True)).sum().backward()
    assert p.problems == []
    assert p["fc"].calls[0].backward_spans


def test_hooks_of_the_user_run_as_ever():
    model, heard = MLP(), []
    model.fc1.register_forward_hook(lambda module, args, result: heard.append("forward"))
    model.fc1.register_full_backward_hook(
        lambda module, grad_in, grad_out: heard.append("backward")
    )
    model.fc1.weight.register_hook(lambda gradient: gradient * 2)
    x = torch.rand(2, 4, requires_grad=True)
    model(x).sum().backward()
    plain = model.fc1.weight.grad.clone()
    model.zero_grad()
    with tl.profile(model) as p:
        model(x).sum().backward()
    assert heard == ["forward", "backward"] * 2
    torch.testing.assert_close(model.fc1.weight.grad, plain)
    assert p["fc1"].calls[0].backward_spans


def test_a_profile_can_be_started_and_finished_by_hand_once():
    model = MLP()
    p = tl.profile(model)
    assert str(p) == "<Profile of MLP: not started>"
    p.start()
    model(torch.rand(2, 4))
    with pytest.raises(RuntimeError, match="has no results until measuring ends"):
        p.summary()
    p.finish()
    p.finish()
    assert len(p.steps) == 1
    with pytest.raises(RuntimeError, match="started only once"):
        p.start()


def test_a_profile_of_nothing_says_so():
    with tl.profile(MLP()) as p:
        pass
    assert p.steps == []
    assert p.problems == ["The model was not called while it was measured"]
    str(p)


def test_a_loop_that_ends_before_the_schedule_begins_is_a_problem():
    model = MLP()
    with tl.profile(model, skip=50) as p:
        for _ in range(3):
            model(torch.rand(2, 4))
    assert p.problems == [
        "No step was measured: the loop made 3 calls of the model, and skip=50 leaves them out"
    ]


def test_lazy_modules_are_profiled_on_their_first_call():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with tl.profile(model) as p:
        model(torch.rand(2, 5)).sum().backward()
    assert p.root.num_parameters == 18
    assert p["0"].calls[0].flops == 2 * 2 * 5 * 3


def test_tensors_without_storage_are_no_activations():
    assert allocators.storages_of(torch.rand(3).to_sparse()) == []


def test_on_cuda_modules_and_nodes_are_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(model_modules.ModelModules, "uses_cuda", lambda self: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with tl.profile(model) as p:
        model(torch.rand(1, 2)).sum().backward()
    assert p.problems == []
    assert (
        len(waits) == 2 * 3 + 2 * 5
    )  # modules; nodes of relu, addmm, its transposed weight, two parameters
    assert p["0"].calls[0].backward_spans


def test_a_very_deep_training_step_is_measured_in_part_and_does_not_crash():
    """In a process of its own, with a small stack and limits as small: without the limits, torch
    would crash it when the graph is freed.
    """
    code = """
import torch, torchlens as tl
from torchlens._profile import logged_steps, model_watcher
model_watcher._MOST_CALLS, logged_steps._MOST_WATCHED_NODES = 1_000, 2_000
class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
    def forward(self, x):
        for _ in range(4_000):
            x = self.fc(x) + 1
        return x
model = Deep()
with tl.profile(model, level="operation", memory=False) as p:
    model(torch.rand(2, 4)).sum().backward()
print(len(p.calls), len(p.operations), p.problems[0])
"""
    size = 1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, size),
    )  # fmt: skip
    said = "Step 1 calls more than 1,000 modules: of the others, forward was measured"
    assert (done.returncode, done.stdout) == (0, f"4001 8000 {said}\n"), done.stderr
