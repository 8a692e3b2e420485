"""A small U-Net with group norm, attention and a time embedding, and a port of it in primitives."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MISTAKES", "Net", "Port", "example", "ported"]

WIDTH, GROUPS = 16, 4


class Block(nn.Module):
    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = (
            nn.GroupNorm(GROUPS, size_in),
            nn.Conv2d(size_in, size_out, 3, padding=1),
        )
        self.time = nn.Linear(WIDTH, size_out)
        self.norm2, self.conv2 = (
            nn.GroupNorm(GROUPS, size_out),
            nn.Conv2d(size_out, size_out, 3, padding=1),
        )
        self.skip = nn.Conv2d(size_in, size_out, 1) if size_in != size_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(GROUPS, size),
            nn.Conv2d(size, 3 * size, 1),
            nn.Conv2d(size, size, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, size, height, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, 3, size, height * width).unbind(1)
        weights = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(size), dim=-1)
        return x + self.out((v @ weights.transpose(1, 2)).reshape(x.shape))


class Net(nn.Module):
    """The reference."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.down1, self.shrink = (
            Block(WIDTH, WIDTH),
            nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
        )
        self.down2 = Block(WIDTH, 2 * WIDTH)
        self.middle = Attention(2 * WIDTH)
        self.up2 = Block(4 * WIDTH, WIDTH)
        self.grow = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.up1 = Block(2 * WIDTH, WIDTH)
        self.norm, self.out = nn.GroupNorm(GROUPS, WIDTH), nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(
            -math.log(10000) * torch.arange(WIDTH // 2) / (WIDTH // 2)
        )
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        first = self.down1(self.stem(x), time)
        second = self.down2(self.shrink(first), time)
        low = F.avg_pool2d(second, 2)
        low = F.interpolate(self.middle(low), scale_factor=2, mode="bilinear", align_corners=False)
        y = self.grow(self.up2(torch.cat([low, second], dim=1), time))
        y = self.up1(torch.cat([y, first], dim=1), time)
        return self.out(F.silu(self.norm(y)))


class PortConv(nn.Module):
    def __init__(self, like: nn.Conv2d) -> None:
        super().__init__()
        self.kernel = nn.Parameter(like.weight.detach().clone())
        self.bias = nn.Parameter(like.bias.detach().clone()) if like.bias is not None else None
        self.stride, self.pad = like.stride[0], int(like.padding[0])
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        pad = (
            (0, 2 * self.pad, 0, 2 * self.pad)
            if self.mistake == "pads at the end"
            else (self.pad,) * 4
        )
        x = F.pad(x, pad, mode="circular" if self.mistake == "wraps" else "constant")
        x = F.conv2d(x, self.kernel, stride=self.stride)
        return (
            x
            if self.bias is None or self.mistake == "no bias"
            else x + self.bias.reshape(1, -1, 1, 1)
        )


class PortNorm(nn.Module):
    def __init__(self, like: nn.GroupNorm) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(p.detach().clone()) for p in (like.weight, like.bias)
        )
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        groups = 8 if self.mistake == "groups" else 1 if self.mistake == "one group" else GROUPS
        eps = 1e-3 if self.mistake == "eps" else 1e-5
        parts = x.reshape(x.shape[0], groups, -1)
        mean = parts.mean(-1, keepdim=True)
        centred = parts - mean
        var = (centred**2).mean(-1, keepdim=True)
        x = (centred / torch.sqrt(var + eps)).reshape(x.shape)
        return x * self.scale.reshape(1, -1, 1, 1) + self.shift.reshape(1, -1, 1, 1)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class PortBlock(nn.Module):
    def __init__(self, like: Block) -> None:
        super().__init__()
        self.norm1, self.conv1 = PortNorm(like.norm1), PortConv(like.conv1)
        self.norm2, self.conv2 = PortNorm(like.norm2), PortConv(like.conv2)
        self.time_w = nn.Parameter(like.time.weight.detach().T.clone())
        self.time_b = nn.Parameter(like.time.bias.detach().clone())
        self.skip = PortConv(like.skip) if isinstance(like.skip, nn.Conv2d) else None
        self.mistake = ""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first = torch.relu(self.norm1(x)) if self.mistake == "relu" else swish(self.norm1(x))
        shift = (
            time if self.mistake == "time not activated" else swish(time)
        ) @ self.time_w + self.time_b
        y = self.conv1(first)
        y = y if self.mistake == "no time" else y + shift[:, :, None, None]
        y = self.conv2(swish(self.norm2(y)))
        if self.mistake == "no skip":
            return y
        return y + (x if self.skip is None else self.skip(x))


class PortAttention(nn.Module):
    def __init__(self, like: Attention) -> None:
        super().__init__()
        self.norm, self.out = PortNorm(like.norm), PortConv(like.out)
        size = like.out.weight.shape[0]
        weights, biases = like.qkv.weight.detach().reshape(3, size, size), like.qkv.bias
        assert biases is not None
        self.q, self.k, self.v = (nn.Parameter(weights[place].T.clone()) for place in range(3))
        self.bq, self.bk, self.bv = (nn.Parameter(b.detach().clone()) for b in biases.chunk(3))
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        batch, size = x.shape[:2]
        flat = self.norm(x).reshape(batch, size, -1).transpose(1, 2)
        q, k, v = flat @ self.q + self.bq, flat @ self.k + self.bk, flat @ self.v + self.bv
        scores = q @ k.transpose(1, 2)
        if self.mistake != "no scaling":
            scores = scores * size**-0.5
        weights = torch.softmax(scores, dim=1 if self.mistake == "axis" else -1)
        y = self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return y if self.mistake == "no residual" else x + y


