"""A small GPT, as one writes it with `torch.nn`, and a port of it in primitives, into which
mistakes can be planted.

The port holds its weights as (in, out), as JAX does, q, k and v apart, and normalises, activates
and attends by hand.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["GPT", "MISTAKES", "Port", "example", "ported"]

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 32, 4, 3, 50, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.act(self.fc(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The reference."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(LENGTH + 4, WIDTH)
        self.h = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


class Dense(nn.Module):
    def __init__(self, size_in: int, size_out: int, bias: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size_in, size_out))
        self.b = nn.Parameter(torch.zeros(size_out)) if bias else None
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        w = self.w.T if self.mistake == "transposed" else self.w
        x = x @ w
        return x if self.b is None or self.mistake == "no bias" else x + self.b


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-3 if self.mistake == "large eps" else 1e-6 if self.mistake == "small eps" else 1e-5
        axis = 1 if self.mistake == "axis" else -1
        mean = x.mean(axis, keepdim=True)
        centred = x if self.mistake == "rms" else x - mean
        count = x.shape[axis] - (self.mistake == "unbiased")
        variance = (centred * centred).sum(axis, keepdim=True) / count
        normal = centred * torch.rsqrt(variance + eps)
        if self.mistake == "no scale":
            return normal + self.shift
        return normal * self.scale + self.shift


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.output = (Dense(WIDTH, WIDTH) for _ in range(4))
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        size = width // HEADS
        heads = (
            (batch, length, size, HEADS)
            if self.mistake == "heads"
            else (batch, length, HEADS, size)
        )
        q, k, v = (part(x).reshape(heads) for part in (self.q, self.k, self.v))
        if self.mistake == "heads":
            q, k, v = q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3)
        if self.mistake == "k for q":
            q, k = k, q
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        if self.mistake != "no scaling":
            scores = scores / math.sqrt(width if self.mistake == "scaled by width" else size)
        if self.mistake == "half":
            scores = scores.bfloat16().float()
        if self.mistake != "no mask":
            ahead = torch.ones(length, length, dtype=torch.bool).triu(
                0 if self.mistake == "mask" else 1
            )
            if self.mistake == "mask":
                ahead[0, 0] = False
            scores = scores.masked_fill(ahead, -1e9)
        axis = 1 if self.mistake == "softmax axis" else -1
        scores = (scores - scores.amax(axis, keepdim=True)).exp()
        weights = scores / scores.sum(axis, keepdim=True)
        out = torch.einsum("bhts,bshd->bthd", weights, v)
        return self.output(out.reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Dense(WIDTH, 4 * WIDTH), Dense(4 * WIDTH, WIDTH)
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.mistake == "tanh":
            x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        elif self.mistake == "relu":
            x = x.clamp(min=0)
        elif self.mistake == "silu":
            x = x * torch.sigmoid(x)
        elif self.mistake == "quick":
            x = x * torch.sigmoid(1.702 * x)
        elif self.mistake != "none":
            x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        return self.down(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.ffn = Norm(), Attend(), Norm(), FeedForward()
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm1(x))
        x = attended if self.mistake == "no residual" else x + attended
        if self.mistake == "residual after norm":
            x = self.norm2(x)
            return x + self.ffn(x)
        norm = self.norm1 if self.mistake == "norm twice" else self.norm2
        return x + self.ffn(norm(x))


class Port(nn.Module):
    """The candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = (
            nn.Parameter(torch.zeros(WORDS, WIDTH)),
            nn.Parameter(torch.zeros(LENGTH + 4, WIDTH)),
        )
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final = Norm()
        self.out = Dense(WIDTH, WORDS, bias=False)
        self.mistake = ""

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]) + (self.mistake == "off by one")
        x = self.words[ids]
        if self.mistake == "scaled words":
            x = x * math.sqrt(WIDTH)
        x = x + self.places[places] if self.mistake != "no places" else x
        for block in self.blocks:
            x = block(x)
        return self.out(x if self.mistake == "no last norm" else self.final(x))


