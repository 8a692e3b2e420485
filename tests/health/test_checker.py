"""The first operation that makes NaN or Inf, and what is none."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._health.checker import HealthChecker
from torchlens._health.checking import CheckedPlace, GivenInputs
from torchlens._health.tensor_statistics import value_range

INF = math.inf
X = torch.linspace(-2, 2, 32).view(8, 4)
MASK = torch.eye(8, 4).bool()


class Net(nn.Module):
    """A linear layer and a function after it."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x))


def profiled(model: nn.Module, x: torch.Tensor = X, **options: Any) -> tl.Profile:
    with tl.profile(model, **{"check": "nonfinite"} | options) as p:
        loss = model(x).float().sum()
        if loss.requires_grad:
            loss.backward()
    assert not p.problems
    return p


FORWARD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "log of zero": (lambda y: torch.log(y * 0) + 1, "log_1_3"),
    "log of less": (lambda y: torch.log(-y.abs()).relu(), "log_1_4"),
    "zero by zero": (lambda y: (y * 0) / (y * 0), "truediv_1_4"),
    "written in place": (lambda y: (y * 1).div_(0.0).mul_(2), "div_1_3"),
    "overflow in half precision": (lambda y: (y.half() * 8 + 65000) * 8, "mul_2_5"),
    "overflow on the way to half precision": (lambda y: (y * 1e9).half(), "half_1_3"),
    "exp of much": (lambda y: torch.exp(y.abs() * 1e4 + 1e4) * 0, "exp_1_5"),
    "a row that is masked altogether": (
        lambda y: torch.softmax(y.masked_fill(y < 100, -INF), -1),
        "softmax_1_4",
    ),
    "infinity minus infinity": (
        lambda y: y.masked_fill(MASK, INF) - y.masked_fill(MASK, INF),
        "sub_1_4",
    ),
    "thrown away later": (lambda y: torch.where(y > 100, torch.log(-y.abs()), 0.0), "log_1_5"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_the_first_operation_that_makes_one_is_found(name: str):
    function, label = FORWARD[name]
    found = profiled(Net(function)).first_nonfinite
    assert found is not None
    assert (found.phase, found.label, found.module) == ("forward", label, "")
    assert found.num_nan or found.num_inf
    assert "test_checker.py" in (found.source or "")


@pytest.mark.parametrize("name", FORWARD)
def test_consequences_are_not_reported(name: str):
    function, _ = FORWARD[name]
    assert [finding.kind for finding in profiled(Net(function)).findings()] == ["non-finite values"]


ASKED_FOR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "masked_fill": lambda y: torch.softmax(y.masked_fill(MASK, -INF), -1),
    "added mask": lambda y: torch.softmax(y @ y.mT + torch.triu(torch.full((8, 8), -INF), 1), -1),
    "where": lambda y: torch.softmax(torch.where(MASK, torch.tensor(-INF), y), -1),
    "constant": lambda y: torch.minimum(y, torch.tensor(INF)),
    "clamp": lambda y: y.clamp(min=-INF),
}


@pytest.mark.parametrize("name", ASKED_FOR)
def test_infinity_that_was_asked_for_is_no_finding(name: str):
    p = profiled(Net(ASKED_FOR[name]))
    assert p.first_nonfinite is None
    assert not p.findings()


def test_an_infinite_mask_from_outside_is_no_finding():
    model = Net(lambda y: torch.softmax(y + model.mask, -1))
    model.register_buffer("mask", torch.zeros(8, 4).masked_fill(MASK, -INF))
    assert profiled(model).first_nonfinite is None


