"""How far two tensors are apart, normwise, in units of rounding."""

import torch

Tensor = torch.Tensor
# The distance of 1 to the next number; whole numbers and truth values are exact.
EPSILON = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
}


def epsilon_of(*dtypes: torch.dtype) -> float:
    """The unit of rounding of the coarsest of these; that of float32 where all are exact."""
    known = [
        torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex
    ]
    return max(known, default=EPSILON[torch.float32])


def numbers(value: Tensor) -> Tensor:
    """The same in float64."""
    return value.detach().to(torch.float64)


def comparable(value: Tensor) -> Tensor:
    """The same in float64, or in int64 where it is whole numbers: float64 does not tell the large
    ones apart.
    """
    return numbers(value) if value.is_floating_point() else value.detach().to(torch.int64)


def are_whole(*values: Tensor) -> bool:
    """Whether all are whole numbers or truth values, which no rounding changes."""
    return not any(value.is_floating_point() or value.is_complex() for value in values)


def distance(reference: Tensor, candidate: Tensor) -> float:
    """The norm of the difference over the norm of the reference; both `comparable` and of one
    shape.

    NaN equals NaN, and infinity itself; where only one of the two is finite, they are infinitely
    far apart.
    """
    if not reference.numel():
        return 0.0
    if are_whole(reference, candidate):
        difference = _whole_difference(reference, candidate)
    else:
        difference = (numbers(candidate) - numbers(reference)).flatten()
    reference, candidate = numbers(reference), numbers(candidate)
    total = float(difference.dot(difference))
    if total == 0.0:
        return 0.0
    if total == total and total != float("inf"):
        size = float(reference.flatten().dot(reference.flatten())) or float(
            candidate.flatten().dot(candidate.flatten())
        )
        if size != float("inf"):
            return (total / size) ** 0.5
    a, b = reference.flatten(), candidate.flatten()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(((a.isfinite() != b.isfinite()) & ~same).any()):
        return float("inf")
    both = a.isfinite() & b.isfinite()
    if not bool((same | both).all()):
        return float("inf")
    a, b = a[both], b[both]
    scale = float(a.abs().max()) if a.numel() else 0.0
    if not scale:
        return 0.0 if not bool(b.any()) else float("inf")
    a, b = a / scale, b / scale
    return float((b - a).norm() / a.norm())


def _whole_difference(reference: Tensor, candidate: Tensor) -> Tensor:
    """The difference of whole numbers in float64: exact for small differences of large numbers, and
    without overflow.
    """
    rough = (numbers(candidate) - numbers(reference)).flatten()
    return torch.where(rough.abs() < 2.0**62, numbers(candidate - reference).flatten(), rough)
