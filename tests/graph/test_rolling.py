"""What a rolled picture shows as one."""

import pytest
import torch
from torch import nn

import torchlens as tl
from torchlens._draw.draw_options import DrawOptions
from torchlens._draw.drawing import make_drawing
from torchlens._graph.rolling import roll


class Steps(nn.Module):
    def __init__(self, read, write=torch.stack):
        super().__init__()
        self.cell, self.read, self.write = nn.GRUCell(4, 4), read, write

    def forward(self, x):
        h = torch.zeros(2, 4)
        results = []
        for step in self.read(x):
            h = self.cell(step, h)
            results.append(h)
        return self.write(results)


READS = {
    "getitem": lambda x: (x[:, t] for t in range(50)),
    "select": lambda x: (x.select(1, t) for t in range(50)),
    "narrow": lambda x: (x.narrow(1, t, 1).squeeze(1) for t in range(50)),
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: (part[:, 0] for part in x.split(1, dim=1)),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", [torch.stack, torch.cat])
def test_a_running_index_rolls_with_the_loop(read, write):
    history = tl.get_model_metadata(Steps(READS[read], write), torch.rand(2, 50, 4))
    drawing = make_drawing(history, DrawOptions(vis_opt="rolled"))
    assert len(drawing.scene.nodes) <= 8
    assert max(len(line) for edge in drawing.scene.edges for line in edge.lines) < 40
    (step,) = [node for node in drawing.scene.nodes if node.title.startswith(f"{read}_1_")]
    assert step.title.endswith("(x50)")


def test_a_filter_without_parameters_rolls_and_what_it_writes_does_too():
    class Filter(nn.Module):
        def forward(self, x):
            h, out = torch.zeros(2, 4), torch.zeros_like(x)
            for t in range(50):
                h = 0.9 * h + 0.1 * x[:, t]
                out[:, t] = h
            return out

    history = tl.get_model_metadata(Filter(), torch.rand(2, 50, 4))
    assert history.layer_num_passes["add_1_6"] == 50
    assert history.layer_num_passes["getitem_1_4"] == 1  # another index is another layer
    rolled = roll(history._log.recording, history._log.graph)
    assert sorted(rolled.counts.values()) == [1, 1, 1, 1, 50, 50, 50, 50, 50]


def test_what_is_read_together_is_not_rolled():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x):
            for _ in range(3):
                parts = self.qkv(x).view(2, 3, 4)
                x = torch.softmax(parts[:, 0] * parts[:, 1], -1) * parts[:, 2]
            return x

    history = tl.get_model_metadata(Attention(), torch.rand(2, 4))
    rolled = roll(history._log.recording, history._log.graph)
    assert [rolled.counts[history._log.graph.layers[n].entries[0]] for n in range(1, 6)] == [3] * 5


def test_different_indices_without_a_loop_are_not_rolled():
    class Slices(nn.Module):
        def forward(self, x):
            return x[0].sin() + x[1].cos() + x[2]

    history = tl.get_model_metadata(Slices(), torch.rand(3, 4))
    assert set(roll(history._log.recording, history._log.graph).counts.values()) == {1}
