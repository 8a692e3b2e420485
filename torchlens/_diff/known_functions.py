"""Well-known functions that a layer may compute by mistake, such as another activation."""

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch.nn import functional as F

Tensor = torch.Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "the exact gelu": F.gelu,
    "gelu's tanh form": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu, x * sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "selu": F.selu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "leaky relu (0.01)": lambda x: F.leaky_relu(x, 0.01),
    "leaky relu (0.1)": lambda x: F.leaky_relu(x, 0.1),
    "leaky relu (0.2)": lambda x: F.leaky_relu(x, 0.2),
    "relu squared": lambda x: torch.relu(x).square(),
    "nothing": lambda x: x,
    "exp": torch.exp,
}

_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def norm_variants(
    x: Tensor, scale: Tensor | None, shift: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    """Variants of normalisation: axes, eps, with or without the mean, scale and shift."""
    affine = {
        "": (scale, shift),
        " without its scale": (None, shift),
        " without its shift": (scale, None),
        " without scale and shift": (None, None),
    }
    for axes in _norm_axes(x):
        over = "" if axes == (x.dim() - 1,) else f" over the axes {' '.join(map(str, axes))}"
        count = math.prod(x.shape[axis] for axis in axes)
        divisors = {"": count, " with the unbiased variance": max(count - 1, 1)}
        means = {"layer norm": x.mean(axes, keepdim=True), "RMS norm": torch.zeros(())}
        for (name, mean), (kind, divisor), eps in product(means.items(), divisors.items(), _EPS):
            squares = (x - mean).square().sum(axes, keepdim=True)
            normal = (x - mean) * torch.rsqrt(squares / divisor + eps)
            for how, parts in affine.items():
                value = _scaled(normal, *parts)
                if value is not None:
                    yield f"{name}{over}{kind}{how}, eps {eps:g}", value


def _norm_axes(x: Tensor) -> list[tuple[int, ...]]:
    last = (x.dim() - 1,)
    others = [(axis,) for axis in range(x.dim() - 1)]
    return [last, *others, tuple(range(1, x.dim()))][: 5 if x.dim() > 1 else 1]


def _scaled(normal: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor | None:
    for part in (scale, shift):
        if part is not None and (part.dim() != 1 or normal.shape[-1] != part.numel()):
            return None
    value = normal if scale is None else normal * scale
    return value if shift is None else value + shift


def attention_variants(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Variants of attention, with queries, keys and values of shape (..., length, size)."""
    k, v = _shared_by_heads(q, k), _shared_by_heads(q, v)
    if not _fit_together(q, k, v):
        return
    orders = {"": (q, k)}
    if q.shape == k.shape:
        orders[" with queries and keys swapped"] = (k, q)
    scales = _attention_scales(q)
    axes = {"": -1, " with softmax over the queries": -2}
    if q.dim() > 3:
        axes[" with softmax over the heads"] = -3
    for (swapped, (first, second)), (scaled, factor) in product(orders.items(), scales.items()):
        scores = first @ second.transpose(-1, -2) * factor
        masks = _masks(scores, q.shape[-2] == k.shape[-2])
        for (masked, mask), (over, axis) in product(masks.items(), axes.items()):
            hidden = float("-inf") if axis == -1 else -1e9
            own = scores if mask is None else scores.masked_fill(mask, hidden)
            yield f"attention{swapped}{scaled}{masked}{over}", torch.softmax(own, dim=axis) @ v


def _fit_together(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if queries, keys and values have shapes with which attention can be computed."""
    if q.dim() < 3 or k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        return False
    return q.shape[:-2] == k.shape[:-2] == v.shape[:-2]


def _attention_scales(q: Tensor) -> dict[str, float]:
    size = q.shape[-1]
    width = size * q.shape[-3] if q.dim() > 3 else size
    return {
        "": 1 / math.sqrt(size),
        " without 1/sqrt(d)": 1.0,
        " scaled by 1/d": 1 / size,
        f" scaled by 1/sqrt({width}), the whole width": 1 / math.sqrt(width),
    }


def _shared_by_heads(q: Tensor, part: Tensor) -> Tensor:
    """Keys or values, repeated if several heads of the queries share them."""
    if q.dim() <= 3 or part.dim() != q.dim():
        return part
    return part.repeat_interleave(max(q.shape[-3] // part.shape[-3], 1), dim=-3)


def _masks(scores: Tensor, is_square: bool) -> dict[str, Tensor | None]:
    if not is_square:
        return {" without a mask": None}
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    itself = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(0)
    itself[0, 0] = False
    return {
        " with the causal mask": ahead,
        " without a mask": None,
        " with a causal mask that hides the place itself": itself,
        " with the mask the wrong way round": ahead.T,
    }