# Where it is planted and what; then where else it may be found: what is left out shows in what
# comes next.
MISTAKES: dict[str, tuple[str, ...]] = {
    "LayerNorm with eps 1e-6": ("blocks.0.norm1", "small eps"),
    "LayerNorm with eps 1e-3": ("blocks.1.norm2", "large eps"),
    "LayerNorm over the wrong axis": ("blocks.1.norm1", "axis"),
    "LayerNorm without its mean": ("blocks.0.norm2", "rms"),
    "LayerNorm with the unbiased variance": ("blocks.2.norm1", "unbiased"),
    "LayerNorm without its scale": ("final", "no scale"),
    "a weight not transposed": ("blocks.2.attention.output", "transposed"),
    "a bias left out": ("blocks.1.ffn.up", "no bias"),
    "a value projection not transposed": ("blocks.0.attention.v", "transposed"),
    "no 1/sqrt(d)": ("blocks.1.attention", "no scaling"),
    "scaled by the width instead of the head's": ("blocks.0.attention", "scaled by width"),
    "no causal mask": ("blocks.0.attention", "no mask"),
    "a mask off by one": ("blocks.2.attention", "mask"),
    "softmax over the wrong axis": ("blocks.1.attention", "softmax axis"),
    "heads split the wrong way": ("blocks.0.attention", "heads"),
    "keys for queries": ("blocks.2.attention", "k for q"),
    "scores cast to bfloat16": ("blocks.1.attention", "half"),
    "gelu in its tanh form": ("blocks.1.ffn", "tanh"),
    "relu for gelu": ("blocks.0.ffn", "relu"),
    "silu for gelu": ("blocks.2.ffn", "silu"),
    "quick gelu for gelu": ("blocks.0.ffn", "quick"),
    "no activation": ("blocks.1.ffn", "none", "blocks.1.ffn.down"),
    "a residual left out": ("blocks.1", "no residual", "blocks.1.norm2"),
    "the residual taken after the norm": ("blocks.1", "residual after norm"),
    "the other norm's weights": ("blocks.0", "norm twice", "blocks.0.norm1"),
    "positions off by one": ("", "off by one"),
    "embeddings scaled": ("", "scaled words"),
    "no position embedding": ("", "no places", "blocks.0.norm1"),
    "no last norm": ("", "no last norm", "out"),
}


def ported(reference: GPT, mistakes: dict[str, str] | None = None) -> Port:
    """A port with the reference's weights; `mistakes` are planted by address."""
    port = Port()
    with torch.no_grad():
        port.words.copy_(reference.wte.weight)
        port.places.copy_(reference.wpe.weight)
        for layer, block in zip(reference.h, port.blocks, strict=True):
            for ours, theirs in ((layer.ln_1, block.norm1), (layer.ln_2, block.norm2)):
                theirs.scale.copy_(ours.weight)
                theirs.shift.copy_(ours.bias)
            parts = zip(layer.attn.qkv.weight.chunk(3), layer.attn.qkv.bias.chunk(3), strict=True)
            for dense, (weight, bias) in zip(
                (block.attention.q, block.attention.k, block.attention.v), parts, strict=True
            ):
                dense.w.copy_(weight.T)
                dense.b.copy_(bias)
            dense_pairs: list[tuple[Any, Any]] = [
                (layer.attn.proj, block.attention.output), (layer.mlp.fc, block.ffn.up),
                (layer.mlp.proj, block.ffn.down),
            ]  # fmt: skip
            for linear, dense in dense_pairs:
                dense.w.copy_(linear.weight.T)
                dense.b.copy_(linear.bias)
        port.final.scale.copy_(reference.ln_f.weight)
        port.final.shift.copy_(reference.ln_f.bias)
        port.out.w.copy_(reference.head.weight.T)
    for address, mistake in (mistakes or {}).items():
        port.get_submodule(address).mistake = mistake  # type: ignore[assignment]
    return port.eval()


def example() -> tuple[GPT, Tensor]:
    """The reference with random weights, and an input."""
    torch.manual_seed(0)
    model = GPT().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] == "bias" or ".ln_" in f".{name}":
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randint(0, WORDS, (2, LENGTH))
