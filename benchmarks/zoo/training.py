"""One training step of a model of the zoo, plain and logged."""

from copy import deepcopy
from itertools import chain
from typing import Any

import torch

import torchlens as tl
from benchmarks.zoo.runs import all_equal, call, compare_runs, equal, log, run_seeded, tensors_in
from benchmarks.zoo.specimen import Case
from benchmarks.zoo.torch_state import (
    changes_of_model,
    changes_of_torch,
    state_of_model,
    state_of_torch,
)

__all__ = ["Untrainable", "check_training"]


class Untrainable(Exception):  # noqa: N818 (it says what is the case, and is no mistake)
    """A plain step of the model, without a log, raises."""


class _Returned:
    """A tensor that a module returned in the plain step: its value, and its gradient by a hook on
    the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor.detach().clone()
        self._tensor, self._version = tensor, tensor._version
        self.grad: torch.Tensor | None = None
        tensor.register_hook(self._keep)

    def is_unheard(self) -> bool:
        """Whether the hook cannot be called: torch drops the node of a view that is written to."""
        is_written = self._tensor._version != self._version
        return self.grad is None and is_written and self._tensor._is_view()

    def _keep(self, grad: torch.Tensor) -> None:
        grad = grad.detach().clone()
        self.grad = grad if self.grad is None else self.grad + grad


class _Listener:
    """Keeps what each module pass returns, as long as it is entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self.seen: dict[str, list[_Returned]] = {}

    def __enter__(self) -> "_Listener":
        for address, module in self._model.named_modules():
            if address:
                self._handles.append(module.register_forward_hook(self._hook(address)))
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def forget_gradients(self) -> None:
        """Of what the model differentiated itself: those are values of its forward pass."""
        for returned in chain.from_iterable(self.seen.values()):
            returned.grad = None

    def _hook(self, address: str) -> Any:
        num_calls = 0

        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            nonlocal num_calls
            if not torch.is_grad_enabled():  # as in a checkpointed part, which runs again
                return
            num_calls += 1
            self.seen[f"{address}:{num_calls}"] = [
                _Returned(tensor)
                for tensor in tensors_in(output)
                # A leaf would keep the hook: some modules return a parameter.
                if tensor.grad_fn is not None
                and tensor.layout is torch.strided
                and not tensor.is_nested
            ]

        return hook


def check_training(case: Case) -> tuple[int, list[str]]:
    """The number of gradients compared, and what differs.

    In training mode, the outputs, the states of generators, the buffers, the gradients of the
    parameters and those of all that the modules return are to be the same as in a plain step.
    """
    model = case.model.train()
    try:
        run_seeded(lambda: call(case))  # some models prepare themselves in the first call
        state = deepcopy(model.state_dict())  # with the versions that it notes
        with _Listener(model) as listener:
            plain = run_seeded(lambda: call(case))
        listener.forget_gradients()
        _loss(plain.tensors).backward()
    except Exception as error:  # whatever the model raises by itself says that it does not train
        first_line = next(iter(str(error).splitlines()), "")
        raise Untrainable(f"{type(error).__name__}: {first_line[:200]}") from error
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    torch_before, model_before = state_of_torch(), state_of_model(model)
    logged = run_seeded(lambda: log(case, save_gradients=True))
    reasons = changes_of_torch(torch_before) + changes_of_model(model_before, model)
    compare_runs(plain, logged, reasons)
    _loss(logged.tensors).backward()
    for name, parameter in model.named_parameters():
        if not equal(expected[name], parameter.grad):
            reasons.append(f"the gradient of {name} differs from a plain step's")
            break
    for name, buffer in model.named_buffers():
        if not equal(buffers[name], buffer):
            reasons.append(f"buffer {name} differs from a plain step's")
            break
    history = logged.value
    num_compared = _compare_gradients(history, listener.seen, reasons)
    if not history.layers_with_saved_gradients:
        reasons.append("no gradient was saved")
    if reasons and not _is_repeatable(case, state):
        raise Untrainable("two plain steps from one seed differ")
    return num_compared, [f"training: {reason}" for reason in reasons]


def _is_repeatable(case: Case, state: dict[str, Any]) -> bool:
    """Whether two plain passes from one seed are equal: some models take a seed from the system."""
    runs = []
    for _ in range(2):
        case.model.load_state_dict(state)
        runs.append(run_seeded(lambda: call(case)))
    differences: list[str] = []
    compare_runs(*runs, differences)
    return not differences


def _compare_gradients(
    history: tl.ModelHistory, seen: dict[str, list[_Returned]], reasons: list[str]
) -> int:
    """Compares the gradient of each tensor that a module returned; returns their number."""
    left: dict[str, list[tl.LayerEntry]] = {}
    for entry in history:
        if entry.has_saved_grad and tuple(entry.grad_shape) != tuple(entry.tensor_shape):
            reasons.append(f"the gradient of {entry.layer_label} has another shape than its tensor")
        for name in entry.module_passes_exited:
            left.setdefault(name, []).append(entry)
    wrong: list[str] = []
    num_compared = 0
    for name, returned in seen.items():
        entries = left.get(name, [])
        for own in returned:
            known = [entry for entry in entries if equal(own.value, entry.tensor_contents.detach())]
            # Not known is what was left out of the log: the check in eval mode counts that.
            if not known or own.is_unheard():
                continue
            num_compared += 1
            if not any(all_equal(_given(own.grad), _given(entry.grad_contents)) for entry in known):
                wrong.append(f"{name} ({known[0].layer_label})")
    if wrong:
        reasons.append(
            f"{len(wrong)} of {num_compared} gradients of what modules returned differ from a "
            f"hook's on the tensor: {', '.join(wrong[:3])}"
        )
    return num_compared


def _given(grad: torch.Tensor | None) -> list[torch.Tensor]:
    """No gradient and one of zeros say the same."""
    return [] if grad is None or not grad.any() else [grad]


def _loss(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A number that every differentiable output has a share in."""
    shares = [
        tensor.float().square().mean()
        for tensor in tensors
        if tensor.requires_grad and tensor.numel()
    ]
    return torch.stack(shares).sum()
