"""Models with symbolic shapes have a graph, and looking at it decides nothing about the shapes."""

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import torchlens as tl
from tests.networks import MLP, Model, Recurrent, Residual, writes_through_views
from torchlens._draw.draw_options import draw_options
from torchlens._draw.drawing import make_drawing
from torchlens._recording.symbolic import SymbolicInt


def symbolic(*sizes: int, dynamic: tuple[int, ...] = (0,)) -> tuple[FakeTensorMode, torch.Tensor]:
    """A tensor whose sizes at `dynamic` are symbols, and the mode it lives in."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    kinds = [
        DimDynamic.DYNAMIC if number in dynamic else DimDynamic.STATIC
        for number in range(len(sizes))
    ]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode, mode.from_tensor(
        torch.rand(*sizes), symbolic_context=context, source=ConstantSource("x")
    )


def views(self, x):
    written = writes_through_views(self, x)
    w = x.clone()
    w[1:].zero_()
    w[:, 1] = 3
    made = torch.zeros(x.shape[0] * 2), torch.arange(x.shape[0])
    return *written, w + 1, x.reshape(-1), torch.cat([x, w]), x.expand(2, *x.shape).sum(), *made


MODELS = {
    "mlp": (MLP(), (6, 4), (0,)),
    "residual": (Residual(), (6, 4), (0,)),
    "recurrent": (Recurrent(), (6, 4), (0,)),
    "views": (Model(views), (6, 4), (0, 1)),
    "transformer": (
        nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0),
        (3, 5, 16),
        (0, 1),
    ),
}


def look_at_everything(history: Any) -> None:
    for entry in history:
        assert str(entry)
        for name in dir(type(entry)):
            getattr(entry, name)
    assert str(history)
    assert str(history.summary())
    assert history.to_pandas().to_csv()
    assert history.to_json()
    assert history.explore(None).html
    for vis_opt in ("rolled", "unrolled"):
        assert make_drawing(history, draw_options({"vis_opt": vis_opt})).source
    assert copy.deepcopy(history).layer_labels == history.layer_labels


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes", "dynamic"), MODELS.values(), ids=MODELS)
def test_looking_decides_nothing_about_the_shapes(
    model: nn.Module, sizes: tuple[int, ...], dynamic: tuple[int, ...]
):
    plain, x = symbolic(*sizes, dynamic=dynamic)
    with plain, torch.no_grad():
        model(x)
    logged, x = symbolic(*sizes, dynamic=dynamic)
    with logged, torch.no_grad():
        history = tl.log_forward_pass(model, x)
    look_at_everything(history)
    assert [str(guard.expr) for guard in logged.shape_env.guards] == [
        str(guard.expr) for guard in plain.shape_env.guards
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes", "dynamic"), MODELS.values(), ids=MODELS)
def test_the_graph_and_the_numbers_are_those_of_the_example(
    model: nn.Module, sizes: tuple[int, ...], dynamic: tuple[int, ...]
):
    mode, x = symbolic(*sizes, dynamic=dynamic)
    with mode:
        history = tl.log_forward_pass(model, x)
    real = tl.log_forward_pass(model, torch.rand(*sizes))
    assert history.layer_labels == real.layer_labels
    for mine, theirs in zip(history, real, strict=True):
        assert mine.parent_layers == theirs.parent_layers
        assert tuple(map(int, mine.tensor_shape)) == theirs.tensor_shape
        assert int(mine.tensor_fsize) == theirs.tensor_fsize
        assert (mine.flops, mine.flops_backward) == (theirs.flops, theirs.flops_backward)
    assert int(history.total_flops) == real.total_flops


def test_sizes_bytes_and_flops_are_expressions():
    mode, x = symbolic(6, 4)
    with mode:
        history = tl.log_forward_pass(MLP(), x)
    size = str(x.shape[0])
    entry = history["linear_1"]
    assert str(entry.tensor_shape) == f"({size}, 5)"
    assert str(entry.tensor_fsize) == f"20*{size}"
    assert entry.tensor_fsize_nice == f"20*{size} B"
    assert str(entry.flops) == f"40*{size}"
    assert str(history.total_flops) == f"70*{size}"
    assert f"shape=({size}, 5), dtype=torch.float32, size=20*{size} B" in str(entry)
    assert f"{size}x5" in str(history.summary())
    node = json.loads(history.to_json())["nodes"][1]
    assert (node["shape"], node["bytes"], node["flops"]) == ([size, 5], f"20*{size}", f"40*{size}")
    table = history.to_pandas()
    assert str(table["flops"].sum()) == f"70*{size}"
    assert f"{size}x5" in make_drawing(history, draw_options({"vis_opt": "unrolled"})).source
    assert f"Bytes and FLOPs are those for the example {size} = 6." in history.explore(None).html
    copied = pickle.loads(pickle.dumps(history))
    assert str(copied["linear_1"].flops * 2) == f"80*{size}"
    assert copied.layer_labels == history.layer_labels


def test_a_size_that_depends_on_data_has_a_name_and_no_number():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        model = Model(lambda self, x: self.fc(x[x[:, 0] > 0]), fc=nn.Linear(4, 3))
        history = tl.log_forward_pass(model, torch.rand(6, 4))
        look_at_everything(history)
    entry = history["linear_1"]
    assert str(entry.tensor_shape) == "(u0, 3)"
    assert str(entry.tensor_fsize) == "12*u0"
    assert entry.flops is None
    assert history.flops_not_counted == {"linear": 1}


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.reshape(-1, 4)).view(x.shape[0], -1).relu() + torch.zeros(x.shape[0], 1)


def test_an_exported_program_with_dynamic_shapes():
    module = export(
        Exported(), (torch.rand(6, 2, 4),), dynamic_shapes=({0: Dim("batch")},)
    ).module()
    labels = [
        "input_1_0",
        "reshape_1_1",
        "linear_1_2",
        "view_1_3",
        "relu_1_4",
        "zeros_1_5",
        "add_1_6",
        "output_1_7",
    ]
    assert tl.log_forward_pass(module, torch.rand(5, 2, 4)).layer_labels == labels
    mode, x = symbolic(6, 2, 4)
    with mode:
        history = tl.log_forward_pass(module, x)
    size = str(x.shape[0])
    assert history.layer_labels == labels
    assert str(history["linear_1"].tensor_shape) == f"(2*{size}, 4)"
    look_at_everything(history)


def test_arithmetic_keeps_the_expression():
    sympy = pytest.importorskip("sympy")
    s = SymbolicInt(6, sympy.Symbol("s", integer=True, positive=True))
    assert (int(s * 4), str(s * 4), str(4 * s), str(2 + s - 1)) == (24, "4*s", "4*s", "s + 1")
    assert (str(s**2), int(s**2), int(s // 4), int(s % 4), int(13 % s)) == ("s**2", 36, 1, 2, 1)
    assert str(sum([s, s])) == "2*s"
    assert s == 6
    assert s != SymbolicInt(6, sympy.Symbol("t"))
    assert len({s, SymbolicInt(6, s.expression)}) == 1
    assert f"{s} {s:,} {s:>3}" == "s s   s"
    unknown = SymbolicInt(None, sympy.Symbol("u"))
    product = unknown * s
    assert isinstance(product, SymbolicInt)
    assert not product.is_known
    assert str(unknown * s) == "s*u"
    assert s / 4 == 1.5  # as a number
