"""The parts of a model by address: modules, parameters, buffers, attribute tensors.

An attribute tensor is one that a module keeps as a plain attribute: `body.anchors.0` for
`self.anchors = [t]` in module `body`. Attributes are searched only when an operation reads a tensor
that no operation made. The search runs once, breadth first, through lists, dicts and plain objects,
but not through unregistered modules. It includes class attributes, such as `K = torch.ones(3)` in a
class body.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchlens._recording.called_model import CalledModel
from torchlens._recording.trees import OPAQUE_TYPES, attributes_of


@dataclass(slots=True)
class Parts:
    """The modules, parameters and buffers of a model, outer modules first.

    A shared part has the first of its addresses.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    addresses: dict[int, str] = field(default_factory=dict)  # id of a module → its address
    classes: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)  # a further address → the first
    scripted: set[int] = field(default_factory=set)  # ids
    # modules on which `compile()` was called, with their compiled call
    compiled: list[tuple[Any, Any]] = field(default_factory=list)
    param_addresses: list[str] = field(default_factory=list)
    params: list[torch.nn.Parameter] = field(default_factory=list)
    module_params: dict[str, tuple[int, ...]] = field(default_factory=dict)  # index into params
    buffers: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    # id of the packed weights of a quantized module → the numbers of its weight and bias
    packed: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def find_new_modules(self) -> None:
        """Adds the modules that the model has made since."""
        for address, module in named_modules(self.modules[0], self.aliases):
            if id(module) not in self.addresses:
                self.modules.append(module)
                self.addresses[id(module)] = address
                self.classes.setdefault(address, type(module).__name__)
                self.module_params.setdefault(address, ())

    def number_of_parameter(self, parameter: Any) -> int | None:
        """The number of a parameter that was made since; None if no module holds it.

        It is that of a parameter without values in its place: weights are loaded when needed.
        """
        for address, module in named_modules(self.modules[0]):
            for name, own in module._parameters.items():
                if own is parameter:
                    return self._add_parameter(self.addresses.get(id(module), address), name, own)
        return None

    def _add_parameter(self, address: str, name: str, parameter: torch.nn.Parameter) -> int:
        full = f"{address}.{name}" if address else name
        for number, known in enumerate(self.params):
            if known is parameter or (known.is_meta and self.param_addresses[number] == full):
                return number
        self.params.append(parameter)
        self.param_addresses.append(full)
        number = len(self.params) - 1
        self.module_params[address] = (*self.module_params.get(address, ()), number)
        return number


def parts_of(model: torch.nn.Module) -> Parts:
    """Collects the parts of a model, each module once.

    This is optimised: it is a considerable part of the time of a short log.
    """
    parts = Parts()
    modules, addresses, classes, params, buffers = (
        parts.modules, parts.addresses, parts.classes, parts.params, parts.buffers,
    )  # fmt: skip
    numbers: dict[int, int] = {}
    for address, module in named_modules(model, parts.aliases):
        kind = type(module)
        modules.append(module)
        addresses[id(module)] = address
        classes[address] = kind.__name__
        if issubclass(kind, torch.jit.ScriptModule):
            parts.scripted.add(id(module))
            classes[address] = getattr(module, "original_name", None) or kind.__name__
        if kind.__name__ == "InterpreterModule":
            # A module of an exported program; newer releases of torch know its class.
            known = getattr(module, "_ty", None) or kind.__name__
            classes[address] = known.rpartition(".")[2]
        if module._compiled_call_impl is not None:
            parts.compiled.append((module, module._compiled_call_impl))
        prefix = f"{address}." if address else ""
        own_params: list[int] = []
        for name, parameter in module._parameters.items():
            if parameter is not None:
                number = numbers.setdefault(id(parameter), len(params))
                if number == len(params):
                    params.append(parameter)
                    parts.param_addresses.append(prefix + name)
                else:
                    parts.aliases[prefix + name] = parts.param_addresses[number]
                own_params.append(number)
        if kind.__module__.startswith(_QUANTIZED):
            _add_packed(parts, module, prefix, own_params)
        parts.module_params[address] = tuple(own_params)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((prefix + name, buffer))
    if isinstance(model, CalledModel):
        classes[""] = model.title
    return parts


