"""Symbolic sizes: `s0`, `2*s0 + 1`.

Tensors with dynamic shapes (a `FakeTensorMode` with a `ShapeEnv`, as in `torch.export`) have
`SymInt` sizes. Comparing a `SymInt` with a number adds a guard that specialises the shape for good.
So the log stores each size as its expression and its example value.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

_LONGEST = 24  # letters


class SymbolicInt(int):
    """An expression, which it prints as. As a number it is the value that the expression has in the
    example.

    What is computed from it is one too, so that FLOPs and bytes are expressions of the sizes.
    `is_known` is False where there is no example, because the size depends on data: the number then
    means nothing, and is -1.

    >>> SymbolicInt(6, s0) * 4
    4*s0
    """

    expression: Any
    is_known: bool

    def __new__(cls, example: int | None, expression: Any) -> "SymbolicInt":
        made = super().__new__(cls, -1 if example is None else example)
        made.expression = expression
        made.is_known = example is not None
        return made

    def __repr__(self) -> str:
        return str(self.expression)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), "" if set(spec) & set(",._defg") else spec)

    def shown(self, as_number: Callable[[int], str], unit: str = "") -> str:
        """For people: the expression, or, where that is long, about how much it is in the
        example.
        """
        text = repr(self)
        if len(text) <= _LONGEST:
            return f"{text}{unit}"
        return f"≈ {as_number(int(self))}" if self.is_known else "?"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicInt):
            return bool(self.expression == other.expression)
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return SymbolicInt, (int(self) if self.is_known else None, self.expression)


def _computing(
    compute: Callable[[Any, Any], Any], is_reversed: bool
) -> Callable[[SymbolicInt, Any], Any]:
    def method(self: SymbolicInt, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        one, two = (other, self) if is_reversed else (self, other)
        is_known = all(not isinstance(each, SymbolicInt) or each.is_known for each in (one, two))
        example = compute(int(one), int(two)) if is_known else None
        return SymbolicInt(example, compute(_expression(one), _expression(two)))

    return method


def _expression(value: int) -> Any:
    return value.expression if isinstance(value, SymbolicInt) else int(value)


for _name, _compute in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}.items():  # fmt: skip
    setattr(SymbolicInt, f"__{_name}__", _computing(_compute, is_reversed=False))
    setattr(SymbolicInt, f"__r{_name}__", _computing(_compute, is_reversed=True))


def inert(size: Any) -> Any:
    """A size whose use adds no guards; any value but a `SymInt` is returned as it is."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = getattr(size.node, "expr", None)
    if expression is None:  # of a nested tensor
        return SymbolicInt(None, str(size))
    return int(expression) if expression.is_number else SymbolicInt(size.node.hint, expression)


def inert_sizes(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """As `inert`, for a shape or strides."""
    return sizes if all(type(size) is int for size in sizes) else tuple(map(inert, sizes))


def examples(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """The example values of sizes; ValueError if one has none."""
    found = inert_sizes(sizes)
    for size in found:
        if isinstance(size, SymbolicInt) and not size.is_known:
            raise ValueError(f"the size {size} depends on data")
    return tuple(map(int, found))
