"""Takes a small sample of a tensor, in a few microseconds whatever its size.

1,024 elements at fixed places, one from each of 1,024 equal stretches of the tensor's memory at a fixed distance from its
beginning, and the smallest and largest of all elements. Nothing is waited for (on CUDA), no generator of random numbers is
touched, no tensor of the user's is written to, and autograd sees nothing: callers switch it off.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchlens.capture.valueless import why_valueless
from torchlens.capture.wrappers import local_value

__all__ = ["SAMPLE_SIZE", "Plan", "Sample", "Sampler", "to_host"]

SAMPLE_SIZE = 1024
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
# Tensors whose elements do not lie side by side are read ten times as slowly: of larger ones, the range is the sample's.
_MOST_STRIDED = 1 << 14
_MOST_PLANS = 4096
# Where in its stretch each element is taken from. Even steps would meet the same column of a matrix again and again.
_JITTER = np.random.Generator(np.random.PCG64(20)).random(SAMPLE_SIZE)


@dataclass(slots=True, eq=False)
class Plan:
    """How tensors of one shape and layout are sampled."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_elements: int
    places: torch.Tensor | None  # which elements; None: all
    is_flat: bool  # the elements lie side by side in memory, though perhaps in another order
    is_contiguous: bool
    has_range: bool  # whether the range of all elements is asked for
    units: np.ndarray | None = None  # which unit (channel, feature) each element of the sample belongs to, made on demand
    unit_sizes: np.ndarray | None = None  # how many elements of the sample each unit has, made with it

    def units_of_sample(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The unit that each element of a sample belongs to, and how many elements each has: channels, or features."""
        if len(self.shape) < 2:
            return None
        axis = 1 if len(self.shape) >= 4 else len(self.shape) - 1
        if self.units is None or self.unit_sizes is None:
            places = np.arange(self.num_elements) if self.places is None else self.places.cpu().numpy()
            strides = self.strides if self.is_flat else _contiguous_strides(self.shape)
            self.units = places // max(strides[axis], 1) % self.shape[axis]
            self.unit_sizes = np.bincount(self.units, minlength=self.shape[axis])
        return self.units, self.unit_sizes


# In place of a plan that was not made yet.
_UNKNOWN = Plan((), (), 0, None, False, False, False)


class Sample:
    """A few elements of a tensor, and the range of all (None if only the sample's own is known)."""

    __slots__ = ("high", "low", "plan", "values")

    def __init__(self, values: Any, low: Any, high: Any, plan: Plan) -> None:
        self.values = values
        self.low = low
        self.high = high
        self.plan = plan


class Sampler:
    """Takes samples, and remembers how for each shape and layout."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan | None] = {}

    def take(self, tensor: torch.Tensor, wants_range: bool = True) -> Sample | None:
        """A sample; None if there are no numbers to look at. Call it with autograd and `__torch_function__` off."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.dtype not in _FLOATS:
            plain = _plain(tensor)
            if plain is None:
                return None
            tensor = plain
        device = tensor.device
        key = (tensor.shape, tensor.stride(), None if device.type == "cpu" else device)
        plan = self._plans.get(key, _UNKNOWN)
        if plan is _UNKNOWN:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = _plan(tensor)
        if plan is None:
            return None
        flat = tensor if plan.is_contiguous or not plan.is_flat else tensor.as_strided((plan.num_elements,), (1,))
        values = flat.flatten().clone() if plan.places is None else torch.take(flat, plan.places)
        if not wants_range or not plan.has_range or plan.places is None:
            return Sample(values, None, None, plan)
        low, high = torch.aminmax(flat)
        return Sample(values, low, high, plan)


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """What is to be sampled of a tensor that is not strided, not of the common types or not of the common numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or why_valueless(tensor) is not None:
        return None
    tensor = local_value(tensor)
    if tensor.is_nested:
        tensor = tensor.values() if tensor.layout is torch.jagged else tensor.view(-1)
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in _FLOATS:  # numbers of 8 bits, which little can be done with
        tensor = tensor.float()
    return tensor.as_subclass(torch.Tensor)


def _plan(tensor: torch.Tensor) -> Plan | None:
    count = tensor.numel()
    if count == 0:
        return None
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    is_contiguous = tensor.is_contiguous()
    is_flat = is_contiguous or _lies_side_by_side(shape, strides)
    places = None
    if count > SAMPLE_SIZE:
        stretch = count / SAMPLE_SIZE
        numbers = ((np.arange(SAMPLE_SIZE) + _JITTER) * stretch).astype(np.int64)
        places = torch.from_numpy(np.minimum(numbers, count - 1)).to(tensor.device)
    return Plan(shape, strides, count, places, is_flat, is_contiguous, is_flat or count <= _MOST_STRIDED)


def _lies_side_by_side(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class _Copy:
    """Many small tensors of one device on their way to the host, in one piece."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        device = tensors[0].device
        self._sizes = [tensor.numel() for tensor in tensors]
        joined = torch.cat([tensor.reshape(-1).to(torch.float32) for tensor in tensors])
        self._event: Any = None
        if device.type == "cuda":
            self._host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            self._host.copy_(joined, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._host = joined.to("cpu")
        self._parts: list[torch.Tensor] | None = None

    def part(self, number: int) -> torch.Tensor:
        """One of them, as soon as it is there. Not for the thread that trains: it waits."""
        if self._parts is None:
            if self._event is not None:
                self._event.synchronize()
            self._parts = list(self._host.split(self._sizes))
        return self._parts[number]


class _Arriving:
    """A small tensor that is being copied."""

    __slots__ = ("_copy", "_number")

    def __init__(self, copy: _Copy, number: int) -> None:
        self._copy = copy
        self._number = number

    def get(self) -> torch.Tensor:
        return self._copy.part(self._number)


def to_host(samples: list[Sample], every_device: bool = False) -> None:
    """Has the samples that lie on another device copied to this one: one copy for each device, and nobody waits for it."""
    by_device: dict[torch.device, list[tuple[Sample, str, torch.Tensor]]] = {}
    for sample in samples:
        values = sample.values
        if isinstance(values, torch.Tensor) and (every_device or values.device.type != "cpu"):
            own = by_device.setdefault(values.device, [])
            own.append((sample, "values", values))
            if sample.low is not None:
                own += [(sample, "low", sample.low), (sample, "high", sample.high)]
    for parts in by_device.values():
        copy = _Copy([tensor for _, _, tensor in parts])
        for number, (sample, name, _) in enumerate(parts):
            setattr(sample, name, _Arriving(copy, number))


def value_of(part: Any) -> torch.Tensor:
    """A part of a sample that may still be arriving."""
    return part.get() if isinstance(part, _Arriving) else part
