"""`save_gradients`: every differentiable entry gets its gradient, checked against an independent
computation.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import torchlens as tl
from tests.networks import MLP, ConvNet, Model, Recurrent, Residual, TinyGPT, TinyViT


class Retaining(TorchFunctionMode):
    """Keeps each operation's result and asks autograd to keep its gradient: good for models without
    in-place writes.
    """

    def __init__(self) -> None:
        self.results: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()
                self.results.append(tensor)
        return result


@pytest.mark.parametrize(
    ("make", "shape"), [(MLP, (2, 4)), (Recurrent, (2, 4)), (Residual, (2, 4)), (TinyViT, (2, 3, 8,
    8))]
)  # fmt: skip
def test_gradients_are_those_that_autograd_keeps(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = make(), torch.randn(shape, requires_grad=True)
    model.eval()
    history = tl.log_forward_pass(model, x, save_gradients=True)
    assert history.layers_with_saved_gradients == []
    sum(history[label].tensor_contents.pow(2).sum() for label in history.output_layers).backward()
    logged = {entry.layer_label: entry for entry in history}
    x.grad = None

    # Independently: the same model, its operations found through autograd's own retain_grad,
    # matched by value and shape.
    with Retaining() as mode:
        output = model(x)
    outputs = output.values() if isinstance(output, dict) else [output]
    sum(value.pow(2).sum() for value in outputs).backward()
    results = [(tensor, tensor.grad) for tensor in mode.results if tensor.grad is not None]
    assert len(results) >= 3
    for tensor, grad in results:
        matches = [
            entry for entry in logged.values()
            if entry.tensor_shape == tuple(tensor.shape) and torch.equal(entry.tensor_contents,
            tensor)
            and entry.grad_contents is not None and torch.allclose(entry.grad_contents, grad)
        ]  # fmt: skip
        assert matches, f"no entry has the value and the gradient of a {tuple(tensor.shape)} result"
    torch.testing.assert_close(history["input_1"].grad_contents, x.grad)
    missing = [
        e.layer_label
        for e in history
        if e.gradfunc and e.is_output_ancestor and not e.has_saved_grad
    ]
    assert missing == []


def gradients(forward: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> dict[str, Any]:
    history = tl.log_forward_pass(
        Model(lambda self, *args: forward(*args)), list(inputs), save_gradients=True
    )
    history["output_1"].tensor_contents.sum().backward()
    return {entry.layer_label.rpartition("_")[0]: entry.grad_contents for entry in history}


def assert_gradients(found: dict[str, torch.Tensor], **expected: Any) -> None:
    for name, value in expected.items():
        assert found[name] is not None, f"no gradient of {name}"
        torch.testing.assert_close(
            found[name], torch.as_tensor(value, dtype=found[name].dtype).expand_as(found[name])
        )


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, requires_grad=True)


def test_gradients_through_an_in_place_function() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return F.relu(y, inplace=True) * 3

    # Without in-place: y = 2x, r = relu(y), out = 3r.
    assert_gradients(
        gradients(forward, leaf(1, -1)), output_1=1, mul_2=1, relu_1=3, mul_1=[3, 0], input_1=[6, 0]
    )


def test_gradients_through_an_in_place_operator() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y *= 5
        y += 1
        return y * 3

    assert_gradients(gradients(forward, leaf(1, 2)), iadd_1=3, imul_1=3, mul_1=15, input_1=30)


def test_gradients_through_views() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (y.view(2, 2)[0] * 3).sum() + y.sum()

    expected = {
        "view_1": [[3, 3], [0, 0]],
        "getitem_1": 3,
        "mul_1": [4, 4, 1, 1],
        "input_1": [8, 8, 2, 2],
    }
    assert_gradients(gradients(forward, leaf(1, 2, 3, 4)), **expected)


def test_gradients_through_an_in_place_operation_on_a_view() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].mul_(5)
        return y * 3

    # Functionally: y = 2x, r = y[0], s = 5r, y' = [s, y[1]], out = 3y'.
    found = gradients(forward, torch.ones(2, 2, requires_grad=True))
    assert_gradients(
        found, mul_3=1, mul_2=3, getitem_1=15, mul_1=[[15, 15], [3, 3]], input_1=[[30, 30], [6, 6]]
    )


def test_gradients_through_slice_assignment() -> None:
    def forward(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[1:] = z * 5
        return y * 3

    found = gradients(forward, leaf(1, 2, 3), leaf(1, 2))
    assert_gradients(found, setitem_1=3, mul_1=[3, 0, 0], mul_2=3, input_1=[6, 0, 0], input_2=15)


def test_gradients_through_mask_assignment() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[x > 2] = 0
        return y * 3

    assert_gradients(
        gradients(forward, leaf(1, 2, 3)), setitem_1=3, mul_1=[3, 3, 0], input_1=[6, 6, 0]
    )


def test_gradients_through_a_chain_of_writes_to_views() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        a = y[:2]
        a.mul_(3)
        y[1:].mul_(5)
        return y * 7

    # y = 2x; y[:2] *= 3; y[1:] *= 5: out = [42x0, 210x1, 70x2].
    found = gradients(forward, leaf(1, 1, 1))
    assert_gradients(found, input_1=[42, 210, 70], mul_1=[21, 105, 35], mul_3=7, mul_2=[7, 35])


def test_gradients_of_a_leaf_input_read_twice() -> None:
    assert_gradients(gradients(lambda x: x * 2 + x, leaf(1, 2)), input_1=3, mul_1=1, add_1=1)


def test_gradients_through_several_outputs_of_one_call() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = (x * 2).split(1)
        return a * 3 + b * 5

    assert_gradients(
        gradients(forward, leaf(1, 2)), split_1=3, split_2=5, mul_1=[3, 5], input_1=[6, 10]
    )


def test_what_is_not_differentiable_has_no_gradient() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * (x > 0) + torch.ones(2) + x.detach() + x.argmax()

    found = gradients(forward, leaf(1, 2))
    for name in ("gt_1", "ones_1", "detach_1", "argmax_1"):
        assert found[name] is None


def test_fields_of_gradients() -> None:
    model = MLP()
    history = tl.log_forward_pass(model, torch.rand(2, 4), save_gradients=True)
    entry = history["linear_1"]
    assert not entry.has_saved_grad
    assert entry.grad_shape is None
    assert entry.grad_dtype is None
    history["output_1"].tensor_contents.sum().backward()
    assert entry.has_saved_grad
    assert entry.grad_shape == (2, 5)
    assert entry.grad_dtype is torch.float32
    assert history.layers_with_saved_gradients == [
        "linear_1_1",
        "relu_1_2",
        "linear_2_3",
        "output_1_4",
    ]
    assert "Gradient: shape=(2, 5)" in str(entry)


def test_without_the_option_there_are_no_gradients() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history["output_1"].tensor_contents.sum().backward()
    assert history.layers_with_saved_gradients == []


def test_a_loss_on_any_saved_tensor_works() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), save_gradients=True)
    history["relu_1"].tensor_contents.sum().backward()
    assert history["linear_1"].has_saved_grad
    assert not history["linear_2"].has_saved_grad


def test_two_logs_of_one_leaf_keep_their_gradients_apart() -> None:
    x, model = leaf(1, 2), Model(lambda self, x: x * 2)
    first = tl.log_forward_pass(model, x, save_gradients=True)
    second = tl.log_forward_pass(model, x, save_gradients=True)
    (second["output_1"].tensor_contents.sum() + model(x).sum() * 100).backward()
    assert first["input_1"].grad_contents is None
    assert second["input_1"].grad_contents.tolist() == [2, 2]


@pytest.mark.parametrize(("make", "kind"), [(ConvNet, (2, 3, 8, 8)), (TinyGPT, "tokens")])
def test_the_models_own_gradients_do_not_change(make: Callable[[], nn.Module], kind: Any) -> None:
    torch.manual_seed(1)
    model = make().eval()
    x = torch.randint(11, (2, 6)) if kind == "tokens" else torch.randn(kind)
    model(x).pow(2).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    history = tl.log_forward_pass(model, x, save_gradients=True)
    history["output_1"].tensor_contents.pow(2).sum().backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, wanted)
    missing = [
        e.layer_label
        for e in history
        if e.gradfunc and e.is_output_ancestor and not e.has_saved_grad
    ]
    assert missing == []


def test_gradients_with_selected_layers() -> None:
    for saved in ("fc1", "linear_1_1", ["relu"], "none"):
        model = MLP()
        results = []
        hook = model.register_forward_hook(lambda module, args, out: results.append(out))  # noqa: B023
        history = tl.log_forward_pass(
            model, torch.rand(2, 4), layers_to_save=saved, save_gradients=True
        )
        results[-1].sum().backward()
        hook.remove()
        assert history["linear_1"].grad_shape == (2, 5), saved


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_gradients_under_checkpoint(is_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.sin(y * 2), x, use_reentrant=is_reentrant) * 3

    x = leaf(0.5, 1.0)
    history = tl.log_forward_pass(Model(forward), x, save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    wanted = 6 * torch.cos(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(x.grad, wanted)
    torch.testing.assert_close(history["input_1"].grad_contents, wanted)


def test_gradients_through_two_writes_to_one_view() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        row.mul_(5)
        row.mul_(7)
        return y * 3

    # Functionally: y = 2x, r = y[0], s = 5r, t = 7s, y' = [t, y[1]], out = 3y'.
    found = gradients(forward, torch.ones(2, 2, requires_grad=True))
    assert_gradients(found, mul_4=1, mul_3=3, mul_2=21, getitem_1=105, mul_1=[[105, 105], [3, 3]])


class Meta(nn.Module):
    """Takes a step of its own inside its forward pass, and differentiates through it (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (step,) = torch.autograd.grad((self.w * x).sum(), self.w, create_graph=True)
        return ((self.w - step / 2) * x * self.w).sum()


def test_what_the_model_differentiates_itself_adds_to_no_gradient() -> None:
    model, x = Meta(), torch.full((3,), 3.0)
    history = tl.log_forward_pass(model, x, save_gradients=True)
    assert history["mul_1:1"].grad_contents is None
    history["output_1"].tensor_contents.backward()
    assert model.w.grad is not None
    assert torch.equal(history.param_grads["w"], model.w.grad)
    again = tl.log_forward_pass(model, x)
    again.log_backward(again["output_1"].tensor_contents)
    for entry in history:
        expected = again[entry.layer_label].grad_contents
        found = entry.grad_contents
        assert (found is None) == (expected is None), entry.layer_label
        if found is not None and expected is not None:
            assert torch.equal(found, expected), entry.layer_label
