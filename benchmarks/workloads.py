"""The models that costs are measured on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["WORKLOADS", "declare_torchvision_operators"]

_library: Any = None


def declare_torchvision_operators() -> None:
    """Lets torchvision be imported beside a CPU build of torch that its own binary is not linked against."""
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def alexnet() -> tuple[nn.Module, Any]:
    declare_torchvision_operators()
    from torchvision.models import alexnet as build

    return build().eval(), torch.rand(1, 3, 224, 224)


def resnet18() -> tuple[nn.Module, Any]:
    declare_torchvision_operators()
    from torchvision.models import resnet18 as build

    return build().eval(), torch.rand(1, 3, 224, 224)


def gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config()).eval(), torch.randint(0, 50257, (1, 128))


class Loop(nn.Module):
    """Many tiny operations, two in each turn."""

    def __init__(self, num_operations: int) -> None:
        super().__init__()
        self.num_turns = num_operations // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_turns):
            x = torch.sin(x + 1)
        return x


def loop_10_000() -> tuple[nn.Module, Any]:
    return Loop(10_000), torch.ones(8)


def loop_100_000() -> tuple[nn.Module, Any]:
    return Loop(100_000), torch.ones(8)


WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "AlexNet 224": alexnet,
    "ResNet-18 224": resnet18,
    "GPT-2, 128 tokens": gpt2,
    "loop of 10,000 operations": loop_10_000,
    "loop of 100,000 operations": loop_100_000,
}
