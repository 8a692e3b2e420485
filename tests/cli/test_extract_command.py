"""`torchlens extract` and `torchlens features`."""

from pathlib import Path

import numpy as np
import pytest

import torchlens as tl
from torchlens._cli.main import main

CODE = """
import torch
from torch import nn

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())

def make_text_model():
    return nn.Embedding(9, 2), lambda texts, **options: {"input": torch.ones(len(texts), 2).long()}

nothing = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("models_of_extraction.py").write_text(CODE)
    np.save("inputs.npy", np.random.default_rng(0).random((10, 4), dtype=np.float32))
    return tmp_path


def test_extract_show_verify_and_export(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["extract", "models_of_extraction.py:make_model", "--data", "inputs.npy"]
    assert main([*call, "--layers", "0", "relu", "--out", "f", "--shard-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "Features of Sequential: 10 inputs, 2 layers" in shown
    assert tl.open_features("f")["relu"].shape == (10, 3)
    assert main(["features", "show", "f"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["features", "verify", "f"]) == 0
    assert "All files are as they were written" in capsys.readouterr().out
    assert main(["features", "export", "f", "out.safetensors", "--layers", "relu"]) == 0
    assert Path("out.safetensors").exists()
    Path("f/0/00001.npy").write_bytes(b"other")
    assert main(["features", "verify", "f"]) == 1
    assert "damaged: 0/00001.npy" in capsys.readouterr().out


def test_texts_of_a_file_with_the_tokenizer_of_the_target(here: Path) -> None:
    Path("texts.txt").write_text("one\ntwo\nthree\n")
    call = ["extract", "models_of_extraction.py:make_text_model", "--data", "texts.txt"]
    assert main([*call, "--layers", "output", "--out", "f", "--pool", "mean"]) == 0
    assert tl.open_features("f")["output"].shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["extract", "models_of_extraction.py:nothing", "--data", "inputs.npy"], "must be a model"),
        (["extract", "models_of_extraction.py:make_model", "--data", "none"], "--data must be"),
        (["extract", "models_of_extraction.py:make_modell", "--data", "x.npy"], "Did you mean"),
    ],
)
def test_wrong_calls_are_explained(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--layers", "0", "--out", "f"]) == 2
    assert message in capsys.readouterr().err


def test_wrong_folders_and_formats_are_explained(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["features", "show", "none"]) == 2
    assert "holds no features: there is no such folder" in capsys.readouterr().err
    call = ["extract", "models_of_extraction.py:make_model", "--data", "inputs.npy"]
    assert main([*call, "--layers", "0", "--out", "f"]) == 0
    assert main(["features", "export", "f", "out.csv"]) == 2
    assert (
        "FILE must end in .h5, .mat, .safetensors, .zarr, got 'out.csv'" in capsys.readouterr().err
    )
