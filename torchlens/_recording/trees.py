"""Finds tensors in the arguments and results of models and operations."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

Path = tuple[Any, ...]
SLICE_BOUNDS = ("start", "stop", "step")

# Depth limit of the search through attributes of objects: enough for a data library's batches.
_MAX_DEPTH = 12
OPAQUE_TYPES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType,
    BuiltinFunctionType,
                MethodType, torch.nn.Module, torch.dtype, torch.device, torch.Size)  # fmt: skip


def path_text(head: str, path: Path) -> str:
    """`input.x.0` for the path ('x', 0)."""
    return ".".join([head, *map(str, path)])


def plain_tensors(tree: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors in nested lists, tuples, dicts and slices, as torch functions use them."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from plain_tensors(item, (*path, index))
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from plain_tensors(item, (*path, key))
    elif isinstance(tree, slice):  # `x[:, i:j]` with tensors for bounds
        for name in SLICE_BOUNDS:
            yield from plain_tensors(getattr(tree, name), (*path, name))


def named_tensors(tree: Any) -> list[tuple[Path, torch.Tensor]]:
    """Tensors in a model's input or output, with the path by which a user would access them.

    Searches list-like containers, named tuples (by field), mappings, dataclasses, registered
    pytrees, and plain objects (by attribute).
    """
    found: list[tuple[Path, torch.Tensor]] = []
    _collect(tree, (), found, set(), 0)
    return found


def _collect(
    tree: Any, path: Path, found: list[tuple[Path, torch.Tensor]], seen: set[int], depth: int
) -> None:
    if isinstance(tree, torch.Tensor):
        found.append((path, tree))
        return
    if isinstance(tree, OPAQUE_TYPES) or depth > _MAX_DEPTH or id(tree) in seen:
        return
    seen.add(id(tree))
    for key, item in _children(tree):
        # Private containers of an object (`batch._store._mapping.x`) are left out of the path.
        hidden = isinstance(key, str) and key.startswith("_")
        _collect(item, path if hidden else (*path, key), found, seen, depth + 1)
    seen.discard(id(tree))


def _children(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, tuple):
        return _items_of_tuple(tree)
    if isinstance(tree, list | set | frozenset | deque):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name, None)) for field in dataclasses.fields(tree)]
    node = pytree.SUPPORTED_NODES.get(type(tree))
    if node is not None:
        return _registered_children(tree, node)
    return attributes_of(tree)


def _items_of_tuple(items: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Named tuples, and what `torch.max(x, 0)` returns, name their items; the latter in
    `__match_args__` alone.
    """
    names = getattr(items, "_fields", None) or getattr(items, "__match_args__", None)
    if names and len(names) == len(items):
        return list(zip(names, items, strict=True))
    return list(enumerate(items))


def _registered_children(tree: Any, node: Any) -> list[tuple[Any, Any]]:
    """The children of a type registered with `torch.utils._pytree`, by name if it has names."""
    if node.flatten_with_keys_fn is None:
        return list(enumerate(node.flatten_fn(tree)[0]))
    return [(_name_of(key), child) for key, child in node.flatten_with_keys_fn(tree)[0]]


def _name_of(key: Any) -> Any:
    """The name or index in a pytree key such as `MappingKey('h')`, `SequenceKey(0)`,
    `GetAttrKey('x')`.
    """
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def attributes_of(tree: Any) -> list[tuple[Any, Any]]:
    """The attributes of a plain object, from its `__dict__` and slots."""
    held = dict(getattr(tree, "__dict__", {}))
    for kind in type(tree).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(tree, name) and name not in ("__dict__", "__weakref__"):
                held.setdefault(name, getattr(tree, name))
    return list(held.items())


def named_data(
    tree: Any, path: Path = (), around: tuple[int, ...] = ()
) -> Iterator[tuple[Path, Any]]:
    """Numbers, strings and arrays in a model's output, in containers and dataclasses."""
    if isinstance(tree, str | bytes | int | float | complex | np.ndarray | np.generic):
        yield path, tree
    elif _is_data_container(tree) and len(path) <= _MAX_DEPTH and id(tree) not in around:
        for key, item in _children(tree):
            yield from named_data(item, (*path, key), (*around, id(tree)))


def _is_data_container(tree: Any) -> bool:
    if isinstance(tree, Mapping | list | tuple | set | frozenset | deque):
        return not isinstance(tree, torch.Size)
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type | torch.Tensor)


def holds_data(tree: Any) -> bool:
    """True if a model's output contains such data, other than booleans."""
    return any(not isinstance(value, bool) for _, value in named_data(tree))


def same_with(tree: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """`tree` (lists, tuples, dicts, slices) with each tensor replaced by `replace(tensor)`."""

    def same(item: Any) -> Any:
        return same_with(item, replace)

    if isinstance(tree, torch.Tensor):
        return replace(tree)
    if isinstance(tree, list):
        return list(map(same, tree))
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return type(tree)(*map(same, tree)) if hasattr(tree, "_fields") else tuple(map(same, tree))
    if isinstance(tree, dict):
        return {key: same(item) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(same(getattr(tree, name)) for name in SLICE_BOUNDS))
    return tree
