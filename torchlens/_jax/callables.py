"""What a JAX callable is made of: what runs, its name and arguments, where its weights may be, and
the attributes of its objects, which validation restores.
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
from torchlens._jax.pytrees import parts_of
from torchlens._jax.recorder import CURRENT
from torchlens._recording.trees import Path

_MAX_CLOSURES = 6


class Holder(NamedTuple):
    """A tree that may hold weights, and the name by which the callable reaches it ("" for the
    callable itself).
    """

    name: str
    tree: Any


class Layers:
    """A dict or list of layers, run one after the other: each gets what the one before returned."""

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
        # A function has no class whose calls could be watched; an object is the same module that
        # its class would tell of.
        return CURRENT.tracker.call_at(".".join(map(str, path)), layer, run, args, kwargs)


def called(model: Any) -> Any:
    """What is called where the model is a dict or list of layers; otherwise the model."""
    if isinstance(model, jax.stages.Compiled | jax.stages.Lowered):
        raise TypeError(
            f"model must be a function that can be run step by step, got {type(model).__name__}, a "
            "program made from one. Give the function itself, or the jitted function before "
            "lower() and compile()."
        )
    return model if callable(model) else Layers(model)


def unjitted(model: Any) -> Any:
    """The function that a jitted one (JAX's, Equinox's) compiles; any other object as it is."""
    while hasattr(model, "lower") and hasattr(model, "__wrapped__") and not is_pmapped(model):
        model = model.__wrapped__
    return model


def is_jitted(model: Any) -> bool:
    return unjitted(model) is not model


def _core(model: Any) -> Any:
    """What is inside of jit, grad, vmap and the like, which say what they wrap."""
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
    """What it can be called with; of a linen module's `apply`, what its `__call__` takes after the
    variables.
    """
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
    """Whether it is an instance of a class with `__call__`, without a signature of its own."""
    return (
        not hasattr(model, "__wrapped__")
        and not isinstance(model, functools.partial)
        and not hasattr(model, "__code__")
    )


def argument_paths(model: Any, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[Path, Any]]:
    """The arguments, each with the name it arrives under."""
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
    """Trees that the callable brings along: itself, what is bound to it, what its closures and
    globals name.
    """
    return list(_holders(model, "", set(), 0))


def _holders(model: Any, name: str, seen: set[int], depth: int) -> list[Holder]:
    model = _core(model)
    if id(model) in seen or depth > _MAX_CLOSURES:
        return []
    seen.add(id(model))
    if isinstance(model, Layers):
        return [Holder(name, model.layers)]
    if isinstance(model, functools.partial):
        names = [str(path[0]) for path, _ in argument_paths(model.func, list(model.args), {})]
        bound = [*zip(names, model.args, strict=True), *model.keywords.items()]
        found = [holder for key, value in bound for holder in _held(value, key, seen, depth)]
        return [*found, *_holders(model.func, name, seen, depth + 1)]
    if isinstance(model, MethodType):
        return [
            *_held(model.__self__, name, seen, depth),
            *_function_holders(model.__func__, seen, depth),
        ]
    if isinstance(model, FunctionType):
        return _function_holders(model, seen, depth)
    return [] if isinstance(model, ModuleType | type) else [Holder(name, model)]


def _function_holders(function: Any, seen: set[int], depth: int) -> list[Holder]:
    """The values of the closure variables, globals and defaults that a function uses."""
    code = getattr(function, "__code__", None)
    if code is None or _is_library(function):
        return []
    named: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            named[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    used = {name for inner in _codes(code) for name in inner.co_names}
    named |= {name: function.__globals__[name] for name in used if name in function.__globals__}
    named |= {f"default_{place}": value for place, value in enumerate(function.__defaults__ or ())}
    return [holder for name, value in named.items() for holder in _held(value, name, seen, depth)]


def _codes(code: Any) -> list[Any]:
    """The code and that of the functions inside it."""
    inner = [const for const in code.co_consts if inspect.iscode(const)]
    return [code, *(found for const in inner for found in _codes(const))]


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


# -- what a call may change
# -------------------------------------------------------------------------------------------------


class KeptState:
    """The attributes of every object that a callable and its arguments hold, to be put back:
    counters, statistics.
    """

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
        """Puts everything back."""
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
    """The attributes that are no items of a dict, as the descriptors that set them, and their
    values.
    """
    found = []
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):  # written in C: what it has of its own cannot be set
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
