"""A profile as pandas tables."""

import pytest

from tests.profiling.profile_records import made_up, operations
from torchlens.profiling.output.data_frames import to_pandas


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


def test_a_table_without_rows_has_its_columns():
    assert "forward_seconds" in to_pandas(made_up(), by="operation").columns


def test_an_unknown_kind_of_row_says_which_there_are():
    with pytest.raises(ValueError, match="by must be 'module', 'call', 'operation', 'step' or 'parameter', got 'layer'"):
        to_pandas(made_up(), by="layer")  # type: ignore[arg-type]
