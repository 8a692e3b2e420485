"""Other values for an argument: tensors like a given one, with other elements."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from torchlens._recording.wrappers import inner_of, local_value, with_inner
from torchlens._replay.values import has_elements

Tensor = torch.Tensor
Number = int | float
_NUM_RANDOM = 8191
# Indices and counts may not grow far beyond what they were: a kernel of somebody's own does not
# check the one, and a `repeat_interleave` takes all the memory for the other.
_MAX_GROWTH = 64


class Changes:
    """Makes other values, always the same ones for one seed.

    `is_wild` allows values of any kind; otherwise they stay within the range of those that there
    were.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def of(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number], is_wild: bool
    ) -> Iterator[Tensor]:
        """Tensors like `value`, the plainest change first; those that its kind does not allow are
        left out.

        `others` and `numbers` are the arguments beside it: what it may be compared with.
        """
        if inner_of(value) is not None:  # arithmetic on a DTensor needs the other processes
            for changed in self.of(
                local_value(value), [local_value(other) for other in others], numbers, is_wild
            ):
                yield with_inner(value, changed)
            return
        for make in self._recipes(value.detach(), others, numbers, is_wild):
            try:
                yield make()
            except (
                NotImplementedError,
                RuntimeError,
                TypeError,
                ValueError,
            ):  # numbers that torch can hold but not make
                continue

    def partner(self, value: Tensor, style: int) -> Tensor:
        """Some other tensor, for an argument beside the one in question: one that hides little.

        Finite, and not all alike; masks that let all pass, none, or some, by `style`.
        """
        if inner_of(value) is not None:
            return with_inner(value, self.partner(local_value(value), style))
        value = value.detach()
        if _is_whole(value):
            return next(self.of(value, (), (), False), value)
        if value.dtype is torch.bool:
            return (~value, torch.ones_like(value), torch.zeros_like(value), self._coins(value))[
                style % 4
            ]
        if value.is_floating_point() or value.is_complex():
            noise = self._noise(value)
            if style % 4 == 0:
                return next(self.of(value, (), (), False), value)
            return (noise.abs() if style % 4 == 2 else noise * 0.1 if style % 4 == 3 else noise).to(
                value.dtype
            )
        if style % 4 == 0:
            return next(self.of(value, (), (), False), value)
        low, high = _range(value.long())
        return torch.randint(low, high + 2, value.shape, generator=self._generator).to(
            value.device, value.dtype
        )

    # -- by kind
    # ----------------------------------------------------------------------------------------------

    def _recipes(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number], is_wild: bool
    ) -> Iterator[Callable[[], Tensor]]:
        if _is_whole(value):
            yield from self._whole(value)
        elif value.dtype is torch.bool:
            yield lambda: ~value
            yield lambda: torch.ones_like(value)
            yield lambda: torch.zeros_like(value)
            yield lambda: self._coins(value)
        elif value.is_floating_point() or value.is_complex():
            yield from self._floats(value, others, numbers, is_wild)
        else:
            yield from self._integers(value, others, numbers, is_wild)

    def _floats(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number], is_wild: bool
    ) -> Iterator[Callable[[], Tensor]]:
        dtype = value.dtype
        if dtype.itemsize == 1 or dtype is torch.complex32:  # these know no arithmetic
            value = value.to(torch.complex64 if dtype.is_complex else torch.float32)
        spread = _spread(value)
        yield lambda: torch.add(value, self._noise(value), alpha=spread).to(dtype)
        if not is_wild:
            yield lambda: self._shuffled(value).to(dtype)
            yield lambda: (value * 0.5).to(dtype)
            return
        yield lambda: (self._noise(value) * 1000 * spread).to(dtype)
        yield lambda: torch.full_like(value, torch.nan).to(dtype)
        yield lambda: (-value).to(dtype)
        yield lambda: torch.where(self._coins(value), torch.full_like(value, torch.nan), value).to(
            dtype
        )
        yield lambda: torch.full_like(value, torch.inf).to(dtype)
        yield lambda: torch.full_like(value, -torch.inf).to(dtype)
        yield lambda: torch.zeros_like(value).to(dtype)
        yield lambda: self._noise(value).to(dtype)  # finite, where it was not
        for change in self._likenesses(value, others, numbers):
            yield partial(_typed, change, dtype)

    def _integers(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number], is_wild: bool
    ) -> Iterator[Callable[[], Tensor]]:
        dtype, value = value.dtype, value.long()  # unsigned types know little arithmetic
        low, high = _range(value)
        if low == high:
            yield lambda: (value + (1 if low == 0 else -1)).to(dtype)
        else:
            yield lambda: (value.max() - value + value.min()).to(dtype)
            yield lambda: torch.randint(low, high + 1, value.shape, generator=self._generator).to(
                value.device, dtype
            )
            yield lambda: torch.full_like(value, low, dtype=dtype)
            yield lambda: torch.full_like(value, high, dtype=dtype)
        yield lambda: self._shuffled(value).to(dtype)
        if low <= 0 <= high or is_wild:
            yield lambda: torch.zeros_like(value, dtype=dtype)
        if is_wild:
            for change in self._likenesses(value, others, numbers):
                yield partial(_typed, change, dtype)
        elif (
            value.device.type == "cpu"
        ):  # elsewhere, an index out of range is the end of the process
            near = [
                n
                for n in numbers
                if isinstance(n, int) and low - _MAX_GROWTH <= n <= high + _MAX_GROWTH
            ]
            for change in self._likenesses(value, (), near):
                yield partial(_typed, change, dtype)
        if value.device.type == "cpu":
            yield lambda: (value + 1).to(dtype)
            yield lambda: (-1 - value).to(dtype)

    def _likenesses(
        self, value: Tensor, others: Sequence[Tensor], numbers: Sequence[Number]
    ) -> Iterator[Callable[[], Tensor]]:
        """With some elements equal to what they may be compared with, or just beside it."""
        for number in numbers:
            yield partial(self._mixed, value, number)
            for step in (0, 1, -1):
                yield partial(torch.full_like, value, number + step)
        for other in others:
            if not has_elements(other) or _is_whole(other):
                continue
            if other.dtype in (torch.int32, torch.int64) and other.dtype == value.dtype:
                for bound in (
                    int(other.max()) + 1,
                    int(other.min()) - 1,
                    int(other.reshape(-1)[0]),
                ):
                    yield partial(torch.full_like, value, bound)
            if _is_broadcastable(other, value):
                for step in (0, 1, -1):
                    yield partial(self._mixed, value, other.detach().to(value) + step)

    def _mixed(self, value: Tensor, other: Tensor | Number) -> Tensor:
        """Some elements of `value`, the rest of `other`."""
        return torch.where(
            self._coins(value),
            torch.as_tensor(other, dtype=value.dtype, device=value.device),
            value,
        )

    def _whole(self, value: Any) -> Iterator[Callable[[], Tensor]]:
        """For tensors that are more than their elements."""
        if value.is_quantized:
            yield lambda: _requantized(value, value.int_repr() ^ 1)
            yield lambda: _requantized(value, self._shuffled(value.int_repr()))
        elif hasattr(value, "__tensor_flatten__") and not value.is_nested:
            yield lambda: self._rebuilt(value)
        else:
            yield lambda: value * 1.5
            yield lambda: value * float("nan")
            yield lambda: -value

    def _rebuilt(self, value: Any) -> Tensor:
        """A tensor of somebody's own kind, made of parts of which each is changed."""
        names, context = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        changed = {
            name: next(self.of(part, (), (), False), part) if has_elements(part) else part
            for name, part in inner.items()
        }
        rebuilt: Tensor = type(value).__tensor_unflatten__(
            changed, context, value.size(), value.stride()
        )
        return rebuilt

    # -- chance
    # ----------------------------------------------------------------------------------------------

    def _noise(self, value: Tensor) -> Tensor:
        """Noise in the shape of `value`: a few thousand numbers over and over, for making them is
        what costs time.
        """
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


