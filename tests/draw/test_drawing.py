"""What drawings show, and where they go."""

import importlib.util
import re
import shutil
import subprocess
import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import MLP, Conditional, ConvNet, HandingOn, Model, Recurrent, Residual, TinyGPT
from tests.sampling import first
from torchlens._draw import render as render_module
from torchlens._draw.dot import dot_source
from torchlens._draw.draw_options import DrawOptions
from torchlens._draw.drawing import Drawing, draw, make_drawing, notebook_svg, render_graph
from torchlens._draw.layout import lay_out
from torchlens._draw.render import is_graphviz_there
from torchlens._draw.scene import Edge, EdgeKind, Node, NodeShape, Scene
from torchlens._draw.simplify import thin_out
from torchlens.errors import DrawingError

GOLDEN = Path(__file__).parent / "golden"
needs_graphviz = pytest.mark.skipif(
    not is_graphviz_there(), reason="there is no Graphviz on this machine"
)


def scene_of(model: nn.Module, x: Any, **options: Any) -> Scene:
    history = tl.get_model_metadata(model.eval(), x)
    return make_drawing(history, DrawOptions(**options)).scene


def node_of(scene: Scene, title: str) -> Node:
    return next(node for node in scene.nodes if node.title == title)


def edges_of(scene: Scene) -> dict[tuple[str, str], Edge]:
    return {
        (scene.nodes[edge.source].title, scene.nodes[edge.target].title): edge
        for edge in scene.edges
        if edge.kind is not EdgeKind.GRADIENT
    }


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 5)
        self.decoder = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x).relu())


def failed_history() -> tl.ModelHistory:
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(Failing(), torch.rand(2, 4))
    return partial_history(caught.value)


def history_with_gradients() -> tl.ModelHistory:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4, requires_grad=True), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    return history


def gpt() -> nn.Module:
    return TinyGPT()


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mlp": (lambda: tl.get_model_metadata(MLP(), torch.rand(2, 4)), {}),
    "mlp_leftright": (
        lambda: tl.get_model_metadata(MLP(), torch.rand(2, 4)),
        {"vis_direction": "leftright"},
    ),
    "residual_buffers": (
        lambda: tl.get_model_metadata(Residual(), torch.rand(2, 4)),
        {"vis_buffer_layers": True},
    ),
    "residual_folded": (
        lambda: tl.get_model_metadata(Residual(), torch.rand(2, 4)),
        {"vis_fold_repeats": True},
    ),
    "recurrent_unrolled": (lambda: tl.get_model_metadata(Recurrent(), torch.rand(2, 4)), {}),
    "recurrent_rolled": (
        lambda: tl.get_model_metadata(Recurrent(), torch.rand(2, 4)),
        {"vis_opt": "rolled"},
    ),
    "conditional": (lambda: tl.get_model_metadata(Conditional(), torch.ones(3)), {}),
    "gradients": (history_with_gradients, {}),
    "failing": (failed_history, {}),
    "memory": (lambda: tl.get_model_metadata(MLP(), torch.rand(2, 4)), {"vis_color_by": "memory"}),
    "collapsed": (
        lambda: tl.get_model_metadata(Residual(), torch.rand(2, 4)),
        {"vis_nesting_depth": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_source_is_the_golden_one(name: str, pytestconfig: pytest.Config):
    make_history, options = CASES[name]
    source = make_drawing(make_history(), DrawOptions(**options)).source
    path = GOLDEN / f"{name}.gv"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(source, encoding="utf-8")
    assert path.exists(), (
        f"There is no golden file {path.name} yet: run pytest --update-golden and read what it "
        "wrote."
    )
    assert settled(source) == settled(path.read_text(encoding="utf-8"))


def settled(source: str) -> str:
    """A source without the lines of torch's message, whose wording depends on the release."""
    return re.sub(r"(RuntimeError: )(addmm: )?(.*?)(<BR/>@)", _on_one_line, source)


def _on_one_line(found: re.Match[str]) -> str:
    return found[1] + found[3].replace("<BR/>", " ") + found[4]


# -- nodes
# --------------------------------------------------------------------------------------------------


def test_a_node_says_its_arguments_and_the_names_of_its_parameters_if_asked():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, stride=2, padding=1), torch.nn.Softmax(-1))
    history = tl.get_model_metadata(model, torch.rand(1, 4, 8, 8))
    scene = make_drawing(history, DrawOptions(vis_arguments=True)).scene
    convolution = node_of(scene, "conv2d_1_1")
    assert convolution.lines[1:3] == (
        "kernel 3×3, stride 2, padding 1",
        "params: weight 8x4x3x3, bias (8,)",
    )
    assert "dim −1" in node_of(scene, "softmax_1_2").lines
    plain = make_drawing(history, DrawOptions()).scene
    assert "dim −1" not in node_of(plain, "softmax_1_2").lines


