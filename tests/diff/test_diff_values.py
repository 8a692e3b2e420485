"""Values of every kind: NaN, whole numbers, none at all, written in place, complex, random, in
short types.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchlens as tl
from benchmarks.planted import transformer

X = torch.linspace(-1.0, 1.3, 32).reshape(4, 8).sin()


class Model(nn.Module):
    """Does what it is told."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self.linear(x), x)


def logged(body: Callable[[Any, torch.Tensor], Any]) -> tl.ModelHistory:
    return tl.log_forward_pass(Model(body), X)


def written(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = y + 0.5
    y[:, :4] = 0
    flat = y.view(-1)
    y.mul_(2)
    return flat.view(4, 8) + 1


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        lambda y, x: y.log().tanh(),  # NaN in the same places
        lambda y, x: (1 / (y * 0)).abs(),  # Inf
        lambda y, x: y.argmax(-1),
        lambda y, x: y > 0,
        lambda y, x: y[:0],
        lambda y, x: y.sum(),
        lambda y, x: torch.fft.fft(y).abs(),
        lambda y, x: (y.relu(), {"a": y.tanh()}),
        written,
    ],
)
def test_a_model_agrees_with_itself_whatever_it_computes(body: Any, isolate: bool) -> None:
    diff = tl.diff(logged(body), logged(body), isolate=isolate)
    assert diff.ok
    assert "They agree" in str(diff)


def grouped(y: Any, scale: float | None = None) -> Any:
    """Attention in which four heads of queries share two of keys and values."""
    keys, values = torch.stack([y.tanh(), y.exp()])[None], torch.stack([y.sin(), y.neg()])[None]
    queries = torch.stack([y, y * 2, y * 3, y.cos()])[None]
    return F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "label", "reason"),
    [
        (
            lambda y, x: y.log().tanh(),
            lambda y, x: y.abs().log().tanh(),
            "tanh",
            "abs_1_2 is not in the reference",
        ),
        (
            lambda y, x: y.argmax(-1),
            lambda y, x: y.argmin(-1),
            "argmin",
            "argmax; the candidate: argmin",
        ),
        (lambda y, x: (y > 0).float() * y, lambda y, x: (y > 0.3).float() * y, "", ""),
        (lambda y, x: y.sum(), lambda y, x: y.mean(), "mean", "sum; the candidate: mean"),
        (
            lambda y, x: y[:, ::2],
            lambda y, x: y[:, :3],
            "getitem",
            "(:, ::2) in the reference, (:, :3) in the candidate",
        ),
        (
            lambda y, x: torch.fft.fft(y).abs(),
            lambda y, x: torch.fft.fft(y, norm="ortho").abs(),
            "fft",
            "1/sqrt(8)",
        ),
        (lambda y, x: y.relu_().add_(1), lambda y, x: y.relu_().add_(1.01), "add", ""),
        (
            lambda y, x: (y.relu(), {"a": y.tanh()}),
            lambda y, x: (y.relu(), {"a": y.relu()}),
            "relu",
            "computes relu",
        ),
        (
            lambda y, x: y.tanh(),
            lambda y, x: F.dropout(y, 0.5, True).tanh(),
            "dropout",
            "draws random numbers",
        ),
        (
            lambda y, x: grouped(y),
            lambda y, x: grouped(y, scale=1.0),
            "scaleddotproduct",
            "without 1/sqrt(d)",
        ),
        (lambda y, x: written(y, x) * 3, lambda y, x: (y + 0.5) * 3, "", ""),
    ],
)
def test_one_difference_is_one_culprit(
    ours: Any, theirs: Any, label: str, reason: str, isolate: bool
) -> None:
    diff = tl.diff(logged(ours), logged(theirs), isolate=isolate)
    assert not diff.ok
    assert len(diff.culprits) == 1
    operations = " ".join(diff.culprits[0].candidate_operations)
    assert label in operations
    assert reason in " ".join(diff.culprits[0].reasons)
    assert diff.text(60)
    assert diff.to_json()


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "label"),
    [
        (lambda y, x: (x.long() + 2**60) * 2, lambda y, x: (x.long() + 2**60) * 2 + 1, "add_2_5"),
        (lambda y, x: (x * 1e18).long() * 2, lambda y, x: (x * 1e18).long() * 2 + 1, "add_1_5"),
        (lambda y, x: (x * 1e18).long(), lambda y, x: (x * 1e18).long() + 1, "add_1_4"),
        (lambda y, x: (y, (x * 1e18).long()), lambda y, x: (y, (x * 1e18).long() ^ 1), "xor_1_4"),
        (lambda y, x: (x * 0).long() + (2**63 - 1), lambda y, x: (x * 0).long() - 2**63, "sub_1_4"),
    ],
)
def test_whole_numbers_are_compared_exactly(
    ours: Any, theirs: Any, label: str, isolate: bool
) -> None:
    diff = tl.diff(logged(ours), logged(theirs), isolate=isolate)
    assert [culprit.candidate for culprit in diff.culprits] == [label]
    assert not diff.outputs.agree
    assert "differs" in diff.text(200)
    assert tl.diff(logged(ours), logged(ours), isolate=isolate).outputs.units == 0


