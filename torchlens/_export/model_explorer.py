"""A history as the JSON of graphs that Model Explorer opens."""

import os
from typing import Any

from torchlens._export.json_graph import graph_data
from torchlens._history.receipt import exported_receipt
from torchlens._text.json_text import write_json
from torchlens._text.numbers import bytes_text, shape_text


def to_model_explorer(
    history: Any, path: str | os.PathLike[str] | None = None, indent: int | None = None
) -> str | None:
    """A collection with one graph: a node per entry, in the namespace of its modules."""
    data = graph_data(history)
    groups = {
        module["address"].replace(".", "/"): {
            "class": module["class"], "parameters": f"{module['num_params']:,}"
        }
        for module in data["modules"]
    }  # fmt: skip
    graph = {
        "id": data["model"]["name"],
        "nodes": [_node(node) for node in data["nodes"]],
        "groupNodeAttributes": {"": {"made by": str(exported_receipt(history._log))}, **groups},
    }
    collection = {"label": data["model"]["name"], "graphs": [graph]}
    return write_json(collection, path, indent)


def _node(node: dict[str, Any]) -> dict[str, Any]:
    facts = {
        "label": node["label"],
        "function": node["function"],
        "arguments": ", ".join(str(value) for value in node["args"] if value is not None),
        **{name: str(value) for name, value in node["kwargs"].items()},
        "parameters": ", ".join(param["address"] or "?" for param in node["params"]),
        "FLOPs": "" if node["flops"] is None else f"{node['flops']:,}",
        "size": bytes_text(node["bytes"]) if isinstance(node["bytes"], int) else node["bytes"],
        "source": node["source"],
    }
    modules = [name.rpartition(":")[0] for name in node["modules"]]
    return {
        "id": node["label"],
        "label": node["address"] or node["type"],
        "namespace": modules[-1].replace(".", "/") if modules else "",
        "incomingEdges": [
            {
                "sourceNodeId": parent["label"],
                "sourceNodeOutputId": "0",
                "targetNodeInputId": str(number),
            }
            for number, parent in enumerate(node["parents"])
        ],
        "attrs": [{"key": name, "value": str(value)} for name, value in facts.items() if value],
        "outputsMetadata": [{"id": "0", "attrs": _tensor(node)}],
    }


def _tensor(node: dict[str, Any]) -> list[dict[str, str]]:
    """The output as Model Explorer names it: `shape` labels the edges, the tag the output."""
    facts = {
        "__tensor_tag": node["label"],
        "shape": shape_text(node["shape"]),
        "dtype": str(node["dtype"]),
    }
    return [{"key": name, "value": value} for name, value in facts.items()]
