"""Looking into whatever holds arrays: pytrees, modules of Equinox and nnx, plain objects."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torchlens._jax.arrays import is_array
from torchlens._recording.trees import Path

_MAX_DEPTH = 30
_PLAIN = (
    *(str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.dtype),
    *(FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module, torch.Tensor),
)


class Part(NamedTuple):
    """Something inside a tree, and the path that leads to it. `variable` is the nnx variable that
    holds an array.
    """

    path: Path
    value: Any
    variable: Any = None


def is_variable(value: Any) -> bool:
    """Whether it is a variable of flax nnx, or another box around one array (`nn.Partitioned`)."""
    return hasattr(type(value), "get_raw_value") or hasattr(type(value), "unbox")


def raw_value(variable: Any) -> Any:
    """The array in a variable."""
    return (
        variable.get_raw_value() if hasattr(type(variable), "get_raw_value") else variable.unbox()
    )


def parts_of(tree: Any) -> Iterator[Part]:
    """Every array and every object inside `tree`, itself first, by the path that a person would
    write to reach it.

    An object that stands in several places is told at the first; an array at each.
    """
    yield from _walk(tree, (), {}, 0)


def _walk(tree: Any, path: Path, seen: dict[int, Any], depth: int) -> Iterator[Part]:
    if is_array(tree) or isinstance(tree, jax.core.Tracer):
        yield Part(path, tree)
        return
    if isinstance(tree, _PLAIN) or depth > _MAX_DEPTH or id(tree) in seen:
        return
    seen[id(tree)] = (
        # kept alive: a state of nnx makes its parts anew for whoever asks, and ids are used again
        tree
    )
    if is_variable(tree):
        for part in _walk(raw_value(tree), path, seen, depth + 1):
            yield part._replace(variable=tree)
        return
    yield Part(path, tree)
    for key, item in _children(tree):
        yield from _walk(item, (*path, key), seen, depth + 1)


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", None)
        return list(zip(names, tree, strict=True)) if names else list(enumerate(tree))
    if isinstance(tree, list):
        return list(enumerate(tree))
    if isinstance(tree, functools.partial):
        return [*enumerate(tree.args), *tree.keywords.items()]
    if dataclasses.is_dataclass(tree) or hasattr(tree, "__dict__"):
        names = (
            [field.name for field in dataclasses.fields(tree)]
            if dataclasses.is_dataclass(tree)
            else []
        )
        names += [
            name
            for name in getattr(tree, "__dict__", ())
            if not name.startswith("_") and name not in names
        ]
        if names:
            return [
                (int(name) if name.isdigit() else name, getattr(tree, name))
                for name in names
                if hasattr(tree, name)
            ]
    return _pytree_children(tree)


def _pytree_children(tree: Any) -> list[tuple[Any, Any]]:
    """Of something that is only known as a pytree: with slots, written in C, or private all through
    (Equinox's state).
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(key_word(keys[0]), value) for keys, value in leaves if keys]


def key_word(key: Any) -> Any:
    """What a person writes for a step of JAX's own paths through trees."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def array_leaves(tree: Any) -> list[Part]:
    """The arrays alone."""
    return [part for part in parts_of(tree) if is_array(part.value)]
