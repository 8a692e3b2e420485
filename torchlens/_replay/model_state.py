"""The state that a forward pass may change, saved before and restored after, so that every run
starts from the same state.

It consists of the tensors of a model and of its inputs (values and gradients), and of the contents
of its modules, lists, dicts and plain objects: counters, caches, generators of random numbers.
"""

import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.distributed.sharding import bring_apart
from torchlens._capture.session import generator_states, restore_generators
from torchlens._recording.interruptions import interrupts
from torchlens._recording.regions import storage_of
from torchlens._recording.unseen import GradMode, NoTorchFunction, unseen
from torchlens._recording.wrappers import copy_of as clone_of
from torchlens._recording.wrappers import has_memory
from torchlens._replay.values import has_elements, same

Tensor = torch.Tensor
_MAX_DEPTH = 12
_GENERATORS = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
_MAX_OBJECTS = 100_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType,
    BuiltinFunctionType,
          MethodType, torch.dtype, torch.device, torch.Size)  # fmt: skip
# Objects of these modules are in use by other threads: restoring a queue would block those forever.
_SHARED = frozenset({
    "_asyncio", "_io", "_queue", "_socket", "_thread", "asyncio", "concurrent", "io", "logging",
    "multiprocessing", "queue",
    "selectors", "socket", "ssl", "subprocess", "threading",
})  # fmt: skip


class State:
    """The state of a model, its inputs and the generators at one moment.

    `problems` says what could not be saved or restored.
    """

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        self.problems: dict[str, None] = {}
        self._generators = generator_states()
        self._default_dtype = torch.get_default_dtype()
        self._is_grad_enabled = torch.is_grad_enabled()
        self._tensors: dict[int, KeptTensor] = {}
        # By id: each object that can change, and the function that restores it.
        self._objects: dict[int, tuple[Any, Callable[[], object]]] = {}
        # What `changes` found, if nothing has run since.
        self._changed: dict[int, Tensor] | None = None
        bring_apart(list(model.modules()))
        with unseen(), NoTorchFunction():
            for module in model.modules():
                self._keep(module, 0)
                if isinstance(module, torch.jit.ScriptModule):  # its tensors are held in C++
                    own = module.parameters(recurse=False), module.buffers(recurse=False)
                    self._keep([*own[0], *own[1]], 0)
            self._keep(inputs, 0)

    def changes(self) -> dict[int, Tensor]:
        """The tensors whose values have changed, by their order in the walk.

        Comparing takes time, so a `restore` that follows relies on the result.
        """
        with unseen(), NoTorchFunction():
            self._changed = {
                number: copy_of(kept.tensor)
                for number, kept in enumerate(self._tensors.values())
                if kept.has_changed
            }
        return self._changed

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors, each with a copy of its saved value."""
        return [(kept.tensor, kept.value) for kept in self._tensors.values()]

    def restore(self) -> None:
        """Restores everything; what fails is added to `problems`."""
        torch.set_default_dtype(self._default_dtype)
        torch.set_grad_enabled(self._is_grad_enabled)
        restore_generators(self._generators)
        items = [item for item, _ in self._objects.values()]
        bring_apart([item for item in items if isinstance(item, torch.nn.Module)])
        with unseen(), NoTorchFunction():
            for item, restore in self._objects.values():
                self._try(item, restore)
            for number, kept in enumerate(self._tensors.values()):
                has_changed = None if self._changed is None else number in self._changed
                self._try(kept.tensor, partial(kept.restore, has_changed))
        self._changed = None

    def _try(self, item: Any, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:  # the other objects are still saved or restored
            if interrupts(error):
                raise
            message = str(error).partition("\n")[0]
            self.problems[f"{type(item).__name__}: {type(error).__name__}: {message}"] = None

    def _keep(self, item: Any, depth: int) -> None:
        """Saves an object and all that it holds."""
        if isinstance(item, Tensor):
            if id(item) not in self._tensors and has_memory(item):
                self._try(item, lambda: self._tensors.update({id(item): KeptTensor(item)}))
            return
        if depth > _MAX_DEPTH or len(self._objects) > _MAX_OBJECTS:
            return
        if id(item) in self._objects or _is_left_out(item):
            return
        restore = _restorer(item)
        if restore is not None:
            self._objects[id(item)] = (item, restore)
        for part in _parts(item):
            self._keep(part, 0 if isinstance(item, torch.nn.Module) else depth + 1)


def _is_left_out(item: Any) -> bool:
    """True for what cannot change, the internals of FSDP, and what other threads use."""
    kind = type(item)
    if issubclass(kind, torch.nn.Module):
        return False
    if isinstance(item, _ATOMS) or kind.__module__.startswith("torch.distributed."):
        return True
    return any(base.__module__.partition(".")[0] in _SHARED for base in kind.__mro__)


def _parts(item: Any) -> Iterable[Any]:
    """The objects that an object holds."""
    if isinstance(item, _GENERATORS | np.ndarray):
        return ()
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset | deque):
        return item
    own = getattr(item, "__dict__", None)
    return [*([own] if isinstance(own, dict) else []), *_slots(item).values()]


def _restorer(item: Any) -> Callable[[], object] | None:
    """The function that restores the present content of an object; None if it has none itself."""
    if isinstance(item, torch.nn.Module):  # a lazy module changes its class
        return partial(setattr, item, "__class__", type(item))
    if isinstance(item, _GENERATORS):
        return _rewinder(item)
    if isinstance(item, np.ndarray):
        return partial(np.copyto, item, item.copy()) if item.flags.writeable else None
    if isinstance(item, dict):
        return partial(_refill, item, dict(item))
    if isinstance(item, list | set | deque):
        return partial(_refill, item, list(item))
    slots = _slots(item)
    return partial(_refill_slots, item, slots) if slots else None


def _rewinder(generator: Any) -> Callable[[], object]:
    """The function that sets a generator of random numbers back to its present state."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return partial(generator.set_state, generator.get_state())


