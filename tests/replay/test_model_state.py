"""What running a model changes is put back."""

import torch
from torch import nn

from torchlens._replay.model_state import State


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.norm(x) + torch.rand(3)


def test_buffers_attributes_and_generators_are_put_back():
    model, x = Counting(), torch.randn(4, 3)
    state = State(model, ([x], {}))
    first = model(x)
    assert model.calls == 1
    assert model.norm.running_mean.abs().sum() > 0
    state.restore()
    assert model.calls == 0
    assert model.norm.running_mean.abs().sum() == 0
    assert model.norm.num_batches_tracked == 0
    assert torch.equal(model(x), first)


def test_an_input_that_the_model_writes_to_is_put_back():
    x = torch.randn(4, 3)
    before = x.clone()
    state = State(nn.ReLU(inplace=True), ([x], {}))
    nn.ReLU(inplace=True)(x)
    assert not torch.equal(x, before)
    state.restore()
    assert torch.equal(x, before)


def test_gradients_are_put_back():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    state = State(model, ([x], {}))
    model(x).sum().backward()
    assert model.weight.grad is not None
    state.restore()
    assert model.weight.grad is None
