"""The state that a forward pass may change, saved before and restored after, so that every run
starts from the same state.

Kept are the tensors of the model and of its inputs (values and gradients), and what its modules,
lists, dicts and plain objects hold: a counter, a cache, a list that grows with every call, a
generator of random numbers.
"""

import operator
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.distributed.sharding import bring_apart
from torchlens._capture.memory.saved_values import has_memory
from torchlens._capture.session import generator_states, restore_generators
from torchlens._recording.regions import storage_of
from torchlens._recording.unseen import unseen
from torchlens._recording.wrappers import copy_of as clone_of
from torchlens._replay.values import has_elements, same

Tensor = torch.Tensor
_MAX_DEPTH = 12
_MAX_OBJECTS = 100_000
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType,
    BuiltinFunctionType,
          MethodType, torch.dtype, torch.device, torch.Size)  # fmt: skip
# What these modules make, others use at the same time: to put back who waits at a queue is to make
# them wait for ever.
_SHARED = frozenset({
    "_asyncio", "_io", "_queue", "_socket", "_thread", "asyncio", "concurrent", "io", "logging",
    "multiprocessing", "queue",
    "selectors", "socket", "ssl", "subprocess", "threading",
})  # fmt: skip


class State:
    """The state of a model, its inputs and the generators at one moment.

    `problems` says what could not be kept or put back.
    """

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        self.problems: dict[str, None] = {}
        self._generators = generator_states()
        self._default_dtype, self._is_grad_enabled = (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )
        # What `changes` found, and whether it was the last thing to happen.
        self._changed: set[int] = set()
        self._is_fresh = False
        self._tensors: dict[int, KeptTensor] = {}
        self._modules: dict[int, tuple[torch.nn.Module, type]] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._arrays: dict[int, tuple[Any, Any]] = {}
        self._slots: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._own_generators: dict[int, tuple[Any, Callable[[], object]]] = {}
        bring_apart(list(model.modules()))
        with unseen():
            for module in model.modules():
                self._keep_module(module)
            self._keep(inputs, 0)

    def changes(self) -> dict[int, Tensor]:
        """The tensors that have another value than they had then, by their place in the walk.

        A `restore` that follows trusts the answer: comparing is what costs time.
        """
        with unseen():
            found = {
                n: copy_of(kept.tensor)
                for n, kept in enumerate(self._tensors.values())
                if kept.has_changed
            }
        self._changed, self._is_fresh = set(found), True
        return found

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors, each with a copy of the value it had then."""
        return [(kept.tensor, kept.value) for kept in self._tensors.values()]

    def restore(self) -> None:
        """Puts everything back."""
        torch.set_default_dtype(self._default_dtype)
        torch.set_grad_enabled(self._is_grad_enabled)
        restore_generators(self._generators)
        bring_apart([module for module, _ in self._modules.values()])
        with unseen():
            for what, put_back in self._steps():
                try:
                    put_back()
                except (
                    Exception
                ) as error:  # one thing that cannot be put back is told, and the rest is put back
                    self.problems[
                        f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    ] = None
        self._changed, self._is_fresh = set(), False

    def _steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for generator, put_back in self._own_generators.values():
            yield type(generator).__name__, put_back
        for module, kind in self._modules.values():
            if type(module) is not kind:  # a lazy module, which has become what it was to be
                yield type(module).__name__, partial(setattr, module, "__class__", kind)
        for container, kept in self._containers.values():
            yield type(container).__name__, partial(_refill, container, kept)
        for owner, values in self._slots.values():
            yield type(owner).__name__, partial(_refill_slots, owner, values)
        for array, kept in self._arrays.values():
            if array.flags.writeable:
                yield "ndarray", partial(np.copyto, array, kept)
        for number, tensor in enumerate(self._tensors.values()):
            has_changed = number in self._changed if self._is_fresh else None
            yield type(tensor.tensor).__name__, partial(tensor.restore, has_changed)

    def _keep_module(self, module: torch.nn.Module) -> None:
        if id(module) not in self._modules:
            self._modules[id(module)] = (module, type(module))
            self._keep(module.__dict__, 0)

    def _keep(self, item: Any, depth: int) -> None:
        if isinstance(item, _ATOMS) or depth > _MAX_DEPTH or len(self._containers) > _MAX_OBJECTS:
            return
        if isinstance(item, Tensor):
            self._keep_tensor(item)
        elif isinstance(item, torch.nn.Module):
            self._keep_module(item)
        elif type(item).__module__.startswith("torch.distributed.") or _is_shared(type(item)):
            # what FSDP and its like hold is their own affair, and so is what threads and the system
            # share
            return
        elif (put_back := _rewind(item)) is not None:
            self._own_generators[id(item)] = (item, put_back)
        elif isinstance(item, np.ndarray):
            self._arrays[id(item)] = (item, item.copy())
        elif isinstance(item, tuple | frozenset):
            for part in item:
                self._keep(part, depth + 1)
        elif isinstance(item, list | set | dict | deque):
            if id(item) not in self._containers:
                self._containers[id(item)] = (item, _copied(item))
                for part in item.values() if isinstance(item, dict) else item:
                    self._keep(part, depth + 1)
        else:
            if isinstance(attributes := getattr(item, "__dict__", None), dict):
                self._keep(attributes, depth + 1)
            self._keep_slots(item, depth)

    def _keep_slots(self, item: Any, depth: int) -> None:
        names = [name for kind in type(item).__mro__ for name in _slot_names(kind)]
        if names and id(item) not in self._slots:
            values = {name: getattr(item, name) for name in names if hasattr(item, name)}
            self._slots[id(item)] = (item, values)
            for part in values.values():
                self._keep(part, depth + 1)

    def _keep_tensor(self, tensor: Tensor) -> None:
        if id(tensor) not in self._tensors and has_memory(tensor):
            try:
                self._tensors[id(tensor)] = KeptTensor(tensor)
            except Exception as error:  # a kind of tensor that nobody thought of
                self.problems[f"{type(tensor).__name__}: {type(error).__name__}: {error}"] = None


def _is_shared(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] in _SHARED for base in kind.__mro__)


def _slot_names(kind: type) -> list[str]:
    """The slots that a class of Python's own making declares: what is written in C keeps to
    itself.
    """
    names = vars(kind).get("__slots__", ())
    names = [names] if isinstance(names, str) else list(names)
    return [
        name
        for name in names
        if name not in ("__dict__", "__weakref__") and not name.startswith("__")
    ]


def _rewind(item: Any) -> Callable[[], object] | None:
    """What sets a generator of random numbers back to where it is now; None for anything else."""
    if isinstance(item, torch.Generator):
        state = item.get_state()
        return partial(item.set_state, state)
    if isinstance(item, random.Random):
        position = item.getstate()
        return lambda: item.setstate(position)
    if isinstance(item, np.random.Generator):
        bits, numbers = item.bit_generator, item.bit_generator.state
        return lambda: setattr(bits, "state", numbers)
    if isinstance(item, np.random.RandomState):
        legacy = item.get_state()
        return lambda: item.set_state(legacy)
    return None


def _copied(container: Any) -> Any:
    """The items of a list, deque, set or dict, in a container of the plain kind."""
    return dict(container) if isinstance(container, dict) else list(container)


def _refill(container: Any, kept: Any) -> None:
    """Puts the items back if they are others, by `is`: their `==` may be anybody's."""
    if isinstance(container, dict):
        is_same = _are_same(list(container), list(kept)) and _are_same(
            list(container.values()), list(kept.values())
        )
    elif isinstance(container, set):
        is_same = set(map(id, container)) == set(map(id, kept))
    else:
        is_same = _are_same(list(container), kept)
    if not is_same:
        container.clear()
        if isinstance(container, list | deque):
            container.extend(kept)
        else:
            container.update(kept)


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _refill_slots(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if getattr(owner, name, None) is not value:
            object.__setattr__(owner, name, value)


# -- tensors
# -------------------------------------------------------------------------------------------------


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
