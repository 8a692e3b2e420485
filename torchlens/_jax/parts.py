"""What goes into a JAX call, sorted: inputs, weights and buffers by path, and the modules among
them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from torchlens._jax.arrays import is_array
from torchlens._jax.callables import argument_paths, holders_in, linen_module
from torchlens._jax.pytrees import Part, parts_of
from torchlens._recording.trees import Path

# What people call the tree of a model's weights.
_WEIGHT_NAMES = frozenset(
    {"params", "parameters", "variables", "weights", "model", "net", "network", "module"}
)
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, functools.partial)


@dataclass(slots=True)
class Parts:
    """Inputs by path; weights and buffers by address; modules by the id of the object, which is
    kept alive.
    """

    inputs: list[tuple[Path, Any]] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    param_addresses: list[str] = field(default_factory=list)
    param_numbers: dict[int, int] = field(
        default_factory=dict
    )  # id of a weight → its place in `params`
    buffers: list[tuple[str, Any]] = field(default_factory=list)
    aliases: list[tuple[Any, int]] = field(
        default_factory=list
    )  # arrays that are the same as a weight met before
    addresses: dict[int, str] = field(default_factory=dict)  # id of a module → its address
    modules: list[Any] = field(default_factory=list)
    named: list[tuple[str, Any]] = field(
        default_factory=list
    )  # arrays that only a variable of a function names
    module_params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Tree:
    """A tree of weights and the name in front of its addresses, if there are several such trees."""

    name: str
    parts: list[Part]

    @property
    def holds_weights(self) -> bool:
        return any(is_array(part.value) for part in self.parts)


def parts_of_call(model: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Parts:
    """Takes the callable and its arguments apart.

    Weights are what a module holds, what linen's `apply` gets for its variables, and what stands
    below a name such as `params`; where nothing is, a dict as the first of several arguments. All
    else that is given is input.
    """
    parts = Parts()
    trees: list[_Tree] = []
    for holder in holders_in(model):
        found = list(parts_of(holder.tree))
        if is_array(holder.tree):
            parts.named.append((holder.name, holder.tree))
        elif (
            holder.name and not _is_model(holder.tree) and not _is_weights(holder.name, holder.tree)
        ):
            parts.named += [
                (".".join(map(str, (holder.name, *part.path))), part.value)
                for part in found
                if is_array(part.value)
            ]
            trees += _Modules(holder.name, found).trees
        else:
            trees.append(_Tree(holder.name, _without_collection(holder.tree, found)))
    given = argument_paths(model, args, kwargs)
    weights = [path for path, argument in given if _is_weights(str(path[0]), argument)]
    if not weights and not any(tree.holds_weights for tree in trees):
        weights = _first_dict(given)
    for path, argument in given:
        found = list(parts_of(argument))
        if path in weights or (linen_module(model) is not None and path == given[0][0]):
            trees.append(_Tree(".".join(map(str, path)), _without_collection(argument, found)))
            continue
        nested, rest = _nested_weights(path, found)
        trees += nested
        parts.inputs += [
            ((*path, *part.path), part.value) for part in rest if _is_input(part.value)
        ]
    several = sum(tree.holds_weights for tree in trees) > 1
    parts.classes[""] = name
    for tree in trees:
        _sort(tree, tree.name if several else "", parts)
    _list_module_params(parts)
    return parts


class _Modules:
    """Modules that a function keeps in a list or dict of its own: each is a tree."""

    def __init__(self, name: str, found: list[Part]) -> None:
        self.trees = [_Tree(name, found)] if any(_is_model(part.value) for part in found) else []


def _is_input(value: Any) -> bool:
    """An array; a number of numpy's is what a number of Python's is, an argument of the operation
    that it goes into.
    """
    return is_array(value) and (isinstance(value, jax.Array) or bool(np.ndim(value)))


def _is_model(value: Any) -> bool:
    """An object that can be called and is no function: what a layer is in every library."""
    module = type(value).__module__
    is_of_library = (
        module.partition(".")[0] in ("jax", "jaxlib", "numpy") or module == "flax.nnx.rnglib"
    )
    return (
        callable(value)
        and hasattr(value, "__dict__")
        and not isinstance(value, _FUNCTIONS)
        and not is_of_library
    )


def _is_weights(name: str, argument: Any) -> bool:
    if is_array(argument):
        return False
    return _is_model(argument) or (
        name in _WEIGHT_NAMES and not isinstance(argument, str | int | float | None)
    )


def _first_dict(given: list[tuple[Path, Any]]) -> list[Path]:
    """The path of the first argument, if it is a dict and others have arrays too."""
    if len(given) < 2 or not isinstance(given[0][1], Mapping):
        return []
    others = any(is_array(part.value) for _, argument in given[1:] for part in parts_of(argument))
    return [given[0][0]] if others else []


def _nested_weights(path: Path, found: list[Part]) -> tuple[list[_Tree], list[Part]]:
    """Trees of weights inside an argument (`state.params`, a list of modules), and what is not in
    one.
    """
    trees: dict[Path, list[Part]] = {}
    # An optimizer keeps trees of the same classes, and what is in them are no weights.
    states = [
        part.path for part in found if type(part.value).__module__.partition(".")[0] == "optax"
    ]
    heads = [
        part.path for part in found if part.path and not is_array(part.value) and _is_head(part)
    ]
    heads = [head for head in heads if not any(head[: len(state)] == state for state in states)]
    rest = []
    for part in found:
        head = next((head for head in heads if part.path[: len(head)] == head), None)
        if head is None and part.variable is not None:
            head = ()
        if head is None:
            rest.append(part)
        else:
            trees.setdefault(head, []).append(part._replace(path=part.path[len(head) :]))
    return [_Tree(".".join(map(str, (*path, *head))), own) for head, own in trees.items()], rest


def _is_head(part: Part) -> bool:
    return part.path[-1] in _WEIGHT_NAMES or _is_model(part.value)


def _without_collection(tree: Any, found: list[Part]) -> list[Part]:
    """Of linen's variables (`{'params': ..., 'batch_stats': ...}`), the paths as the modules know
    them.
    """
    if not isinstance(tree, Mapping) or not isinstance(tree.get("params"), Mapping):
        return found
    return [
        part._replace(
            path=part.path[1:], variable="buffer" if part.path[0] != "params" else part.variable
        )
        for part in found
        if part.path
    ]


def _sort(tree: _Tree, prefix: str, parts: Parts) -> None:
    for part in tree.parts:
        address = ".".join([*([prefix] if prefix else []), *map(str, part.path)])
        if is_array(part.value):
            _sort_array(part, address or "weight", parts)
        elif _is_model(part.value) and id(part.value) not in parts.addresses:
            parts.addresses[id(part.value)] = address
            parts.modules.append(part.value)
            if address:
                parts.classes[address] = type(part.value).__name__


def _sort_array(part: Part, address: str, parts: Parts) -> None:
    known = parts.param_numbers.get(id(part.value))
    if known is not None:
        parts.aliases.append((part.value, known))
    elif _is_trained(part):
        parts.param_numbers[id(part.value)] = len(parts.params)
        parts.params.append(part.value)
        parts.param_addresses.append(address)
    else:
        parts.buffers.append((address, part.value))


def _is_trained(part: Part) -> bool:
    """Whether gradients make sense for it: a float, and no statistic or random state that a library
    keeps.
    """
    if part.variable == "buffer" or not jax.numpy.issubdtype(part.value.dtype, jax.numpy.inexact):
        return False
    kinds = [kind.__name__ for kind in type(part.variable).__mro__]
    return part.variable is None or "Param" in kinds or "Variable" not in kinds


def _list_module_params(parts: Parts) -> None:
    """A weight belongs to the module whose address is its own without the last word."""
    owners: dict[str, list[int]] = {address: [] for address in parts.classes}
    for number, address in enumerate(parts.param_addresses):
        owners.setdefault(address.rpartition(".")[0], []).append(number)
    parts.module_params = {address: tuple(numbers) for address, numbers in owners.items()}
