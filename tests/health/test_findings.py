"""Findings on models that are ill in known ways, and none on models that are well."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.networks import TinyGPT
from tests.profile.profile_records import made_up, parameter
from torchlens._health.finding import Finding, Findings
from torchlens._health.thresholds import THRESHOLDS
from torchlens._profile.findings import find


def trained(
    model: nn.Module,
    x: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    steps: int = 2,
    **options: Any,
) -> tl.Profile:
    """A few steps under the profile."""
    learnable = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.SGD(learnable, lr=1e-3)
    with tl.profile(model, **{"check": "health"} | options) as p:
        for _ in range(steps):
            output = model(x)
            optimizer.zero_grad()
            (
                loss(output)
                if loss
                else F.cross_entropy(output, torch.arange(len(output)) % output.shape[1])
            ).backward()
            optimizer.step()
    assert not p.problems
    return p


def kinds(p: tl.Profile) -> list[str]:
    return [finding.kind for finding in p.findings()]


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 16, batch_first=True, **options)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)
        self.aux = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


# -- dead units
# --------------------------------------------------------------------------------------------------


def test_units_that_are_always_zero():
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))
    with torch.no_grad():
        model[0].bias[:12] = -100.0
    (finding,) = trained(model, torch.randn(64, 8)).findings()
    assert (finding.kind, finding.where, finding.module, finding.severity) == (
        "dead units",
        "relu_1_2",
        "1",
        "warning",
    )
    assert finding.number == 12 / 20
    assert finding.threshold == THRESHOLDS["dead_share"]
    assert "12 of 20 units (60%)" in finding.text


@pytest.mark.parametrize("level", ["module", "operation"])
def test_channels_of_images_are_units(level: str):
    model = nn.Sequential(
        nn.Conv2d(3, 10, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(360, 4)
    )
    with torch.no_grad():
        model[0].bias[3:] = -100.0
    (finding,) = trained(model, torch.randn(4, 3, 8, 8), level=level).findings()
    assert finding.where == {"module": "1", "operation": "relu_1_2"}[level]
    assert finding.number == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(6, 10, 3), (8, 6, 20)),
        (nn.Linear(6, 10), (8, 20, 6)),
        (nn.Linear(6, 10), (8, 4, 5, 6)),
        (nn.Conv3d(6, 10, 1), (2, 6, 4, 4, 4)),
    ],
    ids=[
        "channels before length",
        "features after length",
        "features after an image",
        "channels of a volume",
    ],
)
def test_the_dimension_of_the_units_is_known(layer: Any, shape: tuple[int, ...]):
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    with torch.no_grad():
        layer.bias[:5] = -100.0
        model(torch.randn(shape))
    (finding,) = trained(model, torch.randn(shape)).findings()
    assert "5 of 10 units" in finding.text


def test_a_unit_that_lives_in_one_step_is_not_dead():
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))
    with torch.no_grad():
        model[0].bias[:] = -100.0
    with tl.profile(model, check="health") as p:
        for scale in (1.0, 1.0, 1e4):  # every other step is checked
            model(torch.randn(64, 8) * scale)
    assert "dead units" not in kinds(p)


def test_too_few_values_tell_nothing():
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))
    with torch.no_grad():
        model[0].bias[:12] = -100.0
    found = trained(model, torch.randn(4, 8)).findings()
    assert list(found) == []
    assert "Dead units are reported from 64 values of each unit on" in str(found)


def test_thresholds_may_be_the_callers_own():
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))
    with torch.no_grad():
        model[0].bias[:2] = -100.0
    p = trained(model, torch.randn(64, 8), thresholds={"dead_share": 0.1})
    assert [(finding.number, finding.threshold) for finding in p.findings()] == [(0.1, 0.1)]
    assert kinds(trained(model, torch.randn(64, 8))) == []


# -- saturation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "level"),
    [
        (nn.Tanh(), "module"),
        (nn.Tanh(), "operation"),
        (nn.Sigmoid(), "module"),
        (nn.Sigmoid(), "operation"),
        (nn.Hardtanh(-2, 2), "operation"),
        (nn.Hardsigmoid(), "operation"),
    ],
)
def test_activations_at_their_limits(activation: nn.Module, level: str):
    model = nn.Sequential(nn.Linear(8, 20), activation, nn.Linear(20, 4))
    assert kinds(trained(model, torch.randn(64, 8), level=level)) == []
    with torch.no_grad():
        model[0].weight.mul_(100)
    (finding,) = trained(model, torch.randn(64, 8), level=level).findings()
    assert (finding.kind, finding.module) == ("saturated activation", "1")
    assert finding.number > 0.8


def test_a_few_saturated_values_tell_nothing():
    model = nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 4))
    with torch.no_grad():
        model[0].weight.mul_(100)
    assert "saturated activation" not in kinds(trained(model, torch.randn(8, 8)))


def test_a_module_with_limits_of_its_own_is_not_held_against_others():
    model = nn.Sequential(nn.Linear(8, 20), nn.Hardtanh(-20, 20), nn.Linear(20, 4))
    with torch.no_grad():
        model[0].weight.mul_(10)
    assert kinds(trained(model, torch.randn(64, 8), level="module")) == []


def test_a_softmax_in_which_one_takes_all_is_an_information():
    model = nn.Sequential(nn.Linear(8, 4), nn.Softmax(dim=1), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.mul_(100)
    (finding,) = trained(model, torch.randn(64, 8)).findings()
    assert (finding.kind, finding.severity) == ("saturated activation", "info")


# -- gradients
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["module", "operation"])
def test_gradients_that_vanish_on_their_way_to_the_first_layers(level: str):
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    p = trained(nn.Sequential(*layers, nn.Linear(16, 4)), torch.randn(16, 16), level=level)
    (finding,) = p.findings()
    assert (finding.kind, finding.where, finding.module) == ("vanishing gradient", "0.weight", "0")
    assert finding.number < 1e-5
    assert "of 9 weights vanish" in finding.text


def test_gradients_that_explode_over_the_steps_of_a_recurrent_layer():
    model = Recurrent(nonlinearity="relu")
    with torch.no_grad():
        model.rnn.weight_hh_l0.copy_(1.5 * torch.eye(16))
    (finding,) = trained(model, torch.randn(8, 60, 8), steps=1).findings()
    assert finding.kind == "exploding gradient"
    assert finding.number > 1e5


def test_a_layer_that_starts_at_zero_is_no_vanishing_gradient():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    nn.init.zeros_(model[2].get_parameter("weight"))
    (finding,) = trained(model, torch.randn(8, 8), steps=1).findings()
    assert (finding.kind, finding.severity) == ("zero gradients", "info")
    nn.init.zeros_(model[2].get_parameter("weight"))
    assert kinds(trained(model, torch.randn(8, 8), steps=4)) == []


def test_learned_tokens_are_no_layer_that_others_wait_for():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Parameter(torch.randn(3, 8))
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x + 1e-9 * self.tokens.sum())

    assert kinds(trained(Tokens(), torch.randn(8, 8))) == []


def test_blocks_that_start_at_nearly_nothing_make_no_gradient_explode():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 4)
            self.last = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.full((4, 1), 1e-7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x + self.last(x) * self.scale.mT

    assert kinds(trained(Scaled(), torch.randn(8, 8))) == []


@pytest.mark.parametrize("last", [nn.Identity(), nn.LayerNorm(16), nn.Softmax(-1)])
def test_without_a_loss_the_gradients_are_no_worse(last: nn.Module):
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), last
    )
    assert (
        list(tl.profile(model, torch.randn(64, 8), check="health", warmup=0, repeats=1).findings())
        == []
    )


# -- parameters
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [None, "health"])
def test_parameters_that_are_unused_and_frozen(check: str | None):
    model = TwoHeads()
    model.backbone.requires_grad_(False)
    found = trained(model, torch.randn(64, 8), check=check).findings()
    assert [(finding.kind, finding.where, finding.severity) for finding in found] == [
        ("unused parameters", "aux", "warning"),
        ("frozen parameters", "backbone", "info"),
    ]
    assert found[0].number == 8 * 2 + 2
    assert found[1].number == 2 * (8 * 8 + 8)


def test_a_single_parameter_is_reported_by_its_own_name():
    parameters = [parameter("fc.weight", (2, 2)), parameter("fc.bias", (2,), num_gradients=0)]
    (finding,) = find(made_up(parameters=parameters), None)
    assert (finding.where, finding.module) == ("fc.bias", "fc")


def test_gradients_that_autograd_returns_do_not_make_parameters_unused():
    model = TwoHeads()
    with tl.profile(model) as p:
        torch.autograd.grad(
            model(torch.rand(4, 8)).sum(), [*model.backbone.parameters(), *model.head.parameters()]
        )
    assert kinds(p) == []
    assert "torch.autograd.grad returns them instead" in str(p.findings())


def test_without_a_backward_pass_nothing_is_called_unused():
    model = TwoHeads()
    with tl.profile(model) as p:
        model(torch.randn(4, 8))
    found = p.findings()
    assert list(found) == []
    assert "No backward pass ran" in str(found)


# -- models that are well
# ------------------------------------------------------------------------------------------------


def residual_block(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
    )


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = residual_block(3)
        self.up = nn.Conv2d(3, 16, 1)
        self.blocks = nn.ModuleList(residual_block(16) for _ in range(6))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.stem(x))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


WELL: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),
        torch.randn(64, 8),
        None,
    ),
    "residual": lambda: (SmallResNet(), torch.randn(8, 3, 16, 16), None),
    "lstm": lambda: (
        nn.LSTM(8, 16, 2),
        torch.randn(10, 8, 8),
        lambda output: output[0].square().mean(),
    ),
    "rnn": lambda: (Recurrent(), torch.randn(8, 20, 8), None),
    "transformer": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 4, enable_nested_tensor=False
        ),
        torch.randn(4, 10, 16),
        lambda output: output.square().mean(),
    ),
    "language model": lambda: (
        TinyGPT(),
        torch.randint(10, (4, 6)),
        lambda output: F.cross_entropy(output.flatten(0, -2), torch.zeros(24, dtype=torch.long)),
    ),
}


@pytest.mark.parametrize("name", WELL)
@pytest.mark.parametrize("level", ["module", "operation"])
def test_a_model_that_is_well_has_no_findings(name: str, level: str):
    model, x, loss = WELL[name]()
    found = trained(model, x, loss, level=level).findings()
    assert list(found) == [], str(found)


# -- printing
# --------------------------------------------------------------------------------------------------


def test_findings_print_the_worst_first_and_fit_the_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "70")
    common: dict[str, Any] = {
        "module": "m",
        "number": 1.0,
        "threshold": None,
        "text": "word " * 30,
        "advice": "Do this.",
    }
    found = Findings(
        [
            Finding(kind="b", severity="info", where="layer_b", **common),
            Finding(kind="a", severity="error", where="layer_a", **common),
        ],
        ["Something was not looked at."],
    )
    text = str(found)
    assert text.startswith("2 findings:\nerror: a at layer_a in module 'm'\n    word word")
    assert text.endswith("    Do this.\n- Something was not looked at.")
    assert max(map(len, text.splitlines())) <= 70
    assert str(Findings([])) == "0 findings."