def test_a_node_says_label_shape_size_params_and_module():
    node = node_of(scene_of(MLP(), torch.rand(2, 4)), "linear_1_1")
    assert node.lines == ("2x5 (40 B)", "params: 5x4, (5,)", "@fc1")
    assert node.shape is NodeShape.MODULE_OUTPUT
    assert node.fill == "#E6E6E6"


def test_the_caption_says_model_tensors_and_params():
    scene = scene_of(MLP(), torch.rand(2, 4))
    assert scene.title == "MLP"
    assert scene.lines == ("5 tensors total (160 B)", "43 params total (172 B)")


def test_inputs_outputs_buffers_and_conditions_have_their_colours():
    scene = scene_of(Residual(), torch.rand(2, 4), vis_buffer_layers=True)
    assert node_of(scene, "input_1_0").fill == "#98FB98"
    assert node_of(scene, "output_1_10").fill == "#ff9999"
    assert node_of(scene, "buffer_1_0").lines[-1] == "@scale"
    condition = scene_of(Conditional(), torch.ones(3))
    assert node_of(condition, "gt_1_2").fill == "#F7D460"
    assert node_of(condition, "gt_1_2").lines[-1] == "is True"


def test_what_no_input_leads_to_is_dashed_and_buffers_are_drawn_on_request_only():
    scene = scene_of(Residual(), torch.rand(2, 4))
    assert [node.title for node in scene.nodes if node.is_dashed] == ["ones_1_8"]
    assert not any(node.title.startswith("buffer") for node in scene.nodes)


def test_nodes_stand_in_the_boxes_of_their_modules():
    scene = scene_of(Residual(), torch.rand(2, 4))
    assert [(box.title, box.subtitle) for box in scene.boxes] == [
        ("@blocks.0", "(ResidualBlock)"),
        ("@blocks.1", "(ResidualBlock)"),
    ]
    assert scene.boxes[node_of(scene, "relu_1_1").box].title == "@blocks.0"
    assert node_of(scene, "input_1_0").box == -1


def test_modules_at_the_nesting_depth_are_one_box_each():
    scene = scene_of(Residual(), torch.rand(2, 4), vis_nesting_depth=1)
    node = node_of(scene, "@blocks.0")
    assert node.shape is NodeShape.COLLAPSED
    assert node.lines == ("ResidualBlock", "2x4 (32 B)", "3 layers", "20 params")
    assert ("@blocks.0", "@blocks.1") in edges_of(scene)


def test_a_callback_decides_which_modules_are_one_box():
    asked: list[str] = []

    def collapse(history: tl.ModelHistory, module: str) -> bool:
        asked.append(module)
        return module == "blocks.1"

    scene = scene_of(Residual(), torch.rand(2, 4), vis_collapse=collapse)
    assert [node.title for node in scene.nodes if node.shape is NodeShape.COLLAPSED] == [
        "@blocks.1"
    ]
    assert [box.title for box in scene.boxes] == ["@blocks.0"]
    assert len(asked) == len(set(asked)), "each module is asked about once"


# -- loops
# --------------------------------------------------------------------------------------------------


