"""Light runs: the values of a few calls, the same as those of the log, at almost no cost."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._capture.light_run import Deviation, LightRun, Program, find_rows, learn
from torchlens._recording.recording import Recording


def recording_of(model: nn.Module, *args: Any) -> Recording:
    return tl.log_forward_pass(model, list(args))._log.recording


def light_values(model: nn.Module, *args: Any) -> tuple[Recording, dict[int, torch.Tensor]]:
    """The log of a model, and the value of each of its rows by a light run."""
    recording = recording_of(model, *args)
    steps = learn(model, args, {})
    rows = find_rows(recording, steps)
    assert rows is not None
    light = LightRun(Program(model, steps, {str(number): place for number, place in rows.items()}))
    light.run(model, args, {})
    return recording, {int(name): value for name, value in light.values.items()}


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x.mul(2).relu_().add_(1),  # each overwrites the one before
        lambda self, x: F.relu(x * 2, inplace=True) + 1,
        lambda self, x: torch.cat(x.split(1)).T.norm(),  # several results, a property, inlined
        lambda self, x: sum(part.sin() for part in x.unbind(1)),
        lambda self, x: torch.add(x, 1, out=torch.zeros(2, 4)).exp(),
    ],
)
def test_every_value_is_that_of_the_log_however_it_is_overwritten_later(function: Any) -> None:
    recording, values = light_values(Model(function), torch.randn(2, 4))
    made = [n for n, row in enumerate(recording.rows) if row.operation.name != "input"]
    assert sorted(values) == made
    for number in made:
        assert torch.equal(values[number], recording.values[number]), number


def test_a_write_to_a_part_of_a_kept_tensor_leaves_the_kept_value_as_it_was() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0] = 5
        y.view(-1)[1:].mul_(3)
        y += 1
        return y

    recording, values = light_values(Model(function), torch.randn(2, 4))
    for number in values:
        assert torch.equal(values[number], recording.values[number]), recording.rows[number]


def test_the_model_ends_after_the_last_chosen_value() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        self.reached.append("the second half")
        return y.cos()

    model, x = Model(function, reached=[]), torch.randn(3)
    steps = learn(model, [x], {})
    model.reached.clear()
    light = LightRun(Program(model, steps, {"sin": (1, 0)}))
    light.run(model, [x], {})
    assert torch.equal(light.values["sin"], x.sin())
    assert model.reached == []


def test_another_operation_or_module_is_a_deviation_that_says_where() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[int(x[0, 0] > 0)](x)

    model, x = Routed(), torch.ones(1, 4)
    steps = learn(model, [x], {})
    program = Program(model, steps, {"linear": (len(steps) - 1, 0)})
    LightRun(program).run(model, [x], {})
    with pytest.raises(Deviation) as caught:
        LightRun(program).run(model, [-x], {})
    assert caught.value.call is model.experts[0]


def test_a_model_that_catches_every_exception_cannot_hide_a_deviation() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return x.sin() if x.sum() > 0 else x.cos()
        except Exception:
            return x.tan()

    model, x = Model(function), torch.ones(3)
    program = Program(model, steps := learn(model, [x], {}), {"sin": (len(steps) - 1, 0)})
    with pytest.raises(Deviation):
        LightRun(program).run(model, [-x], {})


def test_torch_and_the_model_are_as_before_even_if_the_model_raises() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    before = nn.Module._call_impl.__code__, torch.Tensor.__iadd__
    with pytest.raises(ZeroDivisionError):
        learn(Model(function), [torch.ones(1)], {})
    assert (nn.Module._call_impl.__code__, torch.Tensor.__iadd__) == before
    assert torch._C._len_torch_function_stack() == 0
    assert len(tl.log_forward_pass(MLP(), torch.ones(1, 4))) > 3


@pytest.mark.filterwarnings("ignore:torchlens. what runs inside torch.func.vmap:UserWarning")
def test_what_a_program_cannot_describe_is_not_aligned_with_the_log() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sin() * 2)(x).cos()

    model, x = Model(function), torch.randn(2, 3)
    assert find_rows(recording_of(model, x), learn(model, [x], {})) is None


def test_a_write_that_the_first_run_did_not_show_is_a_deviation_and_never_a_wrong_value() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = x * 2, x * 3
        (a, b)[int(x[0] > 0)].add_(1)
        return a.sin() + b

    model, x = Model(function), torch.full((2,), -1.0)
    steps = learn(model, [x], {})
    muls = [at for at, step in enumerate(steps) if step.name == "mul"]
    program = Program(model, steps, {"b": (muls[1], 0), "sum": (len(steps) - 1, 0)})
    first = LightRun(program)
    first.run(model, [x], {})
    program.pass_on(first.copied)
    again = LightRun(program)
    again.run(model, [x], {})
    assert torch.equal(again.values["b"], x * 3)
    with pytest.raises(Deviation):
        LightRun(program).run(model, [-x], {})
