"""NaN and Inf that were planted: the history, the profile at both levels and `stop=True` blame the
place where they are.
"""

import contextlib
import copy
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.health.planted import PLANTED, Planted, batch
from torchlens._health import tensor_statistics
from torchlens._health.nonfinite import NonFinite

INF, NAN = math.inf, math.nan
LEVELS: tuple[Any, ...] = ("operation", "module")
BY_LEVEL = [
    (name, level) for name, case in PLANTED.items() for level in LEVELS if level in case.only
]


def run(model: nn.Module, case: Planted) -> None:
    with (
        contextlib.nullcontext()
        if case.autocast is None
        else torch.autocast("cpu", dtype=case.autocast)
    ):
        loss = case.loss(model(*case.inputs()))
    if case.has_backward:
        loss.backward()


def profiled(case: Planted, level: Any, num_steps: int = 1, stop: bool = False) -> tl.Profile:
    torch.manual_seed(0)
    model = case.model()
    with tl.profile(model, level=level, check="nonfinite", stop=stop) as p:
        for _ in range(num_steps):
            run(model, case)
            model.zero_grad()
    assert not p.problems
    return p


def blamed(found: NonFinite | None, case: Planted) -> tuple[str, ...] | None:
    """The place that was found, as far as the case tells it."""
    if found is None:
        return None
    if case.is_from_outside:
        return found.phase, "", ""
    if found.operation in ("input", "buffer"):
        return found.phase, found.operation, ""
    layer_type = (
        ""
        if found.label is None or not (case.blamed and case.blamed[1])
        else found.label.partition("_")[0]
    )
    return found.phase, layer_type, found.module


def expected(case: Planted, level: str) -> tuple[str, ...] | None:
    if case.blamed is None or case.is_from_outside:
        return None if case.blamed is None else ("backward", "", "")
    phase, layer_type, module = case.blamed
    if level == "module" and layer_type != "input":
        phase, module = case.by_module or (phase, module)
        return phase, "", module
    return phase, layer_type, module


@pytest.mark.filterwarnings("ignore:(var|std)|.*vmap")
@pytest.mark.parametrize("name", [name for name, case in PLANTED.items() if "history" in case.only])
def test_the_history_blames_the_place(name: str):
    case = PLANTED[name]
    torch.manual_seed(0)
    with (
        contextlib.nullcontext()
        if case.autocast is None
        else torch.autocast("cpu", dtype=case.autocast)
    ):
        history = tl.log_forward_pass(case.model(), list(case.inputs()))
    loss = case.loss(history["output_1"].tensor_contents)
    if case.has_backward:
        history.log_backward(loss)
    found = history.first_nonfinite()
    assert blamed(found, case) == expected(case, "operation")
    assert found is None or found.is_from_outside == case.is_from_outside


@pytest.mark.filterwarnings("ignore:(var|std)|.*vmap")
@pytest.mark.parametrize(("name", "level"), BY_LEVEL)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_profile_blames_the_place_alone(name: str, level: str, num_steps: int):
    case = PLANTED[name]
    p = profiled(case, level, num_steps)
    found = p.first_nonfinite
    assert blamed(found, case) == expected(case, level)
    assert found is None or (found.is_from_outside, found.step) == (case.is_from_outside, 1)
    told = [finding.severity for finding in p.findings() if finding.kind.startswith("non-finite")]
    number = case.num_findings if level == "operation" else 1
    assert told == ([] if case.blamed is None else [case.severity] * number)


@pytest.mark.filterwarnings("ignore:(var|std)|.*vmap")
@pytest.mark.parametrize(("name", "level"), BY_LEVEL)
def test_training_stops_at_the_place(name: str, level: str):
    case = PLANTED[name]
    if case.blamed is None:
        profiled(case, level, stop=True)
        return
    arrived = "it arrived at" if case.is_from_outside else ""
    with pytest.raises(
        tl.NonFiniteError, match=f"in the {expected(case, level)[0]} pass of step 1: {arrived}"
    ):
        profiled(case, level, stop=True)


