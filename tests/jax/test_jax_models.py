"""Modules, weights and state of models of Equinox, flax and no library; whole training
steps.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx

import torchlens as tl
from tests.jax.models import Net, X, blocks, dense, layers
from torchlens._jax.pytrees import array_leaves


def weights_of(history: tl.ModelHistory) -> dict[str, Any]:
    recording = history._log.recording
    return {
        address: weight.detach().numpy()
        for address, weight in zip(recording.param_addresses, recording.params, strict=True)
    }


def path_of(keys: Any) -> str:
    words = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in keys]
    return ".".join(map(str, words))


def test_an_equinox_module_has_addresses_passes_and_weights_by_path():
    model = blocks()
    history = tl.log_forward_pass(model, X[0])
    expected = {
        path_of(keys): np.asarray(leaf)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(model)[0]
    }
    found = weights_of(history)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[address], expected[address]) for address in expected)
    assert history.module_num_passes["blocks.0"] == 2
    assert history.module_children["blocks.0"] == ["blocks.0.norm", "blocks.0.linear"]
    assert history.module_types["blocks.0.linear"] == "Linear"
    product = next(
        entry for entry in history if entry.parent_param_addresses == ["blocks.0.linear.weight"]
    )
    assert (product.layer_label, product.layer_passes_total) == ("dotgeneral_1_23:1", 2)
    assert product.containing_modules_origin_nested == ["blocks.0:1", "blocks.0.linear:1"]
    np.testing.assert_array_equal(history["head"].tensor_contents, model(X[0]))
    assert history.total_params == sum(leaf.size for leaf in expected.values())
    assert history["blocks.1"].func_call_stack[0].function == "Block.__call__"


@pytest.mark.parametrize(
    "around", [eqx.filter_jit, jax.vmap, lambda model: jax.vmap(eqx.filter_jit(model))]
)
def test_a_module_keeps_its_addresses_where_a_transformation_takes_it_apart(around):
    model = blocks()
    x = X[0] if around is eqx.filter_jit else X
    history = tl.log_forward_pass(around(model), x)
    assert history.module_addresses == tl.log_forward_pass(model, X[0]).module_addresses
    assert weights_of(history).keys() == weights_of(tl.log_forward_pass(model, X[0])).keys()


def test_a_gradient_is_logged_with_the_modules_that_it_is_the_gradient_of():
    def loss(model: Any, x: Any) -> Any:
        return jnp.square(jax.vmap(model)(x)).mean()

    history = tl.log_forward_pass(eqx.filter_value_and_grad(loss), [blocks(), X])
    assert history["head"].parent_layers
    with jax.disable_jit():
        value, gradients = eqx.filter_value_and_grad(loss)(blocks(), X)
    for label, expected in zip(
        history.output_layers, [value, *jax.tree_util.tree_leaves(gradients)], strict=True
    ):
        np.testing.assert_array_equal(history[label].tensor_contents, expected)
    products = [
        entry
        for entry in history
        if entry.containing_module_origin == "head:1" and "dot" in entry.layer_type
    ]
    assert len(products) == 3  # forward, and for each of the two factors
    assert len({entry.layer_label_no_pass for entry in products}) == 3


def test_linen_modules_have_the_addresses_of_their_variables_without_the_collection():
    module, variables = dense()
    history = tl.log_forward_pass(module.apply, [variables, X])
    flat = jax.tree_util.tree_flatten_with_path(variables["params"])[0]
    assert sorted(weights_of(history)) == sorted(path_of(keys) for keys, _ in flat)
    assert history.model_name == "Dense"
    assert history.module_addresses == ["norm", "hidden", "out"]
    assert [history[label].buffer_address for label in history.buffer_layers] == [
        "norm.mean",
        "norm.var",
    ]
    assert history["input.x"].is_input_layer
    np.testing.assert_array_equal(history["out"].tensor_contents, module.apply(variables, X))


def test_linen_loops_have_as_many_passes_as_turns():
    module = linen.RNN(linen.GRUCell(2))
    history = tl.log_forward_pass(module.apply, [module.init(jax.random.key(0), X[None]), X[None]])
    assert set(history.module_num_passes.values()) == {
        2
    }  # flax traces the cell once more, to see what it returns
    assert history["cell:2"].is_output_ancestor
    assert history.module_addresses[0] == "cell"


def test_the_state_of_equinox_goes_in_and_comes_out():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    batched = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    history = tl.log_forward_pass(lambda x, state: batched(x, state), [X, state])
    with jax.disable_jit():
        expected = jax.tree_util.tree_leaves(batched(X, state))
    found = [history[label] for label in history.output_layers]
    assert len(found) == len(expected) == 4
    for entry, value in zip(found, expected, strict=True):
        np.testing.assert_array_equal(entry.tensor_contents, value)
    assert [entry.input_output_address for entry in found[1:]] == [
        "output.1.0",
        "output.1.1.0",
        "output.1.1.1",
    ]
    inputs = [history[label].input_output_address for label in history.input_layers]
    assert inputs == ["input.x", "input.state.0", "input.state.1.0", "input.state.1.1"]


def test_linen_variables_are_found_in_a_partial_a_closure_and_by_name():
    module, variables = dense()
    train = partial(module.apply, variables, train=True, mutable=["batch_stats"])
    history = tl.log_forward_pass(train, X)
    assert list(history.module_types) == ["norm", "hidden", "out"]
    assert [history[label].input_output_address for label in history.output_layers] == [
        "output.0", "output.1.batch_stats.norm.mean", "output.1.batch_stats.norm.var",
    ]  # fmt: skip
    closed = tl.log_forward_pass(lambda x: module.apply(variables, x), X)
    named = tl.log_forward_pass(module.apply, [variables], {"x": X})
    assert list(weights_of(history)) == list(weights_of(closed)) == list(weights_of(named))


def test_an_nnx_module_in_training_is_logged_and_changed_as_by_a_plain_call():
    logged, plain = Net(), Net()
    history = tl.log_forward_pass(logged, X)
    with jax.disable_jit():
        expected = plain(X)
    np.testing.assert_array_equal(history["output_1"].tensor_contents, expected)
    ours, theirs = nnx.to_flat_state(nnx.state(logged)), nnx.to_flat_state(nnx.state(plain))
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        one, other = (
            jax.random.key_data(value)
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            else value
            for value in (one.get_value(), other.get_value())
        )
        np.testing.assert_array_equal(one, other, err_msg=str(path))
    params = [
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(plain, nnx.Param))
    ]
    assert sorted(weights_of(history)) == sorted(params)
    assert history.module_addresses == ["layers.0", "layers.1", "norm", "drop"]
    buffers = {history[label].buffer_address for label in history.buffer_layers}
    assert {"drop.rngs.key", "drop.rngs.count", "norm.mean", "norm.var"} <= buffers


def test_nnx_transformations_keep_addresses_and_update_the_module():
    def loss(model: Any, x: Any) -> Any:
        return model(x).sum()

    model = Net()
    count = int(model.drop.rngs.count.get_value())
    history = tl.log_forward_pass(nnx.jit(nnx.value_and_grad(loss)), [model, X])
    assert history.module_addresses == ["layers.0", "layers.1", "norm", "drop"]
    assert set(weights_of(history)) >= {"layers.0.kernel", "layers.1.bias", "norm.scale"}
    assert int(model.drop.rngs.count.get_value()) == count + 1


class _MadeAnew(Mapping[str, Any]):
    """A tree that makes its branches anew at each read, as a state of nnx does."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        value = self.content[key]
        return _MadeAnew(value) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


