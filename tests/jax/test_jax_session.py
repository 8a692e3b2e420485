"""What a log of JAX leaves behind: nothing in JAX; on failure, an explanation."""

import copy
import pickle
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src import core
from jax._src.array import ArrayImpl
from jax.sharding import PartitionSpec as P

import torchlens as tl
from tests.jax.models import Block, Linear, X, blocks, dense, layers
from torchlens._jax import internals
from torchlens._recording.frameworks import is_for_jax


def patched_names() -> list[Any]:
    return [
        core.EvalTrace.process_primitive, core.EvalTrace.process_shard_map, ArrayImpl.__bool__,
        ArrayImpl.item,
        ArrayImpl.__array__, Block.__call__, Linear.__call__, jax.config.jax_disable_jit,
        *(cell.cell_contents for cell in jax.lax.scan.__closure__),
    ]  # fmt: skip


def test_jax_is_as_before_after_a_log_an_error_and_an_interrupt():
    before = patched_names()

    def stop(x: Any) -> Any:
        assert patched_names() != before
        raise KeyboardInterrupt

    tl.log_forward_pass(blocks(), X[0])
    assert patched_names() == before
    with pytest.raises(KeyboardInterrupt):
        tl.log_forward_pass(lambda x: stop(jnp.sin(x)), X)
    assert patched_names() == before
    with pytest.raises(TypeError, match="dot_general"):
        tl.log_forward_pass(lambda x: layers()["dense1"](x @ x), X)
    assert patched_names() == before


def test_an_error_tells_where_and_holds_the_log_so_far():
    with pytest.raises(TypeError) as caught:
        tl.log_forward_pass({"dense1": layers()["dense1"], "dense2": layers()["dense1"]}, X)
    (note,) = (note for note in caught.value.__notes__ if note.startswith("torchlens"))
    assert "module 'dense2' (Linear)" in note
    assert "models.py" in note
    history = caught.value.partial_history  # type: ignore[attr-defined]
    assert history.layer_labels[:2] == ["input_1_0", "transpose_1_1"]


def test_other_threads_are_not_logged_and_jit_stays_on_there():
    seen: list[Any] = []

    def other() -> None:
        seen.append(jax.config.jax_disable_jit)
        seen.append(jnp.cos(X).sum())

    def run(x: Any) -> Any:
        x = jnp.sin(x)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return jnp.tanh(x)

    history = tl.log_forward_pass(run, X)
    assert history.layer_labels == ["input_1_0", "sin_1_1", "tanh_1_2", "output_1_3"]
    assert not seen[0]


def test_a_log_in_a_log_is_an_error():
    with pytest.raises(tl.NestedLogError):
        tl.log_forward_pass(lambda x: tl.log_forward_pass(jnp.sin, jnp.cos(x)), X)


def test_a_log_is_never_silently_empty():
    with pytest.raises(tl.TorchLensError, match="ran no JAX operation"):
        tl.log_forward_pass(lambda x: np.sin(np.asarray(x)), X)


def test_what_cannot_be_followed_is_an_error_that_says_what_to_do():
    def with_reference(x: Any) -> Any:
        reference = jax.new_ref(x)
        reference[0] = x[1] * 2
        return reference[...].sum()

    with pytest.raises(tl.TorchLensError, match="Return a changed array instead"):
        tl.log_forward_pass(with_reference, X)
    with pytest.raises(TypeError, match="before lower"):
        tl.log_forward_pass(jax.jit(jnp.sin).lower(X).compile(), X)
    assert tl.log_forward_pass(jnp.sin, X).num_operations


def test_what_runs_on_each_device_is_one_operation_also_where_it_is_differentiated():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spread = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    assert tl.log_forward_pass(jax.jit(spread), X).layer_labels == [
        "input_1_0",
        "shardmap_1_1",
        "output_1_2",
    ]
    history = tl.log_forward_pass(jax.grad(lambda x: spread(x).sum()), X)
    assert np.allclose(history[-1].tensor_contents, jnp.cos(X), atol=1e-6)
    assert not jax.config.jax_disable_jit


