"""How far two tensors are apart: relative error, unit of rounding, and tolerance."""

import math
from typing import Any

import torch

from torchlens._recording.wrappers import holds_others, local_value, why_valueless

Tensor = torch.Tensor

# How many units of rounding the results of a correct layer may be off. Single operations of torch
# and JAX differ by at most 8.5; this is twice that.
TOLERANCE = 16


def epsilon_of(*dtypes: torch.dtype) -> float:
    """The unit of rounding (the distance from 1 to the next number) of the coarsest of the types;
    that of float32 if all are exact.
    """
    known = [torch.finfo(dtype).eps for dtype in dtypes if _is_rounded(dtype)]
    return max(known, default=torch.finfo(torch.float32).eps)


def is_rounding(error: float, *dtypes: torch.dtype) -> bool:
    """True if computing in another order may give this error. Whole numbers are exact."""
    return error <= TOLERANCE * epsilon_of(*dtypes) if any(map(_is_rounded, dtypes)) else not error


def are_whole(*values: Tensor) -> bool:
    """True if all are whole numbers or truth values, which are not rounded."""
    return not any(_is_rounded(value.dtype) for value in values)


def _is_rounded(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def dense(value: Any) -> Tensor | None:
    """The numbers of a value as a plain tensor on the CPU; None if it has none to compare.

    Complex numbers become pairs in a last axis; of a DTensor, it is the part of this process.
    """
    if type(value) is not Tensor:
        value = local_value(value)
    if not isinstance(value, Tensor) or not _has_plain_numbers(value):
        return None
    value = value.detach()
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_quantized:
        value = value.dequantize()
    if value.device.type != "cpu":
        value = value.cpu()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _has_plain_numbers(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor and holds_others(tensor):
        return False
    return not (tensor.is_meta or tensor.is_nested) and why_valueless(tensor) is None


def comparable(value: Tensor) -> Tensor:
    """The same in float64, or in int64 if it is whole numbers: float64 rounds large ones."""
    return value.detach().to(torch.int64) if are_whole(value) else numbers(value)


def numbers(value: Tensor) -> Tensor:
    """The same in float64."""
    return value.detach().to(torch.float64)


def relative_error(reference: Tensor, other: Tensor) -> float:
    """The norm of the difference over the norm of the reference, of two dense tensors of one shape.

    NaN equals NaN, and infinity itself; the error is infinite where only one of two elements is
    finite, and where the reference is zero and the other is not.
    """
    reference, other = reference.detach(), other.detach()
    both_whole = are_whole(reference, other)
    a, b = numbers(reference).flatten(), numbers(other).flatten()
    difference = b - a
    if both_whole:  # exact for small differences of large numbers, and without overflow
        exact = numbers(other.to(torch.int64) - reference.to(torch.int64)).flatten()
        difference = torch.where(difference.abs() < 2.0**62, exact, difference)
    apart, size = _norm(difference), _norm(a)
    if not apart:
        return 0.0
    if math.isfinite(apart) and math.isfinite(size):
        return apart / size if size else math.inf
    # NaN, infinity, or numbers whose squares overflow.
    is_same = (a == b) | (a.isnan() & b.isnan())
    is_finite = a.isfinite() & b.isfinite()
    if not bool((is_same | is_finite).all()):
        return math.inf
    a, b = a[is_finite], b[is_finite]
    scale = float(a.abs().max()) if a.numel() else 0.0
    if not scale:
        return math.inf if bool(b.any()) else 0.0
    return _norm((b - a) / scale) / _norm(a / scale)


def _norm(flat: Tensor) -> float:
    return math.sqrt(float(flat.dot(flat)))
