"""The command `torchlens show`."""

import os
from pathlib import Path

import pytest
import torch

import torchlens as tl
from tests.networks import Recurrent, TinyGPT
from torchlens._cli.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "gpt.safetensors"
    tl.log_forward_pass(TinyGPT(), torch.randint(0, 10, (2, 5))).save(path)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_it_lists_the_modules_with_what_their_numbers_are_like(
    trace: Path, capsys: pytest.CaptureFixture[str]
):
    lines = shown(capsys, trace).splitlines()
    assert lines[0].startswith("gpt.safetensors   TinyGPT (torch 2")
    assert lines[0].endswith("complete")
    assert [line.split()[:3] for line in lines[6:9]] == [
        [f"blocks.{n}", "Block", "2x5x8"] for n in range(3)
    ]
    value = tl.load(trace)["blocks.0"].tensor_contents
    assert f"mean {value.mean().item():< 9.3g} std" in lines[6]
    assert lines[-1].startswith("Look closer: torchlens show gpt.safetensors head")


def test_deeper_and_inside_a_module(trace: Path, capsys: pytest.CaptureFixture[str]):
    deep = shown(capsys, trace, "--depth", 2)
    assert "blocks.2.attention " in deep
    assert " tokens " in deep
    inside = shown(capsys, trace, "blocks.1").splitlines()[1:]
    assert {line.split()[0].partition("_")[0] for line in inside} == {
        "blocks.1.norm1", "blocks.1.norm2", "blocks.1.attention", "blocks.1.mlp", "blocks.1.drop:1",
        "blocks.1.drop:2",
        "add",
    }  # fmt: skip
    everything = shown(capsys, trace, "--depth", 0).splitlines()
    assert len(everything) == 2 + len(tl.load(trace))


def test_one_operation_by_label_or_by_its_name_in_the_file(
    trace: Path, capsys: pytest.CaptureFixture[str]
):
    by_label = shown(capsys, trace, "linear_13_63")
    assert "Computed inside module: head" in by_label
    assert "\\t" not in by_label
    assert shown(capsys, trace, "head/linear") == by_label == shown(capsys, trace, "1/head/linear")


def test_passes_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "loop.safetensors"
    tl.log_forward_pass(Recurrent(), torch.rand(2, 4)).save(path)
    names = [line.split()[0] for line in shown(capsys, path).splitlines()[1:-1]]
    assert len(names) == len(set(names))
    assert any(name.endswith(":2") for name in names)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_it_fits_the_terminal(
    trace: Path, capsys: pytest.CaptureFixture[str], width: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    for options in ([], ["--depth", "0"], ["linear_13_63"]):
        assert max(map(len, shown(capsys, trace, *options).splitlines())) <= width


def test_no_colours_unless_it_is_a_terminal(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert "\x1b" not in shown(capsys, trace)


def test_a_page_of_it(trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shown(capsys, trace, "--html", tmp_path / "page.html")
    assert "TinyGPT" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_errors_teach_and_exit_with_2(trace: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["show", str(trace.with_name("gtp.safetensors"))]) == 2
    assert "Available: gpt.safetensors" in capsys.readouterr().err
    assert main(["show", str(trace), "block.0"]) == 2
    assert "Did you mean 'blocks.0'?" in capsys.readouterr().err
    assert main(["show", str(trace), "--call", "3"]) == 2
    assert "There is no call 3" in capsys.readouterr().err
    assert main(["show", str(trace), "--depth", "-1"]) == 2
    assert "depth must be at least 0" in capsys.readouterr().err
    assert main(["show", "."]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
    trace.write_bytes(os.urandom(100))
    assert main(["show", str(trace)]) == 2
    assert "not a readable safetensors file" in capsys.readouterr().err


def test_tensors_that_somebody_else_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "weights.safetensors"
    safetensors.save_file(
        {"a.weight": torch.ones(2, 3), "\x1b[31mred": torch.tensor([float("nan"), 1.0])}, path
    )
    text = shown(capsys, path)
    assert "tensors without a history" in text
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    assert "1 NaN, 0 Inf of 2" in text
    with pytest.raises(tl.TraceError, match="holds tensors but no history"):
        tl.load(path)
