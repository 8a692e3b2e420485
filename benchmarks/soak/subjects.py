"""What is logged: models of different kinds, each with what it must give, and how torch is compared
with what it was.
"""

import gc
from typing import Any

import torch
from torch import nn

import torchlens as tl
from benchmarks.soak.figures import Figures
from benchmarks.zoo.torch_state import changes_of_model, changes_of_torch, state_of_model

__all__ = ["Subject", "all_subjects", "check_torch"]


class _Views(nn.Module):
    """Writes through views, into parts, and with `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y[:, 0].add_(1)
        view = y.view(-1)
        y.mul_(2)
        total = torch.empty_like(view.detach())
        torch.add(view.detach(), 1, out=total)
        y[0] = 3
        return total.view_as(y) + y


class _Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x)
        for _ in range(5):
            state = self.cell(x, state)
        return state


def _models() -> list[tuple[nn.Module, torch.Tensor]]:
    """Models of different kinds, each with an input."""
    torch.manual_seed(0)
    cnn = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return [
        (
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Softmax(-1)).eval(),
            torch.randn(4, 8),
        ),
        (cnn.eval(), torch.randn(2, 3, 8, 8)),
        (nn.LSTM(8, 8, 2).eval(), torch.randn(5, 2, 8)),
        (layer.eval(), torch.randn(2, 5, 8)),
        (_Views().eval(), torch.randn(4, 8)),
        (_Loop().eval(), torch.randn(4, 8)),
    ]


class Subject:
    """A model, what it returns, and how its log looks when nothing disturbs it."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        result = model(x)
        self.expected = (result[0] if isinstance(result, tuple) else result).detach()
        self.state = state_of_model(model)
        self.labels = self.log().layer_labels_w_pass

    def log(self) -> tl.ModelHistory:
        return tl.log_forward_pass(self.model, self.x)

    def check(self, history: tl.ModelHistory, figures: Figures) -> None:
        name = type(self.model).__name__
        figures.expect(
            history.layer_labels_w_pass == self.labels,
            f"{name}: the log has other layers than before",
        )
        value = history[history.output_layers[0]].tensor_contents
        # To rounding: how torch splits a sum depends on the thread, with or without a log.
        is_same = torch.allclose(value, self.expected, rtol=1e-4, atol=1e-5)
        figures.expect(is_same, f"{name}: the log holds another output than before")
        figures.expect(
            history.num_tensors_saved == history.num_tensors_total,
            f"{name}: not every tensor is saved",
        )

    def check_model(self, figures: Figures) -> None:
        for change in changes_of_model(self.state, self.model):
            figures.expect(False, f"{type(self.model).__name__}: {change}")


def all_subjects() -> list[Subject]:
    """One of each kind."""
    return [Subject(model, x) for model, x in _models()]


def check_torch(before: Any, figures: Figures, when: str) -> None:
    """Finds what of torch is no longer as it was."""
    for change in changes_of_torch(before):
        figures.expect(False, f"after {when}: {change}")
    if not gc.isenabled():
        gc.enable()  # so that it is told once, not ever after
