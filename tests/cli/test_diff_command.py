"""`torchlens diff A B`: files and models that run now, and what the shell gets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import torchlens as tl
from benchmarks.planted import transformer
from torchlens._cli.main import main

PORTS = """
from benchmarks.planted import transformer

model, ids = transformer.example()

def port():
    return transformer.ported(model, {"blocks.0.norm1": "small eps", "blocks.1.ffn": "tanh"}), ids

def clean():
    return transformer.ported(model), ids

nothing = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    model, ids = transformer.example()
    tl.log_forward_pass(model, ids).save(folder / "reference.safetensors", params=True)
    port = transformer.ported(model, {"blocks.0.norm1": "small eps"})
    tl.log_forward_pass(port, ids).save(folder / "port.safetensors", params=True)
    tl.log_forward_pass(transformer.ported(model), ids).save(folder / "bare.safetensors")
    tl.log_forward_pass(model, ids[:1]).save(folder / "other.safetensors")
    (folder / "check_the_port.py").write_text(PORTS)
    return folder


def run(folder: Path, *arguments: str) -> int:
    paths = [
        str(folder / argument) if "." in argument and not argument.startswith("-") else argument
        for argument in arguments
    ]
    return main(["diff", *paths])


def test_two_files_that_differ(folder: Path, capsys: Any) -> None:
    assert run(folder, "reference.safetensors", "port.safetensors") == 1
    out = capsys.readouterr().out
    assert "41 of 41 found" in out
    assert re.search(r"FIRST DIVERGENCE +h.0.ln_1 +<-> +blocks.0.norm1", out)
    assert "eps 1e-06; the reference layer norm, eps 1e-05" in " ".join(out.split())
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_two_files_that_agree_without_their_weights(folder: Path, capsys: Any) -> None:
    assert run(folder, "reference.safetensors", "bare.safetensors") == 0
    out = capsys.readouterr().out
    assert "not saved in the candidate: save(path, params=True) keeps them" in out
    assert "They agree" in out


def test_a_model_that_runs_now_can_be_isolated(folder: Path, capsys: Any) -> None:
    assert run(folder, "reference.safetensors", "check_the_port.py:port", "--isolate") == 1
    out = capsys.readouterr().out
    assert "2 layers compute something else" in out
    assert "gelu's tanh form" in out
    assert (
        run(folder, "reference.safetensors", "check_the_port.py:clean", "--isolate", "--quiet") == 0
    )
    assert capsys.readouterr().out == ""


def test_json_map_and_tolerance(folder: Path, capsys: Any) -> None:
    (folder / "map.json").write_text('{"h.*.ln_1": "blocks.*.norm1"}')
    names = ("reference.safetensors", "port.safetensors", "--map", "map.json")
    assert run(folder, *names, "--json", "out.json", "--tolerance", "1000") == 0
    assert json.loads((folder / "out.json").read_text())["ok"] is True
    assert run(folder, *names, "--quiet") == 1


def test_a_call_of_traces_with_several(folder: Path, capsys: Any) -> None:
    model, ids = transformer.example()
    for name, second in (("one", ids), ("two", (ids + 1) % 50), ("three", (ids + 1) % 50)):
        with tl.tail(model, folder / f"{name}.safetensors") as tailed:
            tailed(ids)
            tailed(second)
    assert run(folder, "two.safetensors", "three.safetensors", "--call", "2") == 0
    assert "They agree" in capsys.readouterr().out
    assert run(folder, "one.safetensors", "two.safetensors", "--call", "1", "--quiet") == 0
    assert run(folder, "one.safetensors", "two.safetensors", "--call", "2") == 2
    assert "The inputs differ" in capsys.readouterr().err
    assert run(folder, "one.safetensors", "two.safetensors", "--call", "3") == 2
    assert "call must be one of those in one.safetensors, 1 to 2, got 3" in capsys.readouterr().err
    assert run(folder, "one.safetensors", "check_the_port.py:clean", "--call", "2", "--quiet") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reference.safetensors", "other.safetensors"), "The inputs differ"),
        (
            ("reference.safetensors", "port.safetensors", "--isolate"),
            "isolate needs the live candidate",
        ),
        (("reference.safetensors", "missing.safetensors"), "missing.safetensors"),
        (("reference.safetensors", "check_the_port.py:prot"), "Did you mean 'port'?"),
        (
            ("reference.safetensors", "check_the_port.py:nothing"),
            "must lead to a history, (model, input), or a function",
        ),
        (
            ("reference.safetensors", "port.safetensors", "--map", "check_the_port.py"),
            "--map must be a file of JSON",
        ),
        (
            ("reference.safetensors", "port.safetensors", "--json", "."),
            "--json must name a file, got the folder",
        ),
    ],
)
def test_what_cannot_be_compared_gives_2_and_says_why(
    folder: Path, capsys: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert run(folder, *arguments) == 2
    assert message in capsys.readouterr().err
