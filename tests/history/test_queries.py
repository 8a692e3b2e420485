"""Questions to the graph, against networkx and against hand-written lists."""

import importlib.util
import pickle
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import torchlens as tl
from benchmarks.zoo import SPECIMENS
from tests.fuzz.compare import program_inputs
from tests.fuzz.machine import Program
from tests.fuzz.programs import programs
from tests.networks import MLP, ConvNet, Recurrent, Residual
from tests.work import lines_run


def graph_of(history: tl.ModelHistory) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(entry.layer_label_w_pass for entry in history)
    for entry in history:
        graph.add_edges_from(
            (parent.layer_label_w_pass, entry.layer_label_w_pass) for parent in entry.parents
        )
    return graph


def names(entries: Any) -> list[str]:
    return [entry.layer_label_w_pass for entry in entries]


def check_against_networkx(history: tl.ModelHistory, seed: int) -> None:
    graph = graph_of(history)
    order = {label: number for number, label in enumerate(graph)}
    chooser = random.Random(seed)
    labels = list(graph)
    for _ in range(4):
        a, b = sorted(chooser.choices(labels, k=2), key=order.__getitem__)
        after = nx.descendants(graph, a) | {a}
        before = nx.ancestors(graph, b) | {b}
        assert names(history.between(a, b)) == sorted(after & before, key=order.__getitem__)
        assert names(history[a].descendants()) == sorted(after - {a}, key=order.__getitem__)
        assert names(history[b].ancestors()) == sorted(before - {b}, key=order.__getitem__)
        way = graph.subgraph(after & before)
        every = nx.all_simple_paths(way, a, b) if a in way and a != b else []
        wanted = [[a]] if a == b else list(islice(every, 51))
        if len(wanted) <= 50:
            found = [names(path) for path in history.paths(a, b)]
            assert sorted(found) == sorted(wanted)
            assert [len(path) for path in found] == sorted(map(len, found))
            longest = max(map(len, wanted), default=0)
            assert len(history.longest_path(a, b)) == longest
        else:
            with pytest.raises(ValueError, match="paths, more than limit=50"):
                history.paths(a, b, limit=50)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs)
def test_paths_of_random_programs_are_those_that_networkx_finds(steps) -> None:
    history = tl.log_forward_pass(Program(steps), program_inputs())
    check_against_networkx(history, len(steps))


REAL = (
    "torchvision/resnet18",
    "torchvision/densenet121",
    "torchvision/squeezenet1_1",
    "timm/test_mambaout",
    "timm/test_nfnet",
    "transformers/gpt2",
    "transformers/bert",
    "transformers/t5",
    "transformers/mamba",
    "torch_geometric/GCN",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_paths_of_real_models_are_those_that_networkx_finds(name: str) -> None:
    specimen = SPECIMENS[name]
    if importlib.util.find_spec(specimen.source) is None:
        pytest.skip(f"needs {specimen.source}: pip install 'torchlens[zoo]'")
    case = specimen.make()
    history = tl.get_model_metadata(case.model.eval(), list(case.args), case.kwargs)
    check_against_networkx(history, len(name))
    part = history.subgraph(history.layer_list[2::3])
    check_is_part(part, history)


def test_find_selects_by_type_module_shape_parameter_and_function() -> None:
    history = tl.log_forward_pass(ConvNet(), torch.rand(2, 3, 16, 16))
    everything = history.layer_list
    convs = [entry for entry in everything if entry.layer_type == "conv2d"]
    assert history.find("conv2d") == history.find(torch.conv2d) == history.find("conv*") == convs
    assert history.find(["conv2d", "relu"]) == [
        entry for entry in everything if entry.layer_type in ("conv2d", "relu")
    ]
    assert history.find(module=nn.Conv2d) == convs
    assert history.find(shape=(2, None, ...)) == [
        entry for entry in everything if len(entry.tensor_shape) >= 2 and entry.tensor_shape[0] == 2
    ]
    assert history.find(where=lambda entry: entry.flops) == [e for e in everything if e.flops]
    for address in history[convs[0].layer_label].parent_param_addresses:
        assert convs[0] in history.find(param=address)
    assert history.find() == everything
    assert history.find("nothing") == []


def test_paths_from_several_starts_are_sorted_by_length() -> None:
    history = tl.log_forward_pass(Residual(), torch.rand(2, 4))
    paths = history.paths(["input.x", "linear_1", "relu_1"], "output_1")
    assert len({tuple(names(path)) for path in paths}) == len(paths)
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    assert {path[0].layer_label for path in paths} == {"input_1_0", "linear_1_2", "relu_1_1"}


def test_a_shared_module_or_parameter_is_found_under_each_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.block = nn.Linear(4, 4)
            self.again = self.block
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.block(self.embedding(ids))))

    history = tl.log_forward_pass(Tied(), torch.arange(3))
    assert names(history.find(module="again")) == names(history.find(module="block"))
    assert len(history.find(module="again")) == 2
    for name in ("embedding.weight", "head.weight"):
        assert names(history.find(param=name)) == ["embedding_1_1:1", "linear_2_3:1"]


