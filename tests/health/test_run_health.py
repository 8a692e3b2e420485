"""Findings of a run: what began to be wrong, at which step and in which module; and nothing about
what is well.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlens as tl


def kinds(folder: Path) -> dict[str, tuple[int, str]]:
    found = [each for each in tl.open_run(folder).findings if not each.is_over]
    return {each.kind: (each.step, each.module) for each in reversed(found)}


def train(model: nn.Module, folder: Path, num_steps: int, lr: float = 1e-3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with tl.monitor(model, folder, graph="modules"):
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.randn(64, 16)).square().mean().backward()
            optimizer.step()


def test_dead_units_are_found_where_they_die_and_not_where_zeros_are_handed_on(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Identity(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].bias[:12] = -1000.0
    train(model, tmp_path, 4)
    assert kinds(tmp_path)["dead units"][1] == "1"
    assert tl.open_run(tmp_path)["1"].outputs.dead[-1] == 12 / 16


class SharedReLU(nn.Module):
    """One ReLU after several layers; the units of one of these are dead."""

    def __init__(self, sizes: tuple[int, ...], dead: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(size, following) for size, following in pairwise((16, *sizes))
        )
        self.relu, self.head = nn.ReLU(), nn.Linear(sizes[-1], 2)
        with torch.no_grad():
            self.layers[dead].bias.fill_(-1000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.relu(layer(x))
        found: torch.Tensor = self.head(x)
        return found


@pytest.mark.parametrize("sizes", [(16, 32), (16, 16, 16)])
def test_dead_units_of_one_of_the_uses_of_a_module_are_found(
    sizes: tuple[int, ...], tmp_path: Path
) -> None:
    train(SharedReLU(sizes, dead=len(sizes) - 1), tmp_path, 6)
    assert kinds(tmp_path)["dead units"][1] == "relu"
    assert tl.open_run(tmp_path)["relu"].outputs.dead[-1] == 1


class Channels(nn.Module):
    """12 of 16 channels are dead after a ReLU; `how` says what is before it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, last = how, nn.Conv1d(16, 2, 1)
        self.layer: nn.Module = (
            nn.Linear(3, 16) if how == "last axis" else nn.Conv1d(3, 16, 3, padding=1)
        )
        self.norm = nn.BatchNorm1d(16) if how == "norm" else nn.Identity()
        self.relu, self.head = nn.ReLU(), nn.Linear(16, 2) if how == "last axis" else last
        with torch.no_grad():
            (self.norm if how == "norm" else self.layer).bias[:12] = -1000.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layer(x))
        found: torch.Tensor = self.head(self.relu(hidden + 0 if self.how == "added to" else hidden))
        return found


