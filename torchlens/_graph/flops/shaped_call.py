"""One call, as far as its cost depends on it, and the products it is made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

Shape = tuple[int, ...]
# Of a tensor whose shape does not say how many numbers it has.
VARYING: Shape = (-1,)
# Where a tensor stands among the arguments: position, keyword, or (position or keyword, index,
# ...).
Location = Any
# What a factor of a product was computed from. A gradient is wanted for it where one is for any of
# these.
Operand = tuple[Location, ...]


class ShapedCall(NamedTuple):
    """The shapes of a call's tensor arguments and of its first result, and its other arguments."""

    shapes: Mapping[Location, Shape]
    output: Shape
    args: Sequence[Any] = ()  # anything may stand in the place of a tensor
    kwargs: Mapping[str, Any] | None = None

    def locate(self, position: int, *names: str) -> Location:
        """Where the tensor argument of this position or one of these names was given; KeyError if
        nowhere.
        """
        for location in (position, *names):
            if location in self.shapes:
                return location
        raise KeyError(names[0] if names else position)

    def operand(self, position: int, *names: str) -> Operand:
        """The same as an operand; empty if the shape was not recorded."""
        return tuple([place for place in (position, *names) if place in self.shapes][:1])

    def inside(self, position: int, *names: str) -> list[Location]:
        """Where the tensors of a list argument are, in order."""
        heads = (position, *names)
        return [
            location
            for location in self.shapes
            if isinstance(location, tuple) and location[0] in heads
        ]

    def value(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that is no tensor."""
        if self.kwargs and name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default


class Product(NamedTuple):
    """A product of two factors (or a linear map of one) that costs `flops`.

    The gradient of each factor is again such a product: backward costs `flops` for every operand
    that wants a gradient.
    """

    flops: int
    operands: tuple[Operand, ...]


# Raises LookupError, TypeError or ValueError where a call does not look as the formula expects.
Formula = Callable[[ShapedCall], Iterable[Product]]


def named(layer_types: str, formula: Formula) -> dict[str, Formula]:
    """The formula of several layer types."""
    return dict.fromkeys(layer_types.split(), formula)


def matrix_product(output: Shape, summed: int, *operands: Operand) -> Product:
    """A product with one multiplication and one addition per number of the result and summed
    index.
    """
    return Product(2 * prod(output) * summed, operands)
