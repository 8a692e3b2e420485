"""A profile as a timeline."""

import json

import torch
from torch import nn

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
    names = {event["tid"]: event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    return [event for event in data["traceEvents"] if event["ph"] == "X" and names[event["tid"]] == track]


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
    assert modules[1]["args"] == {"type": "Linear", "step": 1, "output": [[2, 5]], "FLOPs": 80, "peak bytes": 40}


def test_what_runs_outside_the_model_is_shown_after_it():
    p = trained()
    outside = events_of(p, "outside the model")
    assert [event["name"] for event in outside] == ["backward", "optimizer"] * 2
    backward = events_of(p, "modules, backward, depth 1")
    assert {event["name"] for event in backward} == {"fc1", "act", "fc2"}
    assert all(outside[0]["ts"] <= event["ts"] for event in backward)


def test_operations_are_shown_with_their_labels(tmp_path):
    p = trained(level="operation")
    assert [event["name"] for event in events_of(p, "operations")] == ["linear_1_1", "relu_1_2", "linear_2_3"] * 2
    p.to_chrome_trace(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in data["traceEvents"] if event["ph"] == "X")


def test_a_profile_without_steps_is_an_empty_timeline():
    with tl.profile(nn.ReLU()) as p:
        pass
    assert [event["ph"] for event in json.loads(p.to_chrome_trace())["traceEvents"]] == ["M"]