def test_every_branch_of_a_tree_is_told_that_makes_its_branches_anew():
    branch = {"linear": {"kernel": X, "bias": X}, "norm": {"scale": X, "bias": X}}
    paths = [
        part.path
        for part in array_leaves(_MadeAnew({"first": branch, "second": branch, "third": branch}))
    ]
    assert len(paths) == 12
    assert paths[-1] == ("third", "norm", "bias")


def test_no_part_of_a_gradient_by_nnx_is_missing():
    class Pair(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs)

        @nnx.remat
        def __call__(self, x: Any) -> Any:
            return self.norm(self.linear(x))

    class Pairs(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second, self.third = (Pair(nnx.Rngs(number)) for number in range(3))

        def __call__(self, x: Any) -> Any:
            return self.third(self.second(self.first(x)))

    history = tl.log_forward_pass(nnx.grad(lambda model, x: jnp.sin(model(x)).sum()), [Pairs(), X])
    found = {history[label].input_output_address for label in history.output_layers}
    weights = ("linear.kernel", "linear.bias", "norm.scale", "norm.bias")
    assert found == {
        f"output.{pair}.{name}" for pair in ("first", "second", "third") for name in weights
    }


def test_a_dict_of_layers_runs_in_order():
    model = layers()
    history = tl.log_forward_pass(model, X)
    assert history.module_addresses == ["dense1", "act1", "dense2", "outact"]
    assert history.module_types["act1"] == "relu"
    assert list(weights_of(history)) == ["dense1.weight", "dense1.bias", "dense2.weight"]
    expected = jax.nn.sigmoid(model["dense2"](jax.nn.relu(model["dense1"](X))))
    np.testing.assert_allclose(history["outact"].tensor_contents, expected, rtol=1e-6)


def test_a_function_of_a_tree_of_weights_knows_them_by_path():
    def predict(params: Any, x: Any, *, scale: float = 1.0) -> Any:
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["w"] + (0 if layer["b"] is None else layer["b"]))
        return {"scaled": x * scale, "nothing": None}

    params = {"layers": [{"w": jnp.eye(3), "b": None}, {"w": jnp.eye(3) * 2, "b": jnp.ones(3)}]}
    history = tl.log_forward_pass(predict, [params, X], {"scale": 0.5})
    assert list(weights_of(history)) == ["layers.0.w", "layers.1.w", "layers.1.b"]
    assert history.input_layers == ["input_1_0"]
    assert history["input.x"].is_input_layer
    assert history["output.scaled"].is_output_layer
    assert history[history["output.scaled"].parent_layers[0]].func_position_args_non_tensor == [0.5]


