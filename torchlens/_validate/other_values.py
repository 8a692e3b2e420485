"""Other values for an argument: tensors like a given one, with other elements."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from torchlens._recording.wrappers import inner_of, local_value, with_inner
from torchlens._replay.values import has_elements

Tensor = torch.Tensor
Number = int | float
Recipe = Callable[[], Tensor]
_NUM_RANDOM = 8191


class Changes:
    """Makes other values, always the same ones for one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def of(
        self,
        value: Tensor,
        others: Sequence[Tensor] = (),
        numbers: Sequence[Number] = (),
        is_wild: bool = False,
    ) -> Iterator[Tensor]:
        """Tensors like `value`, the plainest change first; those that its kind does not allow are
        left out.

        `others` and `numbers` are the arguments beside it, which it may be compared with. Only if
        `is_wild`, the elements may leave the range of the present ones.
        """
        if inner_of(value) is not None:  # arithmetic on a DTensor needs the other processes
            local = [local_value(other) for other in others]
            for changed in self.of(local_value(value), local, numbers, is_wild):
                yield with_inner(value, changed)
            return
        for make in self._recipes(value.detach(), others, numbers, is_wild):
            try:
                yield make()
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                continue  # torch does not compute with elements of this type

    def beside(self, value: Tensor, style: int) -> Tensor:
        """Another tensor for an argument beside the one in question: one that hides little.

        Finite, and not all alike; masks that let all pass, none, or some, by `style`.
        """
        if inner_of(value) is not None:
            return with_inner(value, self.beside(local_value(value), style))
        value, style = value.detach(), style % 4
        if _is_composite(value) or (style == 0 and value.dtype is not torch.bool):
            return next(self.of(value), value)
        if value.dtype is torch.bool:
            return self._booleans(value)[style]()
        if value.is_floating_point() or value.is_complex():
            noise = self._noise(value)
            return (noise, noise.abs(), noise * 0.1)[style - 1].to(value.dtype)
        low, high = _range(value.long())
        return self._integers_between(value, low, high + 1)

    # -- by kind
    # ---------------------------------------------------------------------------------------------

    def _recipes(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number], is_wild: bool
    ) -> Iterator[Recipe]:
        """Each is made when it is needed: the first one nearly always does."""
        if _is_composite(value):
            yield from self._composites(value)
        elif value.dtype is torch.bool:
            yield from self._booleans(value)
        elif value.is_floating_point() or value.is_complex():
            yield from self._floats(value, is_wild)
        else:
            yield from self._integers(value, is_wild)
        if is_wild and value.dtype is not torch.bool and not _is_composite(value):
            yield from self._compared(value, others, numbers)

    def _booleans(self, value: Tensor) -> list[Recipe]:
        return [
            lambda: ~value,
            lambda: torch.ones_like(value),
            lambda: torch.zeros_like(value),
            lambda: self._coins(value),
        ]

    def _floats(self, value: Tensor, is_wild: bool) -> list[Recipe]:
        dtype = value.dtype
        if dtype.itemsize == 1 or dtype is torch.complex32:  # torch has no arithmetic for these
            value = value.to(torch.complex64 if dtype.is_complex else torch.float32)
        spread = _spread(value)
        noise = [lambda: torch.add(value, self._noise(value), alpha=spread).to(dtype)]
        if not is_wild:
            return [*noise, lambda: self._shuffled(value).to(dtype), lambda: (value / 2).to(dtype)]
        constants = (torch.nan, torch.inf, -torch.inf, 0)
        half_nan = lambda: torch.where(self._coins(value), torch.nan, value).to(dtype)  # noqa: E731
        return [
            *noise,
            lambda: (self._noise(value) * 1000 * spread).to(dtype),
            *(partial(_filled, value, constant, dtype) for constant in constants),
            half_nan,
            lambda: (-value).to(dtype),
            lambda: self._noise(value).to(dtype),  # finite, where it was not
        ]

    def _integers(self, value: Tensor, is_wild: bool) -> list[Recipe]:
        dtype, value = value.dtype, value.long()  # unsigned types have little arithmetic
        low, high = _range(value)
        made: list[Recipe] = [
            lambda: (low + high - value if low < high else value + (1 if low == 0 else -1)).to(
                dtype
            ),
            lambda: self._integers_between(value, low, high).to(dtype),
            partial(_filled, value, low, dtype),
            partial(_filled, value, high, dtype),
            lambda: self._shuffled(value).to(dtype),
        ]
        if low <= 0 <= high or is_wild:
            made.append(partial(_filled, value, 0, dtype))
        if value.device.type == "cpu":  # elsewhere, an index out of range ends the process
            made += [lambda: (value + 1).to(dtype), lambda: (-1 - value).to(dtype)]
        return made

    def _compared(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number]
    ) -> Iterator[Recipe]:
        """With some elements equal to what they may be compared with, or just beside it."""
        for number in numbers:
            yield partial(self._mixed, value, number)
            for step in (0, 1, -1):
                yield partial(_filled, value, number + step, value.dtype)
        for other in others:
            if not has_elements(other) or _is_composite(other):
                continue
            if other.dtype == value.dtype in (torch.int32, torch.int64):
                low, high = _range(other)
                yield partial(_filled, value, low - 1, value.dtype)
                yield partial(_filled, value, high + 1, value.dtype)
            if fits_into(other, value):
                for step in (0, 1, -1):
                    yield partial(self._mixed, value, other.detach(), step)

    def _mixed(self, value: Tensor, other: Tensor | Number, step: int = 0) -> Tensor:
        """Some elements of `value`, the rest of `other` plus `step`."""
        other = torch.as_tensor(other, dtype=value.dtype, device=value.device) + step
        return torch.where(self._coins(value), other, value).to(value.dtype)

    def _composites(self, value: Any) -> list[Recipe]:
        """For tensors that are not simply their elements."""
        if value.is_quantized:
            elements = value.int_repr()
            return [
                lambda: _requantized(value, elements ^ 1),
                lambda: _requantized(value, self._shuffled(elements)),
            ]
        if hasattr(value, "__tensor_flatten__") and not value.is_nested:
            return [lambda: self._rebuilt(value)]
        return [lambda: value * 1.5, lambda: value * float("nan"), lambda: -value]

    def _rebuilt(self, value: Any) -> Tensor:
        """A wrapper subclass, with each of its inner tensors changed."""
        names, context = value.__tensor_flatten__()
        changed = {}
        for name in names:
            part = getattr(value, name)
            changed[name] = next(self.of(part), part) if has_elements(part) else part
        size, stride = value.size(), value.stride()
        rebuilt: Tensor = type(value).__tensor_unflatten__(changed, context, size, stride)
        return rebuilt

    # -- chance
    # ---------------------------------------------------------------------------------------------

    def _noise(self, value: Tensor) -> Tensor:
        """Noise in the shape of `value`: a few thousand numbers, repeated, to save time."""
        dtype = torch.complex64 if value.is_complex() else torch.float32
        count = value.numel()
        noise = torch.randn(min(count, _NUM_RANDOM), generator=self._generator, dtype=dtype)
        if count > _NUM_RANDOM:
            noise = noise.repeat(-(-count // _NUM_RANDOM))[:count]
        return noise.reshape(value.shape).to(value.device)

    def _coins(self, value: Tensor) -> Tensor:
        return self._noise(value).real > 0

    def _shuffled(self, value: Tensor) -> Tensor:
        order = torch.randperm(value.numel(), generator=self._generator).to(value.device)
        return value.reshape(-1)[order].reshape(value.shape)

    def _integers_between(self, value: Tensor, low: int, high: int) -> Tensor:
        made = torch.randint(low, high + 1, value.shape, generator=self._generator)
        return made.to(value.device, value.dtype)


def numbers_in(frozen: Any) -> list[Number]:
    """The numbers among the copied arguments of a call."""
    if isinstance(frozen, int | float) and not isinstance(frozen, bool):
        return [frozen] if abs(frozen) < 2**31 or frozen in (torch.inf, -torch.inf) else []
    items = getattr(frozen, "items", frozen)
    if isinstance(items, dict):
        items = tuple(items.values())
    if not isinstance(items, list | tuple):
        return []
    return [number for item in items for number in numbers_in(item)]


def _filled(value: Tensor, number: Number, dtype: torch.dtype) -> Tensor:
    return torch.full_like(value, number).to(dtype)


def _is_composite(value: Tensor) -> bool:
    is_subclass = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return value.is_nested or value.layout is not torch.strided or value.is_quantized or is_subclass


def _requantized(value: Tensor, elements: Tensor) -> Tensor:
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale, zero = value.q_scale(), value.q_zero_point()
        return torch._make_per_tensor_quantized_tensor(elements, scale, zero)
    scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    axis = value.q_per_channel_axis()
    return torch._make_per_channel_quantized_tensor(elements, scales, zeros, axis)


def _spread(value: Tensor) -> float:
    sample = value.reshape(-1)[:_NUM_RANDOM]
    finite = sample[torch.isfinite(sample)]
    return (float(finite.abs().float().mean()) if len(finite) else 0.0) or 1.0


def _range(value: Tensor) -> tuple[int, int]:
    low, high = (min(max(int(bound), -(2**62)), 2**62) for bound in (value.min(), value.max()))
    return low, high


def fits_into(tensor: Tensor, other: Tensor) -> bool:
    """True if broadcasting the tensor to the shape of the other is possible."""
    if tensor.is_nested or other.is_nested:
        return False
    sizes = zip(reversed(tensor.shape), reversed(other.shape), strict=False)
    return tensor.dim() <= other.dim() and all(own in (1, size) for own, size in sizes)
