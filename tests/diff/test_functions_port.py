"""A vision transformer and a port of it to plain functions, NHWC, where no module says which layer
is which.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchlens as tl

WIDTH, HEADS, DEPTH, PATCH, SIDE = 16, 2, 2, 4, 4
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        seen = ((q @ k.transpose(-2, -1)) / math.sqrt(SIZE)).softmax(-1)
        found: Tensor = self.out((seen @ v).transpose(1, 2).reshape(x.shape))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Linear(WIDTH, 5)
        self.first, self.places = (
            nn.Parameter(torch.zeros(1, 1, WIDTH)),
            nn.Parameter(torch.zeros(1, SIDE**2 + 1, WIDTH)),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x[:, 0])
        return found


def norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt((centered**2).mean(-1, keepdim=True) + 1e-5) * scale + shift


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("...i,io->...o", x, weight) + bias


class Port(nn.Module):
    """Its weights in one dictionary, transposed, queries, keys and values apart; the last block has
    the mistake.
    """

    def __init__(self, model: Vision, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        own = {
            "patches_w": model.patches.weight.permute(2, 3, 1, 0).reshape(-1, WIDTH),
            "patches_b": model.patches.bias,
        }
        own |= {
            "first": model.first,
            "places": model.places,
            "head_w": model.head.weight.T,
            "head_b": model.head.bias,
        }
        for number, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            qkv = block.attention.qkv
            for name, weight, bias in zip(
                "qkv", qkv.weight.chunk(3), qkv.bias.chunk(3), strict=True
            ):
                own |= {f"{number}_{name}_w": weight.T, f"{number}_{name}_b": bias}
            for name, layer in (
                ("out", block.attention.out),
                ("up", block.up),
                ("down", block.down),
            ):
                own |= {f"{number}_{name}_w": layer.weight.T, f"{number}_{name}_b": layer.bias}
            for name, norm in (("norm1", block.norm1), ("norm2", block.norm2)):
                own |= {f"{number}_{name}_w": norm.weight, f"{number}_{name}_b": norm.bias}
        self.own = nn.ParameterDict(
            {name: nn.Parameter(value.detach().clone()) for name, value in own.items()}
        )

    def weights(self, name: str) -> tuple[Tensor, Tensor]:
        return self.own[f"{name}_w"], self.own[f"{name}_b"]

    def attention(self, x: Tensor, number: int, mistake: str) -> Tensor:
        q, k, v = (
            dense(x, *self.weights(f"{number}_{name}")).view(len(x), -1, HEADS, SIZE)
            for name in "qkv"
        )
        if mistake == "queries and keys swapped":
            q, k = k, q
        if mistake == "keys and values swapped":
            k, v = v, k
        scores = (
            torch.einsum("bthd,bshd->bhts", q, k) * (WIDTH if mistake == "scale" else SIZE) ** -0.5
        )
        found = torch.einsum("bhts,bshd->bthd", torch.softmax(scores, -1), v)
        return dense(found.reshape(x.shape), *self.weights(f"{number}_out"))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), SIDE, PATCH, SIDE, PATCH, 3)
        x = (
            x.permute(0, 3, 1, 2, 4, 5)
            if self.mistake == "patches by columns"
            else x.permute(0, 1, 3, 2, 4, 5)
        )
        x = dense(x.reshape(len(x), SIDE**2, -1), *self.weights("patches"))
        x = torch.cat([self.own["first"].expand(len(x), 1, WIDTH), x], 1) + self.own["places"]
        for number in range(DEPTH):
            mistake = self.mistake if number == DEPTH - 1 else ""
            y = x + self.attention(norm(x, *self.weights(f"{number}_norm1")), number, mistake)
            z = F.gelu(
                dense(norm(y, *self.weights(f"{number}_norm2")), *self.weights(f"{number}_up"))
            )
            z = dense(z, *self.weights(f"{number}_down"))
            x = (x if mistake == "the residual of before" else y) + z
        return dense(x[:, 0], *self.weights("head"))


def compared(mistake: str) -> tuple[Any, tl.ModelHistory]:
    model, x = (
        Vision().eval(),
        torch.linspace(-3, 4, 2 * 3 * 16 * 16).mul(11).sin().reshape(2, 3, 16, 16),
    )
    candidate = tl.log_forward_pass(Port(model, mistake), x.permute(0, 2, 3, 1).contiguous())
    return tl.diff(tl.log_forward_pass(model, x), candidate, isolate=True), candidate


def test_the_clean_port_has_no_culprits():
    diff, _ = compared("")
    assert diff.ok
    assert diff.culprits == []


REASONS = {
    "scale": (
        "softmax",
        "1/2.82843 in the reference, 0.25 in the candidate: with 0.353553, the error is",
    ),
    "queries and keys swapped": (
        "softmax",
        "has its axes 2 and 3 swapped: the other way round, the error is",
    ),
    "keys and values swapped": ("einsum", "where that reads unbind_"),
    "patches by columns": (
        "cat",
        "goes through 4 x 4 places along axis 1 by columns, not by rows: the other way round, the",
    ),
    "the residual of before": ("add", "the candidate reads what is add_3_"),
}


@pytest.mark.parametrize("mistake", REASONS)
def test_the_reason_says_what_was_done(mistake: str):
    kind, reason = REASONS[mistake]
    diff, candidate = compared(mistake)
    assert 1 <= len(diff.culprits) <= 2
    culprit = diff.culprits[0]
    assert candidate[culprit.candidate].layer_type == kind
    assert reason in culprit.reason
