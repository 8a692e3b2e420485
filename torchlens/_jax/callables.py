"""Inspects a JAX callable: its name, arguments, and the trees that may hold its weights.

`KeptState` restores the attributes of its objects after a validation.
"""

import functools
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax

from torchlens._jax.arrays import is_array
from torchlens._jax.internals import is_pmapped
from torchlens._jax.primitive_recorder import CURRENT
from torchlens._jax.pytrees import parts_of
from torchlens._recording.functions import values_used_by
from torchlens._recording.trees import Path

_MAX_CLOSURES = 6


class Holder(NamedTuple):
    """A tree that may hold weights, and the name of its variable ("" for the callable itself)."""

    name: str
    tree: Any


class Layers:
    """Runs a dict or list of layers in turn: each gets the result of the one before."""

    def __init__(self, layers: Any, path: Path = ()) -> None:
        self.layers = layers
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        items = self.layers.items() if isinstance(self.layers, Mapping) else enumerate(self.layers)
        result: Any = None
        for place, (key, layer) in enumerate(items):
            given = (args, kwargs) if place == 0 else ((result,), {})
            result = self._run(layer, (*self._path, key), *given)
        return result

    def _run(self, layer: Any, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = layer if callable(layer) else Layers(layer, path)
        if CURRENT.tracker is None:
            return run(*args, **kwargs)
        # Functions have no class to patch. The second report of a module is ignored.
        return CURRENT.tracker.call_at(".".join(map(str, path)), layer, run, args, kwargs)


def called(model: Any) -> Any:
    """The model as a callable: a dict or list of layers becomes `Layers`."""
    if isinstance(model, jax.stages.Compiled | jax.stages.Lowered):
        raise TypeError(
            f"model must be a function, got {type(model).__name__}, a compiled program. Give the "
            "function itself, or the jitted function before lower() and compile()."
        )
    return model if callable(model) else Layers(model)


def unjitted(model: Any) -> Any:
    """The function inside a jitted one (of JAX or Equinox); any other object unchanged."""
    while hasattr(model, "lower") and hasattr(model, "__wrapped__") and not is_pmapped(model):
        model = model.__wrapped__
    return model


def is_jitted(model: Any) -> bool:
    return unjitted(model) is not model


def _core(model: Any) -> Any:
    """The callable inside the wrappers of jit, grad, vmap and the like."""
    while not isinstance(model, MethodType) and hasattr(model, "__wrapped__"):
        model = model.__wrapped__
    return model


def linen_module(model: Any) -> Any:
    """The flax linen module whose bound method (`apply`, `init`) this is, or None."""
    linen = sys.modules.get("flax.linen")
    model = _core(model)
    owner = getattr(model, "__self__", None)
    if linen is None or not isinstance(model, MethodType) or not isinstance(owner, linen.Module):
        return None
    return owner if model.__name__ in ("apply", "init_with_output", "init") else None


def name_of(model: Any) -> str:
    """The name of the class or function."""
    model = _core(model)
    if isinstance(model, functools.partial):
        return name_of(model.func)
    if isinstance(model, Layers):
        return type(model.layers).__name__
    owner = getattr(model, "__self__", None)
    if isinstance(model, MethodType) and owner is not None and not isinstance(owner, ModuleType):
        return (owner if isinstance(owner, type) else type(owner)).__name__
    name = getattr(model, "__name__", None)
    return name if isinstance(name, str) else type(model).__name__


def signature_of(model: Any) -> inspect.Signature | None:
    """The signature; of linen's `apply`, the variables and the parameters of `__call__`."""
    target = (
        model.__call__
        if not isinstance(model, FunctionType | MethodType) and _is_object(model)
        else model
    )
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return None
    module = linen_module(model)
    if module is None:
        return signature
    try:
        own = list(inspect.signature(type(module).__call__).parameters.values())[1:]
    except (AttributeError, TypeError, ValueError):
        return signature
    first = next(iter(signature.parameters.values()))
    plain = [parameter for parameter in own if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    rest = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    bare = [
        parameter.replace(default=inspect.Parameter.empty, kind=first.kind)
        for parameter in (first, *plain)
    ]
    return inspect.Signature([*bare, *rest])


def _is_object(model: Any) -> bool:
    """True for an instance of a class with `__call__`, without a signature of its own."""
    return (
        not hasattr(model, "__wrapped__")
        and not isinstance(model, functools.partial)
        and not hasattr(model, "__code__")
    )


def argument_paths(model: Any, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[Path, Any]]:
    """The arguments, each with the name of its parameter."""
    signature = signature_of(model)
    names: list[str] = []
    rest = "args"
    if signature is not None:
        parameters = list(signature.parameters.values())
        names = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), rest)
    found: list[tuple[Path, Any]] = [
        ((names[position],) if position < len(names) else (rest, position - len(names)), argument)
        for position, argument in enumerate(args)
    ]
    return [*found, *(((name,), argument) for name, argument in kwargs.items())]


