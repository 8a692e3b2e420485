"""Which operations of two histories are the same."""

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import Model
from tests.page.viewer_models import GPT2, Recurrent, ResidualBlock, ResNet18
from torchlens._history.align_items import AlignedItem, _best, _worth
from torchlens._history.correspondence import match
from torchlens._history.model_history import ModelHistory

IMAGE = torch.randn(1, 3, 32, 32)


def resnet(seed: int = 0) -> ResNet18:
    torch.manual_seed(seed)
    return ResNet18(width=4).eval()


def names(history: ModelHistory) -> list[str]:
    """Each entry by where it ran, what it was and which of its kind there: not by what was before,
    as a label is.
    """
    seen: dict[str, int] = {}
    found = []
    for entry in history:
        name = f"{entry.containing_module_origin} {entry.layer_type}"
        if entry.input_output_address or entry.is_buffer_layer:
            name = f"{entry.input_output_address} {entry.buffer_address}"
        seen[name] = seen.get(name, 0) + 1
        found.append(f"{name} {seen[name]}")
    return found


def matched(a: ModelHistory, b: ModelHistory) -> tuple[list[tuple[str, str]], set[str], set[str]]:
    """Pairs of names, and the names of what is only in the first and only in the second."""
    mine, theirs = names(a), names(b)
    pairs = [(mine[one], theirs[other]) for one, other in match(a, b).entries]
    return pairs, set(mine) - {one for one, _ in pairs}, set(theirs) - {other for _, other in pairs}


def log(model: nn.Module, *inputs: torch.Tensor) -> ModelHistory:
    return tl.log_forward_pass(model, list(inputs))


def test_a_history_matches_itself_entry_by_entry() -> None:
    history = log(resnet(), IMAGE)
    assert match(history, history).entries == [(entry, entry) for entry in range(len(history))]


def test_other_weights_change_no_match() -> None:
    pairs, removed, added = matched(log(resnet(0), IMAGE), log(resnet(1), IMAGE))
    assert not removed | added
    assert all(one == other for one, other in pairs)


def test_a_changed_stride_changes_no_match() -> None:
    changed = resnet()
    changed.layer2[0].conv1.stride = changed.layer2[0].downsample[0].stride = (1, 1)
    pairs, removed, added = matched(log(resnet(), IMAGE), log(changed, IMAGE))
    assert not removed | added
    assert all(one == other for one, other in pairs)


@pytest.mark.parametrize(
    "is_the_same_model", [True, False], ids=["the same model", "another with the same weights"]
)
def test_an_added_block_shifts_nothing(is_the_same_model: bool) -> None:
    model, other = resnet(), resnet()
    before = log(model, IMAGE)
    changed = model if is_the_same_model else other
    blocks = list(changed.layer1.children())
    changed.layer1 = nn.Sequential(blocks[0], ResidualBlock(4, 4, 1).eval(), blocks[1])
    pairs, removed, added = matched(before, log(changed, IMAGE))
    assert not removed
    assert {
        name.split()[0].partition(":")[0].partition(".conv")[0] for name in added if "layer" in name
    } >= {"layer1.1"}
    assert all("layer1.1" in name for name in added)
    assert [
        (one, other) for one, other in pairs if one != other.replace("layer1.2", "layer1.1")
    ] == []


def test_a_layer_put_between_others_is_the_only_one_that_is_added() -> None:
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    x = torch.randn(3, 4)
    for place in range(len(layers) + 1):
        longer = nn.Sequential(*layers[:place], nn.Tanh(), *layers[place:])
        for a, b, sides in (
            (nn.Sequential(*layers), longer, (0, 1)),
            (longer, nn.Sequential(*layers), (1, 0)),
        ):
            _, *alone = matched(log(a, x), log(b, x))
            assert [len(own) for own in alone] == list(sides), place
            assert any("tanh" in name for name in alone[0] | alone[1])


