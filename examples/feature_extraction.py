"""Extracts the features of chosen layers over many batches, as from a pretrained network.

Run `python examples/feature_extraction.py`. The network is a small ResNet defined here, its weights
are random and its images noise, so nothing is downloaded; replace them with your own. The features
go to `output/features.npz` and `output/features.pt`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import torchlens as tl


class Block(nn.Module):
    """Two convolutions, and the way around them."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut = (
            nn.Conv2d(num_in, num_out, 1, stride, bias=False) if stride > 1 else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y)


class SmallResNet(nn.Module):
    """A residual network for images of 32 × 32 pixels."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = nn.Sequential(Block(16, 16, 1), Block(16, 16, 1))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1))
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


# Modules by address, and an operation that no module returns: the sum at the end of the last block,
# before its relu.
LAYERS = ["layer1", "layer2.0.conv1", "iadd_6", "fc"]


def pooled(tensor: torch.Tensor) -> torch.Tensor:
    """One number per channel: small enough to keep for every image."""
    return tensor.mean((2, 3)) if tensor.dim() == 4 else tensor


@torch.no_grad()
def extract(
    model: nn.Module, batches: list[torch.Tensor], layers: list[str]
) -> dict[str, torch.Tensor]:
    """What `layers` computed for the images of all batches."""
    found: dict[str, list[torch.Tensor]] = {layer: [] for layer in layers}
    # The first log learns the graph; from then on the same graph is filled anew, and only with what
    # was asked for.
    history = tl.log_forward_pass(
        model, batches[0], layers_to_save="none", activation_postfunc=pooled
    )
    for batch in batches:
        history.save_new_activations(model, batch, layers_to_save=layers)
        for layer in layers:
            found[layer].append(history[layer].tensor_contents)
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def main() -> None:
    """Extracts features of a few layers and writes them to files."""
    torch.manual_seed(0)
    model = SmallResNet().eval()  # yours: model.load_state_dict(torch.load("checkpoint.pt"))
    images = torch.rand(100, 3, 32, 32)
    batches = list(images.split(32))  # the last one is smaller; it need not be the same size

    features = extract(model, batches, LAYERS)
    for layer, values in features.items():
        print(
            f"{layer:15} {tuple(values.shape)!s:11} mean {values.mean():+.3f}, deviation "
            f"{values.std():.3f}"
        )

    folder = Path("output")
    folder.mkdir(exist_ok=True)
    np.savez(
        folder / "features.npz", **{layer: values.numpy() for layer, values in features.items()}
    )
    torch.save(features, folder / "features.pt")
    print(
        f"\n{len(images)} images, {len(features)} layers: {folder / 'features.npz'} and "
        f"{folder / 'features.pt'}"
    )


if __name__ == "__main__":
    main()
