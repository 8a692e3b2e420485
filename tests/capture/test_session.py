"""What a session holds when the pass is over."""

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from torchlens._capture.options import CaptureOptions
from torchlens._capture.recorder import Recorder
from torchlens._capture.session import Session


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        self.scale.add_(1)
        return x * self.scale


def test_reading_the_recording_changes_nothing():
    session = Session(Counting(), CaptureOptions())
    session.run([torch.ones(3)], {})
    regions = dict(session._memory.regions)
    first, second = session.recording, session.recording
    assert session._memory.regions == regions
    assert first.regions == second.regions == regions
    assert first.outside_storages == second.outside_storages
    assert -1 in first.regions  # the parameter that was written to


def test_an_interrupt_after_the_pass_leaves_a_log_that_can_be_read(monkeypatch):
    finish = Recorder.finish
    moments: list[str] = []

    def interrupted(recorder, *given):
        if not moments:
            moments.append("the first time")
            raise KeyboardInterrupt
        finish(recorder, *given)

    monkeypatch.setattr(Recorder, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        tl.log_forward_pass(Counting(), torch.ones(3))
    assert [entry.layer_type for entry in partial_history(caught.value)] == [
        "input",
        "add",
        "mul",
        "output",
    ]