def test_large_whole_numbers_in_another_layout_are_the_same() -> None:
    assert tl.diff(
        logged(lambda y, x: (x * 9).long() + 2**60),
        logged(lambda y, x: ((x * 9).long() + 2**60).t()),
    ).ok


def test_large_whole_numbers_as_inputs_are_compared_exactly() -> None:
    ids = torch.arange(8) + 2**60
    doubled = tl.log_forward_pass(nn.Flatten(0), ids * 2)
    with pytest.raises(tl.CannotCompareError, match="The inputs differ"):
        tl.diff(doubled, tl.log_forward_pass(nn.Flatten(0), ids * 2 + 1))


def test_running_again_changes_neither_history_nor_model() -> None:
    model = Model(written)
    candidate = tl.log_forward_pass(model, X)
    before = [entry.tensor_contents.clone() for entry in candidate]
    weights = [parameter.clone() for parameter in model.parameters()]
    tl.diff(logged(lambda y, x: (y + 0.5) * 2 + 1), candidate, isolate=True)
    assert all(
        torch.equal(entry.tensor_contents, value)
        for entry, value in zip(candidate, before, strict=True)
    )
    assert all(torch.equal(new, old) for new, old in zip(model.parameters(), weights, strict=True))


def test_another_type_is_compared_by_its_own_rounding() -> None:
    double = tl.log_forward_pass(Model(lambda y, x: y.tanh()).double(), X.double())
    assert tl.diff(double, logged(lambda y, x: y.tanh())).ok
    assert not tl.diff(double, logged(lambda y, x: y.tanh() * 1.00001)).ok


@pytest.fixture(scope="module")
def in_float32() -> Any:
    model, ids = transformer.example()
    return model, ids, tl.log_forward_pass(model, ids)


@pytest.mark.parametrize(
    ("mistakes", "found"),
    [
        ({}, []),
        ({"blocks.0.norm1": "small eps"}, []),  # smaller than bfloat16 can show
        ({"blocks.0.ffn": "relu"}, ["blocks.0.ffn"]),
        ({"blocks.1.ffn.up": "no bias"}, ["blocks.1.ffn.up"]),
    ],
)
def test_in_bfloat16_errors_are_multiples_of_the_references_own(
    in_float32: Any, mistakes: Any, found: list[str]
) -> None:
    model, ids, reference = in_float32
    diff = tl.diff(
        reference,
        tl.log_forward_pass(transformer.ported(model, mistakes).bfloat16(), ids),
        isolate=True,
    )
    assert [culprit.candidate_module for culprit in diff.culprits] == found
    assert "times the reference's own bfloat16 error" in diff.text(200)
    assert "In bfloat16 a mistake smaller than its rounding (7.8e-03) is invisible" in diff.text(
        200
    )


