"""An edge is residual where the input of a block is added to its output, and nowhere else."""

import torch
from torch import nn

import torchlens as tl
from tests.networks import Model
from tests.page.viewer_models import MLP, ResNet18, history_of
from torchlens._page.outline import outline
from torchlens._page.part_columns import residual_links


def _targets(history) -> list[str]:
    found = outline(history._log)
    numbers = sorted(residual_links(history._log, found))
    return [history[found.links[number].target.passes[0][0]].layer_type for number in numbers]


def test_additions_around_blocks_are_residual():
    assert _targets(history_of("gpt2")) == ["add"] * 24
    # Of the eight blocks of a ResNet-18 three add what a downsampling made of their input: all of
    # that way is residual.
    found = _targets(tl.get_model_metadata(ResNet18().eval(), torch.rand(1, 3, 32, 32)))
    assert sorted(found) == ["batchnorm"] * 3 + ["conv2d"] * 3 + ["iadd"] * 8


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

    assert (
        _targets(tl.get_model_metadata(Bypasses().eval(), [torch.rand(2, 8), torch.rand(2, 8)]))
        == []
    )


class Projecting(nn.Module):
    """As the blocks of the second ResNet are: normalised before the two ways part."""

    def __init__(self):
        super().__init__()
        self.bn, self.shortcut = (
            nn.BatchNorm2d(4),
            nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 8, 1)),
        )
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)

    def forward(self, x):
        x = torch.relu(self.bn(x))
        return self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x)


def test_a_shortcut_that_projects_is_residual_from_the_input_of_the_block():
    assert _targets(tl.get_model_metadata(Projecting().eval(), torch.rand(1, 4, 8, 8))) == [
        "avgpool2d",
        "conv2d",
        "add",
    ]


class FrozenNorm(nn.Module):
    """As torchvision freezes a normalisation: it multiplies with one buffer and adds another."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("scale", torch.rand(size, 1, 1))
        self.register_buffer("shift", torch.rand(size, 1, 1))

    def forward(self, x):
        return x * self.scale + self.shift


def test_a_shortcut_with_a_frozen_normalisation_is_residual():
    def forward(self, x):
        return self.frozen(self.conv2(torch.relu(self.conv1(x)))) + self.shortcut(x)

    parts = {
        "conv1": nn.Conv2d(4, 8, 3, 2, 1),
        "conv2": nn.Conv2d(8, 8, 3, 1, 1),
        "frozen": FrozenNorm(8),
        "shortcut": nn.Sequential(nn.Conv2d(4, 8, 1, 2), FrozenNorm(8)),
    }
    block = Model(forward, **parts)
    assert _targets(tl.get_model_metadata(block.eval(), torch.rand(1, 4, 8, 8))) == [
        "conv2d",
        "mul",
        "add",
        "add",
    ]


def test_a_shortcut_that_the_block_is_given_beside_its_input_is_residual_from_there():
    def add(self, x, shortcut):
        return self.b(torch.relu(self.a(x))) + shortcut

    def forward(self, x):
        shortcut = self.shortcut(self.pool(x))
        return self.block(x, shortcut)

    block = Model(add, a=nn.Conv2d(4, 8, 3, 2, 1), b=nn.Conv2d(8, 8, 3, 1, 1))
    model = Model(forward, block=block, pool=nn.MaxPool2d(2), shortcut=nn.Conv2d(4, 8, 1))
    assert _targets(tl.get_model_metadata(model.eval(), torch.rand(1, 4, 8, 8))) == [
        "maxpool2d",
        "conv2d",
        "add",
    ]

    def from_elsewhere(self, x, y):
        return self.block(x, self.shortcut(self.pool(y)))

    other = Model(from_elsewhere, block=block, pool=nn.MaxPool2d(2), shortcut=nn.Conv2d(4, 8, 1))
    images = [torch.rand(1, 4, 8, 8), torch.rand(1, 4, 8, 8)]
    assert _targets(tl.get_model_metadata(other.eval(), images)) == []


def test_a_shortcut_that_cuts_and_pads_its_input_is_residual():
    def forward(self, x):
        short = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return self.b(torch.relu(self.a(x))) + short

    block = Model(forward, a=nn.Conv2d(4, 8, 3, 2, 1), b=nn.Conv2d(8, 8, 3, 1, 1))
    assert _targets(tl.get_model_metadata(block.eval(), torch.rand(1, 4, 8, 8))) == [
        "getitem",
        "pad",
        "add",
    ]


def test_a_shortcut_that_leaves_its_input_as_it_is_is_residual():
    def forward(self, x):
        return self.norm(self.b(torch.relu(self.a(x)))) + self.drop(self.shortcut(x))

    parts = {
        "a": nn.Linear(8, 8),
        "b": nn.Linear(8, 8),
        "norm": nn.LayerNorm(8),
        "shortcut": nn.Identity(),
        "drop": nn.Dropout(),
    }
    assert _targets(tl.get_model_metadata(Model(forward, **parts).eval(), torch.rand(2, 8))) == [
        "identity",
        "dropout",
        "add",
    ]


def test_gates_recurrences_and_pyramids_are_not_residual():
    def gates(self, x):
        return torch.sigmoid(self.a(x) + self.b(x)) * torch.tanh(self.a(x))

    def recurrence(self, x):
        state = torch.zeros(2, 8)
        for _ in range(4):
            state = torch.tanh(self.a(x) + self.b(state))
        return state

    def pyramid(self, x):
        return self.neck(x, torch.relu(self.a(x)))

    neck = Model(
        lambda self, low, high: self.lateral(low) + self.up(torch.relu(high)),
        lateral=nn.Linear(8, 8),
        up=nn.Linear(8, 8),
    )
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "neck": neck}
    for function in (gates, recurrence, pyramid):
        assert _targets(tl.get_model_metadata(Model(function, **parts), torch.rand(2, 8))) == [], (
            function.__name__
        )


def test_a_residual_keeps_its_colour_after_a_click(visit):
    tab = visit("gpt2")
    for title in ("transformer.h.0 … 11", "transformer.h.0"):
        tab.run(f"torchlens.toggle({tab.find(title)})")
    colours = (
        "[...document.querySelectorAll('#world .edge.skip')].map(e => getComputedStyle(e).stroke)"
    )
    before = tab.run(colours)
    assert len(before) == 2
    tab.run(f"torchlens.select({tab.find('transformer.h.0.ln_1')})")
    assert tab.run(colours) == before
