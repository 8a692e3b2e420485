"""A small ResNet in NCHW, and a port of it in NHWC with kernels as HWIO and BatchNorm by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MISTAKES", "Net", "Port", "example", "ported"]

WIDTH, CLASSES = 16, 10


class Residual(nn.Module):
    def __init__(self, size_in: int, size_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(size_in, size_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(size_out)
        self.conv2 = nn.Conv2d(size_out, size_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(size_out)
        self.down = None
        if stride != 1 or size_in != size_out:
            self.down = nn.Sequential(
                nn.Conv2d(size_in, size_out, 1, stride, bias=False), nn.BatchNorm2d(size_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.down is None else self.down(x)))


class Net(nn.Module):
    """The reference."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 1, 1)
        self.bn = nn.BatchNorm2d(WIDTH)
        self.pool = nn.MaxPool2d(2)
        self.layer1 = Residual(WIDTH, WIDTH)
        self.layer2 = Residual(WIDTH, 2 * WIDTH, 2)
        self.layer3 = Residual(2 * WIDTH, 2 * WIDTH)
        self.hidden = nn.Linear(2 * WIDTH * 16, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.bn(self.stem(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(torch.relu(self.hidden(x.flatten(1))))


class Conv(nn.Module):
    def __init__(
        self, size: int, size_in: int, size_out: int, stride: int = 1, bias: bool = False
    ) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(size, size, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(size_out)) if bias else None
        self.stride = stride
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        x, kernel = x.permute(0, 3, 1, 2), self.kernel.permute(3, 2, 0, 1)
        pad = kernel.shape[-1] // 2
        around = (pad, pad, pad, pad)
        if self.mistake == "pads at the end":
            around = (0, 2 * pad, 0, 2 * pad)
        elif self.mistake == "pads afterwards":
            around = (0, 0, 0, 0)
        elif self.mistake == "dilated":
            around = (2 * pad, 2 * pad, 2 * pad, 2 * pad)
        x = F.pad(x, around, mode="reflect" if self.mistake == "reflects" else "constant")
        if self.mistake == "flipped":
            kernel = kernel.flip(2, 3)
        elif self.mistake == "turned":
            kernel = kernel.transpose(2, 3)
        elif self.mistake == "in for out":
            kernel = kernel.transpose(0, 1)
        stride = 1 if self.mistake == "odd ones" else self.stride
        dilation = 2 if self.mistake == "dilated" else 1
        x = F.conv2d(x, kernel, stride=stride, dilation=dilation).permute(0, 2, 3, 1)
        if self.mistake == "odd ones":
            x = x[:, 1::2, 1::2]
        elif self.mistake == "pads afterwards":
            x = F.pad(x, (0, 0, pad, pad, pad, pad))
        return x if self.bias is None or self.mistake == "no bias" else x + self.bias


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.mean: Tensor
        self.var: Tensor
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        mean, var, eps = self.mean, self.var, 1e-5
        if self.mistake == "eps":
            eps = 1e-3
        elif self.mistake == "training":
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2), unbiased=False)
        elif self.mistake == "swapped":
            mean, var = var, mean.abs()
        elif self.mistake == "deviation for variance":
            return (x - mean) / (var + eps) * self.scale + self.shift
        elif self.mistake == "no shift":
            return (x - mean) * torch.rsqrt(var + eps) * self.scale
        return (x - mean) * torch.rsqrt(var + eps) * self.scale + self.shift


class Block(nn.Module):
    def __init__(self, size_in: int, size_out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = Conv(3, size_in, size_out, stride), Conv(3, size_out, size_out)
        self.norm1, self.norm2 = Norm(size_out), Norm(size_out)
        self.side, self.side_norm = None, None
        if stride != 1 or size_in != size_out:
            self.side, self.side_norm = Conv(1, size_in, size_out, stride), Norm(size_out)
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        convs = (
            (self.second, self.first)
            if self.mistake == "kernels swapped"
            else (self.first, self.second)
        )
        y = self.norm1(convs[0](x))
        y = (
            y
            if self.mistake == "no relu"
            else y.clamp(0, 1)
            if self.mistake == "relu6"
            else y.clamp(min=0)
        )
        y = self.norm2(convs[1](y))
        if self.mistake == "relu before the sum":
            return y.clamp(min=0) + x
        if self.mistake != "no skip":
            y = y + (
                x if self.side is None or self.side_norm is None else self.side_norm(self.side(x))
            )
        return y.clamp(min=0)


class Port(nn.Module):
    """The candidate. It takes NHWC."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = Conv(3, 3, WIDTH, bias=True), Norm(WIDTH)
        self.block1, self.block2 = Block(WIDTH, WIDTH), Block(WIDTH, 2 * WIDTH, 2)
        self.block3 = Block(2 * WIDTH, 2 * WIDTH)
        self.hidden_w, self.hidden_b = (
            nn.Parameter(torch.zeros(2 * WIDTH * 16, 32)),
            nn.Parameter(torch.zeros(32)),
        )
        self.head_w, self.head_b = (
            nn.Parameter(torch.zeros(32, CLASSES)),
            nn.Parameter(torch.zeros(CLASSES)),
        )
        self.mistake = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "BGR":
            x = x.flip(-1)
        x = self.stem_norm(self.stem(x)).clamp(min=0)
        windows = x.unfold(1, 2, 2).unfold(2, 2, 2)
        x = windows.mean((-1, -2)) if self.mistake == "mean pool" else windows.amax((-1, -2))
        x = self.block3(self.block2(self.block1(x)))
        if self.mistake != "flattened as NHWC":
            x = x.permute(0, 3, 1, 2)
        x = x.reshape(x.shape[0], -1) @ self.hidden_w + self.hidden_b
        x = torch.tanh(x) if self.mistake == "tanh" else x.clamp(min=0)
        return x @ self.head_w if self.mistake == "no bias" else x @ self.head_w + self.head_b


MISTAKES: dict[str, tuple[str, ...]] = {
    "BatchNorm with eps 1e-3": ("block1.norm1", "eps"),
    "BatchNorm in training mode": ("block2.norm2", "training"),
    "BatchNorm with mean and variance swapped": ("block1.norm2", "swapped"),
    "BatchNorm without the square root": ("block3.norm1", "deviation for variance"),
    "BatchNorm without its shift": ("block2.side_norm", "no shift"),
    "padding at the end, as 'SAME' with stride 2": ("block2.first", "pads at the end"),
    "padding after the convolution": ("block3.second", "pads afterwards"),
    "reflecting padding": ("block1.first", "reflects"),
    "a kernel flipped": ("block3.first", "flipped"),
    "height and width of a kernel swapped": ("block1.second", "turned"),
    "inputs and outputs of a kernel swapped": ("block3.second", "in for out"),
    "a stride that begins at one": ("block2.first", "odd ones"),
    "a kernel dilated": ("stem", "dilated"),
    "no bias in the stem": ("stem", "no bias"),
    "two kernels swapped": ("block3", "kernels swapped", "block3.first", "block3.second"),
    "no relu": ("block1", "no relu", "block1.second"),
    "relu clipped at 1": ("block1", "relu6"),
    "relu before the sum": ("block3", "relu before the sum"),
    "no skip": ("block1", "no skip"),
    "BGR for RGB": ("", "BGR", "stem"),
    "mean for max pooling": ("", "mean pool"),
    "flattened as NHWC": ("", "flattened as NHWC"),
    "tanh for relu": ("", "tanh"),
    "no bias in the head": ("", "no bias"),
}


def ported(reference: Net, mistakes: dict[str, str] | None = None) -> Port:
    """A port with the reference's weights; `mistakes` are planted by address."""
    port = Port()

    def conv(ours: nn.Conv2d, theirs: Conv) -> None:
        theirs.kernel.copy_(ours.weight.permute(2, 3, 1, 0))
        if ours.bias is not None and theirs.bias is not None:
            theirs.bias.copy_(ours.bias)

    def norm(ours: nn.BatchNorm2d, theirs: Norm) -> None:
        theirs.scale.copy_(ours.weight)
        theirs.shift.copy_(ours.bias)
        assert ours.running_mean is not None
        assert ours.running_var is not None
        theirs.mean.copy_(ours.running_mean)
        theirs.var.copy_(ours.running_var)

    with torch.no_grad():
        conv(reference.stem, port.stem)
        norm(reference.bn, port.stem_norm)
        for number in (1, 2, 3):
            layer, block = getattr(reference, f"layer{number}"), getattr(port, f"block{number}")
            conv(layer.conv1, block.first)
            conv(layer.conv2, block.second)
            norm(layer.bn1, block.norm1)
            norm(layer.bn2, block.norm2)
            if layer.down is not None:
                conv(layer.down[0], block.side)
                norm(layer.down[1], block.side_norm)
        port.hidden_w.copy_(reference.hidden.weight.T)
        port.hidden_b.copy_(reference.hidden.bias)
        port.head_w.copy_(reference.head.weight.T)
        port.head_b.copy_(reference.head.bias)
    for address, mistake in (mistakes or {}).items():
        port.get_submodule(address).mistake = mistake  # type: ignore[assignment]
    return port.eval()


def example() -> tuple[Net, Tensor]:
    """The reference with random weights and statistics, and an input in NCHW."""
    torch.manual_seed(1)
    model = Net().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.3, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return model, torch.randn(2, 3, 16, 16)


def candidate_input(x: Tensor) -> Tensor:
    """What the port is given."""
    return x.permute(0, 2, 3, 1).contiguous()