def test_a_short_type_is_called_by_its_name() -> None:
    def cast(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return y.to(torch.float8_e5m2).float()

    text = tl.diff(logged(cast), logged(cast)).text(200)
    assert "In float8_e5m2 a mistake smaller than its rounding (2.5e-01) is invisible" in text


def test_layers_matched_are_never_more_than_there_are() -> None:
    diff = tl.diff(logged(lambda y, x: (y, torch.ones(3))), logged(lambda y, x: (y, torch.ones(3))))
    assert diff.layers.startswith("2 of 2 matched")


def test_names_help_where_nothing_else_does(in_float32: Any) -> None:
    model, ids, reference = in_float32
    candidate = tl.log_forward_pass(
        transformer.ported(model, {"blocks.1.attention": "softmax axis"}), ids
    )
    diff = tl.diff(
        reference, candidate, mapping={"h.*.ln_1": "blocks.*.norm1", "wte.weight": "words"}
    )
    pairs = {(pair.reference_module, pair.candidate_module) for pair in diff.pairs}
    assert {(f"h.{number}.ln_1", f"blocks.{number}.norm1") for number in range(3)} <= pairs
    with pytest.raises(ValueError, match=r"the candidate has none called 'blocks.\*.nrm1'"):
        tl.diff(reference, candidate, mapping={"h.*.ln_1": "blocks.*.nrm1"})


def test_both_graphs_in_one_page(in_float32: Any, tmp_path: Any) -> None:
    model, ids, reference = in_float32
    diff = tl.diff(
        reference,
        tl.log_forward_pass(transformer.ported(model, {"blocks.1.ffn": "tanh"}), ids),
        isolate=True,
    )
    diff.explore(tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text()
    assert "gelu's tanh form" in text
    assert "blocks.1.ffn" in text


class CellOfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[1], 8)
        for item in x:
            h, c = self.cell(item, (h, c))
        return h


class CellByHand(nn.Module):
    """The two biases are one: whole, or one for each gate."""

    def __init__(self, cell: nn.LSTMCell, has_gates: bool) -> None:
        super().__init__()
        self.w, self.u = (
            nn.Parameter(cell.weight_ih.data.T.clone()),
            nn.Parameter(cell.weight_hh.data.T.clone()),
        )
        total = (cell.bias_ih + cell.bias_hh).data
        self.biases = nn.ParameterList(part.clone() for part in total.chunk(4 if has_gates else 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(x.shape[1], 8)
        for item in x:
            i, f, g, o = (item @ self.w + h @ self.u + torch.cat(list(self.biases))).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


@pytest.mark.parametrize("has_gates", [False, True])
def test_two_biases_are_found_where_the_other_model_has_their_sum(has_gates: bool):
    torch.manual_seed(0)
    model, x = CellOfTorch(), torch.randn(3, 2, 6)
    reference, candidate = (
        tl.log_forward_pass(model, x),
        tl.log_forward_pass(CellByHand(model.cell, has_gates), x),
    )
    difference = tl.diff(reference, candidate)
    assert difference.ok
    assert "4 of 4 found: 2 transposed, 2 in sums of two" in str(difference)
    back = tl.diff(candidate, reference)
    assert back.ok
    assert f"{3 + 3 * has_gates} of {3 + 3 * has_gates} found" in str(back)


class Recurrent(nn.Module):
    """A GRU, or its cell written out with the update gate the wrong way round."""

    def __init__(self, is_written_out: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.is_written_out = nn.GRU(8, 8, batch_first=True), is_written_out

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_written_out:
            return self.gru(x)[0]
        w_i, w_h, b_i, b_h = self.gru.parameters()
        h, states = torch.zeros(x.shape[0], 8), []
        for step in x.unbind(1):
            r_i, z_i, n_i = (step @ w_i.T + b_i).chunk(3, -1)
            r_h, z_h, n_h = (h @ w_h.T + b_h).chunk(3, -1)
            z, n = torch.sigmoid(z_i + z_h), torch.tanh(n_i + torch.sigmoid(r_i + r_h) * n_h)
            h = z * n + (1 - z) * h
            states.append(h)
        return torch.stack(states, 1)


def test_what_the_budget_for_experiments_does_not_allow_is_said() -> None:
    x = torch.linspace(-1, 1, 2 * 21 * 8).sin().reshape(2, 21, 8)
    histories = [tl.log_forward_pass(Recurrent(is_cell), x) for is_cell in (False, True)]
    (culprit,) = tl.diff(*histories).culprits
    assert culprit.reasons[-1].startswith("not tried, as it takes long: ")


def test_training_mode_is_not_taken_for_a_layer_too_many() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    evaluated = tl.log_forward_pass(model.eval(), X)
    (culprit,) = tl.diff(evaluated, tl.log_forward_pass(model.train(), X)).culprits
    assert culprit.reason.startswith("training False in the reference, True in the candidate")


def test_training_mode_is_named_also_where_evaluation_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 2))
    trained = tl.log_forward_pass(copy.deepcopy(model).train(), X)
    evaluated = tl.log_forward_pass(model.eval(), X)
    for pair, said in (
        ((trained, evaluated), "training True in the reference, False in the candidate"),
        ((evaluated, trained), "training False in the reference, True in the candidate"),
    ):
        (culprit,) = tl.diff(*pair).culprits
        assert culprit.reasons == (said,)


def test_what_ran_under_autocast_runs_again_under_autocast() -> None:
    def body(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.layer_norm(F.linear(y, y[:, :8]), (4,)), y[:, :4])

    diff = tl.diff(logged(body), logged(body), isolate=True)
    assert diff.ok
    assert diff.largest_own == 0


def test_names_in_a_diff_do_not_steer_the_terminal() -> None:
    histories = []
    for bias in (0.0, 1.0):
        model = nn.Sequential()
        model.add_module("evil\033[31m", nn.Linear(8, 8))
        for parameter in model.parameters():
            nn.init.constant_(parameter, bias)
        histories.append(tl.log_forward_pass(model, X))
    text = tl.diff(*histories).text(200)
    assert "\033" not in text
    assert "evil\\x1b[31m" in text


@pytest.mark.parametrize("isolate", [False, True])
def test_a_tensor_from_outside_the_model_is_named_where_nothing_else_differs(isolate: bool) -> None:
    class Shifted(nn.Module):
        def __init__(self, shift: Any) -> None:
            super().__init__()
            self.shift = shift  # a function, which holds the tensor

        def forward(self, x: Any) -> Any:
            return self.shift(x * 2) * 3

    def shifting(by: Any) -> Any:
        return lambda x: x + by

    x, by = torch.randn(3, 4), torch.randn(4)
    diff = tl.diff(
        tl.log_forward_pass(Shifted(shifting(by)), x),
        tl.log_forward_pass(Shifted(shifting(by.flip(0))), x),
        isolate=isolate,
    )
    (culprit,) = diff.culprits
    (said,) = culprit.reasons
    assert said.startswith("add_1_2 of the reference reads a tensor from outside the model, which")
