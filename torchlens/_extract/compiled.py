"""The chosen values of a model from one compiled function (`compile=True`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

_CONSTANTS = (bool, int, float, str, type(None))
Values = dict[str, torch.Tensor]


class CannotCompileError(Exception):
    """The model cannot be one compiled function; the message says why."""


class CompiledValues:
    """`values_of(args, kwargs)`, compiled for batches like the given one.

    torch traces its operations below the model, so that only the chosen values are returned, and
    operations that they do not need are left out. What depends on the values of an input cannot be
    traced.
    """

    def __init__(
        self,
        values_of: Callable[[Sequence[Any], Mapping[str, Any]], Values],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        leaves, structure = tree_flatten((list(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                raise CannotCompileError(f"an argument is of {type(leaf).__name__}, not a tensor")
        self._key = _key(args, kwargs)
        self._names: list[str] = []

        def function(*given: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(given)
            own = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            found = values_of(*tree_unflatten(own, structure))
            self._names = list(found)
            return list(found.values())

        try:
            self._function = torch.compile(make_fx(function)(*tensors))
            self(args, kwargs)
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise CannotCompileError(f"{type(error).__name__}: {first}") from error

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True for a batch with the shapes, dtypes and constants that it was compiled for."""
        return bool(_key(args, kwargs) == self._key)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        leaves, _ = tree_flatten((list(args), dict(kwargs)))
        found = self._function(*[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return dict(zip(self._names, found, strict=True))


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves, structure = tree_flatten((list(args), dict(kwargs)))
    return structure, [
        (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
