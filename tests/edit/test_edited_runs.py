"""A model run again with edits gives what hand-made hooks give, bit for bit."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchlens as tl
from tests.edit.models import gpt, hooked, resnet, without_head
from torchlens import EditError, edits

Tensor = torch.Tensor


def block(model: nn.Module, number: int) -> nn.Module:
    return model.get_submodule(f"h.{number}")


def output(history: tl.ModelHistory) -> Tensor:
    value: Tensor = history.layer_list[-1].tensor_contents
    return value


class Made(nn.Module):
    """A model of one function."""

    def __init__(self, function: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def test_a_head_that_is_set_to_zero_is_as_with_a_hook() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    new = history.rerun(model, ids, edits={edits.site("h.1.attn", head=2): 0.0})
    with hooked(model.get_submodule("h.1.attn.out"), without_head(2), before=True):
        assert torch.equal(output(new), model(ids))
    assert new.edited_layers == [history.find("scaled*", module="h.1.attn")[0].layer_label]
    assert not new[new.edited_layers[0]].tensor_contents[:, 2].any()


@pytest.mark.parametrize("key", ["h.0", "h.1.attn", "h.2.mlp", "h.0.mlp.1", "h.0.ln_1", "wte"])
def test_what_a_module_returns_is_edited_as_with_a_hook(key: str) -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    new = history.rerun(model, ids, edits={key: lambda value: value * 2 + 1})
    with hooked(model.get_submodule(key), lambda value: value * 2 + 1):
        assert torch.equal(output(new), model(ids))
    with tl.edit(model, {key: lambda value: value * 2 + 1}):
        assert torch.equal(output(new), model(ids))
    assert new.layer_labels == history.layer_labels


@pytest.mark.parametrize(
    ("edit", "by_hand"),
    [
        (0.0, torch.zeros_like),
        ("zero", torch.zeros_like),
        (3, lambda value: torch.full_like(value, 3)),
        (torch.arange(16.0), lambda value: torch.arange(16.0).expand_as(value)),
        ("mean", lambda value: value.mean((0, 1), keepdim=True).expand_as(value)),
        ("resample", lambda value: value.flip(0)),
        (edits.at(add=torch.ones(16)), lambda value: value + 1),
        (edits.at(scale=0.5), lambda value: value * 0.5),
        (edits.splice(nn.Identity(), keep_error=True), lambda value: value),
    ],
)  # fmt: skip
def test_each_form_of_an_edit(edit: Any, by_hand: Any) -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    new = history.rerun(model, ids, edits={"h.1": edit})
    with hooked(block(model, 1), by_hand):
        assert torch.equal(output(new), model(ids))


def test_values_of_another_input_are_patched_in() -> None:
    model, ids = gpt()
    history, other = (tl.log_forward_pass(model, x) for x in (ids, ids.flip(1)))
    key = edits.site("h.1", token=-1)
    new = history.rerun(model, ids, edits={key: other["h.1"]})
    own = other["h.1"].tensor_contents[:, -1]

    def patched(value: Tensor) -> Tensor:
        return torch.cat([value[:, :-1], own[:, None]], 1)

    with hooked(block(model, 1), patched):
        assert torch.equal(output(new), model(ids))


def test_the_input_may_be_another_one_and_of_another_length() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    longer = torch.cat([ids, ids], 1)[:1]
    new = history.rerun(model, longer, edits={edits.site("h.1.attn", head=0): 0.0})
    with hooked(model.get_submodule("h.1.attn.out"), without_head(0), before=True):
        assert torch.equal(output(new), model(longer))


def test_what_an_operation_in_place_made_is_edited_for_all_who_read_that_memory() -> None:
    model, x = resnet()
    history = tl.log_forward_pass(model, x)
    for entry in history.find(["relu", "iadd"]):
        new = history.rerun(model, x, edits={entry.layer_label: lambda value: value * 0.5})
        assert new.edited_layers == [entry.layer_label]
        assert torch.equal(new[entry.layer_label].tensor_contents, entry.tensor_contents * 0.5)
    # The first ReLU works in place, and the block behind it reads the same tensor twice.
    new = history.rerun(model, x, edits={"1": lambda value: value * 0.5})
    layers = list(model.children())
    layers[1] = nn.ReLU()
    plain = nn.Sequential(*layers)
    with hooked(layers[1], lambda value: value * 0.5):
        assert torch.equal(output(new), plain(x))


def test_a_value_that_goes_through_python_is_read_after_the_edit() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y = torch.relu(x)
        factor = float(y.mean())
        return y * 2 if factor > 1 else y * factor

    model, x = Made(run), torch.tensor([1.0, 3.0])
    history = tl.log_forward_pass(model, x)
    new = history.rerun(model, x, edits={"relu_1": lambda value: value / 4})
    assert torch.equal(output(new), (x / 4) * 0.5)
    assert [entry.layer_type for entry in new][-2:] == ["mul", "output"]


def test_one_of_several_results_is_edited() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        values, indices = x.max(1)
        first, second = x.split(2, 1)
        return values.sum() + indices.sum() + first.sum() + second.sum() * 10

    model, x = Made(run), torch.rand(3, 4)
    history = tl.log_forward_pass(model, x)
    label = history.find("split*")[1].layer_label
    new = history.rerun(model, x, edits={label: 1.0, "max_1": 0.0})
    first, indices = x.split(2, 1)[0], x.max(1).indices
    assert torch.equal(output(new), torch.tensor(0.0) + indices.sum() + first.sum() + 60.0)


def test_an_input_and_a_module_that_returns_its_argument_are_edited() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.same(x)
        return x * 10 + y

    model, x = Made(run, same=nn.Identity()), torch.ones(2)
    history = tl.log_forward_pass(model, x)
    new = history.rerun(model, x, edits={"same": 0.0})
    assert output(new).tolist() == [10.0, 10.0]  # as with a hook: x itself stays
    assert new.edited_layers == ["identity_1_1"]
    new = history.rerun(model, x, edits={"input.x": lambda value: value + 1})
    assert output(new).tolist() == [22.0, 22.0]
    assert new["input.x"].tensor_contents.tolist() == [2.0, 2.0]
    assert x.tolist() == [1.0, 1.0]


def test_a_write_into_a_part_is_edited() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        y[0] = 5.0
        return y + 1

    model, x = Made(run), torch.ones(2)
    history = tl.log_forward_pass(model, x)
    new = history.rerun(model, x, edits={"setitem_1": lambda value: value * 10})
    assert output(new).tolist() == [51.0, 21.0]


def test_passes_of_a_layer_are_edited_one_by_one() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = model.cell(x).tanh()
        return x

    torch.manual_seed(0)
    model, x = Made(run, cell=nn.Linear(3, 3)), torch.rand(2, 3)
    history = tl.log_forward_pass(model, x)
    new = history.rerun(model, x, edits={"cell:3": 0.0})
    expected = model.cell(torch.zeros(2, 3).tanh()).tanh()
    assert torch.equal(output(new), expected)
    with pytest.raises(KeyError, match="has 4 passes; say which"):
        history.rerun(model, x, edits={"cell": 0.0})


def test_gradients_flow_through_edits() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    direction = torch.zeros(16, requires_grad=True)
    new = history.rerun(model, ids, edits={"h.1": edits.at(add=direction)})
    output(new).square().sum().backward()
    by_hand = torch.zeros(16, requires_grad=True)
    with hooked(block(model, 1), lambda value: value + by_hand):
        model(ids).square().sum().backward()
    assert direction.grad is not None
    torch.testing.assert_close(direction.grad, by_hand.grad)
    assert direction.grad.any()


def test_a_spliced_module_is_trained_inside_the_model() -> None:
    model, ids = gpt()
    coder = nn.Linear(16, 16)
    with tl.edit(model, {"h.1": edits.splice(coder)}):
        model(ids).sum().backward()
    assert coder.weight.grad is not None
    before = model(ids)
    coder.weight.grad = None
    with tl.edit(model, {"h.1": edits.splice(coder, keep_error=True)}):
        after = model(ids)
        after.sum().backward()
    torch.testing.assert_close(after, before)
    assert coder.weight.grad is not None


def test_a_log_inside_the_block_shows_the_edit() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    site = edits.site("h.1.attn", head=2)
    with tl.edit(model, {site: 0.0}, history):
        inside = tl.log_forward_pass(model, ids)
    again = history.rerun(model, ids, edits={site: 0.0})
    assert inside.edited_layers == again.edited_layers
    assert torch.equal(output(inside), output(again))
    with tl.edit(model, {"h.1": 0.0}):
        inside = tl.log_forward_pass(model, ids)
    with hooked(block(model, 1), torch.zeros_like):
        assert torch.equal(output(inside), model(ids))


def test_blocks_are_nested() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    for own in (None, history):
        with tl.edit(model, {"h.1": 1.0}, own), tl.edit(model, {"h.1": lambda v: v * 3}, own):
            result = model(ids)
        with hooked(block(model, 1), lambda value: torch.full_like(value, 3.0)):
            assert torch.equal(result, model(ids))


def test_other_threads_and_the_model_itself_are_left_alone() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    plain = model(ids)
    found: list[Tensor] = []
    before = [dict(module._forward_hooks) for module in model.modules()]
    for own in (None, history):
        with tl.edit(model, {"h.1": 0.0}, own):
            thread = threading.Thread(target=lambda: found.append(model(ids)))
            thread.start()
            thread.join()
            assert not torch.equal(model(ids), plain)
    assert all(torch.equal(result, plain) for result in found)
    assert len(found) == 2
    with pytest.raises(ZeroDivisionError), tl.edit(model, {"h.1": lambda value: 1 / 0}, history):
        model(ids)
    assert torch.equal(model(ids), plain)
    assert [dict(module._forward_hooks) for module in model.modules()] == before
    assert not model._forward_pre_hooks


def run_twice_in_memory(model: Any, x: Tensor) -> Tensor:
    y = x * 2
    row = y[0]
    row.add_(1)
    return y.sum()


@pytest.mark.parametrize(
    ("key", "edit", "error", "message"),
    [
        ("h.1", torch.zeros(3), EditError, r"gave a tensor of shape \(3,\), and the value there"),
        ("h.1", lambda v: v.double(), EditError, r"gave torch.float64.*convert it with .to"),
        ("h.1", lambda v: None, EditError, "returned None; it must return a tensor"),
        ("h.1", lambda v: v + "a", EditError, r"The edit of h\.1 failed: unsupported operand"),
        ("h.1", "median", ValueError, "must be 'zero', 'mean' or 'resample'"),
        ("h.1", [1], TypeError, "must be a number, a tensor"),
        ("h.7", 0.0, KeyError, "No layer 'h.7'"),
        ("output_1", 0.0, EditError, "is an output of the model. Edit the operation"),
    ],
)
def test_errors_say_what_to_do(key: str, edit: Any, error: Any, message: str) -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    with pytest.raises(error, match=message):
        history.rerun(model, ids, edits={key: edit})


def test_edits_that_can_have_no_effect_are_refused() -> None:
    model = Made(run_twice_in_memory)
    history = tl.log_forward_pass(model, torch.ones(2, 2))
    with pytest.raises(EditError, match="'getitem_1_2', which shares memory with 'mul_1_1'"):
        history.rerun(model, torch.ones(2, 2), edits={"getitem_1": 0.0})
    new = history.rerun(model, torch.ones(2, 2), edits={"mul_1": 0.0})
    assert output(new).item() == 2.0
    gpt_model, _ = gpt()
    expected = pytest.raises(EditError, match=r"never applied: h\.1\. The model was not called")
    with expected, tl.edit(gpt_model, {"h.1": 0.0}):
        pass
    with pytest.raises(KeyError, match="Without a history, edits name modules"):
        tl.edit(gpt_model, {"relu_3": 0.0})
    with pytest.raises(ValueError, match="edits is empty"):
        history.rerun(model, torch.ones(2, 2), edits={})

    def branch(model: Any, x: Tensor) -> Tensor:
        return x.exp() if x.sum() > 0 else x.sin()

    branching = Made(branch)
    history = tl.log_forward_pass(branching, torch.ones(2))
    with pytest.raises(EditError, match="In 1 call of the model, that operation did not run"):
        history.rerun(branching, -torch.ones(2), edits={"exp_1": 0.0})


def test_functions_that_edit_leave_no_entries() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)

    def steer(value: Tensor) -> Tensor:
        return functional.normalize(value + 1, dim=-1).exp()

    new = history.rerun(model, ids, edits={"h.1": steer})
    assert new.layer_labels == history.layer_labels
