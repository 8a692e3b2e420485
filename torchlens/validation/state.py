"""What a forward pass may change, kept before and put back after: so that every run starts from the same place.

Kept are the tensors of the model and of its inputs (values and gradients), and what its modules, lists, dicts and plain
objects hold: a counter, a cache, a list that grows with every call.
"""

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from torchlens.capture.memory import has_memory, storage_of
from torchlens.capture.session import generator_states, restore_generators
from torchlens.capture.sharding import bring_apart
from torchlens.capture.wrappers import copy_of
from torchlens.validation.values import same

__all__ = ["State"]

Tensor = torch.Tensor
_MAX_DEPTH = 12
_MAX_OBJECTS = 100_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, BuiltinFunctionType,
          MethodType, torch.dtype, torch.device, torch.Size)  # fmt: skip


class State:
    """The state of a model, its inputs and the generators at one moment."""

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        self._generators = generator_states()
        self._modules = list(model.modules())
        bring_apart(self._modules)
        # What `changes` found, and whether it, or the walk that kept everything, was the last thing to happen.
        self._changed: set[int] = set()
        self._is_fresh = True
        self._tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # itself, its memory, its value
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._arrays: dict[int, tuple[Any, Any]] = {}
        self._own_generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for module in self._modules:
                self._keep(module.__dict__, 0)
            self._keep(inputs, 0)

    def changes(self) -> dict[int, Tensor]:
        """The tensors that have another value than they had then, by their place in the walk.

        A `restore` that follows trusts the answer: comparing is what costs time.
        """
        with torch.inference_mode(False), torch.no_grad():
            found = {
                number: copy_of(tensor.detach())
                for number, (tensor, _, value) in enumerate(self._tensors.values())
                if not same(tensor, value)
            }
        self._changed, self._is_fresh = set(found), True
        return found

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors, each with a copy of the value it had then."""
        return [(tensor, value) for tensor, _, value in self._tensors.values()]

    def restore(self) -> None:
        """Puts everything back."""
        restore_generators(self._generators)
        bring_apart(self._modules)
        for generator, state in self._own_generators.values():
            generator.set_state(state)
        for container, kept in self._containers.values():
            _refill(container, kept)
        for array, kept in self._arrays.values():
            if array.flags.writeable:
                np.copyto(array, kept)
        for number, (tensor, memory, value) in enumerate(self._tensors.values()):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                if storage_of(tensor) != storage_of(memory):
                    tensor.data = memory
                if number in self._changed or (not self._is_fresh and not same(tensor, value)):
                    tensor.data.copy_(value)
        self._changed, self._is_fresh = set(), False
        for tensor, gradient, kept_gradient in self._gradients:
            tensor.grad = gradient
            if gradient is not None and kept_gradient is not None and not same(gradient, kept_gradient):
                gradient.data.copy_(kept_gradient)

    def _keep(self, item: Any, depth: int) -> None:
        if isinstance(item, _ATOMS) or depth > _MAX_DEPTH or len(self._containers) > _MAX_OBJECTS:
            return
        if isinstance(item, Tensor):
            self._keep_tensor(item)
        elif isinstance(item, torch.nn.Module) or type(item).__module__.startswith("torch.distributed."):
            return  # modules of the model are visited one by one; what FSDP and its like hold is their own affair
        elif isinstance(item, torch.Generator):
            self._own_generators[id(item)] = (item, item.get_state())
        elif isinstance(item, np.ndarray):
            self._arrays[id(item)] = (item, item.copy())
        elif isinstance(item, tuple | frozenset):
            for part in item:
                self._keep(part, depth + 1)
        elif isinstance(item, list | set | dict):
            if id(item) not in self._containers:
                self._containers[id(item)] = (item, _copied(item))
                for part in item.values() if isinstance(item, dict) else item:
                    self._keep(part, depth + 1)
        elif isinstance(vars_of := getattr(item, "__dict__", None), dict):
            self._keep(vars_of, depth + 1)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors and has_memory(tensor):
            self._tensors[id(tensor)] = (tensor, tensor.detach(), copy_of(tensor.detach()))
            if tensor.is_leaf:
                gradient = tensor.grad
                self._gradients.append((tensor, gradient, None if gradient is None else copy_of(gradient.detach())))


def _copied(container: Any) -> Any:
    """The items of a list, set or dict, in a container of the plain kind."""
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, dict):
        if list(container) != list(kept) or any(container[key] is not kept[key] for key in kept):
            container.clear()
            container.update(kept)
    elif isinstance(container, list):
        if len(container) != len(kept) or any(now is not then for now, then in zip(container, kept, strict=True)):
            container[:] = kept
    elif container != set(kept):
        container.clear()
        container.update(kept)
