"""Gradients by `log_backward` and by `save_gradients=True` are those of `torch.autograd.grad`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

import torchlens as tl
from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.specimen import Absent
from tests.networks import MLP, ConvNet, Model, Recurrent, Residual, TinyGPT, TinyViT
from tests.sampling import first

Forward = Callable[..., torch.Tensor]


def loss_of(history: tl.ModelHistory) -> torch.Tensor:
    outputs = [history[label].tensor_contents for label in history.output_layers]
    outputs = [
        output.values() if output.is_nested else output
        for output in outputs
        if output.requires_grad
    ]
    return sum((output.abs() ** 2).mean() for output in outputs)


def edge_of(history: tl.ModelHistory, entry: tl.LayerEntry) -> Any:
    """The saved tensor, or the place in autograd's graph that it was copied from."""
    value = entry.tensor_contents
    if history._log.graph.recorded[entry._entry] in history._log.recording.copies:
        return GradientEdge(*value.grad_fn.next_functions[0])
    return value


def assert_same(found: torch.Tensor | None, wanted: torch.Tensor | None, name: str) -> None:
    assert (found is None) == (wanted is None), f"{name}: {'no' if found is None else 'a'} gradient"
    if wanted is not None:
        found, wanted = (
            t.values() if t.is_nested else t.to_dense() if t.is_sparse else t
            for t in (found, wanted)
        )
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}"
        )


def assert_as_autograd_says(log: Callable[..., tl.ModelHistory]) -> None:
    """Both ways of recording give what `torch.autograd.grad` gives, for entries and for
    parameters.
    """
    history = log()
    loss = loss_of(history)
    entries = [entry for entry in history if entry.tensor_contents.requires_grad]
    parameters = {
        address: parameter
        for entry in entries
        for address, parameter in zip(
            entry.parent_param_addresses, entry.parent_params, strict=True
        )
        if parameter.requires_grad
    }
    wanted = torch.autograd.grad(
        loss,
        [*(edge_of(history, entry) for entry in entries), *parameters.values()],
        retain_graph=True,
        allow_unused=True,
    )
    history.log_backward(loss)
    other = log(save_gradients=True)
    loss_of(other).backward()
    assert len(entries) > 2
    for found in (history, other):
        for entry, gradient in zip(entries, wanted, strict=False):
            assert_same(found[entry.layer_label].grad_contents, gradient, entry.layer_label)
        for address, gradient in zip(parameters, wanted[len(entries) :], strict=True):
            assert_same(found.param_grads.get(address), gradient, address)
        for entry in found:
            assert_same(
                entry.grad_contents, history[entry.layer_label].grad_contents, entry.layer_label
            )
            assert (entry.backward_order is None) == (entry.grad_contents is None)
            assert (entry.backward_time_elapsed is None) <= (
                entry.grad_contents is None
            ) or not entry.gradfunc


