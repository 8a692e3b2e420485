"""A profile as a timeline."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchlens as tl
from tests.networks import MLP


def trained(**options):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, **options) as p:
        for _ in range(2):
            model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
    return p


def events_of(p, track):
    data = json.loads(p.to_chrome_trace())
    names = {
        event["tid"]: event["args"]["name"]
        for event in data["traceEvents"]
        if event["name"] == "thread_name"
    }
    return [
        event
        for event in data["traceEvents"]
        if event["ph"] == "X" and names[event["tid"]] == track
    ]


def test_modules_lie_inside_the_model_and_the_model_inside_its_step():
    p = trained()
    steps, modules = events_of(p, "steps"), events_of(p, "modules, forward")
    assert [event["name"] for event in modules] == ["MLP", "fc1", "act", "fc2"] * 2
    for step, calls in zip(steps, (modules[:4], modules[4:]), strict=True):
        model, *inner = calls
        for outer, event in [(step, model), *((model, each) for each in inner)]:
            assert outer["ts"] <= event["ts"]
            assert event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]
        assert inner[0]["ts"] + inner[0]["dur"] <= inner[1]["ts"]
    assert modules[1]["args"] == {
        "type": "Linear",
        "step": 1,
        "output": [[2, 5]],
        "FLOPs": 80,
        "peak bytes": 40,
    }


def test_calls_outside_the_model_are_shown_after_it():
    p = trained()
    outside = events_of(p, "outside the model")
    assert [event["name"] for event in outside] == ["backward", "optimizer"] * 2
    backward = events_of(p, "modules, backward")
    assert {event["name"] for event in backward} == {"MLP", "fc1", "act", "fc2"}
    assert all(outside[0]["ts"] <= event["ts"] for event in backward)


def test_operations_are_shown_with_their_labels(tmp_path):
    p = trained(level="operation")
    assert [event["name"] for event in events_of(p, "operations")] == [
        "linear_1_1",
        "relu_1_2",
        "linear_2_3",
    ]
    p.to_chrome_trace(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert all(
        event["dur"] >= 0 and event["ts"] >= 0
        for event in data["traceEvents"]
        if event["ph"] == "X"
    )


def test_a_profile_without_steps_is_an_empty_timeline():
    with tl.profile(nn.ReLU()) as p:
        pass
    assert [event["ph"] for event in json.loads(p.to_chrome_trace())["traceEvents"]] == ["M"]


class Attention(nn.Module):
    """The backward passes of its three projections run by turns."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)
        )

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)


def run_checkpointed(x):
    model = nn.ModuleDict({"attention": Attention(), "head": nn.Linear(4, 4)})
    model.forward = lambda x: model["head"](checkpoint(model["attention"], x, use_reentrant=False))
    with tl.profile(model, level="operation") as p:
        for _ in range(2):
            model(x).sum().backward()
    return p


def run_lbfgs(x):
    model = Attention()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with tl.profile(model, level="operation") as p:
        for _ in range(2):
            optimizer.step(closure)
    return p


def run_plain(x):
    return tl.profile(Attention(), x, level="operation")


class Borrower(nn.Module):
    def forward(self, x, weight):
        return torch.tanh(torch.tanh(x) @ weight)


def run_tied(x):
    """The gradient of the weight, which is a matter of its owner, is whole in the middle of the
    borrower's backward.
    """
    model = nn.ModuleDict({"borrower": Borrower(), "owner": nn.Linear(4, 4)})
    model.forward = lambda x: model["owner"](model["borrower"](x, model["owner"].weight))
    return tl.profile(model, x, level="operation")


def nanoseconds(microseconds):
    """As trace viewers read a time: what is below a nanosecond is cut off."""
    return int(microseconds * 1000)


@pytest.mark.parametrize("run", [run_plain, run_checkpointed, run_lbfgs, run_tied])
def test_a_viewer_can_nest_the_events_of_each_track(run):
    data = json.loads(
        run(torch.rand(3, 4, requires_grad=True)).to_chrome_trace(), parse_constant=pytest.fail
    )
    names = {(event["name"], event["tid"]) for event in data["traceEvents"] if event["ph"] == "M"}
    open_until: dict[int, list[int]] = {}
    before = 0
    for event in data["traceEvents"]:
        assert isinstance(event["name"], str)
        assert {type(event["pid"]), type(event["tid"])} == {int}
        if event["ph"] == "M":
            assert isinstance(
                event["args"]["name" if event["name"].endswith("_name") else "sort_index"],
                str | int,
            )
            continue
        assert event["ph"] == "X"
        assert ("thread_name", event["tid"]) in names
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event["dur"])
        assert before <= start <= end
        before = start
        around = open_until.setdefault(event["tid"], [])
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], f"{event} ends after what it lies in"
        around.append(end)
    assert len(open_until) > 3


def test_events_have_the_fields_that_torch_gives_its_own(tmp_path):
    with torch.profiler.profile() as reference:
        MLP()(torch.rand(2, 4)).sum().backward()
    reference.export_chrome_trace(str(tmp_path / "torch.json"))
    theirs = json.loads((tmp_path / "torch.json").read_text())
    ours = json.loads(trained(level="operation").to_chrome_trace())
    assert ours["displayTimeUnit"] == theirs["displayTimeUnit"]
    model = next(event for event in theirs["traceEvents"] if event["ph"] == "X")
    fields = {name: type(value) for name, value in model.items()}
    complete = [event for event in ours["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in complete} == {
        "step",
        "forward",
        "operation",
        "outside",
        "backward",
    }
    for event in complete:
        assert {name: type(value) for name, value in event.items()} == fields
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    for kind in ("process_name", "thread_name", "thread_sort_index"):
        model = next(event for event in theirs["traceEvents"] if event["name"] == kind)
        for event in ours["traceEvents"]:
            if event["name"] == kind:
                assert {name: type(value) for name, value in event["args"].items()} == {
                    name: type(value) for name, value in model["args"].items()
                }
