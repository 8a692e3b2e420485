"""The commands take what JAX computes, as they take modules."""

from pathlib import Path

import pytest

import torchlens as tl
from torchlens._cli.main import main

CODE = """
import jax
import jax.numpy as jnp

def double_sine(x):
    return jnp.sin(x) * 2

def plain():
    return double_sine, jnp.ones(3)

def jitted():
    return jax.jit(double_sine), [jnp.ones(3)]

def unnamed():
    return lambda x: jnp.sin(x) * 2, jnp.ones(3), {}

def alone():
    return jax.jit(double_sine)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "functions_of_a_test.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("target", ["plain", "jitted", "unnamed", "alone"])
def test_a_function_with_its_arguments_is_logged_and_compared(target: str, file: Path) -> None:
    saved = file.with_suffix(".safetensors")
    inputs = ["--input", "1x3"] if target == "alone" else []
    assert main(["log", f"{file}:{target}", *inputs, "--save", str(saved)]) == 0
    assert tl.load(saved).layer_labels == ["input_1_0", "sin_1_1", "mul_1_2", "output_1_3"]
    if not inputs:
        assert main(["diff", str(saved), f"{file}:{target}"]) == 0


def test_a_function_without_its_arguments_asks_for_them(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log", f"{file}:alone"]) == 2
    assert "needs inputs (x): give --input SHAPE for each" in capsys.readouterr().err
