"""Convolutions, pooling and changes of resolution: what lies in the window of each unit."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from torchlens._receptive.reading import Axis, ReadCall, Reading, everything

Tensor = torch.Tensor


class Window(NamedTuple):
    """The window along one dimension."""

    kernel: int
    stride: int
    before: int  # padding
    dilation: int

    @property
    def span(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def sums(self, tensor: Tensor, dim: int, count: int) -> Tensor:
        """The sum in each of `count` windows along a dimension."""
        after = (count - 1) * self.stride + self.span - self.before - tensor.shape[dim]
        wide = padded(tensor, dim, self.before, after)
        return wide.unfold(dim, self.span, self.stride)[..., :: self.dilation].sum(-1)

    def spread(self, tensor: Tensor, dim: int, count: int) -> Tensor:
        """The opposite: each number goes to all that are in its window, as in a transposed
        convolution.
        """
        apart = F.pad(tensor.movedim(dim, -1).unsqueeze(-1), (0, self.stride - 1)).flatten(-2)
        last = self.span - 1 - self.before
        return self._replace(stride=1, before=last).sums(apart, -1, count).movedim(-1, dim)

    @property
    def axis(self) -> tuple[Fraction, Fraction, Fraction]:
        return Fraction(self.stride), Fraction(-self.before), Fraction(self.span - 1 - self.before)

    @property
    def spread_axis(self) -> tuple[Fraction, Fraction, Fraction]:
        step = Fraction(1, self.stride)
        return step, (self.before - self.span + 1) * step, self.before * step


def padded(tensor: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Zeros before and after, along one dimension."""
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim % tensor.dim()) + [before, after])


def convolution(call: ReadCall) -> Reading:
    """The input of a convolution, transposed or not; other arguments lead to whole channels."""
    weight = call.other_shape(1)
    spatial = len(weight) - 2
    if call.place == (2,):  # the bias
        return Reading(lambda tensor: tensor.reshape(-1, *[1] * spatial), {})
    if call.place != (0,):
        return everything()
    is_transposed = "transpose" in call.kind
    padding = call.option("padding", default=0)
    dilations = _each(call.option("dilation", default=1), spatial)
    if padding == "same":
        padding = [
            dilation * (k - 1) // 2 for k, dilation in zip(weight[2:], dilations, strict=True)
        ]
    befores = _each(0 if padding == "valid" else padding, spatial)
    strides = _each(call.option("stride", default=1), spatial)
    windows = list(map(Window, weight[2:], strides, befores, dilations))
    groups, first = call.option("groups", default=1), len(call.shape) - spatial

    def run(tensor: Tensor) -> Tensor:
        channel = first - 1
        found = tensor.unflatten(channel, (groups, -1)).sum(channel + 1)
        for dim, window in enumerate(windows, first):
            make = window.spread if is_transposed else window.sums
            found = make(found, dim, call.out[dim])
        return found.repeat_interleave(call.out[channel] // groups, channel)

    return Reading(run, _axes(windows, first, is_transposed, batch=first > 1))


def _axes(
    windows: Sequence[Window], first: int, is_transposed: bool = False, batch: bool = True
) -> dict[int, Axis]:
    known = {
        dim: Axis(dim, *(window.spread_axis if is_transposed else window.axis))
        for dim, window in enumerate(windows, first)
    }
    return {0: Axis(0), **known} if batch else known


def pooling(call: ReadCall) -> Reading:
    """A maximum or mean in windows of fixed size."""
    spatial = int(next(filter(str.isdigit, call.kind)))
    kernels = _each(call.option("kernel_size"), spatial)
    strides = _each(call.option("stride", default=kernels) or kernels, spatial)
    befores = _each(call.option("padding", default=0), spatial)
    dilations = _each(call.option("dilation", default=1), spatial)
    windows = list(map(Window, kernels, strides, befores, dilations))
    first = len(call.shape) - spatial

    def run(tensor: Tensor) -> Tensor:
        for dim, window in enumerate(windows, first):
            tensor = window.sums(tensor, dim, call.out[dim])
        return tensor

    leading = {dim: Axis(dim) for dim in range(first)}
    return Reading(run, leading | _axes(windows, first, batch=False))


def adaptive_pooling(call: ReadCall) -> Reading:
    """A maximum or mean in as many windows as are asked for."""
    spatial = int(next(filter(str.isdigit, call.kind)))
    first = len(call.shape) - spatial
    axes = {dim: Axis(dim) for dim in range(first)}
    for dim in range(first, len(call.shape)):
        if call.out[dim] == 1:
            continue
        size, rest = divmod(call.shape[dim], call.out[dim])
        # Windows of several sizes: at most two numbers more than the stride.
        width = size - 1 + 2 * bool(rest)
        stride = Fraction(call.shape[dim], call.out[dim])
        axes[dim] = Axis(dim, stride, Fraction(-bool(rest)), Fraction(width))

    def run(tensor: Tensor) -> Tensor:
        for dim in range(first, len(call.shape)):
            last = tensor.movedim(dim, -1)
            rows = F.adaptive_avg_pool1d(last.reshape(1, -1, last.shape[-1]), call.out[dim])
            tensor = rows.reshape(*last.shape[:-1], -1).movedim(-1, dim)
        return tensor

    return Reading(run, axes)


def resampling(call: ReadCall) -> Reading:
    """Interpolation; it runs as it is, because it is linear."""
    reach = 0 if "nearest" in call.kind else 2 if "cubic" in call.kind else 1
    axes = {0: Axis(0), 1: Axis(1)}
    for dim in range(2, len(call.shape)):
        is_cornered = bool(call.option("align_corners")) and call.out[dim] > 1
        ratio = Fraction(call.shape[dim] - is_cornered, call.out[dim] - is_cornered)
        centre = (ratio - 1) / 2 if reach and not is_cornered else Fraction(0)
        centre = ratio / 2 if "exact" in call.kind else centre
        # The position is rounded down, then so many neighbours are taken on either side.
        low, high = (-reach, reach) if reach else (-1, 0)
        axes[dim] = Axis(dim, ratio, centre + low, centre + high)
    return Reading(_never_zero(call) if reach == 2 else call.again, axes)


def _never_zero(call: ReadCall) -> Callable[[Tensor], Tensor]:
    """Cubic interpolation has negative weights: each number counts differently, so that none
    cancel.
    """
    noise = 1 + torch.rand(call.shape, generator=torch.Generator().manual_seed(0))
    return lambda tensor: call.again(tensor * noise)


def padding(call: ReadCall) -> Reading:
    """Padding by a constant or by the elements near the border."""
    given = [int(size) for size in call.option("pad", "padding", default=())]
    axes = {dim: Axis(dim) for dim in range(len(call.shape))}
    for number, before in enumerate(given[::2]):
        dim = len(call.shape) - 1 - number
        axes[dim] = Axis(dim, Fraction(1), Fraction(-before), Fraction(-before))
    return Reading(call.again, axes)


def _each(value: Any, count: int) -> list[int]:
    """A number, or one for each dimension, as one for each."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    return [int(one) for one in (listed * count if len(listed) == 1 else listed)]
