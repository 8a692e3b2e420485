"""The arguments of a call: which are plain, what is kept of them, how they read in a line."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from torchlens._recording.operations import Operation
from torchlens._recording.regions import shape_of
from torchlens._recording.symbolic import inert
from torchlens._recording.trees import SLICE_BOUNDS, plain_tensors, same_with

Tensor = torch.Tensor
# Arguments of these types are, or are not, tensors at a glance; any other is searched for tensors.
PLAIN_TYPES = frozenset({
    Tensor, torch.nn.Parameter, int, float, bool, complex, str, type(None), torch.dtype,
    torch.device, torch.Size,
    torch.layout, torch.memory_format, type(Ellipsis), torch.Generator,
})  # fmt: skip
TENSORS = frozenset({Tensor, torch.nn.Parameter})
PLAIN_KEYWORD_TYPES = PLAIN_TYPES - TENSORS - {torch.Generator}
_SHALLOW_KEYWORD_TYPES = PLAIN_KEYWORD_TYPES | TENSORS
_PLAIN_BOUNDS = frozenset({int, type(None)})


class Kept(list[Tensor]):
    """A saved argument: one tensor, in a place where it can be replaced by its copy."""


def unwrap(tree: Any) -> Any:
    """Saved arguments with each tensor in its own place again."""
    if isinstance(tree, Kept):
        return tree[0]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(unwrap, tree))
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(map(unwrap, tree))
    if isinstance(tree, dict):
        return {key: unwrap(item) for key, item in tree.items()}
    if isinstance(tree, slice):
        return slice(*(unwrap(getattr(tree, name)) for name in SLICE_BOUNDS))
    return tree


def describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> str:
    """Arguments in a line: shapes for tensors, the rest as it is."""

    def describe(value: Any) -> str:
        if isinstance(value, Tensor):
            return (
                f"{'x'.join(map(str, shape_of(value))) or 'scalar'} "
                f"{str(value.dtype).removeprefix('torch.')}"
            )
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            return f"[{', '.join(map(describe, value))}]"
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    return ", ".join(
        [
            *map(describe, args),
            *(f"{key}={describe(value)}" for key, value in (kwargs or {}).items()),
        ]
    )


def are_plain(args: tuple[Any, ...]) -> bool:
    """Whether no tensor lies deeper than at the top: a tuple of numbers or slices is plain."""
    for arg in args:  # noqa: SIM110 - a generator takes twice as long
        if type(arg) not in PLAIN_TYPES and not _is_plain_index(arg):
            return False
    return True


def _is_plain_index(arg: Any) -> bool:
    """Whether it is a slice, or a tuple of numbers and slices, without tensors."""
    kind = type(arg)
    if kind is not tuple and kind is not slice:
        return False
    for item in arg if kind is tuple else (arg,):
        if type(item) is slice:
            if not _PLAIN_BOUNDS.issuperset((type(item.start), type(item.stop), type(item.step))):
                return False
        elif type(item) not in PLAIN_KEYWORD_TYPES:
            return False
    return True


def without_flat_tensors(args: Iterable[Any]) -> tuple[Any, ...]:
    """Arguments with None in place of each tensor at the top."""
    return tuple([None if type(arg) in TENSORS else arg for arg in args])


class ShallowArguments(NamedTuple):
    """Arguments with tensors at the top or one level down: those by their place, and the rest with
    None instead of them.
    """

    tensors: dict[Any, Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None


def shallow_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> ShallowArguments | None:
    """Arguments like those of `torch.cat([x, y], dim=1)`; None if there may be tensors deeper than
    in one list, or an `out=`.
    """
    if kwargs and (
        "out" in kwargs or not _SHALLOW_KEYWORD_TYPES.issuperset(map(type, kwargs.values()))
    ):
        return None
    tensors: dict[Any, Tensor] = {}
    kept: list[Any] = []
    for position, arg in enumerate(args):
        kind = type(arg)
        if kind in TENSORS:
            tensors[position] = arg
            kept.append(None)
        elif kind in PLAIN_TYPES or are_plain((arg,)):
            kept.append(arg)
        elif (kind is list or kind is tuple) and PLAIN_TYPES.issuperset(map(type, arg)):
            for index, item in enumerate(arg):
                if type(item) in TENSORS:
                    tensors[position, index] = item
            kept.append(kind(without_flat_tensors(arg)))
        else:
            return None
    if not kwargs:
        return ShallowArguments(tensors, tuple(kept), kwargs)
    named = dict(kwargs)
    for name, item in kwargs.items():
        if type(item) in TENSORS:
            tensors[name], named[name] = item, None
    return ShallowArguments(tensors, tuple(kept), named)


def written_by(
    operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> list[Tensor]:
    """The tensors that the call is going to write to."""
    flag = operation.writes_if
    does_write = flag is None or (len(args) > flag and args[flag])
    if operation.written == (0,) and does_write and args and type(args[0]) is Tensor:
        return [args[0]]
    named = kwargs or {}
    written = [named.get("out")]
    if does_write:
        for position in operation.written:
            is_given = position < len(args)
            written.append(args[position] if is_given else named.get(operation.name_of(position)))
    # A lazy module's parameter has no value to lose.
    return [tensor for _, tensor in plain_tensors(written) if not is_lazy(tensor)]


def without_tensors(arguments: Any) -> Any:
    """Arguments with None in place of each tensor, in lists and dicts of their own; symbolic sizes
    are inert.
    """
    return same_with(arguments, lambda _: None, inert)
