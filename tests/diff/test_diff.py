"""Where two implementations of a model part, and why."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from benchmarks.planted import transformer


@pytest.fixture(scope="module")
def reference() -> Any:
    model, ids = transformer.example()
    return model, ids, tl.log_forward_pass(model, ids)


def compared(reference: Any, mistakes: dict[str, str] | None = None, **options: Any) -> tl.Diff:
    model, ids, history = reference
    return tl.diff(
        history, tl.log_forward_pass(transformer.ported(model, mistakes), ids), **options
    )


THREE = {
    "blocks.0.norm1": "small eps",
    "blocks.1.ffn": "tanh",
    "blocks.2.attention.output": "transposed",
}


@pytest.mark.parametrize("isolate", [False, True])
def test_a_clean_port_agrees(reference: Any, isolate: bool) -> None:
    diff = compared(reference, isolate=isolate)
    assert diff.ok
    assert diff.first is None
    assert not diff.culprits
    assert diff.outputs.agree
    assert all(pair.agrees for pair in diff.pairs)
    assert "They agree" in str(diff)


def test_weights_are_told_in_a_sentence(reference: Any) -> None:
    diff = compared(reference)
    assert (
        diff.weights
        == "41 of 41 found: 25 as they are, 10 transposed, 18 as thirds of `qkv` of the reference"
    )


def test_the_first_divergence_is_where_inputs_agree_and_outputs_do_not(reference: Any) -> None:
    diff = compared(reference, {"blocks.0.norm1": "small eps"})
    first = diff.first
    assert first is not None
    assert not diff.ok
    assert (first.reference_module, first.candidate_module) == ("h.0.ln_1", "blocks.0.norm1")
    assert first.units > 16
    assert first.input_units == 0
    assert len(first.candidate_operations) == 10
    assert first.candidate_line.startswith("transformer.py:")
    assert first.constants[0] == ("1e-05",)
    assert "1e-06" in first.constants[1]
    assert first.reason.startswith("eps 1e-05 in the reference, 1e-06 in the candidate")


def test_three_mistakes_at_once_are_these_three_with_a_reason_each(reference: Any) -> None:
    diff = compared(reference, THREE, isolate=True)
    assert [culprit.candidate_module for culprit in diff.culprits] == list(THREE)
    reasons = [culprit.reason for culprit in diff.culprits]
    assert "eps 1e-05 in the reference, 1e-06 in the candidate" in reasons[0]
    assert "gelu's tanh form" in reasons[1]
    assert "transposed, the error is 0" in reasons[2]
    assert diff.outputs.mended is not None
    assert diff.outputs.mended < 1e-6 < diff.outputs.error


def test_json_and_pandas_tell_what_printing_does(reference: Any, tmp_path: Any) -> None:
    diff = compared(reference, THREE, isolate=True)
    facts = json.loads(str(diff.to_json()))
    assert facts["ok"] is False
    assert [culprit["reason"] for culprit in facts["culprits"]] == [
        culprit.reason for culprit in diff.culprits
    ]
    diff.to_json(tmp_path / "diff.json", indent=1)
    assert json.loads((tmp_path / "diff.json").read_text()) == facts
    table = diff.to_pandas()
    assert len(table) == len(diff.pairs)
    assert set(table.columns) >= {"reference", "candidate", "units", "agrees"}


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("isolate", [False, True])
def test_printing_fits_the_terminal(reference: Any, width: int, isolate: bool) -> None:
    text = compared(reference, THREE, isolate=isolate).text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "\033" not in text


def test_other_inputs_cannot_be_compared(reference: Any) -> None:
    model, ids, history = reference
    with pytest.raises(tl.CannotCompareError, match=r"The inputs differ: the values of input.ids"):
        tl.diff(history, tl.log_forward_pass(model, (ids + 1) % 50))
    with pytest.raises(
        tl.CannotCompareError, match=r"input.ids is 2x12, the candidate was given 1x12"
    ):
        tl.diff(history, tl.log_forward_pass(model, ids[:1]))


def test_nothing_saved_cannot_be_compared(reference: Any) -> None:
    model, ids, history = reference
    with pytest.raises(
        tl.CannotCompareError, match=r"candidate has no saved values.*layers_to_save='all'"
    ):
        tl.diff(history, tl.get_model_metadata(model, ids))


def test_an_input_that_was_not_saved_is_not_said_to_differ(reference: Any) -> None:
    model, ids, history = reference
    with pytest.raises(
        tl.CannotCompareError, match=r"candidate has no saved value of its input \(input.ids\)"
    ):
        tl.diff(history, tl.log_forward_pass(model, ids, layers_to_save=["h.0.ln_1"]))


def test_an_output_that_was_not_saved_is_not_said_to_differ_or_to_agree(reference: Any) -> None:
    model, ids, history = reference
    partly = tl.log_forward_pass(model, ids, layers_to_save=["h.0.ln_1"])
    with pytest.raises(
        tl.CannotCompareError, match=r"reference has no saved value of its output \(output\)"
    ):
        tl.diff(partly, history)
    wrong = tl.log_forward_pass(transformer.ported(model, {"blocks.0.norm1": "small eps"}), ids)
    diff = tl.diff(partly, wrong)
    assert [culprit.reference_module for culprit in diff.culprits] == ["h.0.ln_1"]
    assert "output    not saved" in str(diff)


def test_values_that_were_not_saved_are_no_divergence(reference: Any) -> None:
    model, ids, history = reference
    diff = tl.diff(tl.log_forward_pass(model, ids, layers_to_save=["h.0.ln_1", "head"]), history)
    assert diff.ok
    assert "output    the same" in str(diff)


def test_wrong_options_say_what_is_right(reference: Any) -> None:
    _, _, history = reference
    wrong: Any = nn.ReLU()
    with pytest.raises(TypeError, match="candidate must be a ModelHistory"):
        tl.diff(history, wrong)
    with pytest.raises(ValueError, match="tolerance must be above 0"):
        tl.diff(history, history, tolerance=0)
    with pytest.raises(
        ValueError, match=r"the reference has none called 'h.0.ln_9'. Did you mean 'h.0.ln_[12]'"
    ):
        tl.diff(history, history, mapping={"h.0.ln_9": "h.0.ln_1"})


def test_a_history_agrees_with_itself_bit_for_bit(reference: Any) -> None:
    _, _, history = reference
    diff = tl.diff(history, history)
    assert diff.ok
    assert {pair.units for pair in diff.pairs} == {0.0}
    assert [pair.reference for pair in diff.pairs] == [pair.candidate for pair in diff.pairs]
    assert not diff.unmatched.reference


def test_the_model_is_as_before_when_it_ran_again(reference: Any) -> None:
    model, ids, history = reference
    port = transformer.ported(model, THREE)
    before = {name: value.clone() for name, value in port.state_dict().items()}
    state = torch.get_rng_state()
    candidate = tl.log_forward_pass(port, ids)
    values = [entry.tensor_contents.clone() for entry in candidate]
    tl.diff(history, candidate, isolate=True)
    assert all(torch.equal(value, before[name]) for name, value in port.state_dict().items())
    assert all(
        torch.equal(entry.tensor_contents, value)
        for entry, value in zip(candidate, values, strict=True)
    )
    assert torch.equal(state, torch.get_rng_state())
