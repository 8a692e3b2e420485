"""Takes a small sample of a tensor.

A sample holds 1,024 elements at fixed places, one from each of 1,024 equal stretches of the tensor,
and usually the range of all elements. Sampling does not synchronize CUDA, use a random generator or
write to the user's tensors. Callers disable autograd.

Of a sparse tensor, the stored elements are sampled after `coalesce`, which is slower and
synchronizes CUDA. The other elements are zero.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens._capture.memory.process_memory import memory_at
from torchlens._health.tensor_statistics import has_numbers, stored_values
from torchlens._recording.wrappers import local_value

SAMPLE_SIZE = 1024
PLAIN_TYPES: frozenset[type] = frozenset({torch.Tensor, torch.nn.Parameter})
_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
# torch copies tensors that are not dense in memory to find their range. Above this size, unless
# numpy can read the tensor, only the range of the sample is known.
_MOST_STRIDED = 1 << 14
_MOST_PLANS = 4096
# Types that numpy reads in place, in half the time of torch's calls.
_NUMPY_FLOATS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
# Above this size `torch.aminmax` is faster: numpy reads the elements twice, in one thread.
_MANY = 1 << 16
# The position of each element in its stretch. Even steps could hit the same column of a matrix each
# time.
_JITTER = np.random.Generator(np.random.PCG64(20)).random(SAMPLE_SIZE)

_STRIDED = torch.strided
_smallest, _largest = np.minimum.reduce, np.maximum.reduce  # NaN, if there is one


@dataclass(slots=True, eq=False)
class Plan:
    """How tensors of one shape and layout are sampled."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_elements: int
    places: torch.Tensor | None  # which elements; None: all
    # The elements are dense in memory, perhaps in another order; `places` follow memory order.
    is_flat: bool
    is_contiguous: bool
    has_range: bool  # whether the range of all elements is taken
    by_numpy: bool  # numpy can read the memory and the type
    item_size: int
    numpy_dtype: np.dtype[Any] | None = None
    numpy_places: np.ndarray | None = None  # `places` as offsets in memory
    memory_size: int = 0  # the extent of the tensor in memory, in elements
    # If not `is_flat`: shape and strides (in bytes) without the axes of stride 0.
    spread: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    # By axis, computed on demand: the unit (channel, feature) of each element of the sample, and
    # the number of elements of each unit.
    units: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def in_memory_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in the order in which they lie, if they are dense in memory."""
        own = tensor.detach()
        is_as_it_lies = self.is_contiguous or not self.is_flat
        return own if is_as_it_lies else own.as_strided((self.num_elements,), (1,))

    def units_of_sample(self, axis: int | None = None) -> tuple[np.ndarray, np.ndarray] | None:
        """The unit (channel or feature) of each element of a sample, and the number of elements of
        each unit. The default axis is the second of four or more, otherwise the last.
        """
        num_axes = len(self.shape)
        if num_axes < 2:
            return None
        if axis is None or not -num_axes <= axis < num_axes:
            axis = 1 if num_axes >= 4 else -1
        axis %= num_axes
        if axis not in self.units:
            places = (
                np.arange(self.num_elements) if self.places is None else self.places.cpu().numpy()
            )
            stride = self.strides[axis] if self.is_flat else prod(self.shape[axis + 1 :])
            unit_of = places // max(stride, 1) % self.shape[axis]
            self.units[axis] = unit_of, np.bincount(unit_of, minlength=self.shape[axis])
        return self.units[axis]


@dataclass(slots=True, eq=False)
class Sample:
    """A few elements of a tensor, and the range of all (None if only that of the sample is
    known).
    """

    values: Any
    low: Any
    high: Any
    plan: Plan
    num_absent: int = 0  # zeros that a sparse tensor does not store


class Sampler:
    """Takes samples, with a cached plan for each shape and layout."""

    # Tests set this to False to exercise the path of other devices.
    uses_numpy = True

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    def take(self, tensor: torch.Tensor, wants_range: bool = True) -> Sample | None:
        """A sample; None if the tensor cannot be sampled. Call it under `call_unseen`."""
        if (
            type(tensor) not in PLAIN_TYPES
            or tensor.layout is not _STRIDED
            or tensor.dtype not in _FLOATS
        ):
            return self._take_of_stored(tensor, wants_range)
        key = (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            None if tensor.is_cpu else tensor.device,
        )
        plan = self._plans.get(key) or self._new_plan(key, tensor)
        if plan is None:
            return None
        # Freed storage has address 0: torch raises an error, numpy would read invalid memory.
        if plan.by_numpy and not tensor.is_neg():
            address = tensor.data_ptr()
            if address != tensor.storage_offset() * plan.item_size:
                return self._take_by_numpy(tensor, address, plan, wants_range)
        return self._take_by_torch(tensor, plan, wants_range)

    def _new_plan(self, key: Any, tensor: torch.Tensor) -> Plan | None:
        if not tensor.numel() or tensor.is_meta:
            return None
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[key] = _plan(tensor, self.uses_numpy)
        return plan

    def _take_by_torch(self, tensor: torch.Tensor, plan: Plan, wants_range: bool) -> Sample:
        flat = plan.in_memory_order(tensor)
        if plan.places is None:
            return Sample(flat.flatten().clone(), None, None, plan)
        low = high = None
        # The range comes first: it reads the elements in order, into the cache.
        if wants_range and plan.has_range:
            low, high = torch.aminmax(flat)
        return Sample(torch.take(flat, plan.places), low, high, plan)

    def _take_of_stored(self, tensor: torch.Tensor, wants_range: bool) -> Sample | None:
        found = _plain(tensor)
        if found is None:
            return None
        plain, num_absent = found
        sample = self.take(plain, wants_range)
        if sample is not None:
            sample.num_absent = num_absent
        return sample

    def _take_by_numpy(
        self, tensor: torch.Tensor, address: int, plan: Plan, wants_range: bool
    ) -> Sample:
        flat: np.ndarray = np.ndarray(plan.memory_size, plan.numpy_dtype, memory_at(address))
        places = plan.numpy_places
        if places is None:
            return Sample(flat.copy(), None, None, plan)
        low = high = None
        if wants_range and plan.places is not None:
            if plan.spread is not None:
                spread: np.ndarray = np.ndarray(
                    plan.spread[0], plan.numpy_dtype, flat, strides=plan.spread[1]
                )
                low, high = _smallest(spread, axis=None), _largest(spread, axis=None)
            elif plan.num_elements > _MANY:
                low, high = torch.aminmax(plan.in_memory_order(tensor))
            else:
                low, high = _smallest(flat), _largest(flat)
        # All places are valid; "clip" skips numpy's check of bounds.
        return Sample(flat.take(places, mode="clip"), low, high, plan)


def _plain(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """(tensor to sample, number of elements not stored) of a tensor with an unusual class, layout
    or dtype; None if it cannot be sampled."""
    if not has_numbers(tensor):
        return None
    whole, stored = local_value(tensor), stored_values(tensor)
    num_absent = 0 if whole.is_nested else whole.numel() - stored.numel()
    if stored.is_complex():
        stored, num_absent = torch.view_as_real(stored.resolve_conj()), 2 * num_absent
    if stored.dtype not in _FLOATS:  # types that support few operations
        stored = stored.float()
    return stored.as_subclass(torch.Tensor), num_absent


def _plan(tensor: torch.Tensor, uses_numpy: bool) -> Plan:
    count = tensor.numel()
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    is_contiguous = tensor.is_contiguous()
    is_flat = is_contiguous or _lies_side_by_side(shape, strides)
    dtype = _NUMPY_FLOATS.get(tensor.dtype)
    by_numpy = uses_numpy and tensor.is_cpu and dtype is not None
    size = tensor.element_size()
    numpy_places = None if count <= SAMPLE_SIZE else _places_of_sample(count)
    places = None if numpy_places is None else torch.from_numpy(numpy_places).to(tensor.device)
    memory_size, spread = count, None
    if not is_flat:
        sampled = np.arange(count) if numpy_places is None else numpy_places
        numpy_places = np.array(strides) @ np.array(np.unravel_index(sampled, shape))
        memory_size, spread = _spread(shape, strides, size)
    has_range = is_flat or by_numpy or count <= _MOST_STRIDED
    return Plan(
        shape, strides, count, places, is_flat, is_contiguous, has_range, by_numpy, size, dtype,
        numpy_places, memory_size,
        spread,
    )  # fmt: skip


def _spread(
    shape: tuple[int, ...], strides: tuple[int, ...], item_size: int
) -> tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The extent in memory, in elements; and shape and strides, in bytes, without the axes of
    stride 0.
    """
    axes = [axis for axis in zip(shape, strides, strict=True) if axis[1]]
    memory_size = 1 + sum((length - 1) * stride for length, stride in axes)
    lengths, steps = (tuple(axis[part] for axis in axes) for part in (0, 1))
    return memory_size, (lengths, tuple(step * item_size for step in steps))


