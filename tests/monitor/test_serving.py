"""The server of runs: it answers who may ask, refuses everybody else, and tells what is new."""

import http.client
import json
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._monitor.read import reader as reader_module
from torchlens._monitor.serve.live_runs import find_runs
from torchlens._monitor.serve.server import RunServer
from torchlens._monitor.store.lines import line_of

PATIENCE = 120.0  # seconds; only so that a test that fails ends


def train(folder: Path, num_steps: int = 5, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tl.monitor(model, folder, **options) as run:
        for _ in range(num_steps):
            loss = model(torch.randn(16, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


@contextmanager
def serving(folder: Path) -> Iterator[RunServer]:
    train(folder / "runs" / "a")
    with RunServer(folder / "runs") as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServer]:
    """For tests that only ask."""
    with serving(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunServer]:
    """For a test that changes the runs."""
    with serving(tmp_path) as found:
        yield found


def ask(
    server: RunServer, what: str, headers: Any = None, method: Any = "GET", **options: Any
) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    connection.request(
        method, f"{what}?{urlencode({'token': server.token, **options})}", headers=headers or {}
    )
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.headers)


def parsed(body: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack_from("<I", body)
    return json.loads(body[4 : 4 + size]), body[4 + size :]


def test_the_page_asks_nobody_but_its_server(server: RunServer) -> None:
    status, body, headers = ask(server, "/")
    assert status == 200
    assert b"connect-src 'self'" in body
    assert b"https://" not in body
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "what",
    ["/", "/runs", "/run", "/graph", "/table", "/histograms", "/scalar", "/events", "/other"],
)
def test_nothing_is_answered_without_the_token(server: RunServer, what: str) -> None:
    for token in ("", "x" * len(server.token), server.token[:-1], "\u00e9"):
        status, body, _ = ask(server, what, token=token)
        assert status == 403
        assert b"token" in body


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
    ],
)
def test_a_host_that_is_not_this_machine_is_refused(server: RunServer, host: str) -> None:
    assert ask(server, "/runs", {"Host": host.format(port=server.server_port)})[0] == 403
    assert ask(server, "/runs", {"Host": f"localhost:{server.server_port}"})[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_another_site_is_refused(server: RunServer, site: str) -> None:
    assert ask(server, "/runs", {"Sec-Fetch-Site": site})[0] == 403
    for own in ("none", "same-origin"):
        assert ask(server, "/runs", {"Sec-Fetch-Site": own})[0] == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)
    connection.putrequest("GET", f"/runs?token={server.token}")
    for each in ("same-origin", site):
        connection.putheader("Sec-Fetch-Site", each)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "MKCOL"]
)
def test_nothing_can_be_written(server: RunServer, method: str) -> None:
    before = {path: path.read_bytes() for path in server.live.root.rglob("*") if path.is_file()}
    status, _, headers = ask(server, "/run", method=method, run=0)
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert {
        path: path.read_bytes() for path in server.live.root.rglob("*") if path.is_file()
    } == before


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/a/run.json",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/runs/../a/graph.json",
        "/run/0",
        "//evil.example/runs",
        "http://evil.example/runs",
        "http://evil.example/events",
    ],
)
def test_no_path_leads_to_a_file(server: RunServer, path: str) -> None:
    assert ask(server, path, {"Host": f"127.0.0.1:{server.server_port}"})[0] == 404


@pytest.mark.parametrize("run", ["1", "-1", "../a", "a", "0.0", "9" * 30, "\u0661", ""])
def test_runs_are_named_by_number_alone(server: RunServer, run: str) -> None:
    for what in ("/run", "/graph", "/table", "/histograms", "/scalar"):
        assert ask(server, what, run=run, kind="outputs", statistic="rms", series=0, name="loss")[
            0
        ] in (400, 404)


def test_what_there_is_not_is_refused(server: RunServer) -> None:
    assert ask(server, "/table", run=0, kind="secrets", statistic="rms")[0] == 400
    assert ask(server, "/table", run=0, kind="outputs", statistic="__class__")[0] == 400
    assert ask(server, "/histograms", run=0, series=10_000)[0] == 404
    assert ask(server, "/scalar", run=0, name="nothing")[0] == 404
    assert ask(server, "/runs", **{f"o{number}": "x" for number in range(40)})[0] == 400


def test_a_link_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    train(tmp_path / "elsewhere" / "secret", 1)
    train(tmp_path / "runs" / "deep" / "er", 1)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert find_runs(tmp_path / "runs") == [tmp_path / "runs" / "deep" / "er"]


