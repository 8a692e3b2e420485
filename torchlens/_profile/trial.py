"""Runs a model a few times for a profile, and leaves it as it was."""

from typing import Any

import torch

from torchlens._capture.session import finished
from torchlens._profile.profile import Profile
from torchlens._recording.trees import named_tensors
from torchlens._recording.unseen import unseen
from torchlens._replay.model_state import KeptTensor, State

Tensor = torch.Tensor


def run_trial(
    profile: Profile,
    model: torch.nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    num_runs: int,
    backward: bool | None,
) -> None:
    """Measures `num_runs` runs. The model, the inputs and the generators of random numbers are then
    as they were.
    """
    state = State(model, (args, kwargs))
    with unseen():
        inputs = [KeptTensor(tensor) for _, tensor in named_tensors((args, kwargs))]
    try:
        with profile:
            for _ in range(num_runs):
                _begin_run(model, inputs)
                try:
                    _run(model, args, kwargs, backward)
                except _BackwardFailedError as failure:
                    if backward:
                        raise failure.error from None
                    backward = False
                    profile.problems.add(
                        "The backward pass from made-up gradients failed "
                        f"({str(failure).partition('. ')[0]}): forward alone was measured"
                    )
    finally:
        state.restore()
        for problem in state.problems:
            profile.problems.add(f"Not all state could be saved and restored ({problem})")


def _begin_run(model: torch.nn.Module, inputs: list[KeptTensor]) -> None:
    """Every run begins without gradients, and with the inputs that were given."""
    with unseen():
        for kept in inputs:
            kept.restore()
    for leaf in (*model.parameters(), *(kept.tensor for kept in inputs)):
        if leaf.is_leaf and leaf.requires_grad:
            leaf.grad = None


def _run(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], backward: bool | None
) -> None:
    result = finished(model(*args, **kwargs))
    if backward is False:
        return
    outputs = [tensor for _, tensor in named_tensors(result) if tensor.requires_grad]
    if outputs:
        try:
            torch.autograd.backward(outputs, [_made_up_gradient(tensor) for tensor in outputs])
        except (
            RuntimeError
        ) as error:  # the model cannot be trained as it is; its own exceptions are its own
            raise _BackwardFailedError(error) from error
    elif backward:
        raise ValueError(
            "backward=True, but no output of the model requires a gradient: its parameters and "
            "inputs do not, or gradients are switched off (torch.no_grad, torch.inference_mode)."
        )


def _made_up_gradient(output: Tensor) -> Tensor:
    """What a loss might send back: of norm 1 or so, however large the output is.

    All alike would not do: after a normalisation or a softmax, such a gradient comes to nothing.
    """
    if output.layout is not torch.strided or output.is_nested or not output.is_floating_point():
        return torch.ones_like(output)
    count = output.numel()
    gradient = (
        torch.arange(count, device=output.device, dtype=torch.float32)
        .cos_()
        .div_(max(1, count) ** 0.5)
    )
    return gradient.view(output.shape).to(output.dtype)


class _BackwardFailedError(Exception):
    """Autograd refused."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error
