"""`log_backward` and `save_gradients=True`: times, order, parameters, and a clear word where they
cannot be had.
"""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchlens as tl
from tests.networks import MLP, ConvNet, Model


def loss_of(history: tl.ModelHistory) -> torch.Tensor:
    return history["output_1"].tensor_contents.square().mean()


def shared(self: Model, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(self.fc(self.fc(x).tanh()), self.fc.weight)


def several_results(self: Model, x: torch.Tensor) -> torch.Tensor:
    first, second = self.fc(x).split(2, dim=1)
    return first * second


def loop(self: Model, x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = self.fc(x).sin()
    return x


# -- hooks, passes, options ------------------------------------------------------------------------


@pytest.mark.parametrize("saves", [False, True])
def test_hooks_of_the_users_own_run_and_what_they_change_is_recorded(saves: bool) -> None:
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x, save_gradients=saves)
    history["relu_1"].tensor_contents.register_hook(lambda gradient: gradient * 10)
    history["linear_1"].tensor_contents.grad_fn.register_prehook(
        lambda gradients: (gradients[0] * 2,)
    )
    model.fc2.weight.register_hook(lambda gradient: gradient * 0)
    history.log_backward(history["output_1"].tensor_contents.sum())
    relu = 10 * model.fc2.weight.sum(0).expand(2, 5)
    torch.testing.assert_close(history["relu_1"].grad_contents, relu)
    torch.testing.assert_close(
        model.fc1.weight.grad, history.param_grads["fc1.weight"], rtol=0, atol=0
    )
    # A hook on a parameter changes what is added to `.grad`, after the model sent it.
    assert not model.fc2.weight.grad.any()
    assert history.param_grads["fc2.weight"].any()


@pytest.mark.parametrize("saves", [False, True])
def test_passes_add_up_and_each_is_known(saves: bool) -> None:
    model = MLP()
    history = tl.log_forward_pass(model, torch.rand(2, 4), save_gradients=saves)
    assert history.backward_passes == []
    loss = history["output_1"].tensor_contents.sum()
    history.log_backward(loss, retain_graph=True)
    once = history["relu_1"].grad_contents.clone()
    weight = history.param_grads["fc1.weight"].clone()
    seconds = history["relu_1"].backward_time_elapsed
    history.log_backward(history["relu_1"].tensor_contents.sum(), retain_graph=True)
    history.log_backward(loss * 2)
    torch.testing.assert_close(history["relu_1"].grad_contents, once * 3 + 1)
    torch.testing.assert_close(model.fc1.weight.grad, history.param_grads["fc1.weight"])
    assert not torch.equal(history.param_grads["fc1.weight"], weight)
    first, second, third = history.backward_passes
    assert [one.number for one in history.backward_passes] == [1, 2, 3]
    assert (
        first.layer_order
        == third.layer_order
        == ["output_1_4", "linear_2_3", "relu_1_2", "linear_1_1"]
    )
    assert second.layer_order == ["relu_1_2", "linear_1_1"]
    assert first.num_nodes > second.num_nodes
    assert first.layer_seconds["relu_1_2"] == seconds
    total = sum(one.layer_seconds["relu_1_2"] for one in history.backward_passes)
    assert history["relu_1"].backward_time_elapsed == pytest.approx(total)


def test_a_pass_can_be_had_on_its_own() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    loss = history["output_1"].tensor_contents.sum()
    history.log_backward(loss * 3, retain_graph=True)
    history.clear_gradients()
    assert history.layers_with_saved_gradients == []
    assert history.backward_passes == []
    assert history["relu_1"].backward_order is None
    history.log_backward(loss)
    assert history["output_1"].grad_contents.unique().tolist() == [1]
    assert len(history.backward_passes) == 1


def test_order_goes_from_the_output_to_the_input() -> None:
    x = torch.rand(2, 4, requires_grad=True)
    history = tl.log_forward_pass(MLP(), x)
    history.log_backward(history["output_1"].tensor_contents.sum())
    assert [history[label].backward_order for label in history.layer_labels] == [5, 4, 3, 2, 1]
    assert history["linear_1"].backward_time_elapsed > 0
    assert "s in the backward pass)" in str(history["linear_1"])
    assert history["output_1"].backward_time_elapsed == 0


def test_what_lies_outside_the_model_is_told_apart() -> None:
    x = torch.rand(2, 4, requires_grad=True)
    history = tl.log_forward_pass(MLP(), x.cos())
    history.log_backward(history["output_1"].tensor_contents.exp().mean())
    (one,) = history.backward_passes
    assert one.nodes_outside is not None
    assert {"ExpBackward0", "MeanBackward0", "CosBackward0", "AccumulateGrad"} <= set(
        one.nodes_outside
    )
    assert not {"AddmmBackward0", "ReluBackward0"} & set(one.nodes_outside)
    assert one.seconds_outside > 0
    assert str(one).startswith("Backward pass 1: 5 layers, 5 nodes, ")
    history = tl.log_forward_pass(MLP(), x, save_gradients=True)
    history["output_1"].tensor_contents.sum().backward()
    assert history.backward_passes[0].nodes_outside is None


def test_results_of_one_call_share_its_time() -> None:
    history = tl.log_forward_pass(Model(several_results, fc=nn.Linear(4, 4)), torch.rand(3, 4))
    history.log_backward(history["output_1"].tensor_contents.sum())
    first, second = history["split_1"], history["split_2"]
    assert first.backward_time_elapsed == second.backward_time_elapsed > 0


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("saves", [False, True])
def test_a_backward_pass_with_a_graph_of_its_own(saves: bool) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    history = tl.log_forward_pass(Model(lambda self, x: (x * 2) ** 3), x, save_gradients=saves)
    history.log_backward(history["output_1"].tensor_contents.sum(), create_graph=True)
    assert not history["input_1"].grad_contents.requires_grad
    torch.testing.assert_close(history["input_1"].grad_contents, torch.tensor([24.0, 96.0]))
    assert x.grad.grad_fn is not None
    gradient, x.grad = x.grad, None
    history.clear_gradients()
    history.log_backward(gradient.sum())
    torch.testing.assert_close(history["input_1"].grad_contents, torch.tensor([48.0, 96.0]))


@pytest.mark.parametrize("saves", [False, True])
def test_a_pass_that_ends_at_a_tensor_of_the_log_reaches_it(saves: bool) -> None:
    model = MLP()
    history = tl.log_forward_pass(model, torch.rand(2, 4), save_gradients=saves)
    relu = history["relu_1"].tensor_contents
    history.log_backward(history["output_1"].tensor_contents.sum(), inputs=relu)
    torch.testing.assert_close(history["relu_1"].grad_contents, relu.grad)
    assert history.backward_passes[0].layer_order == ["output_1_4", "linear_2_3", "relu_1_2"]
    assert history["linear_1"].grad_contents is None
    assert model.fc1.weight.grad is None
    assert relu._backward_hooks is None or not relu._backward_hooks


def test_gradient_of_a_loss_that_is_no_number() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    output = history["output_1"].tensor_contents
    history.log_backward(output, gradient=torch.full_like(output, 2))
    assert history["output_1"].grad_contents.unique().tolist() == [2]


def test_parameters_show_at_the_operations_that_read_them() -> None:
    model = Model(shared, fc=nn.Linear(4, 4))
    model.fc.bias.requires_grad_(False)
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    assert history["linear_1:1"].parent_param_grads == [None, None]
    history.log_backward(history["output_1"].tensor_contents.sum())
    weight, bias = history["linear_1:1"].parent_param_grads
    torch.testing.assert_close(weight, model.fc.weight.grad, rtol=0, atol=0)
    assert bias is None
    assert list(history.param_grads) == ["fc.weight"]


@pytest.mark.parametrize("saves", [False, True])
def test_what_is_recorded_stays_when_grad_is_written(saves: bool) -> None:
    model, x = MLP(), torch.rand(2, 4, requires_grad=True)
    history = tl.log_forward_pass(model, x, save_gradients=saves)
    history.log_backward(loss_of(history))
    recorded = {address: gradient.clone() for address, gradient in history.param_grads.items()}
    at_input = history["input_1"].grad_contents.clone()
    model.zero_grad(set_to_none=False)
    x.grad.zero_()
    assert all(
        torch.equal(history.param_grads[address], gradient)
        for address, gradient in recorded.items()
    )
    torch.testing.assert_close(history["input_1"].grad_contents, at_input, rtol=0, atol=0)
    assert at_input.any()


def test_gradients_are_what_arrived_and_not_what_was_there() -> None:
    model = MLP()
    model(torch.rand(2, 4)).sum().backward()
    before = model.fc1.weight.grad.clone()
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    history.log_backward(history["output_1"].tensor_contents.sum())
    torch.testing.assert_close(history.param_grads["fc1.weight"], model.fc1.weight.grad - before)


@pytest.mark.parametrize("saves", [False, True])
def test_inside_a_reentrant_checkpoint_entries_are_not_heard(saves: bool) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.fc(y * 2).sin(), x, use_reentrant=True) * 3

    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4, requires_grad=True)
    history = tl.log_forward_pass(model, x, save_gradients=saves)
    history.log_backward(history["output_1"].tensor_contents.sum())
    torch.testing.assert_close(history["input_1"].grad_contents, x.grad, rtol=0, atol=0)
    assert history["sin_1"].grad_contents.unique().tolist() == [3]
    assert history["linear_1"].grad_contents is None
    assert history["sin_1"].backward_time_elapsed > 0
    # What it sends to parameters is.
    assert torch.equal(history.param_grads["fc.weight"], model.fc.weight.grad)