BACKWARD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sqrt at zero": (lambda y: torch.sqrt((y * 0).pow(2)), "sqrt_1_4"),
    "norm of nothing": (lambda y: torch.sqrt((y * 0).pow(2).sum(-1)), "sqrt_1_5"),
    "power below one at zero": (lambda y: (y * 0) ** 0.5, "pow_1_3"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_the_first_operation_whose_backward_makes_one_is_found(name: str):
    function, label = BACKWARD[name]
    p = profiled(Net(function))
    found = p.first_nonfinite
    assert found is not None
    assert (found.phase, found.label) == ("backward", label)
    assert [finding.kind for finding in p.findings()] == ["non-finite gradients"]
    assert "gradient received" in str(found)


def test_the_ranges_of_the_arguments_are_reported():
    found = profiled(Net(lambda y: torch.log(torch.relu(y) * 0 + 0))).first_nonfinite
    assert found is not None
    (given,) = found.inputs
    assert (given.low, given.high, given.is_finite) == (0.0, 0.0, True)
    assert (
        str(found).splitlines()[0]
        == "Inf in the forward pass of step 1: made by log_1_5 (log), in the model itself"
    )


@pytest.mark.parametrize("number", [math.nan, INF])
def test_a_parameter_that_was_broken_before_is_reported_as_such(number: float):
    model = Net(lambda y: y * 2)
    with torch.no_grad():
        model.fc.weight[0, 0] = number
    found = profiled(model).first_nonfinite
    assert found is not None
    assert (found.label, found.module) == ("linear_1_1", "fc")
    assert (
        "Not finite before: parameter fc.weight. It was not finite when measuring began."
        in found.note
    )


def test_a_broken_parameter_is_reported_besides_a_discarded_value():
    model = Net(lambda y: y)
    model.last = nn.Linear(4, 4)

    def forward(y: torch.Tensor) -> torch.Tensor:
        number = torch.arange(8.0).unsqueeze(1)
        return model.last(y + torch.where(number < 3, number, torch.log(number)))

    model.function = forward
    with torch.no_grad():
        model.last.weight[0, 0] = INF
    found = profiled(model).first_nonfinite
    assert found is not None
    assert found.module == "last"


def test_broken_data_is_reported_once():
    x = X.clone()
    x[0, 0] = math.nan
    p = profiled(Net(lambda y: torch.relu(y) * 2), x)
    (finding,) = p.findings()
    assert finding.where == "input_1_0"
    assert "It was given to the model: an input of the model." in finding.text


@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_bad_input_of_a_part_that_is_called_by_itself_is_named_by_that_part(level):
    model = nn.ModuleDict({"net": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    x = torch.rand(3, 4)
    x[1, 2] = torch.nan
    with tl.profile(model, check="nonfinite", level=level) as p:
        model["head"](model["net"](x))
    found = p.first_nonfinite
    assert found is not None
    assert (found.operation, found.module) == ("input", "net")
    assert str(found).splitlines()[0] == "NaN in the forward pass of step 1: input of 'net'"


def live_and_logged(model: nn.Module, x: torch.Tensor) -> list[tuple[str, str | None]]:
    """What the profile and the history say of the same pass: phase and label."""
    p = profiled(model, x)
    history = tl.log_forward_pass(model, x)
    output = history["output_1"].tensor_contents.float().sum()
    if output.requires_grad:
        history.log_backward(output)
    found = [p.first_nonfinite, history.first_nonfinite()]
    return [("", None) if each is None else (each.phase, each.label) for each in found]


def _written(y: torch.Tensor, value: float) -> torch.Tensor:
    y[0].fill_(value)
    return torch.log(y.abs()) + y


BOTH: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, str | None]]] = {
    **{
        name: (function, ("forward", label))
        for name, (function, label) in FORWARD.items()
        if name != "thrown away later"
    },
    **{name: (function, ("", None)) for name, function in ASKED_FOR.items()},
    **{name: (function, ("backward", label)) for name, (function, label) in BACKWARD.items()},
    "a constant": (lambda y: y * math.nan + 1, ("forward", "mul_1_2")),
    "a constant in a list": (
        lambda y: y + torch.tensor([1.0, 2.0, math.nan, 3.0]),
        ("forward", "tensor_1_2"),
    ),
    "written through a view": (lambda y: _written(y * 1, 0.0), ("forward", "log_1_6")),
}


@pytest.mark.parametrize("name", BOTH)
def test_profile_and_history_say_the_same(name: str):
    function, expected = BOTH[name]
    assert live_and_logged(Net(function), X) == [expected, expected]


