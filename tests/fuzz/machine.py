"""A machine that runs small programs over tensors, plainly or inside a model.

A program is a list of steps: `(operation, a, b, c)` with three small numbers that choose the
tensors and the details, or `("loop", times, steps)`, `("branch", a, steps, steps)`, `("module",
which, a, b, steps)`. Every step is possible: a number that makes no sense for the tensors at hand
is taken for one that does, and a step that cannot be made is left out.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
_NUM_REGISTERS = 7
_LIMIT = 1e6


class Machine:
    """Runs steps; `observer`, if there is one, is told of every call before and after it is
    made.
    """

    def __init__(self, model: "Program", tensors: list[Tensor], observer: Any = None) -> None:
        self.model = model
        self.registers = list(tensors)
        self.observer = observer

    def call(
        self,
        name: str,
        func: Callable[..., Any],
        *args: Any,
        written: tuple[Tensor, ...] = (),
        **kwargs: Any,
    ) -> Any:
        """Makes one call. `name` is what the log calls it, `written` what it writes to."""
        if self.observer is None:
            return func(*args, **kwargs)
        return self.observer.call(name, func, args, kwargs, written)

    def run(self, steps: list[Any]) -> None:
        for step in steps:
            kind = step[0]
            if kind == "loop":
                for _ in range(step[1]):
                    self.run(step[2])
            elif kind == "branch":
                total = self.call("sum", torch.sum, self.register(step[1]))
                self.run(step[2] if self.call("gt", torch.gt, total, 0) else step[3])
            elif kind == "module":
                self.run_module(*step[1:])
            else:
                for result in OPERATIONS[kind](self, *step[1:]):
                    self.keep(result)

    def run_module(self, which: int, a: int, b: int, steps: list[Any]) -> None:
        module = self.model.parts[which % len(self.model.parts)]
        module.todo.append((self, steps))
        first = 0 if self.observer is None else self.observer.enter_module()
        result = module(self.register(a), self.register(b))
        if self.observer is not None:
            self.observer.leave_module(tensors_of(result), first)
        for tensor in tensors_of(result):
            self.keep(tensor)

    def register(self, number: int) -> Tensor:
        return self.registers[number % len(self.registers)]

    def keep(self, tensor: Tensor) -> None:
        """Puts a result in a register; the oldest one goes."""
        if tensor.dtype is torch.float32:
            self.registers.append(tensor)
            if len(self.registers) > _NUM_REGISTERS:
                self.registers.pop(0)


class Part(nn.Module):
    """A module that runs steps on a machine, then returns its inputs or results, alone, in a tuple
    or in a dict.
    """

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.todo: list[Any] = []

    def forward(self, x: Tensor, y: Tensor) -> Any:
        machine, steps = self.todo.pop()
        machine.run(steps)
        if self.shape == "input":
            return x
        if self.shape == "tuple":
            return machine.registers[-1], y
        return {"new": machine.registers[-1], "old": [x]}


class Program(nn.Module):
    """A model that runs a program and returns every tensor that is left."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self.steps = steps
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.memory: Tensor
        self.spread: Tensor
        self.register_buffer("memory", torch.linspace(-1, 1, 4))
        self.register_buffer("spread", torch.ones(4))
        self.parts = nn.ModuleList([Part("input"), Part("tuple"), Part("dict")])
        self.observer: Any = None

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        machine = Machine(self, [x, y], self.observer)
        machine.run(self.steps)
        return tuple(machine.registers)


def tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    items = result.values() if isinstance(result, dict) else result
    return [tensor for item in items for tensor in tensors_of(item)]


# -- operations
# --------------------------------------------------------------------------------------------------


def _unary(name: str, func: Callable[[Tensor], Any]) -> Callable[..., list[Tensor]]:
    return lambda machine, a, b, c: _listed(machine.call(name, func, machine.register(a)))


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _is_writable(tensor: Tensor) -> bool:
    """Whether torch lets a program write to the tensor in place."""
    if any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        return False
    # autograd has rules of its own about views that are written, and raises long after.
    return not (torch.is_grad_enabled() and tensor.requires_grad)


def _is_readable(tensor: Tensor) -> bool:
    """Whether the tensor may be written into another without making that one part of autograd's
    graph.
    """
    return not (torch.is_grad_enabled() and tensor.requires_grad)


