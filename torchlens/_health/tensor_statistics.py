"""The statistics of tensors: ranges, moments, and whether all numbers are finite."""

import math
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from torchlens._recording.regions import shape_of
from torchlens._recording.wrappers import local_value, why_valueless
from torchlens._text.numbers import shape_text


class ValueRange(NamedTuple):
    """The range of a tensor's values. `low` and `high` are of the finite ones, None if there are
    none.
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
        kind = f"{shape_text(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        span = "no finite value" if self.low is None else f"from {self.low:.4g} to {self.high:.4g}"
        return (
            f"{self.name}: {kind}, {span}{_counts(self.num_nan, self.num_inf, self.num_elements)}"
        )


def value_range(name: str, tensor: torch.Tensor) -> ValueRange:
    """The range of all numbers of a tensor."""
    values = stored_values(tensor.detach())
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
    """True if it has values, of a type that may be NaN."""
    return (tensor.is_floating_point() or tensor.is_complex()) and why_valueless(tensor) is None


def has_plus_infinity(tensor: torch.Tensor) -> bool:
    """True if some number is infinite, other than minus infinity."""
    values = stored_values(tensor.detach())
    return bool((values.isinf() if values.is_complex() else values == math.inf).any())


def is_finite(tensor: torch.Tensor) -> bool:
    """True if it has neither NaN nor Inf. Every element is tested only if their sum, which is
    cheaper, is not finite.
    """
    if not has_numbers(tensor):
        return True
    values = stored_values(tensor.detach())
    total = values.sum().item()
    # Large finite numbers may add up to infinity.
    return bool(total - total == 0) or bool(values.isfinite().all())


class RowStatistics(NamedTuple):
    """Statistics of the finite elements in each row of an array: `low`, `high`, `mean` and `std`
    are NaN if there are none.
    """

    num_finite: np.ndarray
    num_nan: np.ndarray
    low: np.ndarray
    high: np.ndarray
    total: np.ndarray
    squares: np.ndarray  # the sum of the squares

    @property
    def mean(self) -> np.ndarray:
        return self.total / _or_nan(self.num_finite)

    @property
    def std(self) -> np.ndarray:
        variance = self.squares / _or_nan(self.num_finite) - self.mean**2
        found: np.ndarray = np.sqrt(np.maximum(variance, 0))
        return found


def row_statistics(values: np.ndarray) -> RowStatistics:
    """The statistics of each row of an array of floats with two axes."""
    num_rows, width = values.shape
    num_finite, num_nan = np.full(num_rows, width), np.zeros(num_rows, np.int64)
    lows = highs = wide = values.astype(np.float64, copy=False)
    is_finite = np.isfinite(values)
    if not is_finite.all():
        num_finite = np.count_nonzero(is_finite, axis=1)
        num_nan = np.count_nonzero(np.isnan(values), axis=1)
        lows, highs, wide = (np.where(is_finite, wide, each) for each in (np.inf, -np.inf, 0.0))
    is_known = num_finite > 0
    with np.errstate(over="ignore"):
        return RowStatistics(
            num_finite=num_finite,
            num_nan=num_nan,
            # Adding 0 makes 0 of -0.
            low=np.where(is_known, lows.min(axis=1), np.nan) + 0.0,
            high=np.where(is_known, highs.max(axis=1), np.nan) + 0.0,
            total=np.einsum("ij->i", wide),
            squares=np.einsum("ij,ij->i", wide, wide),
        )


def _or_nan(counts: np.ndarray) -> np.ndarray:
    """The counts as divisors: NaN in place of 0."""
    return np.where(counts > 0, counts, np.nan)


# torch computes neither sums nor ranges of the types on the left.
COMPUTED_AS = {
    getattr(torch, name): dtype
    for name, dtype in {
        "float8_e4m3fn": torch.float32,
        "float8_e4m3fnuz": torch.float32,
        "float8_e5m2": torch.float32,
        "float8_e5m2fnuz": torch.float32,
        "float8_e8m0fnu": torch.float32,
        "uint16": torch.float32,
        "uint32": torch.float64,
        "uint64": torch.float64,
    }.items()
    if hasattr(torch, name)
}


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor that this process stores, as a strided tensor of a type with which
    torch computes. Of a sparse tensor, the zeros that it does not store are left out.
    """
    tensor = local_value(tensor)
    if tensor.is_nested:
        return torch.cat([stored_values(part).reshape(-1) for part in tensor.unbind()])
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    computed_as = COMPUTED_AS.get(tensor.dtype)
    return tensor if computed_as is None else tensor.to(computed_as)


def _counts(num_nan: int, num_inf: int, num_elements: int) -> str:
    found = [f"{number} {name}" for number, name in ((num_nan, "NaN"), (num_inf, "Inf")) if number]
    return f"; {' and '.join(found)} of {num_elements}" if found else ""


_MOST_ANSWERS = 16


class _LastAnswers(threading.local):
    """The last answers, by address: a module often returns what its last operation just made.

    Tensors are referenced weakly. While one lives, nothing else is at its address, and its version
    counter shows whether it was changed.
    """

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Any, int, Any, bool]] = {}


_last = _LastAnswers()
# Python's weak references die with the Python object, which torch may recreate while the tensor
# lives.
_reference_to: Any = torch._C._WeakTensorRef  # type: ignore[attr-defined]


def has_nonfinite(tensor: torch.Tensor) -> bool:
    """True if some element is NaN or infinite."""
    if not has_numbers(tensor):
        return False
    tensor = local_value(tensor)
    if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_nested:
        return not is_finite(tensor)
    address, version = tensor.data_ptr(), tensor._version
    looks = tensor.shape, tensor.stride(), tensor.dtype
    last = _last.answers.get(address)
    if last is not None and last[1] == version and last[2] == looks and not last[0].expired():
        return last[3]
    answer = not is_finite(tensor)
    if len(_last.answers) >= _MOST_ANSWERS:
        _last.answers.clear()
    _last.answers[address] = _reference_to(tensor), version, looks, answer
    return answer