@pytest.mark.parametrize("number", [math.nan, INF, -INF])
def test_infinity_in_the_data_is_a_finding_of_the_data(number: float):
    x = X.clone()
    x[0, 0] = number
    assert (
        live_and_logged(Net(lambda y: torch.relu(y - y.mean()) * 2), x)
        == [("forward", "input_1_0")] * 2
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 100, 1000])
def test_reused_memory_does_not_confuse_values(size: int):
    def forward(y: torch.Tensor) -> torch.Tensor:
        wide = y.sum() * torch.ones(size)
        masked = wide.masked_fill(torch.ones(size).bool(), -INF)
        kept = masked.exp()
        del masked
        for _ in range(20):
            wide = wide + 1  # where the mask was
        wide = torch.log(wide * 0 - 1)
        for _ in range(5):
            wide = wide + 1
        return kept + wide

    (phase, label), logged = live_and_logged(Net(forward), X)
    assert (phase, (label or "").partition("_")[0]) == ("forward", "log")
    assert logged == (phase, label)


@pytest.mark.parametrize("level", ["operation", "module"])
def test_a_loss_that_breaks_the_gradients_is_reported(level: Any):
    model = Net(lambda y: y * 2)
    with tl.profile(model, check="nonfinite", level=level) as p:
        torch.sqrt((model(X) * 0).sum()).backward()
    found = p.first_nonfinite
    assert found is not None
    assert (found.phase, found.is_from_outside) == ("backward", True)
    assert "by the loss, or by a hook" in found.note
    assert len(p.findings()) == 1
    with (
        pytest.raises(tl.NonFiniteError, match="it arrived at"),
        tl.profile(model, check="nonfinite", level=level, stop=True),
    ):
        torch.sqrt((model(X) * 0).sum()).backward()


def test_a_hook_that_breaks_a_gradient_is_reported():
    def forward(y: torch.Tensor) -> torch.Tensor:
        y = y * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * math.nan)
        return y.sin()

    found = profiled(Net(forward)).first_nonfinite
    assert found is not None
    assert (found.phase, found.label, found.is_from_outside) == ("backward", "mul_1_2", True)


@pytest.mark.parametrize("level", ["operation", "module"])
def test_a_hook_that_breaks_a_value_is_reported(level: str):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output * math.nan)
    found = profiled(model, level=level).first_nonfinite
    assert found is not None
    assert (found.phase, found.module) == ("forward", "0")


def test_gradients_beyond_single_precision_squares_explode():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(12)
    with tl.profile(model, check="health") as p:
        model(torch.randn(8, 64)).square().sum().backward()
    norms = [float(layer.weight.grad.double().norm()) for layer in model]
    (finding,) = [finding for finding in p.findings() if finding.kind == "exploding gradient"]
    assert max(norms) > 1e20
    assert f"{max(norms):.2g}" in finding.text


def test_tensors_inside_vmap_do_not_end_a_check():
    layer = nn.Linear(4, 4)
    model = Net(lambda y: torch.log(-torch.func.vmap(layer)(y).abs() - 1))
    model.inner = layer
    p = profiled(model, level="module")
    assert p.first_nonfinite is not None


def test_the_step_is_reported():
    model = Net(lambda y: torch.log(y.abs() + 1))
    with tl.profile(model, check="nonfinite") as p:
        for scale in (1.0, 2.0, INF, 1.0):
            model(X * scale)
    assert p.first_nonfinite is not None
    assert p.first_nonfinite.step == 3