def _in_place(name: str, func: Callable[[Tensor], Any]) -> Callable[..., list[Tensor]]:
    def run(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
        tensor = machine.register(a)
        if not _is_writable(tensor):
            return []
        return [machine.call(name, func, tensor, written=(tensor,))]

    return run


def _fits(tensor: Tensor, shape: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        return False


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _binary(name: str, func: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    def run(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
        one, other = machine.register(a), machine.register(b)
        return [machine.call(name, func, one, other if _fits(other, one.shape) else one)]

    return run


def _binary_in_place(name: str, func: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    def run(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
        one, other = machine.register(a), machine.register(b)
        if not _is_writable(one) or not _fits(other, one.shape):
            return []
        if (other is not one and _shares_memory(one, other)) or not _is_readable(other):
            return []
        return [machine.call(name, func, one, other, written=(one,))]

    return run


def _out(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    one, target = machine.register(a), machine.register(b)
    if (
        not _is_writable(target)
        or one.shape != target.shape
        or (one is not target and _shares_memory(one, target))
    ):
        return []
    if torch.is_grad_enabled() and (one.requires_grad or target.requires_grad):
        return []
    return [machine.call("mul", torch.mul, one, 0.5, written=(target,), out=target)]


def _select(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    if tensor.dim() < 1:
        return []
    return [machine.call("__getitem__", torch.Tensor.__getitem__, tensor, b % tensor.size(0))]


def _slice(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    if tensor.dim() < 1 or tensor.size(-1) < 2:
        return []
    key = (..., slice(b % 2, None, 1 + c % 2))
    return [machine.call("__getitem__", torch.Tensor.__getitem__, tensor, key)]


def _pick(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    if tensor.dim() < 1:
        return []
    index = machine.call("tensor", torch.tensor, [b % tensor.size(0), c % tensor.size(0)])
    return [machine.call("__getitem__", torch.Tensor.__getitem__, tensor, index)]


def _assign_slice(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor, other = machine.register(a), machine.register(b)
    if tensor.dim() < 1 or not _is_writable(tensor):
        return []
    start = c % tensor.size(0)
    key = slice(start, None)
    value: Any = 2.0
    if (
        _is_readable(other)
        and _fits(other, torch.Size((tensor.size(0) - start, *tensor.shape[1:])))
        and not _shares_memory(tensor, other)
    ):
        value = other
    machine.call("__setitem__", torch.Tensor.__setitem__, tensor, key, value, written=(tensor,))
    return []


def _assign_masked(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    if not _is_writable(tensor):
        return []
    mask = machine.call("gt", torch.gt, tensor, 0.1 * b)
    machine.call("__setitem__", torch.Tensor.__setitem__, tensor, mask, 0.25 * c, written=(tensor,))
    return []


def _transpose(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return [] if tensor.dim() < 2 else [machine.call("transpose", torch.transpose, tensor, 0, 1)]


def _expand(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return (
        []
        if tensor.numel() > 32
        else [machine.call("expand", torch.Tensor.expand, tensor, 2, *tensor.shape)]
    )


def _detach(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return [machine.call("detach", torch.Tensor.detach, tensor)] if _is_readable(tensor) else []


def _diagonal(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return [] if tensor.dim() < 2 else [machine.call("diagonal", torch.diagonal, tensor, 0, 0, 1)]


def _split(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return [] if tensor.dim() < 1 else list(machine.call("chunk", torch.chunk, tensor, 2))


def _unbind(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return (
        []
        if tensor.dim() < 1 or tensor.size(0) > 4
        else list(machine.call("unbind", torch.unbind, tensor))
    )


def _maximum(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    return [] if tensor.dim() < 1 else list(machine.call("max", torch.max, tensor, 0))


def _stack(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    one, other = machine.register(a), machine.register(b)
    if one.dim() > 3 or other.shape != one.shape:
        other = one
    return [machine.call("stack", torch.stack, [one, other])] if one.numel() <= 64 else []


def _linear(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    if tensor.dim() < 1 or tensor.size(-1) != 4:
        return []
    return [machine.call("linear", torch._C._nn.linear, tensor, machine.model.weight)]


def _scale(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    return [machine.call("mul", torch.mul, machine.register(a), machine.model.scale)]


def _remember(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    """Writes a buffer, or reads it."""
    memory = machine.model.memory
    if b % 2:
        return [machine.call("add", torch.add, memory, 1)]
    machine.call("mul", torch.Tensor.mul_, memory, 0.5, written=(memory,))
    return []


def _batch_norm(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    tensor = machine.register(a)
    memory = machine.model.memory
    if (
        tensor.dim() != 2
        or tensor.size(1) != 4
        or tensor.size(0) < 2
        or _shares_memory(tensor, memory)
    ):
        return []
    spread = machine.model.spread
    args = (tensor, None, None, memory, spread, True, 0.1, 1e-5, False)
    return [machine.call("batch_norm", torch.batch_norm, *args, written=(memory, spread))]


def _zeros(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    return [machine.call("zeros", torch.zeros, 1 + b % 3, 4)]


def _limit(machine: Machine, a: int, b: int, c: int) -> list[Tensor]:
    return [machine.call("clamp", torch.clamp, machine.register(a), -_LIMIT, _LIMIT)]


OPERATIONS: dict[str, Callable[..., list[Tensor]]] = {
    "sin": _unary("sin", torch.sin),
    "clone": _unary("clone", torch.clone),
    "contiguous": _unary("contiguous", torch.Tensor.contiguous),
    "flatten": _unary("flatten", torch.flatten),
    "detach": _detach,
    "unsqueeze": _unary("unsqueeze", lambda t: torch.unsqueeze(t, 0)),
    "squeeze": _unary("squeeze", torch.squeeze),
    "dropout": _unary("dropout", lambda t: F.dropout(t, 0.5, training=True)),
    "rand_like": _unary("rand_like", torch.rand_like),
    "zeros_like": _unary("zeros_like", torch.zeros_like),
    "add": _binary("add", torch.add),
    "sub": _binary("sub", lambda a, b: a - b),
    "minimum": _binary("minimum", torch.minimum),
    "add_": _in_place("add_", lambda t: t.add_(1)),
    "mul_": _in_place("mul_", lambda t: t.mul_(0.5)),
    "iadd": _in_place("__iadd__", lambda t: t.__iadd__(1)),
    "relu_": _in_place("relu_", torch.relu_),
    "zero_": _in_place("zero_", torch.Tensor.zero_),
    "uniform_": _in_place("uniform_", torch.Tensor.uniform_),
    "copy_": _binary_in_place("copy_", torch.Tensor.copy_),
    "add_ other": _binary_in_place("add_", torch.Tensor.add_),
    "out": _out,
    "select": _select,
    "slice": _slice,
    "pick": _pick,
    "assign slice": _assign_slice,
    "assign masked": _assign_masked,
    "transpose": _transpose,
    "expand": _expand,
    "diagonal": _diagonal,
    "split": _split,
    "unbind": _unbind,
    "max": _maximum,
    "stack": _stack,
    "linear": _linear,
    "scale": _scale,
    "remember": _remember,
    "batch_norm": _batch_norm,
    "zeros": _zeros,
    "clamp": _limit,
}
