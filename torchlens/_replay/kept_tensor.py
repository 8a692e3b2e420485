"""A tensor of the model as it was, so that it can be restored: its value, its memory, its shape and
its class.
"""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.regions import storage_of
from torchlens._recording.wrappers import copy_of as clone_of
from torchlens._replay.values import has_elements, same

Tensor = torch.Tensor


class KeptTensor:
    """A tensor at one moment. What it holds on to is made under `apart`, and so must `restore` be
    called.
    """

    __slots__ = (
        "_class", "_gradient", "_gradient_value", "_is_leaf", "_memory", "_needs_grad", "_storage",
        "tensor", "value",
    )  # fmt: skip

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._class = type(tensor)
        self._is_leaf = tensor.is_leaf
        self._needs_grad = tensor.requires_grad
        # Another tensor that looks at the same memory in the same way.
        self._memory = tensor.data if is_lazy(tensor) else tensor.detach()
        self.value = copy_of(tensor)
        # Of a tensor that looks at one place more than once, and so cannot be written to, all the
        # memory.
        self._storage = tensor.untyped_storage().clone() if _overlaps_itself(tensor) else None
        gradient = tensor.grad if self._is_leaf and not is_lazy(tensor) else None
        self._gradient = gradient
        self._gradient_value = None if gradient is None else copy_of(gradient)

    @property
    def has_changed(self) -> bool:
        """Whether it has another value, shape or type than then."""
        return type(self.tensor) is not self._class or not same(self.tensor, self.value)

    def restore(self, has_changed: bool | None = None) -> None:
        """Puts the tensor back; `has_changed` where that is known already, for comparing is what
        costs time.
        """
        tensor = self.tensor
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if (
                type(tensor) is not self._class
            ):  # a parameter of a lazy module, which has got its shape
                tensor.grad = None
                tensor.__class__ = self._class
                tensor.data = self._memory
            elif not is_lazy(tensor):
                self._restore_memory()
                if has_changed is None:
                    has_changed = not same(tensor, self.value)
                if has_changed:
                    self._restore_value()
        if self._is_leaf and tensor.is_leaf and tensor.requires_grad != self._needs_grad:
            tensor.requires_grad_(self._needs_grad)
        if self._is_leaf and not is_lazy(tensor):
            tensor.grad = self._gradient
            gradient, value = self._gradient, self._gradient_value
            if gradient is not None and value is not None and not same(gradient, value):
                gradient.data.copy_(value)

    def _restore_memory(self) -> None:
        """Lets the tensor look at its own memory again, at the size it had."""
        tensor, memory = self.tensor, self._memory
        if tensor.is_nested or memory.is_nested:  # these have neither shape nor place
            return
        if not has_elements(memory) and tensor.shape == memory.shape:
            return
        if (
            storage_of(tensor) != storage_of(memory)
            or tensor.shape != memory.shape
            or _has_moved(tensor, memory)
        ):
            tensor.data = memory

    def _restore_value(self) -> None:
        if self._storage is not None:
            self.tensor.untyped_storage().copy_(self._storage)
        elif has_elements(self.tensor):
            self.tensor.data.copy_(self.value)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy of the value; the tensor itself where there is none to be had."""
    if not has_elements(tensor):
        return tensor if is_lazy(tensor) else tensor.detach()
    try:
        return clone_of(tensor.detach())
    except (NotImplementedError, RuntimeError, TypeError):
        return tensor


def _has_moved(tensor: Any, memory: Any) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return bool(
        tensor.stride() != memory.stride() or tensor.storage_offset() != memory.storage_offset()
    )


def _overlaps_itself(tensor: Tensor) -> bool:
    if not has_elements(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_quantized:
        return False
    return torch._debug_has_internal_overlap(tensor) != 0
