"""Tensors that a module keeps as plain attributes are entries where an operation reads them, by
address, like buffers.
"""

import gc
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.networks import MLP, Model
from torchlens._capture import model_parts

GLOBAL = torch.ones(3)


@dataclass
class Grid:
    cells: torch.Tensor


class Helper:
    def __init__(self) -> None:
        self.levels = [torch.ones(3), {"fine": torch.ones(3)}]


KEPT: dict[str, tuple[Any, Any, str]] = {
    "tensor": (torch.ones(3), lambda kept: kept, "kept"),
    "list": ([torch.ones(3), torch.ones(3)], lambda kept: kept[1], "kept.1"),
    "tuple": ((torch.ones(3),), lambda kept: kept[0], "kept.0"),
    "dict": ({"h": torch.ones(3)}, lambda kept: kept["h"], "kept.h"),
    "queue": (deque([torch.ones(3)]), lambda kept: kept[0], "kept.0"),
    "nested": ({"a": [{"b": torch.ones(3)}]}, lambda kept: kept["a"][0]["b"], "kept.a.0.b"),
    "dataclass": (Grid(torch.ones(3)), lambda kept: kept.cells, "kept.cells"),
    "object": (Helper(), lambda kept: kept.levels[1]["fine"], "kept.levels.1.fine"),
    "parameter in a list": ([nn.Parameter(torch.ones(3))], lambda kept: kept[0], "kept.0"),
}


def test_a_module_that_returns_a_tensor_from_outside_has_a_key() -> None:
    model = Model(lambda self, x: x + self.outside(x), outside=Model(lambda self, x: GLOBAL))
    history = tl.log_forward_pass(model, torch.rand(3))
    made = history["outside"]
    assert (made.layer_label, made.parent_layers) == ("identity_1_1", [])
    assert torch.equal(made.tensor_contents, GLOBAL)
    assert history["add"].parent_layers == ["input_1_0", "identity_1_1"]
    assert tl.validate_saved_activations(model, torch.rand(3))


@pytest.mark.parametrize("saved", ["all", "none", "add"])
@pytest.mark.parametrize("way", KEPT)
def test_a_tensor_kept_as_an_attribute_is_a_buffer_with_its_address(way: str, saved: str) -> None:
    kept, find, address = KEPT[way]
    body = Model(lambda self, x: x + find(self.kept), kept=kept)
    model = Model(lambda self, x: self.body(x * 2), body=body)
    history = tl.log_forward_pass(model, torch.rand(3), layers_to_save=saved)
    assert history.layer_labels == ["input_1_0", "buffer_1_0", "mul_1_1", "add_1_2", "output_1_3"]
    buffer = history["buffer_1"]
    assert buffer.is_buffer_layer
    assert buffer.buffer_address == f"body.{address}"
    assert history[f"body.{address}"] == buffer
    assert buffer.child_layers == ["add_1_2"]
    assert history["add_1"].parent_layers == ["mul_1_1", "buffer_1_0"]
    assert history["add_1"].parent_layer_arg_locs["args"] == {0: "mul_1_1", 1: "buffer_1_0"}
    assert history.num_operations == 2
    if saved == "all":
        assert torch.equal(buffer.tensor_contents, find(kept))
        assert tl.validate_saved_activations(model, torch.rand(3))


class Anchored(nn.Module):
    anchor = torch.ones(3)
    levels: ClassVar = {"fine": torch.ones(3)}

    def forward(self, x):
        return x + self.anchor * self.levels["fine"]


class OwnAnchor(Anchored):
    anchor = torch.zeros(3)


def test_a_tensor_that_the_class_of_a_module_keeps_is_a_buffer():
    model = Model(lambda self, x: self.body(x), body=OwnAnchor())
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [history[label].buffer_address for label in history.buffer_layers] == [
        "body.anchor",
        "body.levels.fine",
    ]
    assert torch.equal(history["body.anchor"].tensor_contents, torch.zeros(3))
    assert history["mul_1"].parent_layers == ["buffer_1_0", "buffer_2_0"]
    assert tl.validate_saved_activations(model, torch.rand(3))


def test_the_saved_value_stays_when_the_attribute_is_changed_later() -> None:
    model = Model(lambda self, x: x + self.kept, kept=torch.ones(3))
    history = tl.log_forward_pass(model, torch.rand(3))
    model.kept.zero_()
    assert history["kept"].tensor_contents.tolist() == [1, 1, 1]


def test_attributes_nobody_reads_are_no_entries() -> None:
    model = Model(
        lambda self, x: x + self.used,
        used=torch.ones(3),
        unused=torch.ones(3),
        many=[torch.ones(3)] * 9,
    )
    assert tl.log_forward_pass(model, torch.rand(3)).buffer_layers == ["buffer_1_0"]
    model = Model(lambda self, x: x + 1 if self.flag else x, flag=torch.tensor(True))
    assert tl.log_forward_pass(model, torch.rand(3)).buffer_layers == []


def test_a_model_without_such_tensors_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("searched")

    monkeypatch.setattr(model_parts, "_look_through", refuse)
    assert len(tl.log_forward_pass(MLP(), torch.rand(2, 4))) == 5
    with pytest.raises(AssertionError, match="searched"):
        tl.log_forward_pass(Model(lambda self, x: x + GLOBAL), torch.rand(3))


def test_a_model_that_points_to_the_whole_program_is_searched_only_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_parts, "_MAX_OBJECTS", 50)
    endless: list[Any] = []
    for _ in range(200):
        endless.append([endless, {"more": []}])
    model = Model(lambda self, x: x + self.kept + GLOBAL, world=endless, kept=torch.ones(3))
    history = tl.log_forward_pass(model, torch.rand(3))
    assert [history[label].buffer_address for label in history.buffer_layers] == ["kept"]


