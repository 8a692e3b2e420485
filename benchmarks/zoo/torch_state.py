"""What a log must leave as it was: torch's namespaces, the mode stack, the model's attributes and
hooks.
"""

import gc
from types import FunctionType
from typing import Any

import torch
import torch.nn.init
import torch.overrides
from torch._functorch import apis, eager_transforms
from torch.autograd import function as autograd_function

__all__ = ["changes_of_model", "changes_of_torch", "state_of_model", "state_of_torch"]

# Every place where torch keeps the functions that a forward pass can reach.
_NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch._C._TensorBase": torch._C.TensorBase,
    "torch._tensor": torch._tensor,
    "torch.functional": torch.functional,
    "torch.nn.functional": torch.nn.functional,
    "torch.nn.init": torch.nn.init,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.Parameter": torch.nn.Parameter,
    "torch.nn.modules.module": torch.nn.modules.module,
    "torch.overrides": torch.overrides,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.sparse": torch.sparse,
    "torch.nested": torch.nested,
    "torch._VF": torch._VF,
    "torch._C._nn": torch._C._nn,
    "torch._C._VariableFunctions": torch._C._VariableFunctionsClass,  # type: ignore[attr-defined]
    "torch._C.ScriptFunction": torch._C.ScriptFunction,
    "torch.autograd.function": autograd_function,
    "torch.autograd.function._SingleLevelFunction": autograd_function._SingleLevelFunction,
    "torch._functorch.apis": apis,
    "torch._functorch.eager_transforms": eager_transforms,
}
_MISSING = object()


def state_of_torch() -> dict[str, dict[str, Any]]:
    """Each namespace's names with the very objects they stand for."""
    return {place: _names(namespace) for place, namespace in _NAMESPACES.items()}


def _names(namespace: Any) -> dict[str, Any]:
    """What stands in a namespace, and what stands in its functions."""
    names = dict(vars(namespace))
    codes = {
        f"{name}.__code__": value.__code__
        for name, value in names.items()
        if isinstance(value, FunctionType)
    }
    return {**names, **codes}


def changes_of_torch(before: dict[str, dict[str, Any]]) -> list[str]:
    """In words, each name that stands for another object than before, and modes left on."""
    found = []
    for place, names in before.items():
        now = _names(_NAMESPACES[place])
        # A submodule that was imported meanwhile is a new name, and none of ours.
        changed = [name for name in names if now.get(name, _MISSING) is not names[name]]
        found += [f"{place}.{name} is another object" for name in changed]
        found += [
            f"{place}.{name} is new"
            for name in now
            if name not in names
            and ("torchlens" in name or "torchlens" in getattr(now[name], "__module__", ""))
        ]
    depth = torch._C._len_torch_function_stack()
    if depth:
        found.append(f"{depth} torch function modes are on")
    if not gc.isenabled():
        found.append("the garbage collector is off")
    return found


def state_of_model(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Each module's attributes, hooks included (copied, so that a hook added later shows)."""
    return {
        address: {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(module).items()
        }
        for address, module in model.named_modules()
    }


def changes_of_model(before: dict[str, dict[str, Any]], model: torch.nn.Module) -> list[str]:
    """Attributes and hooks that came or went. Values that the model itself may set (caches,
    counters) may differ.
    """
    now = state_of_model(model)
    found = [f"module {address!r} came or went" for address in before.keys() ^ now.keys()]
    for address in before.keys() & now.keys():
        for name in before[address].keys() ^ now[address].keys():
            found.append(f"attribute {name!r} of {address!r} came or went")
        for name in before[address].keys() & now[address].keys():
            if name.endswith("_hooks") and before[address][name] != now[address][name]:
                found.append(f"{name} of {address!r} changed")
    for address, parameter in model.named_parameters():
        if parameter._backward_hooks:
            found.append(f"parameter {address!r} has hooks")
    return found
