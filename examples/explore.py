"""Writes the page of a small transformer to output/classifier.html, to be opened in a web browser.

Run `python examples/explore.py`. The model has random weights: nothing is downloaded.
"""

import torch
from torch import nn

import torchlens as tl
from torchlens._page.page import explore


class Classifier(nn.Module):
    """Words to vectors, six layers of attention, one guess."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(
            64, nhead=4, dim_feedforward=128, batch_first=True, dropout=0.0
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
        self.head = nn.Linear(64, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(words)).mean(dim=1))


def main() -> None:
    torch.manual_seed(0)
    history = tl.log_forward_pass(Classifier(), torch.randint(0, 1000, (2, 16)))
    spread = {
        entry.layer_label: float(entry.tensor_contents.detach().float().std()) for entry in history
    }
    print(
        explore(history, "output/classifier.html", overlays={"spread": spread}, title="Classifier")
    )


if __name__ == "__main__":
    main()
