"""Files from strangers: a clear error or harmless text, no memory before it is checked, no path
outside the folder.
"""

import json
import os
import random
import resource
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Recurrent
from torchlens._cli.main import main

safetensors = pytest.importorskip("safetensors.torch")

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
METADATA = {"torchlens": "3", "format": "pt"}


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": F32 | changes}


BAD: dict[str, bytes] = {
    "nothing": b"",
    "a few bytes": b"\1\2\3",
    "a header of 2**63 bytes": file_of({}, length=2**63),
    "a header of more than 100 MB": file_of({}, length=100_000_001),
    "a header longer than the file": file_of({}, length=1000),
    "no object": file_of([1]),
    "no JSON": file_of(b'{"a": '),
    "no text": file_of(b'{"a\xff": 1}'),
    "nested too deep": file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "an overlap": file_of({"a": F32, "b": F32}),
    "a hole": file_of({"a": F32, "b": F32 | {"data_offsets": [12, 20]}}, bytes(20)),
    "trailing bytes": file_of({"a": F32}, bytes(9)),
    "too few bytes": file_of({"a": F32}, bytes(7)),
    "an overflowing shape": file_of(entry(shape=[2**32, 2**32, 2**32])),
    "sizes that overflow to the right number": file_of(entry(shape=[2**63 + 1, 2])),
    "a negative size": file_of(entry(shape=[-2])),
    "half a size": file_of(entry(shape=[2.0])),
    "offsets that go back": file_of(entry(data_offsets=[8, 0])),
    "offsets beyond all": file_of(entry(data_offsets=[0, 10**50])),
    "a type of its own": file_of(entry(dtype="X99")),
    "an escape code as a type": file_of(entry(dtype="\x1b]0;owned\x07")),
    "an entry that is none": file_of({"a": 3}),
    "metadata that is no text": file_of({"__metadata__": {"a": 1}, "a": F32}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_a_clear_error_and_takes_no_memory(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (tl.load, tl.read_trace, tl.magnify):
        with pytest.raises(tl.TraceError, match="not a readable safetensors file") as caught:
            read(path)
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 2**10  # KB
    assert main(["show", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_what_is_no_ordinary_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(tl.TraceError, match="is not a regular file"):
        tl.load(tmp_path / "pipe")
    with pytest.raises(tl.TraceError, match="is a folder"):
        tl.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", "c:d", "a\0b", 7, None,
        "a" * 300, "a\ud800",
    ],
)  # fmt: skip
def test_an_index_names_files_beside_it(name: Any, tmp_path: Path):
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(file_of({"a": F32}))
    index = folder / "x.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
    with pytest.raises(tl.TraceError, match=r"must name files beside it"):
        tl.read_trace(index)


def test_nor_by_a_link(tmp_path: Path):
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(file_of({"a": F32}))
    (folder / "x.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "x.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x.safetensors"}})
    )
    with pytest.raises(tl.TraceError, match=r"must name files beside it"):
        tl.read_trace(folder / "x.safetensors.index.json")


def test_an_index_that_makes_no_sense(tmp_path: Path):
    index = tmp_path / "x.safetensors.index.json"
    (tmp_path / "x").write_bytes(file_of({"a": F32}))
    for content in (
        "[]",
        "{",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "y"}}',
        '{"weight_map": {"b": "x"}}',
        "[" * 10**5,
    ):
        index.write_text(content)
        with pytest.raises(tl.TraceError):
            tl.read_trace(index)
    index.write_text('{"weight_map": {"a": "x", "b": "x"}}')
    with pytest.raises(tl.TraceError, match="do not agree where 'b' is"):
        tl.read_trace(index)


# -- graphs
# --------------------------------------------------------------------------------------------------


def parts_of(path: Path) -> tuple[dict[str, torch.Tensor], Any, Any]:
    tensors = safetensors.load_file(path)
    graph, call = (
        json.loads(tensors.pop(f"torchlens/{word}/1").numpy().tobytes())
        for word in ("graph", "call")
    )
    return tensors, graph, call


def written(path: Path, tensors: dict[str, torch.Tensor], graph: Any, call: Any) -> None:
    texts = {"torchlens/graph/1": graph, "torchlens/call/1": call}
    flat = {
        name: torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)
        for name, text in texts.items()
    }
    safetensors.save_file({**tensors, **flat}, path, METADATA)


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], Any, Any]:
    torch.manual_seed(0)
    path = tmp_path / "trace.safetensors"
    history = tl.log_forward_pass(
        Recurrent(), torch.rand(2, 4), save_gradients=True, save_function_args=True
    )
    history["output_1"].tensor_contents.sum().backward()
    history.save(path, params=True)
    return path, *parts_of(path)