class Port(nn.Module):
    """The candidate."""

    def __init__(self, like: Net) -> None:
        super().__init__()
        self.embed1_w, self.embed2_w = (
            nn.Parameter(like.embed[n].weight.detach().T.clone()) for n in (0, 2)
        )  # type: ignore[union-attr, operator]
        self.embed1_b, self.embed2_b = (
            nn.Parameter(like.embed[n].bias.detach().clone()) for n in (0, 2)
        )  # type: ignore[union-attr, operator]
        self.stem, self.shrink, self.out = (
            PortConv(like.stem),
            PortConv(like.shrink),
            PortConv(like.out),
        )
        self.down1, self.down2, self.up1, self.up2 = map(
            PortBlock, (like.down1, like.down2, like.up1, like.up2)
        )
        self.middle, self.norm = PortAttention(like.middle), PortNorm(like.norm)
        self.grow_w, self.grow_b = (
            nn.Parameter(p.detach().clone())
            for p in (like.grow.weight, like.grow.bias)
            if p is not None
        )
        self.mistake = ""

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        half = WIDTH // 2
        count = half - 1 if self.mistake == "frequencies" else half
        angles = time[:, None] * torch.exp(-math.log(10000) * torch.arange(half) / count)
        waves = (
            [angles.cos(), angles.sin()]
            if self.mistake == "cos before sin"
            else [angles.sin(), angles.cos()]
        )
        time = (
            swish(torch.cat(waves, dim=-1) @ self.embed1_w + self.embed1_b) @ self.embed2_w
            + self.embed2_b
        )
        first = self.down1(self.stem(x), time)
        second = self.down2(self.shrink(first), time)
        parts = second.unfold(2, 2, 2).unfold(3, 2, 2)
        low = self.middle(
            parts.amax((-1, -2)) if self.mistake == "max pool" else parts.mean((-1, -2))
        )
        if self.mistake == "nearest":
            low = low.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        else:
            low = F.interpolate(
                low, scale_factor=2, mode="bilinear", align_corners=self.mistake == "corners"
            )
        low = [second, low] if self.mistake == "order" else [low, second]  # type: ignore[assignment]
        y = self.up2(torch.cat(list(low), dim=1), time)
        kernel = self.grow_w.flip(2, 3) if self.mistake == "flipped" else self.grow_w
        y = F.conv_transpose2d(y, kernel, self.grow_b, stride=2)
        other = torch.zeros_like(first) if self.mistake == "no skip" else first
        other = self.stem(x) if self.mistake == "skip from the stem" else other
        y = self.up1(torch.cat([y, other], dim=1), time)
        y = y if self.mistake == "no norm" else self.norm(y)
        return self.out(swish(y))


MISTAKES: dict[str, tuple[str, ...]] = {
    "GroupNorm with eps 1e-3": ("down1.norm1", "eps"),
    "GroupNorm with 8 groups for 4": ("down2.norm2", "groups"),
    "GroupNorm with one group": ("up1.norm1", "one group"),
    "relu for silu": ("down2", "relu"),
    "the time is not activated": ("up2", "time not activated"),
    "the time left out": ("up1", "no time", "up1.norm2"),
    "a block without its skip": ("down1", "no skip", "shrink", "up1.norm1"),
    "a convolution without its bias": ("up2.conv1", "no bias"),
    "padding at the end": ("shrink", "pads at the end"),
    "padding that wraps": ("stem", "wraps"),
    "attention without 1/sqrt(d)": ("middle", "no scaling"),
    "softmax over the wrong axis": ("middle", "axis"),
    "attention without its residual": ("middle", "no residual", ""),
    "cos before sin": ("", "cos before sin"),
    "frequencies off by one": ("", "frequencies"),
    "max for mean pooling": ("", "max pool"),
    "nearest for bilinear": ("", "nearest"),
    "align_corners": ("", "corners"),
    "concatenated in the other order": ("", "order", "up2.norm1", "up2.skip"),
    "a transposed kernel flipped": ("", "flipped"),
    "no skip connection": ("", "no skip", "up1.norm1", "up1.skip"),
    "the skip connection from another place": ("", "skip from the stem", "up1.norm1", "up1.skip"),
    "no last norm": ("", "no norm", "out"),
}


def ported(reference: Net, mistakes: dict[str, str] | None = None) -> Port:
    """A port with the reference's weights; `mistakes` are planted by address."""
    port = Port(reference)
    for address, mistake in (mistakes or {}).items():
        port.get_submodule(address).mistake = mistake  # type: ignore[assignment]
    return port.eval()


def example() -> tuple[Net, list[Tensor]]:
    """The reference with random weights, and an input: a picture and a time."""
    torch.manual_seed(3)
    model = Net().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return model, [torch.randn(2, 3, 16, 16), torch.tensor([3.0, 17.0])]
