"""Where a log comes from: digests of weights and inputs, and versions."""

import copy
import pickle
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, Residual
from torchlens._recording.origin import digest, weights_digest


def receipt(model: nn.Module, x: Any, **options: Any) -> Any:
    return tl.log_forward_pass(model, x, **options).receipt


def test_the_weights_have_the_same_digest_in_a_log_and_without_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    found = receipt(model, torch.rand(2, 4))
    assert found.weights == weights_digest(model)
    assert len(found.weights) == 32


def test_one_number_more_or_less_changes_the_digest() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.rand(2, 4)
    seen = {receipt(model, x).weights}
    for tensor in [*model.parameters(), *model.buffers()]:
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[-1] += 1
        seen.add(receipt(model, x).weights)
        with torch.no_grad():
            tensor.copy_(before)
    assert len(seen) == 8
    assert receipt(copy.deepcopy(model), x).weights in seen


def test_the_digest_is_of_the_weights_that_ran() -> None:
    model, x = MLP(), torch.rand(2, 4)
    history, other = tl.log_forward_pass(model, x), tl.log_forward_pass(model, x)
    expected = history.receipt.weights
    with torch.no_grad():
        model.fc1.weight.add_(1)
    assert history.receipt.weights == expected
    assert other.receipt.weights is None  # they are gone
    assert receipt(model, x).weights not in (None, expected)


def test_the_digest_of_inputs_is_that_of_their_values() -> None:
    x = torch.rand(2, 4)
    expected = receipt(MLP(), x).inputs
    freed = tl.log_forward_pass(MLP(), x.clone(), layers_to_save="none")
    assert freed.receipt.inputs is None
    assert receipt(MLP(), x, layers_to_save="none").inputs == expected
    assert receipt(MLP(), x.clone()).inputs == expected
    assert receipt(MLP(), [x.T.contiguous().T]).inputs == expected
    assert receipt(MLP(), x + 1).inputs != expected
    assert receipt(MLP().double(), x.double()).inputs != expected
    assert receipt(MLP(), x, activation_postfunc=torch.mean).inputs == expected
    with torch.no_grad():  # nothing else keeps the input alive
        transformed = tl.log_forward_pass(MLP(), x.clone(), activation_postfunc=torch.sum)
    assert transformed.receipt.inputs is None


def test_an_input_that_the_model_writes_to_has_the_digest_of_before() -> None:
    model, x = Model(lambda self, x: x.add_(1) * 2), torch.rand(3)
    expected = receipt(Model(lambda self, x: x * 2), x).inputs
    assert receipt(model, x).inputs == expected


def test_inputs_that_are_no_tensors_count() -> None:
    model = Model(lambda self, x, power, name: x**power)
    x = torch.rand(3)
    found = {receipt(model, [x, power, name]).inputs for power in (2, 3) for name in ("a", "b")}
    assert len(found) == 4


def test_arrays_and_text_have_a_digest_and_objects_have_none() -> None:
    array = np.arange(6).reshape(2, 3)
    assert digest([("a", array)]) == digest([("a", np.asfortranarray(array))])
    assert digest([("a", array)]) != digest([("a", array.T)])
    assert digest([("a", 1)]) != digest([("a", 1.0)]) != digest([("a", "1.0")])
    assert digest([("a", 1), ("b", 2)]) == digest([("b", 2), ("a", 1)])
    assert digest([("a", object())]) is None
    assert digest([("a", torch.empty(2, device="meta"))]) is None
    assert digest([("a", torch.rand(2).to_sparse())]) is None
    assert digest([("a", torch.tensor([1, 2], dtype=torch.bfloat16))]) is not None
    assert digest([("a", torch.tensor(True))]) != digest([("a", torch.tensor(False))])


def test_a_copy_and_a_file_keep_the_receipt_of_the_run(tmp_path: Path) -> None:
    model = Residual()
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    copied = copy.deepcopy(history)
    expected = history.receipt
    history.save(tmp_path / "a.safetensors")
    with torch.no_grad():
        model.blocks[0].fc.weight.add_(1)
    assert expected.weights
    assert expected.inputs
    for other in (copied, tl.load(tmp_path / "a.safetensors"), pickle.loads(pickle.dumps(history))):
        assert other.receipt == expected


def test_the_receipt_outlives_the_parameters() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history.clear_params()
    assert history.receipt.weights
    history.cleanup()
    assert history.receipt.inputs


def test_a_receipt_prints_in_one_line() -> None:
    found = receipt(MLP(), torch.rand(2, 4))
    assert found.versions["python"] == platform.python_version()
    assert found.versions["torch"] == torch.__version__
    assert str(found) == (
        f"MLP: structure {found.structure}, weights {found.weights}, inputs {found.inputs} "
        f"(torchlens {found.versions['torchlens']}, torch {torch.__version__}, "
        f"python {platform.python_version()})"
    )
    assert list(found.to_dict()) == ["model", "structure", "weights", "inputs", "versions"]


def test_a_history_of_jax_has_a_receipt() -> None:
    jax = pytest.importorskip("jax")
    weights = {"w": jax.numpy.ones((4, 3))}

    def model(params: Any, x: Any) -> Any:
        return jax.numpy.tanh(x @ params["w"])

    x = jax.numpy.ones((2, 4))
    one, other = receipt(model, [weights, x]), receipt(model, [weights, x + 1])  # type: ignore[arg-type]
    assert one.versions["jax"] == jax.__version__
    assert one.weights == other.weights is not None
    assert one.structure == other.structure
    assert one.inputs != other.inputs
