"""The checks of the bookkeeping find what `validate_forward_pass` does not promise to find."""

import pytest
import torch
from torch import nn

from tests.networks import Model
from tests.validate.proof import Proof, prove
from tests.validate.test_models import CASES


def written(_, x):
    y = torch.sin(x)
    y[0].add_(5)
    y[1].mul_(1)
    return y * 2


def proof_of(function):
    return Proof(Model(function), torch.tensor([0.3, 1.2, -2.0]))


@pytest.mark.parametrize("name", CASES)
def test_the_bookkeeping_of_every_kind_of_model_is_right(name):
    torch.manual_seed(0)
    report = prove(CASES[name](), torch.randn(3, 4))
    assert report.passed, str(report)


def test_a_writer_that_changed_no_value_is_missed_if_the_log_leaves_it_out():
    proof = proof_of(written)
    proof.recording.writes.pop()  # of mul_, which multiplied by one
    proof.rebuild()
    assert proof.findings() == []
    assert ("arguments", "mul_2_6") in proof.findings(with_bookkeeping=True)


def test_a_wrong_line_is_found():
    proof = proof_of(lambda _, x: torch.cos(torch.sin(x)))
    proof.replace_row(proof.number("cos"), code=written.__code__, instruction=0)
    assert proof.findings(with_bookkeeping=True) == [("calls", "cos_1_2")]


def test_a_wrong_result_number_is_found():
    proof = proof_of(lambda _, x: torch.stack(x.split(1)[:2]))
    proof.replace_row(proof.number("split"), output_index=1)
    assert ("calls", "split_1_1") in proof.findings(with_bookkeeping=True)


def test_a_pass_in_the_wrong_layer_is_found():
    proof = Proof(nn.Sequential(*[nn.ReLU()] * 2, nn.Tanh()), torch.ones(3)).copied()
    layers = list(proof.graph.layer_of)
    layers[1], layers[3] = layers[3], layers[1]
    object.__setattr__(proof.graph, "layer_of", layers)
    assert "calls" in {check for check, _ in proof.findings(with_bookkeeping=True)}
