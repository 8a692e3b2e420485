"""At operation level each step is logged, and each operation of it measured."""

import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchlens as tl
from tests.networks import MLP, ConvNet, Model, TinyGPT
from torchlens._health.tensor_statistics import has_nonfinite
from torchlens._profile import profile as profile_module


def profile_of(model, x, steps=1, **options):
    with tl.profile(model, level="operation", **options) as p:
        for _ in range(steps):
            model(x).sum().backward()
    assert p.problems == []
    return p


def test_each_operation_has_a_label_of_the_log_and_the_module_that_ran_it():
    model = Model(lambda self, x: F.relu(self.fc(x) + 1).flatten(), fc=nn.Linear(4, 5))
    p = profile_of(model, torch.rand(2, 4))
    assert [(o.label, o.address, o.shape, o.num_bytes, o.step) for o in p.operations] == [
        ("linear_1_1", "fc", (2, 5), 40, 1),
        ("add_1_2", "", (2, 5), 40, 1),
        ("relu_1_3", "", (2, 5), 40, 1),
        ("flatten_1_4", "", (10,), 40, 1),
    ]
    assert [o.label for o in p.operations] == list(p.history.layer_labels)[1:-1]
    linear = p.operations[0]
    assert (linear.flops, linear.flops_backward) == (80, 80)
    assert p.calls[linear.call].address == "fc"
    assert all(o.forward_seconds >= 0 and o.backward_seconds is not None for o in p.operations)
    assert [(o.peak_bytes, o.added_bytes) for o in p.operations if o.layer_type != "add"] == [
        (40, 40),
        (40, 40),
        (0, 0),
    ]


def test_every_logged_step_has_its_operations_and_the_history_is_of_the_last():
    p = profile_of(MLP(), torch.rand(2, 4), steps=5)
    assert [o.step for o in p.operations] == [1, 1, 1, 3, 3, 3, 5, 5, 5]
    assert [o.label for o in p.operations] == ["linear_1_1", "relu_1_2", "linear_2_3"] * 3
    assert [o.added_bytes for o in p.operations] == [40, 40, 24] * 3
    assert len(p.history) == 5
    assert p.history["linear_1_1"].has_saved_activations is False


def test_steps_that_differ_have_labels_of_their_own():
    model = Model(
        lambda self, x: self.b(self.a(x)) if x.sum() > 0 else self.a(x), a=nn.Tanh(), b=nn.Sigmoid()
    )
    with tl.profile(model, level="operation") as p:
        for sign in (1, 1, -1, -1, 1):
            model(sign * torch.ones(2))
    labels = {
        step: [o.label for o in p.operations if o.step == step and o.label] for step in (1, 3, 5)
    }
    assert labels[1] == labels[5]
    assert labels[1][-1].startswith("sigmoid")
    assert labels[3][-1].startswith("tanh")


@pytest.mark.parametrize(
    ("model", "x"),
    [(ConvNet(), torch.rand(2, 3, 8, 8)), (TinyGPT(), torch.randint(0, 11, (2, 6)))],
    ids=["ConvNet", "TinyGPT"],
)
def test_module_and_operation_level_agree(model, x):
    gc.collect()  # of other tests; freeing their tensors in the middle of this one would count
    with tl.profile(model) as modules:
        model(x).sum().backward()
    operations = profile_of(model, x)
    for one, other in zip(modules.calls, operations.calls, strict=True):
        for field in ("address", "input_shapes", "grad_in_shapes", "grad_out_shapes", "flops",
            "flops_backward",
                      "saved_bytes", "added_bytes", "peak_bytes"):  # fmt: skip
            assert getattr(one, field) == getattr(other, field), (one.address, field)
    history = tl.log_forward_pass(model, x)
    assert operations.root.calls[0].flops == history.total_flops
    assert operations.root.calls[0].flops_backward == history.total_flops_backward


def test_backward_time_of_operations_adds_up_to_that_of_their_modules():
    p = profile_of(MLP(), torch.rand(2, 4))
    fc1 = p["fc1"].calls[0]
    (linear,) = (o for o in p.operations if o.address == "fc1")
    # Adding to the gradients of the parameters is the module's, not the operation's.
    assert 0 <= linear.backward_seconds <= fc1.backward_self_seconds


