"""Edits in files, plots of sweeps and what colours a page."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.edit.models import gpt
from torchlens import edits

safetensors = pytest.importorskip("safetensors.torch")


def forms(other: tl.ModelHistory) -> dict[str, dict[Any, Any]]:
    """Edits of each form that a file keeps."""
    return {
        "words": {"h.0": "mean", "h.1": 0.5, "wte": "zero"},
        "tensors": {"h.1": torch.arange(16.0), edits.site("h.0", token=-1): torch.ones(16)},
        "entries": {edits.site("h.1.attn", head=2): other[other.find("scaled*")[1].layer_label],
                    "h.2": other["h.2"]},
        "at": {"h.1": edits.at(steps=slice(0, None), tokens=[0, -1], add=torch.ones(16)),
               "h.2": edits.at(scale=0.5)},
        "parts": {edits.site("h.1", index=(..., slice(0, 4))): 1.0,
                  edits.site("h.0", directions=torch.eye(16)[:2]): 0.0,
                  edits.site("h.2.attn", part="q", head=slice(1, 3)): edits.control("zero", 3)},
    }  # fmt: skip


@pytest.mark.parametrize("form", ["words", "tensors", "entries", "at", "parts"])
def test_edits_of_a_file_do_the_same(form: str, tmp_path: Path) -> None:
    model, ids = gpt()
    history, other = tl.log_forward_pass(model, ids), tl.log_forward_pass(model, ids.flip(1))
    own = forms(other)[form]
    edits.save(own, tmp_path / "own.safetensors")
    loaded = edits.load(tmp_path / "own.safetensors")
    assert [str(site) for site in loaded] == [str(site) for site in own]
    expected = history.rerun(model, ids, edits=own)
    result = history.rerun(model, ids, edits=loaded)
    assert torch.equal(result.output, expected.output)
    assert not torch.equal(result.output, history.output)


@pytest.mark.parametrize("edit", [lambda value: value, edits.splice(nn.Linear(16, 16))])
def test_functions_and_modules_are_refused(edit: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a file keeps numbers, words, tensors"):
        edits.save({"h.1": edit}, tmp_path / "own.safetensors")
    assert not list(tmp_path.iterdir())


def test_other_files_and_newer_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    safetensors.save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"weights\.safetensors has no edits"):
        edits.load(path)
    text = json.dumps({"version": 2, "edits": []})
    safetensors.save_file({}, path, metadata={"torchlens_edits": text})
    with pytest.raises(ValueError, match="is of a newer torchlens"):
        edits.load(path)


def test_a_sweep_is_a_heat_map_or_bars_and_colours_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model, ids = gpt()
    history, other = tl.log_forward_pass(model, ids), tl.log_forward_pass(model, ids.flip(1))
    keys = ["h.0", "h.1", "h.2"]
    sites = [edits.site(key, token=token) for key in keys for token in range(6)]
    sweep = history.sweep(sites, other, lambda logits: logits[0, -1, 3])
    figure = edits.plot(sweep, path=tmp_path / "map.png", title="patched")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == keys
    shown = axes.images[0].get_array()
    assert shown.shape == (3, 6)
    assert shown[1, 4] == pytest.approx(sweep[10].value)
    assert (tmp_path / "map.png").stat().st_size > 1000
    table = edits.attribution(history, history.sites("head"), other, lambda out: out[0, -1, 3])
    bars: Any = edits.plot(table[table["key"] == "h.1.attn"]).axes[0]
    assert [patch.get_width() for patch in bars.patches] == table["estimate"][4:8].tolist()
    sweep.to_pandas().to_csv(tmp_path / "sweep.csv")
    colours = edits.overlay(pd.read_csv(tmp_path / "sweep.csv"))
    assert colours["h.1"] == pytest.approx(max(abs(row.value) for row in sweep[6:12]))
    assert "effect" in history.explore(None, overlays={"effect": colours}).html
    with pytest.raises(
        ValueError, match="value must name a column with numbers: estimate, control"
    ):
        edits.plot(table, "effect")
