"""`tail`: every call of a model made inside a block is in the file, and the loop goes on as without
it.
"""

import errno
import gc
import json
import os
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, Recurrent
from tests.portable.facts import differences
from tests.trace.test_save_load import facts_without_functions
from torchlens._trace import call_writer, shards
from torchlens._trace import tail as tailing

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.safetensors"


def times_left_out(facts: dict[str, Any]) -> dict[str, Any]:
    """Two runs of a model take different times, and pages and tables show them. A tail computes no
    digests: it is to cost a training loop little.
    """
    shown = (
        "receipt",
        "time",
        "seconds",
        "printed",
        "summary",
        "json",
        "pandas",
        "page",
        "func_call_stack",
        "func_applied",
        "parent_params",
    )
    return {name: fact for name, fact in facts.items() if not any(word in name for word in shown)}


def test_a_trace_says_what_made_it(path: Path) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), torch.rand(2, 4)
    with tl.tail(model, path):
        model(x)
    wanted = tl.log_forward_pass(model, x).receipt.to_dict()
    assert tl.load(path).receipt.to_dict() == wanted | {"weights": None, "inputs": None}


def test_each_call_is_a_history_of_its_own(path: Path):
    model, inputs = Recurrent(), [torch.rand(2, 4) for _ in range(3)]
    with tl.tail(model, path) as m:
        assert m is model
        outputs = [m(inputs[0]), model(inputs[1]), m(inputs[2])]
    for number, x in enumerate(inputs, start=1):
        history = tl.load(path, call=number)
        expected = tl.log_forward_pass(model, x)
        assert (
            differences(*(times_left_out(facts_without_functions(h)) for h in (expected, history)))
            == {}
        )
        assert torch.equal(history[history.output_layers[0]].tensor_contents, outputs[number - 1])


def test_the_stock_library_reads_what_was_written_and_finds_each_pass(path: Path):
    model, x = Recurrent(), torch.rand(2, 4)
    with tl.tail(model, path) as m:
        m(x)
        m(x * 2)
    found = safetensors.load_file(path)
    history = tl.log_forward_pass(model, x * 2)
    values = tl.read_trace(path, "2/*")
    assert len(values) == len(history)
    for name, value in values.items():
        if name in found:
            assert torch.equal(found[name], value)
    for number in range(1, history.layer_num_passes["linear_1_1"] + 1):
        key = "2/fc/linear" if number == 1 else f"2/fc:{number}/linear"
        assert torch.equal(values[key], history[f"linear_1_1:{number}"].tensor_contents)


def odd(self, x, *, scale=None, extra=None, flag=True):
    y = self.fc(x) * (2 if scale is None else scale)
    return {"y": y, "none": None, "number": 3, "parts": list(y.unbind(0)), "flag": flag}


def test_keywords_dicts_none_scalars_and_ragged_sizes(path: Path):
    model = Model(odd, fc=nn.Linear(4, 3))
    with tl.tail(model, path) as m:
        for size in (1, 4, 2):
            result = m(
                torch.rand(size, 4), scale=torch.tensor(2.0), extra={"a": None}, flag=size == 1
            )
            assert len(result["parts"]) == size
    for number, size in enumerate((1, 4, 2), start=1):
        history = tl.load(path, call=number)
        assert history["output.y"].tensor_shape == (size, 3)
        assert [entry.tensor_shape for entry in history].count((3,)) == 2 * size
        assert history["input.scale"].tensor_contents == 2


def test_a_training_loop_computes_what_it_computes_without(path: Path):
    def train(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.rand(8, 4)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(6, 2)
    )
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(model)
    buffers = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    with tl.tail(model, path, params=True) as m:
        found = train(m)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in buffers.items())
    first = tl.load(path, call=1)
    assert torch.equal(first["linear_1"].parent_params[0], start["0.weight"])
    torch.manual_seed(1)
    x = torch.rand(8, 4)
    assert torch.equal(
        first["linear_1"].tensor_contents,
        nn.functional.linear(x, start["0.weight"], start["0.bias"]),
    )
    assert "__call__" not in vars(nn.Sequential)


def test_only_some_calls(path: Path):
    model = MLP()
    tail = tl.tail(model, path, every=3)
    with tail as m:
        outputs = [m(torch.rand(2, 4)) for _ in range(7)]
    assert tail.num_calls == 3
    assert list(tl.read_trace(path, "*/output*")) == ["1/output", "4/output", "7/output"]
    assert torch.equal(tl.read_trace(path)["4/output"], outputs[3])