def _slots(item: Any) -> dict[str, Any]:
    """The values in the slots that Python classes declare."""
    found = {}
    for kind in type(item).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            if not name.startswith("__") and hasattr(item, name):
                found[name] = getattr(item, name)
    return found


def _refill(container: Any, kept: Any) -> None:
    """Puts the items back if they are other objects; `==` may be overridden."""
    if isinstance(container, dict):
        is_same = _are_same(container, kept) and _are_same(container.values(), kept.values())
    elif isinstance(container, set):
        is_same = set(map(id, container)) == set(map(id, kept))
    else:
        is_same = _are_same(container, kept)
    if not is_same:
        container.clear()
        if isinstance(container, list | deque):
            container.extend(kept)
        else:
            container.update(kept)


def _are_same(first: Collection[Any], second: Collection[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _refill_slots(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if getattr(owner, name, None) is not value:
            object.__setattr__(owner, name, value)


# -- tensors
# -------------------------------------------------------------------------------------------------


class KeptTensor:
    """A tensor at one moment: its value, its memory and its gradient. Used inside `unseen`."""

    __slots__ = (
        *("_class", "_gradient", "_is_leaf", "_memory", "_needs_grad", "_num_bytes", "_storage"),
        *("tensor", "value"),
    )

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._class = type(tensor)
        self._is_leaf = tensor.is_leaf
        self._needs_grad = tensor.requires_grad
        # Another tensor with the same memory, shape and strides.
        self._memory = tensor.data if is_lazy(tensor) else tensor.detach()
        self.value = copy_of(tensor)
        self._num_bytes = _bytes_of_storage(self._memory)
        # The whole storage, if elements overlap: such a tensor cannot be written to.
        self._storage = tensor.untyped_storage().clone() if _overlaps_itself(tensor) else None
        gradient = tensor.grad if self._is_leaf and not is_lazy(tensor) else None
        self._gradient = None if gradient is None else (gradient, copy_of(gradient))

    @property
    def has_changed(self) -> bool:
        """True if the value, shape or type differs from the saved one."""
        return type(self.tensor) is not self._class or not same(self.tensor, self.value)

    def restore(self, has_changed: bool | None = None) -> None:
        """Restores the tensor; compares its value first, unless `has_changed` is given."""
        tensor = self.tensor
        with GradMode(False, inference=tensor.is_inference()):
            if type(tensor) is not self._class:  # a parameter that was lazy
                tensor.grad = None
                tensor.__class__ = self._class
                tensor.data = self._memory
            elif not is_lazy(tensor):
                self._restore_memory()
                if not same(tensor, self.value) if has_changed is None else has_changed:
                    self._restore_value()
        if self._is_leaf:
            self._restore_gradient()

    def _restore_gradient(self) -> None:
        tensor = self.tensor
        if tensor.is_leaf and tensor.requires_grad != self._needs_grad:
            tensor.requires_grad_(self._needs_grad)
        if is_lazy(tensor):
            return
        if self._gradient is None:
            tensor.grad = None
            return
        tensor.grad, value = self._gradient
        if not same(tensor.grad, value):
            tensor.grad.data.copy_(value)

    def _restore_memory(self) -> None:
        """Gives the tensor its own memory, shape and strides again."""
        tensor, memory = self.tensor, self._memory
        if not has_memory(memory):
            memory.untyped_storage().resize_(self._num_bytes)
        if tensor.is_nested or memory.is_nested:
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
    """A copy of the value; the tensor itself if it has no value that can be copied."""
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


def _bytes_of_storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError, ValueError):  # a kind without storage
        return 0
