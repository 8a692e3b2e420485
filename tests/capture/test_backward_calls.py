"""A backward pass that the model runs inside its forward pass: the gradients it leaves are
entries.
"""

import pytest
import torch
from torch import nn

import torchlens as tl


class Force(nn.Module):
    """The gradient of an energy, by `backward` or by another name of it."""

    def __init__(self, backward=torch.Tensor.backward):
        super().__init__()
        self.energy, self.backward = nn.Linear(5, 1), backward

    def forward(self, x):
        with torch.enable_grad():
            position = x.detach().requires_grad_()
            self.backward(self.energy(position).square().sum())
            return -position.grad


class Adapting(nn.Module):
    """Trains itself on each batch that it is given."""

    def __init__(self, optimizer):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        self.optimizer = optimizer(self.net.parameters(), lr=0.1)

    def forward(self, x):
        for _ in range(2):
            chances = self.net(x).softmax(1)
            (-(chances * chances.log()).sum(1).mean()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.net(x)


class Adding(nn.Module):
    """Two backward passes that add to one gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(5.0))

    def forward(self, x):
        self.weight.grad = None
        (self.weight * x).sum().backward()
        first = self.weight.grad * 1
        (self.weight * x * 2).sum().backward()
        return first, self.weight.grad * 1


@pytest.mark.parametrize(
    "backward", [torch.Tensor.backward, lambda loss: torch.autograd.backward([loss])]
)
def test_the_gradient_of_a_leaf_reads_what_was_differentiated_and_the_leaf(backward):
    model, x = Force(backward), torch.randn(4, 5)
    history = tl.log_forward_pass(model, x)
    gradient = next(
        entry
        for entry in history
        if entry.layer_type == "backward" and entry.tensor_shape == (4, 5)
    )
    assert set(gradient.parent_layers) == {"sum_1_4", "detach_1_1"}
    assert gradient.child_layers == ["neg_1_8"]
    torch.testing.assert_close(-gradient.tensor_contents, model(x))
    assert tl.validate_saved_activations(model, x)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_model_that_trains_itself_is_logged_from_loss_to_weight(optimizer):
    torch.manual_seed(0)
    model, x = Adapting(optimizer), torch.randn(6, 5)
    assert tl.validate_saved_activations(model, x)
    history = tl.log_forward_pass(model, x)
    gradients = [entry for entry in history if entry.layer_type == "backward"]
    assert len(gradients) == 2 * 6
    assert all("neg_1_10" in parent for entry in gradients for parent in entry.parent_layers[:1])
    last = history["linear_1_1:3"]
    assert all(history[parent].is_output_ancestor for parent in last.parent_layers)


def test_gradients_that_add_up_keep_the_value_they_had():
    model, x = Adding(), torch.randn(3, 5)
    history = tl.log_forward_pass(model, x)
    first, second = history["backward_1:1"], history["backward_1:2"]
    torch.testing.assert_close(first.tensor_contents, x.sum(0))
    torch.testing.assert_close(second.tensor_contents, 3 * x.sum(0))
    assert first.layer_label in second.parent_layers
    assert tl.validate_saved_activations(model, x)


def test_what_hooks_compute_is_part_of_the_backward_pass():
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x):
            handle = self.weight.register_hook(lambda gradient: gradient * 2)
            torch.autograd.backward(
                [(self.weight * x).sum()], [torch.tensor(3.0)], inputs=[self.weight]
            )
            handle.remove()
            gradient, self.weight.grad = self.weight.grad, None
            return gradient + 1

    x = torch.randn(2, 5)
    history = tl.log_forward_pass(Hooked(), x)
    assert history.layer_labels == [
        "input_1_0",
        "mul_1_1",
        "sum_1_2",
        "tensor_1_3",
        "backward_1_4",
        "add_1_5",
        "output_1_6",
    ]
    torch.testing.assert_close(history["backward"].tensor_contents, 6 * x.sum(0))
    assert tl.validate_saved_activations(Hooked(), x)


def test_a_backward_pass_that_fails_is_named_in_the_note():
    class Twice(nn.Module):
        def forward(self, x):
            loss = (x * x.requires_grad_()).sum()
            loss.backward()
            loss.backward()

    with pytest.raises(RuntimeError, match="second time") as caught:
        tl.log_forward_pass(Twice(), torch.randn(3))
    assert "by the operation backward(" in caught.value.__notes__[0]


def test_backward_is_torchs_own_afterwards():
    before = torch.autograd.backward
    tl.log_forward_pass(Force(), torch.randn(4, 5))
    assert torch.autograd.backward is before
