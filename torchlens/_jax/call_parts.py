"""Sorts the arrays of a JAX call: inputs by path, weights and buffers by address, and modules."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from torchlens._jax.arrays import is_array
from torchlens._jax.callables import argument_paths, holders_in, linen_module
from torchlens._jax.pytrees import TreePart, array_leaves, parts_of
from torchlens._recording.trees import Path

# Names of arguments and variables that hold a model's weights.
_WEIGHT_NAMES = frozenset(
    {"params", "parameters", "variables", "weights", "model", "net", "network", "module"}
)
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType, functools.partial)


@dataclass(slots=True)
class CallParts:
    """Inputs by path; weights and buffers by address; modules."""

    inputs: list[tuple[Path, Any]] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    param_addresses: list[str] = field(default_factory=list)
    # id of a weight → its index in `params`
    param_numbers: dict[int, int] = field(default_factory=dict)
    buffers: list[tuple[str, Any]] = field(default_factory=list)
    # further arrays that are the same object as a weight, and the weight's index
    aliases: list[tuple[Any, int]] = field(default_factory=list)
    # id of a module → its address; `modules` keeps them alive
    addresses: dict[int, str] = field(default_factory=dict)
    modules: list[Any] = field(default_factory=list)
    # arrays in variables from outside the function, with the names of the variables
    named: list[tuple[str, Any]] = field(default_factory=list)
    module_params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _WeightTree:
    """A tree of weights, and the prefix of its addresses if there are several trees."""

    name: str
    parts: list[TreePart]

    @property
    def holds_weights(self) -> bool:
        return any(is_array(part.value) for part in self.parts)


def parts_of_call(model: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> CallParts:
    """Sorts the arrays of a callable and of its arguments.

    Weights are the arrays in a module, in the variables given to linen's `apply`, and under a name
    such as `params`. If there are none, the first of several arguments counts if it is a dict. All
    other arguments are inputs.
    """
    parts = CallParts()
    trees = _held_trees(model, parts)
    trees += _argument_trees(model, argument_paths(model, args, kwargs), trees, parts)
    are_several = sum(tree.holds_weights for tree in trees) > 1
    parts.classes[""] = name
    for tree in trees:
        _sort(tree, tree.name if are_several else "", parts)
    _list_module_params(parts)
    return parts


def _held_trees(model: Any, parts: CallParts) -> list[_WeightTree]:
    """The trees of weights that the callable holds; adds the other arrays to `parts.named`."""
    trees = []
    for name, tree in holders_in(model):
        found = list(parts_of(tree))
        if _is_weights(name, tree) or not (name or is_array(tree)):
            trees.append(_WeightTree(name, _without_collection(tree, found)))
            continue
        parts.named += [
            (".".join(map(str, (name, *part.path))), part.value)
            for part in found
            if is_array(part.value)
        ]
        if any(_is_model(part.value) for part in found):  # a list or dict of modules
            trees.append(_WeightTree(name, found))
    return trees


def _argument_trees(
    model: Any, given: list[tuple[Path, Any]], held: list[_WeightTree], parts: CallParts
) -> list[_WeightTree]:
    """The trees of weights among the arguments; adds the other arrays to `parts.inputs`."""
    weights = _weight_arguments(given, any(tree.holds_weights for tree in held))
    if linen_module(model) is not None and given:
        weights.append(given[0][0])
    trees = []
    for path, argument in given:
        found = list(parts_of(argument))
        if path in weights:
            name = ".".join(map(str, path))
            trees.append(_WeightTree(name, _without_collection(argument, found)))
            continue
        nested, rest = _nested_weights(path, found)
        trees += nested
        parts.inputs += [
            ((*path, *part.path), part.value) for part in rest if _is_input(part.value)
        ]
    return trees


def _is_input(value: Any) -> bool:
    """True for an array. A NumPy scalar counts as a Python number, as a constant argument."""
    return is_array(value) and (isinstance(value, jax.Array) or bool(np.ndim(value)))


def _is_model(value: Any) -> bool:
    """True for a callable object that is not a function: a layer of any library."""
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


def _weight_arguments(given: list[tuple[Path, Any]], has_weights: bool) -> list[Path]:
    """The paths of the arguments that are weights: without any other weights, that of the first
    argument, if it is a dict and other arguments hold arrays too.
    """
    found = [path for path, argument in given if _is_weights(str(path[0]), argument)]
    if found or has_weights or len(given) < 2 or not isinstance(given[0][1], Mapping):
        return found
    return [given[0][0]] if any(array_leaves(argument) for _, argument in given[1:]) else []


def _nested_weights(path: Path, found: list[TreePart]) -> tuple[list[_WeightTree], list[TreePart]]:
    """Trees of weights inside an argument (`state.params`, a list of modules), and the parts
    outside of them.
    """
    trees: dict[Path, list[TreePart]] = {}
    heads, rest = _heads(found), []
    for part in found:
        head = next((head for head in heads if _is_below(part.path, head)), None)
        if head is None and part.variable is not None:
            head = ()
        if head is None:
            rest.append(part)
        else:
            trees.setdefault(head, []).append(part._replace(path=part.path[len(head) :]))
    return [
        _WeightTree(".".join(map(str, (*path, *head))), own) for head, own in trees.items()
    ], rest


def _heads(found: list[TreePart]) -> list[Path]:
    """The paths of the trees of weights in an argument, but not of those in an optimizer's state,
    which has trees of the same classes.
    """
    states = [
        part.path for part in found if type(part.value).__module__.partition(".")[0] == "optax"
    ]
    return [
        part.path
        for part in found
        if part.path
        and not is_array(part.value)
        and _is_head(part)
        and not any(_is_below(part.path, state) for state in states)
    ]


def _is_below(path: Path, head: Path) -> bool:
    return path[: len(head)] == head


def _is_head(part: TreePart) -> bool:
    return part.path[-1] in _WEIGHT_NAMES or _is_model(part.value)


def _without_collection(tree: Any, found: list[TreePart]) -> list[TreePart]:
    """The parts with paths without the collection of linen's variables (`{'params': ...,
    'batch_stats': ...}`).
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


def _sort(tree: _WeightTree, prefix: str, parts: CallParts) -> None:
    for part in tree.parts:
        address = ".".join([*([prefix] if prefix else []), *map(str, part.path)])
        if is_array(part.value):
            _sort_array(part, address or "weight", parts)
        elif _is_model(part.value) and id(part.value) not in parts.addresses:
            parts.addresses[id(part.value)] = address
            parts.modules.append(part.value)
            if address:
                parts.classes[address] = type(part.value).__name__


def _sort_array(part: TreePart, address: str, parts: CallParts) -> None:
    known = parts.param_numbers.get(id(part.value))
    if known is not None:
        parts.aliases.append((part.value, known))
    elif _is_trained(part):
        parts.param_numbers[id(part.value)] = len(parts.params)
        parts.params.append(part.value)
        parts.param_addresses.append(address)
    else:
        parts.buffers.append((address, part.value))


def _is_trained(part: TreePart) -> bool:
    """True for weights: floats that are not statistics or random state."""
    if part.variable == "buffer" or not jax.numpy.issubdtype(part.value.dtype, jax.numpy.inexact):
        return False
    kinds = [kind.__name__ for kind in type(part.variable).__mro__]
    return part.variable is None or "Param" in kinds or "Variable" not in kinds


def _list_module_params(parts: CallParts) -> None:
    """Assigns each weight to the module whose address is the weight's without its last name."""
    owners: dict[str, list[int]] = {address: [] for address in parts.classes}
    for number, address in enumerate(parts.param_addresses):
        owners.setdefault(address.rpartition(".")[0], []).append(number)
    parts.module_params = {address: tuple(numbers) for address, numbers in owners.items()}