def holders_in(model: Any) -> list[Holder]:
    """The trees that may hold weights: the callable itself, its bound arguments, closure variables,
    globals and defaults.
    """
    return list(_holders(model, "", set(), 0))


def _holders(model: Any, name: str, seen: set[int], depth: int) -> list[Holder]:
    model = _core(model)
    if id(model) in seen or depth > _MAX_CLOSURES:
        return []
    seen.add(id(model))
    if isinstance(model, functools.partial):
        names = [str(path[0]) for path, _ in argument_paths(model.func, list(model.args), {})]
        bound = [*zip(names, model.args, strict=True), *model.keywords.items()]
        found = [holder for key, value in bound for holder in _held(value, key, seen, depth)]
        return [*found, *_holders(model.func, name, seen, depth + 1)]
    if isinstance(model, MethodType):
        own = _held(model.__self__, name, seen, depth)
        return [*own, *_function_holders(model.__func__, seen, depth)]
    if isinstance(model, FunctionType):
        return _function_holders(model, seen, depth)
    if isinstance(model, ModuleType | type):
        return []
    return [Holder(name, model.layers if isinstance(model, Layers) else model)]


def _function_holders(function: Any, seen: set[int], depth: int) -> list[Holder]:
    return [
        holder
        for name, value in _named_values(function).items()
        for holder in _held(value, name, seen, depth)
    ]


def _named_values(function: Any) -> dict[str, Any]:
    """The values of the closure variables, globals and defaults that a function uses."""
    if getattr(function, "__code__", None) is None or _is_library(function):
        return {}
    defaults = enumerate(function.__defaults__ or ())
    return values_used_by(function) | {f"default_{n}": value for n, value in defaults}


def _held(value: Any, name: str, seen: set[int], depth: int) -> list[Holder]:
    if isinstance(value, ModuleType | type) or value is None:
        return []
    if isinstance(value, FunctionType | MethodType | functools.partial) or hasattr(
        value, "__wrapped__"
    ):
        return _holders(value, name, seen, depth + 1)
    if id(value) in seen:
        return []
    seen.add(id(value))
    return [Holder(name, value)] if any(True for _ in parts_of(value)) else []


def _is_library(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in (
        "jax",
        "jaxlib",
        "flax",
        "equinox",
        "optax",
        "numpy",
        "functools",
        "torchlens",
    )


# -- restoring state
# -------------------------------------------------------------------------------------------------


class KeptState:
    """Copies and restores the attributes of every object in a callable and its arguments."""

    def __init__(self, model: Any, arguments: Any) -> None:
        self._objects: dict[int, tuple[Any, Any, list[tuple[Any, Any]]]] = {}
        for tree in (*(holder.tree for holder in holders_in(model)), arguments):
            for part in parts_of(tree):
                for value in (part.value, part.variable):
                    self._keep(value)

    def _keep(self, value: Any) -> None:
        if id(value) in self._objects or value is None or is_array(value) or _is_frozen(value):
            return
        if isinstance(value, dict | list):
            self._objects[id(value)] = (value, value.copy(), [])
        else:
            self._objects[id(value)] = (
                value,
                dict(getattr(value, "__dict__", {})),
                _slots_of(value),
            )

    def restore(self) -> None:
        """Restores the attributes."""
        for value, before, slots in self._objects.values():
            if isinstance(value, list):
                value[:] = before
                continue
            own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            own.clear()
            own.update(before)
            for slot, content in slots:
                slot.__set__(value, content)


def _slots_of(value: Any) -> list[tuple[Any, Any]]:
    """The attributes in `__slots__`, as descriptors and values."""
    found = []
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):  # written in C: cannot be set
            continue
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                try:
                    found.append((slot, slot.__get__(value)))
                except AttributeError:  # not set yet
                    continue
    return found


def _is_frozen(value: Any) -> bool:
    parameters: Any = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)
