"""Profiling a training loop: where time and memory go, and why the weights turned into NaN.

Run `python examples/profile_training.py`. A network learns which pairs of images are alike. Its
loss is finite in the first step, and everything is NaN from the second on. The profile runs
alongside the training, says where it began, and writes output/profile.json, output/profile.csv and
output/profile.html, a page of the model coloured by what was measured. The model has random weights
and random data: nothing is downloaded.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import torchlens as tl


class Encoder(nn.Module):
    """An image to a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32 * 8 * 8, 16)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(image).flatten(1))


class Distance(nn.Module):
    """How far apart two rows of numbers are. The derivative of the root is infinite where they are
    the same.
    """

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).square().sum(1).sqrt()


class SafeDistance(nn.Module):
    """The same, kept away from the root of zero."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b).square().sum(1) + 1e-8).sqrt()


class Pairs(nn.Module):
    """Two images through one encoder."""

    def __init__(self, distance: nn.Module) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.distance = distance

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.distance(self.encoder(first), self.encoder(second))


def train(model: nn.Module, num_steps: int = 4) -> None:
    """An ordinary training loop. In each batch one image is paired with itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num_steps):
        first, second = torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)
        second[0] = first[0]
        is_alike = (torch.arange(8) == 0).float()
        distance = model(first, second)
        loss = (is_alike * distance + (1 - is_alike) * F.relu(1 - distance)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    model = Pairs(Distance()).eval()  # eval: the same image gives the same numbers
    with tl.profile(model, check="health") as profile:
        train(model)

    print(profile)
    print("\nThe slowest operations:")
    print(profile.summary(by="operation", sort_by="backward_time", limit=3))
    print("\nWhat is wrong:")
    print(profile.findings())

    output = Path("output")
    output.mkdir(exist_ok=True)
    profile.to_json(output / "profile.json", indent=2)
    profile.to_pandas().to_csv(output / "profile.csv", index=False)
    names = ("forward_time", "backward_time", "peak_bytes")
    page = profile.history.explore(
        output / "profile.html", overlays={name: profile.overlay(name) for name in names}
    )
    print(f"\nWritten: output/profile.json, output/profile.csv, {page.path}")

    torch.manual_seed(0)
    model = Pairs(SafeDistance()).eval()
    with tl.profile(model, check="health") as profile:
        train(model)
    print(f"\nWith the root kept away from zero: {profile.findings()}")


if __name__ == "__main__":
    main()
