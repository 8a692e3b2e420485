"""A jitted training loop under `tail`: one compiled program, with the values of the plain one."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from safetensors.numpy import load_file

import torchlens as tl
from tests.jax.models import Net, X, blocks, layers

OPTIMIZER = optax.adam(1e-2)


@eqx.filter_jit
def step(model: Any, state: Any, x: Any) -> Any:
    loss, gradients = eqx.filter_value_and_grad(lambda m, x: jnp.square(jax.vmap(m)(x)).mean())(
        model, x
    )
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
        np.testing.assert_allclose(
            first[address].tensor_contents, logged[address].tensor_contents, rtol=1e-4, atol=1e-5
        )
        assert first[address].parent_layers
    assert not np.allclose(
        tl.load(path, call=2)["head"].tensor_contents, first["head"].tensor_contents
    )


def test_modules_alone_can_be_chosen(tmp_path):
    path = tmp_path / "trace.safetensors"
    with tl.tail(step, path, layers="blocks.?", every=2) as run:
        train(run)
    names = list(tl.read_trace(path))
    assert names == [
        f"{call}/{name}/add" for call in (1, 3) for name in ("blocks.0", "blocks.1", "blocks.0:2")
    ]


@jax.jit
def steps(x: Any) -> Any:
    return jnp.tanh(x * 2 + 1).sum() + jnp.tanh(x).mean()


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("tanh", ["1/tanh", "1/tanh:2"]),
        ("tanh:1", ["1/tanh"]),
        ("tanh:2", ["1/tanh:2"]),
        ("tanh*", ["1/tanh", "1/tanh:2"]),
        ("tanh_2", ["1/tanh:2"]),
        ("tanh_1_3", ["1/tanh"]),
        ("tanh_1_3:1", ["1/tanh"]),
        ("/tanh", ["1/tanh", "1/tanh:2"]),
        ("/tanh:1", ["1/tanh"]),
        ("*/tanh*", ["1/tanh", "1/tanh:2"]),
        (["input*", "tanh:1"], ["1/input.x", "1/tanh"]),
    ],
)
@pytest.mark.parametrize("function", [steps, lambda x: steps(x)], ids=["jitted", "not jitted"])
def test_an_operation_outside_any_module_can_be_chosen(
    function: Any, key: Any, names: list[str], tmp_path
):
    path = tmp_path / "trace.safetensors"
    with tl.tail(function, path, layers=key) as run:
        run(X)
    assert list(tl.read_trace(path)) == names


@pytest.mark.parametrize("function", [steps, lambda x: steps(x)], ids=["jitted", "not jitted"])
@pytest.mark.parametrize("key", ["cosh", "/cosh", "*/cosh"])
def test_a_key_that_fits_nothing_is_told_of_and_the_others_are_recorded(
    function: Any, key: str, tmp_path
):
    keys = [key, "tanh:1" if key == "cosh" else "/tanh:1"]
    tailing = tl.tail(function, tmp_path / "trace.safetensors", layers=keys)
    tailing.__enter__()(X)
    pattern = (
        "layers names '.*cosh', and .* calls no such module or operation. There are '/input.x', "
        ".*'/tanh'"
    )
    with pytest.warns(UserWarning, match=pattern):
        tailing.__exit__(None, None, None)
    assert list(tl.read_trace(tmp_path / "trace.safetensors")) == ["1/tanh"]


@pytest.mark.parametrize("is_jitted", [True, False])
def test_an_error_of_the_functions_own_goes_to_the_caller_and_later_calls_are_recorded(
    is_jitted, tmp_path
):
    def product(weight: Any, x: Any, scale: float) -> Any:
        return jnp.tanh(x @ weight) * scale

    path = tmp_path / "trace.safetensors"
    tailing: Any = tl.tail(jax.jit(product) if is_jitted else product, path, params=True)
    run = tailing.__enter__()
    with pytest.raises(TypeError, match="dot_general"):
        run(jnp.eye(3), jnp.ones((2, 9)), 2.0)
    for scale in range(5):
        run(jnp.eye(3), jnp.ones((2, 3)), float(scale))
    if is_jitted:
        assert len(tailing._compiled._programs) == 1  # the number is an argument still
        with pytest.warns(
            UserWarning,
            match="1 of 6 calls are not in trace.safetensors: the function raised an error",
        ):
            tailing.__exit__(None, None, None)
    else:
        tailing.__exit__(None, None, None)
    assert tailing.problem is None
    outputs = tl.read_trace(path, "*/output")
    assert list(outputs) == [f"{number}/output" for number in range(2, 7)]
    np.testing.assert_allclose(outputs["6/output"], np.tanh(np.ones((2, 3))) * 4, rtol=1e-6)


@pytest.mark.parametrize("function", [steps, lambda x: steps(x)], ids=["jitted", "not jitted"])
def test_a_call_inside_a_log_is_counted_and_told(function: Any, tmp_path):
    tailing = tl.tail(function, tmp_path / "trace.safetensors")
    run = tailing.__enter__()
    history = tl.log_forward_pass(lambda x: run(x) + 1, X)
    assert "tanh_1" in history
    run(X)
    with pytest.warns(
        UserWarning,
        match="1 of 2 calls are not in trace.safetensors: they were made inside a call that",
    ):
        tailing.__exit__(None, None, None)
    assert tl.load(tmp_path / "trace.safetensors", call=2)["tanh_1"].tensor_shape == X.shape


def test_in_a_forked_child_nothing_is_recorded(tmp_path, monkeypatch):
    path = tmp_path / "trace.safetensors"
    tailing = tl.tail(steps, path)
    run = tailing.__enter__()
    run(X)
    with (
        monkeypatch.context() as child
    ):  # a real one would wait for threads of JAX that it does not have
        child.setattr("os.getpid", lambda: -1)
        run(X + 9)
        tailing.__exit__(None, None, None)
    assert not path.exists()
    tailing._is_over = False
    run(X + 1)
    tailing.__exit__(None, None, None)
    np.testing.assert_array_equal(tl.load(path, call=2)["input_1"].tensor_contents, X + 1)


def test_what_is_not_jitted_is_logged_and_what_is_traced_is_told_of(tmp_path):
    with tl.tail(layers(), tmp_path / "a.safetensors") as run:
        run(X)
    assert "1/act1/max" in tl.read_trace(tmp_path / "a.safetensors")
    tailing = tl.tail(jax.jit(jnp.sin), tmp_path / "b.safetensors")
    sine = tailing.__enter__()
    jax.jit(lambda x: sine(x) + 1)(X)
    with pytest.warns(UserWarning, match="Tail the outermost function"):
        tailing.__exit__(None, None, None)


def test_what_pmap_made_is_logged(tmp_path):
    with tl.tail(
        jax.pmap(lambda x: jax.lax.psum(jnp.sin(x), "i"), axis_name="i"), tmp_path / "t.safetensors"
    ) as run:
        result = run(X[None])
    found = tl.load(tmp_path / "t.safetensors", call=1)
    assert found.num_operations
    np.testing.assert_array_equal(found["output_1"].tensor_contents, result)


def _scan(x: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (jnp.sin(carry) + row, carry * 2), x[0], x)


def _nested(x: Any) -> Any:
    def turn(carry: Any, row: Any) -> Any:
        return jax.lax.scan(lambda a, b: (a * b + 1, a), carry, jnp.stack([row, row * 2]))[
            0
        ], carry.sum()

    return jax.lax.scan(turn, x[0], x, reverse=True)


RECURRENT = linen.RNN(linen.LSTMCell(2))
BOTH_WAYS = linen.Bidirectional(linen.RNN(linen.SimpleCell(2)), linen.RNN(linen.SimpleCell(2)))

LOOPS: dict[str, Any] = {
    "scan": lambda: (_scan, [X]),
    "nested": lambda: (_nested, [X]),
    "linen.RNN": lambda: (RECURRENT.apply, [RECURRENT.init(jax.random.key(0), X[None]), X[None]]),
    "linen.Bidirectional": lambda: (
        BOTH_WAYS.apply,
        [BOTH_WAYS.init(jax.random.key(0), X[None]), X[None]],
    ),
    "keys": lambda: (
        lambda key: jax.lax.scan(
            lambda k, _: (jax.random.split(k)[0], jax.random.normal(k)), key, length=3
        ),
        [jax.random.key(1)],
    ),
    "repeated": lambda: (
        jax.grad(jax.checkpoint(lambda w: jnp.sin(jnp.sin(X @ w) @ w).sum())),
        [jnp.eye(3)],
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_turn_of_a_loop_is_in_the_file_as_a_log_has_it(name, tmp_path):
    function, args = LOOPS[name]()
    with tl.tail(jax.jit(function), tmp_path / "trace.safetensors") as run:
        run(*args)
    logged, found = (
        tl.log_forward_pass(function, args),
        tl.load(tmp_path / "trace.safetensors", call=1),
    )
    assert found.layer_labels == logged.layer_labels
    assert found.module_num_passes == logged.module_num_passes
    for one, other in zip(found, logged, strict=True):
        assert one.parent_layers == other.parent_layers
        assert one.containing_module_origin == other.containing_module_origin
        assert one.module_passes_exited == other.module_passes_exited
        np.testing.assert_allclose(one.tensor_contents, other.tensor_contents, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_a_loop_belongs_to_the_turns_of_its_modules(tmp_path):
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + linen.Dense(3)(jnp.tanh(x)), None

    stack = linen.scan(
        linen.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    weights = stack.init(jax.random.key(0), X, None)
    loss = jax.grad(lambda variables: stack.apply(variables, X, None)[0].sum())
    with tl.tail(jax.jit(loss), tmp_path / "trace.safetensors") as run:
        gradients = run(weights)
    np.testing.assert_allclose(
        gradients["params"]["Dense_0"]["kernel"],
        loss(weights)["params"]["Dense_0"]["kernel"],
        rtol=1e-5,
    )
    found, logged = (
        tl.load(tmp_path / "trace.safetensors", call=1),
        tl.log_forward_pass(loss, [weights]),
    )
    assert found.module_num_passes == logged.module_num_passes == {"Dense_0": 3}
    for number in (1, 2, 3):
        one, other = found[f"Dense_0:{number}"], logged[f"Dense_0:{number}"]
        np.testing.assert_allclose(one.tensor_contents, other.tensor_contents, rtol=1e-5)
        products = [
            entry for entry in found if entry.containing_module_origin == f"Dense_0:{number}"
        ]
        assert (
            sum(entry.layer_type == "dotgeneral" for entry in products) > 1
        )  # the backward pass too


def test_an_nnx_step_trains_as_it_would(tmp_path):
    def losses(tailed: bool) -> tuple[list[float], Any]:
        model = Net()
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> Any:
            loss, gradients = nnx.value_and_grad(lambda m: jnp.square(m(x)).mean())(model)
            optimizer.update(model, gradients)
            return loss

        if not tailed:
            return [float(step(model, optimizer, X)) for _ in range(3)], nnx.state(model)
        with tl.tail(step, tmp_path / "trace.safetensors") as run:
            return [float(run(model, optimizer, X)) for _ in range(3)], nnx.state(model)

    (expected, before), (found, after) = losses(False), losses(True)
    assert len(set(expected)) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for one, other in zip(
        jax.tree_util.tree_leaves(after), jax.tree_util.tree_leaves(before), strict=True
    ):
        if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    assert "model.norm" in tl.load(tmp_path / "trace.safetensors", call=3).module_addresses


def test_a_loop_of_very_many_turns_is_one_operation(tmp_path):
    with tl.tail(
        jax.jit(lambda x: jax.lax.scan(lambda c, _: (c * 1.0001, None), x, length=20_000)[0]),
        tmp_path / "t",
    ) as run:
        run(X)
    assert [entry.layer_type for entry in tl.load(tmp_path / "t", call=1)] == [
        "input",
        "scan",
        "output",
    ]


def test_what_a_loop_or_the_function_returns_is_in_the_file_once(tmp_path):
    def step(x):
        carry, rows = jax.lax.scan(
            lambda carry, row: (carry + row, jnp.sin(carry * row)), jnp.ones(64), x
        )
        return jnp.tanh(carry), rows

    x = jax.random.normal(jax.random.key(0), (5, 64))
    path = tmp_path / "trace.safetensors"
    with tl.tail(jax.jit(step), path) as f:
        carry, rows = f(x)
    found = load_file(path)
    contents = [found[name].tobytes() for name in found if name.startswith("1/")]
    assert len(contents) == len(set(contents))
    history = tl.load(path)
    assert np.array_equal(history["tanh_1"].tensor_contents, np.asarray(carry))
    for turn in range(5):
        assert np.array_equal(history[f"sin_1:{turn + 1}"].tensor_contents, np.asarray(rows[turn]))


@jax.tree_util.register_dataclass
@dataclass
class Scale:
    """A layer of no library: a callable tree."""

    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight


def layers_in_turn() -> dict[str, Any]:
    return {
        "a": Scale(jnp.ones(4)),
        "act": jax.nn.relu,
        "b": Scale(jnp.ones(4)),
        "out": jax.nn.sigmoid,
    }


@pytest.mark.parametrize(
    ("choose", "chosen"),
    [
        (lambda path, node: node in (jax.nn.relu, jax.nn.sigmoid), {"act", "out"}),
        (lambda path, node: isinstance(node, Scale), {"a", "b"}),
        (lambda path, node: "act" in path, {"act"}),
    ],
    ids=["functions", "class", "path"],
)
def test_a_filter_is_given_the_layer_objects(choose: Any, chosen: set[str], tmp_path):
    path = tmp_path / "trace.safetensors"
    with tl.tail(layers_in_turn(), path, choose) as m:
        m(jnp.ones(4))
    assert {name.split("/")[1] for name in tl.read_trace(path)} == chosen


def test_a_filter_of_a_jitted_function_is_given_the_layer_objects(tmp_path):
    path = tmp_path / "trace.safetensors"
    given = []

    def choose(address: list[str], node: Any) -> bool:
        given.append(type(node))
        return isinstance(node, eqx.nn.Linear)

    model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    with tl.tail(eqx.filter_jit(model), path, choose) as m:
        m(jnp.ones(4))
    assert set(given) == {eqx.nn.Linear}
    assert {name.split("/")[1] for name in tl.read_trace(path)} == {"layers.0", "layers.1"}


def test_a_filter_that_chooses_nothing_is_told_with_what_there_is(tmp_path):
    tail = tl.tail(layers_in_turn(), tmp_path / "trace.safetensors", lambda path, node: False)
    tail.__enter__()(jnp.ones(4))
    text = "chose no module that .* called. Modules that it called: 'a', 'act', 'b', 'out'"
    with pytest.warns(UserWarning, match=text):
        tail.__exit__(None, None, None)
