"""A history as a networkx graph."""

from typing import TYPE_CHECKING, Any

from torchlens._export.json_graph import graph_data

if TYPE_CHECKING:
    import networkx


def to_networkx(history: Any) -> "networkx.MultiDiGraph":
    """A directed graph: a node per entry, named by its label with the pass, an edge per argument
    that is read.

    Nodes carry the fields of a node in the JSON, edges `argument`; the graph carries `model`,
    `modules` and `layers`.

    >>> networkx.dag_longest_path_length(history.to_networkx())
    """
    try:
        import networkx
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "to_networkx needs the package networkx: pip install 'torchlens[networkx]'."
        ) from error
    data = graph_data(history)
    graph = networkx.MultiDiGraph(
        model=data["model"], receipt=data["receipt"], modules=data["modules"], layers=data["layers"]
    )
    for node in data["nodes"]:
        graph.add_node(
            node["label"],
            **{name: value for name, value in node.items() if name not in ("label", "parents")},
        )
    for node in data["nodes"]:
        for parent in node["parents"]:
            graph.add_edge(parent["label"], node["label"], argument=parent["argument"])
    return graph
