"""Tensors that have a shape but no values: on the meta device, fake, or standing for many inside
`vmap`.
"""

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from torchlens._recording.wrappers import inner_of

# Around code that looks at values: inside a FakeTensorMode, what is computed from real tensors
# would be fake, too.
outside_fake_mode = unset_fake_temporarily


def is_in_fake_mode() -> bool:
    """Whether what is computed now is fake."""
    with outside_fake_mode() as mode:
        return mode is not None


def why_valueless(value: Any) -> str | None:
    """Why a tensor has no values to look at: what it is. None if it has some, or is no tensor."""
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
