"""log_calls: every call of a model inside a block; history.output: what the model returned."""

import copy
import gc
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchlens as tl
from tests.networks import MLP, Model

X = torch.rand(2, 4)


def someone_elses_code(model: nn.Module, steps: int) -> list[Tensor]:
    return [model(X + step) for step in range(steps)]


def test_each_call_gives_a_history_in_order_and_returns_what_it_returns() -> None:
    model = MLP()
    expected = someone_elses_code(model, 3)
    with tl.log_calls(model) as histories:
        found = someone_elses_code(model, 3)
        assert len(histories) == 3
    someone_elses_code(model, 1)
    assert len(histories) == 3
    for history, one, other in zip(histories, expected, found, strict=True):
        assert history.output is other
        assert torch.equal(one, other)
        assert history.layer_labels == tl.log_forward_pass(model, X).layer_labels


def test_a_call_that_raises_has_a_history_up_to_there() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x.relu().reshape(3, 5)

    model = Model(forward)
    call = nn.Module.__call__
    with tl.log_calls(model) as histories, pytest.raises(RuntimeError, match="shape"):
        model(X)
    assert histories[0].layer_labels == ["input_1_0", "relu_1_1"]
    assert nn.Module.__call__ is call
    assert histories[0].output is None
    assert torch.nn.Module._call_impl.__code__.co_name == "_call_impl"


def test_calls_inside_another_log_belong_to_it() -> None:
    inner = MLP()
    outer = nn.Sequential(inner)
    with tl.log_calls(inner) as histories:
        history = tl.log_forward_pass(outer, X)
        outer(X)
    assert "0.fc1" in history.module_addresses
    assert len(histories) == 1


def test_two_models_are_logged_side_by_side() -> None:
    one, other = MLP(), MLP()
    with tl.log_calls(one) as first, tl.log_calls(other) as second:
        one(X)
        other(X)
        one(X)
    assert (len(first), len(second)) == (2, 1)


def test_calls_of_other_threads_are_logged_too() -> None:
    model = MLP()
    with tl.log_calls(model) as histories:
        threads = [threading.Thread(target=model, args=(X,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(histories) == 3


def test_the_options_are_those_of_one_log() -> None:
    model = MLP()
    with tl.log_calls(model, layers_to_save=["fc1"]) as histories:
        model(X)
    assert histories[0].layers_with_saved_activations == ["linear_1_1"]
    with pytest.raises(TypeError, match="layers_to_keep"):
        tl.log_calls(model, layers_to_keep="all")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        tl.log_calls(lambda x: x)  # type: ignore[arg-type]


def test_training_goes_on_under_it() -> None:
    torch.manual_seed(0)
    plain, logged = MLP(), MLP()
    logged.load_state_dict(plain.state_dict())

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            optimizer.step()

    train(plain)
    with tl.log_calls(logged, save_gradients=True) as histories:
        train(logged)
    assert all(map(torch.equal, plain.parameters(), logged.parameters()))
    assert histories[2]["linear_1"].grad_contents is not None


@dataclass
class Answer:
    tensor: Tensor
    words: str


def test_the_output_is_the_object_that_the_model_returned() -> None:
    made: list[Any] = []

    def forward(self: Any, x: Tensor) -> Answer:
        made.append(Answer(x * 2, "yes"))
        return made[-1]

    history = tl.log_forward_pass(Model(forward), X)
    assert history.output is made[0]
    for other in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        assert other.output is None
    history.cleanup()
    assert history.output is None


def test_no_tensor_is_kept_where_none_is_saved() -> None:
    for options in ({"layers_to_save": "none"}, {"detach_saved_tensors": True}):
        history = tl.log_forward_pass(MLP(), X, **options)
        assert history.output is None
    text = tl.log_forward_pass(Model(lambda self, x: str(x.sum())), X, layers_to_save="none")
    assert text.output == str(X.sum())


def test_the_output_goes_with_the_history() -> None:
    history = tl.log_forward_pass(MLP(), X)
    output = weakref.ref(history.output)
    gc.disable()
    try:
        del history
        assert output() is None
    finally:
        gc.enable()
