"""A jitted training loop under `tail`: one compiled program, with the values of the plain one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import torchlens as tl
from tests.jax.models import X, blocks, layers

OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit
def step(model: Any, state: Any, x: Any) -> Any:
    loss, gradients = eqx.filter_value_and_grad(lambda m, x: jnp.square(jax.vmap(m)(x)).mean())(model, x)
    updates, state = OPTIMIZER.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, loss


def train(run: Any, num_steps: int = 3) -> list[float]:
    model, losses = blocks(), []
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
    for number in range(num_steps):
        model, state, loss = run(model, state, X + number)
        losses.append(float(loss))
    return losses


def test_a_jitted_loop_goes_as_it_would_and_each_step_is_in_the_file(tmp_path):
    path = tmp_path / "trace.safetensors"
    with tl.tail(step, path) as run:
        losses = train(run)
    np.testing.assert_allclose(losses, train(step), rtol=1e-5)
    state = OPTIMIZER.init(eqx.filter(blocks(), eqx.is_array))
    logged, first = tl.log_forward_pass(step, [blocks(), state, X]), tl.load(path, call=1)
    assert first.module_num_passes == logged.module_num_passes
    for address in ("blocks.1", "head"):
        np.testing.assert_allclose(first[address].tensor_contents, logged[address].tensor_contents, rtol=1e-4, atol=1e-5)
        assert first[address].parent_layers
    assert not np.allclose(tl.load(path, call=2)["head"].tensor_contents, first["head"].tensor_contents)


def test_modules_alone_can_be_chosen(tmp_path):
    path = tmp_path / "trace.safetensors"
    with tl.tail(step, path, layers="blocks.?", every=2) as run:
        train(run)
    names = list(tl.read_trace(path))
    assert names == [f"{call}/{name}/add" for call in (1, 3) for name in ("blocks.0", "blocks.1", "blocks.0:2")]


def test_what_is_not_jitted_is_logged_and_what_is_traced_is_told_of(tmp_path):
    with tl.tail(layers(), tmp_path / "a.safetensors") as run:
        run(X)
    assert "1/act1/max" in tl.read_trace(tmp_path / "a.safetensors")
    tailing = tl.tail(jax.jit(jnp.sin), tmp_path / "b.safetensors")
    sine = tailing.__enter__()
    jax.jit(lambda x: sine(x) + 1)(X)
    with pytest.warns(UserWarning, match="Tail the outermost function"):
        tailing.__exit__(None, None, None)