def _typed(make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return make().to(dtype)


def numbers_in(frozen: Any) -> list[Number]:
    """The numbers among the arguments of a call, as they were set aside."""
    if isinstance(frozen, int | float) and not isinstance(frozen, bool):
        return [frozen] if abs(frozen) < 2**31 or frozen in (torch.inf, -torch.inf) else []
    items = getattr(frozen, "items", frozen)
    if isinstance(items, dict):
        items = tuple(items.values())
    return (
        [number for item in items for number in numbers_in(item)]
        if isinstance(items, list | tuple)
        else []
    )


def _is_whole(value: Tensor) -> bool:
    is_own_kind = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return value.is_nested or value.layout is not torch.strided or value.is_quantized or is_own_kind


def _requantized(value: Tensor, elements: Tensor) -> Tensor:
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch._make_per_tensor_quantized_tensor(
            elements, value.q_scale(), value.q_zero_point()
        )
    return torch._make_per_channel_quantized_tensor(
        elements,
        value.q_per_channel_scales(),
        value.q_per_channel_zero_points(),
        value.q_per_channel_axis(),
    )


def _spread(value: Tensor) -> float:
    sample = value.reshape(-1)[:_NUM_RANDOM]
    finite = sample[torch.isfinite(sample)]
    return (float(finite.abs().float().mean()) if len(finite) else 0.0) or 1.0


def _range(value: Tensor) -> tuple[int, int]:
    low, high = (min(max(int(bound), -(2**62)), 2**62) for bound in (value.min(), value.max()))
    return low, high


def _is_broadcastable(other: Tensor, value: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(other.shape, value.shape) == value.shape
    except RuntimeError:
        return False
