"""The graph as JSON and as a networkx graph."""

import json
import sys
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import MLP, Conditional, ConvNet, Model, Recurrent, Residual
from torchlens._export.json_graph import graph_data, to_json
from torchlens._export.networkx_graph import to_networkx


def data_of(model: nn.Module, x: Any) -> dict[str, Any]:
    text = to_json(tl.get_model_metadata(model.eval(), x))
    assert text is not None
    return json.loads(text)


def test_the_json_has_the_nodes_with_what_is_known_of_them():
    data = data_of(MLP(), torch.rand(2, 4))
    assert (data["format"], data["version"], data["failure"]) == ("torchlens-graph", 1, None)
    assert [node["label"] for node in data["nodes"]] == [
        "input_1_0:1",
        "linear_1_1:1",
        "relu_1_2:1",
        "linear_2_3:1",
        "output_1_4:1",
    ]
    node = data["nodes"][1]
    expected = {
        "layer": "linear_1_1", "pass": 1, "type": "linear", "kind": "operation",
        "function": "linear", "modules": ["fc1:1"],
        "modules_exited": ["fc1:1"], "shape": [2, 5], "dtype": "float32", "bytes": 40, "flops": 80,
        "num_params": 25,
        "params": [{"address": "fc1.weight", "shape": [5, 4]}, {"address": "fc1.bias",
        "shape": [5]}],
        "parents": [{"label": "input_1_0:1", "argument": [0]}], "is_inplace": False,
        "condition": None,
    }  # fmt: skip
    assert {name: node[name] for name in expected} == expected
    assert "test_export" not in node["source"]
    assert data["nodes"][0]["address"] == "input.x"


def test_the_json_has_the_model_the_modules_and_the_layers():
    data = data_of(Residual(), torch.rand(2, 4))
    assert data["model"]["name"] == "Residual"
    assert data["model"]["num_params"] == 40
    assert data["modules"][0] == {
        "address": "blocks.0", "class": "ResidualBlock", "parent": None,
        "children": ["blocks.0.fc"], "num_passes": 1,
        "num_params": 20,
    }  # fmt: skip
    assert data["modules"][1]["parent"] == "blocks.0"
    recurrent = data_of(Recurrent(), torch.rand(2, 4))
    assert recurrent["layers"][1] == {
        "label": "linear_1_1", "type": "linear", "passes": [f"linear_1_1:{number}" for number in (1,
        2, 3, 4)],
    }  # fmt: skip


def test_parents_name_nodes_and_nested_arguments_have_their_way():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x + 1], dim=-1)

    data = data_of(Model(forward), torch.rand(2, 3))
    assert data["nodes"][2]["parents"] == [
        {"label": "input_1_0:1", "argument": [0, 0]},
        {"label": "add_1_1:1", "argument": [0, 1]},
    ]
    assert data["nodes"][2]["kwargs"] == {"dim": -1}
    labels = {node["label"] for node in data["nodes"]}
    assert all(parent["label"] in labels for node in data["nodes"] for parent in node["parents"])


def test_conditions_and_values_that_json_does_not_know():
    data = data_of(Conditional(), torch.ones(3))
    assert [node["condition"] for node in data["nodes"] if node["condition"] is not None] == [True]

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 0, float("-inf")).to(torch.float64)[..., 1:]

    nodes = data_of(Model(forward), torch.rand(3))["nodes"]
    assert nodes[2]["args"] == ["-inf"]
    assert nodes[3]["args"] == ["torch.float64"]


def test_a_failure_is_in_the_json():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(6, 4))
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(model, torch.rand(2, 4))
    failure = graph_data(partial_history(caught.value))["failure"]
    assert failure["operation"] == "linear"
    assert failure["modules"] == ["1:1"]
    assert failure["arguments"].startswith("2x5 float32")


def test_the_json_can_be_written_to_a_file(tmp_path: Path):
    history = tl.get_model_metadata(ConvNet().eval(), torch.rand(1, 3, 8, 8))
    assert to_json(history, tmp_path / "new" / "graph.json", indent=2) is None
    assert json.loads((tmp_path / "new" / "graph.json").read_text(encoding="utf-8")) == graph_data(
        history
    )


def test_networkx_gets_the_same_graph():
    history = tl.get_model_metadata(Residual(), torch.rand(2, 4))
    graph = to_networkx(history)
    assert list(graph) == history.layer_labels_w_pass
    assert networkx.is_directed_acyclic_graph(graph)
    for entry in history:
        assert set(graph.predecessors(entry.layer_label_w_pass)) == {
            f"{parent}:1" for parent in entry.parent_layers
        }
    assert graph.nodes["linear_1_2:1"]["shape"] == [2, 4]
    assert graph.edges["relu_1_1:1", "linear_1_2:1", 0]["argument"] == [0]
    assert graph.graph["model"]["name"] == "Residual"


def test_without_networkx_the_cure_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchlens\[networkx\]'"):
        to_networkx(history)
