"""Promise 7: the model's own exception comes through, with a note and the log so far."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import Model

HERE = f"{Path(__file__).parent.name}/{Path(__file__).name}"


def deep() -> nn.Module:
    """The second linear layer does not fit the first."""
    return nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(6, 2)))


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__
    return note


def test_a_shape_mismatch_is_the_models_own_exception_with_a_helpful_note() -> None:
    model, x = deep(), torch.rand(2, 4)
    with pytest.raises(RuntimeError) as plain:
        model(x)
    with pytest.raises(RuntimeError) as logged:
        tl.log_forward_pass(model, x)
    assert type(logged.value) is type(plain.value)
    assert str(logged.value) == str(plain.value)
    note = note_of(logged.value)
    assert note.startswith("torchlens: ")
    for part in ("module '1.1' (Linear)", "linear(2x5 float32, 2x6 float32", "partial_history"):
        assert part in note


def test_the_note_names_the_users_source_line() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y @ y  # the line that fails

    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(Model(forward), torch.rand(2, 3))
    note = note_of(caught.value)
    line = forward.__code__.co_firstlineno + 2
    assert f"{HERE}:{line}" in note
    assert "matmul(2x3 float32, 2x3 float32)" in note


def test_the_partial_history_holds_the_log_so_far() -> None:
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(deep(), torch.rand(2, 4))
    history = partial_history(caught.value)
    assert isinstance(history, tl.ModelHistory)
    assert history.layer_labels == ["input_1_0", "linear_1_1", "relu_1_2"]
    assert history["linear_1"].tensor_contents.shape == (2, 5)
    assert history["1.0"] == history["relu_1"]
    assert history.output_layers == []
    text = str(history)
    assert "failed" in text.splitlines()[0]
    assert "mat1 and mat2" in text
    assert len(history.to_pandas()) == 3


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), KeyError("k"), ZeroDivisionError(), KeyboardInterrupt(), OSError(2, "x")],
)
def test_an_exception_of_any_type_comes_through_as_it_is(error: BaseException) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        if x is not None:
            raise error
        return x

    model = nn.Sequential(nn.Linear(4, 4), Model(forward))
    with pytest.raises(type(error)) as caught:
        tl.log_forward_pass(model, torch.rand(2, 4))
    assert caught.value is error
    assert "module '1' (Model)" in note_of(error)
    assert f"{HERE}:" in note_of(error)
    assert len(partial_history(error)) == 2


def test_an_exception_of_the_models_own_code_is_placed_too() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("boo")

    with pytest.raises(ValueError, match="boo") as caught:
        tl.log_forward_pass(Model(forward), torch.rand(2, 4))
    note = note_of(caught.value)
    assert "raised in Model" in note
    assert f"{HERE}:{forward.__code__.co_firstlineno + 1}" in note


def test_an_exception_that_refuses_attributes_comes_through() -> None:
    @dataclass(frozen=True)
    class FrozenError(Exception):
        code: int

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        raise FrozenError(3)

    # No `pytest.raises`: it would itself set attributes of the exception.
    try:
        tl.log_forward_pass(Model(forward), torch.rand(2, 4))
    except BaseException as error:
        assert type(error) is FrozenError  # noqa: PT017 (see above)
    else:
        pytest.fail("The model's exception was lost.")


def test_an_exception_that_the_model_handles_leaves_no_trace() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        try:
            x @ x
        except RuntimeError:
            y = x + 1
        try:
            self.bad(y)
        except RuntimeError:
            return y * 2
        return y

    history = tl.log_forward_pass(Model(forward, bad=nn.Linear(7, 7)), torch.rand(2, 3))
    assert "failed" not in str(history)
    assert history.layer_labels == ["input_1_0", "add_1_1", "mul_1_2", "output_1_3"]
    assert history["mul_1"].containing_module_origin is None


def test_after_a_handled_exception_the_note_names_the_place_that_failed() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            x @ x
        return self.bad(x)

    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(Model(forward, bad=nn.Linear(7, 7)), torch.rand(2, 3))
    assert "module 'bad' (Linear)" in note_of(caught.value)
    assert "matmul" not in note_of(caught.value)


def test_an_exception_turned_into_another_is_explained() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.bad(x)
        except RuntimeError as error:
            raise ValueError("wrong width") from error

    with pytest.raises(ValueError, match="wrong width") as caught:
        tl.log_forward_pass(Model(forward, bad=nn.Linear(7, 7)), torch.rand(2, 3))
    assert partial_history(caught.value).layer_labels == ["input_1_0"]


@pytest.mark.parametrize("saved", ["none", "relu", "0", "nothing like it"])
def test_a_failure_is_explained_whatever_is_to_be_saved(saved: str) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        tl.log_forward_pass(deep(), torch.rand(2, 4), layers_to_save=saved)
    assert "module '1.1'" in note_of(caught.value)
    assert partial_history(caught.value)["relu_1"].tensor_shape == (2, 5)


def test_a_failure_in_a_later_run_is_explained_and_loses_nothing() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * 2)

    model = Model(forward, fc=nn.Linear(4, 4))
    history = tl.log_forward_pass(model, torch.ones(2, 4))
    before = history["mul_1"].tensor_contents
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        history.save_new_activations(model, torch.ones(2, 5))
    assert "module 'fc'" in note_of(caught.value)
    assert history["mul_1"].tensor_contents is before
    assert history["output_1"].has_saved_activations


def test_an_error_in_postfunc_is_the_users_own() -> None:
    def postfunc(tensor: torch.Tensor) -> Any:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tl.log_forward_pass(deep(), torch.rand(2, 4), activation_postfunc=postfunc)
    assert torch._C._len_torch_function_stack() == 0
