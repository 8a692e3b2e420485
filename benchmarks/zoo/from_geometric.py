"""torch_geometric: networks and layers on a small random graph."""

from functools import partial
from typing import Any

import torch

from benchmarks.zoo.libraries import import_geometric
from benchmarks.zoo.specimen import Case, Specimen

__all__ = ["SPECIMENS"]

_NUM_NODES, _NUM_EDGES, _WIDTH = 20, 60, 8


def _graph() -> tuple[torch.Tensor, torch.Tensor]:
    """Features of the nodes, and edges in which every node takes part."""
    nodes = torch.arange(_NUM_NODES)
    circle = torch.stack([nodes, nodes.roll(1)])
    others = torch.randint(0, _NUM_NODES, (2, _NUM_EDGES - _NUM_NODES))
    return torch.randn(_NUM_NODES, _WIDTH), torch.cat([circle, others], 1)


def _network(name: str, options: dict[str, Any]) -> Case:
    """One of the ready networks of several layers."""
    nn = import_geometric().nn
    model = getattr(nn, name)(_WIDTH, 16, num_layers=2, out_channels=4, **options)
    return Case(model, _graph())


def _layer(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Case:
    model = getattr(import_geometric().nn, name)(*arguments, **options)
    return Case(model, _graph())


def _pna_options() -> dict[str, Any]:
    return {
        "aggregators": ["mean", "min", "max", "std"],
        "scalers": ["identity", "amplification", "attenuation"],
        "deg": torch.tensor([0, 5, 10, 3, 2]),
    }


def _pna() -> Case:
    return _network("PNA", _pna_options())


def _gin(**options: Any) -> Case:
    nn = import_geometric().nn
    return Case(
        nn.GINConv(
            torch.nn.Sequential(
                torch.nn.Linear(_WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
            )
        ),
        _graph(),
    )


def _edge_conv() -> Case:
    nn = import_geometric().nn
    return Case(
        nn.EdgeConv(torch.nn.Sequential(torch.nn.Linear(2 * _WIDTH, 16), torch.nn.ReLU())), _graph()
    )


def _relational(name: str) -> Case:
    nn = import_geometric().nn
    x, edges = _graph()
    return Case(
        getattr(nn, name)(_WIDTH, 16, num_relations=3),
        (x, edges, torch.randint(0, 3, (_NUM_EDGES,))),
    )


def _schnet() -> Case:
    model = import_geometric().nn.SchNet(
        hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=10
    )
    positions = torch.randn(10, 3)
    edges = torch.cartesian_prod(torch.arange(10), torch.arange(10)).T
    edges = edges[:, edges[0] != edges[1]]
    weights = (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)
    model.interaction_graph = _FixedGraph(edges, weights)
    return Case(model, (torch.randint(1, 9, (10,)), positions))


class _FixedGraph(torch.nn.Module):
    """Who interacts with whom; found by a compiled extension otherwise."""

    def __init__(self, edges: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)
        self.register_buffer("weights", weights)

    def forward(self, positions: torch.Tensor, batch: torch.Tensor) -> tuple[Any, Any]:
        return self.edges, self.weights


def _jumping() -> Case:
    return _network("GCN", {"jk": "lstm"})


def _graph_classifier(pool: str) -> Case:
    geometric_nn = import_geometric().nn

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = geometric_nn.GCNConv(_WIDTH, 16)
            self.pool = getattr(geometric_nn, pool)(16)
            self.head = torch.nn.Linear(16, 3)

        def forward(
            self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor
        ) -> torch.Tensor:
            x = self.conv(x, edges).relu()
            x, edges, _, batch, *_ = self.pool(x, edges, None, batch)
            return self.head(geometric_nn.global_mean_pool(x, batch))

    x, edges = _graph()
    edges = edges[:, (edges[0] < 10) == (edges[1] < 10)]
    return Case(Classifier(), (x, edges, (torch.arange(_NUM_NODES) >= 10).long()))


def _autoencoder(name: str) -> Case:
    geometric_nn = import_geometric().nn

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = geometric_nn.GCNConv(_WIDTH, 8)
            self.logstd = geometric_nn.GCNConv(_WIDTH, 8)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
            return (
                (self.conv(x, edges), self.logstd(x, edges))
                if name == "VGAE"
                else self.conv(x, edges)
            )

    class Reconstruction(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = getattr(geometric_nn, name)(Encoder())

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.model.decode(self.model.encode(x, edges), edges)

    return Case(Reconstruction(), _graph())


_NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "GCN": ("GCN", {}),
    "GAT": ("GAT", {"heads": 2}),
    "GATv2": ("GAT", {"v2": True, "heads": 2}),
    "GraphSAGE": ("GraphSAGE", {}),
    "GraphSAGE-batch_norm": ("GraphSAGE", {"norm": "batch_norm", "dropout": 0.2}),
    "GIN": ("GIN", {}),
    "EdgeCNN": ("EdgeCNN", {}),
}
_PAIR = (_WIDTH, 16)
_LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "ChebConv": (_PAIR, {"K": 3}), "GraphConv": (_PAIR, {}), "TransformerConv": (_PAIR,
    {"heads": 2}),
    "TAGConv": (_PAIR, {}), "ARMAConv": (_PAIR, {"num_stacks": 2, "num_layers": 2}),
    "SGConv": (_PAIR, {"K": 2}),
    "APPNP": ((3, 0.1), {}), "MFConv": (_PAIR, {}), "GatedGraphConv": ((16, 3), {}),
    "ResGatedGraphConv": (_PAIR, {}),
    "LEConv": (_PAIR, {}), "ClusterGCNConv": (_PAIR, {}), "GENConv": (_PAIR, {}),
    "FiLMConv": (_PAIR, {}),
    "SuperGATConv": (_PAIR, {}), "EGConv": (_PAIR, {"num_heads": 4}), "FeaStConv": (_PAIR,
    {"heads": 2}),
    "AGNNConv": ((), {}), "HypergraphConv": (_PAIR, {}), "GeneralConv": (_PAIR, {}),
    "SSGConv": (_PAIR, {"alpha": 0.1, "K": 2}), "LGConv": ((), {}), "DNAConv": ((_WIDTH,), {}),
    "AntiSymmetricConv": ((_WIDTH,), {"num_iters": 2}), "GraphUNet": ((_WIDTH, 16, 4),
    {"depth": 2}),
}  # fmt: skip


# Layers that are also given something for each edge or node, by what it is.
_EXTENDED: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "NNConv": ((_WIDTH, 16), {}, ("edge_features",)),
    "CGConv": ((_WIDTH,), {"dim": 4}, ("edge_features",)),
    "GINEConv": ((), {"edge_dim": 4}, ("edge_features",)),
    "GMMConv": ((_WIDTH, 16), {"dim": 4, "kernel_size": 3}, ("edge_features",)),
    "GATConv-edges": ((_WIDTH, 16), {"edge_dim": 4}, ("edge_features",)),
    "GATv2Conv-edges": ((_WIDTH, 16), {"edge_dim": 4}, ("edge_features",)),
    "PDNConv": ((_WIDTH, 16), {"edge_dim": 4, "hidden_channels": 8}, ("edge_features",)),
    "GCN2Conv": ((_WIDTH,), {"alpha": 0.1}, ("nodes_again",)),
    "WLConvContinuous": ((), {}, ()),
    "PMLP": ((_WIDTH, 16, 4), {"num_layers": 2}, ()),
    "LINKX": ((_NUM_NODES, _WIDTH, 16, 4), {"num_layers": 2}, ()),
    "SignedConv": (_PAIR, {"first_aggr": True}, ("edges_again",)),
    "HEATConv": ((_WIDTH, 16), {"num_node_types": 2, "num_edge_types": 3,
    "edge_type_emb_dim": 4, "edge_dim": 4, "edge_attr_emb_dim": 4},
                 ("node_types", "edge_types", "edge_features")),
    "RGCNConv-bases": ((_WIDTH, 16), {"num_relations": 3, "num_bases": 2}, ("edge_types",)),
    "GPSConv": ((_WIDTH,), {"heads": 2}, ()),
    "MixHopConv": ((_WIDTH, 16), {}, ()),
    "DirGNNConv": ((), {}, ()),
    "SAGEConv-lstm": ((_WIDTH, 16), {"aggr": "lstm"}, ()),
    "SAGEConv-median": ((_WIDTH, 16), {"aggr": "median"}, ()),
    "SAGEConv-softmax": ((_WIDTH, 16), {"aggr": "softmax"}, ()),
    "SAGEConv-powermean": ((_WIDTH, 16), {"aggr": "powermean"}, ()),
    "SimpleConv": ((), {}, ()),
}  # fmt: skip