def look(path: Path) -> None:
    """All that can be done with a history."""
    history = tl.load(path)
    str(history), history.to_pandas(), history.to_json(), str(history.summary())
    for one in history:
        str(one), one.tensor_contents, one.grad_contents, one.parent_params, one.creation_args
    history.explore(None)
    history.render_graph(
        "rolled", vis_outpath=str(path.with_suffix(".gv")), vis_fileformat="gv", vis_save_only=True
    )


def test_what_was_taken_apart_and_put_together_is_the_same(parts: Any):
    path, tensors, graph, call = parts
    before = str(tl.load(path))
    written(path, tensors, graph, call)
    assert str(tl.load(path)) == before
    look(path)


def a_cycle(graph: Any, call: Any) -> None:
    graph["graph"]["reads"][1] = [len(graph["graph"]["reads"]) - 1]


def a_loop_of_rows(graph: Any, call: Any) -> None:
    graph["rows"]["references"][1] = [5]


def modules_inside_each_other(graph: Any, call: Any) -> None:
    graph["module_calls"][1][2] = 2


def an_output_of_the_model_as_of_a_module(graph: Any, call: Any) -> None:
    graph["module_exits"].append([0, [1]])


def a_view_beyond_its_memory(graph: Any, call: Any) -> None:
    call["values"][1] = {
        "of": {"key": "fc/linear"},
        "dtype": "float32",
        "view": [10**6, [4], [1]],
    }


def a_view_with_negative_strides(graph: Any, call: Any) -> None:
    call["values"][1] = {
        "of": {"key": "fc/linear"},
        "dtype": "float32",
        "view": [4, [4], [-1]],
    }


def sizes_without_end(graph: Any, call: Any) -> None:
    call["values"][1] = {"key": "fc/linear", "shape": [2**40, 2**40, 4]}


def memory_without_end(graph: Any, call: Any) -> None:
    call["values"][1] = {"key": "fc/linear", "strides": [2**35, 1]}


def a_layout_that_overlaps(graph: Any, call: Any) -> None:
    call["values"][1] = {"key": "fc/linear", "strides": [1, 1]}


def a_tensor_that_is_not_there(graph: Any, call: Any) -> None:
    call["values"][1] = "../../etc/passwd"


def a_parameter_without_end(graph: Any, call: Any) -> None:
    graph["params"][0][2] = [2**39, 2**39]


def a_dtype_that_is_none(graph: Any, call: Any) -> None:
    graph["words"][0] = "load"


HOSTILE = [
    a_cycle, a_loop_of_rows, modules_inside_each_other, an_output_of_the_model_as_of_a_module,
    a_view_beyond_its_memory, a_view_with_negative_strides, sizes_without_end, memory_without_end,
    a_layout_that_overlaps,
    a_tensor_that_is_not_there, a_parameter_without_end, a_dtype_that_is_none,
]  # fmt: skip


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
def test_a_graph_that_makes_no_sense_is_a_clear_error(
    change: Callable[[Any, Any], None], parts: Any
):
    path, tensors, graph, call = parts
    change(graph, call)
    written(path, tensors, graph, call)
    with pytest.raises(tl.TraceError):
        look(path)


