"""What is a pass of one layer and what is not, and when a model is recurrent."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchlens as tl
from tests.graph.repeated_programs import layers_by_definition, random_program
from tests.networks import Model
from tests.sampling import first
from torchlens._graph.loops import group_into_layers
from torchlens._graph.paths import most_passes_of_a_loop

Forward = Callable[..., torch.Tensor]


def log(forward: Forward, *inputs: torch.Tensor, **parts: Any) -> tl.ModelHistory:
    torch.manual_seed(0)
    return tl.log_forward_pass(Model(forward, **parts), list(inputs or (torch.randn(3, 4),)))


def passes(history: tl.ModelHistory) -> dict[str, int]:
    """The layers with several passes."""
    return {layer: count for layer, count in history.layer_num_passes.items() if count > 1}


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


# -- parts and reductions of one parameter ---------------------------------------------------------


def slices_as_query_key_value(self: Model, x: torch.Tensor) -> torch.Tensor:
    query, key, value = (F.linear(x, self.w[at : at + 4]) for at in (0, 4, 8))
    return (query @ key.T).softmax(-1) @ value


def chunks_as_query_key_value(self: Model, x: torch.Tensor) -> torch.Tensor:
    query, key, value = (x @ part.T for part in self.w.chunk(3))
    return (query @ key.T).softmax(-1) @ value


def both_sums(self: Model, x: torch.Tensor) -> torch.Tensor:
    return x * self.s.sum(0) + self.s.sum(1)


def parts_of_positions(self: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :1] + self.p[:, :1], x[:, 1:] + self.p[:, 1:]], 1)


def equal_parts_of_positions(self: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:, :2] + self.p[:, :2] * 2, x[:, 2:] + self.p[:, 2:] * 2], 1)


def both_triangles(self: Model, x: torch.Tensor) -> torch.Tensor:
    return x @ (self.s.triu() + self.s.triu(1).T)


def one_weight_with_two_strides(self: Model, x: torch.Tensor) -> torch.Tensor:
    y = x[None, None, :, :]
    k = self.s[None, None, :2, :2]
    return F.conv2d(y, k).sum() + F.conv2d(y, k, stride=2).sum()


@pytest.mark.parametrize(
    "forward",
    [
        slices_as_query_key_value,
        chunks_as_query_key_value,
        both_sums,
        parts_of_positions,
        equal_parts_of_positions,
        both_triangles,
        one_weight_with_two_strides,
    ],
)
def test_different_uses_of_one_parameter_are_layers_of_their_own(forward: Forward) -> None:
    history = log(forward, w=weight(12, 4), p=weight(3, 4), s=weight(4, 4))
    assert passes(history) == {}
    assert not history.model_is_recurrent


def test_the_same_part_of_a_parameter_is_one_layer() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x @ self.w[:4].T)
        return x

    history = log(forward, w=weight(12, 4))
    assert set(history.layer_num_passes.values()) == {1, 3}
    assert history.model_max_recurrent_loops == 3


@pytest.mark.parametrize("is_training", [False, True])
def test_a_net_with_spectral_norm_is_feedforward(is_training: bool) -> None:
    norm = torch.nn.utils.parametrizations.spectral_norm
    layers = [norm(nn.Linear(4, 4)), nn.ReLU(), norm(nn.Linear(4, 4)), nn.ReLU()]
    history = tl.log_forward_pass(nn.Sequential(*layers).train(is_training), torch.randn(2, 4))
    assert passes(history) == {}
    assert not history.model_is_recurrent


def test_a_weight_used_twice_in_the_same_way_is_one_layer() -> None:
    def forward(self: Model, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.linear(a, self.w)) - F.relu(F.linear(b, self.w))

    history = log(forward, torch.randn(3, 4), torch.randn(3, 4), w=weight(4, 4))
    assert passes(history) == {"linear_1_1": 2, "relu_1_2": 2}


# -- one module, several calls ---------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.fc(self.norm(x / 255)))


def of_the_inputs(self: Model, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (self.tower(a) - self.tower(b)).norm()


def of_other_operations(self: Model, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(self.tower(a.exp()), self.tower(b * 2))


@pytest.mark.parametrize("forward", [of_the_inputs, of_other_operations])
def test_a_siamese_tower_has_two_passes_of_all_its_layers_and_is_not_recurrent(
    forward: Forward,
) -> None:
    history = log(forward, torch.randn(3, 4), torch.randn(3, 4), tower=Tower())
    once, twice = ([f"{name}:{turn}" for name in ("truediv_1", "layernorm_1", "linear_1", "relu_1",
                    "add_1")] for turn in (1, 2))  # fmt: skip
    assert all(history[label].layer_passes_total == 2 for label in (*once, *twice))
    assert len(passes(history)) == 5
    assert not history.model_is_recurrent
    assert history.model_max_recurrent_loops == 1
    assert "feedforward, with shared layers (at most 2 passes)" in str(history)


def test_a_tower_applied_to_its_own_result_is_recurrent() -> None:
    history = log(lambda self, x: self.tower(self.tower(x)), tower=Tower())
    assert set(passes(history).values()) == {2}
    assert history.model_is_recurrent


def test_an_embedding_shared_by_encoder_and_decoder_is_not_recurrent() -> None:
    def forward(self: Model, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.table(target) @ self.table(source).transpose(-1, -2)

    tokens = torch.randint(9, (2, 5))
    history = log(forward, tokens, tokens.flip(0), table=nn.Embedding(9, 4))
    assert history["embedding_1:2"].layer_passes_total == 2
    assert not history.model_is_recurrent


def test_what_feeds_a_shared_layer_from_two_layers_is_two_layers() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.relu(self.a(x))) - self.shared(torch.relu(self.b(x)))

    parts = {name: nn.Linear(4, 4) for name in ("a", "b", "shared")}
    assert passes(log(forward, **parts)) == {"linear_2_3": 2}


# -- loops -----------------------------------------------------------------------------------------


def sum_of_columns(self: Model, p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return p[:, 0].exp() + p[:, 1].exp() + r[:, 0].exp() + r[:, 1].exp()


def columns_of_two_tensors(self: Model, p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    own = [tensor[:, column].unsqueeze(1) for tensor in (p, r) for column in range(4)]
    return torch.cat(own, 1)


def the_same_twice_for_two_tensors(self: Model, p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.relu() * 2 for tensor in (p, p, r, r)])


@pytest.mark.parametrize(
    "forward", [sum_of_columns, columns_of_two_tensors, the_same_twice_for_two_tensors]
)
def test_a_run_of_equal_steps_on_two_tensors_is_no_loop(forward: Forward) -> None:
    history = log(forward, torch.randn(3, 4), torch.randn(3, 4))
    assert passes(history) == {}
    assert not history.model_is_recurrent


def test_a_loop_over_time_without_parameters_is_one_layer_each() -> None:
    def forward(self: Model, xs: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(3)
        for step in range(4):
            state = torch.tanh(state + xs[:, step])
        return state

    assert passes(log(forward)) == {"add_1_3": 4, "tanh_1_4": 4}


def test_a_loop_over_two_streams_with_equal_steps_is_two_layers() -> None:
    def forward(self: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x, y = torch.sin(x), torch.sin(y)
        return x + y

    history = log(forward, torch.randn(3, 4), torch.randn(3, 4))
    assert passes(history) == {"sin_1_1": 3, "sin_2_2": 3}
    assert history.model_max_recurrent_loops == 3


@pytest.mark.parametrize("seed", first(5, range(100)))
def test_loops_are_those_of_the_definition(seed: int) -> None:
    """The algorithm joins what the definition joins, in all but a few programs whose bodies consist
    of nothing but equal steps; there it joins less, never more.
    """
    rng = random.Random(seed)
    missed = found = 0
    for _ in range(60):
        keys, parents = random_program(rng)
        size = len(keys)
        mine = group_into_layers(keys, [False] * size, keys, parents, keys, [0] * size, [])
        expected = layers_by_definition(keys, parents)
        found += len(set(expected)) < len(expected)
        missed += mine != expected
        pairs = zip(mine, expected, strict=True)
        assert all(expected[one] == layer for one, layer in pairs)
    assert missed <= 0.1 * found + 2


def test_recurrence_is_reachability_between_passes() -> None:
    rng = random.Random(0)
    answers = set()
    for _ in range(300):
        size = rng.randint(2, 9)
        parents = [
            tuple(rng.sample(range(entry), min(entry, rng.randint(0, 2)))) for entry in range(size)
        ]
        layer_of = [rng.randrange(4) for _ in range(size)]
        layers = [[e for e in range(size) if layer_of[e] == k] for k in range(4)]
        behind: list[set[int]] = []
        for entry, own in enumerate(parents):
            behind.append({entry}.union(*(behind[parent] for parent in own)))
        looped = [own for own in layers if any(a != b and a in behind[b] for a in own for b in own)]
        expected = max(map(len, looped), default=1)
        answers.add(expected)
        assert most_passes_of_a_loop(layers, parents) == expected
    assert len(answers) > 2
