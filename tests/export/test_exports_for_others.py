"""Descriptions, Model Explorer, Mermaid, Arrow; what every export says of its origin."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Recurrent
from tests.work import lines_run

pyarrow = pytest.importorskip("pyarrow")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


def tower(count: int = 12) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *(Block(8) for _ in range(count)), nn.Linear(8, 2))


def described(model: nn.Module, x: Any) -> str:
    return tl.get_model_metadata(model, x).describe()


def test_a_description_folds_blocks_and_adds_up_what_they_cost() -> None:
    model = tower()
    text = described(model, torch.rand(3, 4))
    total = sum(param.numel() for param in model.parameters())
    assert text.startswith(f"Sequential: {total:,} parameters, ")
    assert re.search(r"^1 … 12 +12 × Block +3x8 +3\.36 k", text, re.MULTILINE)
    assert re.search(r"^  up +Linear +3x16 +144 ", text, re.MULTILINE)
    assert "26 linear, 12 relu, 12 add" in text
    assert "input: input 3x4 float32\noutput: 3x2 float32" in text


def test_a_description_fits_one_screen_and_says_what_is_left_out() -> None:
    different = nn.Sequential(*(nn.Linear(4, 4) for _ in range(90)))
    for model in (
        different,
        tower(3),
        nn.Sequential(*(nn.Sequential(Block(4), nn.Tanh()) for _ in range(9))),
    ):
        x = torch.rand(1, 4)
        for lines in (16, 40):
            found = tl.get_model_metadata(model, x).describe(lines)
            assert len(found.splitlines()) <= lines
            assert len(tl.get_model_metadata(model, x).to_markdown(lines).splitlines()) <= lines
    assert re.search(r"… and \d\d more modules", described(different, torch.rand(1, 4)))
    assert "recurrent: a layer has up to 4 passes" in described(Recurrent(), torch.rand(2, 4))
    assert "operations: 1 relu" in tl.log_forward_pass(torch.relu, torch.rand(2)).describe()
    with pytest.raises(ValueError, match="lines must be"):
        tl.get_model_metadata(MLP(), torch.rand(2, 4)).describe(2)


def test_markdown_is_a_table_whose_cells_are_plain_text() -> None:
    model = nn.Module()
    model.add_module("a|b_c", nn.Linear(2, 2))
    model.forward = lambda x: getattr(model, "a|b_c")(x)
    history = tl.log_forward_pass(model, torch.rand(1, 2))
    text = history.to_markdown()
    (row,) = [line for line in text.splitlines() if "Linear" in line and line.startswith("|")]
    assert row == r"| a\|b\_c | Linear | 1x2 | 6 | 8 |"
    assert str(history.receipt.weights) in text


def test_model_explorer_has_each_entry_in_the_namespace_of_its_modules(tmp_path: Path) -> None:
    history = tl.log_forward_pass(tower(2), torch.rand(3, 4))
    history.to_model_explorer(tmp_path / "graph.json")
    collection = json.loads((tmp_path / "graph.json").read_text())
    assert collection == json.loads(history.to_model_explorer())
    (graph,) = collection["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert list(nodes) == [entry.layer_label_w_pass for entry in history]
    for entry in history:
        node = nodes[entry.layer_label_w_pass]
        assert [edge["sourceNodeId"] for edge in node["incomingEdges"]] == [
            parent.layer_label_w_pass for parent in entry.parents
        ]
        module = (entry.containing_module_origin or "").partition(":")[0]
        assert node["namespace"] == module.replace(".", "/")
        assert all(isinstance(own["value"], str) for own in node["attrs"])
        (output,) = node["outputsMetadata"]
        facts = {own["key"]: own["value"] for own in output["attrs"]}
        shape = "x".join(map(str, entry.tensor_shape))
        assert facts == {"__tensor_tag": node["id"], "shape": shape, "dtype": "float32"}
        assert {edge["sourceNodeOutputId"] for edge in node["incomingEdges"]} <= {output["id"]}
    assert graph["groupNodeAttributes"]["1/up"] == {"class": "Linear", "parameters": "144"}


def test_mermaid_draws_modules_of_a_depth_as_one_node() -> None:
    history = tl.log_forward_pass(tower(2), torch.rand(3, 4))
    chart = history.to_mermaid(depth=1)
    head, receipt, *lines = chart.splitlines()
    assert head == "flowchart TD"
    assert receipt == f"  %% {history.receipt}"
    assert lines == [
        '  n0(["input.input<br/>3x4"])',
        '  n1["0<br/>Linear<br/>3x8"]',
        '  n2["1<br/>Block<br/>3x8"]',
        '  n3["2<br/>Block<br/>3x8"]',
        '  n4["3<br/>Linear<br/>3x2"]',
        '  n5(["output<br/>3x2"])',
        "  n0 --> n1", "  n1 --> n2", "  n2 --> n3", "  n3 --> n4", "  n4 --> n5",
    ]  # fmt: skip
    assert (
        len(history.to_mermaid().splitlines())
        == 2 + len(history) + 2 + sum(len(entry.parents) for entry in history) - 2
    )
    assert '"Sequential<br/>Sequential<br/>3x2"' in history.to_mermaid(depth=0)
    many = tl.get_model_metadata(tower(100), torch.rand(3, 4)).to_mermaid()
    assert many.count("Block") == 100
    assert "linear" not in many


def test_arrow_has_the_rows_and_columns_of_the_table(tmp_path: Path) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    frame = history.to_pandas()
    history.to_parquet(tmp_path / "log.parquet")
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "log.parquet")
    assert table.column_names == list(frame.columns)
    assert table["flops"].to_pylist() == frame["flops"].tolist()
    assert table["tensor_shape"].to_pylist() == [list(shape) for shape in frame["tensor_shape"]]
    assert table["parent_layers"].to_pylist() == frame["parent_layers"].tolist()
    assert table["tensor_dtype"].to_pylist() == [str(dtype) for dtype in frame["tensor_dtype"]]
    receipt = json.loads(table.schema.metadata[b"torchlens"])
    assert receipt == frame.attrs["receipt"] == history.receipt.to_dict()


def test_every_export_says_what_made_it_and_no_path_of_the_machine(tmp_path: Path) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    receipt, place = history.receipt, str(Path.cwd())
    assert receipt.weights is not None
    assert receipt.inputs is not None
    graph = history.to_networkx()
    history.save(tmp_path / "trace.safetensors")
    loaded = tl.load(tmp_path / "trace.safetensors")
    assert loaded.receipt == receipt
    texts = [
        history.to_json(), history.explore(tmp_path / "page.html").html, history.to_mermaid(),
        history.to_model_explorer(), history.to_markdown(), json.dumps(graph.graph["receipt"]),
        history.render_graph(vis_outpath=tmp_path / "graph.gv", vis_fileformat="gv", vis_save_only=True)
        and (tmp_path / "graph.gv").read_text(),
        history.to_pandas().to_csv() + str(history.to_pandas().attrs),
    ]  # fmt: skip
    for text in texts:
        assert all(
            digest in text for digest in (receipt.structure, receipt.weights, receipt.inputs)
        )
        assert place not in text
    assert "test_exports_for_others.py" not in place
    assert place.encode() not in (tmp_path / "trace.safetensors").read_bytes()


def test_every_table_says_what_it_was_made_from() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    receipt = history.receipt.to_dict()
    sweep = history.sweep(["fc1"], 0.0, lambda output: output.sum())
    for table in (history.summary().to_pandas(), sweep.to_pandas()):
        assert table.attrs["receipt"] == receipt
    compared = tl.diff(history, history).to_pandas()
    assert compared.attrs == {"reference": receipt, "candidate": receipt}


def test_a_receipt_of_an_export_does_not_read_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchlens._history.receipt._MOST_HASHED", 100)
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    exported = json.loads(history.to_json())["receipt"]
    assert exported["weights"] is None
    assert exported["structure"] == history.structure_hash
    assert history.receipt.weights is not None
    assert json.loads(history.to_json())["receipt"] == history.receipt.to_dict()


def test_a_receipt_of_an_export_does_not_hash_long_structures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    monkeypatch.setattr("torchlens._history.receipt._MOST_ENTRIES", len(history) - 1)
    assert history.to_pandas().attrs["receipt"] == history.receipt.to_dict() | {"structure": None}


def test_the_time_of_exports_grows_with_the_number_of_operations() -> None:
    def lines(count: int) -> int:
        history = tl.get_model_metadata(tower(count), torch.rand(1, 4))
        len(history)

        def export() -> None:
            history.describe()
            history.to_mermaid(1)
            history.to_model_explorer()

        return lines_run(export)

    lines(2)
    assert lines(80) < 4.5 * lines(20)
