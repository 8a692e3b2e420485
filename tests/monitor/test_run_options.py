"""What `monitor` and `run.log` are given is checked, and an error says what is expected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("modules", ["zzz", ["encoder.*", "3"]])
def test_modules_that_mean_no_module_are_an_error(modules: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"modules must name modules of the model, such as '0', '1' or '2', got '.*'",
    ):
        tl.monitor(network(), tmp_path / "a", modules=modules)
    assert not (tmp_path / "a").exists()


def test_one_of_several_patterns_that_means_no_module_is_told(tmp_path: Path) -> None:
    with tl.monitor(network(), tmp_path, modules=["0", "zzz"]) as run:
        pass
    assert run.problems == ["modules: no module has an address like 'zzz'"]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.tensor(1j), ValueError, "a tensor of one real element, got a complex Tensor"),
        (torch.ones(1, device="meta"), ValueError, "got a meta Tensor"),
        (torch.ones(2), ValueError, r"got a Tensor of shape \(2,\)"),
        (10**400, ValueError, "fits in a float"),
        (1j, TypeError, "got 1j"),
        (np.complex64(1j), TypeError, "complex64"),
        (np.ones(2), TypeError, "ndarray"),
        ("a", TypeError, "got 'a'"),
        (None, TypeError, "got None"),
        (True, TypeError, "got True"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(
    value: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with (
        tl.monitor(network(), tmp_path) as run,
        pytest.raises(error, match=f"^loss must be a number .*{words}"),
    ):
        run.log(loss=value)
