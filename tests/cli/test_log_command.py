"""The command `torchlens log`: a trace without a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchlens as tl
from torchlens._cli.main import main

CODE = """
import sys

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)

net = Net()

def pair():
    return Net(), torch.ones(2, 4)

def words():
    return nn.Embedding(50, 4)

def wrong():
    return 3

def raising():
    raise KeyError("mine")

class Failing(nn.Module):
    def forward(self, x):
        return x @ torch.ones(7, 7)

def failing():
    return Failing(), torch.ones(2, 4)

def leaving():
    sys.exit()

class Leaving(nn.Module):
    def forward(self, x):
        sys.exit("enough")

def leaving_later():
    return Leaving(), torch.ones(2, 4)

class Unplugged(nn.Module):
    def forward(self, x):
        raise BrokenPipeError("the other end is gone")

def unplugged():
    return Unplugged(), torch.ones(2, 4)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "nets_of_a_test.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("target", ["Net", "net", "pair"])
def test_a_class_a_model_or_a_function(target: str, file: Path, capsys: pytest.CaptureFixture[str]):
    saved = file.with_suffix(".safetensors")
    inputs = [] if target == "pair" else ["--input", "2x4"]
    assert main(["log", f"{file}:{target}", *inputs, "--save", str(saved), "--params"]) == 0
    assert "nets_of_a_test.safetensors   Net" in capsys.readouterr().out
    history = tl.load(saved)
    assert history.layer_labels == ["input_1_0", "linear_1_1", "output_1_2"]
    weight, bias = history["linear_1"].parent_params
    x = history["input_1"].tensor_contents
    assert torch.equal(
        history["linear_1"].tensor_contents, torch.nn.functional.linear(x, weight, bias)
    )


def test_whole_numbers_below_a_bound(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(file.parent)
    assert main(["log", "nets_of_a_test:words", "--input", "2x12:int64<50"]) == 0
    assert tl.load("words.safetensors")["input_1"].tensor_contents.max() > 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("Nets", "Did you mean 'net'?"),
        ("wrong", "TARGET must be a model"),
    ],
)
def test_errors_teach(target: str, words: str, file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["log", f"{file}:{target}"]) == 2
    assert words in capsys.readouterr().err


def test_what_is_no_target_or_no_input(file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["log", "Net"]) == 2
    assert "TARGET must be module:name" in capsys.readouterr().err
    assert main(["log", f"{file}:Net", "--input", "2,4"]) == 2
    assert "--input must be a shape such as" in capsys.readouterr().err
    assert main(["log", f"{file}:Net"]) == 2
    assert "needs inputs (x): give --input SHAPE for each" in capsys.readouterr().err
    assert main(["log", f"{file}:failin"]) == 2
    assert "Did you mean 'failing'?" in capsys.readouterr().err
    assert main(["log", "no_such_module:Net"]) == 2
    assert "no_such_module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("1x4:int64<0", "an N of at least 1"),
        ("1x4<3", "needs a dtype of whole numbers"),
        ("1x4:qint8", "create a random input '1x4:qint8'"),
        ("99999999999x99999999999", "create a random input '99999999999x99999999999'"),
        ("99999999999999999999x4", "create a random input"),
        ("4:int64<99999999999999999999", "create a random input"),
    ],
)
def test_an_input_that_cannot_be_made_says_why(
    shape: str, words: str, file: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["log", f"{file}:Net", "--input", shape]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_as_a_program(file: Path):
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchlens", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(tl.__file__).parents[1]
        )

    done = run("log", f"{file}:pair", "--save", file.with_suffix(".safetensors"))
    assert (done.returncode, done.stderr) == (0, "")
    assert run("show", file).returncode == 2
    assert run().returncode == 2
    assert "COMMAND" in run("--help").stdout


def test_an_error_of_the_users_own_code_tells_where_and_is_never_the_code_for_a_difference(
    file: Path, capsys
) -> None:
    assert main(["log", f"{file}:raising"]) == 2
    assert "raising raised KeyError: 'mine' (nets_of_a_test.py:" in capsys.readouterr().err
    for arguments in (["log", f"{file}:failing"], ["diff", f"{file}:pair", f"{file}:failing"]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "return x @ torch.ones(7, 7)" in error
        assert "RuntimeError" in error
    assert main(["diff", f"{file}:pair", "no_such_module:net"]) == 2
    assert "There is no module 'no_such_module'" in capsys.readouterr().err
    assert (
        main(["diff", f"{file}:pair", f"{file}:pair", "--map", str(file.parent / "none.json")]) == 2
    )
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "leaving",
            r"called sys\.exit\(0?\) \(nets_of_a_test\.py:",
        ),  # wandb, if it was imported, makes 0 of nothing
        ("leaving_later", r"called sys\.exit\('enough'\) \(nets_of_a_test\.py:"),
        ("unplugged", "the other end is gone"),
    ],
)
def test_code_that_ends_the_program_is_neither_success_nor_agreement(
    target: str, words: str, file: Path, capsys
) -> None:
    saved = file.with_suffix(".safetensors")
    assert main(["log", f"{file}:{target}", "--save", str(saved)]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not saved.exists()
    assert main(["diff", f"{file}:pair", f"{file}:{target}"]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_reader_who_has_seen_enough_changes_no_exit_code(file: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torchlens",
        "log",
        f"{file}:pair",
        "--save",
        str(file.with_suffix(".safetensors")),
    ]
    unread, output = os.pipe()
    os.close(unread)
    done = subprocess.run(
        command,
        stdout=output,
        stderr=subprocess.PIPE,
        check=False,
        cwd=Path(tl.__file__).parents[1],
    )
    os.close(output)
    assert (done.returncode, done.stderr) == (0, b"")
