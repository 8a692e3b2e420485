"""What replay gives is what a rerun gives, bit for bit, or it is refused with the reason."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchlens as tl
from tests.edit.models import gpt, hooked, resnet, without_head
from torchlens import NotReplayableError, edits

Tensor = torch.Tensor


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


def logged(function: Any, x: Tensor, **modules: nn.Module) -> tuple[nn.Module, tl.ModelHistory]:
    model = Made(function, **modules)
    torch.manual_seed(1)
    return model, tl.log_forward_pass(model, x)


def shifted(value: Tensor) -> Tensor:
    return value * 0.5 + 1 if value.is_floating_point() else value


@pytest.mark.parametrize("make", [gpt, resnet])
def test_every_place_replays_as_it_reruns(make: Any) -> None:
    model, x = make()
    history = tl.log_forward_pass(model, x)
    entries = [e for e in history if not (e.is_output_layer or e.is_buffer_layer)]
    assert len(entries) >= 20
    for entry in entries[:: 1 + len(entries) // 25]:
        for edit in (0.0, shifted):
            expected = history.rerun(model, x, edits={entry: edit})
            out = history.replay({entry: edit})
            assert torch.equal(out.output, output(expected)), entry.layer_label
            is_sure = entry.layer_type != "dropout"  # it returned its argument
            assert out.certificate.kind == ("bit-equal" if is_sure else "not shown")


def test_only_what_depends_on_the_edit_runs() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    site = edits.site("h.1.attn", head=2)
    out = history.replay({site: 0.0}, outputs=["output_1", "h.0", "h.1"])
    with hooked(model.get_submodule("h.1.attn.out"), without_head(2), before=True):
        assert torch.equal(out["output_1"], model(ids))
    assert torch.equal(out["h.0"], history["h.0"].tensor_contents)
    assert not torch.equal(out["h.1"], history["h.1"].tensor_contents)
    attention = history.find("scaled*", module="h.1.attn")[0]
    behind = history.between(attention, "output_1")[1:]
    assert out.num_calls == len([each for each in behind if not each.iterable_output_index])
    assert list(out.outputs) == ["output_1", "h.0", "h.1"]
    with pytest.raises(KeyError, match="none of the outputs of this replay: output_1, "):
        out["h.2"]


def test_several_edits_act_together() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    both = {"h.0.mlp": shifted, edits.site("h.2", token=-1): "mean", "h.1.attn": 0.0}
    expected = history.rerun(model, ids, edits=both)
    assert torch.equal(history.replay(both).output, output(expected))


def test_held_places_keep_their_values() -> None:
    """The direct effect of a head: all later attentions and MLPs read what they read before."""
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    site = edits.site("h.0.attn", head=1)
    hold = ["h.1.attn", "h.1.mlp", "h.2.attn", "h.2.mlp", "h.0.mlp"]
    out = history.replay({site: 0.0}, hold=hold)
    held = {key: history[key] for key in hold}
    assert torch.equal(out.output, output(history.rerun(model, ids, edits={site: 0.0, **held})))
    assert out.num_calls < history.replay({site: 0.0}).num_calls / 2
    with pytest.raises(ValueError, match=r"h\.0\.mlp is edited and held"):
        history.replay({"h.0.mlp": 0.0}, hold="h.0.mlp")


def test_a_certificate_is_checked_by_a_run_of_the_model() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    out = history.replay({"h.1.attn": shifted}, outputs=["output_1", "h.1"], hold=["h.2.mlp"])
    assert out.certificate.kind == "not shown"
    assert "'dropout_2_39' returned its argument itself" in out.certificate.reason
    assert str(out.check(model, ids)) == "bit-equal: compared with a run of the model"
    assert out.check(model, ids.flip(0)).kind == "not shown"


# -- traps


def test_what_was_handed_back_may_be_read_by_several() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y = torch.sin(x)
        return functional.dropout(y, 0.5, training=False) * 2 + y

    _, history = logged(run, torch.rand(3))
    with pytest.raises(NotReplayableError, match=r"what reads the argument. Edit 'sin_1_1'"):
        history.replay({"dropout_1": 0.0})
    assert not history.replay({"sin_1": 0.0}).output.any()


@pytest.mark.filterwarnings("ignore:torchlens. values left torch")
def test_a_value_that_went_through_python_is_refused() -> None:
    def by_item(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return y * float(y.mean())

    def by_list(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return y + torch.tensor(y.tolist())

    def by_numpy(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return y + torch.from_numpy(y.detach().numpy() * 1)

    def by_if(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return y.exp() if y.sum() > 0 else y.sin()

    def by_count(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return y * len(y.nonzero())

    def by_mask(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return y[y > 1].sum() / y[y > 1].numel()

    x = torch.tensor([1.0, 3.0, 0.0])
    for function in (by_item, by_list, by_numpy, by_if, by_count, by_mask):
        model, history = logged(function, x)
        refused = 0
        for edit in (torch.neg, torch.tensor([0.1, 0.0, 0.0]), shifted):
            expected = output(history.rerun(model, x, edits={"mul_1": edit}))
            try:
                out = history.replay({"mul_1": edit})
            except NotReplayableError as error:
                reason = "has the shape" if function in (by_count, by_mask) else "into Python"
                refused += reason in str(error) and "history.rerun" in str(error)
            else:
                assert torch.equal(out.output, expected), function
        expected_refusals = {by_if: 1, by_count: 2, by_mask: 2}
        assert refused == expected_refusals.get(function, 3), function


def test_an_edit_that_leaves_what_python_reads_is_replayed() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        return torch.relu(y) * float(y.mean()) + (y.exp() if y.sum() > 0 else y.sin())

    x = torch.tensor([1.0, -2.0, 3.0])
    model, history = logged(run, x)
    expected = history.rerun(model, x, edits={"relu_1": 1.0})
    assert torch.equal(history.replay({"relu_1": 1.0}).output, output(expected))


def test_memory_that_is_written_later_is_written_again() -> None:
    def parts(model: Any, x: Tensor) -> Tensor:
        y = x * 2
        row = y[0]
        z = torch.sin(x)
        row.add_(z[1])
        y[:, 1] = z[0, :2]
        return y.exp() + row

    def in_another(model: Any, x: Tensor) -> Tensor:
        buffer = torch.zeros(2, 3)
        view = buffer.view(-1)
        buffer[1] = torch.sin(x[0])
        view[0] = x[1, 1]
        return view.reshape(3, 2) @ x + buffer.sum()

    def on_the_input(model: Any, x: Tensor) -> Tensor:
        y = torch.cos(x)
        x.mul_(y)
        return x.view(-1).sum() + y

    x = torch.rand(2, 3)
    for function in (parts, in_another, on_the_input):
        if function is parts:
            x = torch.rand(2, 2)
        if function is in_another:
            x = torch.rand(2, 3)
        model, history = logged(function, x.clone())
        for entry in history:
            if entry.is_output_layer:
                continue
            try:
                again = history.rerun(model, x.clone(), edits={entry: shifted})
            except tl.EditError:
                continue
            out = history.replay({entry: shifted})
            assert torch.equal(out.output, output(again)), (function, entry.layer_label)
        for entry in history:  # the log itself stays as it was
            assert entry.tensor_contents is not None


def test_the_input_of_an_operation_in_place_may_be_an_output() -> None:
    model, x = resnet()
    history = tl.log_forward_pass(model, x)
    out = history.replay({"conv2d_1": shifted}, outputs=["conv2d_1", "relu_1", "2.bn2"])
    again = history.rerun(model, x, edits={"conv2d_1": shifted})
    for key in ("conv2d_1", "relu_1", "2.bn2"):
        assert torch.equal(out[key], again[key].tensor_contents), key


def test_dropout_draws_the_recorded_numbers() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        y = model.drop(x * 2)
        y = functional.dropout(y + 1, 0.5, True, True)
        return torch.relu(y) + torch.rand_like(y)

    x = torch.rand(40)
    model, history = logged(run, x, drop=nn.Dropout(0.3))
    state = torch.get_rng_state()
    for key in ("mul_1", "dropout_1", "add_1", "input.x"):
        out = history.replay({key: shifted})
        torch.manual_seed(1)
        again = history.rerun(model, x, edits={key: shifted})
        torch.set_rng_state(state)
        assert torch.equal(out.output, output(again)), key
        assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_the_model_is_refused() -> None:
    generator = torch.Generator().manual_seed(3)

    def run(model: Any, x: Tensor) -> Tensor:
        return torch.bernoulli((x * 2).sigmoid(), generator=generator)

    _, history = logged(run, torch.rand(40))
    with pytest.raises(NotReplayableError, match="draws random numbers, from a generator whose"):
        history.replay({"mul_1": 0.0})


def test_a_function_with_a_state_of_its_own_is_refused() -> None:
    calls: list[int] = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            calls.append(1)
            return torch.from_numpy(x.detach().numpy() + len(calls))

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0]

    def run(model: Any, x: Tensor) -> Any:
        return Counting.apply(x * 2)

    _, history = logged(run, torch.rand(4))
    with pytest.raises(NotReplayableError, match="that the log does not record"):
        history.replay({"mul_1": 0.0})


def test_constants_from_outside_are_used_as_they_were() -> None:
    constant = torch.arange(3.0)

    def run(model: Any, x: Tensor) -> Tensor:
        return x * 2 + constant

    _, history = logged(run, torch.rand(3))
    assert torch.equal(history.replay({"mul_1": 1.0}).output, 1 + constant)
    constant.add_(1)
    with pytest.raises(NotReplayableError, match="was changed in place after the pass"):
        history.replay({"mul_1": 1.0})


def test_values_and_weights_that_changed_since_are_refused() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    history.replay({"h.1": 0.0})
    with torch.no_grad():
        model.get_parameter("head.weight").add_(1)
    with pytest.raises(NotReplayableError, match=r"parameter 'head\.weight' was changed in pl"):
        history.replay({"h.1": 0.0})
    history = tl.log_forward_pass(model, ids)
    model.get_parameter("head.weight").data = torch.zeros(20, 16)
    with pytest.raises(NotReplayableError, match="was given other memory after the pass"):
        history.replay({"h.1": 0.0})
    history = tl.log_forward_pass(model, ids)
    with torch.no_grad():
        history["h.0"].tensor_contents.add_(1)
    with pytest.raises(tl.ValueChangedError):
        history.replay({"h.1.attn": 0.0})


def test_autocast_and_no_grad_are_as_in_the_pass() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.first(x).relu()
            y = model.second(y) + model.first(x)
        with torch.no_grad():
            z = y.float().softmax(-1)
        return z + model.second(x)

    torch.manual_seed(0)
    x = torch.rand(4, 8)
    model, history = logged(run, x, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    for key in ("relu_1", "first:1", "second:1", "input.x"):
        again = history.rerun(model, x, edits={key: shifted})
        assert torch.equal(history.replay({key: shifted}).output, output(again)), key


def test_statistics_of_a_batch_are_computed_again_and_the_model_keeps_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    x = torch.rand(6, 4)
    history = tl.log_forward_pass(model, x)
    mean = model[1].running_mean
    assert isinstance(mean, Tensor)
    before = mean.clone()
    out = history.replay({"linear_1": lambda value: value.square()})
    assert torch.equal(mean, before)
    again = history.rerun(model, x, edits={"linear_1": lambda value: value.square()})
    assert torch.equal(out.output, output(again))


def test_an_edit_that_writes_to_its_argument_leaves_the_log_as_it_is() -> None:
    def write(value: Tensor) -> Tensor:
        return value.mul_(0)

    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    kept = history["h.1"].tensor_contents.clone()
    again = history.rerun(model, ids, edits={"h.1": write})
    assert torch.equal(history.replay({"h.1": write}).output, output(again))
    assert torch.equal(history["h.1"].tensor_contents, kept)
    with pytest.raises(NotReplayableError, match="writes to its argument, which shares memory"):
        history.replay({"view_1": write})


def test_partly_saved_values_are_made_again() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids, layers_to_save=["input.ids", "output_1"])
    out = history.replay({"h.1.mlp": shifted})
    assert torch.equal(out.output, output(history.rerun(model, ids, edits={"h.1.mlp": shifted})))
    assert out.certificate.kind == "bit-equal"
    history = tl.log_forward_pass(model, ids, layers_to_save=["input.ids"])
    assert history.replay({"h.1.mlp": shifted}).certificate.kind == "not shown"
    history = tl.log_forward_pass(model, ids, layers_to_save="none")
    with pytest.raises(NotReplayableError, match="Log the model with layers_to_save='all'"):
        history.replay({"h.1.mlp": shifted})


def test_a_steering_vector_is_trained_through_a_replay() -> None:
    model, ids = gpt()
    history = tl.log_forward_pass(model, ids)
    direction = torch.zeros(16, requires_grad=True)
    out = history.replay({"h.1": edits.at(add=direction)}, grad=True)
    out.output.square().sum().backward()
    by_hand = torch.zeros(16, requires_grad=True)
    with hooked(model.get_submodule("h.1"), lambda value: value + by_hand):
        model(ids).square().sum().backward()
    assert direction.grad is not None
    assert torch.equal(direction.grad, by_hand.grad)  # type: ignore[arg-type]
    assert not history.replay({"h.1": edits.at(add=direction)}).output.requires_grad
