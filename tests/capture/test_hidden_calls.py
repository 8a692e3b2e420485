"""Calls that torch does not report one by one: scripted functions, transforms, switched off modes."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import torchlens as tl
from tests.networks import Model

X = torch.tensor([1.0, 2.0, 3.0])


def scripted(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in newer releases of torch
        return torch.jit.script(function)


def add_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1.0)
    return x * y


def only_add_one(x: torch.Tensor) -> None:
    x[0].add_(1.0)


def traced_writer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in newer releases of torch
        return torch.jit.trace(lambda x: x.mul_(3.0) + 1.0, X.clone(), check_trace=False)


# -- parts that write to their input


def test_a_scripted_function_that_writes_to_its_input_keeps_the_value_before() -> None:
    part = scripted(add_one)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return doubled + part(doubled, x)

    history = tl.log_forward_pass(Model(forward), X)
    assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
    assert history["add_1"].parent_layers == ["scriptfunction_1_2"]
    assert tl.validate_forward_pass(Model(forward), X).passed


def test_a_scripted_function_that_returns_nothing_has_an_entry_for_what_it_wrote() -> None:
    part = scripted(only_add_one)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        part(doubled)
        return doubled + 1

    history = tl.log_forward_pass(Model(forward), X)
    assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
    assert history["scriptfunction"].tensor_contents.tolist() == [3.0, 4.0, 6.0]
    assert history["add_1"].parent_layers == ["scriptfunction_1_2"]
    assert tl.validate_forward_pass(Model(forward), X).passed


def test_a_traced_function_that_writes_to_its_input_keeps_the_value_before() -> None:
    part = traced_writer()  # compiled at its first call, which is in the log

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return part(doubled) + doubled

    history = tl.log_forward_pass(Model(forward), X)
    assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
    assert history["add_1"].parent_layers == ["scriptfunction_1_2"]
    assert tl.validate_forward_pass(Model(forward), X).passed


@pytest.mark.parametrize("training", [True, False])
def test_a_scripted_module_reads_and_writes_its_buffers(training: bool) -> None:
    part = scripted(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True)))
    model = nn.Sequential(nn.Linear(3, 3), part, nn.Linear(3, 2)).train(training)
    x = torch.rand(4, 3)
    mean = part[0].running_mean.clone()
    history = tl.log_forward_pass(model, x)
    found = {entry.buffer_address: entry for entry in history if entry.is_buffer_layer}
    assert torch.equal(found["1.0.running_mean"].tensor_contents, mean)
    assert "1.0.running_var" in found
    assert tl.validate_forward_pass(model, x).passed


def test_gradients_around_a_scripted_write_are_those_of_each_value() -> None:
    part = scripted(add_one)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return (doubled + part(doubled, x)).sin()

    x = X.clone().requires_grad_()
    history = tl.log_forward_pass(Model(forward), x, save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    doubled = (X * 2).requires_grad_()
    (doubled + 1 + (doubled + 1) * X).sin().sum().backward()
    assert doubled.grad is not None
    torch.testing.assert_close(history["mul_1"].grad_contents, doubled.grad)


def test_a_transformed_function_that_writes_to_its_input_keeps_the_value_before() -> None:
    def writes(row: torch.Tensor) -> torch.Tensor:
        row.add_(1)
        return row * 2

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        return torch.func.vmap(writes)(doubled).sum() + doubled.sum()

    with pytest.warns(UserWarning, match=r"torch\.func\.vmap"):
        history = tl.log_forward_pass(Model(forward), torch.ones(2, 3))
    assert torch.equal(history["mul_1"].tensor_contents, torch.full((2, 3), 2.0))
    assert history["sum_2"].parent_layers == ["vmap_1_2"]


# -- what a transform reads


@pytest.mark.parametrize("function", [torch.sin, lambda x: x.exp().exp()])
def test_a_jacobian_reads_the_input_of_the_function(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacrev(function)(x * 2).sum()

    with pytest.warns(UserWarning, match=r"torch\.func"):
        history = tl.log_forward_pass(Model(forward), X)
    assert "mul_1_1" in history["vmap"].parent_layers


# -- operations that torch does not report


def test_operations_without_torch_function_are_named_in_a_warning() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        with torch._C.DisableTorchFunction():
            hidden = doubled.sin()
            doubled.add_(1)
        return hidden + doubled

    with pytest.warns(UserWarning, match=r"ran sin, add_ under torch\._C\.DisableTorchFunction"):
        history = tl.log_forward_pass(Model(forward), X)
    assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
    assert torch._C.DisableTorchFunction.__module__ == "torch._C"
    assert not tl.validate_forward_pass(Model(forward), X).passed


@pytest.mark.parametrize(
    "options", [{}, {"layers_to_save": "none"}, {"save_function_args": True}], ids=str
)
def test_swapped_tensors_swap_their_entries(options: dict[str, Any]) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        a, b = x * 2, x + 3
        torch.utils.swap_tensors(a, b)
        a.add_(1)
        return a.sin() + b.cos()

    history = tl.log_forward_pass(Model(forward), X, **options)
    assert history["swaptensors_1"].parent_layers == ["add_1_2"]
    assert history["swaptensors_2"].parent_layers == ["mul_1_1"]
    assert history["sin_1"].parent_layers == ["add_2_5"]
    assert history["cos_1"].parent_layers == ["swaptensors_2_4"]
    if options != {"layers_to_save": "none"}:
        assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
        assert history["add_1"].tensor_contents.tolist() == [4.0, 5.0, 6.0]
    assert tl.validate_forward_pass(Model(forward), X).passed


# -- modes of the user


class Replacing(TorchFunctionMode):
    """Replaces one Python function, and adds an operation to another."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.relu:
            return torch.tanh(args[0])
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "") == "sin" else result


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Any] = Counter()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def activations(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).sin() + x


