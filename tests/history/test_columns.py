"""Fields as columns: tables, JSON and lists agree with what each entry says."""

import json
import tracemalloc
from typing import Any

import pandas
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.fuzz.machine import Program
from tests.fuzz.programs import programs
from tests.networks import Conditional, ConvNet, Model, Recurrent, Residual
from tests.work import lines_run
from torchlens._export import json_graph
from torchlens._history import field
from torchlens._history.field import ManyEntries
from torchlens._history.layer_entry import COLUMNS
from torchlens._history.tables import ColumnCells, with_symbols


def check_agreement(history: Any) -> None:
    """Every cell of the table and every field of the JSON is what the entry alone says."""
    table, data = history.to_pandas(), json.loads(history.to_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(field, "_ENTRIES_PER_PART", 3)
        pandas.testing.assert_frame_equal(history.to_pandas(), table)
    listed_entries = ManyEntries(history._log, history._log.visible)
    for name, column in COLUMNS.items():
        own = with_symbols(column.of(listed_entries))
        pandas.testing.assert_series_equal(table[name], own, check_names=False)
    everything = [
        tl.LayerEntry(history._log, number) for number in range(history.num_tensors_total)
    ]
    for entry, cells in zip(history, table.to_dict("records"), strict=True):
        assert same(cells["source"], source_of(entry))
        assert list(cells) == list(COLUMNS)
        for name, cell in cells.items():
            assert same(cell, getattr(entry, name)), (entry, name)
    for entry, node in zip(everything, data["nodes"], strict=True):
        assert node == node_of(entry)
    for name in (
        "layer_label",
        "layer_label_w_pass",
        "tensor_fsize",
        "flops",
        "parent_layers",
        "modules_exited",
    ):
        backwards = ManyEntries(history._log, range(len(everything))[::-1])
        assert COLUMNS[name].of(backwards) == [getattr(entry, name) for entry in everything[::-1]]
    listed = set(history.layer_labels)
    assert history.layer_labels == [entry.layer_label for entry in history]
    assert history.unlogged_layers == [
        entry.layer_label for entry in everything if entry.layer_label not in listed
    ]
    assert history.internally_initialized_layers == labels_where(
        everything, "initialized_inside_model"
    )
    assert history.internally_terminated_layers == labels_where(
        everything, "terminated_inside_model"
    )
    assert history.internally_terminated_bool_layers == labels_where(
        everything, "is_terminal_bool_layer"
    )
    assert history.layers_with_saved_activations == labels_where(
        everything, "has_saved_activations"
    )
    assert history.layers_with_saved_gradients == labels_where(everything, "has_saved_grad")
    assert history.tensor_fsize_total == sum(entry.tensor_fsize for entry in everything)
    assert history.total_flops == sum(entry.flops or 0 for entry in everything)
    assert history.total_flops_backward == sum(entry.flops_backward or 0 for entry in everything)


def same(cell: Any, value: Any) -> bool:
    """pandas has NaN for None among numbers, and floats for ints beside NaN."""
    return repr(cell) == repr(value) or cell == value or (value is None and cell != cell)


def labels_where(entries: list[Any], fact: str) -> list[str]:
    return [entry.layer_label for entry in entries if getattr(entry, fact)]


def source_of(entry: Any) -> str | None:
    return str(entry.func_call_stack[0]) if entry.func_call_stack else None


def node_of(entry: Any) -> dict[str, Any]:
    """The node that docs/json.md promises, from the fields of the entry alone."""
    plain = json_graph._plain
    kinds = [kind for kind in ("input", "output", "buffer") if getattr(entry, f"is_{kind}_layer")]
    parents = []
    for places in entry.parent_layer_arg_locs.values():
        for location, labels in places.items():
            way = [plain(part) for part in location] if isinstance(location, tuple) else [location]
            for label in [labels] if isinstance(labels, str) else labels:
                parents.append({"label": label if ":" in label else f"{label}:1", "argument": way})
    return {
        "label": entry.layer_label_w_pass,
        "layer": entry.layer_label_no_pass,
        "pass": entry.pass_num,
        "type": entry.layer_type,
        "kind": kinds[0] if kinds else "operation",
        "function": entry.func_applied_name,
        "address": entry.input_output_address or entry.buffer_address,
        "modules": entry.containing_modules_origin_nested,
        "modules_exited": entry.module_passes_exited,
        "shape": plain(entry.tensor_shape),
        "dtype": str(entry.tensor_dtype).removeprefix("torch."),
        "bytes": plain(entry.tensor_fsize),
        "seconds": entry.func_time_elapsed,
        "flops": plain(entry.flops),
        "params": [
            {"address": address, "shape": list(shape)}
            for address, shape in zip(
                entry.parent_param_addresses, entry.parent_param_shapes, strict=True
            )
        ],
        "num_params": entry.num_params_total,
        "parents": parents,
        "output_index": entry.iterable_output_index,
        "is_inplace": entry.function_is_inplace,
        "args": plain(entry.func_position_args_non_tensor),
        "kwargs": {
            name: plain(value) for name, value in entry.func_keyword_args_non_tensor.items()
        },
        "has_input_ancestor": entry.has_input_ancestor,
        "is_output_ancestor": entry.is_output_ancestor,
        "condition": entry.atomic_bool_val,
        "is_saved": entry.has_saved_activations,
        "source": source_of(entry),
    }


# -- they agree ------------------------------------------------------------------------------------


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(
    steps=programs,
    saved=st.sampled_from(["all", "none"]),
    keeps=st.booleans(),
    has_grad=st.booleans(),
)
@pytest.mark.slow
def test_random_programs_have_tables_that_agree_with_their_entries(steps, saved, keeps, has_grad):
    inputs = [torch.linspace(-2, 2, 12).reshape(3, 4), torch.linspace(-1, 1, 4)]
    with torch.set_grad_enabled(has_grad):
        history = tl.log_forward_pass(
            Program(steps),
            inputs,
            layers_to_save=saved,
            keep_unsaved_layers=keeps,
            mark_input_output_distances=has_grad,
        )
    check_agreement(history)


class Parts(nn.Module):
    """Views, writes to parts, calls with several results, arguments by name and in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.norm(x) * 1
        y[:, 0] += 1
        y[1:].mul_(2)
        left, right = y.chunk(2, dim=1)
        both = torch.cat(
            [left, torch.add(input=right, other=left, alpha=2), torch.zeros(4, 1)], dim=-1
        )
        return {
            "both": both,
            "largest": y.max(dim=0),
            "masked": both.masked_fill(both > 0, float("-inf")),
        }


MODELS: dict[str, tuple[nn.Module, Any]] = {
    "a loop with modules": (Recurrent(), torch.rand(2, 4)),
    "buffers and a constant": (Residual(), torch.rand(2, 4)),
    "a condition": (Conditional(), torch.ones(3)),
    "convolutions": (ConvNet(), torch.rand(2, 3, 8, 8)),
    "parts of tensors": (Parts(), torch.rand(4, 4)),
    "several results": (nn.LSTM(4, 5, 2), torch.rand(3, 2, 4)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.rand(2, 3, 8)),
    "no memory": (nn.Linear(4, 5, device="meta"), torch.rand(2, 4, device="meta")),
    "sizes that vary": (
        Model(lambda self, x: torch.nested.nested_tensor([x[:2], x[1:]], layout=torch.jagged) * 2),
        torch.rand(4, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_tables_and_json_agree_with_the_entries(name):
    model, x = MODELS[name]
    check_agreement(tl.log_forward_pass(model, x))


def test_they_agree_after_a_backward_pass():
    history = tl.log_forward_pass(Residual(), torch.rand(2, 4), save_gradients=True)
    history[history.output_layers[0]].tensor_contents.sum().backward()
    assert history.layers_with_saved_gradients
    check_agreement(history)


def test_they_agree_in_the_log_of_a_failure():
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(
            nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(6, 4)), torch.rand(2, 4)
        )
    check_agreement(partial_history(caught.value))


def test_every_cell_has_a_list_of_its_own():
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    table = history.to_pandas()
    for name in COLUMNS:
        lists = [cell for cell in table[name] if isinstance(cell, list | dict)]
        assert len({id(cell) for cell in lists}) == len(lists), name


def test_a_column_has_the_type_that_pandas_finds():
    cases: list[list[list[Any]]] = [
        [[1, 2], [3]], [[2**63]], [[1], [2**70, 1]], [[-(2**63)]], [[-(2**63) - 1], [1]], [[1, 2],
        [1, 2.5]], []
    ]  # fmt: skip
    for parts in cases:
        cells = ColumnCells(int)
        for part in parts:
            cells.add(part)
        pandas.testing.assert_series_equal(
            cells.series(), pandas.Series([value for part in parts for value in part])
        )


# -- and cost little -------------------------------------------------------------------------------


def loop(num_operations: int) -> Any:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.fc(x)) + 1

    cell = Cell()

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(num_operations // 3):
            x = self.cell(x)
        return x

    history = tl.get_model_metadata(Model(forward, cell=cell), torch.rand(1, 2))
    history.to_pandas(), history.to_json()  # what is worked out once
    return history


def lines_per_operation(work: Any) -> float:
    few, many = loop(300), loop(3300)
    return (lines_run(lambda: work(many)) - lines_run(lambda: work(few))) / 3000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "most"),
    [
        (lambda history: history.layer_labels, 6),
        (lambda history: history.layers_with_saved_activations, 3),
        (str, 35),
        (lambda history: history.to_pandas(), 300),
        (lambda history: history.to_json(), 200),
    ],
    ids=["labels", "saved", "print", "table", "json"],
)
def test_a_list_takes_a_few_lines_of_python_per_operation(work, most, monkeypatch):
    monkeypatch.setattr("torchlens._history.receipt._MOST_ENTRIES", 100)  # few are a long log here
    assert lines_per_operation(work) < most


def test_json_is_what_the_json_module_would_write(monkeypatch):
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x).masked_fill(x > 2, float("nan"))
        return torch.einsum(
            "ij,ij->i",
            torch.cat([x, x], dim=-1).to(torch.float64),
            torch.full((2, 8), 1e-5, dtype=torch.float64),
        )

    model = Model(forward, block=MODELS["parts of tensors"][0].norm)
    model.__class__ = type('Odd "ü" \\ %s', (Model,), {})
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    data = json_graph.graph_data(history)
    assert data["model"]["name"] == 'Odd "ü" \\ %s'
    for size in (1, 2, 5, 1000):
        monkeypatch.setattr(field, "_ENTRIES_PER_PART", size)
        monkeypatch.setattr(json_graph, "_LAYERS_PER_PART", size)
        for indent in (None, 0, 3):
            expected = json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False)
            assert history.to_json(indent=indent) == expected


@pytest.mark.slow
def test_json_is_written_to_a_file_without_being_all_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(field, "_ENTRIES_PER_PART", 100)
    monkeypatch.setattr(json_graph, "_LAYERS_PER_PART", 100)
    history = loop(3000)
    path = tmp_path / "graph.json"
    tracemalloc.start()
    history.to_json(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2