def test_parameters_that_were_broken_by_an_earlier_step_are_no_news():
    model = Net(lambda y: torch.log(y * 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, check="nonfinite") as p:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
    assert model.fc.weight.isnan().any()
    assert [finding.where for finding in p.findings()] == ["log_1_3"]


def test_a_discarded_value_is_of_severity_info():
    def forward(y: torch.Tensor) -> torch.Tensor:
        number = torch.arange(8.0).unsqueeze(1)
        return y + torch.where(number < 3, number, torch.log(number))

    (finding,) = profiled(Net(forward)).findings()
    assert (finding.severity, finding.where) == ("info", "log_1_5")
    assert "discarded later" in finding.advice


def test_a_value_that_is_only_read_is_not_discarded():
    def forward(y: torch.Tensor) -> torch.Tensor:
        y = torch.log(-y.abs())
        assert y.argmax(1).shape == (8,)
        assert y[:, :0].sum() == 0
        return y

    assert [finding.severity for finding in profiled(Net(forward)).findings()] == ["error"]


def test_a_value_that_becomes_an_integer_is_discarded():
    def forward(y: torch.Tensor) -> torch.Tensor:
        number = torch.arange(8.0)
        large = torch.log(number).to(torch.long).clamp(max=3)
        return y * torch.where(number < 3, number.long(), large).unsqueeze(1)

    assert [finding.severity for finding in profiled(Net(forward)).findings()] == ["info"]


def test_a_discarded_value_may_break_gradients():
    p = profiled(Net(lambda y: torch.where(y > 100, torch.sqrt(y * 0 - 1), y)))
    found = [(finding.severity, finding.kind, finding.where) for finding in p.findings()]
    assert found == [
        ("error", "non-finite gradients", "sqrt_1_5"),
        ("info", "non-finite values", "sqrt_1_5"),
    ]
    assert p.first_nonfinite is not None
    assert p.first_nonfinite.phase == "backward"


@pytest.mark.parametrize("last", ["truediv", "sqrt"])
def test_a_discarded_value_does_not_hide_a_lasting_one(last: str):
    def forward(y: torch.Tensor) -> torch.Tensor:
        number = torch.arange(8.0).unsqueeze(1)
        y = y + torch.where(number < 3, number, torch.log(number))
        return y / 0 if last == "truediv" else torch.sqrt((y * 0).square())

    p = profiled(Net(forward))
    assert p.first_nonfinite is not None
    assert (p.first_nonfinite.label or "").startswith(last)
    assert [(finding.severity, finding.where.partition("_")[0]) for finding in p.findings()] == [
        ("error", last),
        ("info", "log"),
    ]


def test_stop_raises_at_the_place():
    model = Net(lambda y: torch.log(-y.abs()))
    with (
        pytest.raises(tl.NonFiniteError, match=r"made by log.*\n.*called at .*test_checker\.py"),
        tl.profile(model, check="nonfinite", stop=True) as p,
    ):
        model(X)
    assert p.first_nonfinite is not None
    assert p.first_nonfinite.operation == "log"


def test_stop_raises_in_backward_too():
    model = Net(lambda y: torch.sqrt((y * 0).pow(2)))
    with (
        pytest.raises(tl.NonFiniteError, match="backward"),
        tl.profile(model, check="nonfinite", stop=True),
    ):
        model(X).sum().backward()


def test_at_module_level_it_is_the_innermost_module():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(Net(lambda y: torch.log(y * 0 - 1)), nn.ReLU()), nn.ReLU()
    )
    p = profiled(model, level="module")
    assert p.first_nonfinite is not None
    assert (p.first_nonfinite.module, p.first_nonfinite.operation) == ("1.0", "Net")
    assert len(p.findings()) == 1