def test_a_rolled_drawing_has_one_node_per_layer_and_says_which_passes_an_edge_belongs_to():
    scene = scene_of(Recurrent(), torch.rand(2, 4), vis_opt="rolled")
    assert [node.title for node in scene.nodes] == [
        "input_1_0", "linear_1_1 (x4)", "add_1_2 (x4)", "mul_1_3 (x4)", "output_1_4",
    ]  # fmt: skip
    edges = edges_of(scene)
    assert edges["input_1_0", "linear_1_1 (x4)"].lines == ("In 1",)
    assert edges["mul_1_3 (x4)", "linear_1_1 (x4)"].lines == ("Out 1-3", "In 2-4")
    assert edges["linear_1_1 (x4)", "add_1_2 (x4)"].lines == ()
    assert edges["mul_1_3 (x4)", "output_1_4"].lines == ("Out 4",)


def test_an_unrolled_drawing_has_one_node_per_entry():
    history = tl.get_model_metadata(Recurrent(), torch.rand(2, 4))
    scene = make_drawing(history, DrawOptions()).scene
    assert [node.title for node in scene.nodes] == history.layer_labels


def test_a_rolled_module_that_reads_itself_has_a_loop():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.body(x)
        return x

    model = Model(forward, body=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    scene = scene_of(model, torch.rand(2, 4), vis_opt="rolled", vis_nesting_depth=1)
    assert edges_of(scene)["@body (x3)", "@body (x3)"].lines == ("Out 1-2", "In 2-3")


# -- edges
# --------------------------------------------------------------------------------------------------


def test_arguments_are_labelled_where_their_order_matters():
    def forward(self: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x - y, torch.where(x > 0, input=x, other=y)]) + torch.cat([y, x])

    edges = edges_of(scene_of(Model(forward), [torch.rand(3), torch.rand(3)]))
    assert edges["input_1_0", "sub_1_1"].lines == ("arg 0",)
    assert edges["input_2_0", "sub_1_1"].lines == ("arg 1",)
    assert edges["where_1_3", "cat_1_4"].lines == ("arg (0, 1)",)
    assert edges["input_2_0", "where_1_3"].lines == ("other",)
    assert edges["cat_1_4", "add_1_6"].lines == ()


def test_an_edge_into_a_condition_says_if():
    assert edges_of(scene_of(Conditional(), torch.ones(3)))["input_1_0", "sum_1_1"].lines == ("IF",)


def test_gradients_are_drawn_back_where_they_were_saved():
    drawing = make_drawing(history_with_gradients(), DrawOptions())
    backward = [edge for edge in drawing.scene.edges if edge.kind is EdgeKind.GRADIENT]
    assert len(backward) == 4
    assert drawing.source.count("#9197F6") == 4
    assert (
        "#9197F6"
        not in make_drawing(tl.log_forward_pass(MLP(), torch.rand(2, 4)), DrawOptions()).source
    )


# -- folding
# --------------------------------------------------------------------------------------------------


def test_blocks_alike_are_folded_to_one():
    history = tl.get_model_metadata(gpt().eval(), torch.randint(10, (1, 6)))
    plain = make_drawing(history, DrawOptions()).scene
    folded = make_drawing(history, DrawOptions(vis_fold_repeats=True)).scene
    stacks = [box for box in folded.boxes if box.is_stack]
    assert len(stacks) == 1
    assert re.fullmatch(r"@(\w+)\.0 … @\1\.\d+ × \d+", stacks[0].title)
    assert len(folded.nodes) < len(plain.nodes)


def test_modules_that_differ_are_not_folded():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, size)) for size in (4, 4, 5))
    )
    scene = scene_of(model, torch.rand(2, 4), vis_fold_repeats=True)
    assert [box.title for box in scene.boxes] == ["@0 … @1 × 2", "@2"]


def test_modules_side_by_side_are_folded_and_say_so():
    def forward(self: Model, x: torch.Tensor) -> Any:
        return sum(expert(x) for expert in self.experts)

    model = Model(
        forward, experts=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    )
    scene = scene_of(model, torch.rand(2, 4), vis_fold_repeats=True)
    assert "@experts.0 … @experts.2 × 3 side by side" not in [box.title for box in scene.boxes], (
        "the sums are between"
    )

    def stacked(self: Model, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(x) for expert in self.experts])

    model = Model(
        stacked, experts=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    )
    scene = scene_of(model, torch.rand(2, 4), vis_fold_repeats=True)
    assert [box.title for box in scene.boxes] == ["@experts.0 … @experts.2 × 3 side by side"]