def _places_of_sample(count: int) -> np.ndarray:
    """Which of `count` elements a sample has."""
    numbers = ((np.arange(SAMPLE_SIZE) + _JITTER) * (count / SAMPLE_SIZE)).astype(np.int64)
    places: np.ndarray = np.minimum(numbers, count - 1)
    return places


def _lies_side_by_side(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class _Copy:
    """Small tensors of one device, copied to the host in one transfer."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        joined = torch.cat([tensor.reshape(-1).to(torch.float32) for tensor in tensors])
        self._event: Any = None
        if joined.device.type == "cuda":
            host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
            host.copy_(joined, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(joined.device))
        else:
            host = joined.to("cpu")
        self._parts = host.split([tensor.numel() for tensor in tensors])

    def part(self, number: int) -> torch.Tensor:
        """One of the tensors. Waits for the copy: not for the training thread."""
        if self._event is not None:
            self._event.synchronize()
        return self._parts[number]


class _Arriving(NamedTuple):
    """A part of a running copy."""

    copy: _Copy
    number: int


def to_host(samples: list[Sample], every_device: bool = False) -> None:
    """Starts copying samples to the host, with one transfer per device."""
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


def value_of(part: Any) -> Any:
    """A part of a sample (array, number or host tensor). Waits if it is still being copied."""
    return part.copy.part(part.number) if isinstance(part, _Arriving) else part
