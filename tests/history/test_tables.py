"""`to_pandas()`."""

import torch

import torchlens as tl
from tests.networks import MLP, Recurrent


def test_one_row_per_entry_and_the_classic_columns() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), mark_input_output_distances=True)
    table = history.to_pandas()
    assert list(table["layer_label"]) == history.layer_labels
    row = table.set_index("layer_label").loc["linear_1_1"]
    assert row["tensor_shape"] == (2, 5)
    assert row["num_params_total"] == 25
    assert row["parent_layers"] == ["input_1_0"]
    assert row["containing_module_origin"] == "fc1:1"
    assert row["min_distance_from_input"] == 1
    assert "networks.py" in row["source"]
    assert not any(isinstance(value, torch.Tensor) for value in row)


def test_passes_are_rows_of_their_own() -> None:
    table = tl.log_forward_pass(Recurrent(), torch.rand(2, 4)).to_pandas()
    linear = table[table["layer_label_no_pass"] == "linear_1_1"]
    assert list(linear["pass_num"]) == [1, 2, 3, 4]


def test_only_listed_entries_are_rows() -> None:
    history = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="relu", keep_unsaved_layers=False
    )
    assert list(history.to_pandas()["layer_label"]) == ["relu_1_2"]


def test_a_table_can_be_written_as_csv() -> None:
    text = tl.get_model_metadata(MLP(), torch.rand(2, 4)).to_pandas().to_csv(index=False)
    assert len(text.splitlines()) == 6