def _extended(name: str) -> Case:
    """One of `_EXTENDED`; the part of the name after a hyphen says which form of the layer."""
    nn = import_geometric().nn
    arguments, options, given = _EXTENDED[name]
    kind = name.partition("-")[0]
    mlp = torch.nn.Sequential
    if kind == "NNConv":
        arguments = (*arguments, mlp(torch.nn.Linear(4, _WIDTH * 16)))
    elif kind == "GINEConv":
        arguments = (mlp(torch.nn.Linear(_WIDTH, 16)),)
    elif kind == "GPSConv":
        arguments = (*arguments, nn.GCNConv(_WIDTH, _WIDTH))
    elif kind == "DirGNNConv":
        arguments = (nn.GCNConv(*_PAIR),)
    x, edges = _graph()
    # Some aggregations take the edges in the order of the nodes that they lead to.
    edges = edges[:, edges[1].argsort(stable=True)]
    num_edges = edges.shape[1]
    known = {
        "edge_features": torch.rand(num_edges, 4),
        "nodes_again": torch.randn(_NUM_NODES, _WIDTH),
        "edges_again": edges.flip(0),
        "node_types": torch.randint(0, 2, (_NUM_NODES,)),
        "edge_types": torch.randint(0, 3, (num_edges,)),
    }
    model = getattr(nn, kind)(*arguments, **options)
    first = (x, known["nodes_again"], edges) if "nodes_again" in given else (x, edges)
    rest = [known[name] for name in given if name != "nodes_again"]
    return Case(model, (*first, *rest))