def activations_inside(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with Replacing():
        return F.relu(x).sin() + x


def test_a_mode_that_the_user_entered_acts_before_the_log() -> None:
    with Replacing():
        history = tl.log_forward_pass(Model(activations), X)
        assert tl.validate_forward_pass(Model(activations), X).passed
    assert [entry.layer_type for entry in history] == [
        *("input", "tanh", "sin", "mul", "add", "output")
    ]
    assert torch.equal(history["sin_1"].tensor_contents, X.tanh().sin())
    assert torch._C._len_torch_function_stack() == 0


def test_a_mode_that_the_model_enters_acts_before_the_log() -> None:
    history = tl.log_forward_pass(Model(activations_inside), X)
    assert torch.equal(history["output_1"].tensor_contents, X.tanh().sin() * 2 + X)
    assert tl.validate_forward_pass(Model(activations_inside), X).passed


@pytest.mark.parametrize("layers_to_save", ["all", "none", "relu"])
def test_a_mode_that_the_user_entered_sees_the_calls_of_a_plain_pass(layers_to_save: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    with Counting() as plain:
        model(X)
    with Counting() as logged:
        tl.log_forward_pass(model, X, layers_to_save=layers_to_save)
    logged.seen.pop(torch.device, None)
    assert logged.seen == plain.seen


# -- values that change or leave unseen


def test_a_later_write_to_a_tensor_of_inference_mode_does_not_change_its_saved_value() -> None:
    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            self.row = doubled[:1]
            self.whole = x + 1
            return doubled.sum() + self.whole.sum()

    model = Keeps()
    with torch.inference_mode():
        history = tl.log_forward_pass(model, X)
        model.row.add_(1)
        model.whole.add_(1)
    assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
    assert history["getitem"].tensor_contents.tolist() == [2.0]
    assert history["add_1"].tensor_contents.tolist() == [2.0, 3.0, 4.0]


def test_a_write_to_a_saved_tensor_of_inference_mode_is_noticed() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        doubled = (x * 2).to(torch.complex64)
        return torch.view_as_real(doubled)[..., 0].exp().sum()

    with torch.inference_mode():
        history = tl.log_forward_pass(Model(forward), X)
        history["exp"].tensor_contents.add_(1)
        history["to"].tensor_contents.mul_(2)
    assert history["mul_1"].tensor_contents.tolist() == [2.0, 4.0, 6.0]
    for written in ("exp", "to", "viewasreal", "getitem"):  # the last three share memory
        with pytest.raises(tl.ValueChangedError):
            _ = history[written].tensor_contents


def through_numpy(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    once = torch.from_numpy(np.tanh((x * 2).numpy()))
    again = torch.as_tensor(np.sqrt(once.numpy()))
    return again + x


def test_values_that_leave_through_numpy_and_come_back_are_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"came back \(from_numpy, as_tensor\)") as caught:
        history = tl.log_forward_pass(Model(through_numpy), X)
    assert len(caught) == 1
    assert str(history).count("came back") == 1


class NumpyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.tanh(x.numpy()))


def test_numpy_in_a_custom_function_or_before_it_leaves_torch_is_no_matter() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> Any:
        constant = torch.from_numpy(np.ones(3, dtype=np.float32))
        y: Any = NumpyFunction.apply(x + constant)
        return y.numpy(), y + 1

    history = tl.log_forward_pass(Model(forward), X)
    assert history["numpyfunction"].parent_layers == ["add_1_2"]