def test_modules_side_by_side_that_are_read_in_different_ways_are_not_folded():
    attention = {name: nn.Linear(4, 4) for name in ("q", "k", "v")}
    heads = {"mean": nn.Linear(4, 4), "logvar": nn.Linear(4, 4)}

    def attend(self, x):
        return nn.functional.scaled_dot_product_attention(
            self.q(x).sigmoid(), self.k(x).sigmoid(), self.v(x).sigmoid()
        )

    def sample(self, x):
        mean, logvar = self.mean(x), self.logvar(x)
        return mean + torch.exp(logvar), mean, logvar

    for model in (Model(attend, **attention), Model(sample, **heads)):
        titles = [
            node.title for node in scene_of(model, torch.rand(2, 4), vis_fold_repeats=True).nodes
        ]
        assert sum(title.startswith("linear") for title in titles) == len(list(model.children()))
        assert not any("side by side" in title for title in titles)


def test_heads_that_are_joined_in_a_list_are_folded():
    heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
    model = Model(lambda self, x: torch.cat([head(x) for head in self.heads], -1), heads=heads)
    scene = scene_of(model, torch.rand(2, 4), vis_fold_repeats=True)
    assert "linear_1_1 × 5 side by side" in [node.title for node in scene.nodes]


def test_a_folded_module_can_be_one_box():
    scene = scene_of(Residual(), torch.rand(2, 4), vis_fold_repeats=True, vis_nesting_depth=1)
    assert "@blocks.0 × 2" in [node.title for node in scene.nodes]


# -- colours
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", ["time", "memory", "flops"])
def test_nodes_are_coloured_by_a_measure_with_a_legend(measure: str):
    scene = scene_of(MLP(), torch.rand(2, 4), vis_color_by=measure)
    assert scene.legend is not None
    assert len(scene.legend.steps) == 5
    assert node_of(scene, "linear_1_1").lines[-1].lower().startswith(f"{measure}: ")


def test_flops_of_a_linear_layer_are_two_per_weight_and_row():
    assert (
        node_of(scene_of(MLP(), torch.rand(2, 4), vis_color_by="flops"), "linear_1_1").lines[-1]
        == "FLOPs: 80 FLOP"
    )


def test_nodes_are_coloured_by_values_of_the_callers_own():
    scene = scene_of(MLP(), torch.rand(2, 4), vis_color_by={"linear_1_1": 1.0, "fc2": 3})
    assert node_of(scene, "linear_1_1").lines[-1] == "value: 1"
    assert node_of(scene, "linear_2_3").fill == "#081d58"
    assert node_of(scene, "relu_1_2").fill == "white"
    scene = scene_of(MLP(), torch.rand(2, 4), vis_color_by=lambda layer: len(layer.tensor_shape))
    assert node_of(scene, "relu_1_2").lines[-1] == "value: 2"
    with pytest.raises(KeyError, match="linear_9"):
        scene_of(MLP(), torch.rand(2, 4), vis_color_by={"linear_9": 1.0})
    with pytest.raises(TypeError, match="must give a number for 'linear_1_1'"):
        scene_of(MLP(), torch.rand(2, 4), vis_color_by={"linear_1_1": "many"})


# -- overrides
# --------------------------------------------------------------------------------------------------


def test_overrides_are_values_or_functions_of_what_they_are_about():
    history = history_with_gradients()
    seen: list[Any] = []

    def color(*about: Any) -> str:
        seen.append(tuple(type(part).__name__ for part in about))
        return "red"

    source = make_drawing(
        history,
        DrawOptions(
            vis_graph_overrides={"bgcolor": "ivory"},
            vis_node_overrides=lambda history, layer: {"tooltip": layer.layer_label},
            vis_edge_overrides={"color": color},
            vis_gradient_edge_overrides={"penwidth": 7},
        ),
    ).source
    assert "bgcolor=ivory" in source
    assert "tooltip=linear_1_1" in source
    assert source.count("color=red") == 4
    assert source.count("penwidth=7") == 4
    assert seen[0] == ("ModelHistory", "LayerEntry", "LayerEntry")


