"""What is not counted is reported; what no gradient reaches costs nothing backward."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._graph.flops.registry import FORMULAS, forward_flops
from torchlens._graph.flops.shaped_call import ShapedCall

SQUARE = torch.rand(4, 4)
KERNEL = torch.rand(
    1, 1, 2, 2
)  # neither parameter nor buffer of the model: the log does not know it


def log_of(function: Any, *args: Any, **attributes: Any) -> tl.ModelHistory:
    return tl.get_model_metadata(Model(function, **attributes), list(args))


# -- not counted -----------------------------------------------------------------------------------


def test_what_is_free_by_convention_costs_nothing_and_is_not_reported():
    history = tl.get_model_metadata(
        nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4), nn.Softmax(-1)), SQUARE
    )
    assert [entry.flops for entry in history] == [0] * len(history)
    assert history.flops_not_counted == {}


@pytest.mark.filterwarnings("ignore:torchlens. what runs inside torch.func.vmap")
@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (lambda self, x: torch.vmap(torch.dot)(x, x), {"vmap": 1}),
        (
            lambda self, x: torch.linalg.matrix_exp(x) @ torch.linalg.matrix_exp(2 * x),
            {"linalgmatrixexp": 2},
        ),
        (lambda self, x: torch.sparse.mm(x.to_sparse(), x), {"sparsemm": 1}),
        (lambda self, x: x.to_sparse() @ x, {"matmul": 1}),
        (lambda self, x: torch.nn.functional.conv2d(x[None, None], KERNEL), {"conv2d": 1}),
    ],
    ids=[
        "vmap",
        "depends on the numbers",
        "sparse by name",
        "sparse by layout",
        "a weight from elsewhere",
    ],
)
def test_what_nobody_can_count_is_reported(function: Any, reported: dict[str, int]):
    history = log_of(function, SQUARE)
    assert history.flops_not_counted == reported
    assert history[next(iter(reported)) + "_1"].flops is None


def test_a_factor_from_elsewhere_is_worked_out_from_the_other():
    constant = torch.rand(4, 3)
    assert log_of(lambda self, x: x @ constant, SQUARE).total_flops == 2 * 4 * 4 * 3
    assert log_of(lambda self, x: constant.mT @ x, SQUARE).total_flops == 2 * 3 * 4 * 4


def test_nested_tensors_are_not_guessed_at():
    def attend(self: Model, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)
        return (nested @ x).values()

    history = log_of(attend, SQUARE)
    assert history.flops_not_counted == {"matmul": 1}


def test_a_call_with_several_results_is_counted_once():
    history = tl.get_model_metadata(nn.LSTM(4, 5, batch_first=True), torch.rand(2, 7, 4))
    results = [entry for entry in history if entry.layer_type == "lstm"]
    assert [entry.flops for entry in results] == [2 * 2 * 7 * 4 * 5 * (4 + 5), 0, 0]


def test_packed_sequences_cost_their_own_steps():
    lengths = torch.tensor([5, 3, 1])
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(5, 3, 4), lengths)
    history = tl.get_model_metadata(nn.LSTM(4, 6, num_layers=2), [packed])
    assert history.total_flops == 2 * (5 + 3 + 1) * 4 * 6 * ((4 + 6) + (6 + 6))


def test_a_repeated_layer_is_counted_at_every_pass():
    history = log_of(lambda self, x: self.fc(self.fc(x)), SQUARE, fc=nn.Linear(4, 4))
    assert history["linear_1_1:2"].flops == 2 * 4 * 4 * 4
    assert history.total_flops == 2 * 128


@torch.library.custom_op(
    "torchlens_test::weigh",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, int power=1) -> Tensor",  # torch 2.6 reads no list[...]
)
def weigh(x: torch.Tensor, weights: list[torch.Tensor], power: int = 1) -> torch.Tensor:
    return sum((x @ weight for weight in weights), torch.zeros(4, 4)) ** power


@register_flop_formula(torch.ops.torchlens_test.weigh)
def weigh_flops(x_shape, weight_shapes, power=1, *, out_shape=None, **kwargs) -> int:
    return (
        power * sum(2 * x_shape[0] * rows * columns for rows, columns in weight_shapes)
        + out_shape[0]
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: weigh(x, [x, x], 3),
        lambda self, x: torch.ops.torchlens_test.weigh(x, weights=[x, x], power=3),
        lambda self, x: torch.ops.torchlens_test.weigh.default(x, [x, x], power=3),
    ],
)
def test_a_formula_that_was_registered_with_torch_is_used(function: Any):
    history = log_of(function, SQUARE)
    assert history["weigh_1"].flops == history.total_flops == 3 * 2 * 2 * 64 + 4
    assert history.flops_not_counted == {}


# -- backward --------------------------------------------------------------------------------------


def test_backward_costs_a_product_for_each_factor_that_wants_a_gradient():
    assert [entry.flops_backward for entry in tl.get_model_metadata(MLP(), torch.rand(2, 4))] == [
        0,
        80,
        0,
        120,
        0,
    ]
    x = torch.rand(2, 4, requires_grad=True)
    assert [entry.flops_backward for entry in tl.get_model_metadata(MLP(), x)] == [
        0,
        160,
        0,
        120,
        0,
    ]


def test_without_gradients_there_is_nothing_backward():
    with torch.no_grad():
        assert tl.get_model_metadata(MLP(), torch.rand(2, 4)).total_flops_backward == 0
    assert (
        tl.get_model_metadata(MLP().requires_grad_(False), torch.rand(2, 4)).total_flops_backward
        == 0
    )


def test_what_leads_to_no_output_is_not_counted_backward():
    def function(self: Model, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax()  # no gradient comes past it
        self.unused(x)
        return self.fc(x) * chosen

    history = log_of(
        function, SQUARE, gate=nn.Linear(4, 2), unused=nn.Linear(4, 3), fc=nn.Linear(4, 4)
    )
    assert history.total_flops == 2 * 16 * (2 + 3 + 4)
    assert history.total_flops_backward == history["fc"].flops_backward == 128


def test_a_later_result_may_be_the_one_that_gets_the_gradient():
    history = log_of(lambda self, x: self.lstm(x)[1][0], torch.rand(7, 2, 4), lstm=nn.LSTM(4, 5))
    assert history["lstm_1"].flops_backward == history.total_flops_backward > 0


def test_a_factor_that_was_written_in_place_wants_a_gradient():
    def function(self: Model, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(4, 4)
        made[:2] = self.fc(x)[:2]
        return x @ made

    history = log_of(function, SQUARE, fc=nn.Linear(4, 4))
    assert history["matmul_1"].flops_backward == 128


def test_an_intermediate_result_may_be_made_to_want_a_gradient():
    def function(self: Model, x: torch.Tensor) -> torch.Tensor:
        x = (x * 2).requires_grad_()
        return self.fc(x)

    assert log_of(function, SQUARE, fc=nn.Linear(4, 4)).total_flops_backward == 2 * 128


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x + x).sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_gradients_come_past_a_custom_function():
    history = log_of(lambda self, x: Doubled.apply(self.fc(x)), SQUARE, fc=nn.Linear(4, 4))
    assert history.total_flops_backward == 128


# -- calls that look otherwise ---------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 3), max_size=5).map(tuple)
LOCATIONS = st.one_of(
    st.integers(0, 8),
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
    st.sampled_from(["input", "weight", "hx", "params"]),
)
NUMBERS = st.lists(st.integers(-3, 3), max_size=3)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 9), st.just("ij,jk->ik"), NUMBERS)
CALLS = st.builds(
    ShapedCall,
    st.dictionaries(LOCATIONS, SHAPES, max_size=6),
    SHAPES,
    st.lists(VALUES, max_size=9),
    st.none(),
)


@pytest.mark.slow
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(layer_type=st.sampled_from(sorted(FORMULAS)), call=CALLS)
def test_a_call_that_a_formula_does_not_expect_is_not_counted(layer_type: str, call: ShapedCall):
    count = forward_flops(layer_type, call)
    assert count is None or (type(count) is int and count >= 0)


class _PartlyWithoutGradients(nn.Module):
    """Its first layer runs under no_grad; what is made of it needs gradients again."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.scale, self.last = (
            nn.Linear(8, 8),
            nn.Parameter(torch.rand(8)),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.frozen(x)
        return self.last(features * self.scale)


def test_what_ran_without_gradients_costs_nothing_backward():
    model, x = _PartlyWithoutGradients(), torch.rand(2, 8)
    history = tl.log_forward_pass(model, x)
    loss = model(x).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert history["linear_1_1"].flops_backward == 0
    assert history.total_flops_backward == counter.get_total_flops()
