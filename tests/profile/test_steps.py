"""Steps: which are measured, of which kind they are, and what they spend their time on outside the
model.
"""

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, dataloader

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._profile import outside
from torchlens._profile.records import ProfiledStep


def run(steps: int, **options):
    model = MLP()
    with tl.profile(model, **options) as p:
        for _ in range(steps):
            model(torch.rand(2, 4)).sum().backward()
    return p


@pytest.mark.parametrize(
    ("options", "positions", "warmup"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], []),
        ({"skip": 7}, [8, 9, 10], []),
        ({"skip": 2, "warmup": 1, "measure": 2, "every": 4}, [3, 4, 5, 7, 8, 9], [3, 7]),
        ({"measure": 1, "every": 5}, [1, 6], []),
        ({"warmup": 2}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2]),
        ({"warmup": 1, "every": 5}, [1, 2, 6, 7], [1, 6]),
        ({"every": 3}, [1, 4, 7, 10], []),
        ({"skip": 1, "max_steps": 3}, [2, 3, 4], []),
    ],
    ids=str,
)
def test_a_schedule_says_which_steps_are_measured(options, positions, warmup):
    p = run(10, **options)
    assert [step.position for step in p.steps] == positions
    assert [step.position for step in p.steps if step.is_warmup] == warmup
    assert [step.number for step in p.steps] == list(range(1, len(positions) + 1))
    assert len(p["fc1"].calls) == len(positions)
    assert all(step.num_backward_passes == 1 for step in p.steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": 3}, "give both: measure=5, every=100"),
        (
            {"warmup": 2, "measure": 3, "every": 4},
            r"every must be at least warmup \+ measure \(2 \+ 3\), got 4",
        ),
        ({"skip": -1}, "skip must be at least 0, got -1"),
    ],
)
def test_an_impossible_schedule_raises(options, message):
    with pytest.raises(ValueError, match=message):
        tl.profile(MLP(), **options)
    with pytest.raises(ValueError, match="with inputs, use warmup and repeats"):
        tl.profile(MLP(), torch.rand(2, 4), skip=2)


def mixed():
    model = MLP()
    with tl.profile(model) as p:
        for _ in range(2):
            model.train()(torch.rand(2, 4)).sum().backward()
            with torch.no_grad():
                model.eval()(torch.rand(6, 4))
    return p


def test_training_and_evaluation_are_separate_kinds():
    p = mixed()
    assert [(step.phase, step.has_grad, step.input_shapes) for step in p.steps] == [
        ("training", True, ((2, 4),)), ("evaluation", False, ((6, 4),)),
    ] * 2  # fmt: skip
    kinds = p.measurements.by_kind()
    assert list(kinds) == ["training", "evaluation"]
    assert [len(kind.steps) for kind in kinds.values()] == [2, 2]
    assert [kind.root.statistic("flops").median for kind in kinds.values()] == [
        2 * 2 * 35,
        2 * 6 * 35,
    ]
    assert kinds["evaluation"].root.statistic("backward_seconds") is None
    text = str(p.summary(width=120))
    assert text.index("training: 2 steps") < text.index("evaluation: 2 steps")
    table = p.to_pandas()
    assert table["step_kind"].tolist() == ["training"] * 4 + ["evaluation"] * 4
    assert table["flops"].tolist() == [140, 80, 0, 60, 420, 240, 0, 180]
    assert p.to_pandas("step")["phase"].tolist() == ["training", "evaluation"] * 2


def test_kinds_of_steps_are_apart_in_json():
    import json

    info = json.loads(mixed().to_json())["MLP"]["info"]
    assert list(info["kinds"]) == ["training", "evaluation"]
    assert info["kinds"]["evaluation"]["steps"] == 2
    assert info["kinds"]["evaluation"]["children"]["fc1"]["info"]["flops"] == 240
    assert (info["step_kind"], info["flops"]) == ("training", 140)
    assert "kinds" not in json.loads(run(2).to_json())["MLP"]["info"]