# -- weights that something between two steps broke
# -----------------------------------------------------------------------


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad_step", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["learning rate", "gradient"])
def test_weights_that_an_optimizer_broke_are_blamed_once_with_the_step(
    level: Any, bad_step: int, how: str
):
    model = three_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, level=level, check="nonfinite") as p:
        for step in range(1, 8):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            if step == bad_step and how == "gradient":
                model[2].weight.grad[0, 0] = NAN
            elif step == bad_step:
                optimizer.param_groups[0]["lr"] = INF
            optimizer.step()
    (finding,) = p.findings()
    module = "2" if how == "gradient" else "0"
    assert (finding.severity, finding.kind, finding.module) == (
        "error",
        "non-finite values",
        module,
    )
    assert p.first_nonfinite is not None
    assert p.first_nonfinite.step == bad_step + 1
    text = " ".join(finding.text.split())
    assert f"Not finite before: parameter {module}.weight" in text
    assert f"All values of step {bad_step} were finite. An optimizer step followed" in text


@pytest.mark.parametrize("level", LEVELS)
def test_a_running_mean_that_becomes_nan_with_the_result_is_a_consequence(level: Any, monkeypatch):
    monkeypatch.setattr(
        tensor_statistics, "_MOST_ANSWERS", 0
    )  # no answer is remembered: which are is chance
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, level=level, check="nonfinite") as p:
        for step in range(4):
            model.train(step != 2)
            if step == 2:
                model[1].running_var[0] = NAN
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
    assert [finding.severity for finding in p.findings()].count("error") == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", ["buffer", "frozen weight"])