class Collector:
    """A checker that writes down what it is shown."""

    first_nonfinite = None

    def __init__(self):
        self.values, self.gradients, self.parameters, self.labels = [], [], [], []

    @property
    def origins(self):
        return self

    def on_step(self, step, checking, has_grad, has_stepped):
        pass

    def on_boundary(self, place, tensor, node):
        pass

    def on_value(self, place, tensor, inputs):
        self.values.append((place, tuple(tensor.shape), torch.is_grad_enabled()))

    def on_entered(self, place, inputs):
        pass

    def on_gradient(self, place, gradient, made_of):
        self.gradients.append(
            (
                place,
                tuple(gradient.shape),
                [tuple(g.shape) for g in made_of.arrived if g is not None],
            )
        )

    def on_parameter(self, place, parameter, gradient):
        self.parameters.append((place.parameter, place.address, tuple(gradient.shape)))
        assert gradient.shape == parameter.shape

    def finish(self, label_of):
        self.labels = [label_of(place.step, place.entry) for place, _, _ in self.values]


@pytest.fixture
def collector(monkeypatch):
    checker = Collector()
    monkeypatch.setattr(profile_module, "HealthChecker", lambda *arguments: checker)
    return checker


def test_a_checker_sees_every_value_gradient_and_parameter(collector):
    model = MLP()
    with tl.profile(model, check="health") as p:
        model(torch.rand(2, 4)).sum().backward()
    assert p.problems == []
    assert [(place.operation, shape) for place, shape, _ in collector.values] == [
        ("linear", (2, 5)), ("relu", (2, 5)), ("linear", (2, 3)),
    ]  # fmt: skip
    assert not any(grad for _, _, grad in collector.values)
    assert collector.labels == ["linear_1_1", "relu_1_2", "linear_2_3"]
    place = collector.values[0][0]
    assert (place.phase, place.step, place.address, place.pass_num) == ("forward", 1, "fc1", 1)
    assert p.calls[place.call].address == "fc1"
    assert "networks.py" in place.source
    assert sorted(collector.parameters) == [
        ("fc1.bias", "fc1", (5,)), ("fc1.weight", "fc1", (5, 4)), ("fc2.bias", "fc2", (3,)),
        ("fc2.weight", "fc2", (3, 5)),
    ]  # fmt: skip
    nodes = {place.operation: (place.address, place.entry) for place, _, _ in collector.gradients}
    assert nodes["ReluBackward0"] == ("act", collector.values[1][0].entry)
    shapes = [
        shape for place, shape, _ in collector.gradients if place.operation == "ReluBackward0"
    ]
    assert shapes == [(2, 5)]


def test_in_a_light_step_a_checker_gets_the_outputs_and_all_that_is_not_finite(collector):
    model = MLP()
    with tl.profile(model, check="nonfinite") as p, torch.no_grad():
        for _ in range(3):
            model(torch.rand(2, 4))
        model.fc1.bias[0] = torch.inf
        model(torch.rand(2, 4))
    assert p.problems == []
    assert [not step.is_light for step in p.steps] == [True, False, True, False]
    seen = [(place.step, place.address) for place, _, _ in collector.values if place.step in (2, 4)]
    assert seen == [(2, ""), (4, "fc1"), (4, "act"), (4, "fc2"), (4, "")]


def test_at_module_level_a_checker_gets_the_results_of_modules(collector):
    model = MLP()
    with tl.profile(model, check="health", level="module"):
        model(torch.rand(2, 4)).sum().backward()
    assert [(place.operation, place.address, place.entry) for place, _, _ in collector.values] == [
        ("Linear", "fc1", None), ("ReLU", "act", None), ("Linear", "fc2", None), ("MLP", "", None),
    ]  # fmt: skip
    assert len(collector.parameters) == 4


def nan_model(where):
    """Its `second` module makes NaN, forward or backward."""

    def second(self, x):
        return torch.sqrt(x * 0) if where == "backward" else torch.log(x * 0 - 1)

    return Model(lambda self, x: self.third(self.second(self.first(x))), first=nn.Linear(3, 3),
        second=Model(second),
                 third=nn.Linear(3, 1))  # fmt: skip