FILTERS: dict[str, tuple[Any, set[str]]] = {
    "one module": ("2", {"2/linear"}),
    "a pattern": (["[02]"], {"0/linear", "2/linear"}),
    "by path": (lambda path, node: "1" in path, {"1/relu"}),
    "by node": (lambda path, node: isinstance(node, nn.Linear), {"0/linear", "2/linear"}),
    "names": ("*/relu", {"1/relu"}),
    "names of the model's ends": (["/output", "*/linear"], {"0/linear", "2/linear", "output"}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_layers_are_chosen_by_path_node_or_name(name: str, path: Path):
    layers, expected = FILTERS[name]
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    x = torch.rand(2, 4)
    with tl.tail(model, path, layers) as m:
        m(x)
        m(x + 1)
    values = tl.read_trace(path)
    assert set(values) == {f"{call}/{key}" for call in (1, 2) for key in expected}
    if "2/1/relu" in values:
        assert torch.equal(values["2/1/relu"], model[0](x + 1).relu())
    history = tl.load(path, call=2)
    assert len(history) == 5  # the graph is whole
    assert len(history.layers_with_saved_activations) == len(expected)


def test_a_wrong_choice_says_what_there_is(path: Path):
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="has no such module"):
        tl.tail(model, path, "fc")
    with pytest.raises(TypeError, match="layers must be"):
        tl.tail(model, path, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every must be at least 1"):
        tl.tail(model, path, every=0)


def test_a_model_that_raises_raises_and_its_call_is_there_up_to_then(path: Path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    with tl.tail(model, path) as m, pytest.raises(RuntimeError, match="mat1"):
        m(torch.rand(2, 4))
    history = tl.load(path)
    assert history.layer_labels == ["input_1_0", "linear_1_1"]
    with pytest.raises(KeyError), tl.tail(model, path) as m:
        raise KeyError("in the block")
    assert "__call__" not in vars(nn.Sequential)


def test_what_is_beyond_max_bytes_is_counted_and_told(path: Path):
    model = MLP()
    tail = tl.tail(model, path, max_bytes=1)
    m = tail.__enter__()
    for _ in range(3):
        m(torch.rand(2, 4))
    with pytest.warns(
        UserWarning, match="2 of 3 calls are not in trace.safetensors: max_bytes was reached"
    ):
        tail.__exit__(None, None, None)
    assert (tail.num_calls, tail.num_dropped) == (1, 2)


def test_a_full_disk_ends_the_recording_not_the_loop(path: Path, monkeypatch: pytest.MonkeyPatch):
    model, x = MLP(), torch.rand(2, 4)
    written = []

    def write(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments)

    original = shards._write_file
    monkeypatch.setattr(shards, "_write_file", write)
    monkeypatch.setattr(call_writer, "_FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(call_writer, "_FLUSH_SHARE", 0.0)
    tail = tl.tail(model, path)
    m = tail.__enter__()
    outputs = [m(x) for _ in range(6)]
    with pytest.warns(
        UserWarning,
        match=r"calls are not in trace.safetensors: writing failed \(OSError: .*No space left",
    ):
        tail.__exit__(None, None, None)
    assert all(torch.equal(output, model(x)) for output in outputs)
    assert tail.num_calls == 2
    assert tl.load(path, call=2).layer_labels == tl.log_forward_pass(model, x).layer_labels


def test_values_leave_while_the_model_runs(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also what is written in place later, and views; the tensors do not stay in memory."""
    counts: list[int] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        alive = []
        for step in range(40):
            y = x + step
            alive.append(weakref.ref(y))
            x = y[:, :2].clone().relu_().repeat(1, 2)
            y.mul_(2)
            y[0].add_(1)
        gc.collect()
        counts.append(sum(tensor() is not None for tensor in alive))
        return x

    monkeypatch.setattr(tailing, "_LIMIT", 200)
    monkeypatch.setattr(tailing._Outflow, "limit", 200)
    monkeypatch.setattr("torchlens._capture.memory.outflow._INTERVAL", 0.0)
    monkeypatch.setattr("torchlens._capture.memory.outflow.OutflowWatch.interval", -1.0)
    x = torch.rand(2, 4)
    model = Model(forward)
    with tl.tail(model, path) as m:
        m(x)
    expected = tl.log_forward_pass(model, x)
    assert counts[0] < 8
    assert counts[1] == 40
    history = tl.load(path)
    changed = differences(
        *(times_left_out(facts_without_functions(one)) for one in (history, expected))
    )
    assert {
        name for name in changed if not name.endswith("tensor_contents")
    } == set()  # what was copied has other strides
    assert all(
        torch.equal(one.tensor_contents, other.tensor_contents)
        for one, other in zip(history, expected, strict=True)
    )


def test_several_files_with_an_index_as_hugging_face_has_it(path: Path):
    model, x = MLP(), torch.rand(2, 4)
    with tl.tail(model, path, max_shard_bytes=100) as m:
        m(x)
        m(x + 1)
    names = sorted(file.name for file in path.parent.iterdir())
    count = len(names) - 1
    assert count > 2
    assert names == [
        *(f"trace-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)),
        "trace.safetensors.index.json",
    ]  # fmt: skip
    index = json.loads((path.parent / names[-1]).read_text())
    found = {}
    for name in names[:-1]:
        for key, value in safetensors.load_file(path.parent / name).items():
            assert index["weight_map"][key] == name
            found[key] = value
    assert index["metadata"]["total_size"] == sum(
        value.numel() * value.element_size() for value in found.values()
    )
    for way in (path, path.parent / names[-1]):
        assert torch.equal(tl.load(way, call=2)["linear_1"].tensor_contents, found["2/fc1/linear"])


def calls_in(path: Path) -> list[int]:
    return sorted({int(name.partition("/")[0]) for name in tl.read_trace(path, "*/output*")})


def test_a_log_of_the_model_inside_the_block_is_a_log_and_counts_as_a_call(path: Path):
    model, x = MLP(), torch.rand(2, 4)
    tail = tl.tail(model, path, params=True)
    m = tail.__enter__()
    history = tl.log_forward_pass(model, x)
    m(x)
    with pytest.warns(
        UserWarning,
        match="1 of 2 calls are not in trace.safetensors: they were made inside a call that",
    ):
        tail.__exit__(None, None, None)
    assert (tail.num_calls, tail.num_dropped) == (1, 1)
    assert tl.load(path).layer_labels == history.layer_labels
    assert calls_in(path) == [2]
    assert len(tl.read_trace(path, "params/")) == len(list(model.parameters()))


@pytest.mark.parametrize("inner", ["the same model", "a part of it"])
def test_a_call_that_another_tail_records_is_counted_and_told(inner: str, path: Path):
    model, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), path.with_name("other.safetensors")
    tails: list[Any] = [
        tl.tail(model, path),
        tl.tail(model if inner == "the same model" else model[0], other),
    ]
    for tail in tails:
        tail.__enter__()
    for _ in range(3):
        model(torch.rand(2, 4))
    recorded, outside = (tails[1], tails[0]) if inner == "the same model" else tails
    recorded.__exit__(None, None, None)
    with pytest.warns(UserWarning, match="3 of 3 calls are not in .*another log or tail"):
        outside.__exit__(None, None, None)
    assert sorted((tail.num_calls, tail.num_dropped) for tail in tails) == [(0, 3), (3, 0)]
    assert "__call__" not in vars(nn.Sequential)


def test_calls_that_are_missing_for_several_reasons_are_told_by_reason(path: Path):
    model, x = MLP(), torch.rand(2, 4)
    tail = tl.tail(model, path, max_bytes=1)
    m = tail.__enter__()
    tl.log_forward_pass(model, x)
    for _ in range(3):
        m(x)
    with pytest.warns(
        UserWarning,
        match="3 of 4 calls .*: 1 because they were made .*; 2 because max_bytes was reached",
    ):
        tail.__exit__(None, None, None)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_tails_may_end_in_any_order_and_leave_nothing_in_the_class(first_to_end: int, path: Path):
    models = MLP(), MLP()
    paths = [path, path.with_name("other.safetensors")]
    tails = [tl.tail(model, own) for model, own in zip(models, paths, strict=True)]
    for tail in tails:
        tail.__enter__()
    for number in (first_to_end, 1 - first_to_end):
        for model in models:
            model(torch.rand(2, 4))
        tails[number].__exit__(None, None, None)
    assert sorted(tail.num_calls for tail in tails) == [1, 2]
    assert "__call__" not in vars(MLP)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("at", ["between calls", "inside a call"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_records_nothing_and_the_parents_file_stays_right(at: str, path: Path):
    children: list[int] = []

    def fork(model: Any, x: torch.Tensor) -> torch.Tensor:
        if at == "inside a call" and not children:
            children.append(os.fork())
        return x * 2

    tail = tl.tail(Model(fork), path)
    with tail as m:
        is_child = False
        try:
            m(torch.ones(3))
            if at == "between calls":
                children.append(os.fork())
            is_child = not children[0]
            if is_child:
                m(torch.full((3,), 9.0))
                tail.__exit__(None, None, None)
        finally:
            if is_child:
                os._exit(0 if sys.exc_info()[0] is None else 1)
        assert os.waitpid(children[0], 0)[1] == 0
        m(torch.full((3,), 2.0))
    inputs = [tl.load(path, call=number)["input_1"].tensor_contents for number in (1, 2)]
    assert [value.tolist() for value in inputs] == [[1.0] * 3, [2.0] * 3]
    assert calls_in(path) == [1, 2]


def loop(self, x):
    for _ in range(3):
        x = torch.tanh(self.fc(x))
    return x


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("/tanh", ["tanh", "tanh:2", "tanh:3"]),
        ("/tanh:2", ["tanh:2"]),
        ("/tanh:1", ["tanh"]),
        ("fc/linear", ["fc/linear", "fc:2/linear", "fc:3/linear"]),
        ("fc:3/linear", ["fc:3/linear"]),
        ("fc:1/*", ["fc/linear"]),
    ],
)
def test_a_name_without_a_number_means_every_pass(key: str, names: list[str], path: Path):
    with tl.tail(Model(loop, fc=nn.Linear(4, 4)), path, key) as m:
        m(torch.rand(2, 4))
    assert sorted(tl.read_trace(path)) == sorted(f"1/{name}" for name in names)


@pytest.mark.parametrize(
    "layers", ["/add", ["0/linear", "*/nope"], lambda path, node: path == ["none"], "blocks"]
)
def test_layers_that_fit_nothing_are_told_with_what_there_is(layers: Any, path: Path):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    model.blocks = nn.ModuleList()
    model.__class__ = type(
        "Net", (nn.Sequential,), {"forward": lambda self, x: self[1](self[0](x))}
    )
    tail = tl.tail(model, path, layers)
    tail.__enter__()(torch.rand(2, 4))
    text = "layers chose no module that Net called. Modules that it called: '0', '1'."
    if isinstance(layers, list) or layers == "/add":
        key = "*/nope" if isinstance(layers, list) else layers
        there = "There are '/input.x', '0/linear', '1/relu', '/output'."
        text = f"layers names '{key}', and Net calls no such module or operation. {there}"
    with pytest.warns(UserWarning, match=re.escape(text)):
        tail.__exit__(None, None, None)


def test_a_filter_for_a_model_without_modules_is_told_that_there_are_none(path: Path):
    tail = tl.tail(nn.Linear(2, 2), path, lambda path, node: True)
    tail.__enter__()(torch.rand(1, 2))
    with pytest.warns(UserWarning, match="Modules that it called: none"):
        tail.__exit__(None, None, None)


def test_nothing_is_left_behind(path: Path):
    model = MLP()
    with tl.tail(model, path) as m:
        m(torch.rand(2, 4))
    reference = weakref.ref(model)
    assert list(path.parent.iterdir()) == [path]
    del model, m
    gc.collect()
    assert reference() is None


def test_magnify_prints_what_there_is(path: Path, capsys: pytest.CaptureFixture[str]):
    with tl.tail(MLP(), path) as m:
        m(torch.rand(2, 4))
        m(torch.rand(2, 4))
    tl.magnify(path)
    assert "2 calls" in capsys.readouterr().out
    tl.magnify(path, "relu_1", call=2)
    assert "Layer relu_1_2" in capsys.readouterr().out


def test_small_calls_are_written_when_they_end_and_large_ones_in_the_background(path: Path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    tail = tl.tail(model, path)
    with tail as m:
        writer: Any = tail._writer
        m(torch.rand(2, 4))
        assert writer._background is None
        m(torch.rand(400_000, 4))
        assert writer._background is not None
        m(torch.rand(2, 4))
    assert tail.num_calls == 3
    assert [tuple(tl.load(path, call=number)[0].tensor_shape) for number in (1, 2, 3)] == [
        (2, 4),
        (400_000, 4),
        (2, 4),
    ]


class WritesToItsInput(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2


def test_calls_whose_inputs_share_memory_in_one_of_them_have_graphs_of_their_own(path: Path):
    with tl.tail(WritesToItsInput(), path) as m:
        x = torch.zeros(4)
        m(x, x[:2])
        m(torch.zeros(4), torch.zeros(2))
        m(torch.zeros(4), torch.zeros(2))
        for start in range(3):  # batches of one tensor are the same, wherever they are in it
            m(torch.zeros(8)[start : start + 4], torch.zeros(2))
    parents = [tl.load(path, call=call)["mul_1"].parent_layers for call in range(1, 7)]
    assert parents == [["add_1_1"], *[["input_2_0"]] * 5]
    assert sum("graph/" in name for name in safetensors.load_file(path)) <= 3


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Any] = [1, 1.0, True]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.numbers.pop(0)


def test_calls_with_arguments_that_are_equal_but_not_the_same_have_graphs_of_their_own(path: Path):
    with tl.tail(Adds(), path) as m:
        for _ in range(3):
            m(torch.ones(2))
    found = [tl.load(path, call=call)["add_1"].func_position_args_non_tensor for call in (1, 2, 3)]
    assert list(map(repr, found)) == ["[1]", "[1.0]", "[True]"]


class PicksWithAnArray(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[np.array([0, 2])] * 2


def test_an_argument_that_is_an_array_is_in_the_file(path: Path):
    model = PicksWithAnArray()
    with tl.tail(model, path) as m:
        m(torch.arange(4.0))
        m(torch.arange(4.0))
    for call in (1, 2):
        (found,) = tl.load(path, call=call)["getitem_1"].func_position_args_non_tensor
        assert found.tolist() == [0, 2]


def test_a_trace_for_each_step_has_the_graph_and_the_numbers_of_its_step(tmp_path: Path):
    model = MLP()
    for step in range(3):
        x = torch.rand(2, *tl.get_model_metadata(model, torch.rand(2, 4))[0].tensor_shape[1:])
        if step == 2:
            model.requires_grad_(False)
        with tl.tail(model, tmp_path / f"{step}.safetensors") as m:
            m(x)
        loaded, expected = tl.load(tmp_path / f"{step}.safetensors"), tl.log_forward_pass(model, x)
        assert (
            differences(*(times_left_out(facts_without_functions(h)) for h in (expected, loaded)))
            == {}
        )


def test_a_model_goes_when_it_is_dropped_after_its_tail(path: Path):
    model = MLP()
    with tl.tail(model, path) as m:
        m(torch.rand(2, 4))
    kept = weakref.ref(model)
    gc.disable()
    try:
        del model, m
        assert kept() is None
    finally:
        gc.enable()


class WritesThroughAView(nn.Module):
    """Returns what it wrote to after it was computed, so that the operation's result is not what
    comes out.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        row = y[0]
        row.zero_()
        return y


class HandsOn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("limit", "few"), [(1 << 30, 1 << 30), (1 << 30, 60), (100, 60), (100, 1 << 30), (0, 0)]
)
def test_what_modules_return_is_recorded_as_they_return_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, few: int
):
    """Whether the other values are held until the call is over, or let go while it runs."""
    monkeypatch.setattr(tailing._Outflow, "limit", limit)
    monkeypatch.setattr("torchlens._capture.memory.outflow._FEW", few)
    monkeypatch.setattr("torchlens._capture.memory.outflow._INTERVAL", 0.0)
    monkeypatch.setattr("torchlens._capture.memory.outflow.OutflowWatch.interval", -1.0)
    torch.manual_seed(0)
    layers = (
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        WritesThroughAView(),
        nn.ReLU(inplace=True),
        HandsOn(),
        nn.Tanh(),
    )
    model, x = (
        nn.Sequential(*layers, nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())),
        torch.rand(3, 4),
    )
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, result, name=name: outputs.update({name: result.clone()})
        )
        for name, module in model.named_modules()
        if name
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    with tl.tail(model, path, lambda path, node: path != ["5"]) as m:
        m(x)
    history = tl.load(path)
    for name, expected in outputs.items():
        entry = history[name]
        if name == "5":
            assert not entry.has_saved_activations
        else:
            assert torch.equal(entry.tensor_contents, expected), name
    returned = {history[name].layer_label_w_pass for name in outputs if name != "5"}
    assert {
        entry.layer_label_w_pass for entry in history if entry.has_saved_activations
    } == returned
    everything = tl.log_forward_pass(model, x)
    assert [entry.parent_layers for entry in history] == [
        entry.parent_layers for entry in everything
    ]
