"""Any callable as a model: a function, a bound method such as `model.generate`, a pipeline.

The models that it computes with are found beforehand: the one that a method is bound to, those in
closures, in globals that the code names, in attributes and among the arguments. If there is one,
its modules have the addresses that they have in that model; if there are several, they begin with
the names by which the callable knows them.
"""

import functools
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from torchlens._recording.frameworks import as_model
from torchlens._recording.functions import names_used_by, values_used_by
from torchlens._recording.trees import OPAQUE_TYPES, attributes_of

_MAX_DEPTH = 4
_MAX_OBJECTS = 5_000


class CalledModel(torch.nn.Module):
    """A callable in the form of a module; its children are the models that the callable uses."""

    def __init__(self, function: Callable[..., Any], *inputs: Any) -> None:
        super().__init__()
        self.title = _title(function)
        owners = _owners(function, inputs)
        # The only one has the empty name, so that its modules have their own addresses.
        self._modules.update({"": next(iter(owners.values()))} if len(owners) == 1 else owners)
        self.forward = function
        self.training = any(owner.training for owner in owners.values())


def model_of(model: Any, *inputs: Any) -> Any:
    """What is given as a model, in the form that the rest takes: a module as it is, an exported
    program as the modules that it was exported from, any other callable as a CalledModel, or as a
    model of JAX.
    """
    model = as_model(model, *inputs)
    if isinstance(model, torch.nn.Module):
        return model
    if type(model).__name__ == "ExportedProgram" and type(model).__module__.startswith("torch."):
        with warnings.catch_warnings():  # torch's own, from the way in which it copies a program
            warnings.simplefilter("ignore", FutureWarning)
            return torch.export.unflatten(model)
    if not callable(model) or isinstance(model, type | torch.Tensor) or hasattr(model, "session"):
        return model
    return CalledModel(model, *inputs)


def _title(function: Any) -> str:
    """`train_step`, or `Net.generate` for a method."""
    if isinstance(function, functools.partial):
        return _title(function.func)
    if isinstance(function, torch.nn.Module):
        return type(function).__name__
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return type(function).__name__
    owner = getattr(function, "__self__", None)
    if isinstance(function, MethodType) and owner is not None:
        kind = owner if isinstance(owner, type) else type(owner)
        return f"{kind.__name__}.{name}"
    return name.strip("<>")


def _owners(function: Any, inputs: tuple[Any, ...]) -> dict[str, torch.nn.Module]:
    """The models that a callable uses, by the names it has for them. Models inside others are left
    out.
    """
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    pending: deque[tuple[str, Any, int]] = deque([("", function, 0)])
    pending += [(name, value, 1) for name, value in _named_inputs(function, inputs)]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_OBJECTS:
        name, item, depth = pending.popleft()
        if isinstance(item, torch.nn.Module):
            found.setdefault(id(item), (name, item))
        elif depth <= _MAX_DEPTH and id(item) not in seen:
            seen.add(id(item))
            pending += [(own or name, value, depth + 1) for own, value in _held_by(item)]
    inner = {id(module) for _, owner in found.values() for module in list(owner.modules())[1:]}
    owners: dict[str, torch.nn.Module] = {}
    for number, (name, owner) in found.items():
        if number not in inner:
            owners[_unused(name or type(owner).__name__, owners)] = owner
    return owners


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    free, number = name.replace(".", "_"), 2
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _named_inputs(function: Any, inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Positional inputs by the names of the callable's parameters, then those with names."""
    args, kwargs = (*inputs, None, None)[:2]
    if isinstance(args, torch.nn.Module) or not isinstance(args, list | tuple):
        args = [args]
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C, or scripted
        names = []
    named = [(names[at] if at < len(names) else "", value) for at, value in enumerate(args)]
    return named + (list(kwargs.items()) if isinstance(kwargs, Mapping) else [])


def _held_by(item: Any) -> list[tuple[str, Any]]:
    """What a callable, a container or an object holds, with the name of each; "" if it has none."""
    if isinstance(item, functools.partial):
        return [("", item.func), *(("", arg) for arg in item.args), *item.keywords.items()]
    if isinstance(item, MethodType):
        return [("", item.__self__), ("", item.__func__)]
    if isinstance(item, FunctionType):
        return list(_named_in(item))
    if isinstance(item, Mapping):
        return [(key if isinstance(key, str) else "", value) for key, value in item.items()]
    if isinstance(item, list | tuple | set | frozenset):
        return [("", value) for value in item]
    if isinstance(item, (*OPAQUE_TYPES, torch.Tensor)):
        return []
    held = [(str(name), value) for name, value in attributes_of(item)]
    call = inspect.getattr_static(type(item), "__call__", None)
    return [*held, ("", call)] if isinstance(call, FunctionType) else held


def _named_in(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The closures, defaults and globals that the code of a function names."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        return
    yield "", getattr(function, "__wrapped__", None)
    for name, value in values_used_by(function).items():
        if isinstance(value, ModuleType):
            yield from _models_in(value, function)
        elif value is not None:
            yield name, value
    yield from (("", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _models_in(module: ModuleType, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The models in a module of Python that a function names: `nets.encoder(x)`."""
    for name in names_used_by(function):
        value = vars(module).get(name)
        if isinstance(value, torch.nn.Module):
            yield name, value
