"""An LSTM and a GRU as torch has them, and a port that goes step by step through time with gates by
hand.
"""

import torch
from torch import Tensor, nn

__all__ = ["MISTAKES", "Net", "Port", "example", "ported"]

WORDS, WIDTH, CLASSES, LENGTH = 30, 16, 7, 9


class Net(nn.Module):
    """The reference."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.words(ids))
        y, _ = self.gru(x)
        return self.head((x + y)[:, -1])


class Cell(nn.Module):
    def __init__(self, gates: int) -> None:
        super().__init__()
        self.w_in, self.w_state = (
            nn.Parameter(torch.zeros(WIDTH, gates * WIDTH)),
            nn.Parameter(torch.zeros(WIDTH, gates * WIDTH)),
        )
        self.b_in, self.b_state = (
            nn.Parameter(torch.zeros(gates * WIDTH)),
            nn.Parameter(torch.zeros(gates * WIDTH)),
        )
        self.mistake = ""


class LSTM(Cell):
    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        if self.mistake == "starts at one":
            h = torch.ones(x.shape[0], WIDTH)
        found = []
        times = range(x.shape[1])
        for time in reversed(times) if self.mistake == "reversed" else times:
            gates = x[:, time] @ self.w_in + self.b_in + h @ self.w_state
            gates = gates if self.mistake == "no bias" else gates + self.b_state
            i, f, g, o = gates.chunk(4, dim=-1)
            if self.mistake == "gates":
                g, o = o, g
            f = f + 1 if self.mistake == "forget bias" else f
            g = torch.sigmoid(g) if self.mistake == "sigmoid" else torch.tanh(g)
            old = torch.sigmoid(f) * (c * 0 if self.mistake == "forgets" else c)
            c = old + torch.sigmoid(i) * g
            squashed = c if self.mistake == "no tanh" else torch.tanh(c)
            o = (o / 6 + 0.5).clamp(0, 1) if self.mistake == "hard" else torch.sigmoid(o)
            h = o * squashed
            found.append(c if self.mistake == "cell" else h)
        return torch.stack(found, dim=1)


class GRU(Cell):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], WIDTH)
        found = []
        for time in range(x.shape[1]):
            given = (x[:, time] @ self.w_in + self.b_in).chunk(3, dim=-1)
            kept = (h @ self.w_state + self.b_state).chunk(3, dim=-1)
            r, z = torch.sigmoid(given[0] + kept[0]), torch.sigmoid(given[1] + kept[1])
            if self.mistake == "gates":
                r, z = z, r
            if self.mistake == "reset before":
                new = torch.tanh(
                    given[2] + ((r * h) @ self.w_state + self.b_state).chunk(3, dim=-1)[2]
                )
            else:
                new = torch.tanh(given[2] + r * kept[2])
            h = (1 - z) * h + z * new if self.mistake == "update" else (1 - z) * new + z * h
            found.append(h)
        return torch.stack(found, dim=1)


class Port(nn.Module):
    """The candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(WORDS, WIDTH))
        self.first, self.second = LSTM(4), GRU(3)
        self.w, self.b = (
            nn.Parameter(torch.zeros(WIDTH, CLASSES)),
            nn.Parameter(torch.zeros(CLASSES)),
        )
        self.mistake = ""

    def forward(self, ids: Tensor) -> Tensor:
        words = self.table[ids]
        x = self.first(words)
        y = self.second(words if self.mistake == "skips a layer" else x)
        total = y if self.mistake == "no residual" else x + y
        last = (
            total.mean(1)
            if self.mistake == "mean"
            else total[:, -2 if self.mistake == "last but one" else -1]
        )
        return last @ self.w + self.b


MISTAKES: dict[str, tuple[str, ...]] = {
    "the LSTM's gates in the order i f o g": ("first", "gates"),
    "an LSTM without its second bias": ("first", "no bias"),
    "a forget bias of one": ("first", "forget bias"),
    "sigmoid for tanh in the LSTM": ("first", "sigmoid"),
    "the LSTM's cell without tanh": ("first", "no tanh"),
    "a hard sigmoid": ("first", "hard"),
    "the LSTM forgets its cell": ("first", "forgets"),
    "the LSTM returns its cell": ("first", "cell"),
    "the LSTM goes back in time": ("first", "reversed"),
    "the LSTM's state starts at one": ("first", "starts at one"),
    "the GRU's gates swapped": ("second", "gates"),
    "the GRU's reset before the product": ("second", "reset before"),
    "the GRU's update the other way round": ("second", "update"),
    "the GRU reads the words": ("", "skips a layer", "second"),
    "no residual": ("", "no residual"),
    "the mean for the last step": ("", "mean"),
    "the last step but one": ("", "last but one"),
}


def ported(reference: Net, mistakes: dict[str, str] | None = None) -> Port:
    """A port with the reference's weights; `mistakes` are planted by address."""
    port = Port()
    with torch.no_grad():
        port.table.copy_(reference.words.weight)
        for ours, theirs in ((reference.lstm, port.first), (reference.gru, port.second)):
            theirs.w_in.copy_(ours.weight_ih_l0.T)
            theirs.w_state.copy_(ours.weight_hh_l0.T)
            theirs.b_in.copy_(ours.bias_ih_l0)
            theirs.b_state.copy_(ours.bias_hh_l0)
        port.w.copy_(reference.head.weight.T)
        port.b.copy_(reference.head.bias)
    for address, mistake in (mistakes or {}).items():
        port.get_submodule(address).mistake = mistake  # type: ignore[assignment]
    return port.eval()


def example() -> tuple[Net, Tensor]:
    """The reference with random weights, and an input."""
    torch.manual_seed(2)
    return Net().eval(), torch.randint(0, WORDS, (3, LENGTH))
