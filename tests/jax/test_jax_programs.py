"""Values and parents of a log against what JAX itself computes and writes down."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import torchlens as tl
from tests.jax.jaxpr import outputs_of_jaxpr, outputs_of_log

X = jnp.linspace(-1.0, 2.0, 6, dtype=jnp.float32).reshape(2, 3)


def _scan(x: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (jnp.sin(carry) + row, carry * 2), x[0], x)


def _loop(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, value: value * 2 + i, x)


def _while(x: Any) -> Any:
    return jax.lax.while_loop(lambda value: value.sum() < 50, lambda value: value * 2, x)


def _cond(x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)


def _remat(x: Any) -> Any:
    return jax.checkpoint(lambda value: jnp.tanh(jnp.sin(value) * 2))(x)


@jax.custom_jvp
def _doubled(x: Any) -> Any:
    return x * 2


_doubled.defjvp(lambda primals, tangents: (_doubled(*primals), tangents[0] * 3))


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.tanh(x)


_clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * jnp.minimum(x, 1.0),))


def _branches(x: Any) -> Any:
    return jnp.exp(x) if x.sum() > 0 else jnp.log(x)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit(lambda x: jax.jit(jnp.tanh)(x @ x.T) + 1e-5),
    "scan": _scan,
    "reversed scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0], x, reverse=True),
    "fori": _loop,
    "while": _while,
    "cond": _cond,
    "switch": lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos], x),
    "remat": _remat,
    "custom_jvp": lambda x: _doubled(x) + 1,
    "custom_vjp": lambda x: _clipped(x) + 1,
    "vmap": jax.vmap(lambda row: jax.nn.softmax(row) @ jnp.arange(3.0)),
    "vmap of cond": jax.vmap(lambda row: jax.lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row)),
    "vmap of while": jax.vmap(lambda row: jax.lax.while_loop(lambda r: r.sum() < 9, lambda r: r + 1,
    row)),
    "grad": jax.grad(lambda x: jnp.tanh(x @ x.T).sum()),
    "value_and_grad": jax.value_and_grad(lambda x: jax.nn.relu(x).mean()),
    "grad of scan": jax.grad(lambda x: _scan(x)[0].sum()),
    "grad of remat": jax.grad(lambda x: _remat(x).sum()),
    "grad of custom_jvp": jax.grad(lambda x: _doubled(x).sum()),
    "grad of custom_vjp": jax.grad(lambda x: _clipped(x).sum()),
    "grad of vmap of cond": jax.grad(lambda x: jax.vmap(_cond)(x).sum()),
    "jvp": lambda x: jax.jvp(jnp.tanh, (x,), (x,)),
    "hessian": jax.hessian(lambda x: jnp.sin(x).sum()),
    "remat of scan": jax.checkpoint(lambda x: _scan(x)[0]),
    "indexing": lambda x: (x[0], x[:, ::2], x[jnp.array([1, 0])], x.at[0].set(3.0)),
    "iteration": lambda x: [row + 1 for row in x],
    "keys": lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "Python branch": _branches,
    "reductions": lambda x: (x.mean(0), x.std(), jnp.argmax(x), jnp.sort(x), jnp.cumsum(x, 1),
    jnp.linalg.norm(x)),
}  # fmt: skip


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_log_has_the_values_of_the_unjitted_run_bit_by_bit_and_of_the_jitted_one_to_rounding(
    name,
):
    function = PROGRAMS[name]
    history = tl.log_forward_pass(function, [X])
    logged = [history[label].tensor_contents.numpy() for label in history.output_layers]
    jitted = leaves(function(X) if name == "Python branch" else jax.jit(function)(X))
    with jax.disable_jit():
        plain = leaves(function(X))
    assert len(logged) == len(plain)
    for one, other, compiled in zip(logged, plain, jitted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, compiled, rtol=2e-6, atol=2e-6)


def test_a_scan_without_iterations_raises_the_error_of_jax():
    with pytest.raises(ValueError, match="zero-length scan"):
        tl.log_forward_pass(lambda x: jax.lax.map(jnp.sin, x[:0]), [X])


# What JAX writes down as a loop or a choice is not unrolled there.
UNROLLED = {
    *(
        "switch",
        "scan",
        "reversed scan",
        "fori",
        "while",
        "cond",
        "vmap of while",
        "vmap of cond",
        "grad of scan",
    ),
    *("grad of remat", "remat of scan", "grad of vmap of cond", "Python branch", "iteration"),
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in UNROLLED])
def test_a_log_has_the_parents_that_the_jaxpr_has(name):
    function = PROGRAMS[name]
    assert outputs_of_log(tl.log_forward_pass(function, [X])) == outputs_of_jaxpr(function, X)


UNARY = (
    *(jnp.sin, jnp.tanh, jnp.exp, jnp.negative, jax.nn.relu, jax.nn.sigmoid, jnp.abs),
    *(lambda a: jnp.swapaxes(a, -1, -2), lambda a: a * 0.5),
)
BINARY = (
    jnp.add,
    jnp.multiply,
    jnp.subtract,
    jnp.maximum,
    jnp.matmul,
    lambda a, b: jnp.where(a > b, a, b),
)
REDUCING = (jnp.sum, jnp.mean, jnp.max, jax.nn.softmax)


def random_program(seed: int) -> Callable[..., Any]:
    """Ten steps, each of one or two of the arrays made so far; then gradients, a batch or
    neither.
    """
    choice = random.Random(seed)
    steps = []
    for made in range(2, 12):
        kind = choice.choice((UNARY, BINARY, BINARY, REDUCING))
        steps.append(
            (
                choice.choice(kind),
                [choice.randrange(made) for _ in range(2 if kind is BINARY else 1)],
            )
        )

    def program(a: Any, b: Any) -> Any:
        made = [a, b]
        for step, places in steps:
            result = step(*(made[place] for place in places))
            made.append(result if result.shape == a.shape else jnp.broadcast_to(result, a.shape))
        return made[-1], made[-3] * made[-2]

    around = choice.choice(("", "grad", "vmap"))
    if around == "grad":
        return jax.grad(lambda a, b: program(a, b)[0].sum(), argnums=(0, 1))
    return jax.vmap(program) if around == "vmap" else program


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_have_the_parents_of_their_jaxprs_and_replay_bit_by_bit(seed):
    function = random_program(seed)
    a, b = (jax.random.normal(jax.random.key(place), (3, 3, 3)) for place in (seed, seed + 100))
    history = tl.log_forward_pass(function, [a, b])
    assert outputs_of_log(history) == outputs_of_jaxpr(function, a, b)


def test_the_slices_of_a_long_loop_are_compiled_once(caplog):
    x = jnp.arange(37.0 * 3).reshape(37, 3)

    def f(x):
        return jax.lax.scan(lambda carry, row: (carry + row, carry * 2), jnp.zeros(3), x)

    with jax.log_compiles(), caplog.at_level("WARNING"):
        history = tl.log_forward_pass(f, x)
    assert (
        sum(record.getMessage().startswith("Compiling jit(slice)") for record in caplog.records)
        == 0
    )
    assert (
        sum(
            record.getMessage().startswith("Compiling jit(dynamic_slice)")
            for record in caplog.records
        )
        <= 1
    )
    slices = [
        entry.tensor_contents.flatten().tolist() for entry in history if entry.layer_type == "slice"
    ]
    assert slices == x.tolist()
