"""Finds which framework a model belongs to, without importing the framework."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch

from torchlens._recording.functions import values_used_by

# A module of torch, a callable of JAX, or a dict or list of layers of JAX.
Model: TypeAlias = (
    torch.nn.Module | Callable[..., Any] | Mapping[str, Any] | list[Any] | tuple[Any, ...]
)


class OtherModel:
    """Adapter: a callable, and the session that records it."""

    name: str
    forward: Callable[..., Any]

    def session(self, options: Any) -> Any:
        """A session that runs and records the callable once, as `Session` of `_capture/session.py`
        does a module.
        """
        raise NotImplementedError


_OF_JAX = frozenset({"jax", "jaxlib", "flax", "equinox", "optax", "haiku", "chex"})
_MAX_DEPTH = 4


def as_model(model: Any, *inputs: Any) -> Any:
    """Wraps a callable of JAX in an `OtherModel`; returns any other model as it is."""
    if not is_for_jax(model, *inputs):
        return model
    from torchlens._jax.jax_session import JaxModel

    return JaxModel(model)


def is_for_jax(model: Any, *inputs: Any) -> bool:
    """True if `model` is a JAX callable, or a dict or list of JAX layers.

    A plain function counts if its inputs are JAX arrays, or if its code refers to JAX.
    """
    jax = sys.modules.get("jax")
    if jax is None or isinstance(model, torch.nn.Module | torch.Tensor | type | OtherModel):
        return False
    if not callable(model) and not _holds_layers(model):
        return False
    leaves = [part for leaf in _leaves(inputs) for part in _registered_parts(leaf, jax)]
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return False
    return any(isinstance(leaf, jax.Array) for leaf in leaves) or _is_of_jax(model, jax, 0)


def _is_of_jax(model: Any, jax: Any, depth: int) -> bool:
    """Whether it comes from JAX or a library on top of it, holds an array of JAX, or names one of
    them in its code.
    """
    if depth > _MAX_DEPTH:
        return False
    if isinstance(model, jax.Array) or _has_jax_name(model):
        return True
    return any(_is_of_jax(part, jax, depth + 1) for part in _parts(model) if part is not None)


def _has_jax_name(model: Any) -> bool:
    """Whether its class, or a name in its code, is of JAX or a library on top of it."""
    kinds = list(type(model).__mro__)
    named = list(values_used_by(model).values()) if isinstance(model, FunctionType) else []
    modules = [kind.__module__ for kind in (*kinds, *map(type, named))]
    return any(map(_is_jax_name, (*modules, *map(_module_of, named))))


def _parts(model: Any) -> list[Any]:
    """What a callable or a container consists of, to look for JAX in."""
    if isinstance(model, Mapping | list | tuple):
        return list(model.values() if isinstance(model, Mapping) else model)
    if isinstance(model, functools.partial):
        return [model.func, *model.args, *model.keywords.values()]
    if isinstance(model, MethodType):
        return [model.__self__, model.__func__]
    if isinstance(model, FunctionType):
        inner = [
            value for value in values_used_by(model).values() if isinstance(value, FunctionType)
        ]
        return [getattr(model, "__wrapped__", None), *inner]
    if isinstance(model, type | ModuleType):
        return []
    attributes = getattr(model, "__dict__", {}).values()
    return [*attributes, inspect.getattr_static(type(model), "__call__", None)]


def _module_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else type(value).__module__


def _is_jax_name(module: str) -> bool:
    return module.partition(".")[0] in _OF_JAX


def _holds_layers(model: Any) -> bool:
    """True for a dict or list, possibly nested, whose items are all callable."""
    if not isinstance(model, Mapping | list | tuple) or not model:
        return False
    items = model.values() if isinstance(model, Mapping) else model
    return all(
        (callable(item) and not isinstance(item, torch.nn.Module)) or _holds_layers(item)
        for item in items
    )


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(tree, Mapping | list | tuple) and depth < 10:
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(item, depth + 1)
    else:
        yield tree


def _registered_parts(leaf: Any, jax: Any) -> list[Any]:
    """What is in an object of a class that its owner registered with JAX; any other object
    alone.
    """
    try:
        found: list[Any] = jax.tree_util.tree_leaves(leaf)
    except (TypeError, ValueError):  # dicts in it, with keys that cannot be sorted
        return [leaf]
    return found or [leaf]


def title_of(model: Any) -> str:
    """The name of a model's function for a message: `Net.forward`, or the name of a JAX
    function.
    """
    if isinstance(model, OtherModel):
        return model.name
    return getattr(model, "title", None) or f"{type(model).__name__}.forward"