def test_an_overlay_is_of_one_kind_of_steps():
    p = mixed()
    assert p.overlay("flops")["fc1"] == 80
    model = MLP()
    with tl.profile(model) as p:
        model.train()(torch.rand(2, 4)).sum().backward()
        for _ in range(2):
            model.eval()(torch.rand(6, 4))
    assert p.overlay("flops")["fc1"] == 240
    assert p.overlay("flops_backward")["fc1"] == 80  # its input needs no gradient


def test_few_shapes_are_separate_kinds_and_many_are_not():
    def lengths(*sizes):
        model = MLP()
        with tl.profile(model) as p:
            for size in sizes:
                model(torch.rand(size, 4))
        return p

    assert list(lengths(1, 2, 1).measurements.by_kind()) == [
        "training, inputs 1x4",
        "training, inputs 2x4",
    ]
    assert list(lengths(*range(1, 9)).measurements.by_kind()) == ["training"]


def test_the_whole_of_a_step_is_made_up_of_its_parts():
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model) as p:
        for (x,) in DataLoader(TensorDataset(torch.rand(8, 4)), batch_size=2):
            model(x).sum().backward()
            optimizer.step()
    assert len(p.steps) == 4
    for step in p.steps:
        kinds = [kind for kind, *_ in step.outside_spans]
        assert kinds == [
            "backward",
            "optimizer",
            "data",
        ]  # of the next one; the last tells that there is no more
        parts = [step.forward_seconds, step.loss_seconds, step.backward_call_seconds,
            step.optimizer_seconds,
                 step.data_seconds, step.other_seconds]  # fmt: skip
        assert all(part >= 0 for part in parts)
        assert math.fsum(part for part in parts if part is not None) == pytest.approx(
            step.wall_seconds
        )
        assert step.backward_seconds <= step.backward_call_seconds
    assert "a whole step:" in str(p)


def seconds_of(*outside_spans: tuple[str, int, int]) -> list[float | None]:
    """Loss, backward, optimizer, data and the rest of a step of 100 seconds, of which the forward
    pass took 10.
    """
    spans = tuple((kind, start * 10**9, end * 10**9) for kind, start, end in outside_spans)
    step = ProfiledStep(
        number=1, is_warmup=False, end_ns=100 * 10**9, forward_end_ns=10 * 10**9,
        outside_spans=spans, forward_seconds=10,
        backward_seconds=None, num_backward_passes=1, peak_bytes=None, added_bytes=None,
    )  # fmt: skip
    return [
        step.loss_seconds,
        step.backward_call_seconds,
        step.optimizer_seconds,
        step.data_seconds,
        step.other_seconds,
    ]


def test_overlapping_spans_count_once():
    checkpoints = (
        ("backward", 30, 40),
        ("backward", 41, 51),
        ("backward", 20, 60),
        ("optimizer", 60, 70),
    )
    assert seconds_of(*checkpoints) == [10, 40, 10, None, 30]
    optimizers_in_hooks = ("optimizer", 30, 35), ("optimizer", 40, 45), ("backward", 20, 60)
    assert seconds_of(*optimizers_in_hooks) == [10, 30, 10, None, 40]
    while_the_loss_waits = ("data", 12, 15), ("optimizer", 16, 17), ("backward", 20, 60)
    assert seconds_of(*while_the_loss_waits) == [6, 40, 1, 3, 40]
    backward_in_the_optimizer = ("backward", 20, 60), ("optimizer", 15, 70)
    assert seconds_of(*backward_in_the_optimizer) == [5, 40, 15, None, 30]
    loader_of_a_loader = ("data", 80, 85), ("data", 75, 90)
    assert seconds_of(*loader_of_a_loader) == [None, None, None, 15, 75]


