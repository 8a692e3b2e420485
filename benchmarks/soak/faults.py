"""Models that raise at random operations."""

import random

import torch
from torch import nn

import torchlens as tl
from benchmarks.soak.figures import Figures
from benchmarks.soak.subjects import all_subjects, check_torch
from benchmarks.zoo.torch_state import changes_of_model, state_of_model, state_of_torch

__all__ = ["run_faults"]


class InjectedError(RuntimeError):
    """What a faulty model raises."""


class _Faulty(nn.Module):
    """Raises at operation `at`: by itself, or (`by_shape`) by asking torch for something
    impossible.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.at, self.by_shape = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for number in range(20):
            if number == self.at:
                if not self.by_shape:
                    raise InjectedError(f"at {number}")
                y = y @ x
            y = (y * 2).relu_() if number % 2 else self.linear(y).view(-1).view(4, 8)
        return y


def run_faults(figures: Figures, num_faults: int) -> None:
    """The model's own exception comes through with the log so far, and everything is put back."""
    model, x = _Faulty(), torch.randn(4, 8)
    state, before = state_of_model(model), state_of_torch()
    sound = all_subjects()[0]
    for _ in range(num_faults):
        model.at, model.by_shape = random.randrange(20), random.random() < 0.5
        options = random.choice(
            [
                {},
                {"save_function_args": True},
                {"save_gradients": True},
                {"layers_to_save": "linear"},
            ]
        )
        try:
            tl.log_forward_pass(model, x, **options)
        except (InjectedError, RuntimeError) as error:
            figures.faults += 1
            kind = RuntimeError if model.by_shape else InjectedError
            figures.expect(
                type(error) is kind, f"a fault came out as {type(error).__name__}: {error}"
            )
            partial = getattr(error, "partial_history", None)
            figures.expect(
                partial is not None and len(partial) >= 2,
                f"the partial log of a fault at {model.at} is missing",
            )
        else:
            figures.expect(False, f"the fault at {model.at} did not come through")
        check_torch(before, figures, "a fault")
        for change in changes_of_model(state, model):
            figures.expect(False, f"after a fault: {change}")
    sound.check(sound.log(), figures)
    figures.logs += 1
    print(f"  {num_faults} faults raised by models", flush=True)
