"""Attention written in another way: heads that share keys, turned positions, a norm with a small
eps.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchlens as tl

WIDTH, HEADS, SHARED = 16, 4, 2
SIZE = WIDTH // HEADS
X = torch.linspace(-3.0, 4.0, 2 * 5 * WIDTH).reshape(2, 5, WIDTH).mul(7).sin()


class Reference(nn.Module):
    """Queries, keys and values apart; fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, SHARED * SIZE, bias=False) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * 0.5 + (parameter.dim() == 1)
                )

    def forward(self, x: Any) -> Any:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2e-6) * self.scale
        q, k, v = (
            part(x).view(2, 5, -1, SIZE).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        place = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        q, k = (
            t * place.cos() + torch.cat([-t[..., 2:], t[..., :2]], -1) * place.sin() for t in (q, k)
        )
        k, v = (t.repeat_interleave(HEADS // SHARED, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(2, 5, WIDTH))


class Port(nn.Module):
    """One weight for all three; attention step by step, with heads in another place."""

    def __init__(self, model: Reference, mistake: str = "") -> None:
        super().__init__()
        self.gain = nn.Parameter(model.scale.detach().clone())
        self.qkv = nn.Parameter(
            torch.cat([part.weight.detach() for part in (model.q, model.k, model.v)])
        )
        self.out = nn.Parameter(model.o.weight.detach().T.clone())
        self.mistake = mistake

    def turned(self, t: Any) -> Any:
        angle = torch.arange(5)[:, None, None] * torch.tensor([1.0, 0.1])
        if self.mistake == "interleaved":
            a, b = t[..., ::2], t[..., 1::2]
            return torch.stack(
                [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1
            ).flatten(-2)
        a, b = t[..., :2], t[..., 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, x: Any) -> Any:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 2e-6) * self.gain
        q, k, v = (x @ self.qkv.T).split([WIDTH, SHARED * SIZE, SHARED * SIZE], -1)
        q, k, v = (t.reshape(2, 5, -1, SIZE) for t in (q, k, v))
        q, k = self.turned(q), self.turned(k)
        k, v = (t.repeat_interleave(HEADS // SHARED, 2) for t in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / SIZE**0.5
        y = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        if self.mistake == "not merged":
            y = y.transpose(1, 2)
        return y.reshape(2, 5, WIDTH) @ self.out


def compared(mistake: str = "", isolate: bool = True) -> tl.Diff:
    model = Reference()
    return tl.diff(
        tl.log_forward_pass(model, X), tl.log_forward_pass(Port(model, mistake), X), isolate=isolate
    )


@pytest.mark.parametrize("isolate", [False, True])
def test_a_variance_is_not_taken_for_the_variance_with_its_eps(isolate: bool) -> None:
    """2e-6 beside a variance of about 0.5 is 30 units of rounding: near enough to be taken for the
    same.
    """
    diff = compared(isolate=isolate)
    assert diff.ok
    pairs = {pair.reference.split("_")[0]: pair.candidate.split("_")[0] for pair in diff.pairs}
    assert pairs["mean"] == "mean"


def test_parts_of_different_sizes_are_found() -> None:
    assert compared().weights == "5 of 5 found: 1 as they are, 1 transposed, 3 as parts of `qkv`"


def test_interleaved_positions_are_found_in_queries_and_keys() -> None:
    """Two things that one line takes are one mistake, and what is done with queries is not taken
    for what is with keys.
    """
    diff = compared("interleaved")
    queries, keys = diff.culprits[:2]
    for culprit in (queries, keys):
        assert culprit.candidate_line.endswith("in Port.turned")
        assert "in the reference, (…, ::2) in the candidate" in culprit.reason
        assert len(culprit.also) == 1
    assert not any(
        pair.reference == "mul_6_30" and pair.candidate == "mul_5_22" for pair in diff.pairs
    )


def test_heads_that_are_not_put_back_are_found_at_the_reshape() -> None:
    (culprit,) = compared("not merged").culprits
    assert any(label.startswith("reshape") for label in culprit.candidate_operations)
    assert "puts the same numbers in another order than" in culprit.reason


def test_other_numbers_are_no_other_order() -> None:
    """A view of other numbers, put in, would explain any error."""
    with torch.no_grad():
        model, other = Reference(), Reference()
        other.k.weight.mul_(1.01)
    diff = tl.diff(tl.log_forward_pass(model, X), tl.log_forward_pass(other, X), isolate=True)
    assert diff.culprits
    assert not any(
        "in another order" in reason for culprit in diff.culprits for reason in culprit.reasons
    )