def test_module_overrides_are_asked_by_address():
    history = tl.get_model_metadata(Residual(), torch.rand(2, 4))
    options = DrawOptions(
        vis_module_overrides={
            "color": lambda history, module: "red" if module == "blocks.1" else None
        }
    )
    assert make_drawing(history, options).source.count("color=red") == 1
    options = DrawOptions(
        vis_nesting_depth=1,
        vis_nested_node_overrides={"color": lambda history, layer: layer.layer_label},
    )
    assert "color=add_1_3" in make_drawing(history, options).source


def test_an_override_that_returns_no_dict_is_named():
    with pytest.raises(TypeError, match="must return a dict of graphviz attributes, got 'red'"):
        scene_of(MLP(), torch.rand(2, 4), vis_node_overrides=lambda history, layer: "red")


# -- failures
# --------------------------------------------------------------------------------------------------


def test_a_failed_pass_draws_with_the_failing_operation_and_its_arguments():
    scene = make_drawing(failed_history(), DrawOptions()).scene
    failure = scene.nodes[-1]
    assert failure.shape is NodeShape.FAILURE
    assert failure.title == "✗ linear"
    assert failure.lines[0].startswith("given (2x5 float32, 4x6 float32")
    assert failure.lines[1].startswith("RuntimeError: ")
    assert edges_of(scene)["relu_1_2", "✗ linear"].kind is EdgeKind.FAILURE


def test_a_failure_that_is_no_operation_hangs_below_the_last_one():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        raise ValueError("no <more>")

    with pytest.raises(ValueError, match="no <more>") as caught:
        tl.log_forward_pass(Model(forward), torch.rand(2))
    drawing = make_drawing(partial_history(caught.value), DrawOptions())
    assert edges_of(drawing.scene)["add_1_1", "✗ raised here"].lines == ("then",)
    assert "no &lt;more&gt;" in drawing.source


# -- size
# --------------------------------------------------------------------------------------------------


class Loop(nn.Module):
    def __init__(self, count: int, step: int = 0) -> None:
        super().__init__()
        self.count, self.step = count, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.count):
            x = torch.sin(x + self.step * number)
        return x


def test_show_model_graph_returns_the_drawing(tmp_path: Path):
    path = tmp_path / "graph.svg"
    drawing = tl.show_model_graph(MLP(), torch.rand(2, 4), vis_outpath=path, vis_save_only=True)
    assert isinstance(drawing, Drawing)
    assert drawing.picture_path == path
    assert "linear_1_1" in drawing.source
    assert tl.show_model_graph(MLP(), torch.rand(2, 4), vis_opt="none") is None


def test_a_drawing_that_would_be_too_large_is_simplified_and_says_so(tmp_path: Path):
    history = tl.get_model_metadata(Loop(1000), torch.rand(2))
    with pytest.warns(
        UserWarning,
        match="Simplified, as 2,002 nodes would be too many to read: passes of one layer",
    ):
        drawing = render_graph(history, vis_outpath=tmp_path / "loop.gv", vis_fileformat="dot")
    assert drawing is not None
    assert len(drawing.scene.nodes) == 4
    assert "too many to read" in drawing.source


@pytest.mark.parametrize("max_nodes", [1, 5, 60, 500])
def test_a_model_without_modules_or_loops_is_drawn_in_runs(max_nodes: int):
    scene = make_drawing(
        tl.get_model_metadata(Loop(600, 1), torch.rand(2)), DrawOptions(vis_max_nodes=max_nodes)
    ).scene
    assert len(scene.nodes) <= max(max_nodes, 3)
    assert scene.nodes[1].shape is NodeShape.COLLAPSED
    assert "operations" in scene.nodes[1].lines[-1]


