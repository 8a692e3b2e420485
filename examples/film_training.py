"""Trains a small CNN, sends the run to TensorBoard and films its first layer and the embedding of
its digits.

python examples/film_training.py
tensorboard --logdir output/tensorboard
"""

import torch
from torch import nn
from torch.nn import functional as F

import torchlens as tl


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bars that lie or stand, at one of four places: eight classes."""
    labels = torch.randint(0, 8, (size,))
    images = 0.3 * torch.randn(size, 1, 12, 12)
    for image, label in zip(images, labels.tolist(), strict=True):
        place = label % 4 * 3
        if label < 4:
            image[0, place : place + 2] += 1
        else:
            image[0, :, place : place + 2] += 1
    return images, labels


def main(steps: int = 120) -> None:
    """Trains, and says where the files are."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(200, 32),
        nn.ReLU(),
        nn.Linear(32, 8),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sink = tl.sinks.TensorBoard("output/tensorboard", every=5)
    with tl.monitor(model, "output/runs/bars", every=2, sinks=[sink]) as run:
        run.video("0", "output/conv.mp4", show="images")
        run.video("4", "output/embedding.mp4", show="tsne", every=4)
        for _ in range(steps):
            images, labels = batch(64)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
    r = tl.open_run("output/runs/bars")
    losses = r.scalars["loss"].values
    print(
        f"{len(r.steps)} of {steps} steps recorded; loss from {losses[0]:.2f} to {losses[-1]:.2f}"
    )
    print(f"problems: {', '.join(run.problems) or 'none'}; pictures: {run.work_counts.done}")
    print(
        "output/conv.mp4, output/embedding.mp4, output/tensorboard (tensorboard --logdir "
        "output/tensorboard)"
    )


if __name__ == "__main__":
    main()
