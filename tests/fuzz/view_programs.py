"""Gradients of views and of writes to them, against the same program written without either.

The oracle keeps memory as a value: a tensor is a set of places in it, and a write makes a new
memory. Each entry gets a number to be changed by, zero, where its value is read: the derivative
with respect to that is its gradient.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

import torchlens as tl

Step = tuple[str, float, float]
Like = tuple[
    tuple[int, ...], bool, bool
]  # the shape, whether it is contiguous, whether elements share a place
Pick = Callable[[torch.Tensor], torch.Tensor]
VIEWS = ("row", "rows", "cols", "flat", "t", "unsqueeze", "expand", "diagonal", "unfold")
WRITES = ("mul_", "mul_", "add_", "copy_", "zero_", "set")
NAMES = ("sin", "mul", "add", *VIEWS, *WRITES)


def random_program(seed: int) -> list[Step]:
    generator = random.Random(seed)
    return [
        (generator.choice(NAMES), generator.random(), generator.random())
        for _ in range(generator.randint(3, 9))
    ]


def decided(steps: list[Step], shapes: list[Like]) -> Iterator[tuple[str, int, int]]:
    """Steps with their operands: the name, the tensor, and another of its shape or a row of it.

    `shapes` has the shapes of the tensors; running the steps keeps it up to date.
    """
    for name, one, other in steps:
        number = int(one * len(shapes))
        shape, is_contiguous, overlaps = shapes[number]
        alike = [index for index, (own, *_) in enumerate(shapes) if own == shape]
        if name in WRITES and overlaps:
            continue  # torch refuses
        if name in ("row", "set") and len(shape) > 1:
            yield name, number, int(other * shape[0])
        elif (
            name in ("sin", "mul", "mul_", "zero_", "expand")
            or (name == "unsqueeze" and len(shape) < 4)
            or (name in ("rows", "unfold") and shape and shape[0] > 1)
            or (name in ("t", "cols", "diagonal") and len(shape) == 2)
        ):
            yield name, number, 0
        elif name in ("add", "add_", "copy_"):
            yield name, number, alike[int(other * len(alike))]
        elif name == "flat" and is_contiguous:
            yield name, number, 0


def pick_of(name: str, row: int) -> Pick:
    picks: dict[str, Pick] = {
        "row": lambda tensor: tensor[row],
        "rows": lambda tensor: tensor[:2],
        "cols": lambda tensor: tensor[:, ::2],
        "flat": lambda tensor: tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1),
        "t": lambda tensor: tensor.t(),
        "unsqueeze": lambda tensor: tensor.unsqueeze(0),
        "expand": lambda tensor: tensor.expand(2, *tensor.shape),
        "diagonal": lambda tensor: tensor.diagonal(),
        "unfold": lambda tensor: tensor.unfold(0, 2, 1),
    }
    return picks[name]


def like(tensor: torch.Tensor) -> Like:
    places = torch.zeros(tensor.storage_offset() + tensor.numel() * 8 + 64, dtype=torch.int64)
    items = torch.arange(len(places)).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    return tuple(tensor.shape), tensor.is_contiguous(), items.unique().numel() < tensor.numel()


class Program(nn.Module):
    """Runs the steps as torch does, in place and through views."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = [x * 1.5]
        shapes = [like(tensors[0])]
        for name, number, other in decided(self.steps, shapes):
            tensor = tensors[number]
            if name == "mul_":
                tensor.mul_(1.1)
            elif name == "add_":
                tensor.add_(tensors[other] * 0.3)
            elif name == "copy_":
                tensor.copy_(tensors[other] * 0.7)
            elif name == "zero_":
                tensor.zero_()
            elif name == "set":
                tensor[other] = 2.5
            else:
                if name == "sin":
                    result = tensor.sin()
                elif name == "mul":
                    result = tensor * 2
                elif name == "add":
                    result = tensor + tensors[other]
                else:
                    result = pick_of(name, other)(tensor)
                tensors.append(result)
                shapes.append(like(result))
        return torch.stack([(tensor**2).sum() for tensor in tensors]).sum()


class OracleTensor:
    """A tensor of the oracle: places in a memory; if it is a view, its value when it was made."""

    def __init__(
        self, memory: int, places: torch.Tensor, value: torch.Tensor | None = None, made: int = 0
    ) -> None:
        self.memory = memory
        self.places = places
        self.value = value  # None: whatever the memory holds is its own
        self.made = made


