"""Validation of logs of JAX: what is right passes, what is wrong is found."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import torchlens as tl
from tests.jax.models import Net, X, blocks, dense, layers
from torchlens._jax import primitive_recorder, primitives


@pytest.mark.parametrize(
    "name",
    [
        "equinox",
        "linen",
        "layers",
        "gradients",
        "while under vmap",
        "keys",
        "shard_map",
        "custom_vmap",
    ],
)
def test_a_log_of_jax_is_proved(name):
    module, variables = dense()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    on_each_device = jax.shard_map(
        lambda a: (jnp.sin(a), jax.lax.psum(a, "i")),
        mesh=mesh,
        in_specs=P("i"),
        out_specs=(P("i"), P(None)),
    )
    custom: Any = jax.custom_batching.custom_vmap(jnp.sin)
    custom.def_vmap(lambda size, is_batched, a: (jnp.sin(a) * 1.0, is_batched[0]))
    cases: dict[str, tuple[Any, Any]] = {
        "equinox": (blocks(), X[0]),
        "linen": (module.apply, [variables, X]),
        "layers": (layers(), X),
        "gradients": (jax.jit(jax.value_and_grad(lambda x: jnp.tanh(x @ x.T).sum())), X),
        "while under vmap": (
            jax.vmap(lambda row: jax.lax.while_loop(lambda r: r.sum() < 9, lambda r: r + 1, row)),
            X,
        ),
        "keys": (lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), X),
        "shard_map": (lambda x: on_each_device(x)[0] + 1, X),
        "custom_vmap": (lambda x: jax.vmap(custom)(x) + custom(x), X),
    }  # fmt: skip
    report = tl.validate_forward_pass(*cases[name])
    assert report.passed, report
    assert (
        min(
            report.num_checked[check]
            for check in ("outputs", "calls", "arguments", "replay", "dependence")
        )
        > 0
    )
    assert report.num_checked["completeness"] >= report.num_checked["calls"]


def test_constants_of_64_bits_are_compared_as_such():
    def function(key: Any, x: Any) -> Any:
        large = x.astype(jnp.uint64) | jnp.uint64(2**64 - 2)
        return jax.random.normal(key, (3,)) * x, large, x * (0.1 + 0.7j)

    with jax.enable_x64(True):
        report = tl.validate_forward_pass(function, [jax.random.key(0), jnp.ones(3)])
    assert report.passed, report
    assert report.num_checked["arguments"] > 20


def test_a_module_is_as_before_after_its_validation():
    model = Net()
    before = jax.tree_util.tree_leaves(nnx.state(model))
    assert tl.validate_saved_activations(model, X)
    after = jax.tree_util.tree_leaves(nnx.state(model))
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_an_operation_that_is_not_logged_is_found(monkeypatch):
    original = primitive_recorder.PrimitiveRecorder._write_down

    def forgetful(self: Any, primitive: Any, *rest: Any) -> None:
        if primitive.name != "cos":
            original(self, primitive, *rest)

    monkeypatch.setattr(primitive_recorder.PrimitiveRecorder, "_write_down", forgetful)
    report = tl.validate_forward_pass(lambda x: jnp.sin(jnp.cos(x)), X)
    assert {finding.check for finding in report.findings} == {"completeness"}


def test_a_wrong_parent_and_a_wrong_value_are_found(monkeypatch):
    original = primitive_recorder.PrimitiveRecorder.find
    monkeypatch.setattr(
        primitive_recorder.PrimitiveRecorder,
        "find",
        lambda self, value: original(self, value) and 0,
    )
    monkeypatch.setattr(primitive_recorder.PrimitiveRecorder, "number_of", lambda self, array: None)
    wrong = primitive_recorder.PrimitiveRecorder._write_down

    def misled(self: Any, primitive: Any, args: Any, *rest: Any) -> None:
        wrong(self, primitive, args, *rest)
        if primitive.name == "tanh":
            self.rows[-1] = self.rows[-1]._replace(references=(0,))

    monkeypatch.setattr(primitive_recorder.PrimitiveRecorder, "_write_down", misled)
    report = tl.validate_forward_pass(lambda x: jnp.tanh(jnp.sin(x)), X)
    assert "arguments" in {finding.check for finding in report.findings}
    monkeypatch.undo()
    monkeypatch.setattr(
        primitives.PrimitiveCall, "__call__", lambda self, *args, **params: args[0] * 2
    )
    report = tl.validate_forward_pass(jnp.sin, X)
    assert "replay" in {finding.check for finding in report.findings}


def test_a_function_that_raises_is_a_finding():
    report = tl.validate_forward_pass(lambda x: jnp.sin(x) @ x, X)
    assert "dot_general" in str(report)