def test_a_buffer_is_not_blamed_on_an_optimizer(what: str, level: Any):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with tl.profile(model, level=level, check="nonfinite") as p:
        for step in range(4):
            if step == 3 and what == "buffer":
                model.eval()
                model[1].running_var[0] = NAN
            elif step == 3:
                model[2].weight[0, 0] = NAN
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
    assert p.first_nonfinite is not None
    assert "An optimizer's step" not in str(p.first_nonfinite)
    if p.first_nonfinite.operation != "buffer":  # which names it itself
        assert p.first_nonfinite.module == ("1" if what == "buffer" else "2")


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_no_optimizer_broke_are_not_blamed_on_one(level: Any):
    model = three_layers()
    with tl.profile(model, level=level, check="nonfinite") as p:
        model(batch())
        with torch.no_grad():
            model[2].bias[0] = NAN
        model(batch())
    (finding,) = p.findings()
    assert (finding.module, "Something other than an optimizer has changed it" in finding.text) == (
        "2",
        True,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_broken_weights_stop_the_training_where_they_are_first_read(level: Any):
    model = three_layers()
    with tl.profile(model, level=level, check="nonfinite", stop=True):
        model(batch())
        with torch.no_grad():
            model[2].weight[0, 0] = NAN
        with pytest.raises(tl.NonFiniteError, match=r"in module '2'\n(?s:.)*parameter 2\.weight"):
            model(batch())


@pytest.mark.parametrize("level", LEVELS)
def test_running_means_that_a_bad_batch_broke_are_no_finding_of_their_own(level: Any):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with tl.profile(model, level=level, check="nonfinite") as p:
        model(batch(NAN)).sum().backward()
        model.eval()
        for _ in range(3):
            model(batch())
    assert model[1].running_mean.isnan().any()
    assert [finding.where.partition("_")[0] for finding in p.findings()] == ["input"]


class Doubling(nn.Module):
    """Computes something between two modules, as nearly every model does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(2 * self.body(x))


def trained_with_a_nan(level: Any) -> tl.Profile:
    """All weights are NaN after the first of some steps."""
    model = Doubling()
    with torch.no_grad():
        model.body.weight[0, 0] = NAN
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.profile(model, level=level, check="nonfinite") as p:
        for _ in range(4):
            optimizer.zero_grad()
            model(batch()).sum().backward()
            optimizer.step()
    return p


@pytest.mark.parametrize("level", LEVELS)
def test_values_computed_from_broken_weights_between_modules_are_consequences(level: Any):
    assert [finding.module for finding in trained_with_a_nan(level).findings()] == ["body"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_profile_of_modules_that_returned_nan_can_be_pickled_and_copied(level: Any):
    p = trained_with_a_nan(level)
    for again in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert str(again.findings()) == str(p.findings())
        assert str(again.first_nonfinite) == str(p.first_nonfinite)


# -- several steps, one loss
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_of_two_steps_is_no_finding_of_its_own(level: Any, bad: int):
    model = three_layers()
    inputs = [batch(), batch()]
    inputs[bad] = batch(NAN)
    with tl.profile(model, level=level, check="nonfinite") as p:
        (model(inputs[0]) * model(inputs[1])).sum().backward()
    found = p.first_nonfinite
    assert found is not None
    assert (len(p.findings()), found.operation, found.step) == (1, "input", bad + 1)


@pytest.mark.parametrize("level", LEVELS)
def test_an_evaluation_that_is_broken_does_not_hide_a_loss_that_is(level: Any):
    model = three_layers()
    with tl.profile(model, level=level, check="nonfinite") as p:
        with torch.no_grad():
            model(batch(NAN))
        (model(batch()).sum() / 0).backward()
    assert sorted(finding.kind for finding in p.findings()) == [
        "non-finite gradients",
        "non-finite values",
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("finds", [True, False])
def test_a_scaler_that_searches_for_its_scale_is_no_error(level: Any, finds: bool):
    model = three_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with tl.profile(model, level=level, check="nonfinite") as p:
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(batch()).mean() * (8.0 if finds else INF)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert any(step.optimizer_seconds is not None for step in p.steps) == finds
    (finding,) = p.findings()
    assert (finding.severity, finding.kind) == (
        "info" if finds else "error",
        "non-finite gradients",
    )
    assert ("GradScaler" in finding.advice) == finds


# -- minus infinity that a module returns
# ----------------------------------------------------------------------------------


class MaskedLogits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.eye(8, 4).bool(), -INF)


def test_a_mask_that_a_module_returns_is_no_finding():
    model = nn.Sequential(nn.Linear(4, 4), MaskedLogits(), nn.Softmax(-1))
    for level in LEVELS:
        with tl.profile(model, level=level, check="nonfinite", stop=True) as p:
            model(batch()).sum().backward()
        assert not p.findings()


def test_minus_infinity_in_an_output_of_the_model_is_of_severity_info():
    model = nn.Sequential(nn.Linear(4, 4), MaskedLogits())
    with tl.profile(model, level="operation", check="nonfinite", stop=True) as p:
        model(batch())
    assert not p.findings()
    with tl.profile(model, level="module", check="nonfinite", stop=True) as p:
        model(batch())
    assert p.first_nonfinite is None
    (finding,) = p.findings()
    assert (finding.severity, finding.where) == ("info", "1")
    assert re.search(r"mask.*the logarithm of 0", finding.text)
    assert not finding.advice


def test_a_row_that_is_masked_altogether_is_found_by_modules():
    class Mask(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.arange(8).unsqueeze(1) == 3, -INF)

    model = nn.Sequential(nn.Linear(4, 4), Mask(), nn.Softmax(-1))
    with tl.profile(model, level="module", check="nonfinite") as p:
        model(batch()).sum().backward()
    (finding,) = p.findings()
    assert (finding.severity, finding.where) == ("error", "1")


# -- a backward pass, or the end of a step, that comes when the next step has begun
# -----------------------------


class RootAtFirst(nn.Module):
    """A root whose derivative at 0 is infinite, in the first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        is_first, self.is_first = self.is_first, False
        return (y * 0).square().sqrt() if is_first else y


def test_a_step_that_was_logged_is_not_said_to_be_timed_because_the_next_one_is():
    model = RootAtFirst()
    with tl.profile(model, check="nonfinite") as p:
        first, second = model(batch()), model(batch())
        (first.sum() + second.sum()).backward()
    assert [step.is_light for step in p.steps] == [False, True]
    found = p.first_nonfinite
    assert found is not None
    assert (found.step, found.label, found.note) == (1, "sqrt_1_4", "")
