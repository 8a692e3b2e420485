"""Draws all pictures of the documentation.

Run `python examples/draw_gallery.py [folder]`; the folder is `images` unless you name another. The
models are defined here, with random weights: nothing is downloaded.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from alexnet import AlexNet
from torch import nn

import torchlens as tl


class BasicBlock(nn.Module):
    """Two convolutions and a way around them (He et al., 2015)."""

    def __init__(self, num_in: int, num_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.downsample = None
        if stride != 1 or num_in != num_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet18(nn.Module):
    """ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64), BasicBlock(64, 64))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class RecurrentNet(nn.Module):
    """One cell, used four times, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 16)
        self.step = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(x.shape[0], 16)
        for moment in range(4):
            hidden = torch.tanh(self.read(x[:, moment]) + self.step(hidden))
        return self.head(hidden)


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a small network, each around a residual stream."""

    def __init__(self, dim: int = 64, num_heads: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of the shape of GPT-2: twelve blocks alike."""

    def __init__(self, dim: int = 64, num_blocks: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(1000, dim)
        self.wpe = nn.Embedding(128, dim)
        self.h = nn.ModuleList(TransformerBlock(dim) for _ in range(num_blocks))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, 1000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Conditional(nn.Module):
    """Looks at its input to decide what to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(8, 4)
        self.large = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().mean() > 0.5:
            return self.large(x / x.norm())
        return self.small(x)


class Normalised(nn.Module):
    """A convolution with batch norm: its running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.head(x * self.scale)


class Failing(nn.Module):
    """Its last layer expects 32 numbers and gets 16."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(32, 8), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def history_of(model: nn.Module, x: Any) -> tl.ModelHistory:
    """A log without tensors; of a model that fails, as far as it got."""
    try:
        return tl.get_model_metadata(model.eval(), x)
    except RuntimeError as error:
        return error.partial_history  # type: ignore[attr-defined]


def with_gradients() -> tl.ModelHistory:
    """The model with buffers after a backward pass."""
    history = tl.log_forward_pass(Normalised().eval(), torch.rand(2, 3, 8, 8), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    return history


PICTURES: dict[str, tuple[Callable[[], tl.ModelHistory], dict[str, Any]]] = {
    "alexnet": (lambda: history_of(AlexNet(), torch.rand(1, 3, 224, 224)), {}),
    "alexnet_modules": (
        lambda: history_of(AlexNet(), torch.rand(1, 3, 224, 224)),
        {"vis_nesting_depth": 1},
    ),
    "alexnet_flops": (
        lambda: history_of(AlexNet(), torch.rand(1, 3, 224, 224)),
        {"vis_color_by": "flops"},
    ),
    "resnet18": (
        lambda: history_of(ResNet18(), torch.rand(1, 3, 224, 224)),
        {"vis_nesting_depth": 2},
    ),
    "resnet18_block": (
        lambda: history_of(ResNet18(), torch.rand(1, 3, 224, 224)),
        {"vis_collapse": lambda history, module: module in ("layer1", "layer3", "layer4")},
    ),
    "recurrent_unrolled": (lambda: history_of(RecurrentNet(), torch.rand(2, 4, 8)), {}),
    "recurrent_rolled": (
        lambda: history_of(RecurrentNet(), torch.rand(2, 4, 8)),
        {"vis_opt": "rolled"},
    ),
    "transformer_block": (lambda: history_of(TransformerBlock(), torch.rand(1, 10, 64)), {}),
    "gpt_folded": (
        lambda: history_of(GPT(), torch.randint(1000, (1, 32))),
        {"vis_fold_repeats": True},
    ),
    "conditional": (lambda: history_of(Conditional(), torch.ones(2, 8)), {}),
    "buffers_and_gradients": (with_gradients, {"vis_buffer_layers": True}),
    "failing": (lambda: history_of(Failing(), torch.rand(4, 8)), {}),
}


def main(folder: Path) -> None:
    """Draws every picture into the folder."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    with TemporaryDirectory() as elsewhere:
        for name, (make_history, options) in PICTURES.items():
            options = {"vis_direction": "topdown", **options}
            drawing = make_history().render_graph(
                **options, vis_outpath=Path(elsewhere, name), vis_fileformat="dot"
            )
            path = drawing.save(folder / f"{name}.png")
            print(f"{path}: {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "images"))
