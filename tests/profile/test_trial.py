"""`torchlens.profile(model, x)` runs the model, measures it, and leaves it as it was."""

import copy
import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model


def test_it_warms_up_repeats_and_goes_backward():
    p = tl.profile(MLP(), torch.rand(2, 4))
    assert [step.is_warmup for step in p.steps] == [True] * 2 + [False] * 6
    assert {step.num_backward_passes for step in p.steps} == {1}
    assert p["fc1"].statistic("forward_seconds").num == 5  # the other is for memory and FLOPs
    assert p["fc1"].statistic("backward_seconds").spread >= 0
    assert p.problems == []
    p = tl.profile(MLP(), torch.rand(2, 4), warmup=0, repeats=2, backward=False)
    assert [(step.is_warmup, step.backward_seconds) for step in p.steps] == [(False, None)] * 3


def test_the_model_and_the_world_are_left_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True))
    model[0].weight.grad = torch.full((4, 4), 7.0)
    gradient = model[0].weight.grad
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = [id(buffer) for buffer in model.buffers()]
    x = torch.rand(8, 4, requires_grad=True)
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    p = tl.profile(model, x, check="health")
    assert p.problems == []
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [id(buffer) for buffer in model.buffers()] == buffers
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.full((4, 4), 7.0))
    assert model[0].bias.grad is None
    assert x.grad is None
    assert model.training
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert p.root.gradient_bytes == 4 * (16 + 4 + 8)


def test_parameters_of_lazy_modules_are_left_without_gradients():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    tl.profile(model, torch.rand(8, 4))
    assert all(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters())
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


def test_a_model_that_writes_its_input_or_rebinds_buffers_gets_the_same_each_time():
    seen = []

    def forward(self, x):
        seen.append(x.sum().item())
        self.count = self.count + 1
        return x.mul_(2)

    model = Model(forward)
    model.register_buffer("count", torch.zeros(()))
    count, x = model.count, torch.ones(3)
    tl.profile(model, x, warmup=1, repeats=2)
    assert seen == [3.0] * 4
    assert torch.equal(x, torch.ones(3))
    assert model.count is count
    assert count == 0


def test_the_model_is_left_as_it_was_also_if_it_raises():
    def forward(self, x):
        self.count += 1
        if self.count == 3:
            raise ValueError("third time")
        return x

    model = Model(forward)
    model.register_buffer("count", torch.zeros(()))
    with pytest.raises(ValueError, match="third time"):
        tl.profile(model, torch.rand(2))
    assert model.count == 0


