"""Gradients of views and of writes to them, against the same program written without either.

The oracle keeps memory as a value: a tensor is a set of places in it, and a write makes a new memory. Each entry gets a
number to be changed by, zero, where its value is read: the derivative with respect to that is its gradient.
"""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import torchlens as tl

Step = tuple[str, float, float]
Pick = Callable[[torch.Tensor], torch.Tensor]
NAMES = ("sin", "mul", "add", "row", "rows", "flat", "t", "mul_", "mul_", "add_")


def random_program(seed: int) -> list[Step]:
    generator = random.Random(seed)
    return [(generator.choice(NAMES), generator.random(), generator.random()) for _ in range(generator.randint(3, 9))]


def decided(steps: list[Step], shapes: list[tuple[tuple[int, ...], bool]]) -> Iterator[tuple[str, int, int]]:
    """Steps with their operands: the name, the tensor, and another of its shape or a row of it.

    `shapes` is what the tensors are like; whoever runs the steps keeps it up to date.
    """
    for name, one, other in steps:
        number = int(one * len(shapes))
        shape, is_contiguous = shapes[number]
        alike = [index for index, (own, _) in enumerate(shapes) if own == shape]
        if name == "row" and len(shape) > 1:
            yield name, number, int(other * shape[0])
        elif name in ("sin", "mul", "mul_") or (name == "rows" and shape[0] > 1) or (name == "t" and len(shape) == 2):
            yield name, number, 0
        elif name in ("add", "add_"):
            yield name, number, alike[int(other * len(alike))]
        elif name == "flat" and is_contiguous:
            yield name, number, 0


def pick_of(name: str, row: int) -> Pick:
    picks: dict[str, Pick] = {
        "row": lambda tensor: tensor[row],
        "rows": lambda tensor: tensor[:2],
        "flat": lambda tensor: tensor.view(-1),
        "t": lambda tensor: tensor.t(),
    }
    return picks[name]


