"""An edge is residual where the input of a block is added to its output, and nowhere else."""

import torch
from torch import nn

import torchlens as tl
from tests.viewer.viewer_models import MLP, ResNet18, history_of
from torchlens.viewer.outline import outline
from torchlens.viewer.residuals import residual_links


def _targets(history) -> list[str]:
    found = outline(history._log)
    numbers = sorted(residual_links(history._log, found))
    return [history[found.links[number].target.passes[0][0]].layer_type for number in numbers]


def test_additions_around_blocks_are_residual():
    assert _targets(history_of("gpt2")) == ["add"] * 24
    # Of the eight blocks of a ResNet-18 three add what a downsampling made of their input.
    assert _targets(tl.get_model_metadata(ResNet18().eval(), torch.rand(1, 3, 32, 32))) == ["iadd"] * 5


def test_formulas_masks_tables_and_concatenations_are_not():
    class Bypasses(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.mlp = nn.Linear(8, 8), nn.Linear(16, 8), MLP(8)

        def forward(self, x, mask):
            table = torch.arange(8.0)
            y = self.mlp(x) + mask + table
            y = y * x + torch.sin(x) * y
            return self.b(torch.cat([self.a(y), y], dim=-1))

    assert _targets(tl.get_model_metadata(Bypasses().eval(), [torch.rand(2, 8), torch.rand(2, 8)])) == []


def test_a_residual_keeps_its_colour_after_a_click(visit):
    tab = visit("gpt2")
    for title in ("transformer.h.0 … 11", "transformer.h.0"):
        tab.run(f"torchlens.toggle({tab.find(title)})")
    colours = "[...document.querySelectorAll('#world .edge.skip')].map(e => getComputedStyle(e).stroke)"
    before = tab.run(colours)
    assert len(before) == 2
    tab.run(f"torchlens.select({tab.find('transformer.h.0.ln_1')})")
    assert tab.run(colours) == before
