"""A model in PyTorch against its port to JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import torchlens as tl
from benchmarks.planted import jax_transformer, transformer

pytestmark = pytest.mark.slow

THREE = {
    "blocks.0.norm1": "small eps",
    "blocks.1.ffn": "tanh",
    "blocks.2.attention.output": "transposed",
}


@pytest.fixture(scope="module")
def reference() -> Any:
    model, ids = transformer.example()
    return model, jnp.asarray(ids.numpy()), tl.log_forward_pass(model, ids)


def test_a_clean_port_to_jax_agrees(reference: Any) -> None:
    model, ids, history = reference
    diff = tl.diff(history, tl.log_forward_pass(jax_transformer.ported(model), ids), isolate=True)
    assert diff.ok
    assert (
        diff.weights
        == "41 of 41 found: 25 as they are, 10 transposed, 18 as thirds of `qkv` of the reference"
    )
    assert diff.largest_own < 8.5


def test_three_mistakes_in_a_port_to_jax_are_these_three(reference: Any) -> None:
    model, ids, history = reference
    candidate = tl.log_forward_pass(jax_transformer.ported(model, THREE), ids)
    diff = tl.diff(history, candidate, isolate=True)
    assert [culprit.candidate_module for culprit in diff.culprits] == list(THREE)
    reasons = [culprit.reason for culprit in diff.culprits]
    assert "eps 1e-05 in the reference, 1e-06 in the candidate" in reasons[0]
    assert "gelu's tanh form" in reasons[1]
    assert "others like it are; transposed, the error is 0" in reasons[2]
    assert "1 stands out: blocks.2.attention.output.w" in diff.weights
    assert diff.culprits[0].candidate_line.startswith("jax_transformer.py:")


def test_the_port_may_be_the_reference(reference: Any) -> None:
    model, ids, history = reference
    port = tl.log_forward_pass(jax_transformer.ported(model, {"blocks.1.ffn": "tanh"}), ids)
    diff = tl.diff(port, history, isolate=True)
    assert [culprit.candidate_module for culprit in diff.culprits] == ["h.1.mlp.act"]
    assert "the exact gelu" in diff.culprits[0].reason


def test_a_jitted_functions_outputs_are_those_of_the_function(tmp_path: Any) -> None:
    def function(x: Any) -> Any:
        return {"logits": jnp.sin(x), "auxiliary": jnp.cos(x)}

    x = jnp.linspace(-1, 1, 6)
    with tl.tail(jax.jit(function), tmp_path / "jitted.safetensors") as tailed:
        tailed(x)
    diff = tl.diff(tl.log_forward_pass(function, x), tmp_path / "jitted.safetensors")
    assert diff.ok
    assert diff.outputs.agree