@jax.tree_util.register_pytree_node_class
class Pair:
    """Of no known library, and without annotations that mention arrays of JAX."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.left, self.right), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> "Pair":
        return cls(*parts)


def swapped(pair: Pair) -> Pair:
    return Pair(pair.right, pair.left * pair.right)


def test_a_function_of_a_class_that_is_registered_with_jax_is_one_of_jax():
    history = tl.log_forward_pass(swapped, Pair(X, X + 1))
    assert history.layer_labels == ["input_1_0", "input_2_0", "mul_1_1", "output_1_2", "output_2_3"]
    assert tl.validate_forward_pass(swapped, Pair(X, X + 1))


jitted = jax.jit(lambda x: x * 2)


def calls_jitted(x: Any) -> Any:
    return jitted(x) + 1


@pytest.mark.parametrize("function", [calls_jitted, lambda x: calls_jitted(x)])
def test_a_function_that_calls_a_jitted_one_is_one_of_jax(function):
    assert is_for_jax(function)


@jax.jit
def scaled(batch: Any, weight: Any) -> Any:
    return batch[0] / 255 @ weight


def test_a_jitted_function_gets_arrays_of_jax_in_place_of_numpys(tmp_path):
    batch, weight = [np.arange(6).reshape(2, 3)], jnp.ones((3, 2))
    history = tl.log_forward_pass(scaled, [batch, weight])
    image = history[history["convertelementtype_1_1"].parent_layers[0]]
    assert image.is_input_layer
    assert image.tensor_dtype is torch.int32
    assert "div_1_2" in history["dotgeneral_1_3"].parent_layers
    np.testing.assert_allclose(history[-1].tensor_contents, scaled(batch, weight), rtol=1e-6)
    batch[0][:] = 0
    assert image.tensor_contents.sum() == 15
    assert tl.validate_forward_pass(scaled, [batch, weight])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (
            jax.random.uniform(jax.random.PRNGKey(0), x.shape) + x
        ),  # whose arguments are functions
        lambda x: jnp.linalg.solve(
            x @ x.T + jnp.eye(len(x)), x
        ),  # whose arguments are long programs
    ],
)
def test_the_json_of_a_log_is_that_of_the_file_and_tells_of_no_place_in_memory(function, tmp_path):
    history = tl.log_forward_pass(function, X)
    history.save(tmp_path / "log.safetensors")
    assert history.to_json() == tl.load(tmp_path / "log.safetensors").to_json()
    assert " at 0x" not in history.to_json()


@pytest.mark.parametrize("name", ["EvalTrace", "name_scope", "ShardMapPrimitive"])
def test_a_version_of_jax_that_is_built_differently_is_an_error_before_anything_runs(
    monkeypatch, name
):
    ran = []

    def model(x: Any) -> Any:
        ran.append(x)
        return jnp.sin(x)

    monkeypatch.setattr(internals, name, None)
    with pytest.raises(
        tl.TorchLensError, match=rf"got {jax.__version__}, which lacks .* pip install"
    ):
        tl.log_forward_pass(model, X)
    assert not ran


def test_what_is_for_torch_alone_says_so():
    with pytest.raises(ValueError, match=r"log jax.grad\(f\)"):
        tl.log_forward_pass(jnp.sin, X, save_gradients=True)
    with pytest.raises(TypeError, match="this function is for PyTorch only"):
        tl.profile(jax.jit(jnp.sin), X)
    with pytest.raises(TypeError, match=r"class 'torch\.Tensor'"):
        tl.log_forward_pass(jnp.sin, torch.ones(2))


def test_what_was_saved_is_protected_and_shares_memory():
    history = tl.log_forward_pass(lambda x: jnp.tanh(jnp.sin(x)), X)
    assert history["input_1"].tensor_contents.data_ptr() == X.unsafe_buffer_pointer()
    history["sin_1"].tensor_contents.add_(1)
    with pytest.raises(tl.ValueChangedError):
        history["sin_1"].tensor_contents  # noqa: B018 (it raises)


def test_layers_are_chosen_by_name_in_one_run_and_filled_anew():
    calls = []

    def run(x: Any) -> Any:
        calls.append(1)
        return jnp.tanh(jnp.sin(x) * 2)

    history = tl.log_forward_pass(run, X, layers_to_save=["sin", "tanh"], save_function_args=True)
    assert history.layers_with_saved_activations == ["sin_1_1", "tanh_1_3"]
    assert len(calls) == 1
    np.testing.assert_array_equal(history["sin_1"].creation_args[0], X)
    history.save_new_activations(run, X + 1, layers_to_save="mul")
    assert history.layers_with_saved_activations == ["mul_1_2"]
    with pytest.raises(tl.DifferentGraphError):
        history.save_new_activations(jnp.cos, X)


def test_a_condition_in_python_and_in_lax_marks_what_it_reads():
    history = tl.log_forward_pass(lambda x: jnp.sin(x) if x.sum() > 0 else x, X)
    assert [
        history[label].atomic_bool_val for label in history.internally_terminated_bool_layers
    ] == [True]
    history = tl.log_forward_pass(lambda x: jax.lax.cond(x.sum() > 9, jnp.sin, jnp.cos, x), X)
    assert [
        history[label].atomic_bool_val for label in history.internally_terminated_bool_layers
    ] == [False]
    assert "cos_1_3" in history.layer_labels


def test_a_loop_is_rolled_into_passes():
    def run(x: Any) -> Any:
        return jax.lax.scan(
            lambda carry, row: (jnp.tanh(carry + row), None), x[0] * 0, jnp.tile(x, (2, 1))
        )[0]

    history = tl.log_forward_pass(run, X)
    assert [
        number for label, number in history.layer_num_passes.items() if label.startswith("tanh")
    ] == [4]


def test_flops_are_those_of_torch_for_the_same_products():
    x, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))

    def convolve(x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME")
        z = jax.lax.conv_transpose(
            y, jnp.ones((5, 4, 3, 3)), (2, 2), "SAME", dimension_numbers=("NCHW", "IOHW", "NCHW")
        )
        return jnp.fft.fft(jnp.einsum("bchw,bdhw->bcd", z, z))

    history = tl.get_model_metadata(convolve, x)
    first, second = (entry for entry in history if entry.layer_type == "convgeneraldilated")
    assert first.flops == 2 * (2 * 5 * 4 * 4) * (3 * 3 * 3)
    assert second.flops == 2 * (2 * 4 * 4) * 5 * 4 * 3 * 3
    assert history["dotgeneral_1"].flops == 2 * (2 * 4 * 4) * 64
    assert history["fft_1"].flops == 5 * (2 * 4 * 4) * 2
    assert history.flops_not_counted == {}
    assert history.num_tensors_saved == 0


def test_a_transform_of_real_numbers_is_half_of_one_of_complex_numbers():
    signal = np.ones(8, np.float32)
    history = tl.get_model_metadata(
        lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x))), jnp.asarray(signal)
    )
    assert [entry.flops for entry in history if entry.layer_type == "fft"] == [
        120,
        60,
        60,
    ]  # 5 n log2(n)


def test_importing_torchlens_does_not_import_jax():
    log = "torchlens.log_forward_pass(torch.nn.ReLU(), torch.ones(2))"
    code = f"import sys, torchlens, torch; {log}; print('jax' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def test_a_history_of_jax_is_printed_drawn_explored_pickled_and_tabled(tmp_path):
    module, variables = dense()
    history = tl.log_forward_pass(module.apply, [variables, X])
    again = pickle.loads(pickle.dumps(history))
    assert again.layer_labels == copy.deepcopy(history).layer_labels == history.layer_labels
    assert torch.equal(again["out"].tensor_contents, history["out"].tensor_contents)
    entry, same = history["dotgeneral_1"], again["dotgeneral_1"]
    given = [torch.ones(2, 3), torch.ones(3, 3)]
    for one in (entry, same):
        assert one.func_applied is not None
        assert torch.equal(
            one.func_applied(*given, **one.func_keyword_args_non_tensor), torch.full((2, 3), 3.0)
        )
    assert len(history.to_pandas()) == len(history)
    assert "dotgeneral_1" in history.to_json()
    assert "Dense" in str(history.summary())
    history.explore(tmp_path / "page.html")
    history.render_graph(
        vis_opt="rolled",
        vis_outpath=str(tmp_path / "graph.gv"),
        vis_save_only=True,
        vis_fileformat="svg",
    )


def test_a_saved_log_of_jax_comes_back_as_one(tmp_path, capsys):
    history = tl.log_forward_pass(blocks(), X[0])
    history.save(tmp_path / "jax.safetensors", params=True)
    loaded = tl.load(tmp_path / "jax.safetensors")
    assert loaded._log.recording.framework == "jax"
    assert loaded.layer_labels == history.layer_labels
    for label in history.layer_labels:
        torch.testing.assert_close(
            loaded[label].tensor_contents,
            history[label].tensor_contents,
            rtol=0,
            atol=0,
            equal_nan=True,
        )
    assert loaded.to_pandas().map(repr).equals(history.to_pandas().map(repr))
    diff = tl.diff(history, loaded)
    assert diff.ok
    assert "10 of 10 found" in str(diff)
    tl.magnify(tmp_path / "jax.safetensors")
    assert "Blocks (jax)" in capsys.readouterr().out