def test_a_parameter_inside_and_outside_of_a_reentrant_checkpoint_gets_all_or_nothing() -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return self.fc(checkpoint(lambda y: self.fc(y).sin(), x, use_reentrant=True)) + self.other(
            x
        )

    model = Model(forward, fc=nn.Linear(4, 4), other=nn.Linear(4, 4))
    x = torch.rand(2, 4, requires_grad=True)
    history = tl.log_forward_pass(model, x, save_gradients=True)
    loss_of(history).backward()
    assert list(history.param_grads) == ["other.weight", "other.bias"]
    for saves in (False, True):
        model.zero_grad()
        history = tl.log_forward_pass(model, x, save_gradients=saves)
        history.log_backward(loss_of(history))
        assert len(history.param_grads) == 4
        for address, parameter in model.named_parameters():
            torch.testing.assert_close(history.param_grads[address], parameter.grad)
        assert all(parameter._backward_hooks is None for parameter in model.parameters())


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_what_reaches_a_parameter_past_the_model_is_not_counted(is_checkpointed: bool) -> None:
    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.fc, x, use_reentrant=True) if is_checkpointed else self.fc(x)

    model, x = Model(forward, fc=nn.Linear(4, 4)), torch.rand(2, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(model.fc(x).square().mean(), model.fc.weight)
    history = tl.log_forward_pass(model, x)
    history.log_backward(loss_of(history) + 10 * model.fc.weight.square().sum())
    torch.testing.assert_close(history.param_grads["fc.weight"], wanted)
    torch.testing.assert_close(model.fc.weight.grad, wanted + 20 * model.fc.weight.detach())


def test_partly_saved_logs_hear_what_is_saved() -> None:
    model, x = ConvNet().eval(), torch.rand(2, 3, 8, 8)
    everything = tl.log_forward_pass(model, x)
    everything.log_backward(loss_of(everything))
    wanted = {address: parameter.grad.clone() for address, parameter in model.named_parameters()}
    some = tl.log_forward_pass(model, x, layers_to_save=["relu", "conv2d", "output"])
    some.log_backward(loss_of(some))
    saved = [entry for entry in some if entry.has_saved_activations]
    assert 2 < len(saved) < len(some)
    for entry in some:
        assert entry.has_saved_grad == (
            entry.has_saved_activations and everything[entry.layer_label].has_saved_grad
        )
        if entry.has_saved_grad:
            torch.testing.assert_close(
                entry.grad_contents, everything[entry.layer_label].grad_contents
            )
    for address, gradient in wanted.items():
        torch.testing.assert_close(some.param_grads[address], gradient)
    assert any(entry.has_saved_grad and entry.backward_time_elapsed is None for entry in saved)


# -- clear words -----------------------------------------------------------------------------------


def test_a_loss_that_is_no_tensor_is_told() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(TypeError, match=r"loss must be a tensor, got 1\.0 \(float\)"):
        history.log_backward(1.0)  # type: ignore[arg-type]


def test_a_log_without_gradients_is_told() -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
        with pytest.raises(
            ValueError, match=r"Nothing in this log has a gradient: .* torch\.no_grad\(\)"
        ):
            history.log_backward(torch.ones(1, requires_grad=True).sum())


def test_a_detached_loss_is_told() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    with pytest.raises(
        ValueError, match=r"requires no gradient.*history\['output_1_4'\]\.tensor_contents"
    ):
        history.log_backward(history["output_1"].tensor_contents.detach().sum())


@pytest.mark.parametrize("saves", [False, True])
def test_a_loss_from_elsewhere_is_told_and_not_run(saves: bool) -> None:
    model, x = MLP(), torch.rand(2, 4)
    history = tl.log_forward_pass(model, x, save_gradients=saves)
    with pytest.raises(ValueError, match="does not lead back to this forward pass"):
        history.log_backward(model(x).sum())
    assert model.fc1.weight.grad is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layers_to_save": "none"}, "It has no saved tensors"),
        ({"detach_saved_tensors": True}, "not those that the model computed with"),
        ({"activation_postfunc": torch.mean}, "not those that the model computed with"),
    ],
)
def test_a_log_that_cannot_follow_is_told_and_the_cure_works(
    options: dict[str, Any], reason: str
) -> None:
    model, results = MLP(), []
    model.register_forward_hook(lambda module, args, output: results.append(output))
    history = tl.log_forward_pass(model, torch.rand(2, 4), **options)
    with pytest.raises(ValueError, match=f"{reason}.*save_gradients=True"):
        history.log_backward(results[-1].sum())
    history = tl.log_forward_pass(model, torch.rand(2, 4), save_gradients=True, **options)
    history.log_backward(results[-1].sum())
    assert history["linear_1"].grad_shape == (2, 5)


