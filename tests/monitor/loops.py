"""Training loops of many kinds, each from a fixed seed: called with and without a monitor, they
must do the same.

A loop is a function of `start`, which it calls with its model when that is ready; it returns losses
and the models.
"""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, Dataset

Start = Callable[[nn.Module], Any]
Result = tuple[list[float], list[nn.Module]]
Loop = Callable[[Start], Result]


def steps(
    model: nn.Module, loss_of: Callable[[int], torch.Tensor], count: int = 4, lr: float = 0.05
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for number in range(count):
        loss = loss_of(number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(
        self, *, values: torch.Tensor, scale: float, mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        hidden = self.first(input=values) * scale
        return {"logits": self.second(hidden), "hidden": hidden, "mask": mask}


class ReturnsNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []

    def forward(self, x: torch.Tensor) -> None:
        self.kept.append(float(x.sum()))


def keyword_only(start: Start) -> Result:
    model = Keywords()
    start(model)

    def loss(_: int) -> torch.Tensor:
        out = model(values=torch.randn(5, 6), scale=0.5)
        return out["logits"].square().sum() + out["hidden"].mean()

    return steps(model, loss), [model]


def none_outputs(start: Start) -> Result:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "quiet": ReturnsNothing()})
    start(model)

    def loss(_: int) -> torch.Tensor:
        y = model["a"](torch.randn(3, 4))
        model["quiet"](y.detach())
        return y.square().mean()

    return steps(model, loss), [model]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True)
        self.norm, self.out = nn.BatchNorm2d(6), nn.Linear(6, 4)
        self.down = nn.Conv2d(3, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += self.down(x)
        y = self.act(y) * 1.5
        half = y[:, :3]
        half.mul_(2)
        return self.out(F.dropout(y.mean((2, 3)), 0.2, self.training, inplace=True))


def in_place(start: Start) -> Result:
    model = InPlace()
    start(model)
    return steps(model, lambda _: model(torch.randn(4, 3, 6, 6)).square().mean()), [model]


def nan_and_inf(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    start(model)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(3, 4)
        if number == 1:
            x[0, 0] = float("inf")
        if number == 2:
            x[0, 0] = float("nan")
        return model(x).sum()

    return steps(model, loss), [model]


def dropout(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.RReLU(), nn.Linear(32, 2))
    start(model)
    return steps(model, lambda _: model(torch.randn(8, 6)).square().mean()), [model]


def accumulation(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    start(model)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(4):
        for _ in range(3):
            loss = model(torch.randn(4, 6)).square().mean() / 3
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [model]


def two_forwards(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    start(model)

    def loss(_: int) -> torch.Tensor:
        one, two = model(torch.randn(4, 6)), model(torch.randn(4, 6))
        return (one - two).square().mean()

    return steps(model, loss), [model]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.extra = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.left(x) if x.sum() > 0 else self.right(x)
        for _ in range(int(x.abs().sum()) % 3):
            y = self.extra(y).relu()
        return y


def branches(start: Start) -> Result:
    model = Branches()
    start(model)
    return steps(model, lambda _: model(torch.randn(3, 4)).square().mean(), 8), [model]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = (
            nn.Embedding(10, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 10, bias=False),
        )
        self.again = self.layer
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.layer(self.embedding(x)).relu()))


def shared(start: Start) -> Result:
    model = Shared()
    start(model)

    def loss(_: int) -> torch.Tensor:
        tokens = torch.randint(0, 10, (4, 5))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return steps(model, loss), [model]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell, self.out = (
            nn.LSTM(4, 6, 2, dropout=0.1, batch_first=True),
            nn.GRUCell(6, 6),
            nn.Linear(6, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, (hidden, _) = self.lstm(x)
        state = hidden[-1]
        for step in range(x.shape[1]):
            state = self.cell(states[:, step], state)
        return self.out(state)


def lstm(start: Start) -> Result:
    model = Recurrent()
    start(model)
    return steps(model, lambda _: model(torch.randn(3, 5, 4)).square().mean()), [model]


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.how == "selective":
                x = checkpoint(block, x, use_reentrant=False, context_fn=_contexts)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(
        [torch.ops.aten.addmm.default, torch.ops.aten.take.default]
    )


def checkpointing(how: str) -> Loop:
    def loop(start: Start) -> Result:
        model = Checkpointed(how)
        start(model)
        return steps(
            model, lambda _: model(torch.randn(4, 6, requires_grad=True)).square().mean()
        ), [model]

    return loop


def sparse_gradients(start: Start) -> Result:
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2))
    start(model)
    sparse = torch.optim.SparseAdam(list(model[0].parameters()))
    dense = torch.optim.SGD(model[2].parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(torch.randint(0, 50, (4, 3))).square().mean()
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return losses, [model]


def evaluation_between(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    start(model)
    evaluated = []

    def loss(_: int) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            evaluated.append(model(torch.randn(4, 6)).sum().item())
        with torch.inference_mode():
            evaluated.append(model(torch.randn(4, 6)).sum().item())
        model.train()
        return model(torch.randn(4, 6)).square().mean()

    return steps(model, loss) + evaluated, [model]


def moving_average(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    start(model)
    average = copy.deepcopy(model)
    kept = []

    def loss(_: int) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)
            kept.append(average(torch.randn(2, 6)).sum().item())
        other_copy = copy.deepcopy(model)
        assert other_copy.state_dict().keys() == model.state_dict().keys()
        return model(torch.randn(4, 6)).square().mean()

    return steps(model, loss) + kept, [model, average]


def saved_and_loaded(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    start(model)
    sums = []

    def loss(_: int) -> torch.Tensor:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        sums.append(loaded(torch.ones(1, 6)).sum().item())
        return model(torch.randn(4, 6)).square().mean()

    return steps(model, loss) + sums, [model]


def grad_scaler(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    start(model)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    losses = []
    for number in range(8):
        x = torch.randn(4, 6) * (1e30 if number in (0, 3) else 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.item(), scaler.get_scale()]
    return losses, [model]


def gan(start: Start) -> Result:
    model = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
            "critic": nn.Linear(4, 1),
        }
    )
    start(model)
    generator, critic = model["generator"], model["critic"]
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = (
            critic(generator(torch.randn(5, 3)).detach()).mean() - critic(torch.randn(5, 4)).mean()
        )
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        other = -critic(generator(torch.randn(5, 3))).mean()
        of_generator.zero_grad()
        other.backward()
        of_generator.step()
        losses += [loss.item(), other.item()]
    return losses, [model]


def closures(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    start(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    losses: list[float] = []
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return losses, [model]


class Numbers(Dataset[torch.Tensor]):
    """Its items come from a model of its own, which runs in the workers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.full((6,), float(index)))


def loader_workers(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    start(model)
    batches = iter(
        DataLoader(Numbers(model), batch_size=2, num_workers=1, multiprocessing_context="fork")
    )
    return steps(model, lambda _: model(next(batches)).square().mean()), [model]


def second_order(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    start(model)

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(5, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    return steps(model, loss), [model]


def functional(start: Start) -> Result:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    start(model)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(5, 4)
        gradients = torch.func.vmap(
            torch.func.grad(lambda own: torch.func.functional_call(model, parameters, (own,)).sum())
        )(x)
        return model(x).square().mean() + gradients.square().mean()

    return steps(model, loss), [model]


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = self.layer(x)
        if fails:
            raise ValueError("on purpose")
        return y


def exceptions(start: Start) -> Result:
    model = Raises()
    start(model)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(3, 4)
        try:
            return model(x, number % 2 == 0).square().mean()
        except ValueError:
            return model(x, False).square().mean()

    return steps(model, loss), [model]


def odd_numbers(start: Start) -> Result:
    """Doubles, half precision, complex, empty, integer, expanded and scalar tensors, and ones that
    are not contiguous.
    """

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.identity = nn.Linear(4, 4).double(), nn.Identity()
            self.conv = nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.wide(x.double() * 1e300)
            total = y.abs().log1p().sum().float()
            for odd in (
                y.half(), torch.complex(x, x), x[:0], x.long(), x[:1].expand(5000, 4), x.sum(),
                x.t(), x[:, ::2],
                torch.eye(3).to_sparse(), torch.tensor([True]), torch.full((3,), 1e-45),
            ):  # fmt: skip
                self.identity(odd)
            image = self.conv(
                x.new_ones(2, 2, 30, 30).to(memory_format=torch.channels_last) * total
            )
            return total * 1e-3 + image.square().mean() * 1e-9

    model = Odd()
    start(model)
    return steps(model, lambda _: model(torch.randn(3, 4)), lr=1e-6), [model]


def fallback_step(start: Start) -> Result:
    """An optimizer that is none of torch's."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    run = start(model)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(4, 6)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        if run is not None:
            run.step()
        losses.append(loss.item())
    return losses, [model]


LOOPS: dict[str, Loop] = {
    "keyword-only calls, dict outputs": keyword_only,
    "None outputs, the root is never called": none_outputs,
    "in-place layers and views": in_place,
    "NaN and Inf": nan_and_inf,
    "dropout": dropout,
    "gradient accumulation": accumulation,
    "two forwards before a backward": two_forwards,
    "branches that change": branches,
    "shared modules and tied weights": shared,
    "LSTM": lstm,
    "checkpointing, reentrant": checkpointing("reentrant"),
    "checkpointing, not reentrant": checkpointing("other"),
    "checkpointing, selective": checkpointing("selective"),
    "sparse gradients, two optimizers": sparse_gradients,
    "evaluation in between": evaluation_between,
    "a moving average, deep copies": moving_average,
    "torch.save of the model": saved_and_loaded,
    "autocast, a GradScaler that skips steps": grad_scaler,
    "several optimizers: a GAN": gan,
    "closures: LBFGS": closures,
    "DataLoader workers that are forked": loader_workers,
    "second-order gradients": second_order,
    "torch.func": functional,
    "exceptions": exceptions,
    "odd numbers and layouts": odd_numbers,
    "no optimizer of torch's": fallback_step,
}


def bits(models: list[nn.Module]) -> Iterator[tuple[str, bytes]]:
    for model in models:
        for name, value in model.state_dict().items():
            yield name, value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
