"""The arguments of a jitted call as arrays and what those stand in, and what the call changed of
them.
"""

import sys
from typing import Any

import jax


class CallTrees:
    """As `jax.jit` takes arguments apart. What a function does to an object that it is given is
    lost.
    """

    def flatten(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten((args, kwargs))

    def rebuild(self, tree: Any, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        return args, kwargs

    def state_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A tree of what the call may have changed."""
        return ()

    def update(self, args: list[Any], kwargs: dict[str, Any], state: Any) -> None:
        """Changes the caller's objects as the call changed its own."""


class NnxTrees(CallTrees):
    """As `nnx.jit` does it: modules and optimizers are updated, and what is the same object stays
    one.
    """

    def __init__(self) -> None:
        self._nnx = sys.modules["flax.nnx"]

    def flatten(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten(self._nnx.split((args, kwargs)))

    def rebuild(self, tree: Any, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = self._nnx.merge(*jax.tree_util.tree_unflatten(tree, leaves))
        return args, kwargs

    def state_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _, variables, _ = self._nnx.split((args, kwargs), self._nnx.Variable, ...)
        return variables

    def update(self, args: list[Any], kwargs: dict[str, Any], state: Any) -> None:
        self._nnx.update((args, kwargs), state)


def trees_of(model: Any) -> CallTrees:
    """How the arguments of this jitted function are taken apart."""
    return NnxTrees() if type(model).__module__.startswith("flax.nnx.") else CallTrees()
