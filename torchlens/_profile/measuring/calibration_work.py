"""What is run to find out what looking takes: small models of our own (see `calibration`)."""

import itertools
from typing import TypeVar

import torch
from torch import nn

REPEATS = 6
_MANY = 4

Tensor = torch.Tensor
_Module = TypeVar("_Module", bound=nn.Module)


def make_views(x: Tensor) -> Tensor:
    """Operations that do next to nothing."""
    for _ in range(REPEATS):
        x = x.view(2, 4).view(8)
    return x


def sum_up(x: Tensor) -> Tensor:
    """Operations that do little, and allocate."""
    for _ in range(REPEATS):
        x = x * 1.01
        x = x - x.mean(0, keepdim=True)
    return x


def sum_up_much(x: Tensor) -> Tensor:
    """The same for as long as a model does: what the allocators report takes memory that nobody has
    used before.
    """
    for _ in range(_MANY):
        x = sum_up(x)
    return x


def read_facts(x: Tensor) -> None:
    """What leaves no row."""
    for _ in range(REPEATS):
        _ = x.shape, x.dim(), x.dtype, x.size(0)


def scan(x: Tensor) -> Tensor:
    """What a loop over tokens does: short operations of several kinds, in turns."""
    x = x.view(2, 4)
    state, results = x[:, 0], []
    for position in range(x.shape[1]):
        state = x[:, position] * state + torch.exp(x[:, position, None] * 0.1)[:, 0]
        results.append(torch.matmul(state, x))
    return torch.stack(results, dim=-1)


class Cells(nn.Module):
    """Operations that are each a dozen short ones, in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = _filled(nn.LSTMCell(8, 8, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(1, 8)
        state = x, x
        for _ in range(REPEATS):
            state = self.cell(x, state)
        return state[0]


class Layers(nn.Module):
    """What a small transformer does: many operations, none of them twice in a row, on more memory
    than the caches hold.
    """

    _WIDTH, _LENGTH, _NUM_LAYERS = 128, 8, 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [_Layer(self._WIDTH, self._LENGTH) for _ in range(self._NUM_LAYERS)]
        )
        self._next = itertools.cycle(range(self._NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """One layer; the next in turn, so that each finds its weights as cold as in a model."""
        x = x.repeat(self._LENGTH * self._WIDTH // 8).view(1, self._LENGTH, self._WIDTH)
        return self.layers[next(self._next)](x)


class _Layer(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self._heads = 1, length, 4, width // 4
        self.attention, self.last = _linear(width, 3 * width), _linear(width, width)
        self.gate, self.up, self.down = (
            _linear(width, 2 * width),
            _linear(width, 2 * width),
            _linear(2 * width, width),
        )
        self.norm, self.activation = nn.LayerNorm(width, elementwise_affine=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        half = self._heads[-1] // 2
        h = x.to(torch.float64).to(torch.float32)
        h = self.last.weight[0] * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        q, k, v = (
            part.view(self._heads).transpose(1, 2) for part in self.attention(h).chunk(3, dim=-1)
        )
        q = q * 0.5 + torch.cat((-q[..., half:], q[..., :half]), dim=-1) * 0.5
        scores = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1)
        x = x + self.last(torch.matmul(scores, v).transpose(1, 2).contiguous().reshape(x.shape))
        h = self.norm(x)
        return x + self.down(self.activation(self.gate(h)) * self.up(h))


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    return _filled(nn.Linear(num_inputs, num_outputs, bias=False, device="meta"))


def _filled(module: _Module) -> _Module:
    """The module with weights that are not drawn: the user's random numbers stay as they are."""
    for name, parameter in list(module.named_parameters()):
        weights = torch.full(
            parameter.shape, 1 / parameter.shape[-1], dtype=torch.float32, device="cpu"
        )
        setattr(module, name, nn.Parameter(weights, requires_grad=False))
    return module
