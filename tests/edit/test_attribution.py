"""Estimates from gradients, against gradients and detached values by hand, and exact effects."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import torchlens as tl
from tests.edit.models import Gpt, gpt, hooked
from torchlens import EditError, edits

Tensor = torch.Tensor


def metric(logits: Tensor) -> Tensor:
    return logits[0, -1, 3] - logits[1, -1, 5]


def pair() -> tuple[Gpt, Tensor, Tensor, tl.ModelHistory, tl.ModelHistory]:
    """The model, two inputs and their histories."""
    model, ids = gpt()
    others = (ids + 5) % 20
    return model, ids, others, tl.log_forward_pass(model, ids), tl.log_forward_pass(model, others)


def gradient_at(model: Gpt, ids: Tensor, address: str, dropped: str | None = None) -> Tensor:
    """Of the metric at what a module returns; none passes through what is dropped."""
    found: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        value.retain_grad()
        found.append(value)
        return value

    with hooked(model.get_submodule(address), keep):
        if dropped is None:
            metric(model(ids)).backward()
        else:
            with hooked(model.get_submodule(dropped), Tensor.detach):
                metric(model(ids)).backward()
    (value,) = found
    assert value.grad is not None
    return value.grad


def test_an_estimate_is_the_change_times_the_gradient() -> None:
    model, ids, _, history, other = pair()
    sites = [edits.site("h.0", token=token) for token in range(6)]
    table = edits.attribution(history, sites, other, metric)
    change = other["h.0"].tensor_contents - history["h.0"].tensor_contents
    by_hand = (change * gradient_at(model, ids, "h.0")).sum((0, 2))
    assert table["estimate"].tolist() == pytest.approx(by_hand.tolist(), rel=1e-4, abs=1e-6)
    assert table["part"].tolist() == [f"[token {token}]" for token in range(6)]
    zeroed = edits.attribution(history, ["h.1"], 0.0, metric)["estimate"][0]
    by_hand = -(history["h.1"].tensor_contents * gradient_at(model, ids, "h.1")).sum()
    assert zeroed == pytest.approx(by_hand.item(), rel=1e-4)


def test_queries_and_keys_go_through_the_exact_attention() -> None:
    _, _, _, history, other = pair()
    for part in ("q", "k"):
        site = edits.site("h.1.attn", part=part, head=2)
        calls = history.find("scaled*", module="h.1.attn")
        graph = tl.log_forward_pass(*gpt(), save_gradients=True)
        metric(graph.output).backward()
        mixed = graph[calls[0].layer_label]
        label = {"q": 0, "k": 1, "v": 2}
        own, new = (
            [log[name].tensor_contents for name in calls[0].parent_layers]
            for log in (history, other)
        )
        changed = list(own)
        changed[label[part]] = own[label[part]].clone()
        changed[label[part]][:, 2] = new[label[part]][:, 2]
        again = functional.scaled_dot_product_attention(
            changed[0], changed[1], changed[2], is_causal=True
        )
        by_hand = ((again - mixed.tensor_contents) * mixed.grad_contents).sum()
        table = edits.attribution(history, [site], other, metric)
        assert table["estimate"][0] == pytest.approx(by_hand.item(), rel=1e-3)
        plain = edits.attribution(history, [site], other, metric, through_attention=False)
        exact = history.sweep([site], other, metric)[0].value - metric(history.output).item()
        errors = [abs(one["estimate"][0] - exact) for one in (table, plain)]
        assert errors[0] < errors[1]


def test_dropped_gradients_are_those_of_a_model_with_that_part_detached() -> None:
    model, ids, _, history, other = pair()
    drop = ["h.1.attn", "h.2.mlp", "h.0.mlp"]
    change = other["h.0.attn"].tensor_contents - history["h.0.attn"].tensor_contents
    by_hand = [(change * gradient_at(model, ids, "h.0.attn", own)).sum().abs() for own in drop]
    table = edits.attribution(history, ["h.0.attn"], other, metric, drop=drop)
    assert table["dropped"][0] == pytest.approx((sum(by_hand) / 2).item(), rel=1e-4)
    blocks = [f"h.{number}.{part}" for number in range(3) for part in ("attn", "mlp")]
    tables = [
        edits.attribution(history, ["h.0.attn"], other, metric, drop=own)
        for own in ("residual", blocks)
    ]
    assert tables[0]["dropped"][0] == pytest.approx(tables[1]["dropped"][0])
    with pytest.raises(ValueError, match="drop must be 'residual', or a list"):
        edits.attribution(history, ["h.0"], other, metric, drop="all")


def test_the_correlation_with_exact_effects_is_measured() -> None:
    _, _, _, history, other = pair()
    sites = history.sites("head")
    table = edits.attribution(history, sites, other, metric, check=8)
    exact = (
        history.sweep(sites, other, metric).to_pandas()["metric"] - metric(history.output).item()
    )
    known = table["exact"].notna()
    assert known.sum() == 8
    assert table["exact"][known].tolist() == pytest.approx(exact[known].tolist())
    assert table.attrs["correlation"] == pytest.approx(table["estimate"][known].corr(exact[known]))
    assert table.attrs["correlation"] > 0.9
    assert table.attrs["correlation"] > abs(table["control"][known].corr(exact[known]))


def test_a_control_changes_as_much_in_another_direction() -> None:
    _, _, _, history, other = pair()
    site = edits.site("h.1", token=2)
    for edit in (other, "zero", edits.at(scale=3.0), other["h.1"]):
        if isinstance(edit, tl.ModelHistory):
            values = [history.sweep([site], own, lambda v: {"v": v}, outputs=["h.1"])[0].value["v"]
                      for own in (edit, edits.control(edit))]  # fmt: skip
        else:
            values = [history.replay({site: own}, outputs=["h.1"])["h.1"]
                      for own in (edit, edits.control(edit))]  # fmt: skip
        recorded = history["h.1"].tensor_contents
        moves = [value - recorded for value in values]
        torch.testing.assert_close(moves[0].norm(dim=-1), moves[1].norm(dim=-1))
        assert torch.cosine_similarity(moves[0][:, 2], moves[1][:, 2]).abs().max() < 0.9
        assert not moves[1][:, 3:].any()


@pytest.mark.parametrize(
    "own", [lambda logits: 1.0, lambda logits: logits.sum().item(), lambda logits: logits]
)
def test_a_metric_without_a_gradient_is_refused(own: Any) -> None:
    _, _, _, history, other = pair()
    with pytest.raises(TypeError, match="The metric must return a tensor with one element"):
        edits.attribution(history, ["h.1"], other, own)


def test_whole_numbers_have_no_gradient_and_a_log_without_gradients_is_enough() -> None:
    model, ids, _, history, other = pair()
    with pytest.raises(
        EditError, match=r"input\.ids has torch\.int64 values, which have no gradient"
    ):
        edits.attribution(history, ["input.ids"], other, metric)
    with torch.no_grad():
        bare = tl.log_forward_pass(model, ids)
    for param in model.parameters():
        param.requires_grad_(False)
    frozen = tl.log_forward_pass(model, ids)
    expected = edits.attribution(history, ["h.1"], other, metric)["estimate"][0]
    for own in (bare, frozen):
        with torch.no_grad():
            found = edits.attribution(own, ["h.1"], other, metric)["estimate"][0]
        assert found == pytest.approx(expected, rel=1e-5)
