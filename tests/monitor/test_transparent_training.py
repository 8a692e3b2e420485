"""Losses and weights are bit-identical with and without the monitor; nothing is left on the model
or in torch.
"""

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.monitor.loops import LOOPS, Loop, bits


def run_loop(loop: Loop, folder: Path | None, **options: Any) -> tuple[Any, Any]:
    """What comes out of a loop, to the last bit, with the state of every generator after it; and
    the run.
    """
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    runs: list[Any] = []

    def start(model: nn.Module) -> Any:
        if folder is None:
            return None
        runs.append(tl.monitor(model, folder, **options))
        return runs[0]

    losses, models = loop(start)
    generators = (
        torch.get_rng_state().numpy().tobytes(),
        str(np.random.get_state()),
        random.getstate(),
    )
    found = [struct.pack("<d", loss) for loss in losses], list(bits(models)), generators
    for model in models:
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._backward_hooks
            assert not [name for name in vars(module) if "lens" in name]
    if runs:
        runs[0].finish()
    return found, runs[0] if runs else None


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_losses_weights_and_generators_are_bit_identical(
    name: str, every: int, tmp_path: Path
) -> None:
    plain, _ = run_loop(LOOPS[name], None)
    monitored, run = run_loop(LOOPS[name], tmp_path, every=every)
    assert plain == monitored
    assert run.problems == []
    counts = run.counts
    assert counts.offered == counts.recorded + counts.dropped > 0
    reader = tl.open_run(tmp_path)
    assert reader.is_finished
    assert reader.problems == []
    assert reader.counts == counts
    assert reader.steps
    assert all(step % every == 0 for step in reader.steps)
