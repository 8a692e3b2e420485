"""`history.first_nonfinite()`: the operation a NaN or an Inf came from, and nothing that was
meant.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model, TinyGPT


def log(forward: Any, *inputs: torch.Tensor, **attributes: Any) -> tl.ModelHistory:
    return tl.log_forward_pass(Model(forward, **attributes), list(inputs))


def logged_backward(forward: Any, *inputs: torch.Tensor, **attributes: Any) -> tl.ModelHistory:
    history = log(forward, *inputs, **attributes)
    history.log_backward(history["output_1"].tensor_contents.sum())
    return history


def test_where_all_is_finite_there_is_nothing_to_tell() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history.log_backward(history["output_1"].tensor_contents.sum())
    assert history.first_nonfinite() is None


def test_the_operation_that_made_it_is_reported_with_its_arguments() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x) * 2

    history = log(
        lambda self, x: self.inner(x - 3) + 1, torch.tensor([3.0, 4.0, 1.0]), inner=Inner()
    )
    found = history.first_nonfinite()
    assert (found.phase, found.label, found.operation, found.module) == (
        "forward",
        "log_1_2",
        "log",
        "inner",
    )
    assert (found.num_nan, found.num_inf) == (1, 1)
    (given,) = found.inputs
    assert (given.name, given.low, given.high, given.finite_share) == ("sub_1_1", -2, 1, 1)
    assert found.source.endswith(
        "in test_the_operation_that_made_it_is_reported_with_its_arguments.<locals>.Inner.forward"
    )
    lines = str(found).splitlines()
    assert lines[0] == "NaN in the forward pass: made by log_1_2 (log), in module 'inner'"
    assert lines[1].startswith("    called at ")
    assert lines[2:] == [
        "    result: (3,) float32, from 0 to 0; 1 NaN and 1 Inf of 3",
        "    sub_1_1: (3,) float32, from -2 to 1",
    ]


def test_numbers_that_became_too_large_are_found() -> None:
    found = log(lambda self, x: (x * 1e30).square().sum(), torch.ones(3)).first_nonfinite()
    assert (found.label, found.num_inf, found.num_nan) == ("square_1_2", 3, 0)


def test_a_sum_that_overflows_over_finite_numbers_is_no_finding() -> None:
    assert (
        log(lambda self, x: x * 60000, torch.ones(4, dtype=torch.float16)).first_nonfinite() is None
    )


@pytest.mark.parametrize(
    "mask",
    [
        lambda self, x: x.masked_fill(x > 0, -math.inf),
        lambda self, x: torch.where(x > 0, x, -math.inf),
        lambda self, x: x + torch.full((3, 3), float("-inf")).triu(1),
        lambda self, x: x + self.attribute,
        lambda self, x: x + self.buffer,
        lambda self, x: x.index_fill(1, torch.tensor([1]), -math.inf),
        lambda self, x: torch.nn.functional.pad(x, (0, 1), value=-math.inf),
    ],
)
def test_infinity_that_was_asked_for_is_passed_over(mask: Any) -> None:
    barrier = torch.full((3, 3), -math.inf).triu(1)
    model = Model(lambda self, x: mask(self, x).softmax(-1), attribute=barrier)
    model.register_buffer("buffer", barrier.clone())
    x = torch.tensor([[1.0, -1.0, 2.0], [1.0, -2.0, 3.0], [-1.0, 2.0, 1.0]])
    history = tl.log_forward_pass(model, x)
    assert history.first_nonfinite() is None
    assert history.first_nonfinite(include_constants=True).num_inf > 0


def test_a_mask_that_is_an_input_is_passed_over_and_nan_in_an_input_is_not() -> None:
    def forward(self: Model, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x + mask).softmax(-1)

    mask = torch.tensor([0.0, -math.inf])
    assert log(forward, torch.ones(2), mask).first_nonfinite() is None
    found = log(forward, torch.tensor([math.nan, 1.0]), mask).first_nonfinite()
    assert found.label == "input_1_0"
    assert str(found).splitlines()[0] == "NaN in the forward pass: input_1_0"
    assert found.note == "It was given to the model: input.args.0."


def test_nan_made_of_infinity_that_was_asked_for_is_found() -> None:
    found = log(
        lambda self, x: x.masked_fill(x > -9, -math.inf).softmax(-1) * 2, torch.ones(2, 2)
    ).first_nonfinite()
    assert found.label == "softmax_1_3"
    assert found.note.startswith("It made NaN from an intended Inf.")
    assert found.inputs[0].num_inf == 4


def test_a_real_finding_behind_a_mask_is_found() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x.masked_fill(x > 1, -math.inf).softmax(-1)
        return y.log().sum()

    assert log(forward, torch.tensor([1.0, 2.0])).first_nonfinite().label == "log_1_4"


def test_a_discarded_value_is_reported_only_if_there_is_nothing_worse() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x > 0, x.log(), 0.0)
        return self.fc(y)

    history = log(forward, torch.tensor([[0.0, 2.0]]), fc=nn.Linear(2, 2))
    found = history.first_nonfinite()
    assert (found.label, found.note) == (
        "log_1_2",
        "All that was computed from it is finite again.",
    )
    history = logged_backward(
        forward, torch.tensor([[0.0, 2.0]], requires_grad=True), fc=nn.Linear(2, 2)
    )
    found = history.first_nonfinite()
    assert (found.phase, found.label, found.num_nan) == ("backward", "log_1_2", 1)
    found = log(
        lambda self, x: forward(self, x) / 0, torch.tensor([[0.0, 2.0]]), fc=nn.Linear(2, 2)
    ).first_nonfinite()
    assert found.label == "truediv_1_5"


def test_a_parameter_that_is_broken_is_named() -> None:
    model = MLP()
    with torch.no_grad():
        model.fc1.weight[0, 0] = math.nan
    found = tl.log_forward_pass(model, torch.rand(2, 4)).first_nonfinite()
    assert found.label == "linear_1_1"
    assert found.note.startswith("Not finite before: parameter fc1.weight.")
    assert [each.name for each in found.inputs] == ["input_1_0", "parameter fc1.weight"]


def test_memory_that_was_not_written_yet_means_nothing() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(3)
        y.fill_(0.0)
        return x + y

    assert log(forward, torch.ones(3)).first_nonfinite() is None


def test_values_are_those_of_the_time_before_a_write() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x / 0
        y.zero_()
        return y + 1

    assert log(forward, torch.ones(3)).first_nonfinite().label == "truediv_1_1"


def test_complex_and_integer_values() -> None:
    found = log(lambda self, x: torch.complex(x, x / 0) + x.long(), torch.ones(3)).first_nonfinite()
    assert found.label == "truediv_1_1"
    assert (
        log(lambda self, x: torch.complex(x, x) + x.long(), torch.ones(3)).first_nonfinite() is None
    )


# -- gradients
# --------------------------------------------------------------------------------------------------


KINDS: dict[str, Any] = {
    "8 bits": lambda y: y.to(torch.float8_e5m2),
    "16 bits": lambda y: y.to(torch.bfloat16),
    "sparse": lambda y: y.to_sparse(),
    "sparse rows": lambda y: y.to_sparse_csr(),
    "nested": lambda y: torch.nested.nested_tensor([y[0], y[1, :2]]),
    "jagged": lambda y: torch.nested.nested_tensor([y[0], y[1, :2]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors)")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_broken", [False, True])
def test_every_kind_of_tensor_is_checked(kind: str, is_broken: bool) -> None:
    weight = torch.ones(2, 3)
    if is_broken:
        weight[1, 1] = math.nan
    # A constant from outside is no entry, so that the conversion is the first to show it.
    history = log(
        lambda self, x: (x.sum(), KINDS[kind](self.weight.detach())), torch.ones(2), weight=weight
    )
    found = history.first_nonfinite()
    assert (found is not None) == is_broken
    if found is not None:
        assert found.num_nan == 1
        assert "NaN" in str(found)


def test_the_operation_whose_backward_made_it_is_reported() -> None:
    found = logged_backward(
        lambda self, x: (self.fc(x) * 0).sqrt() * 3, torch.ones(1, 2), fc=nn.Linear(2, 2)
    ).first_nonfinite()
    assert (found.phase, found.label, found.num_inf) == ("backward", "sqrt_1_3", 2)
    assert [each.name for each in found.inputs] == ["gradient received by sqrt_1_3", "mul_1_2"]
    assert (found.inputs[0].high, found.inputs[1].high) == (3, 0)
    assert "Inf in the backward pass: made by sqrt_1_3 (sqrt)" in str(found)
    assert "gradient sent to mul_1_2: 1x2 float32" in str(found)


def test_a_gradient_that_came_from_the_loss_is_reported_as_such() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    history.log_backward((history["output_1"].tensor_contents * 0).sqrt().sum())
    found = history.first_nonfinite()
    assert (found.phase, found.label) == ("backward", "output_1_4")
    assert "outside the model" in found.note


def test_a_gradient_of_a_parameter_alone_is_reported() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gradient, gradient / 0

    history = logged_backward(
        lambda self, x: Broken.apply(x * 2, self.w), torch.ones(2), w=nn.Parameter(torch.ones(2))
    )
    found = history.first_nonfinite()
    assert (found.phase, found.label) == ("backward", "mul_2_2")
    assert found.result.name == "gradient sent to parameter w"


def test_with_several_readers_all_are_named() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x) * 0
        return y.sqrt() + y.sin()

    found = logged_backward(forward, torch.ones(1, 2), fc=nn.Linear(2, 2)).first_nonfinite()
    assert found.note == "The backward of one of these made it: sqrt_1_3, sin_1_4."


def test_the_forward_pass_comes_first() -> None:
    found = logged_backward(
        lambda self, x: self.fc(x).mul(0).log(), torch.ones(1, 2), fc=nn.Linear(2, 2)
    ).first_nonfinite()
    assert (found.phase, found.label) == ("forward", "log_1_3")


# -- what was not saved
# ------------------------------------------------------------------------------------------------


def test_entries_that_were_not_saved_are_counted() -> None:
    model = Model(lambda self, x: torch.relu(torch.log(x - 2)) + 1)
    with pytest.warns(
        UserWarning, match="All saved tensors are finite, but 5 of 6 entries are not saved"
    ):
        assert (
            tl.log_forward_pass(model, torch.ones(3), layers_to_save="input").first_nonfinite()
            is None
        )
    found = tl.log_forward_pass(model, torch.ones(3), layers_to_save="relu").first_nonfinite()
    assert (found.label, found.num_unchecked) == ("relu_1_3", 5)
    assert found.note == "Not saved, so it may have come from there: log_1_2."
    assert str(found).endswith("(5 entries are not saved, or have no values, and were not checked)")


def test_a_log_without_saved_tensors_raises() -> None:
    with pytest.raises(ValueError, match="This log has no saved tensors"):
        tl.log_forward_pass(MLP(), torch.rand(2, 4), layers_to_save="none").first_nonfinite()


def test_an_ordinary_transformer_has_no_finding() -> None:
    history = tl.log_forward_pass(TinyGPT().eval(), torch.randint(11, (2, 6)))
    history.log_backward(history["output_1"].tensor_contents.sum())
    assert history.first_nonfinite() is None


def test_nan_in_a_tensor_from_elsewhere_is_not_said_to_come_of_infinity_that_was_asked_for():
    elsewhere = torch.full((4,), math.nan)
    history = tl.log_forward_pass(Model(lambda self, x: x * 2 + elsewhere), torch.ones(2, 4))
    found = history.first_nonfinite()
    assert (found.label, found.note) == ("add_1_2", "")