def test_a_whole_optax_step_is_logged_with_the_values_of_the_step():
    optimizer = optax.adamw(1e-2)
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: jnp.square(x @ p["w"] + p["b"]).mean())(
            params
        )
        updates, state = optimizer.update(gradients, state, params)
        return loss, optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    history = tl.log_forward_pass(step, [params, state, X])
    with jax.disable_jit():
        expected = jax.tree_util.tree_leaves(step(params, state, X))
    assert len(expected) == len(history.output_layers)
    for label, value in zip(history.output_layers, expected, strict=True):
        np.testing.assert_array_equal(history[label].tensor_contents, value)
    assert list(weights_of(history)) == ["w", "b"]
    assert history["input.state.0.mu.w"].is_input_layer


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e3m4",
        "int4",
        "int8",
        "uint32",
        "bool",
        "complex64",
    ],
)
def test_arrays_of_every_type_are_logged_with_their_values(dtype):
    x = jnp.asarray([[0, 1], [1, 1]]).astype(dtype)
    history = tl.log_forward_pass(lambda x: jnp.concatenate([x, x[:1]]), x)
    logged = history["concatenate_1"].tensor_contents.to(torch.complex64).real
    assert logged.tolist() == [[0, 1], [1, 1], [0, 1]]
    expected = {"float8_e3m4": "float16", "int4": "int8"}.get(dtype, dtype)
    assert str(history["concatenate_1"].tensor_dtype) == f"torch.{expected}"


def test_random_keys_are_the_numbers_they_consist_of():
    history = tl.log_forward_pass(
        lambda key: jax.random.normal(jax.random.split(key)[0], (3,)), jax.random.key(7)
    )
    assert (
        history["input_1"].tensor_contents.tolist()
        == jax.random.key_data(jax.random.key(7)).tolist()
    )
    split = history["randomsplit_1"].tensor_contents
    assert split.tolist() == jax.random.key_data(jax.random.split(jax.random.key(7))).tolist()
    assert history["randomsplit_1"].tensor_shape == (2, 2)


def test_arrays_that_only_a_variable_names_are_buffers_by_that_name():
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    history = tl.log_forward_pass(lambda x: x + table + jnp.asarray([1.0, 2.0, 3.0]), X)
    assert [history[label].buffer_address for label in history.buffer_layers] == [
        "table",
        "constant_2",
    ]