def test_find_says_which_module_or_parameter_does_not_exist() -> None:
    history: Any = tl.log_forward_pass(ConvNet(), torch.rand(2, 3, 16, 16))
    with pytest.raises(KeyError, match=r"No module 'haed' ran. Did you mean 'head'"):
        history.find(module="haed")
    with pytest.raises(KeyError, match=r"No parameter 'head.wieght'. Did you mean 'head.weight'"):
        history.find(param="head.wieght")
    with pytest.raises(TypeError, match=r"For modules of a class: module=torch.nn.Conv2d"):
        history.find(nn.Conv2d)
    with pytest.raises(TypeError, match="shape must be a tuple of sizes"):
        history.find(shape="2x3")
    with pytest.raises(TypeError, match="where must be a function of a layer entry, got 3"):
        history.find(where=3)


def test_a_module_at_any_depth_holds_what_was_computed_in_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    assert names(history.find(module="0")) == ["linear_1_1:1", "relu_1_2:1"]
    assert names(history.find(module="0.*")) == ["linear_1_1:1", "relu_1_2:1"]
    assert names(history.find("linear", module=nn.Sequential)) == ["linear_1_1:1"]


def test_calls_of_a_module_are_told_apart_by_their_pass() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    assert names(history.find(module="fc:3")) == ["linear_1_1:3"]
    assert len(history.find(module="fc")) == 4


def test_the_passes_of_a_layer_or_module_stack_to_one_tensor() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    values = [history[f"linear_1_1:{number}"].tensor_contents for number in range(1, 5)]
    assert torch.equal(history.passes("fc"), torch.stack(values))
    assert torch.equal(history.passes("linear_1"), torch.stack(values))


def test_passes_that_cannot_be_stacked_say_why() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.cat([x, self.fc(x)])
            return x

    history = tl.log_forward_pass(Growing(), torch.rand(1, 4))
    with pytest.raises(ValueError, match=r"several shapes.*\(1, 4\), \(2, 4\), \(4, 4\)"):
        history.passes("fc")
    with pytest.raises(ValueError, match=r"'linear_1_1:1' was not saved"):
        tl.get_model_metadata(Growing(), torch.rand(1, 4)).passes("fc")


def test_a_list_of_keys_gives_their_entries() -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    assert names(history[["linear_1_1:2", "input.x"]]) == ["linear_1_1:2", "input_1_0:1"]
    assert names(history[["fc"]]) == [f"linear_1_1:{number}" for number in range(1, 5)]
    assert history[[0, -1]] == [history[0], history[-1]]


def test_the_modules_between_two_layers_lie_wholly_between_them() -> None:
    layers = [
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        nn.Linear(4, 4),
    ]
    history = tl.log_forward_pass(nn.Sequential(*layers), torch.rand(2, 4))
    assert history.modules_between("1", "2") == ["1", "2", "2.0", "2.1"]
    assert history.modules_between("relu_1_2", "2.0") == ["1", "2.0"]
    assert history.modules_between("3", "0") == []


def test_the_number_of_paths_is_counted_before_they_are_made() -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(60):
                x = x + torch.relu(x)
            return x

    history = tl.get_model_metadata(Doubling(), torch.rand(2))
    with pytest.raises(ValueError, match=re.escape(f"There are {2**60:,} paths")):
        history.paths("input.x", "output_1")
    assert len(history.longest_path()) == 122