class Program(nn.Module):
    """Runs the steps as torch does, in place and through views."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensors = [x * 1.5]
        shapes = [((4, 4), True)]
        for name, number, other in decided(self.steps, shapes):
            tensor = tensors[number]
            if name == "mul_":
                tensor.mul_(1.1)
                continue
            if name == "add_":
                tensor.add_(tensors[other] * 0.3)
                continue
            if name == "sin":
                result = tensor.sin()
            elif name == "mul":
                result = tensor * 2
            elif name == "add":
                result = tensor + tensors[other]
            else:
                result = pick_of(name, other)(tensor)
            tensors.append(result)
            shapes.append((tuple(result.shape), result.is_contiguous()))
        return sum((tensor**2).sum() for tensor in tensors)


class Seen:
    """A tensor of the oracle: places in a memory, and through which view it is read."""

    def __init__(self, memory: int, places: torch.Tensor) -> None:
        self.memory = memory
        self.places = places
        self.change: torch.Tensor | None = None  # of the view entry that it is
        self.parent: Seen | None = None
        self.pick: Pick | None = None
        self.num_writes = 0  # to its memory, when it was made
        self.parent_writes = 0  # by its parent, when it was made
        self.own_writes = 0


class Oracle:
    """The same without views and writes."""

    def __init__(self) -> None:
        self.memories: list[torch.Tensor] = []
        self.num_writes: list[int] = []
        self.changes: list[torch.Tensor] = []

    def change(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.changes.append(torch.zeros(shape, dtype=torch.float64, requires_grad=True))
        return self.changes[-1]

    def new(self, value: torch.Tensor) -> Seen:
        self.memories.append((value + self.change(value.shape)).reshape(-1))
        self.num_writes.append(0)
        return Seen(len(self.memories) - 1, torch.arange(value.numel()).view(value.shape))

    def view(self, seen: Seen, pick: Pick) -> Seen:
        result = Seen(seen.memory, pick(seen.places))
        result.change = self.change(result.places.shape)
        result.parent, result.pick, result.parent_writes = seen, pick, seen.own_writes
        result.num_writes = self.num_writes[seen.memory]
        return result

    def read(self, seen: Seen) -> torch.Tensor:
        """The value, with the changes of the views it is read through: autograd leads a view whose base was written since
        directly to the base."""
        value = self.read_alone(seen)
        if seen.parent is None or self.num_writes[seen.memory] != seen.num_writes:
            return value
        picks: list[Pick] = []
        while seen.parent is not None and seen.parent_writes == seen.parent.own_writes:
            assert seen.pick is not None
            picks.insert(0, seen.pick)
            parent = seen.parent
            if parent.change is not None:
                change = parent.change
                for pick in picks:
                    change = pick(change)
                value = value + change
            if parent.parent is not None and parent.num_writes != seen.num_writes:
                break
            seen = parent
        return value

    def read_alone(self, seen: Seen) -> torch.Tensor:
        value = self.memories[seen.memory][seen.places]
        return value if seen.change is None else value + seen.change

    def write(self, seen: Seen, value: torch.Tensor) -> None:
        changed = (value + self.change(value.shape)).reshape(-1)
        self.memories[seen.memory] = self.memories[seen.memory].index_put((seen.places.reshape(-1),), changed)
        self.num_writes[seen.memory] += 1
        seen.own_writes += 1
        seen.change = seen.parent = None

    def run(self, steps: list[Step], x: torch.Tensor) -> torch.Tensor:
        tensors = [self.new(x * 1.5)]
        shapes = [((4, 4), True)]
        stand_ins = [torch.empty(4, 4)]
        for name, number, other in decided(steps, shapes):
            seen = tensors[number]
            if name == "mul_":
                self.write(seen, self.read_alone(seen) * 1.1)
                continue
            if name == "add_":
                added = self.new(self.read(tensors[other]) * 0.3)
                self.write(seen, self.read_alone(seen) + self.read(added))
                continue
            stand_in = stand_ins[number]
            if name == "sin":
                tensors.append(self.new(self.read(seen).sin()))
            elif name == "mul":
                tensors.append(self.new(self.read(seen) * 2))
            elif name == "add":
                tensors.append(self.new(self.read(seen) + self.read(tensors[other])))
            else:
                flat_pick = pick_of(name, other)
                tensors.append(self.view(seen, (lambda t: t.reshape(-1)) if name == "flat" else flat_pick))
            if name in ("sin", "mul"):
                stand_in = stand_in * 1
            elif name == "add":
                stand_in = stand_in + stand_ins[other]
            else:
                stand_in = pick_of(name, other)(stand_in)
            stand_ins.append(stand_in)
            shapes.append((tuple(stand_in.shape), stand_in.is_contiguous()))
        return sum((self.read(seen) ** 2).sum() for seen in tensors)


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_gradients_of_random_programs_are_those_without_views_and_writes(start: int) -> None:
    num_compared = num_without = 0
    for seed in range(start, start + 30):
        steps, x = random_program(seed), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        try:
            Program(steps)(x).backward()
        except RuntimeError as error:  # what was written over is needed by some derivative
            if "modified by an inplace operation" not in str(error):
                raise
            continue
        oracle = Oracle()
        loss = oracle.run(steps, x)
        wanted = torch.autograd.grad(loss, oracle.changes, allow_unused=True)
        for saves in (True, False):
            history = tl.log_forward_pass(Program(steps), x, save_gradients=saves)
            torch.testing.assert_close(history["output_1"].tensor_contents, loss)
            history.log_backward(history["output_1"].tensor_contents)
            for entry, gradient, change in zip(list(history)[1:], wanted, oracle.changes, strict=False):
                found = entry.grad_contents
                # Without save_gradients, a view that is read again after a write has none.
                if found is None and (not saves or gradient is None):
                    num_without += not saves
                    continue
                torch.testing.assert_close(
                    found, torch.zeros_like(change) if gradient is None else gradient,
                    msg=lambda text: f"{entry.layer_label} of program {seed} ({saves=}): {text}",  # noqa: B023
                )  # fmt: skip
                num_compared += 1
    assert num_compared > 200
    assert num_without < num_compared / 10
