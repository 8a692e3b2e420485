"""Tensors that have a shape but no values: on the meta device, fake, or batched inside `vmap`."""

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from torchlens._recording.wrappers import inner_of


def why_valueless(value: Any) -> str | None:
    """What a tensor without values is; None if it has values, or is no tensor."""
    if type(value) is torch.Tensor and not value.is_meta and not is_functorch_wrapped_tensor(value):
        return None  # as nearly all are
    if not isinstance(value, torch.Tensor):
        return None
    while (inner := inner_of(value)) is not None:
        value = inner
    if value.is_meta:
        return "on the meta device"
    if isinstance(value, FakeTensor):
        return "fake"
    if is_functorch_wrapped_tensor(value):
        return "one that stands for many, inside a transform of torch.func"
    return None
