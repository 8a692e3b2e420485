"""The models whose pages are opened, built by hand so that no model zoo is needed."""

import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from torchlens._history.model_history import ModelHistory


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            before, after, stride = sizes[number - 1], sizes[number], 1 if number == 1 else 2
            blocks = [ResidualBlock(before, after, stride), ResidualBlock(after, after, 1)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, 100)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Attention(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(size, 3 * size)
        self.c_proj = nn.Linear(size, size)
        self.resid_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64, dtype=torch.bool))[None, None])

    def forward(self, x):
        batch, length, size = x.shape
        parts = self.c_attn(x).split(size, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts
        )
        weights = query @ key.transpose(-1, -2) / (size // self.heads) ** 0.5
        weights = weights.masked_fill(~self.bias[:, :, :length, :length], -1e9).softmax(-1)
        return self.resid_dropout(
            self.c_proj((weights @ value).transpose(1, 2).contiguous().view(batch, length, size))
        )


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


class MLP(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.c_fc = nn.Linear(size, 4 * size)
        self.act = NewGELU()
        self.c_proj = nn.Linear(4 * size, size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(size)
        self.attn = Attention(size, heads)
        self.ln_2 = nn.LayerNorm(size)
        self.mlp = MLP(size)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, size: int, heads: int, layers: int):
        super().__init__()
        self.wte = nn.Embedding(1000, size)
        self.wpe = nn.Embedding(64, size)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([Block(size, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(size)

    def forward(self, input_ids):
        position = torch.arange(input_ids.shape[1])[None]
        x = self.drop(self.wte(input_ids) + self.wpe(position))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT2(nn.Module):
    def __init__(self, size: int = 96, heads: int = 4, layers: int = 12):
        super().__init__()
        self.transformer = Transformer(size, heads, layers)
        self.lm_head = nn.Linear(size, 1000, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.transformer(input_ids))


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.from_input = nn.Linear(16, 32)
        self.from_hidden = nn.Linear(32, 32)

    def forward(self, x, hidden):
        return torch.tanh(self.from_input(x) + self.from_hidden(hidden))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        hidden = torch.zeros(x.shape[0], 32)
        for step in range(x.shape[1]):
            hidden = self.cell(x[:, step], hidden)
        return self.head(self.norm(hidden)).log_softmax(-1)


class PlainLoop(nn.Module):
    """A loop without a module around its body."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(6):
            x = torch.relu(self.fc(x)) + 1
        return x.sum()


class NestedLoop(nn.Module):
    """Ten thousand operations, each a little different from the one before."""

    def forward(self, x):
        for outer in range(50):
            for inner in range(100):
                x = torch.sin(x + (100 * outer + inner))
        return x


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x):
        return self.head(self.features(x))


def failed_history() -> ModelHistory:
    try:
        tl.log_forward_pass(Failing(), torch.randn(2, 4))
    except RuntimeError as error:
        return partial_history(error)
    raise AssertionError("The failing model did not fail.")


def history_of(name: str) -> ModelHistory:
    torch.manual_seed(0)
    match name:
        case "resnet18":
            return tl.log_forward_pass(ResNet18().eval(), torch.randn(1, 3, 64, 64))
        case "gpt2":
            return tl.log_forward_pass(GPT2().eval(), torch.randint(0, 1000, (1, 32)))
        case "recurrent":
            return tl.log_forward_pass(Recurrent(), torch.randn(4, 12, 16))
        case "plain_loop":
            return tl.log_forward_pass(PlainLoop(), torch.randn(4, 8))
        case "nested_loop":
            return tl.log_forward_pass(NestedLoop(), torch.randn(4, 8))
        case "failed":
            return failed_history()
    raise AssertionError(name)


class LoopInLoop(nn.Module):
    """A loop of three steps inside one of two."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = self.a(x)
            for _ in range(3):
                x = torch.relu(self.b(x))
        return x