def test_looking_changes_nothing():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))
    torch.manual_seed(2)
    plain = model(X)
    plain.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(2)
    with tl.profile(model, check="health"):
        logged = model(X)
        logged.sum().backward()
    assert torch.equal(plain, logged)
    after = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(after, gradients, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_ranges_of_every_kind_of_number(dtype: torch.dtype):
    tensor = torch.tensor([1.0, -2.0, INF, math.nan]).to(dtype)
    found = value_range("x", tensor)
    assert (found.low, found.num_nan, found.num_elements) == (-2.0, 1, 4)
    assert found.num_inf == 1
    assert not found.is_finite
    assert found.finite_share == 0.5


def test_ranges_of_tensors_without_numbers():
    assert value_range("x", torch.empty(0, 3)).low is None
    assert value_range("x", torch.full((2,), math.nan)).high is None
    assert str(value_range("x", torch.tensor(2.5))) == "x: scalar float32, from 2.5 to 2.5"


def test_integers_and_booleans_are_nothing_to_look_at():
    checker = HealthChecker("health")
    place = CheckedPlace("forward", 1, 0, "", 1, "add")
    for tensor in (torch.arange(3), torch.tensor([True]), torch.empty(0)):
        checker.on_value(place, tensor, GivenInputs((tensor,), {}))
    assert checker.origins.first_nonfinite is None


def test_the_error_for_a_bad_check_or_threshold_lists_the_names():
    with pytest.raises(ValueError, match=r"'nonfinite'.*'health'"):
        tl.profile(nn.ReLU(), check="nan")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no threshold 'dead_shar'.*Did you mean 'dead_share'"):
        tl.profile(nn.ReLU(), check="health", thresholds={"dead_shar": 0.5})
    with pytest.raises(ValueError, match="'dead_share' must be a number of at least 0, got 'many'"):
        tl.profile(nn.ReLU(), check="health", thresholds={"dead_share": "many"})


# -- steps that are timed: their operations are not seen
# ------------------------------------------------------------------


class Sometimes(nn.Module):
    """Its `inner` makes NaN in some steps, forward or backward."""

    def __init__(self, where: str, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.fc, self.inner, self.out = nn.Linear(4, 4), Inner(where), nn.Linear(4, 1)
        self.steps = steps
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        self.inner.is_bad = self.step in self.steps
        return self.out(self.inner(self.fc(x)))


class Inner(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.is_bad = where, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_bad:
            return x * 2
        return torch.log(x * 0 - 1) if self.where == "forward" else torch.sqrt(x * 0)


def profiled_steps(model: nn.Module, num_steps: int, **options: Any) -> tl.Profile:
    with tl.profile(model, **{"check": "health"} | options) as p:
        for _ in range(num_steps):
            model(X).sum().backward()
    assert not p.problems
    return p


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_nan_of_a_timed_step_is_found_with_its_module(where):
    p = profiled_steps(Sometimes(where, (2,)), 3)
    assert [step.is_light for step in p.steps] == [False, True, False]
    found = p.first_nonfinite
    assert (found.step, found.phase, found.module, found.label) == (2, where, "inner", None)
    assert "with stop=True, those of every step are" in str(found)
    assert [
        finding.module for finding in p.findings() if finding.kind.startswith("non-finite")
    ] == ["inner"]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (2, 3, 4)])
def test_a_nan_in_light_and_logged_steps_is_reported_once_with_its_operation(where, steps):
    p = profiled_steps(Sometimes(where, steps), 4)
    told = [finding for finding in p.findings() if finding.kind.startswith("non-finite")]
    assert [finding.module for finding in told] == ["inner"]
    label = "log" if where == "forward" else "sqrt"
    assert told[0].where.startswith(label)
    assert p.first_nonfinite.label.startswith(label)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_weights_that_an_optimizer_broke_are_no_finding_of_later_steps(step):
    model = Sometimes("forward", (step,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, check="health") as p:
        for _ in range(8):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
    assert [
        (each.module, each.text.partition(":")[0])
        for each in p.findings()
        if each.kind.startswith("non-finite")
    ] == [("inner", f"NaN in the forward pass of step {step}")]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_stop_names_the_operation_in_whatever_step(step):
    with pytest.raises(tl.NonFiniteError, match="made by log"):
        profiled_steps(Sometimes("forward", (step,)), 4, stop=True)


def test_light_steps_do_not_count_in_statistics_of_activations():
    """At module level, which is all that is seen of them, less is known: the softmax here is over
    the first dimension.
    """
    model = nn.Sequential(nn.Linear(4, 64), nn.Softmax(0), nn.Linear(64, 4))
    checker = profiled_steps(model, 5)._checker
    assert {activity.num_steps for _, activity in checker.activities()} == {3}
    assert {len(norms) for norms in checker.gradient_norms.values()} == {3}