def test_a_renamed_module_is_itself() -> None:
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

    def renamed(self, x):
        return self.classifier(torch.relu(self.backbone(x)))

    def body() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    torch.manual_seed(0)
    a = log(Model(forward, body=body(), head=nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    b = log(Model(renamed, backbone=body(), classifier=nn.Linear(4, 2)).eval(), torch.randn(2, 4))
    pairs, removed, added = matched(a, b)
    assert not removed | added  # buffers of the renamed normalisation among them
    assert all(
        one.replace("body", "backbone").replace("head", "classifier") == other
        for one, other in pairs
    )


def test_a_wrapped_model_and_an_operation_that_became_a_module_find_their_counterparts() -> None:
    inner = resnet()
    wrapped = Model(lambda self, x: self.model(x) * 2, model=inner).eval()
    _, removed, added = matched(log(inner, IMAGE), log(wrapped, IMAGE))
    assert not removed
    assert added == {"None mul 1"}
    plain = Model(lambda self, x: torch.relu(self.fc(x)), fc=nn.Linear(4, 4))
    module = Model(lambda self, x: self.act(self.fc(x)), fc=nn.Linear(4, 4), act=nn.ReLU())
    _, removed, added = matched(log(plain, torch.randn(2, 4)), log(module, torch.randn(2, 4)))
    assert not removed | added


def test_an_operation_that_became_another_is_matched_in_its_place() -> None:
    one = Model(lambda self, x: self.fc(nn.functional.gelu(self.fc(x))), fc=nn.Linear(4, 4))
    other = Model(lambda self, x: self.fc(nn.functional.silu(self.fc(x))), fc=nn.Linear(4, 4))
    pairs, removed, added = matched(log(one, torch.randn(2, 4)), log(other, torch.randn(2, 4)))
    assert ("None gelu 1", "None silu 1") in pairs
    assert not removed | added


def test_another_activation_of_gpt2_leaves_the_rest_matched() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (1, 8))
    other = GPT2(size=16, heads=2, layers=3).eval()
    for block in other.transformer.h:
        block.mlp.act = nn.ReLU()
    pairs, removed, added = matched(
        log(GPT2(size=16, heads=2, layers=3).eval(), ids), log(other, ids)
    )
    assert all(".mlp.act" in name for name in removed | added)
    assert len(added) == 3
    assert all(one == other for one, other in pairs)


def test_of_a_loop_with_fewer_steps_the_first_ones_are_matched() -> None:
    cell = Recurrent()
    a, b = log(cell, torch.randn(2, 9, 16)), log(cell, torch.randn(2, 5, 16))
    pairs = {a[one].layer_label: b[other].layer_label for one, other in match(a, b).entries}
    assert [pairs.get(f"tanh_1_6:{step}") for step in range(1, 10)] == [
        f"tanh_1_6:{step}" for step in range(1, 6)
    ] + [None] * 4
    assert len(pairs) == len(b)


@pytest.mark.slow
def test_each_entry_is_matched_once_and_in_order() -> None:
    generator = torch.Generator().manual_seed(0)

    def random_model() -> nn.Module:
        kinds = torch.randint(0, 5, (40,), generator=generator).tolist()
        layers = [
            nn.ReLU(),
            nn.Tanh(),
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()),
        ]
        return nn.Sequential(*(layers[kind] for kind in kinds))

    for _ in range(20):
        a, b = (log(random_model(), torch.randn(2, 4)) for _ in range(2))
        pairs = match(a, b).entries
        inner = [pair for pair in pairs if not a[pair[0]].input_output_address]
        assert [other for _, other in inner] == sorted({other for _, other in inner})
        for one, other in inner:  # what became another operation has the same shape
            assert (
                a[one].layer_type == b[other].layer_type
                or a[one].tensor_shape == b[other].tensor_shape
            )


def test_the_best_alignment_is_as_good_as_trying_all() -> None:
    generator = torch.Generator().manual_seed(3)

    def items(count: int) -> list[AlignedItem]:
        numbers = torch.randint(1, 3, (count, 9), generator=generator).tolist()
        return [
            AlignedItem(1, own[0], own[1], 0, own[2], own[3], own[4], own[5], own[6], own[7], 1.0)
            for own in numbers
        ]

    for _ in range(30):
        first, second = items(4), items(5)
        columns = {
            name: np.array([getattr(item, name) for item in second]) for name in AlignedItem._fields
        }
        table = np.array([_worth(item, columns) for item in first])
        best = 0.0
        for size in range(5):
            for rows in combinations(range(4), size):
                for others in combinations(range(5), size):
                    worth = [table[row, other] for row, other in zip(rows, others, strict=True)]
                    best = max(best, sum(worth) if all(worth) else 0.0)
        assert sum(table[pair] for pair in _best(first, second)) == pytest.approx(best)