def test_weights_stay_even_if_hooks_step_an_optimizer_or_forward_writes_to_them():
    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(2)
        return self.fc(x) * self.scale

    model = Model(forward, fc=nn.Linear(3, 3), scale=nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.fc.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tl.profile(model, torch.rand(2, 3), backward=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_plain_attributes_of_modules_are_restored():
    def forward(self, x):
        self.num_calls += 1
        self.cache.append(x)
        return self.fc(x)

    model = Model(forward, fc=nn.LazyLinear(3), num_calls=0)
    model.cache = []
    p = tl.profile(model, torch.rand(2, 3))
    assert p["fc"].num_parameters == 12
    assert (model.num_calls, model.cache, type(model.fc)) == (0, [], nn.LazyLinear)


@pytest.mark.parametrize("check", ["nonfinite", "health"])
def test_a_profile_with_a_check_can_be_pickled(check):
    def forward(self, x):  # calls operations by itself: what is found there is known by its line
        return torch.log(torch.relu(self.fc(x) - 100))

    p = tl.profile(Model(forward, fc=nn.Linear(4, 4)), torch.rand(80, 4), check=check)
    assert len(p.findings()) >= 1
    for again in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert str(again) == str(p)
        assert [str(finding) for finding in again.findings()] == [
            str(finding) for finding in p.findings()
        ]
        assert str(again.first_nonfinite) == str(p.first_nonfinite)


def test_inputs_are_given_as_for_a_log():
    model = Model(lambda self, a, *, b: {"sum": a + b, "index": torch.arange(2), "none": None})
    p = tl.profile(model, [torch.rand(2)], {"b": torch.rand(2, requires_grad=True)})
    assert p.calls[0].input_shapes == [(2,), (2,)]
    assert p.calls[0].grad_out_shapes == [(2,)]
    with pytest.raises(TypeError, match="cannot be called with"):
        tl.profile(MLP(), [torch.rand(2), 3])
    with pytest.raises(TypeError, match="Make an instance of it"):
        tl.profile(MLP)  # type: ignore[arg-type]


def test_complex_outputs_and_outputs_without_gradient():
    p = tl.profile(
        Model(lambda self, x: torch.fft.fft(x)), torch.rand(4, requires_grad=True), repeats=1
    )
    assert p.steps[-1].num_backward_passes == 1
    p = tl.profile(Model(lambda self, x: x.argmax()), torch.rand(4), repeats=1)
    assert p.steps[-1].num_backward_passes == 0
    with pytest.raises(
        ValueError, match="backward=True, but no output of the model requires a gradient"
    ):
        tl.profile(Model(lambda self, x: x * 2), torch.rand(4), backward=True)


def test_a_model_that_yields_its_output_is_run_to_its_end():
    p = tl.profile(
        Model(
            lambda self, x: (layer(x) for layer in (self.a, self.b)), a=nn.Linear(4, 4), b=nn.ReLU()
        ),
        torch.rand(4),
    )
    assert {"a", "b"} <= p.modules.keys()


def test_under_inference_mode_it_measures_forward():
    with torch.inference_mode():
        p = tl.profile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.rand(3, 4))
    assert p.steps[-1].backward_seconds is None
    assert p["0"].statistic("flops").median == 2 * 3 * 4 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "layer"}, "level must be 'module' or 'operation', or None, got 'layer'"),
        ({"check": "nan"}, "check must be 'nonfinite' or 'health', or None, got 'nan'"),
        ({"stop": True}, "needs a check"),
        ({"stop": "yes", "check": "nonfinite"}, "stop must be True or False"),
        ({"backward": 1}, "backward must be True, False, or None"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"max_steps": 2.0}, "max_steps must be a whole number, got 2.0"),
        ({"thresholds": 3}, "thresholds must be a dict"),
        ({"thresholds": {"dead": 1}}, "no threshold 'dead'. Available: 'dead_share', 'min_values'"),
        (
            {"thresholds": {"dead_share": "many"}},
            "'dead_share' must be a number of at least 0, got 'many'",
        ),
        (
            {"thresholds": {"largest_update": 0.1}},
            "no threshold 'largest_update'",
        ),  # a run has one, a profile has not
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_runs(options, message):
    model = MLP()
    with pytest.raises((TypeError, ValueError), match=message):
        tl.profile(model, **options)


def test_no_module_of_that_name_says_which_is_close():
    p = tl.profile(MLP(), torch.rand(2, 4), warmup=0, repeats=1)
    with pytest.raises(KeyError, match=r"No module 'fc3'\. Closest: 'fc"):
        p["fc3"]


def test_a_model_that_cannot_go_backward_is_measured_forward():
    model = Model(lambda self, x: self.fc(x).exp_().mul_(2), fc=nn.Linear(2, 2))
    p = tl.profile(model, torch.rand(1, 2))
    assert len(p.steps) == 8
    assert "forward alone was measured" in p.problems[0]
    assert "modified by an inplace operation" in p.problems[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tl.profile(model, torch.rand(1, 2), backward=True)


@pytest.mark.parametrize("options", [{"repeats": 3}, {"backward": True}, {"backward": False}])
def test_options_for_inputs_need_inputs(options: dict[str, Any]):
    with pytest.raises(
        ValueError, match=r"repeats and backward need inputs: profile\(model, x, repeats=3\)"
    ):
        tl.profile(nn.Linear(2, 2), **options)


def test_the_first_profile_of_a_tiny_model_is_quick():
    """Without sympy, which torch imports to check a gradient that is given to `backward`."""
    code = """
import sys, torch, torchlens
p = torchlens.profile(torch.nn.Linear(3, 4), torch.rand(2, 3))
print("sympy" in sys.modules, p.steps[0].num_backward_passes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False 1\n"