def test_what_is_sent_is_what_was_recorded(server: RunServer) -> None:
    reader = tl.open_run(server.live.root / "a")
    (told,) = json.loads(ask(server, "/runs")[1])
    assert (told["name"], told["model"]) == ("a", "Sequential")
    summary = json.loads(ask(server, "/run", run=0)[1])
    assert summary["steps"] == reader.steps
    assert summary["isFinished"]
    assert summary["counts"] == [
        reader.counts.offered,
        reader.counts.recorded,
        reader.counts.dropped,
    ]
    for statistic in ("rms", "mean", "std", "low", "high", "zero", "nonfinite"):
        head, body = parsed(ask(server, "/table", run=0, kind="outputs", statistic=statistic)[1])
        bits = np.frombuffer(body, "<u2").astype(np.uint32) << 16
        values = bits.view(np.float32).reshape(len(head["series"]), head["columns"])
        for number, row in zip(head["series"], values, strict=True):
            module, kind, name, *_ = summary["series"][number]
            own = getattr(reader[module].kinds[kind][name], statistic)
            np.testing.assert_allclose(row, own, rtol=1 / 256, atol=1e-30)
    head, body = parsed(ask(server, "/scalar", run=0, name="loss")[1])
    rows = np.frombuffer(body, "<f8").reshape(4, head["columns"])
    assert rows[1].tolist() == reader.scalars["loss"].values.tolist()
    head, body = parsed(ask(server, "/histograms", run=0, series=2)[1])
    module, kind, name, *_ = summary["series"][2]
    heat = reader[module].kinds[kind][name].heat_map().counts.T
    levels = np.frombuffer(body, "u1").reshape(len(head["bins"]), head["columns"]) / head["levels"]
    assert np.abs(levels**2 - heat / heat.max(0)).max() < 0.01


def test_only_what_is_new_is_sent(own_server: RunServer) -> None:
    known = json.loads(ask(own_server, "/run", run=0)[1])
    old, _ = parsed(ask(own_server, "/table", run=0, kind="outputs", statistic="rms")[1])
    train(own_server.live.root / "a", 3)  # the run goes on
    own_server.live._looked_at = -1e9
    own_server.live.look()
    have = {"series": len(known["series"]), "findings": len(known["findings"])}
    told = json.loads(ask(own_server, "/run", run=0, have=known["revision"], **have)[1])
    assert (told["isOther"], told["from"], told["steps"], told["series"]) == (
        False,
        5,
        [5, 6, 7],
        [],
    )
    head, _ = parsed(
        ask(
            own_server,
            "/table",
            run=0,
            kind="outputs",
            statistic="rms",
            **{"from": 5},
            stride=old["stride"],
        )[1]
    )
    assert (head["from"], head["columns"]) == (5, 3)
    again = json.loads(
        ask(own_server, "/run", run=0, have=1)[1]
    )  # a page of a own_server that is gone
    assert (again["isOther"], again["from"], len(again["steps"])) == (True, 0, 8)


def test_changes_and_new_runs_are_told_at_once(own_server: RunServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", own_server.server_port, timeout=PATIENCE)
    connection.request("GET", f"/events?token={own_server.token}")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")

    def told() -> dict[str, int]:
        end = monotonic() + PATIENCE
        while monotonic() < end:
            line = answer.readline().decode()
            if line.startswith("data:"):
                return json.loads(line[5:])
        raise AssertionError("nothing was told")

    first = told()
    assert list(first) == ["0"]
    train(own_server.live.root / "a", 2)
    assert told()["0"] > first["0"]
    train(own_server.live.root / "b", 2)
    while "1" not in told():
        pass
    answer.close()
    connection.close()


def test_a_run_whose_folder_is_removed_stays_as_it_was(own_server: RunServer) -> None:
    shutil.rmtree(own_server.live.root / "a")
    own_server.live._looked_at = -1e9
    own_server.live.look()
    assert len(json.loads(ask(own_server, "/run", run=0)[1])["steps"]) == 5


def test_a_damaged_run_stops_no_other_run_and_is_listed_with_its_problem(
    own_server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = own_server.live.root
    for name in ("b", "c"):
        train(root / name, 1)
    huge = 10**30
    with (root / "b" / "rank0.jsonl").open("ab") as log:
        log.write(line_of("series", [huge, "m", "outputs", "", [1], "float32"]))
        log.write(line_of("series", [9, "m", "outputs", "", [huge], "float32"]))
        log.write(line_of("session", {"session": "x", "time": 10**400, "first_step": 0}))
        log.write(line_of("finding", {"step": huge}))
    (root / "b" / "run.json").unlink()
    os.mkfifo(root / "b" / "run.json")  # a reader would wait for ever
    (root / "b" / "graph.json").unlink()
    (root / "b" / "graph.json").symlink_to("/dev/zero")
    joined = reader_module._Joined

    def fails_for_c(ranks: Any) -> Any:
        if any(each._folder.name == "c" for each in ranks):
            raise ArithmeticError("a fault of the reader")
        return joined(ranks)

    monkeypatch.setattr(reader_module, "_Joined", fails_for_c)
    own_server.live._looked_at = own_server.live._searched_at = -1e9
    runs = json.loads(ask(own_server, "/runs")[1])
    assert [each["name"] for each in runs] == ["a", "b", "c"]
    a, b, c = (json.loads(ask(own_server, "/run", run=each["run"])[1]) for each in runs)
    assert (a["problems"], len(a["steps"]), len(b["steps"])) == ([], 5, 1)
    text = "\n".join(b["problems"])
    assert text.count("is left out") == 4
    assert "run.json cannot be read: it is not a regular file" in text
    assert c["problems"][0] == "This run cannot be read: a fault of the reader"
    assert json.loads(ask(own_server, "/graph", run=1)[1])["page"] is None
    with (root / "a" / "rank0.jsonl").open("ab") as log:
        log.write(line_of("problem", "the first run goes on"))
    own_server.live._looked_at = -1e9
    own_server.live.look()
    assert json.loads(ask(own_server, "/run", run=0)[1])["problems"] == ["the first run goes on"]


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        RunServer(tmp_path / "nowhere")