def test_a_checkpoint_that_runs_backward_inside_the_backward_pass_takes_no_time_twice():
    model = Model(
        lambda self, x: self.b(checkpoint(self.a, x, use_reentrant=True)), a=MLP(), b=nn.ReLU()
    )
    with tl.profile(model) as p:
        for _ in range(2):
            model(torch.rand(2, 4, requires_grad=True)).sum().backward()
    for step in p.steps:
        (_, inner_start, inner_end), (_, start, end) = step.outside_spans
        assert start <= inner_start <= inner_end <= end
        assert step.backward_call_seconds == (end - start) / 1e9


def test_without_anything_outside_nothing_is_said_of_it():
    model = MLP()
    with tl.profile(model) as p:
        model(torch.rand(2, 4))
    assert (p.steps[0].loss_seconds, p.steps[0].optimizer_seconds, p.steps[0].data_seconds) == (
        None,
        None,
        None,
    )
    assert "a whole step" not in str(p)


def test_two_threads_that_end_in_either_order_leave_torch_as_it_was():
    before = torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__
    hooks = (
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    )
    for first_to_end in ("outer", "inner"):
        started, ended = threading.Event(), threading.Event()
        spans: list[Any] = []

        def other(started=started, ended=ended, spans=spans):
            watch = outside.OutsideWatch([].append)
            watch.start()
            started.set()
            ended.wait()
            watch.stop()
            spans.append(watch.take())

        watch = outside.OutsideWatch([].append)
        thread = threading.Thread(target=other)
        watch.start()
        thread.start()
        started.wait()
        torch.rand(2, requires_grad=True).sum().backward()
        if first_to_end == "outer":
            watch.stop()
        ended.set()
        thread.join()
        watch.stop()
        assert [span.kind for span in watch.take()] == ["backward"]
        assert spans == [[]]
        assert (torch.autograd.backward, dataloader._BaseDataLoaderIter.__next__) == before
        now = (
            len(optimizers._global_optimizer_pre_hooks),
            len(optimizers._global_optimizer_post_hooks),
        )
        assert now == hooks


def test_a_container_that_is_not_called_has_the_sum_of_its_modules():
    model = Model(
        lambda self, x: self.parts[1](self.parts[0](x)),
        parts=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
    )
    with tl.profile(model) as p:
        model(torch.rand(2, 4)).sum().backward()
    rows = {
        line.split()[0]: line.split()
        for line in str(p.summary(width=200)).splitlines()
        if line.strip()
    }
    heading = rows["module"]
    assert rows["parts"][1] == "ModuleList"
    flops = {name: rows[name][rows[name].index("Linear") + 4] for name in ("0", "1")}
    assert set(flops.values()) == {"64"}
    assert "128" in rows["parts"]
    assert (
        len(heading) == len(set(heading)) + 4
    )  # 'own' and 'peak' come with 'fwd' and 'bwd', twice each


def test_types_of_modules_are_added_up_without_the_modules_inside():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with tl.profile(model) as p:
        model(torch.rand(2, 4))
    rows = {
        line.split()[0]: line.split()
        for line in str(p.summary(width=200, by="type")).splitlines()
        if line.strip()
    }
    assert rows["Linear"][1:5] == ["2", "2", "40", "128"]
    assert rows["Sequential"][1] == "2"
    shares = [
        float(next(word for word in rows[name] if word.endswith("%"))[:-1])
        for name in ("Linear", "ReLU", "Sequential")
    ]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_an_optimizer_with_a_closure_is_not_charged_with_the_model():
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.rand(2, 4)).sum()
        loss.backward()
        return loss

    with tl.profile(model) as p:
        for _ in range(2):
            optimizer.step(closure)
    for step in p.steps:
        (_, _, backward_end), (_, optimizer_start, optimizer_end) = step.outside_spans
        assert optimizer_start < step.start_ns  # of the model's call
        assert step.optimizer_seconds == (optimizer_end - backward_end) / 1e9
