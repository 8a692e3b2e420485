"""A quick test for NaN and Inf, run again and again while a model runs."""

import threading
from typing import Any

import torch

from torchlens._health.nonfinite.values import has_numbers, is_finite
from torchlens._recording.wrappers import local_value

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