_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def _add_packed(parts: Parts, module: Any, prefix: str, own_params: list[int]) -> None:
    """Adds the weight and bias that a quantized module keeps in one packed object."""
    packed = getattr(module, "_packed_params", None)
    packed = getattr(packed, "_packed_params", packed)  # a module around it
    if not isinstance(packed, torch.ScriptObject):
        return
    numbers = []
    for name in ("weight", "bias"):
        value = getattr(module, name)() if hasattr(module, name) else None
        if isinstance(value, torch.Tensor):
            numbers.append(len(parts.params))
            parts.params.append(torch.nn.Parameter(value.detach(), requires_grad=False))
            parts.param_addresses.append(prefix + name)
    if numbers:
        parts.packed[id(packed)] = tuple(numbers)
    own_params += numbers


def named_modules(
    model: torch.nn.Module, aliases: dict[str, str] | None = None
) -> list[tuple[str, torch.nn.Module]]:
    """Each module once, with its address, outer modules first; `aliases` receives the further
    addresses of shared modules.

    As `model.named_modules()` but faster, and a part that `torch.compile` wrapped has its own
    address without `_orig_mod`; its wrapper is none.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    seen: dict[int, str] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        address, module = named = pending.pop()
        if module is None:
            continue
        if id(module) in seen:
            if aliases is not None:
                aliases[address] = seen[id(module)]
        else:
            seen[id(module)] = address
            children = module._modules
            if not address or "_orig_mod" not in children:
                found.append(named)
            if children:
                prefix = f"{address}." if address else ""
                for name, child in reversed(children.items()):
                    pending.append((address if name == "_orig_mod" else prefix + name, child))
    return found


# A reference to a trainer, for instance, leads to the whole program.
_MAX_OBJECTS = 20_000
_MAX_DEPTH = 8
_TORCHS_OWN = frozenset(vars(torch.nn.Module()))


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module other than those of torch.nn.Module itself."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


class Attributes:
    """The attribute tensors of some modules; `addresses` maps the id of a module to its address."""

    def __init__(self, modules: Sequence[torch.nn.Module], addresses: Mapping[int, str]) -> None:
        self._modules = modules
        self._addresses = addresses
        self._found: dict[int, tuple[str, weakref.ref[torch.Tensor]]] | None = None

    def address_of(self, tensor: torch.Tensor) -> str | None:
        """The address of an attribute tensor, the shortest path if there are several; None if
        unknown.
        """
        address, found = self._all().get(id(tensor), ("", None))
        return address if found is not None and found() is tensor else None

    def add(self, address: str, tensor: torch.Tensor) -> None:
        """Names a tensor of a module that was found while the model ran."""
        self._all()[id(tensor)] = address, weakref.ref(tensor)

    def _all(self) -> "dict[int, tuple[str, weakref.ref[torch.Tensor]]]":
        if self._found is None:
            self._found = _look_through(
                (self._addresses[id(module)], module) for module in self._modules
            )
        return self._found


def _look_through(
    modules: Iterable[tuple[str, torch.nn.Module]],
) -> dict[int, tuple[str, weakref.ref[torch.Tensor]]]:
    found: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
    seen: set[int] = set()
    pending: deque[tuple[str, Any, int]] = deque()
    for address, module in modules:
        prefix = f"{address}." if address else ""
        pending.extend((prefix + name, value, 0) for name, value in own_attributes(module).items())
        pending.extend(
            (prefix + name, value, 0) for name, value in _class_attributes(type(module)).items()
        )
    while pending and len(seen) < _MAX_OBJECTS:
        address, item, depth = pending.popleft()
        if isinstance(item, torch.Tensor):
            found.setdefault(id(item), (address, weakref.ref(item)))
        elif not isinstance(item, OPAQUE_TYPES) and depth < _MAX_DEPTH and id(item) not in seen:
            seen.add(id(item))
            pending.extend((f"{address}.{key}", child, depth + 1) for key, child in _held_by(item))
    return found


def _class_attributes(kind: type) -> dict[str, Any]:
    """The class attributes of a module that are tensors, or containers that may hold some."""
    held: dict[str, Any] = {}
    for base in kind.__mro__:
        if base is torch.nn.Module:
            break
        for name, value in vars(base).items():
            if not name.startswith("__") and _may_hold_tensors(value):
                held.setdefault(name, value)
    return held


def _held_by(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, dict):
        return list(item.items())
    if isinstance(item, list | tuple | deque | set | frozenset):
        return list(enumerate(item))
    return attributes_of(item)


def _may_hold_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | tuple | dict | deque)