class Oracle:
    """The same without views and writes. Of a view, what was not written since it was made is its
    own value.
    """

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []  # by place, when it was written last
        self.time = 0
        self.changes: list[torch.Tensor] = []

    def change(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.changes.append(torch.zeros(shape, dtype=torch.float64, requires_grad=True))
        return self.changes[-1]

    def new(self, value: torch.Tensor) -> OracleTensor:
        self.memories.append((value + self.change(value.shape)).reshape(-1))
        self.written.append(torch.zeros(value.numel(), dtype=torch.int64))
        return OracleTensor(len(self.memories) - 1, torch.arange(value.numel()).view(value.shape))

    def view(self, tensor: OracleTensor, pick: Pick) -> OracleTensor:
        value = pick(self.read(tensor))
        return OracleTensor(
            tensor.memory, pick(tensor.places), value + self.change(value.shape), self.time
        )

    def read(self, tensor: OracleTensor) -> torch.Tensor:
        held = self.memories[tensor.memory][tensor.places]
        if tensor.value is None:
            return held
        return torch.where(
            self.written[tensor.memory][tensor.places] > tensor.made, held, tensor.value
        )

    def write(self, tensor: OracleTensor, value: torch.Tensor) -> None:
        self.time += 1
        places = tensor.places.reshape(-1)
        changed = (value + self.change(value.shape)).reshape(-1)
        self.memories[tensor.memory] = self.memories[tensor.memory].index_put((places,), changed)
        self.written[tensor.memory] = self.written[tensor.memory].index_fill(0, places, self.time)
        tensor.value = None

    def run(self, steps: list[Step], x: torch.Tensor) -> torch.Tensor:
        tensors, stand_ins = [self.new(x * 1.5)], [torch.empty(4, 4)]
        shapes = [like(stand_ins[0])]
        for name, number, other in decided(steps, shapes):
            tensor, stand_in = tensors[number], stand_ins[number]
            if name == "mul_":
                self.write(tensor, self.read(tensor) * 1.1)
            elif name == "add_":
                added = self.new(self.read(tensors[other]) * 0.3)
                self.write(tensor, self.read(tensor) + self.read(added))
            elif name == "copy_":
                self.write(tensor, self.read(self.new(self.read(tensors[other]) * 0.7)))
            elif name == "zero_":
                self.write(tensor, self.read(tensor) * 0)
            elif name == "set":
                kept = torch.ones_like(tensor.places).index_fill(0, torch.tensor(other), 0)
                self.write(tensor, self.read(tensor) * kept + 2.5 * (1 - kept))
            else:
                if name == "sin":
                    tensors.append(self.new(self.read(tensor).sin()))
                    stand_ins.append(stand_in * 1)
                elif name == "mul":
                    tensors.append(self.new(self.read(tensor) * 2))
                    stand_ins.append(stand_in * 1)
                elif name == "add":
                    tensors.append(self.new(self.read(tensor) + self.read(tensors[other])))
                    stand_ins.append(stand_in + stand_ins[other])
                else:
                    tensors.append(self.view(tensor, pick_of(name, other)))
                    stand_ins.append(pick_of(name, other)(stand_in))
                shapes.append(like(stand_ins[-1]))
        return torch.stack([(self.read(tensor) ** 2).sum() for tensor in tensors]).sum()


class Counts(NamedTuple):
    """How many entries had the right gradient, and how many none, with a reason."""

    right: int = 0
    without: int = 0


def check_gradients(seed: int, saves: bool) -> Counts:
    """Compares the gradients of a random program, with or without `save_gradients`."""
    steps, x = random_program(seed), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    try:
        Program(steps)(x).backward()
    except RuntimeError as error:  # what was written over is needed by some derivative
        if "modified by an inplace operation" not in str(error):
            raise
        return Counts()
    oracle = Oracle()
    loss = oracle.run(steps, x)
    wanted = torch.autograd.grad(loss, oracle.changes, allow_unused=True)
    history = tl.log_forward_pass(Program(steps), x, save_gradients=saves)
    torch.testing.assert_close(history["output_1"].tensor_contents, loss)
    history.log_backward(history["output_1"].tensor_contents)
    right = without = 0
    for entry, gradient, change in zip(list(history)[1:], wanted, oracle.changes, strict=False):
        found = entry.grad_contents
        name = f"{entry.layer_label} of program {seed} ({saves=}): {steps}"
        if found is None and gradient is not None and bool(gradient.any()):
            assert entry.grad_missing_reason, name
            without += 1
            continue
        expected = torch.zeros_like(change) if gradient is None else gradient
        found = torch.zeros_like(change) if found is None else found
        assert torch.allclose(found, expected), f"{name}: {found} for {expected}"
        right += 1
    return Counts(right, without)
