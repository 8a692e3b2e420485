"""Models that the tests of edits share, and hand-made hooks to compare with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


class Attention(nn.Module):
    """Causal attention of four heads from one fused projection; a cache makes it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> Tensor:
        q, k, v = (t.view(*t.shape[:2], 4, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past[:] = [k, v]
        is_causal = q.shape[2] == k.shape[2]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        result: Tensor = self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), past)
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Gpt(nn.Module):
    """A small language model with a cache and a `generate`."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.wte = nn.Embedding(20, 16)
        self.h = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, ids: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.wte(ids)
        for number, block in enumerate(self.h):
            x = block(x, None if caches is None else caches[number])
        result: Tensor = self.head(x)
        return result

    @torch.no_grad()
    def generate(self, ids: Tensor, steps: int, *, is_sampled: bool = False) -> Tensor:
        caches: list[list[Tensor]] = [[] for _ in self.h]
        new = ids
        for _ in range(steps):
            logits = self(new, caches)[:, -1]
            new = logits.argmax(-1, keepdim=True)
            if is_sampled:
                new = torch.multinomial(logits.softmax(-1), 1)
            ids = torch.cat([ids, new], 1)
        return ids


def gpt(num_layers: int = 3) -> tuple[Gpt, Tensor]:
    torch.manual_seed(0)
    return Gpt(num_layers).eval(), torch.randint(0, 20, (2, 6))


class Residual(nn.Module):
    """A convolutional block that adds and activates in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in "12")
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        result: Tensor = self.relu(y)
        return result


def resnet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), Residual(4), Residual(4),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    return model.eval(), torch.rand(2, 3, 8, 8)


@contextmanager
def hooked(
    module: nn.Module, change: Callable[[Any], Any], *, before: bool = False
) -> Iterator[None]:
    """A hand-made hook on what a module returns, or on what it is given."""
    if before:
        handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]),))
    else:
        handle = module.register_forward_hook(lambda _, args, result: change(result))
    try:
        yield
    finally:
        handle.remove()


def without_head(number: int) -> Callable[[Tensor], Tensor]:
    """Sets a head to zero in what the projection after the attention is given."""

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[..., 4 * number : 4 * number + 4] = 0
        return value

    return change
