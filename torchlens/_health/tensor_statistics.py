"""The range of a tensor's values, and whether all are finite."""

import math
import threading
from typing import Any, NamedTuple

import torch

from torchlens._recording.regions import shape_of
from torchlens._recording.wrappers import local_value, why_valueless


class ValueRange(NamedTuple):
    """What the numbers of a tensor are like. `low` and `high` are of the finite ones; None if there
    are none.
    """

    name: str  # which argument, layer or parameter it is
    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None
    high: float | None
    num_elements: int
    num_nan: int
    num_inf: int

    @property
    def is_finite(self) -> bool:
        return not (self.num_nan or self.num_inf)

    @property
    def finite_share(self) -> float:
        return 1 - (self.num_nan + self.num_inf) / self.num_elements if self.num_elements else 1.0

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        kind = f"{shape} {str(self.dtype).removeprefix('torch.')}"
        span = "no finite value" if self.low is None else f"from {self.low:.4g} to {self.high:.4g}"
        return (
            f"{self.name}: {kind}, {span}{_counts(self.num_nan, self.num_inf, self.num_elements)}"
        )


def value_range(name: str, tensor: torch.Tensor) -> ValueRange:
    """Looks at every number of a tensor."""
    values = _numbers_of(tensor.detach())
    num_nan, num_inf = int(values.isnan().sum()), int(values.isinf().sum())
    real = torch.view_as_real(values) if values.is_complex() else values
    finite = real[real.isfinite()] if num_nan or num_inf else real
    # Adding 0 makes 0 of -0.
    low, high = (
        (float(finite.min()) + 0, float(finite.max()) + 0) if finite.numel() else (None, None)
    )
    return ValueRange(
        name, tuple(shape_of(tensor)), tensor.dtype, low, high, values.numel(), num_nan, num_inf
    )


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether it has numbers that may be NaN and that can be looked at."""
    return (tensor.is_floating_point() or tensor.is_complex()) and why_valueless(tensor) is None


def has_plus_infinity(tensor: torch.Tensor) -> bool:
    """Whether some number is infinite and not minus infinity."""
    values = _numbers_of(tensor.detach())
    return bool((values.isinf() if values.is_complex() else values == math.inf).any())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether it has neither NaN nor Inf. Sums, which is cheap, and looks closer only if the sum is
    not finite.
    """
    if not has_numbers(tensor):
        return True
    values = _numbers_of(tensor.detach())
    total = values.sum().item()
    # Large finite numbers may add up to infinity.
    return bool(total - total == 0) or bool(values.isfinite().all())


def _numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """All numbers of a tensor that this process has, in one that is neither sparse nor nested, and
    can be computed with.
    """
    tensor = local_value(tensor)
    if tensor.is_nested:
        return torch.cat([_numbers_of(part).reshape(-1) for part in tensor.unbind()])
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    if tensor.layout is not torch.strided:
        return tensor.values()
    return (
        tensor.float() if tensor.dtype.itemsize == 1 else tensor
    )  # numbers of 8 bits cannot be summed


def _counts(num_nan: int, num_inf: int, num_elements: int) -> str:
    found = [f"{number} {name}" for number, name in ((num_nan, "NaN"), (num_inf, "Inf")) if number]
    return f"; {' and '.join(found)} of {num_elements}" if found else ""


_MOST = 16


class _LastAnswers(threading.local):
    """The last answers, by address: what a module returns, its last operation has often just made.

    A tensor is known weakly. While it lives nothing else lies at its address, and its version tells
    whether it was written.
    """

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Any, int, Any, bool]] = {}


_last = _LastAnswers()
# Python's own references die with the Python object, which may come and go while the tensor lives.
_reference_to: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """Whether some element is NaN or infinite."""
    if not has_numbers(tensor):
        return False
    tensor = local_value(tensor)
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_nested:
        return not is_finite(tensor)
    address, version, looks = (
        tensor.data_ptr(),
        tensor._version,
        (tensor.shape, tensor.stride(), tensor.dtype),
    )
    last = _last.answers.get(address)
    if last is not None and last[1] == version and last[2] == looks and not last[0].expired():
        return last[3]
    answer = not is_finite(tensor)
    if len(_last.answers) >= _MOST:
        _last.answers.clear()
    _last.answers[address] = _reference_to(tensor), version, looks, answer
    return answer
