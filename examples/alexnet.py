"""The main job in one file: log a model, then print, index, tabulate and draw the log.

Run `make demo`, or `python examples/alexnet.py`. AlexNet is defined here, with random weights:
nothing is downloaded.
"""

from pathlib import Path

import torch
from torch import nn

import torchlens as tl


class AlexNet(nn.Module):
    """The convolutional network of Krizhevsky, Sutskever and Hinton (2012), in its one-tower
    form.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def main() -> None:
    """Logs AlexNet and shows what one can do with the log."""
    torch.manual_seed(0)
    model = AlexNet().eval()
    image = torch.rand(1, 3, 224, 224)
    history = tl.log_forward_pass(model, image)

    print(history)
    print()
    print(history["conv2d_3_7"])
    print()
    same = history["conv2d_3"], history["features.6"], history[7], history[-17]
    print("Also found as:", ", ".join(repr(entry) for entry in same))
    print()
    table = history.to_pandas()
    print(
        table[["layer_label", "tensor_shape", "num_params_total", "func_time_elapsed"]].to_string(
            index=False
        )
    )

    folder = Path("output")
    folder.mkdir(exist_ok=True)
    table_path = folder / "alexnet.csv"
    table.to_csv(table_path, index=False)
    history.render_graph(vis_outpath=folder / "alexnet.pdf", vis_save_only=True)
    history.explore(folder / "alexnet.html")
    print(f"\nThe whole table is in {table_path}, the drawing in {folder / 'alexnet.pdf'},")
    print(f"and {folder / 'alexnet.html'} is a page to explore in a browser.")


if __name__ == "__main__":
    main()
