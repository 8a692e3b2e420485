"""A process that is killed leaves a trace in which everything that the journal has can be read."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._trace import stream

SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch import nn
    import torchlens as tl
    from torchlens._capture.memory import memory_watch
    from torchlens._trace import tailing

    torch.set_num_threads(1)
    if sys.argv[2] == "large":  # values leave while the model runs
        tailing._Outflow.limit = 3_000
        memory_watch._INTERVAL = 0.0
        memory_watch.OutflowWatch.interval = -1.0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))
    tail = tl.tail(model, sys.argv[1], max_shard_bytes=60_000)
    with tail as m:
        call = 0
        while True:
            call += 1
            m(torch.full((8, 16), float(call)))
            while not tail._scribe.num_written:
                pass
            print(call, flush=True)
    """
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))


def killed(path: Path, kind: str, seed: int) -> None:
    """Runs the script and kills it at some moment, after a number of calls and then some."""
    wait = random.Random(seed)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), kind],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for _ in range(wait.randint(1, 12)):
        assert process.stdout.readline()
    for _ in range(wait.randint(0, 200_000)):
        pass
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no such signal here")
@pytest.mark.parametrize(("kind", "seed"), [("small", 1), ("large", 3), ("large", 4)])
def test_every_tensor_in_the_journal_loads_with_its_operation_and_module(
    kind: str, seed: int, tmp_path: Path
):
    path = tmp_path / "trace.safetensors"
    killed(path, kind, seed)
    assert not path.exists()
    lines = [
        json.loads(line)
        for line in (tmp_path / "trace.safetensors.journal").read_bytes().split(b"\n")[1:-1]
    ]
    names = [
        line["name"]
        for line in lines
        if "name" in line and not line["name"].startswith("torchlens/")
    ]
    assert names
    values = tl.read_trace(path)
    assert set(names) <= set(values)
    reference = model()
    layers: dict[str, nn.Module] = {
        address: module for address, module in reference.named_modules() if address.count(".") == 1
    }
    for name in names:
        call, _, rest = name.partition("/")
        x = torch.full((8, 16), float(call))
        if rest not in ("input.input", "output"):
            for address, module in layers.items():
                x = module(x)
                if rest.startswith(f"{address}/"):
                    break
        elif rest == "output":
            x = reference(x)
        torch.testing.assert_close(values[name], x)
    calls = sorted({int(name.partition("/")[0]) for name in names})
    with pytest.warns(UserWarning, match=r"was not closed. Missing: ") as told:
        histories = {call: tl.load(path, call=call) for call in calls}
    for call, history in histories.items():
        own = {name for name in values if name.startswith(f"{call}/")}
        assert len(history) == len(own)
        for entry in history:
            if entry.layer_type in ("linear", "relu"):
                where = entry.containing_module_origin
                assert where is not None
                kind_of = {"Linear": "linear", "ReLU": "relu"}[
                    history.module_types[where.partition(":")[0]]
                ]
                assert kind_of == entry.layer_type == entry.func_applied_name
                assert torch.equal(
                    entry.tensor_contents,
                    values[f"{call}/{where.partition(':')[0]}/{entry.layer_type}"],
                )
    unfinished = {line["call"] for line in lines if "row" in line} - {
        line["done"] for line in lines if "done" in line
    }
    assert all(f"the rest of call {call}," in str(told[0].message) for call in unfinished)


def test_a_trace_can_be_looked_at_while_it_is_written_and_is_whole_when_closed(tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    x = torch.rand(8, 16)
    tail = tl.tail(model(), path)
    with tail as m:
        m(x)
        while tail._scribe.num_written < 1:
            pass
        with pytest.warns(UserWarning, match="whatever came after its last call"):
            history = tl.load(path)
        value = history["relu_12"].tensor_contents
        assert torch.equal(value, m(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(tl.load(path, call=2)["relu_12"].tensor_contents, value)


def test_an_unfinished_trace_of_the_same_name_is_replaced(tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    tail = tl.tail(model(), path)
    tail.__enter__()(torch.rand(8, 16))
    tail._unpatch()
    assert tail._scribe is not None
    tail._scribe._stream.abandon()
    (path.parent / "trace.safetensors.2.partial").write_bytes(b"")
    with tl.tail(model(), path) as m:
        m(torch.rand(8, 16))
    assert len(tl.load(path)) == 26
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b'{"torchlens":', b'{"torchlens":"2"}\n'])
def test_a_trace_that_was_begun_and_has_nothing_yet_hides_no_older_one(
    tmp_path: Path, content: bytes
):
    path = tmp_path / "trace.safetensors"
    with tl.tail(model(), path) as m:
        m(torch.rand(8, 16))
    journal = tmp_path / "trace.safetensors.journal"
    journal.write_bytes(content)
    os.utime(journal, ns=(path.stat().st_mtime_ns + 10**9,) * 2)
    assert len(tl.load(path)) == 26
    path.unlink()
    with pytest.raises(tl.TraceError, match=r"nothing is in it yet|holds no call of a model"):
        tl.load(path)


@pytest.mark.parametrize("num_bytes", [1 << 24, 3_000])
def test_a_trace_that_outgrows_its_first_file_loses_nothing(
    tmp_path: Path, monkeypatch: Any, num_bytes: int
):
    """By the length of its header, and by its bytes: before it is closed, and after."""
    monkeypatch.setattr(stream, "_SHORT", num_bytes)
    path = tmp_path / "trace.safetensors"
    own = model()
    xs = [torch.rand(8, 16) for _ in range(30)]
    with torch.no_grad():
        expected = [own(x) for x in xs]
        tail = tl.tail(own, path)
        with tail as m:
            for x in xs:
                m(x)
            assert {file.name for file in tmp_path.iterdir()} == {
                f"trace.safetensors.{ending}" for ending in ("partial", "0.partial", "journal")
            }
            with pytest.warns(UserWarning, match="not closed"):
                unfinished = tl.load(path, call=30)
            assert torch.equal(unfinished["output_1"].tensor_contents, expected[-1])
            with pytest.warns(UserWarning, match="not closed"):
                assert torch.equal(tl.load(path, call=1)["output_1"].tensor_contents, expected[0])
    assert list(tmp_path.iterdir()) == [path]
    for number, result in enumerate(expected, start=1):
        assert torch.equal(tl.load(path, call=number)["output_1"].tensor_contents, result)
