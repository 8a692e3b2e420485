"""A profile as pandas tables."""

import pytest
import torch
from torch import nn

import torchlens
from tests.profile.profile_records import made_up, operations
from torchlens._profile.exports import to_pandas


def test_a_row_for_each_module():
    table = to_pandas(made_up()).set_index("address")
    assert list(table.index) == ["", "stem", "stem.conv", "stem.act", "head", "spare"]
    assert table.loc["stem.conv", "forward_seconds"] == pytest.approx(0.0075)
    assert table.loc["stem.conv", "forward_spread"] == pytest.approx(0.0015)
    assert table.loc["stem.act", "num_calls"] == 2
    assert table.loc["stem.act", "forward_seconds"] == pytest.approx(2 * 0.75e-3 * 1.25)
    assert table.loc["stem.act", "peak_bytes"] == 32 * 1024
    assert table.loc["", "num_steps"] == 2


def test_a_row_for_each_call_operation_step_and_parameter():
    measurements = made_up(operations=operations())
    assert len(to_pandas(measurements, by="call")) == len(measurements.calls)
    assert to_pandas(measurements, by="operation")["label"].iloc[0] == "conv2d_1_1"
    assert list(to_pandas(measurements, by="step")["is_warmup"]) == [True, False, False]
    assert list(to_pandas(measurements, by="parameter")["address"])[-1] == "spare.bias"


def test_the_parts_of_a_whole_step_are_columns():
    measurements = made_up()
    table = to_pandas(measurements, by="step")
    assert list(table["other_seconds"]) == [step.other_seconds for step in measurements.steps]
    assert {
        "wall_seconds",
        "loss_seconds",
        "backward_call_seconds",
        "optimizer_seconds",
        "data_seconds",
    } <= set(table)


def test_a_table_without_rows_has_its_columns():
    assert "forward_seconds" in to_pandas(made_up(), by="operation").columns


def test_an_unknown_kind_of_row_says_which_there_are():
    with pytest.raises(
        ValueError,
        match="by must be 'module', 'call', 'operation', 'step' or 'parameter', got 'layer'",
    ):
        to_pandas(made_up(), by="layer")  # type: ignore[arg-type]


def test_a_table_says_what_made_it():
    model, x = torch.nn.Linear(8, 2), torch.rand(4, 8)
    whole = torchlens.log_forward_pass(model, x).receipt.to_dict()
    detailed = torchlens.profile(model, x, level="operation", repeats=1, warmup=0)
    for by in ("module", "operation"):
        assert detailed.to_pandas(by).attrs["receipt"] == whole
    plain = torchlens.profile(model, x, level="module", repeats=1, warmup=0).to_pandas()
    unknown = dict.fromkeys(("structure", "weights", "inputs"))
    assert plain.attrs["receipt"] == whole | unknown


def test_outputs_are_as_large_as_the_table_says():
    """Of several calls, the largest, and of a container that is never called, the largest in it."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.acts = nn.ModuleList([nn.ReLU()])

        def forward(self, x):
            return self.acts[0](self.acts[0](x)[:1])

    p = torchlens.profile(Twice(), torch.rand(4, 8), repeats=1, warmup=0)
    found = p.to_pandas().set_index("address")["output_bytes"].to_dict()
    assert found == {"": 32, "acts": 128, "acts.0": 128}
    assert found == {
        change.address: change.before for change in torchlens.compare(p, p, "output_bytes")
    }