@pytest.mark.parametrize("how", ["convolution", "norm", "added to", "last axis"])
def test_dead_channels_are_found_along_the_axis_that_the_modules_around_say(
    how: str, tmp_path: Path
) -> None:
    model = Channels(how)
    shape = (4, 8, 8, 3) if how == "last axis" else (16, 3, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tl.monitor(model, tmp_path, graph="modules"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(shape)).square().mean().backward()
            optimizer.step()
    assert tl.open_run(tmp_path)["relu"].outputs.dead[-1] == 12 / 16
    assert kinds(tmp_path)["dead units"][1] == "relu"


def test_saturation_is_found(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].weight.mul_(1000)
    train(model, tmp_path, 4)
    assert kinds(tmp_path)["saturated activation"] == (
        2,
        "1",
    )  # after three recorded steps in a row


def test_nan_is_found_in_the_step_and_module_where_it_comes_up(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.num_calls = nn.Linear(16, 16), nn.Linear(16, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            hidden = self.first(x)
            return self.second(hidden / 0.0 * 0.0 if self.num_calls == 3 else hidden)

    train(Breaks(), tmp_path, 3)
    assert kinds(tmp_path)["non-finite values"] == (2, "second")


def test_nan_that_spreads_is_one_finding_and_continues(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan  # one step later, all is
    train(model, tmp_path, 4)
    found = [each for each in tl.open_run(tmp_path).findings if each.kind == "non-finite values"]
    assert [(each.step, each.finding.where, each.is_over) for each in found] == [
        (0, "1.weight", False)
    ]


def test_vanishing_gradients_and_updates_that_are_too_large_are_found(tmp_path: Path) -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
    train(nn.Sequential(*layers, nn.Linear(16, 2)), tmp_path / "deep", 4)
    assert kinds(tmp_path / "deep")["vanishing gradient"] == (2, "0")
    train(nn.Sequential(nn.Linear(16, 2)), tmp_path / "fast", 4, lr=1.0)
    assert kinds(tmp_path / "fast")["large update"] == (2, "0")


def test_a_model_that_is_well_has_no_findings(tmp_path: Path) -> None:
    train(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)), tmp_path, 5, lr=0.02)
    assert not {
        "dead units",
        "saturated activation",
        "vanishing gradient",
        "exploding gradient",
    } & set(kinds(tmp_path))
    assert "non-finite values" not in kinds(tmp_path)


def test_exploding_gradients_are_found_in_the_weight_that_they_are_largest_beside(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    with torch.no_grad():
        model[2].weight.mul_(1e5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tl.monitor(model, tmp_path, graph="modules"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, 16)).square().sum().backward()
            optimizer.step()
    assert kinds(tmp_path)["exploding gradient"] in ((2, "0"), (2, "1"))


def told(folder: Path, kind: str) -> list[tuple[int, bool]]:
    return [(each.step, each.is_over) for each in tl.open_run(folder).findings if each.kind == kind]


@pytest.mark.parametrize("kind", ["exploding gradient", "vanishing gradient"])
def test_gradients_of_changing_weights_are_one_finding_that_ends_when_all_are_well(
    kind: str, tmp_path: Path
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    worst_first = {"exploding gradient": (1e7, 1e6), "vanishing gradient": (1e-7, 1e-6)}[kind]
    with tl.monitor(model, tmp_path, graph="modules"):
        for step in range(10):
            for number, layer in enumerate(model):
                worst, other = (1.0, 1.0) if step == 8 or number > 3 else worst_first
                layer.weight.grad = torch.full((16, 16), worst if number == step % 4 else other)
            optimizer.step()
    assert told(tmp_path, kind) == [(2, False), (8, True)]


def test_small_updates_are_reported_together(tmp_path: Path) -> None:
    train(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2)), tmp_path, 4, lr=1e-9)
    (found,) = [each for each in tl.open_run(tmp_path).findings if each.kind == "small update"]
    assert found.step == 2
    assert not found.is_over
    assert found.finding.threshold == 1e-4
    assert {"0.weight", "1.weight"} == {
        found.finding.where,
        found.finding.text.rsplit(": ", 1)[1].rstrip("."),
    }


@pytest.mark.parametrize(
    "log", [("parameters", "parameter_gradients", "updates"), ("parameters", "updates")]
)
def test_a_frozen_weight_has_no_small_update(log: tuple[str, ...], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9)
    with tl.monitor(model, tmp_path, graph="modules", log=log):
        for _ in range(4):
            model(torch.randn(64, 16)).square().mean().backward()
            optimizer.step()
    (found,) = [
        each.finding for each in tl.open_run(tmp_path).findings if each.kind == "small update"
    ]
    assert found.where == "1.weight"
    assert "more" not in found.text


def test_a_weight_whose_gradient_is_zero_learns_too_little(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tl.monitor(model, tmp_path, graph="modules"):
        for _ in range(4):
            optimizer.zero_grad()
            hidden = model[0](torch.randn(64, 16))
            (model[1](hidden.detach()).sum() * 0 + hidden.square().mean()).backward()
            optimizer.step()
    assert kinds(tmp_path)["small update"] == (2, "1")


@pytest.mark.parametrize("num_rows", [30_000, 1_000])
@pytest.mark.parametrize(
    ("lr", "expected"), [(1.0, set()), (1e-4, {"small update"}), (1e3, {"large update"})]
)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_of_an_embedding_the_rows_that_have_a_gradient_are_judged(
    num_rows: int, lr: float, expected: set[str], is_sparse: bool, tmp_path: Path
) -> None:
    model = nn.Embedding(num_rows, 16, sparse=is_sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with tl.monitor(model, tmp_path, graph="modules"):
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randperm(num_rows)[:200]) * torch.randn(16)).sum().mul(1e-3).backward()
            optimizer.step()
    # Of a fifth of the rows the sample has enough; of one in 150 it does not, and nothing is told.
    assert {"small update", "large update"} & set(kinds(tmp_path)) == (
        expected if num_rows == 1_000 else set()
    )


def test_an_embedding_of_which_few_rows_have_a_gradient_has_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(30_000, 16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tl.monitor(model, tmp_path, graph="modules"):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.arange(9, 15)).square().mean().backward()
            optimizer.step()
    assert (
        tl.open_run(tmp_path)["0"].parameter_gradients["weight"].rms.tolist() == [0] * 6
    )  # in the sample
    assert not {"zero gradients", "vanishing gradient"} & set(kinds(tmp_path))


class Sometimes(nn.Module):
    """The first layer runs in every call, the tanh only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tanh, self.runs_tanh = nn.Linear(16, 16), nn.Tanh(), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.tanh(hidden) if self.runs_tanh else hidden


def saturations(model: Sometimes, folder: Path, runs: str) -> list[tuple[int, bool]]:
    """Trains one step for each letter: 's' runs the tanh saturated, 'h' healthy, '-' not at all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tl.monitor(model, folder, graph="modules"):
        for each in runs:
            model.runs_tanh = each != "-"
            model(torch.randn(64, 16) * (1000.0 if each == "s" else 0.001)).sum().backward()
            optimizer.step()
    findings = tl.open_run(folder).findings
    return [(each.step, each.is_over) for each in findings if each.kind == "saturated activation"]


def test_steps_in_which_its_module_does_not_run_do_not_end_a_finding(tmp_path: Path) -> None:
    assert saturations(Sometimes(), tmp_path / "a", "sss---sss") == [(2, False)]
    assert saturations(Sometimes(), tmp_path / "b", "sss--h") == [(2, False), (5, True)]


def test_steps_in_which_its_module_does_not_run_do_not_count_against_one_that_is_coming(
    tmp_path: Path,
) -> None:
    assert saturations(Sometimes(), tmp_path / "a", "s-s--s") == [(5, False)]
    assert saturations(Sometimes(), tmp_path / "b", "s-shss") == []


def test_steps_without_gradients_do_not_end_a_finding_about_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2))
    with torch.no_grad():
        model[2].weight.mul_(1e5)
    with tl.monitor(model, tmp_path, graph="modules", evaluation=True) as run:
        for number in range(6):
            model.zero_grad()
            with torch.set_grad_enabled(number < 3):
                loss = model(torch.randn(64, 16)).square().sum()
            if number < 3:
                loss.backward()
            run.step()
    found = [each for each in tl.open_run(tmp_path).findings if each.kind == "exploding gradient"]
    assert [(each.step, each.is_over) for each in found] == [(2, False)]


def test_zero_gradients_go_on_while_all_gradients_are_zero(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tl.monitor(model, tmp_path, graph="modules"):
        for step in range(12):
            optimizer.zero_grad()
            first = model[0](torch.randn(64, 16))
            loss = model[1](first * 0 + first.detach()).square().mean()
            (loss * 0 if step >= 6 else loss).backward()
            optimizer.step()
    found = [each for each in tl.open_run(tmp_path).findings if each.kind == "zero gradients"]
    assert [(each.step, each.is_over) for each in found] == [(2, False)]
