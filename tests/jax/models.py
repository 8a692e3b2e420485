"""Models of the libraries on top of JAX, made once."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.tree_util import register_dataclass

X = jnp.linspace(-1.0, 2.0, 6, dtype=jnp.float32).reshape(2, 3)


class Block(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key: Any) -> None:
        self.linear = eqx.nn.Linear(3, 3, key=key)
        self.norm = eqx.nn.LayerNorm(3)

    def __call__(self, x: Any) -> Any:
        return x + jax.nn.relu(self.linear(self.norm(x)))


class Blocks(eqx.Module):
    """Two blocks, the first of which runs twice."""

    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self.blocks = [Block(keys[0]), Block(keys[1])]
        self.head = eqx.nn.Linear(3, 2, key=keys[2])

    def __call__(self, x: Any) -> Any:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dense(2, name="out")(linen.relu(linen.Dense(3, name="hidden")(x)))


class Net(nnx.Module):
    """With everything that changes the module as it runs."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x))


@register_dataclass
@dataclass
class Linear:
    """A layer of no known library."""

    weight: jax.Array
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.matmul(x, self.weight.mT)
        return x if self.bias is None else x + self.bias


@cache
def blocks() -> Blocks:
    return Blocks()


@cache
def dense() -> tuple[Dense, Any]:
    module = Dense()
    return module, module.init(jax.random.key(0), X)


def layers() -> dict[str, Any]:
    return {
        "dense1": Linear(jnp.arange(12.0).reshape(4, 3) / 9, jnp.ones(4)),
        "act1": jax.nn.relu,
        "dense2": Linear(jnp.arange(8.0).reshape(2, 4) / 7),
        "outact": jax.nn.sigmoid,
    }
