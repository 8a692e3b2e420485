"""The GPT of `transformer.py` ported to JAX with Equinox: the same mistakes can be planted as in
the port in torch.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import torch

from benchmarks.planted.transformer import GPT, HEADS

__all__ = ["Transformer", "ported"]


def array(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


class Dense(eqx.Module):
    w: jax.Array
    b: jax.Array | None

    def __call__(self, x: Any) -> Any:
        return x @ self.w if self.b is None else x @ self.w + self.b


class Norm(eqx.Module):
    scale: jax.Array
    shift: jax.Array
    eps: float = 1e-5

    def __call__(self, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + self.eps) * self.scale + self.shift


class Attention(eqx.Module):
    q: Dense
    k: Dense
    v: Dense
    output: Dense
    is_causal: bool = True

    def __call__(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (part(x).reshape(batch, length, HEADS, -1) for part in (self.q, self.k, self.v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(width // HEADS)
        if self.is_causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
        return self.output(out.reshape(batch, length, width))


class FeedForward(eqx.Module):
    up: Dense
    down: Dense
    is_exact: bool = True

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.gelu(self.up(x), approximate=not self.is_exact))


class Block(eqx.Module):
    norm1: Norm
    attention: Attention
    norm2: Norm
    ffn: FeedForward

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Transformer(eqx.Module):
    """The candidate."""

    words: jax.Array
    places: jax.Array
    blocks: list[Block]
    final: Norm
    out: Dense

    def __call__(self, ids: Any) -> Any:
        x = self.words[ids] + self.places[jnp.arange(ids.shape[1])]
        for block in self.blocks:
            x = block(x)
        return self.out(self.final(x))


def ported(reference: GPT, mistakes: dict[str, str] | None = None) -> Transformer:
    """A port with the reference's weights; `mistakes` ("small eps", "tanh", "transposed", "no
    mask") by address.
    """
    planted = mistakes or {}

    def dense(weight: torch.Tensor, bias: torch.Tensor | None, address: str) -> Dense:
        weight = weight if planted.get(address) == "transposed" else weight.T
        return Dense(array(weight), None if bias is None else array(bias))

    def norm(layer: Any, address: str) -> Norm:
        return Norm(
            array(layer.weight),
            array(layer.bias),
            1e-6 if planted.get(address) == "small eps" else 1e-5,
        )

    blocks = []
    for number, layer in enumerate(reference.h):
        own: Any = layer
        at = f"blocks.{number}"
        weights, biases = own.attn.qkv.weight.chunk(3), own.attn.qkv.bias.chunk(3)
        q, k, v = (
            dense(w, b, f"{at}.attention.{n}")
            for w, b, n in zip(weights, biases, "qkv", strict=True)
        )
        output = dense(own.attn.proj.weight, own.attn.proj.bias, f"{at}.attention.output")
        attention = Attention(q, k, v, output, planted.get(f"{at}.attention") != "no mask")
        up, down = (
            dense(m.weight, m.bias, f"{at}.ffn.{n}")
            for m, n in ((own.mlp.fc, "up"), (own.mlp.proj, "down"))
        )
        ffn = FeedForward(up, down, planted.get(f"{at}.ffn") != "tanh")
        blocks.append(
            Block(norm(own.ln_1, f"{at}.norm1"), attention, norm(own.ln_2, f"{at}.norm2"), ffn)
        )
    return Transformer(
        array(reference.wte.weight),
        array(reference.wpe.weight),
        blocks,
        norm(reference.ln_f, "final"),
        dense(reference.head.weight, None, "out"),
    )
