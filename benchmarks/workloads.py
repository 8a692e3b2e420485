"""The models that costs are measured on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["TRAINING_WORKLOADS", "WORKLOADS"]

# AlexNet and ResNet-18 are written out: torchvision, beside a CPU build of torch, is more than one
# of the peers can take.


class AlexNet(nn.Sequential):
    """As in torchvision, in one sequence."""

    def __init__(self) -> None:
        sizes = [
            (3, 64, 11, 4, 2),
            (64, 192, 5, 1, 2),
            (192, 384, 3, 1, 1),
            (384, 256, 3, 1, 1),
            (256, 256, 3, 1, 1),
        ]
        layers: list[nn.Module] = []
        for number, (inside, outside, kernel, stride, padding) in enumerate(sizes):
            layers += [nn.Conv2d(inside, outside, kernel, stride, padding), nn.ReLU(inplace=True)]
            if number in (0, 1, 4):
                layers.append(nn.MaxPool2d(3, 2))
        layers += [
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
            nn.Dropout(),
            nn.Linear(9216, 4096),
            nn.ReLU(inplace=True),
        ]
        layers += [
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, 1000),
        ]
        super().__init__(*layers)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """As in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        for number, (inside, outside, stride) in enumerate(sizes, start=1):
            self.add_module(
                f"layer{number}",
                nn.Sequential(Block(inside, outside, stride), Block(outside, outside, 1)),
            )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def alexnet() -> tuple[nn.Module, Any]:
    return AlexNet().eval(), torch.rand(1, 3, 224, 224)


def resnet18() -> tuple[nn.Module, Any]:
    return ResNet18().eval(), torch.rand(1, 3, 224, 224)


def gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(use_cache=False)).eval(), torch.randint(0, 50257, (1, 128))


def gpt2_batch() -> tuple[nn.Module, Any]:
    model, _ = gpt2()
    return model, torch.randint(0, 50257, (4, 128))


class Loop(nn.Module):
    """Many tiny operations, two in each turn."""

    def __init__(self, num_operations: int) -> None:
        super().__init__()
        self.num_turns = num_operations // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_turns):
            x = torch.sin(x + 1)
        return x


def loop_10_000() -> tuple[nn.Module, Any]:
    return Loop(10_000), torch.ones(8)


def loop_100_000() -> tuple[nn.Module, Any]:
    return Loop(100_000), torch.ones(8)


class DenoisingBlock(nn.Module):
    """Two convolutions, moved by the time step."""

    def __init__(self, channels: int, embedded: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, channels), nn.GroupNorm(2, channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(embedded, 2 * channels)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        hidden = self.norm2(self.conv1(self.act(self.norm1(x)))) * (1 + scale) + shift
        return x + self.conv2(self.act(hidden))


class Diffusion(nn.Module):
    """A sampling loop around a very small U-Net: a hundred module calls per step, each of them
    tiny.
    """

    def __init__(self, num_steps: int, channels: int = 4) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.inside, self.outside = (
            nn.Conv2d(1, channels, 3, padding=1),
            nn.Conv2d(2 * channels, 1, 3, padding=1),
        )
        self.down = nn.ModuleList(DenoisingBlock(channels, 8) for _ in range(4))
        self.up = nn.ModuleList(DenoisingBlock(2 * channels, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(self.num_steps, 0, -1):
            angles = torch.full((1, 1), float(step)) * torch.exp(-torch.arange(4.0))
            time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
            hidden = first = self.inside(x)
            for block in self.down:
                hidden = block(hidden, time)
            hidden = torch.cat([hidden, first], dim=1)
            for block in self.up:
                hidden = block(hidden, time)
            x = (x - 0.1 * self.outside(hidden)).clamp(-1, 1)
        return x


def diffusion() -> tuple[nn.Module, Any]:
    return Diffusion(100).eval(), torch.rand(1, 1, 8, 8)


WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "AlexNet 224": alexnet,
    "ResNet-18 224": resnet18,
    "GPT-2, 128 tokens": gpt2,
    "GPT-2, 4 × 128 tokens": gpt2_batch,
    "loop of 10,000 operations": loop_10_000,
    "loop of 100,000 operations": loop_100_000,
    "diffusion, 100 steps": diffusion,
}


class SmallCNN(nn.Sequential):
    """Three convolutions and a classifier."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inside, outside in ((3, 16), (16, 32), (32, 64)):
            convolution = nn.Conv2d(inside, outside, 3, padding=1)
            layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def small_cnn_training() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return SmallCNN().train(), torch.rand(32, 3, 32, 32), torch.randint(0, 10, (32,))


def resnet18_training() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return ResNet18().train(), torch.rand(8, 3, 112, 112), torch.randint(0, 1000, (8,))


class GPTBlock(nn.Module):
    """Attention and a small network, each around a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.num_heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    """Six layers; gives the logits of all tokens in a row."""

    def __init__(self, num_tokens: int = 1000, width: int = 192, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, 6) for _ in range(6)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(hidden))).flatten(0, 1)


def gpt_training() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 1000, (8, 64))
    return SmallGPT().train(), tokens, tokens.flatten()


TRAINING_WORKLOADS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {
    "small CNN, 32 images of 32×32": small_cnn_training,
    "ResNet-18, 8 images of 112×112": resnet18_training,
    "GPT of 6 layers, 8 × 64 tokens": gpt_training,
}
