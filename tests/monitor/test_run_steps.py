"""What a step is, whatever the loop looks like: everything that is recorded or logged belongs to
the iteration it is of.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl

EVERY = [1, 2, 3]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def backward(model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    loss: torch.Tensor = model(torch.randn(5, 4)).square().mean()
    loss.backward()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def steps_of(reader: Any, module: str, kind: str, name: str = "") -> list[int]:
    """The steps of a series, of which each has one tensor."""
    series = reader[module].kinds[kind][name]
    assert set(series.num_calls.tolist()) == {1}
    return list(map(int, series.steps))


def check_logged(reader: Any, count: int, *names: str) -> None:
    """Each number was logged in the iteration of that number."""
    for name in names:
        scalars = reader.scalars[name]
        assert scalars.steps.tolist() == scalars.values.tolist() == list(range(count)), name


# -- several optimizers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("rare_first", [False, True])
def test_optimizers_at_different_rates_have_whole_steps(
    every: int, rare_first: bool, tmp_path: Path
) -> None:
    model = network()
    often, rare = sgd(model[0]), sgd(model[2])
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(14):
            backward(model)
            run.log(before=number)
            is_both = number % 2 == 0
            for optimizer in (rare, often) if rare_first else (often, rare):
                if optimizer is often or is_both:
                    optimizer.step()
            run.log(after=number)
    assert run.problems == []
    r = tl.open_run(tmp_path)
    recorded = list(range(0, 14, every))
    assert r.steps == recorded
    for kind in ("inputs", "outputs", "gradients"):
        assert steps_of(r, "0", kind) == recorded
    for kind in ("parameters", "parameter_gradients", "updates"):
        assert steps_of(r, "0", kind, "weight") == recorded
        assert steps_of(r, "2", kind, "weight") == [step for step in recorded if step % 2 == 0]
    check_logged(r, 14, "before", "after")


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("skipped", [None, 4])
def test_optimizers_that_each_have_their_own_forward_pass_share_a_step(
    every: int, skipped: int | None, tmp_path: Path
) -> None:
    model = nn.ModuleDict({"generator": nn.Linear(3, 4), "critic": nn.Linear(4, 1)})
    generator, critic = model["generator"], model["critic"]
    of_generator, of_critic = sgd(generator), sgd(critic)
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(9):
            critic(torch.randn(5, 4)).mean().backward()
            of_critic.step()
            run.log(between=number)
            generator(torch.randn(5, 3)).mean().backward()
            if number != skipped:  # as a GradScaler does now and then
                of_generator.step()
            run.log(after=number)
    assert run.problems == []
    r = tl.open_run(tmp_path)
    recorded = list(range(0, 9, every))
    assert (
        steps_of(r, "critic", "outputs") == steps_of(r, "critic", "updates", "weight") == recorded
    )
    assert steps_of(r, "generator", "updates", "weight") == [
        step for step in recorded if step != skipped
    ]
    check_logged(r, 9, "between")
    if skipped is None:
        # The generator's optimizer is not known yet when the critic's ends the first step.
        assert steps_of(r, "generator", "outputs") == (recorded if every == 1 else recorded[1:])
        check_logged(r, 9, "after")


@pytest.mark.parametrize("every", EVERY)
def test_optimizers_that_step_in_the_backward_pass_end_it_together(
    every: int, tmp_path: Path
) -> None:
    model = network()
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.01)
        parameter.register_post_accumulate_grad_hook(
            lambda _, own=own: (own.step(), own.zero_grad())[1]
        )
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(7):
            model(torch.randn(5, 4)).square().mean().backward()
            run.log(number=number)
    assert run.problems == []
    r = tl.open_run(tmp_path)
    for module in "02":
        assert (
            steps_of(r, module, "gradients")
            == steps_of(r, module, "updates", "weight")
            == list(range(0, 7, every))
        )
    check_logged(r, 7, "number")


class Lookahead(torch.optim.Optimizer):
    """Goes half of the way back every second time."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.count = 0
        self.slow = [parameter.detach().clone() for parameter in self._all()]

    def _all(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.base.param_groups for parameter in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for parameter, slow in zip(self._all(), self.slow, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


@pytest.mark.parametrize("every", EVERY)
def test_a_step_inside_a_step_is_part_of_it(every: int, tmp_path: Path) -> None:
    model = network()
    optimizer = Lookahead(sgd(model))
    changes = []
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(6):
            backward(model)
            before = model[0].weight.detach().clone()
            optimizer.step()
            changes.append((model[0].weight - before).abs().max().item())
            run.log(number=number)
    r = tl.open_run(tmp_path)
    recorded = list(range(0, 6, every))
    assert (
        r.steps
        == steps_of(r, "0", "parameters", "weight")
        == steps_of(r, "0", "updates", "weight")
        == recorded
    )
    updates = r["0"].updates["weight"]
    largest = [max(-low, high) for low, high in zip(updates.low, updates.high, strict=True)]
    assert largest == pytest.approx([changes[step] for step in recorded])
    check_logged(r, 6, "number")


def test_an_optimizer_whose_step_raised_hides_no_other(tmp_path: Path) -> None:
    model = network()
    first, second = sgd(model), sgd(model)

    def fails() -> float:
        raise ValueError("on purpose")

    with tl.monitor(model, tmp_path, graph="modules") as run:
        with pytest.raises(ValueError, match="on purpose"):
            first.step(fails)
        for number in range(3):
            backward(model)
            second.step()
            assert run.current_step == number + 1
    assert steps_of(tl.open_run(tmp_path), "0", "updates", "weight") == [0, 1, 2]


# -- what is logged
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", EVERY)
def test_a_loop_may_log_before_and_after_the_optimizers_step(every: int, tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(10):
            loss = backward(model)
            run.log(before=number)
            optimizer.step()
            run.log(after=number, scaled=loss * 0 + number)  # which computes something
            if number % 4 == 1:
                run.log(rare=number)
    r = tl.open_run(tmp_path)
    check_logged(r, 10, "before", "after", "scaled")
    assert r.scalars["rare"].steps.tolist() == [1, 5, 9]


# -- steps that are told
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", EVERY)
def test_a_loop_may_tell_the_steps_that_its_optimizer_makes(every: int, tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(5):
            backward(model)
            optimizer.step()
            run.log(number=number)
            run.step()
        assert run.current_step == 5
    assert run.problems == []
    r = tl.open_run(tmp_path)
    recorded = list(range(0, 5, every))
    assert steps_of(r, "0", "outputs") == steps_of(r, "0", "updates", "weight") == recorded
    check_logged(r, 5, "number")


def test_steps_that_are_told_too_late_are_a_problem(tmp_path: Path) -> None:
    model = network()
    optimizer = sgd(model)
    with tl.monitor(model, tmp_path, graph="modules") as run:
        backward(model)
        optimizer.step()
        backward(model)
        run.step()
    assert (
        "run.step() was called for the first time after optimizers had ended steps"
        in run.problems[0]
    )


@pytest.mark.parametrize("log", [("parameters",), ("parameters", "updates", "parameter_gradients")])
@pytest.mark.parametrize("every", EVERY)
def test_parameters_are_those_before_the_step_whoever_makes_it(
    every: int, log: Any, tmp_path: Path
) -> None:
    model = network()
    weights = []
    with tl.monitor(model, tmp_path, every=every, log=log, graph="modules") as run:
        for _ in range(5):
            backward(model)
            weights.append(model[0].weight.min().item())
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad)
            run.step()
    r = tl.open_run(tmp_path)
    for kind in log:
        assert steps_of(r, "0", kind, "weight") == list(range(0, 5, every))
    assert r["0"].parameters["weight"].low.tolist() == weights[::every]


# -- a model that changes
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", EVERY)
def test_a_module_that_is_put_into_the_model_is_recorded_from_its_first_step_on(
    every: int, tmp_path: Path
) -> None:
    model = network()
    optimizer = sgd(model)
    criterion = nn.MSELoss()  # none of the model's
    with tl.monitor(model, tmp_path, every=every, graph="modules") as run:
        for number in range(8):
            if number == 2:
                model[2] = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))
                optimizer.add_param_group({"params": model[2].parameters()})
            model.zero_grad()
            criterion(model(torch.randn(5, 4)), torch.zeros(5, 2)).backward()
            optimizer.step()
    assert run.problems == []
    r = tl.open_run(tmp_path)
    later = [step for step in range(0, 8, every) if step >= 2]
    assert steps_of(r, "2.0", "outputs") == steps_of(r, "2.1", "gradients") == later
    assert (
        steps_of(r, "2.0", "parameters", "weight")
        == steps_of(r, "2.1", "updates", "weight")
        == later
    )
    assert set(r.modules) == {"", "0", "1", "2", "2.0", "2.1"}


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_a_compiled_copy_of_one_of_torchs_own_modules_is_recorded_at_its_boundary(
    every: int, tmp_path: Path
) -> None:
    """torch compiles what is around the call of a Sequential, so that the Sequential itself is
    never called.
    """
    torch._dynamo.reset()
    model = network()
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    with tl.monitor(model, tmp_path, every=every) as run:
        for _ in range(4):
            backward(compiled)
            optimizer.step()
    assert run.problems == []
    r = tl.open_run(tmp_path)
    for kind in ("inputs", "outputs", "gradients"):
        assert steps_of(r, "", kind) == list(range(0, 4, every))
    assert r.graph["log"]
