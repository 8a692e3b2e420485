"""Small networks for the tests, all in one place."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A network made of a function of (self, inputs...) and its submodules, parameters and
    attributes.
    """

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        self._function = function
        self.num_calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self._function(self, *args, **kwargs)

    if TYPE_CHECKING:  # its attributes are what it was given

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class MLP(nn.Module):
    """Two linear layers with a ReLU between: 4 → 5 → 3."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Residual(nn.Module):
    """x + fc(relu(x)), in a block of its own, twice, with a constant and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        y = x * self.scale
        return {"logits": y + torch.ones(4), "hidden": x}


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(torch.relu(x))


class ConvNet(nn.Module):
    """Convolution, batch norm, in-place ReLU, pooling, dropout and a head: something of everything
    that trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.act(self.norm(self.conv(x))))
        return self.head(self.drop(x.flatten(1)))


class Recurrent(nn.Module):
    """One linear layer, used four times."""

    def __init__(self, num_loops: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.num_loops = num_loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_loops):
            x = self.fc(x)
            x = x + 1
            x = x * 2
        return x


class Conditional(nn.Module):
    """Adds or multiplies, depending on the sum of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x * 2


# -- transformers
# --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int = 2, *, is_causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        heads = (
            self.qkv(x)
            .view(batch, length, 3, self.num_heads, dim // self.num_heads)
            .permute(2, 0, 3, 1, 4)
        )
        q, k, v = heads.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.proj(y.transpose(1, 2).reshape(batch, length, dim))


class ManualAttention(Attention):
    """The same by hand, as BERT and Swin have it: matmul, mask, softmax, matmul."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            self.qkv(x)
            .view(batch, length, 3, self.num_heads, dim // self.num_heads)
            .permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-2, -1) / (dim // self.num_heads) ** 0.5
        y = scores.softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(batch, length, dim))


class Block(nn.Module):
    """Attention and MLP around a residual stream, with the norms before (GPT, ViT) or after
    (BERT).
    """

    def __init__(self, dim: int, attention: nn.Module, *, is_pre_norm: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(0.1)
        self.is_pre_norm = is_pre_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_pre_norm:
            x = x + self.drop(self.attention(self.norm1(x)))
            return x + self.drop(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop(self.attention(x)))
        return self.norm2(x + self.drop(self.mlp(x)))


class TinyGPT(nn.Module):
    def __init__(self, depth: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList(
            Block(dim, Attention(dim, is_causal=True)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TinyBERT(nn.Module):
    def __init__(self, depth: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.words, self.positions, self.segments = (
            nn.Embedding(11, dim),
            nn.Embedding(16, dim),
            nn.Embedding(2, dim),
        )
        self.norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(
            Block(dim, ManualAttention(dim), is_pre_norm=False) for _ in range(depth)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids)
        x = self.norm(
            self.words(ids) + self.segments(torch.zeros_like(ids)) + self.positions(places)
        )
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x[:, 0])


class TinyViT(nn.Module):
    def __init__(self, depth: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.zeros(1, 5, dim))
        self.blocks = nn.ModuleList(Block(dim, Attention(dim)) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class WindowBlock(nn.Module):
    """A Swin block: shift, cut into windows, attend, put together, shift back."""

    def __init__(self, dim: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = ManualAttention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, dim = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = (
            y.view(batch, height // 2, 2, width // 2, 2, dim)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(-1, 4, dim)
        )
        y = (
            self.attention(y)
            .view(batch, height // 2, width // 2, 2, 2, dim)
            .permute(0, 1, 3, 2, 4, 5)
        )
        y = torch.roll(y.reshape(batch, height, width, dim), (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class TinySwin(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 2, stride=2)
        self.blocks = nn.Sequential(*(WindowBlock(dim, shift=index % 2) for index in range(4)))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.patches(image).permute(0, 2, 3, 1)).mean((1, 2))


class Passing(nn.Module):
    """A block that hands a bias on to the next one, as those of T5 do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, bias):
        return x + self.fc(x) * bias, bias


class HandingOn(nn.Module):
    """Five blocks, each of which hands a bias on; that of the last one is not read."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Passing() for _ in range(5))

    def forward(self, x):
        bias = torch.ones(4) * 2
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


def writes_through_views(self, x):
    """A forward that writes in place, through a view and to the memory that a view shares."""
    y = x * 1
    y[0].add_(5)
    z = y * 2
    v = z.view(-1)
    z.mul_(3)
    return v * 2, y.t(), z.relu_()