def test_many_long_edges_are_written_rather_than_drawn():
    nodes = [
        Node(f"n{number}", f"n{number}", (), NodeShape.OPERATION, "white") for number in range(100)
    ]
    edges = [Edge(source, target) for target in range(100) for source in range(target)]
    drawn_nodes, drawn, note = thin_out(nodes, edges)
    assert note is not None
    assert len(drawn) < len(edges) / 2
    assert {edge.target for edge in drawn} == set(range(1, 100)), "every node keeps a way in"
    assert drawn_nodes[99].lines[0].startswith("+ n0, n1, n2, …")
    assert thin_out(nodes[:10], edges[:45]) == (nodes[:10], edges[:45], None)


@pytest.mark.parametrize(
    ("count", "has_labels", "is_hasty"), [(300, True, False), (301, True, True), (801, False, True)]
)
def test_large_drawings_do_without_polish_and_labels(count: int, has_labels: bool, is_hasty: bool):
    nodes = [
        Node(f"n{number}", f"n{number}", (), NodeShape.OPERATION, "white")
        for number in range(count)
    ]
    source = dot_source(
        Scene("Large", (), None, (), "topdown", nodes, [Edge(0, 1, ("arg 0",))], [])
    )
    assert ("arg 0" in source) == has_labels
    assert ("nslimit=1" in source) == is_hasty


@needs_graphviz
def test_a_graph_with_long_edges_everywhere_draws():
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for _ in range(30):
            features.append(torch.cat(features).relu().sin().mean(0, keepdim=True))
        return torch.cat(features)

    history = tl.get_model_metadata(Model(forward), torch.rand(1, 3))
    drawing = make_drawing(history, DrawOptions())
    assert (
        "long edges are written into the nodes" in drawing.source
    )  # a plain `dot` would take minutes
    assert drawing.to_bytes("svg").startswith(b"<?xml")


# -- files
# --------------------------------------------------------------------------------------------------