# What gathers the nodes of each graph of a batch, and norms over them.
_GATHERED: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "MeanAggregation": ((), {}), "MaxAggregation": ((), {}), "SumAggregation": ((), {}),
    "VarAggregation": ((), {}), "StdAggregation": ((), {}), "MedianAggregation": ((), {}),
    "SoftmaxAggregation": ((), {"learn": True}), "PowerMeanAggregation": ((), {"learn": True}),
    "LSTMAggregation": ((_WIDTH, 16), {}), "GRUAggregation": ((_WIDTH, 16), {}),
    "Set2Set": ((_WIDTH,), {"processing_steps": 3}),
    "SortAggregation": ((3,), {}), "EquilibriumAggregation": ((_WIDTH, 4, [8]), {}),
    "SetTransformerAggregation": ((_WIDTH,), {"heads": 2}),
    "MultiAggregation": ((["mean", "max", "std"],), {}),
    "PatchTransformerAggregation": ((_WIDTH, 16, 4, 8), {"heads": 2}),
    "GraphNorm": ((_WIDTH,), {}), "InstanceNorm": ((_WIDTH,), {"affine": True}),
    "PairNorm": ((), {}), "GraphSizeNorm": ((), {}), "DiffGroupNorm": ((_WIDTH,), {"groups": 3}),
    "MeanSubtractionNorm": ((), {}), "LayerNorm": ((_WIDTH,), {}),
}  # fmt: skip


def _gathered(name: str) -> Case:
    nn = import_geometric().nn
    arguments, options = _GATHERED[name]
    gather = getattr(nn, name)(*arguments, **options)

    class Gathered(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.GCNConv(_WIDTH, _WIDTH)
            self.gather = gather

        def forward(
            self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor
        ) -> torch.Tensor:
            x = self.conv(x, edges)
            return self.gather(x) if name == "DiffGroupNorm" else self.gather(x, batch)

    x, edges = _graph()
    edges = edges[:, (edges[0] < 10) == (edges[1] < 10)]
    return Case(Gathered(), (x, edges, (torch.arange(_NUM_NODES) >= 10).long()))


def _dna() -> Case:
    model = import_geometric().nn.DNAConv(_WIDTH, heads=2)
    _, edges = _graph()
    return Case(model, (torch.randn(_NUM_NODES, 3, _WIDTH), edges))


SPECIMENS = (
    *(
        Specimen("torch_geometric", name, partial(_network, kind, options))
        for name, (kind, options) in _NETWORKS.items()
    ),
    Specimen("torch_geometric", "PNA", _pna),
    Specimen("torch_geometric", "GCN-jumping_lstm", _jumping),
    *(
        Specimen("torch_geometric", name, partial(_layer, name, arguments, options))
        for name, (arguments, options) in _LAYERS.items()
        if name != "DNAConv"
    ),
    Specimen("torch_geometric", "DNAConv", _dna),
    *(Specimen("torch_geometric", name, partial(_extended, name)) for name in _EXTENDED),
    *(Specimen("torch_geometric", name, partial(_gathered, name)) for name in _GATHERED),
    Specimen("torch_geometric", "GINConv", _gin),
    Specimen("torch_geometric", "EdgeConv", _edge_conv),
    *(
        Specimen("torch_geometric", name, partial(_relational, name))
        for name in ("RGCNConv", "FastRGCNConv", "RGATConv")
    ),
    Specimen("torch_geometric", "SchNet", _schnet),
    *(
        Specimen("torch_geometric", name, partial(_graph_classifier, name))
        for name in ("TopKPooling", "SAGPooling", "ASAPooling")
    ),
    *(Specimen("torch_geometric", name, partial(_autoencoder, name)) for name in ("GAE", "VGAE")),
)
