"""What a session holds when the pass is over."""

import torch
from torch import nn

from torchlens.capture.session import CaptureOptions, Session


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