def test_residual_connections_have_a_start_an_end_and_a_block() -> None:
    (first, second) = tl.log_forward_pass(Residual(), torch.rand(2, 4)).residuals()
    assert (first.end.layer_label, names(first.block)) == (
        "add_1_3",
        ["relu_1_1:1", "linear_1_2:1"],
    )
    assert (second.start, second.carried) == (first.end, [])


def test_a_projection_is_carried_around_the_block() -> None:
    model = SPECIMENS["torchvision/resnet18"].make()
    history = tl.get_model_metadata(model.model.eval(), list(model.args))
    found = history.residuals()
    assert len(found) == 8
    carried = [[entry.layer_type for entry in residual.carried] for residual in found]
    assert sorted(carried) == [[]] * 5 + [["conv2d", "batchnorm"]] * 3
    for residual in found:
        types = [entry.layer_type for entry in residual.block]
        assert types == ["conv2d", "batchnorm", "relu", "conv2d", "batchnorm"]


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (torch.equal(one, other) if isinstance(one, torch.Tensor) else False)


def check_is_part(part: tl.ModelHistory, whole: tl.ModelHistory) -> None:
    """Labels, values, edges and modules are those of the whole, for the entries that are there."""
    labels = set(part.layer_labels)
    for entry in part:
        own = whole[entry.layer_label]
        assert entry.layer_label_w_pass == own.layer_label_w_pass
        assert entry.parent_layers == [label for label in own.parent_layers if label in labels]
        assert entry.child_layers == [label for label in own.child_layers if label in labels]
        assert entry.containing_modules_origin_nested == own.containing_modules_origin_nested
        assert entry.layer_passes_total == own.layer_passes_total
        assert _is_equal(entry.tensor_contents, own.tensor_contents)
        assert all(part[key] == entry for key in entry.lookup_keys)
    assert len(part.to_pandas()) == len(part)
    assert f"A part of the log: {len(part)} of {len(whole)} tensors" in str(part)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs)
def test_a_part_of_a_random_program_agrees_with_the_whole(steps) -> None:
    history = tl.log_forward_pass(Program(steps), program_inputs())
    part = history.subgraph(history.layer_list[::2])
    assert part.layer_labels == history.layer_labels[::2]
    check_is_part(part, history)
    part.to_json()
    part.explore(None)
    part.summary()


def test_a_part_is_drawn_explored_pickled_and_cut_again(tmp_path: Path) -> None:
    history = tl.log_forward_pass(Recurrent(), torch.rand(2, 4))
    part = history.subgraph(history.between("linear_1_1:2", "linear_1_1:3"))
    assert part.layer_labels == ["linear_1_1:2", "add_1_2:2", "mul_1_3:2", "linear_1_1:3"]
    source = part.render_graph(vis_outpath=tmp_path / "part.gv", vis_save_only=True).source
    assert "linear_1_1:2" in source
    assert "linear_1_1:4" not in source
    again = pickle.loads(pickle.dumps(part))
    check_is_part(again, history)
    assert again.subgraph("linear_1_1:3").layer_labels == ["linear_1_1:3"]
    with pytest.raises(ValueError, match="A part of a history cannot be saved to a file"):
        part.save("part.safetensors")


def test_an_entry_of_another_history_is_refused() -> None:
    one: Any
    one, other = (tl.log_forward_pass(MLP(), torch.rand(2, 4)) for _ in range(2))
    with pytest.raises(ValueError, match="a is an entry of another history: linear_1_1"):
        one.between(other["linear_1_1"], "output_1")
    with pytest.raises(ValueError, match="layers names 'fc9'"):
        one.subgraph("fc9")
    with pytest.raises(TypeError, match="b must be a key, an entry, or a list of them, got None"):
        one.between("fc1", None)


def test_questions_take_time_in_proportion_to_the_graph() -> None:
    class Long(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(self.length):
                x = x + torch.sin(x * number)
            return x

    def work(length: int) -> int:
        history = tl.get_model_metadata(Long(length), torch.rand(2))
        len(history)

        def ask() -> None:
            history.between(0, -1)
            history.longest_path()
            history.find("sin", shape=(2,))
            history.modules_between(0, -1)
            history.residuals()
            history.subgraph(history.find("sin"))

        return lines_run(ask)

    assert work(2_000) < 11 * work(200)