def test_closures_globals_and_hidden_modules_stay_unknown() -> None:
    local = torch.ones(3)
    hidden = [nn.Linear(3, 3)]
    model = Model(lambda self, x: self.hidden[0](x + GLOBAL + local), hidden=hidden)
    history = tl.log_forward_pass(model, torch.rand(3))
    assert history.buffer_layers == []
    assert len(history["linear_1"].parent_layers) == 1


# -- state that is replaced or written
# ---------------------------------------------------------------------------------


def recurrent(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.h = torch.tanh(self.h + x)
    return self.h * 2


def growing(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.h.append(x * 2)
    return torch.cat(self.h)


def written(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.h[1:] = x[1:]
    return self.h * 2


def first_time(self: Model, x: torch.Tensor) -> torch.Tensor:
    self.h = x * 2 if self.h is None else self.h + x
    return self.h * 3


STATES: dict[str, tuple[Any, Any, list[str]]] = {
    "replaced": (
        recurrent,
        lambda: torch.zeros(3),
        ["buffer_1_0", "add_1_1", "tanh_1_2", "mul_1_3"],
    ),
    "growing": (growing, lambda: [torch.zeros(3)], ["buffer_1_0", "mul_1_1", "cat_1_2"]),
    "written": (
        written,
        lambda: torch.zeros(3),
        ["buffer_1_0", "getitem_1_1", "setitem_1_2", "mul_1_3"],
    ),
    "made": (first_time, lambda: None, ["mul_1_1", "mul_2_2"]),
}


@pytest.mark.parametrize("way", STATES)
def test_state_is_followed_from_call_to_call(way: str) -> None:
    forward, make, expected = STATES[way]
    model, twin, x = Model(forward, h=make()), Model(forward, h=make()), torch.rand(3)
    history = tl.log_forward_pass(model, x)
    assert history.layer_labels[1:-1] == expected
    assert torch.equal(history["output_1"].tensor_contents, twin(x))
    again = tl.log_forward_pass(model, x)
    assert torch.equal(again["output_1"].tensor_contents, twin(x))
    assert len(again.buffer_layers) == (2 if way == "growing" else 1)
    assert tl.validate_saved_activations(model, x)


@pytest.mark.parametrize("way", STATES)
def test_two_passes_see_the_same_state(way: str) -> None:
    forward, make, _ = STATES[way]
    model, twin, x = Model(forward, h=make()), Model(forward, h=make()), torch.rand(3)
    for _ in range(2):
        history = tl.log_forward_pass(model, x, layers_to_save=["output_1"])
        assert torch.equal(history["output_1"].tensor_contents, twin(x))
    state, wanted = (held.h if isinstance(held.h, list) else [held.h] for held in (model, twin))
    assert all(map(torch.equal, state, wanted))
    assert len(state) == len(wanted)


def test_a_write_is_seen_through_another_attribute_that_looks_at_the_same_memory() -> None:
    base = torch.zeros(4)

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        self.base[:2].copy_(x)
        return self.tail * 2 + self.head

    model = Model(forward, base=base, head=base[:2], tail=base[2:])
    history = tl.log_forward_pass(model, torch.rand(2))
    assert history["mul_1"].parent_layers == [history["tail"].layer_label]
    assert history["add_1"].parent_layers == [
        "mul_1_3",
        "copy_1_2",
    ]  # of the head nothing is left but what was written
    assert tl.validate_saved_activations(model, torch.rand(2))


def test_a_module_that_returns_its_attribute_adds_an_identity() -> None:
    prior = Model(lambda self: self.kept, kept=torch.ones(3))
    history = tl.log_forward_pass(
        Model(lambda self, x: x * self.prior(), prior=prior), torch.rand(3)
    )
    assert history.layer_labels == [
        "input_1_0",
        "buffer_1_0",
        "identity_1_1",
        "mul_1_2",
        "output_1_3",
    ]
    assert history["prior"] == history["identity_1"]
    registered = Model(lambda self: self.kept)
    registered.register_buffer("kept", torch.ones(3))
    wanted = tl.log_forward_pass(
        Model(lambda self, x: x * self.prior(), prior=registered), torch.rand(3)
    )
    assert wanted.layer_labels == history.layer_labels


def test_an_attribute_as_the_models_output_or_a_modules_input() -> None:
    model = Model(
        lambda self, x: (x + 1, self.kept, self.fc(self.kept)),
        kept=torch.ones(3),
        fc=nn.Linear(3, 3),
    )
    history = tl.log_forward_pass(model, torch.rand(3))
    assert history["output_2"].parent_layers == ["buffer_1_0"]
    assert history["buffer_1"].is_submodule_input
    assert history["linear_1"].parent_layers == ["buffer_1_0"]


def test_gradients_reach_an_attribute() -> None:
    model = Model(lambda self, x: x * self.kept, kept=torch.full((3,), 2.0, requires_grad=True))
    history = tl.log_forward_pass(model, torch.rand(3), save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    assert model.kept.grad.tolist() == history["kept"].grad_contents.tolist()


def test_a_log_keeps_no_attribute_alive() -> None:
    model = Model(lambda self, x: x + self.kept, kept=torch.ones(3))
    gone = weakref.ref(model.kept)
    gc.disable()
    try:
        history = tl.log_forward_pass(model, torch.rand(3))
        assert history["kept"].tensor_contents is not model.kept
        del model.kept
        assert gone() is None
    finally:
        gc.enable()