@pytest.mark.parametrize("level", ["module", "operation"])
def test_calls_say_whether_values_and_gradients_were_finite(level):
    for where in ("forward", "backward"):
        model = nan_model(where)
        with tl.profile(model, check="nonfinite", level=level) as p:
            model(torch.rand(2, 3)).sum().backward()
        flags = {
            address: (call.forward_nonfinite, call.grad_out_nonfinite, call.grad_in_nonfinite)
            for address, call in (
                (address, p[address].calls[0]) for address in ("first", "second", "third")
            )
        }
        if where == "forward":
            assert flags["first"][0] is False
            assert flags["second"][0] is True
            assert flags["third"][0] is True
        else:
            assert flags == {
                "first": (False, True, None),
                "second": (False, False, True),
                "third": (False, False, False),
            }


def test_without_a_check_nothing_is_said_of_finite_values():
    p = profile_of(MLP(), torch.rand(2, 4))
    call = p.calls[1]
    assert (call.forward_nonfinite, call.grad_out_nonfinite, call.grad_in_nonfinite) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize("level", ["module", "operation"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_stop_raises_where_it_happens_and_leaves_nothing_behind(where, level):
    model = nan_model(where)
    reached = []

    def train():
        y = model(torch.rand(2, 3))
        reached.append("forward")
        y.sum().backward()
        reached.append("backward")

    with (
        pytest.raises(tl.NonFiniteError),
        tl.profile(model, check="nonfinite", stop=True, level=level) as p,
    ):
        train()
    assert reached == ([] if where == "forward" else ["forward"])
    assert p.first_nonfinite is not None
    assert model.first.weight.grad is None
    assert p.problems == []


def test_huge_sums_of_finite_values_are_finite():
    assert not has_nonfinite(torch.full((4,), 3e38))
    assert has_nonfinite(torch.tensor([1.0, math.inf]))
    assert has_nonfinite(torch.tensor([math.inf, -math.inf]))
    assert has_nonfinite(torch.tensor([1.0, math.nan]))
    assert has_nonfinite(torch.tensor([complex(math.nan, 0)]))
    assert not has_nonfinite(torch.tensor([1, 2]))
    assert has_nonfinite(torch.tensor([[0.0, math.nan]]).to_sparse())


def test_an_answer_is_remembered_only_for_the_same_values():
    x = torch.zeros(8)
    assert not has_nonfinite(x[:4])
    x[6] = math.nan
    assert has_nonfinite(x)
    x[6] = 0.0
    assert not has_nonfinite(x)
    parts = x[:4], x[::2]
    assert not has_nonfinite(parts[0])
    x[6] = math.inf
    assert not has_nonfinite(parts[0])
    assert has_nonfinite(parts[1])
    for _ in range(50):  # memory that is freed and given to another tensor
        assert not has_nonfinite(torch.zeros(100))
        assert has_nonfinite(torch.full((100,), math.nan))


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_flops_that_were_counted_in_one_step_are_not_spread_over_the_others(num_steps):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with tl.profile(model) as p:
        for _ in range(num_steps):
            model(torch.rand(2, 8)).sum().backward()
    assert p.root.typical("flops") == 2 * 2 * 8 * 8
    assert p.root.typical("flops_backward") == 2 * 2 * 8 * 8  # the input needs no gradient
    assert p.root.typical("peak_bytes") == p.root.statistic("peak_bytes").median


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.trunk(x)
        return self.first(y), self.second(y)


@pytest.mark.parametrize("level", ["module", "operation"])
@pytest.mark.parametrize("passes", [[], [0], [0, 0], [0, 1, 1]], ids=str)
def test_backward_flops_count_each_time_that_gradients_went_through(level: Any, passes: list[int]):
    model = TwoHeads()
    x = torch.rand(8, 4, requires_grad=True)

    def step() -> None:
        outputs = model(x)
        for number in passes:
            outputs[number].sum().backward(retain_graph=True)

    with FlopCounterMode(display=False) as plain:
        step()
    with tl.profile(model, level=level) as p:
        step()
    linears = {"trunk": 8 * 4 * 6, "first": 8 * 6 * 3, "second": 8 * 6 * 2}
    times = {"trunk": len(passes), "first": passes.count(0), "second": passes.count(1)}
    backward = {name: p[name].calls[0].flops_backward for name in linears}
    assert backward == {name: 2 * 2 * products * times[name] for name, products in linears.items()}
    assert p.root.calls[0].flops_backward == sum(value or 0 for value in backward.values())
    assert plain.get_total_flops() == (p.root.calls[0].flops or 0) + (
        p.root.calls[0].flops_backward or 0
    )
    if level == "operation":
        assert (
            sum(each.flops_backward or 0 for each in p.operations) == p.root.calls[0].flops_backward
        )