@pytest.mark.slow
@pytest.mark.parametrize("name", first(6, [
    "torch.nn/LSTM-packed", "torch.nn/MultiheadAttention-attn_mask", "torch.nn/parametrizations",
    "timm/test_nfnet", "transformers/gpt2", "torch_geometric/GAT",
    "torch.nn/GRUCell", "torch.nn/TransformerEncoder-nested", "torch.nn/embeddings",
    "torchvision/mobilenet_v3_small", "transformers/albert", "transformers/mamba",
]))  # fmt: skip
def test_gradients_of_models_from_elsewhere_are_autograds(name: str) -> None:
    try:
        case = SPECIMENS[name].make()
    except (Absent, ImportError) as absence:
        pytest.skip(str(absence))
    case.model.eval()

    def log(**options: Any) -> tl.ModelHistory:
        torch.manual_seed(1)
        return tl.log_forward_pass(case.model, list(case.args), case.kwargs, **options)

    assert_as_autograd_says(log)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (MLP, (2, 4)),
        (ConvNet, (2, 3, 8, 8)),
        (Recurrent, (2, 4)),
        (Residual, (2, 4)),
        (TinyViT, (2, 3, 8, 8)),
    ],
)
def test_gradients_of_small_models_are_autograds(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = make().eval(), torch.randn(shape, requires_grad=True)
    assert_as_autograd_says(lambda **options: tl.log_forward_pass(model, x, **options))


def test_gradients_of_tokens_are_autograds() -> None:
    model, x = TinyGPT().eval(), torch.randint(11, (2, 6))
    assert_as_autograd_says(lambda **options: tl.log_forward_pass(model, x, **options))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def in_place(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = self.fc(x)
    y.mul_(2).add_(1)
    return F.relu(y, inplace=True) * x


def write_over_views(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = self.fc(x)
    y[0].mul_(3)
    y[:, 1] = y[:, 2] * 5
    return y * 2


def shared(self: Model, x: torch.Tensor) -> torch.Tensor:
    return F.linear(self.fc(self.fc(x).tanh()), self.fc.weight)


def loop(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = self.fc(x).sin()
    return x


def used_twice(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = self.fc(x)
    return y * y + y


def partly_detached(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = self.fc(x)
    with torch.no_grad():
        scale = self.fc(y).abs().max()
    return y.detach().exp() + y / scale


def custom(self: Model, x: torch.Tensor) -> torch.Tensor:
    return Cube.apply(self.fc(x)) * 2


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (
            x.transpose(0, 1) * 2
        )  # a view without a place in the graph, which claims to require a gradient

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.transpose(0, 1) * 2


def custom_with_view(self: Model, x: torch.Tensor) -> torch.Tensor:
    return Turned.apply(self.fc(x)) + 1


def complex_numbers(self: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(torch.complex(self.fc(x), x)) * (1 + 2j)


def several_results(self: Model, x: torch.Tensor) -> torch.Tensor:
    first, second = self.fc(x).split(2, dim=1)
    value, index = first.max(dim=1)
    return value * second.sum(dim=1) + index


def dropped(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.fc(x).exp()
    return self.fc(x).clone().clone().contiguous()


def checkpointed(self: Model, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: self.fc(y).sin(), x * 2, use_reentrant=False) * 3


CASES = [
    in_place, shared, loop, used_twice, partly_detached, custom, custom_with_view, complex_numbers,
    several_results,
    dropped, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("forward", CASES, ids=lambda forward: forward.__name__)
def test_gradients_of_special_cases_are_autograds(forward: Forward) -> None:
    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    assert_as_autograd_says(lambda **options: tl.log_forward_pass(model, x, **options))


def test_what_the_model_differentiates_itself_is_no_backward_pass_of_the_log() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x).sin()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope

    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    history = tl.log_forward_pass(model, x)
    history.log_backward(loss_of(history))
    wanted = torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])
    assert_same(history["input_1"].grad_contents, wanted[0], "input")
    assert_same(history.param_grads["fc.bias"], wanted[2], "bias")
    assert len(history.backward_passes) == 1
    history = tl.log_forward_pass(model, x, save_gradients=True)
    loss_of(history).backward()
    assert len(history.backward_passes) == 1
    assert_same(history["input_1"].grad_contents, wanted[0], "input")


def test_a_backward_pass_inside_the_model_counts_with_save_gradients_alone() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x).sin()
        y.sum().backward(retain_graph=True)
        return y * 2

    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    for saves, count in ((False, 0), (True, 1)):
        history = tl.log_forward_pass(model, x, save_gradients=saves)
        assert len(history.backward_passes) == count


def test_writes_over_views_are_heard_without_save_gradients() -> None:
    model, x = Model(write_over_views, fc=nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    history = tl.log_forward_pass(model, x)
    history.log_backward(loss_of(history))
    other = tl.log_forward_pass(model, x, save_gradients=True)
    loss_of(other).backward()
    wanted = torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])
    assert_same(history["input_1"].grad_contents, wanted[0], "input")
    assert_same(history.param_grads["fc.weight"], wanted[1], "weight")
    for entry in other:
        assert entry.has_saved_grad
        assert_same(
            history[entry.layer_label].grad_contents, entry.grad_contents, entry.layer_label
        )


def test_what_is_read_of_a_view_after_a_write_is_the_writers() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y.view(-1)
        first = view * 3
        y.mul_(5)
        return first + view

    for saves in (True, False):
        x = torch.ones(2, 2, requires_grad=True)
        history = tl.log_forward_pass(Model(forward), x, save_gradients=saves)
        history.log_backward(history["output_1"].tensor_contents.sum())
        assert history["view_1"].grad_contents.tolist() == [3, 3, 3, 3]
        assert history["mul_3"].grad_contents.tolist() == [[1, 1], [1, 1]]
        assert history["mul_1"].grad_contents.tolist() == [[8, 8], [8, 8]]


def test_a_view_that_is_partly_its_own_when_read_again_has_no_gradient_rather_than_half_of_one() -> (
    None
):
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        view = y.view(-1)
        first = view * 3
        y[0].mul_(5)
        return first + view

    x = torch.ones(2, 2, requires_grad=True)
    history = tl.log_forward_pass(Model(forward), x)
    history.log_backward(history["output_1"].tensor_contents.sum())
    assert history["view_1"].grad_contents is None
    assert "save_gradients=True" in history["view_1"].grad_missing_reason
    history = tl.log_forward_pass(Model(forward), x, save_gradients=True)
    history.log_backward(history["output_1"].tensor_contents.sum())
    assert history["view_1"].grad_contents.tolist() == [3, 3, 4, 4]
