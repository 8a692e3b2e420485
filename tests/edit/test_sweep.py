"""A sweep is a table of replays; a batch of them says how far batching moved each."""

from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.edit.models import gpt, hooked, resnet, without_head
from torchlens import NotReplayableError, edits

Tensor = torch.Tensor


def last(logits: Tensor) -> Tensor:
    return logits[:, -1]


def test_each_head_is_as_with_hooks() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    grid = history.sweep(history.sites("head"), 0.0, last)
    assert len(grid) == 12
    for number, row in enumerate(grid):
        layer, head = divmod(number, 4)
        with hooked(model.get_submodule(f"h.{layer}.attn.out"), without_head(head), before=True):
            assert torch.equal(row.value, model(ids)[:, -1]), row.site
    assert grid.certificates == {"bit-equal": 12}
    assert [row.num_calls for row in grid[::4]] == sorted(
        {row.num_calls for row in grid}, reverse=True
    )


def test_a_batch_gives_what_single_runs_give() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    sites = history.sites("head")
    single = history.sweep(sites, [0.0, 1.0], last)
    batch = history.sweep(sites, [0.0, 1.0], last, batched=3)
    for one, other in zip(single, batch, strict=True):
        torch.testing.assert_close(other.value, one.value)
        assert (one.site, one.edit) == (other.site, other.edit)
    assert batch.certificates == {"rounding": 24}
    assert "1 of 3 rows of the batch checked against single runs" in batch[0].certificate.reason


def test_a_batch_of_writes_in_place_gives_what_single_runs_give() -> None:
    model, x = resnet()
    history = tl.log_forward_pass(model, x)
    for key in ("relu_1", "relu_3", "iadd_1", "2.bn2"):
        channels = [edits.site(key, channel=channel) for channel in range(4)]
        single = history.sweep(channels, 0.0, lambda logits: logits)
        batch = history.sweep(channels, 0.0, lambda logits: logits, batched=True)
        for one, other in zip(single, batch, strict=True):
            torch.testing.assert_close(other.value, one.value)


def test_statistics_of_a_batch_are_those_of_each_edit_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    history = tl.log_forward_pass(model, torch.rand(6, 4))
    neurons = [edits.site("linear_1", neuron=number) for number in range(4)]
    single = history.sweep(neurons, torch.square, lambda out: out)
    batch = history.sweep(neurons, torch.square, lambda out: out, batched=True)
    for one, other in zip(single, batch, strict=True):
        torch.testing.assert_close(other.value, one.value)
    assert batch.certificates == {"rounding": 4}


def test_another_history_is_patched_in_place_by_place() -> None:
    model, ids = gpt()
    history, other = (tl.log_forward_pass(model, x) for x in (ids, ids.flip(1)))
    sites = [edits.site(f"h.{layer}", token=token) for layer in range(3) for token in range(6)]
    table = history.sweep(sites, other, lambda out: out[0, -1, 3]).to_pandas()
    assert list(table.columns) == [
        "site", "key", "part", "edit", "metric", "certificate", "reason", "calls", "seconds",
    ]  # fmt: skip
    new = history.rerun(model, ids, edits={sites[7]: other["h.1"]})
    assert table["metric"][7] == new["output_1"].tensor_contents[0, -1, 3].item()
    assert table["key"].tolist()[::6] == ["h.0", "h.1", "h.2"]
    assert table["part"][7] == "[token 1]"
    longer = tl.log_forward_pass(model, torch.cat([ids, ids], 1))
    with pytest.raises(ValueError, match=r"here and .* in the other history"):
        history.sweep(sites, longer)


def test_a_metric_may_return_several_numbers_of_several_outputs() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)

    def metric(values: list[Tensor]) -> dict[str, Any]:
        return {"logit": values[0][0, -1, 0], "norm": values[1].norm()}

    grid = history.sweep(["h.0.attn", "h.0.mlp"], "mean", metric, outputs=["output_1", "h.0"])
    table = grid.to_pandas()
    assert table["edit"].tolist() == ["mean", "mean"]
    assert table["norm"].tolist() == [
        history.replay({key: "mean"}, "h.0").output.norm().item() for key in table["key"]
    ]
    distances = history.sweep(["h.0.attn", "h.2"], lambda value: value).values
    assert distances == [0.0, 0.0]


def test_an_edit_that_is_refused_is_a_row_with_the_reason() -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = torch.relu(x)
            return z * float(y.sum())

    history = tl.log_forward_pass(Reading(), torch.rand(3))
    for batched in (False, True):
        grid = history.sweep(["mul_1", "relu_1"], 0.5, batched=batched)
        assert grid[0].certificate.kind == "refused"
        assert "into Python" in grid[0].certificate.reason
        assert grid[0].value is None
        assert grid[1].value > 0
    with pytest.raises(NotReplayableError, match="No edit can be replayed"):
        history.sweep(["mul_1"], 0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 0.0), ValueError, "sites is empty"),
        (({"h.1": 0.0}, 0.0), TypeError, "sites must be a list"),
        ((["h.1"], 0.0, "logits"), TypeError, "metric must be a function of the output"),
        ((["h.9"], 0.0), KeyError, "No layer 'h.9'"),
    ],
)
def test_errors_say_what_to_do(arguments: Any, error: Any, message: str) -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    with pytest.raises(error, match=message):
        history.sweep(*arguments)
