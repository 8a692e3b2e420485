"""Tensors that are not simply their values: those that stand for others (a DTensor for its local
part, an awaited result for itself, a masked tensor for two), and those without values (on the meta
device, fake, or batched inside `vmap`).

What a wrapper does to memory, it does to the memory of the tensor inside. Any arithmetic on a
DTensor may need the other processes, so code that only reads a value reads the local part.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

_ATTRIBUTES = {"DTensor": "_local_tensor", "AsyncCollectiveTensor": "elem"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def inner_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` stands for, if it is one of those that do."""
    kind = type(tensor)
    if kind in _PLAIN:
        return None
    attribute = _attribute_of(kind)
    return None if attribute is None else getattr(tensor, attribute)


def holds_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others that it holds, as a masked one is of its data and its
    mask.

    What can be done with such a tensor is up to its class.
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
    """The plain tensor that is here, of a DTensor or an awaited one (which is waited for); anything
    else as it is.
    """
    while isinstance(value, torch.Tensor) and (inner := inner_of(value)) is not None:
        value = value.trigger_wait() if hasattr(value, "trigger_wait") else inner
    return value


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """As `tensor.clone()`, without the other processes: a DTensor that is still to be summed up
    would ask them.
    """
    inner = inner_of(tensor)
    if inner is not None and any(
        placement.is_partial() for placement in getattr(tensor, "placements", ())
    ):
        return with_inner(tensor.detach(), copy_of(inner))
    if isinstance(tensor, FakeTensor) and any(
        isinstance(size, torch.SymInt) for size in tensor.shape
    ):
        # To lay out the copy like the tensor, torch would decide something about the symbolic
        # sizes, for good.
        return tensor.clone(memory_format=torch.contiguous_format)
    try:
        return tensor.clone()
    except RuntimeError:
        if not tensor.is_quantized:
            raise
        return deepcopy(
            tensor.detach()
        )  # torch 2.13 clones none whose zero points are no whole numbers


def with_inner(tensor: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor` that stands for `inner`, which is like the one inside."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names} | {_attribute_of(type(tensor)): inner}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        parts, context, tensor.shape, tensor.stride()
    )
    return made


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