@needs_graphviz
@pytest.mark.parametrize(
    ("fileformat", "start"),
    [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG"), ("jpg", b"\xff\xd8")],
)
def test_the_source_is_written_and_the_picture_beside_it(
    tmp_path: Path, fileformat: str, start: bytes
):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    drawing = render_graph(
        history,
        vis_outpath=tmp_path / "new" / "graph.gv",
        vis_fileformat=fileformat,
        vis_save_only=True,
    )
    assert drawing is not None
    signed = f"{drawing.source}// {history.receipt}\n"
    assert (tmp_path / "new" / "graph.gv").read_text() == signed
    assert drawing.picture_path == tmp_path / "new" / f"graph.gv.{fileformat}"
    assert drawing.picture_path.read_bytes().startswith(start)


@needs_graphviz
def test_every_golden_source_draws():
    for path in GOLDEN.glob("*.gv"):
        svg = render_module.render(path.read_text(encoding="utf-8"), "svg").decode()
        assert svg.count('<g id="node') == len(
            re.findall(r'^ *"[^"]*" \[label=', path.read_text(), re.MULTILINE)
        ), path.name


@needs_graphviz
def test_pictures_carry_the_receipt_and_open_as_before(tmp_path: Path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    drawing = render_graph(history, vis_outpath=tmp_path / "net.svg", vis_save_only=True)
    assert drawing is not None
    image = pytest.importorskip("PIL.Image")
    signed = image.open(BytesIO(drawing.to_bytes("png")))
    assert signed.text["Description"] == str(history.receipt)
    unsigned = image.open(BytesIO(render_module.render(drawing.source, "png")))
    assert signed.tobytes() == unsigned.tobytes()
    pdf = drawing.to_bytes("pdf")
    start = pdf.index(f"\n% {history.receipt}\nstartxref\n".encode())
    table = int(pdf[start:].split(b"startxref\n")[1].split()[0])
    assert pdf[table : table + 4] == b"xref" or b"/XRef" in pdf[table:start]


@needs_graphviz
def test_the_name_of_a_picture_may_be_given(tmp_path: Path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    drawing = render_graph(history, vis_outpath=tmp_path / "net.svg", vis_save_only=True)
    assert drawing is not None
    assert (drawing.source_path, drawing.picture_path) == (
        tmp_path / "net.gv",
        tmp_path / "net.svg",
    )
    assert drawing.save(tmp_path / "other.png").read_bytes().startswith(b"\x89PNG")
    assert drawing.save(tmp_path / "other.dot").read_text().startswith(drawing.source)
    assert f"<!-- {history.receipt} -->" in (tmp_path / "net.svg").read_text()


def test_dot_is_the_source_alone(tmp_path: Path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    drawing = render_graph(history, vis_outpath=tmp_path / "graph.gv", vis_fileformat="dot")
    assert drawing is not None
    assert drawing.picture_path is None
    assert [path.name for path in tmp_path.iterdir()] == ["graph.gv"]


def test_none_draws_nothing(tmp_path: Path):
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    assert draw(history, DrawOptions(vis_opt="none", vis_outpath=tmp_path / "graph.gv")) is None
    assert list(tmp_path.iterdir()) == []


def test_without_graphviz_the_error_names_both_cures_and_the_source_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    history = tl.get_model_metadata(MLP(), torch.rand(2, 4))
    with pytest.raises(
        DrawingError,
        match=r"pip install 'torchlens\[draw\]'.*apt install graphviz.*The source is in "
        r"'.*graph.gv'",
    ):
        render_graph(history, vis_outpath=tmp_path / "graph.gv")
    assert (tmp_path / "graph.gv").read_text().startswith("digraph {")
    assert notebook_svg(history) is None


def test_dot_on_the_machine_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/somewhere/{name}")
    assert render_module._command("svg") == ["/somewhere/dot", "-Tsvg"]


def test_a_layout_that_does_not_end_is_tried_in_haste_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
):
    sources: list[str] = []

    def run(command: list[str], **options: Any) -> Any:
        sources.append(options["input"].decode())
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(
        DrawingError, match=r"did not finish within .* Draw less: vis_nesting_depth=1"
    ):
        render_module.render("digraph {\n a -> b\n}\n", "svg")
    assert ["splines=line" in source for source in sources] == [False, True]


@needs_graphviz
def test_a_source_that_is_wrong_says_what_graphviz_says():
    with pytest.raises(DrawingError, match="Graphviz could not draw this"):
        render_module.render("digraph { a -> ", "svg")


@needs_graphviz
def test_names_with_quotes_brackets_and_backslashes_stay_text():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, name in enumerate(
                ['a"b', "<script>alert(1)</script>", "c\\", "d&e", "f\x01g", "node"]
            ):
                self.add_module(
                    name,
                    nn.Sequential(nn.Linear(4, 4), nn.ReLU()) if number % 2 else nn.Linear(4, 4),
                )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self.children():
                x = module(x)
            return x

    history = tl.get_model_metadata(Odd(), torch.rand(2, 4))
    for options in (DrawOptions(), DrawOptions(vis_collapse=lambda history, module: True)):
        svg = make_drawing(history, options).to_bytes("svg").decode()
        assert "<script>" not in svg
        assert "&lt;script&gt;" in svg


def test_unsaved_layers_are_drawn_too():
    history = tl.log_forward_pass(
        MLP(), torch.rand(2, 4), layers_to_save="fc1", keep_unsaved_layers=False
    )
    assert len(history) == 1
    assert len(make_drawing(history, DrawOptions()).scene.nodes) == 5


# -- notebooks
# --------------------------------------------------------------------------------------------------


@needs_graphviz
def test_a_notebook_shows_drawings_and_histories():
    history = tl.get_model_metadata(ConvNet().eval(), torch.rand(1, 3, 8, 8))
    svg = notebook_svg(history)
    assert svg is not None
    assert "conv2d_1_1" in svg
    shown = make_drawing(history, DrawOptions())._repr_svg_()
    assert shown is not None
    assert "</svg>" in shown


def test_drawing_imports_no_drawing_package_before_it_is_needed():
    code = (
        "import sys, torchlens._draw.drawing; print({'graphviz', 'pygraphviz', 'IPython'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_drawing_says_what_it_is():
    assert repr(make_drawing(tl.get_model_metadata(MLP(), torch.rand(2, 4)), DrawOptions())) == (
        "<Drawing of MLP: 5 nodes, 4 edges>"
    )


class Long(nn.Module):
    def forward(self, x):
        for number in range(400):
            x = torch.sin(x + number)
        return x


class Wide(nn.Module):
    def forward(self, x):
        return torch.stack([x * number for number in range(200)])


def _longest_side(source: str) -> float:
    layout = lay_out(source)
    return max(layout.width, layout.height)


@pytest.mark.parametrize(
    ("model", "fileformat", "longest"),
    first(
        2,
        [
            (Long(), "pdf", 14_400),
            (Wide(), "png", 24_500),
            (Long(), "png", 24_500),
            (Wide(), "pdf", 14_400),
        ],
    ),
)
def test_a_picture_too_long_for_its_format_is_collapsed_with_a_word(
    tmp_path, model, fileformat, longest
):
    history = tl.get_model_metadata(model, torch.ones(2))
    with pytest.warns(
        UserWarning, match=f"a side of the {fileformat} would be longer than {longest:,} points"
    ):
        drawing = history.render_graph(
            vis_save_only=True, vis_outpath=tmp_path / f"graph.{fileformat}"
        )
    assert _longest_side(drawing.source) <= longest
    assert len(drawing.scene.nodes) > 20
    assert "Simplified" in drawing.source
    whole = history.render_graph(vis_save_only=True, vis_outpath=tmp_path / "graph.svg")
    assert _longest_side(whole.source) > longest
    assert "Simplified" not in whole.source


def test_the_caption_claims_only_what_was_done():
    class Blocks(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            sizes = list(pairwise(sizes))
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Tanh()) for a, b in sizes
            )

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def said(sizes):
        history = tl.get_model_metadata(Blocks(sizes), torch.ones(1, sizes[0]))
        return make_drawing(history, DrawOptions(vis_max_nodes=20)).scene.simplification

    # Twelve different blocks: none is folded, each becomes a box. Twelve alike ones are folded, and
    # that is all.
    assert said(range(2, 15)).endswith(": modules at level 1 are one box.")
    assert said([4] * 13).endswith(": repeated modules are folded.")


class Cached(nn.Module):
    """Eight layers, each with a cache that comes in and goes out."""

    def forward(self, x, cache):
        kept = []
        for key, value in cache:
            x = x + key * value
            kept.append((x * 2, x * 3))
        return {"logits": x, "cache": kept}


@pytest.mark.parametrize("vis_opt", ["unrolled", "rolled"])
def test_the_inputs_and_outputs_of_a_cache_are_one_node_each(vis_opt):
    cache = [(torch.ones(2, 3), torch.ones(2, 3)) for _ in range(8)]
    history = tl.get_model_metadata(Cached(), [torch.ones(2, 3), cache])
    scene = make_drawing(history, DrawOptions(vis_opt=vis_opt)).scene
    inputs = [node for node in scene.nodes if node.title.startswith("input")]
    outputs = [node for node in scene.nodes if node.title.startswith("output")]
    assert [node.title for node in inputs] == ["input_1_0", "input_2_0 … input_17_0"]
    assert inputs[1].lines == ("16 tensors of 2x3 (384 B)", "@input.cache")
    assert [node.lines[-1] for node in outputs] == ["@output.logits", "@output.cache"]
    assert outputs[1].lines[0] == "16 tensors of 2x3 (384 B)"
    into = {
        scene.nodes[edge.source].title
        for edge in scene.edges
        if scene.nodes[edge.target] is outputs[1]
    }
    assert len(into) == 16
    out_of = [edge for edge in scene.edges if scene.nodes[edge.source] is inputs[1]]
    assert len(out_of) == 8


def test_few_inputs_and_outputs_stay_apart():
    cache = [(torch.ones(2, 3), torch.ones(2, 3)) for _ in range(2)]
    scene = make_drawing(
        tl.get_model_metadata(Cached(), [torch.ones(2, 3), cache]), DrawOptions()
    ).scene
    assert sum("put_" in node.title for node in scene.nodes) == 10


def test_the_last_block_folds_though_nobody_reads_what_it_hands_on():
    scene = scene_of(HandingOn(), torch.ones(1, 4), vis_fold_repeats=True)
    assert [box.title for box in scene.boxes] == ["@blocks.0 … @blocks.4 × 5"]
    assert len(scene.nodes) == 8
