"""A process that is killed leaves a trace of which all finished shards can be read."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._trace import call_writer
from torchlens._trace import tail as tailing

safetensors = pytest.importorskip("safetensors.torch")

SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch import nn
    import torchlens as tl
    from torchlens._capture.memory import outflow
    from torchlens._trace import call_writer
    from torchlens._trace import tail as tailing

    torch.set_num_threads(1)
    if sys.argv[2] == "large":  # values leave while the model runs
        tailing._Outflow.limit = 3_000
        outflow._INTERVAL = 0.0
        outflow.OutflowWatch.interval = -1.0
    call_writer._FLUSH_SECONDS = 0.02
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))
    with tl.tail(model, sys.argv[1], max_shard_bytes=60_000) as m:
        call = 0
        while True:
            call += 1
            m(torch.full((8, 16), float(call)))
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
def test_every_tensor_in_a_finished_shard_loads(kind: str, seed: int, tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    killed(path, kind, seed)
    assert not path.exists()
    shards = sorted((tmp_path / "trace.safetensors.partial").glob("*.safetensors"))
    stock = {
        name: value
        for shard in shards
        for name, value in safetensors.load_file(shard).items()
        if not name.startswith("torchlens/")
    }
    assert stock
    values = tl.read_trace(path)
    assert set(stock) <= set(values)
    reference = model()
    layers: dict[str, nn.Module] = {
        address: module for address, module in reference.named_modules() if address.count(".") == 1
    }
    for name in stock:
        call, _, rest = name.partition("/")
        x = torch.full((8, 16), float(call))
        if rest != "input.input":
            for address, module in layers.items():
                x = module(x)
                if rest.startswith(f"{address}/"):
                    break
        torch.testing.assert_close(values[name], x)
    calls = sorted({int(name.partition("/")[0]) for name in stock})
    for call in calls[:-1]:  # the last one may be there in part
        with pytest.warns(UserWarning, match=r"was not closed. Missing: "):
            assert len(tl.load(path, call=call)) == 26


def test_a_call_that_was_not_over_has_its_tensors_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As if the process had been killed in its first call."""
    monkeypatch.setattr(tailing._Outflow, "limit", 1_000)
    monkeypatch.setattr("torchlens._capture.memory.outflow._INTERVAL", 0.0)
    monkeypatch.setattr("torchlens._capture.memory.outflow.OutflowWatch.interval", -1.0)
    path = tmp_path / "trace.safetensors"
    seen: dict[str, torch.Tensor] = {}

    class LooksAtTheEnd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update(tl.read_trace(path))
            with pytest.raises(tl.TraceError, match=r"no complete call .* the graph of call 1, of"):
                tl.load(path)
            tl.magnify(path)
            return x

    with tl.tail(nn.Sequential(model(), LooksAtTheEnd()), path, max_shard_bytes=1_000) as m:
        m(torch.rand(8, 16))
    assert len(seen) > 5
    assert "1/0.0.0/linear" in capsys.readouterr().out
    whole = tl.read_trace(path)
    assert all(torch.equal(value, whole[name]) for name, value in seen.items())


def test_a_trace_can_be_read_while_it_is_written_and_is_whole_when_closed(tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    x = torch.rand(8, 16)
    with tl.tail(model(), path) as m:
        m(x)
        with pytest.warns(UserWarning, match="whatever came after its last call"):
            history = tl.load(path)
        value = history["relu_12"].tensor_contents
        assert torch.equal(value, m(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(tl.load(path, call=2)["relu_12"].tensor_contents, value)
    assert list(tmp_path.iterdir()) == [path]


def test_a_call_is_on_disk_a_second_after_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, clock = tmp_path / "trace.safetensors", [100.0]
    monkeypatch.setattr("torchlens._trace.call_writer.time.monotonic", lambda: clock[0])
    with tl.tail(model(), path) as m:
        for seconds, num_calls in ((0.0, 1), (0.5, 1), (0.6, 3), (0.2, 3), (5.0, 5)):
            clock[0] += seconds
            m(torch.rand(8, 16))
            assert len(tl.read_trace(path, "*/input*")) == num_calls


def test_an_unfinished_trace_of_the_same_name_is_replaced(tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    tail = tl.tail(model(), path)
    tail.__enter__()(torch.rand(8, 16))
    tail._unpatch()  # and is never closed
    with tl.tail(model(), path) as m:
        m(torch.rand(8, 16))
    assert len(tl.load(path)) == 26
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_was_begun_and_has_nothing_yet_hides_no_older_one(tmp_path: Path):
    path = tmp_path / "trace.safetensors"
    with tl.tail(model(), path) as m:
        m(torch.rand(8, 16))
    partial = tmp_path / "trace.safetensors.partial"
    partial.mkdir()
    (partial / "00001.writing").write_bytes(b"half of it")
    assert len(tl.load(path)) == 26
    path.unlink()
    with pytest.raises(tl.TraceError, match="nothing is in it yet"):
        tl.load(path)


def test_a_shard_that_is_written_again_and_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(call_writer, "_FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(call_writer, "_FLUSH_SHARE", 0.0)
    path = tmp_path / "trace.safetensors"
    own = model()
    xs = [torch.rand(8, 16) for _ in range(12)]
    with torch.no_grad():
        expected = [own(x) for x in xs]
        with tl.tail(own, path, max_shard_bytes=100_000) as m:
            for x in xs:
                m(x)
            with pytest.warns(UserWarning, match="not closed"):
                unfinished = tl.load(path, call=12)
            assert torch.equal(unfinished["output_1"].tensor_contents, expected[-1])
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for number, result in enumerate(expected, start=1):
        assert torch.equal(tl.load(path, call=number)["output_1"].tensor_contents, result)
