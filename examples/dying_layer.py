"""Trains a small CNN in which a layer dies, and finds it: when, which one, and why.

The learning rate is far too high for one moment. The loss says that something went wrong, but not
where. The monitor does: `torchlens serve runs` shows it live, and the page written at the end shows
it later.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import torchlens as tl

NUM_STEPS, ACCIDENT = 120, 60


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU()),
        nn.Linear(64, 10),
    )


def main(folder: Path) -> list[tl.Finding]:
    torch.manual_seed(0)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    patterns = torch.randn(10, 1, 16, 16)
    with tl.monitor(model, folder / "dying") as run:
        for step in range(NUM_STEPS):
            labels = torch.randint(0, 10, (32,))
            loss = nn.functional.cross_entropy(
                model(patterns[labels] + torch.randn(32, 1, 16, 16)), labels
            )
            optimizer.zero_grad()
            loss.backward()
            if step == ACCIDENT:  # the learning rate jumps
                model[3][0].bias.grad += 50.0
            optimizer.step()
            run.log(loss=loss)
    recorded = tl.open_run(folder / "dying")
    found = [each for each in recorded.findings if each.kind == "dead units" and not each.is_over]
    for each in found:
        print(each)
    print(f"last loss {recorded.scalars['loss'].values[-1]:.2f}")
    print(recorded.explore(folder / "dying.html"))
    return [each.finding for each in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs"))
