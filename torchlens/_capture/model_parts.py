"""What a model consists of: modules, parameters and buffers, by address."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Parts:
    """What a model consists of, by address, outer modules first; shared ones stand where they were
    met first.
    """

    modules: list[torch.nn.Module] = field(default_factory=list)
    addresses: dict[int, str] = field(default_factory=dict)  # id of a module → its address
    classes: dict[str, str] = field(default_factory=dict)
    scripted: set[int] = field(default_factory=set)  # ids
    compiled: list[tuple[Any, Any]] = field(
        default_factory=list
    )  # modules that `compile()` was called on
    param_addresses: list[str] = field(default_factory=list)
    params: list[torch.nn.Parameter] = field(default_factory=list)
    module_params: dict[str, tuple[int, ...]] = field(default_factory=dict)  # index into params
    buffers: list[tuple[str, torch.Tensor]] = field(default_factory=list)


def parts_of(model: torch.nn.Module) -> Parts:
    """Takes a model apart, each module once: in a short log, that is as much work as any other
    step.
    """
    parts = Parts()
    modules, addresses, classes, params, buffers = (
        parts.modules, parts.addresses, parts.classes, parts.params, parts.buffers,
    )  # fmt: skip
    numbers: dict[int, int] = {}
    for address, module in named_modules(model):
        kind = type(module)
        modules.append(module)
        addresses[id(module)] = address
        classes[address] = kind.__name__
        if issubclass(kind, torch.jit.ScriptModule):
            parts.scripted.add(id(module))
            classes[address] = getattr(module, "original_name", None) or kind.__name__
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
                own_params.append(number)
        parts.module_params[address] = tuple(own_params)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((prefix + name, buffer))
    return parts


def named_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Each module once, with its address, outer ones first; `_orig_mod` of compiled modules is left
    out of addresses.

    The same as `model.named_modules()` in a fraction of the time.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        address, module = named = pending.pop()
        if id(module) not in seen and module is not None:
            seen.add(id(module))
            found.append(named)
            children = module._modules
            if children:
                prefix = f"{address}." if address else ""
                for name, child in reversed(children.items()):
                    pending.append((address if name == "_orig_mod" else prefix + name, child))
    return found
