"""Finds the arrays inside pytrees, modules of Equinox and nnx, and plain objects."""

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


class TreePart(NamedTuple):
    """An array or object inside a tree, and its path. `variable` is the nnx variable that holds the
    array.
    """

    path: Path
    value: Any
    variable: Any = None


def is_variable(value: Any) -> bool:
    """True for a variable of flax nnx, and for linen's box around an array (`nn.Partitioned`)."""
    return hasattr(type(value), "get_raw_value") or hasattr(type(value), "unbox")


def raw_value(variable: Any) -> Any:
    """The array in a variable."""
    return (
        variable.get_raw_value() if hasattr(type(variable), "get_raw_value") else variable.unbox()
    )


def parts_of(tree: Any) -> Iterator[TreePart]:
    """Every array and every object inside `tree`, itself first, each with its path of keys and
    attributes.

    An object that occurs in several places has one part, the first; an array has one for each.
    """
    yield from _walk(tree, (), {}, 0)


def _walk(tree: Any, path: Path, seen: dict[int, Any], depth: int) -> Iterator[TreePart]:
    if is_array(tree) or isinstance(tree, jax.core.Tracer):
        yield TreePart(path, tree)
        return
    if isinstance(tree, _PLAIN) or depth > _MAX_DEPTH or id(tree) in seen:
        return
    seen[id(tree)] = tree  # keeps it alive, so that its id is unique: nnx makes states on demand
    if is_variable(tree):
        for part in _walk(raw_value(tree), path, seen, depth + 1):
            yield part._replace(variable=tree)
        return
    yield TreePart(path, tree)
    for key, item in _children(tree):
        yield from _walk(item, (*path, key), seen, depth + 1)


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True))
    if isinstance(tree, tuple | list):
        return list(enumerate(tree))
    if isinstance(tree, functools.partial):
        return [*enumerate(tree.args), *tree.keywords.items()]
    return _attributes(tree) or _pytree_children(tree)


def _attributes(tree: Any) -> list[tuple[Any, Any]]:
    """The fields of a dataclass, and the public attributes."""
    names = [name for name in getattr(tree, "__dict__", ()) if not name.startswith("_")]
    if dataclasses.is_dataclass(tree):
        names = [*(field.name for field in dataclasses.fields(tree)), *names]
    return [
        (int(name) if name.isdigit() else name, getattr(tree, name))
        for name in dict.fromkeys(names)
        if hasattr(tree, name)
    ]


def _pytree_children(tree: Any) -> list[tuple[Any, Any]]:
    """The children of a registered pytree without public attributes (Equinox's state)."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(key_word(keys[0]), value) for keys, value in leaves if keys]


def key_word(key: Any) -> Any:
    """The key, index or attribute name of one step of JAX's paths through trees."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def array_leaves(tree: Any) -> list[TreePart]:
    """The arrays inside `tree`."""
    return [part for part in parts_of(tree) if is_array(part.value)]
