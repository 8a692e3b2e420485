"""The second and later calls of a compiled program under `tail`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import torchlens as tl
from tests.jax.models import X
from torchlens._portable.documents import graph_document


def views(x: Any) -> Any:
    rows = jnp.tanh(x).T.reshape(2, 3)  # lies in another order: numbers of its own
    first, rest = jnp.split(jnp.exp(x), [1])
    return (
        (rows * 2).reshape(-1)[1::2].sum(),
        jnp.broadcast_to(first[0, 0], (4, 5)) * 2,
        rest[None, :, 1:].squeeze(0),
    )


def loop(x: Any) -> Any:
    def turn(carry: Any, row: Any) -> Any:
        wide = jnp.sin(carry[None, :] * row[:, None])
        return wide.T[0], (wide.reshape(-1), jnp.cos(wide))

    return jax.lax.scan(turn, x[0], x)


def types(x: Any) -> Any:
    noise = jax.random.normal(jax.random.key(3), (2,))
    return noise + x[:, 0], x.astype(jnp.bfloat16) * 2, x.astype(jnp.int4), x > 0, x * 1j


class Part(eqx.Module):
    function: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.function(x)


class Whole(eqx.Module):
    """Calls a function as a module, so that what it does can be chosen by name."""

    part: Part

    def __call__(self, x: Any) -> Any:
        return self.part(x)


PROGRAMS: dict[str, Any] = {
    "views": views,
    "loop": loop,
    "types": types,
    "keys": lambda x: jax.random.split(
        jax.random.fold_in(jax.random.key(1), x[0, 0].astype(int)), 2
    ),
    "empty": lambda x: (x[:0] * 2, x[:0].sum(), x + 1),
    "passed on": lambda x: (x, x.T, x + 1),
}


@pytest.mark.filterwarnings("ignore:.*layers names")  # not each program has each of them
@pytest.mark.parametrize(
    "layers", ["all", ["part/transpose*", "part/reshape*", "part/split*", "part/sin", "part/add*"]]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_third_call_is_in_the_file_as_a_trace_of_its_own_has_it(name, layers, tmp_path):
    function = eqx.filter_jit(Whole(Part(PROGRAMS[name])))
    with tl.tail(function, tmp_path / "all.safetensors", layers) as run:
        for number in range(3):
            run(X + number)
    with tl.tail(function, tmp_path / "one.safetensors", layers) as run:
        run(X + 2)
    third, alone = (
        tl.load(tmp_path / "all.safetensors", call=3),
        tl.load(tmp_path / "one.safetensors", call=1),
    )
    assert third.layer_labels == alone.layer_labels
    for one, other in zip(third, alone, strict=True):
        if other.has_saved_activations:
            torch.testing.assert_close(
                one.tensor_contents, other.tensor_contents, rtol=0, atol=0, equal_nan=True
            )
    found, own = load_file(tmp_path / "all.safetensors"), load_file(tmp_path / "one.safetensors")
    third_names = {name.partition("/")[2]: name for name in found if name.startswith("3/")}
    assert third_names.keys() == {name.partition("/")[2] for name in own if name.startswith("1/")}
    assert all(
        np.array_equal(found[third_names[name]], own[f"1/{name}"], equal_nan=True)
        for name in third_names
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_a_log(name, tmp_path):
    with tl.tail(jax.jit(PROGRAMS[name]), tmp_path / "t.safetensors") as run:
        for number in range(2):
            run(X + number)
    logged, found = (
        tl.log_forward_pass(PROGRAMS[name], X + 1),
        tl.load(tmp_path / "t.safetensors", call=2),
    )
    assert found.layer_labels == logged.layer_labels
    for one, other in zip(found, logged, strict=True):
        assert (one.tensor_shape, one.tensor_dtype) == (other.tensor_shape, other.tensor_dtype)
        np.testing.assert_allclose(
            one.tensor_contents.to(other.tensor_dtype).tolist(),
            other.tensor_contents.tolist(),
            rtol=1e-4,
            atol=1e-6,
        )


def test_what_looks_at_another_value_is_not_written_again(tmp_path):
    with tl.tail(
        jax.jit(lambda x: (jnp.tanh(x).T * 2).reshape(-1) + 1), tmp_path / "t.safetensors"
    ) as run:
        run(X)
        run(X)
    names = [name for name in load_file(tmp_path / "t.safetensors") if name.startswith("2/")]
    assert sorted(names) == ["2/add", "2/input.x", "2/mul", "2/tanh"]
    np.testing.assert_array_equal(
        tl.load(tmp_path / "t.safetensors", call=2)["reshape_1"].tensor_contents,
        np.asarray(jnp.tanh(X).T * 2).reshape(-1),
    )


def test_the_graph_of_a_program_is_made_once(tmp_path, monkeypatch):
    num_documents = 0

    def counted(*args: Any) -> Any:
        nonlocal num_documents
        num_documents += 1
        return graph_document(*args)

    monkeypatch.setattr("torchlens._trace.call_writer.graph_document", counted)
    with tl.tail(jax.jit(loop), tmp_path / "t.safetensors") as run:
        for _ in range(5):
            run(X)
    assert num_documents == 1
    assert len({name.partition("/")[0] for name in tl.read_trace(tmp_path / "t.safetensors")}) == 5


def test_an_array_of_numpy_that_its_owner_fills_anew_is_in_the_file_as_it_was(tmp_path):
    batch = np.zeros((256, 1024), np.float32)  # so large that another thread writes it
    with tl.tail(jax.jit(lambda x: jnp.sin(x).sum()), tmp_path / "t.safetensors") as run:
        for number in range(8):
            batch[:] = number
            run(batch)
            batch[:] = -1
    for number in range(8):
        assert tl.load(tmp_path / "t.safetensors", call=number + 1)[
            "input.x"
        ].tensor_contents.unique().tolist() == [number]


def test_what_the_function_returns_may_be_donated_to_another(tmp_path):
    update = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    with tl.tail(jax.jit(lambda w: w + 1), tmp_path / "t.safetensors") as run:
        w = jnp.zeros((512, 1024))
        for _ in range(6):
            w = update(run(w))
    for call in range(2, 7):
        history = tl.load(tmp_path / "t.safetensors", call=call)
        assert history["input_1"].tensor_contents.unique().tolist() == [-1]
        assert history["output_1"].tensor_contents.unique().tolist() == [0]
