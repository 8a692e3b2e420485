"""Rows of the table: every call stands below the one that made it, and rows add up to no more than
the row above.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchlens
from tests.sampling import first
from torchlens._profile.places import named_rows, placed
from torchlens._profile.quantities import QUANTITIES, module_value


class Node(nn.Module):
    """Calls its parts, some of which others have, too; with `depth` to go, perhaps itself."""

    def __init__(self, choice: random.Random, depth: int, pool: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.times = []
        self.is_recursive = choice.random() < 0.3
        for _ in range(choice.randint(1, 3)):
            kind = choice.random()
            if pool and kind < 0.35:
                part = choice.choice(pool)
            elif depth and kind < 0.8:
                part = Node(choice, depth - 1, pool)
                pool.append(part)
            else:
                part = choice.choice([lambda: nn.Linear(8, 8), nn.ReLU, lambda: nn.LayerNorm(8)])()
                pool.append(part)
            self.parts.append(part)
            self.times.append(choice.randint(1, 2))

    def forward(self, x: torch.Tensor, turns: int = 1) -> torch.Tensor:
        for part, times in zip(self.parts, self.times, strict=True):
            for _ in range(times):
                x = part(x) + 0.1
        return self(x, turns - 1) if self.is_recursive and turns else x


def profile_of(model: nn.Module, level: Any) -> Any:
    with torchlens.profile(model, level=level) as profile:
        for _ in range(3):
            model(torch.rand(2, 8)).sum().backward()
    return profile._measurements


@pytest.mark.parametrize("level", ["module", "operation"])
@pytest.mark.parametrize("seed", first(4, range(12)))
def test_rows_add_up_and_hold_every_call_once(seed: int, level: str):
    choice = random.Random(seed)
    measurements = profile_of(nn.Sequential(nn.Linear(8, 8), Node(choice, 3, [])), level)
    (root,) = placed(measurements).trees
    for record in root.walk():
        for name in ("forward_time", "backward_time", "total_time"):
            inside = [module_value(child, QUANTITIES[name]) or 0.0 for child in record.children]
            own = module_value(record, QUANTITIES[name])
            assert sum(inside) <= (own or 0.0) * (1 + 1e-9), (record.address, name)
    shown = sorted(call.index for record in root.walk() for call in record.calls)
    assert shown == [call.index for call in measurements.calls]
    assert root.num_parameters == measurements.root.num_parameters
    assert sum(record.own_num_parameters for record in root.walk()) == root.num_parameters


def rows_of(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    (root,) = placed(profile_of(model, "module")).trees
    for record, name in named_rows(root):
        yield "  " * record.depth + name, record.num_calls, record.num_parameters


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_calls_by_another_module_are_a_row_below_it():
    shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert list(
        rows_of(nn.Sequential(Pair(shared, nn.Linear(8, 8)), Pair(nn.Tanh(), shared), shared))
    ) == [
        ("", 1, 144),
        ("  0", 1, 144),
        ("    first", 1, 72),
        ("      0", 1, 72),
        ("      1", 1, 0),
        ("    second", 1, 72),
        ("  1", 1, 0),
        ("    first", 1, 0),
        ("    0.first", 1, 0),
        ("      0", 1, 0),
        ("      1", 1, 0),
        ("  0.first", 1, 0),
        ("    0", 1, 0),
        ("    1", 1, 0),
    ]


class Countdown(nn.Module):
    def __init__(self, turns: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.turns = turns

    def forward(self, x: torch.Tensor, done: int = 0) -> torch.Tensor:
        x = self.layer(x)
        return self(x, done + 1) if done < self.turns else x


def test_a_module_that_calls_itself_has_a_row_for_each_depth():
    assert list(rows_of(nn.Sequential(Countdown(2)))) == [
        ("", 1, 72),
        ("  0", 1, 72),
        ("    layer", 1, 72),
        ("    0", 1, 0),
        ("      layer", 1, 0),
        ("      0", 1, 0),
        ("        layer", 1, 0),
    ]


def test_a_module_that_calls_itself_often_can_be_printed():
    with torchlens.profile(model := nn.Sequential(Countdown(150))) as profile:
        model(torch.rand(2, 8))
    text = str(profile.summary(width=200))
    assert "Called by several modules, each with a row below every one of them: 0.\n" in text
    assert len(text.splitlines()) < 80
    assert len(str(profile.summary(width=200, depth=1000)).splitlines()) > 200


def test_a_shared_module_that_was_taken_out_of_the_model_has_no_row():
    gone, shared = nn.Linear(8, 8), nn.Sigmoid()
    model = nn.Sequential(Pair(gone, nn.Tanh()), Pair(shared, gone), shared)
    with torchlens.profile(model) as profile:
        model(torch.rand(2, 8))
        model[0], model[1].second = nn.ReLU(), nn.ReLU()
        model(torch.rand(2, 8))
    text = str(profile.summary(width=200))
    assert "Linear" not in text
    assert "each with a row below every one of them: 1.first." in text


def test_calls_of_the_users_own_beside_the_model_have_rows_of_their_own():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    with torchlens.profile(model) as p:
        for _ in range(2):
            x = torch.rand(3, 4)
            (model(x).sum() + model[0](x).sum() + model[0](x).sum()).backward()
    found = [(name, record.num_calls, record.num_parameters) for tree in placed(p.measurements).trees
             for record, name in named_rows(tree)]  # fmt: skip
    assert found == [
        ("", 1, 30), ("0", 1, 20), ("0", 1, 20), ("1", 1, 0), ("1", 1, 10), ("0", 2, 0), ("0", 2,
        0), ("1", 2, 0),
    ]  # fmt: skip
    text = str(p.summary(width=120))
    assert "Also called by your code, beside the model, with a row for that: 0." in text
    alone = placed(p.measurements).trees[1]
    assert alone.typical("flops") is None  # only the first of its calls was counted
    assert p["1"].typical("flops") == 2 * 3 * 4 * 2


def test_parts_of_a_model_that_is_never_called_stand_in_their_places():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torchlens.profile(model) as p:
        model[1](model[0](torch.rand(3, 4))).sum().backward()
    assert len(placed(p.measurements).trees) == 1
    assert "beside the model" not in str(p)
