"""Gradients of views and of writes to them, against the same program written without either."""

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.fuzz.view_programs import check_gradients
from tests.networks import Model


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 50))
@pytest.mark.parametrize("saves", [True, False])
def test_gradients_of_random_programs_are_those_without_views_and_writes(
    start: int, saves: bool
) -> None:
    counts = [check_gradients(seed, saves) for seed in range(start, start + 50)]
    right, without = sum(count.right for count in counts), sum(count.without for count in counts)
    assert right > 200
    assert without < right / (50 if saves else 10)


class WrittenBelow(nn.Module):
    """A view of a view is written in place: what the first view was is read by the write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = (x * 1).view(-1)
        r = v * 2
        u = v.unsqueeze(0)
        u.add_(1)
        return r.sum() + (u * 5).sum()


class OutputIsStale(nn.Module):
    """The model returns a view whose base was written, in another place, after it was made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        v = y[1]
        y[0].mul_(3)
        return v


class AnotherType(nn.Module):
    """A complex tensor is written through the view of it as real numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = (x * 1).view(-1)
        torch.view_as_real(v).mul_(2)
        return v.abs().sum()


@pytest.mark.parametrize("saves", [True, False])
def test_a_write_through_a_view_of_a_view_counts_for_both(saves: bool) -> None:
    history = tl.log_forward_pass(
        WrittenBelow(), torch.ones(2, 2, requires_grad=True), save_gradients=saves
    )
    history.log_backward(history["output_1"].tensor_contents)
    assert history["view_1"].grad_contents.tolist() == [7, 7, 7, 7]
    assert history["unsqueeze_1"].grad_contents.tolist() == [[5, 5, 5, 5]]


def test_an_output_that_is_a_view_written_elsewhere_since_counts_for_the_view() -> None:
    history = tl.log_forward_pass(
        OutputIsStale(), torch.ones(2, 2, requires_grad=True), save_gradients=True
    )
    history["output_1"].tensor_contents.sum().backward()
    assert history["getitem_1"].grad_contents.tolist() == [1, 1]


def test_where_the_gradient_of_a_view_cannot_be_told_there_is_none_and_a_reason() -> None:
    x = torch.ones(2, 2, dtype=torch.complex64, requires_grad=True)
    history = tl.log_forward_pass(AnotherType(), x, save_gradients=True)
    history.log_backward(history["output_1"].tensor_contents)
    entry = history["view_1"]
    assert entry.grad_contents is None
    assert not entry.has_saved_grad
    assert entry.grad_missing_reason == "its memory was written or read as another data type"
    assert "Gradient: none, because its memory was written or read as another data type" in str(
        entry
    )
    assert history["mul_1"].grad_missing_reason is None


def test_a_view_whose_memory_is_written_after_it_was_made_has_a_gradient_or_a_word(tmp_path):
    def forward(self, x):
        y = x * 1.5
        v, w = y[:1], y[1:]
        r = v * 3
        w.add_(1)
        return r.sum() + y.sum()

    for saves, gradient, word in ((False, None, "save_gradients=True"), (True, [[3.0] * 3], None)):
        history = tl.log_forward_pass(
            Model(forward), torch.rand(2, 3, requires_grad=True), save_gradients=saves
        )
        assert history["getitem_1"].grad_missing_reason is None
        history.log_backward(history["output_1"].tensor_contents)
        history.save(tmp_path / "views.tl")
        for each in (history, tl.load(tmp_path / "views.tl")):
            entry = each["getitem_1"]
            assert (
                None if entry.grad_contents is None else entry.grad_contents.tolist()
            ) == gradient
            assert (
                entry.grad_missing_reason is None
                if word is None
                else word in entry.grad_missing_reason
            )
            assert (
                each["getitem_2"].grad_missing_reason is each["add_2"].grad_missing_reason is None
            )


def test_a_view_that_is_written_through_another_and_was_read_before_has_all_of_its_gradient_or_none():
    def forward(self, x):
        y = x * 1.5
        v = y[:2]
        r = v * 3
        u = v[1:]
        u.add_(1)
        return r.sum() + (u * 5).sum() + y.sum()

    for saves in (False, True):
        history = tl.log_forward_pass(
            Model(forward), torch.rand(3, 3, requires_grad=True), save_gradients=saves
        )
        history.log_backward(history["output_1"].tensor_contents)
        entry = history["getitem_1"]
        if entry.grad_contents is None:
            assert not saves
            assert entry.grad_missing_reason
        else:
            assert entry.grad_contents.tolist() == [[3.0] * 3, [9.0] * 3]


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


@pytest.mark.parametrize("saves", [False, True])
def test_what_a_custom_function_writes_in_place_has_its_value_and_its_own_gradient(saves):
    def forward(self, x):
        z = Tripled.apply(x * 2)
        return (z * z).sum()

    x = torch.ones(2, requires_grad=True)
    history = tl.log_forward_pass(Model(forward), x, save_gradients=saves)
    assert history["mul_2"].tensor_contents.tolist() == [6.0, 6.0]
    history.log_backward(history["output_1"].tensor_contents)
    assert history["mul_2"].grad_contents.tolist() == [12.0, 12.0]
    assert history["mul_1"].grad_contents.tolist() == [36.0, 36.0]
    assert history["input_1"].grad_contents.tolist() == [72.0, 72.0]
    assert history.first_nonfinite() is None


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("is_written_before", [False, True])
def test_a_view_that_a_custom_function_writes_has_its_gradients_before_and_after(
    is_written_before, saves
):
    def forward(self, x):
        y = x * 2
        if is_written_before:
            y[1].mul_(1)
        v = y[0]
        Tripled.apply(v)
        return (y * y).sum() + v.sum()

    x = torch.ones(2, 2, requires_grad=True)
    history = tl.log_forward_pass(Model(forward), x, save_gradients=saves)
    history.log_backward(history["output_1"].tensor_contents)
    before, after = ("getitem_2", "mul_3") if is_written_before else ("getitem_1", "mul_2")
    assert history[after].grad_contents.tolist() == [13.0, 13.0]
    assert history[before].grad_contents.tolist() == [39.0, 39.0]
    assert history["mul_1"].grad_contents.tolist() == [[39.0, 39.0], [4.0, 4.0]]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("is_written_before", [False, True])
def test_a_write_under_no_grad_leaves_the_gradients_of_what_was_before(
    is_written_before, is_view, saves
):
    def forward(self, x):
        y = x * 2
        if is_written_before:
            y[1].mul_(1)
        written = y[0] if is_view else y
        with torch.no_grad():
            written.add_(1)
        return (y * y).sum() + (written * 5).sum()

    x = torch.ones(2, 2, requires_grad=True)
    history = tl.log_forward_pass(Model(forward), x, save_gradients=saves)
    history.log_backward(history["output_1"].tensor_contents)
    assert history["mul_1"].grad_contents.tolist() == (
        [[11.0, 11.0], [4.0, 4.0]] if is_view else [[11.0, 11.0]] * 2
    )
    if is_view:  # it was read with the base as well, which does not lead there
        assert history["add_1"].grad_contents is None


HIDDEN_BASES = {
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, torch.ones(4, 4)),
    "maxpool1d": lambda x: nn.functional.max_pool1d(x[None], 2)[0],
}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("is_viewed", [False, True])
@pytest.mark.parametrize("name", HIDDEN_BASES)
def test_a_result_that_is_a_view_of_what_the_operation_keeps_to_itself_has_its_gradient(
    name, is_viewed, saves
):
    def forward(self, x):
        y = HIDDEN_BASES[name](x)
        r = (y * 2).sum()
        (y.unsqueeze(0) if is_viewed else y).mul_(3)
        return r + (y * 5).sum()

    x = torch.rand(4, 4, requires_grad=True)
    history = tl.log_forward_pass(Model(forward), x, save_gradients=saves)
    history.log_backward(history["output_1"].tensor_contents)
    assert history[f"{name}_1"].grad_contents.unique().tolist() == [17.0]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("is_written_before", [False, True])
def test_views_that_one_call_writes_together_have_no_gradient_and_a_reason(
    is_written_before, saves
):
    def forward(self, x):
        y = x * 1
        a, b, c = y[:1], y[1:], x * 2
        if is_written_before:
            a.add_(1)
        torch._foreach_mul_([a, b, c], 3.0)
        return y.sum() + (a * 5).sum() + c.sum()

    history = tl.log_forward_pass(
        Model(forward), torch.ones(3, 2, requires_grad=True), save_gradients=saves
    )
    history.log_backward(history["output_1"].tensor_contents)
    before = ["add_1", "getitem_2"] if is_written_before else ["getitem_1", "getitem_2"]
    for label in ("foreachmul_1", "foreachmul_2", *before):
        assert history[label].grad_contents is None
        assert "one call wrote to several views" in history[label].grad_missing_reason
    assert history["foreachmul_3"].grad_contents.unique().tolist() == [1.0]
    assert history["mul_2"].grad_contents.unique().tolist() == [3.0]
    assert history["mul_1"].grad_contents.tolist() == [[18.0, 18.0], [3.0, 3.0], [3.0, 3.0]]


_OFF = {
    "in eval mode": lambda v: nn.functional.dropout(v, 0.5, False, inplace=True),
    "of probability 0": lambda v: nn.functional.dropout(v, 0.0, True, inplace=True),
    "after a write": lambda v: nn.functional.dropout(v.mul_(2), 0.5, False, inplace=True),
    "before a write": lambda v: nn.functional.dropout(v, 0.5, False, inplace=True).mul_(2),
    "of channels": lambda v: nn.functional.feature_alpha_dropout(v, 0.5, False, inplace=True),
}


# Without hooks, the node of a view that is written to later is not known.
@pytest.mark.parametrize(
    ("off", "saves"),
    [(off, True) for off in _OFF] + [("in eval mode", False), ("after a write", False)],
)
def test_a_dropout_in_place_that_is_off_has_the_gradient_of_the_view(off: str, saves: bool) -> None:
    def forward(_, x):
        v = (x * 2).view(2, 2)
        return (_OFF[off](v) * torch.arange(4.0).view(2, 2)).sum()

    history = tl.log_forward_pass(
        Model(forward), torch.ones(4, requires_grad=True), save_gradients=saves
    )
    history.log_backward(history["output_1"].tensor_contents)
    (dropout,) = (entry for entry in history if "dropout" in entry.layer_type)
    factor = 2 if off == "before a write" else 1
    assert dropout.grad_contents.tolist() == [[0, factor], [2 * factor, 3 * factor]]
