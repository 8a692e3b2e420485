"""Runs a model a few times for a profile, and leaves it as it was."""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens.capture.lazy_results import finished
from torchlens.capture.session import generator_states, restore_generators
from torchlens.capture.trees import named_tensors
from torchlens.profiling.profile import Profile

__all__ = ["run_trial"]

Tensor = torch.Tensor


def run_trial(
    profile: Profile, model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], num_runs: int, backward: bool | None
) -> None:
    """Measures `num_runs` runs. Gradients, buffers, inputs, generators and modes are then as they were."""
    state = _State(model, [tensor for _, tensor in named_tensors((args, kwargs))])
    try:
        with profile:
            for _ in range(num_runs):
                state.begin_run()
                try:
                    _run(model, args, kwargs, backward)
                except _BackwardFailedError as failure:
                    if backward:
                        raise failure.error from None
                    backward = False
                    profile.problems.add(
                        f"The backward pass from made-up gradients failed ({str(failure).partition('. ')[0]}): "
                        "forward alone was measured"
                    )
    finally:
        state.restore()


def _run(model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], backward: bool | None) -> None:
    result = finished(model(*args, **kwargs))
    if backward is False:
        return
    outputs = [tensor for _, tensor in named_tensors(result) if tensor.requires_grad]
    if outputs:
        try:
            torch.autograd.backward(outputs, [_made_up_gradient(tensor) for tensor in outputs])
        except RuntimeError as error:  # the model cannot be trained as it is; its own exceptions are its own
            raise _BackwardFailedError(error) from error
    elif backward:
        raise ValueError(
            "backward=True, but no output of the model requires a gradient: its parameters and inputs do not, or "
            "gradients are switched off (torch.no_grad, torch.inference_mode)."
        )


def _made_up_gradient(output: Tensor) -> Tensor:
    """What a loss might send back: of norm 1 or so, however large the output is.

    All alike would not do: after a normalisation or a softmax, such a gradient comes to nothing.
    """
    if output.layout is not torch.strided or output.is_nested or not output.is_floating_point():
        return torch.ones_like(output)
    count = output.numel()
    gradient = torch.arange(count, device=output.device, dtype=torch.float32).cos_().div_(max(1, count) ** 0.5)
    return gradient.view(output.shape).to(output.dtype)


class _BackwardFailedError(Exception):
    """Autograd refused."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


class _State:
    """What running a model may change."""

    def __init__(self, model: torch.nn.Module, inputs: list[Tensor]) -> None:
        self._generators = generator_states()
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        buffers = [buffer for _, own in self._buffers for buffer in own.values() if buffer is not None]
        self._leaves = [t for t in [*model.parameters(), *inputs] if t.is_leaf and t.requires_grad]
        self._gradients = [leaf.grad for leaf in self._leaves]
        # Each with its value, in order to put back what was written in place.
        self._inputs = [(tensor, _copy(tensor)) for tensor in inputs]
        # Weights too: a hook may step an optimizer, and a forward may write to them.
        weights = [weight for weight in model.parameters() if not is_lazy(weight)]
        self._values = [(tensor, _copy(tensor)) for tensor in (*buffers, *weights)]

    def begin_run(self) -> None:
        """Every run begins without gradients, and with the inputs that were given."""
        for leaf in self._leaves:
            leaf.grad = None
        _put_back(self._inputs)

    def restore(self) -> None:
        """Puts everything back."""
        for leaf, gradient in zip(self._leaves, self._gradients, strict=True):
            leaf.grad = gradient
        for buffers, before in self._buffers:
            if any(buffers.get(name) is not buffer for name, buffer in before.items()) or len(buffers) != len(before):
                buffers.clear()
                buffers.update(before)
        _put_back(self._inputs)
        _put_back(self._values)
        for module, is_training in self._modes:
            if module.training is not is_training:
                module.training = is_training
        restore_generators(self._generators)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _put_back(kept: list[tuple[Tensor, Tensor]]) -> None:
    """Writes values back where they have changed, behind autograd's back: a graph that the user holds stays valid."""
    for tensor, value in kept:
        if tensor.is_meta:
            continue
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            is_plain = tensor.layout is torch.strided and not tensor.is_nested
            if is_plain and not torch.equal(tensor, value):  # kinds that cannot be compared are taken to be as they were
                tensor.data.copy_(value)
