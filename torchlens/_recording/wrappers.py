"""Wrapper tensors (DTensor, AsyncCollectiveTensor, masked tensors) and tensors without values
(meta, fake, or batched inside `vmap`).

A write to a wrapper writes to the memory of its inner tensor. Arithmetic on a DTensor may need
other processes, so code that only reads a value reads the local part.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

_ATTRIBUTES = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Types of numbers of less than a byte, as far as this torch has them.
BELOW_A_BYTE = {
    getattr(torch, name)
    for bits in range(1, 8)
    for name in (f"uint{bits}", f"int{bits}")
    if hasattr(torch, name)
}


def inner_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The inner tensor of a DTensor or AsyncCollectiveTensor; None for other tensors."""
    kind = type(tensor)
    if kind in _PLAIN:
        return None
    attribute = _attribute_of(kind)
    return None if attribute is None else getattr(tensor, attribute)


def has_memory(tensor: torch.Tensor) -> bool:
    """True if the elements of a tensor are in memory.

    FSDP and reversible layers free the storage of a tensor that is kept, and reading it crashes.
    """
    try:
        return (
            tensor.untyped_storage().nbytes() > 0
            or tensor.numel() == 0
            or inner_of(tensor) is not None
        )
    except (NotImplementedError, RuntimeError, ValueError):  # a kind without storage
        return True


def holds_others(tensor: torch.Tensor) -> bool:
    """True if a tensor holds others as attributes, such as a masked tensor its data and mask.

    Its class decides which operations it supports.
    """
    if type(tensor) in _PLAIN or tensor.is_nested:
        return False
    return any(isinstance(part, torch.Tensor) for part in vars(tensor).values())


@cache
def _attribute_of(kind: type) -> str | None:
    for base in kind.__mro__:
        if base.__name__ in _ATTRIBUTES and base.__module__.startswith("torch.distributed."):
            return _ATTRIBUTES[base.__name__]
    return None


def local_value(value: Any) -> Any:
    """The local plain tensor of a DTensor or (after a wait) AsyncCollectiveTensor.

    Returns any other value as it is.
    """
    while isinstance(value, torch.Tensor) and (inner := inner_of(value)) is not None:
        value = value.trigger_wait() if hasattr(value, "trigger_wait") else inner
    return value


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """As `tensor.clone()`, but without communication for a DTensor with partial placements."""
    inner = inner_of(tensor)
    if inner is not None and any(
        placement.is_partial() for placement in getattr(tensor, "placements", ())
    ):
        return with_inner(tensor.detach(), copy_of(inner))
    if isinstance(tensor, FakeTensor) and any(
        isinstance(size, torch.SymInt) for size in tensor.shape
    ):
        # Preserving the layout would make torch specialise the symbolic sizes for good.
        return tensor.clone(memory_format=torch.contiguous_format)
    try:
        return tensor.clone()
    except RuntimeError:
        if tensor.is_quantized:
            # torch 2.13 cannot clone tensors whose zero points are not integers.
            return deepcopy(tensor.detach())
        if tensor.dtype not in BELOW_A_BYTE:
            raise
        # torch cannot copy them, only their bytes.
        return tensor.view(torch.uint8).clone().view(tensor.dtype)


def with_inner(tensor: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """A wrapper like `tensor`, with another inner tensor."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names} | {_attribute_of(type(tensor)): inner}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, tensor.shape, tensor.stride()
    )
    return made


def why_valueless(value: Any) -> str | None:
    """Why a tensor has no values; None if it has, or if `value` is not a tensor."""
    if type(value) is torch.Tensor and not value.is_meta and not is_functorch_wrapped_tensor(value):
        return None  # the common case
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