def test_what_a_loaded_history_prints_has_no_escape_codes(parts: Any, tmp_path: Path):
    path, tensors, graph, call = parts
    graph["model"] = "\x1b[2JModel"
    graph["places"] = [
        ["\x1b[31m.py", line, "\x1b[31mred", *rest] for _, line, _, *rest in graph["places"]
    ]
    gradfuncs = set(graph["rows"]["gradfunc"])
    graph["words"] = [
        f"\x1b[31m{word}" if number in gradfuncs else word
        for number, word in enumerate(graph["words"])
    ]
    written(path, tensors, graph, call)
    history = tl.load(path)
    shown = [str(history), str(history.to_pandas()), *map(str, history)]
    assert any(r"\x1b" in text for text in shown)
    assert not any("\x1b" in text for text in shown)


def test_functions_and_objects_stay_text(parts: Any, tmp_path: Path):
    path, tensors, graph, call = parts
    graph["operations"] = [
        form
        if isinstance(form, str)
        else [["os", "system", "os.system", ["command"], "system"], *form[1:]]
        for form in graph["operations"]
    ]
    graph["model"] = "\x1b[2JModel\n\n"
    written(path, tensors, graph, call)
    history = tl.load(path)
    applied = history["linear_1_1:1"].func_applied
    assert applied is not None
    assert applied is not os.system
    with pytest.raises(
        tl.TorchLensError, match=r"This history was loaded from a file, and os\.system did not come"
    ):
        applied("touch /tmp/owned")


def test_names_are_never_printed_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = nn.Sequential()
    model.add_module("\x1b[31mred\n//up", nn.Linear(2, 2))
    path = tmp_path / "t.safetensors"
    tl.log_forward_pass(model, torch.rand(1, 2)).save(path)
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[31mred\n//up" in shown
    assert not any("\x1b" in name or "\n" in name for name in safetensors.load_file(path))


# -- at random
# --------------------------------------------------------------------------------------------------


WEIRD: list[Any] = [
    None,
    -1,
    0,
    1,
    10**6,
    2**63,
    2**70,
    1.5,
    float("inf"),
    True,
    "",
    "\x1b[31m",
    "a" * 300,
    [],
    [[]],
    {},
    {"key": 1},
    {"tensor": {}},
]


def mutated(document: Any, choose: random.Random) -> None:
    """Changes one thing somewhere in JSON."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = choose.choice(keys)
        inner = document[key]
        if isinstance(inner, dict | list) and inner and choose.random() < 0.8:
            document = inner
            continue
        change = choose.random()
        if change < 0.15 and isinstance(document, list):
            del document[key]
        elif change < 0.3 and isinstance(document, list):
            document.append(choose.choice(WEIRD))
        elif change < 0.4 and isinstance(inner, int) and not isinstance(inner, bool):
            document[key] = inner + choose.choice([-1, 1, 100])
        else:
            document[key] = choose.choice(WEIRD)
        return


def survives(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            look(path)
        except (tl.TorchLensError, FileNotFoundError):
            return


def test_files_changed_at_random_are_errors_or_harmless(parts: Any):
    path, tensors, graph, call = parts
    choose = random.Random(7)
    texts = json.dumps(graph), json.dumps(call)
    for _ in range(40):
        documents = tuple(map(json.loads, texts))
        mutated(choose.choice(documents), choose)
        written(path, tensors, *documents)
        survives(path)
    content = path.read_bytes()
    for _ in range(60):
        flipped = bytearray(content)
        for _ in range(choose.randint(1, 3)):
            flipped[choose.randrange(min(len(flipped), 6000))] = choose.randrange(256)
        path.write_bytes(flipped[: choose.choice([len(flipped), choose.randrange(len(flipped))])])
        survives(path)
