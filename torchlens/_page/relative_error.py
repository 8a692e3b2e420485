"""How far two tensors are apart."""

import math
from typing import Any

import torch

from torchlens._recording.valueless import why_valueless
from torchlens._recording.wrappers import holds_others, local_value

_ROUNDINGS = 16  # of the last digit: what another order of additions may change


@torch.no_grad()
def relative_error(reference: Any, other: Any) -> float | None:
    """The norm of the difference over that of the reference; None where the two cannot be compared.

    Values that are not finite differ unless the other has the same at the same place: the error is
    infinite then.
    """
    pair = [local_value(value) for value in (reference, other)]
    if any(
        not isinstance(value, torch.Tensor) or why_valueless(value) is not None for value in pair
    ):
        return None
    if any(
        value.layout is not torch.strided or value.is_nested or holds_others(value)
        for value in pair
    ):
        return None
    if pair[0].shape != pair[1].shape:
        return None
    if pair[0] is pair[1] or pair[0].numel() == 0:
        return 0.0
    wide = torch.complex128 if any(value.is_complex() for value in pair) else torch.float64
    mine, theirs = (_dense(value).detach().cpu().to(wide) for value in pair)
    is_equal = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if bool(is_equal.all()):
        return 0.0
    apart = torch.where(is_equal, 0, mine - theirs)
    size = float(torch.linalg.vector_norm(torch.where(mine.isfinite(), mine, 0)))
    error = float(torch.linalg.vector_norm(apart))
    return error / size if size > 0 and math.isfinite(error) else math.inf


def _dense(value: torch.Tensor) -> torch.Tensor:
    return value.dequantize() if value.is_quantized else value


def is_rounding(error: float, *dtypes: torch.dtype) -> bool:
    """Whether an error is no more than what computing in another order gives."""
    finest = [
        torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex
    ]
    return error <= _ROUNDINGS * max(finest, default=0.0)