def test_after_cleanup_there_is_nothing_to_follow() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    loss = history["output_1"].tensor_contents.sum()
    history.cleanup()
    with pytest.raises(ValueError, match="It has no saved tensors"):
        history.log_backward(loss)


# -- what it leaves behind -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True])
def test_a_history_with_a_backward_pass_is_freed_when_dropped(saves: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        model, x = ConvNet().eval(), torch.rand(2, 3, 8, 8, requires_grad=True)
        history = tl.log_forward_pass(model, x, save_gradients=saves)
        loss = loss_of(history)
        history.log_backward(loss, retain_graph=True)
        assert history.backward_passes
        references = [weakref.ref(history._log), weakref.ref(history._log.recording.gradients)]
        references += [
            weakref.ref(entry.grad_contents) for entry in history if entry.has_saved_grad
        ]
        node = loss.grad_fn.next_functions[0][0]
        del history
        assert [reference() for reference in references] == [None] * len(references)
        assert not any(key.startswith("torchlens") for key in node.metadata)
        loss.backward()
    finally:
        gc.enable()


def test_an_ordinary_backward_is_not_recorded_without_save_gradients() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    loss = history["output_1"].tensor_contents.sum()
    history.log_backward(loss, retain_graph=True)
    gradient = history["relu_1"].grad_contents.clone()
    loss.backward()
    torch.testing.assert_close(history["relu_1"].grad_contents, gradient, rtol=0, atol=0)
    assert len(history.backward_passes) == 1


def test_a_backward_that_raises_leaves_the_log_as_ready_as_before() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4))
    output = history["output_1"].tensor_contents
    with pytest.raises(RuntimeError, match="scalar"):
        history.log_backward(output)
    history.log_backward(output.sum())
    with pytest.raises(RuntimeError, match="second time"):
        history.log_backward(output.sum())
    assert history["linear_1"].has_saved_grad


def test_gradients_of_a_new_input_stand_alone() -> None:
    model = MLP()
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    history.log_backward(history["output_1"].tensor_contents.sum())
    history.save_new_activations(model, torch.rand(2, 4))
    assert history.layers_with_saved_gradients == []
    history.log_backward(history["output_1"].tensor_contents.sum())
    assert history["linear_1"].has_saved_grad


@pytest.mark.parametrize(("vis_opt", "num_edges"), [("rolled", 3), ("unrolled", 10)])
def test_the_drawing_shows_gradients_as_edges(vis_opt: str, num_edges: int, tmp_path: Path) -> None:
    model = Model(loop, fc=nn.Linear(4, 4))
    history = tl.log_forward_pass(model, torch.rand(2, 4))
    path = tmp_path / "model.gv"
    options: dict[str, Any] = {
        "vis_opt": vis_opt,
        "vis_outpath": str(path),
        "vis_save_only": True,
        "vis_fileformat": "svg",
    }
    history.render_graph(**options)
    assert "#9197F6" not in path.read_text()
    history.log_backward(history["output_1"].tensor_contents.sum())
    history.render_graph(**options)
    assert path.read_text().count("#9197F6") == num_edges
