"""Floating-point operations, from the shapes of arguments and results.

Counted are the operations that multiply matrices, in whatever guise: convolutions, linear layers, matrix products,
attention, recurrent layers. A multiplication and the addition that follows it are two. Everything else is cheap beside
them and is not counted; `flops_of` says None for it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torchlens.capture.recording import Recording, Row
from torchlens.graph.edges import located

__all__ = ["flops_of"]

Shape = tuple[int, ...]
Shapes = dict[Any, Shape]  # of the tensor arguments, by position or keyword


def flops_of(recording: Recording, row: Row) -> int | None:
    """What one call cost; None for what is not counted. A call with several results is counted at its first."""
    rule = _RULES.get(row.operation.layer_type)
    if rule is None:
        return None
    if row.output_index:
        return 0
    count = rule(_argument_shapes(recording, row), tuple(row.shape), row)
    return None if count is None else int(count)


def _argument_shapes(recording: Recording, row: Row) -> Shapes:
    found: Shapes = {}
    for location, number in located(row.references):
        if number >= 0:
            found[location] = tuple(recording.rows[number].shape)
        elif -1 - number < len(recording.params):
            found[location] = tuple(recording.params[-1 - number].shape)
    return found


def _shape(shapes: Shapes, position: int, name: str) -> Shape | None:
    return shapes.get(position, shapes.get(name))


def _convolution(shapes: Shapes, output: Shape, row: Row) -> int | None:
    weight = _shape(shapes, 1, "weight")
    return None if weight is None else 2 * prod(output) * prod(weight[1:])


def _transposed_convolution(shapes: Shapes, output: Shape, row: Row) -> int | None:
    image, weight = _shape(shapes, 0, "input"), _shape(shapes, 1, "weight")
    return None if image is None or weight is None else 2 * prod(image) * prod(weight[1:])


def _product(first: int, name: str) -> Callable[[Shapes, Shape, Row], int | None]:
    """Of an operation whose argument `first` is multiplied along its last dimension."""

    def count(shapes: Shapes, output: Shape, row: Row) -> int | None:
        left = _shape(shapes, first, name)
        return 2 * prod(output) * left[-1] if left else None

    return count


def _reversed_product(shapes: Shapes, output: Shape, row: Row) -> int | None:
    """`a.__rmatmul__(b)` is `b @ a`."""
    right = _shape(shapes, 0, "self")
    return 2 * prod(output) * right[-2 if len(right) > 1 else -1] if right else None


def _attention(shapes: Shapes, output: Shape, row: Row) -> int | None:
    query, key, value = _shape(shapes, 0, "query"), _shape(shapes, 1, "key"), _shape(shapes, 2, "value")
    if query is None or key is None or value is None:
        return None
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _einsum(shapes: Shapes, output: Shape, row: Row) -> int | None:
    """Every combination of indices once."""
    equation = row.args[0] if row.args and isinstance(row.args[0], str) else None
    if equation is None or "." in equation:
        return None
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    operands = [shape for location, shape in shapes.items() if location != 0]
    if len(terms) != len(operands) or any(len(term) != len(shape) for term, shape in zip(terms, operands, strict=True)):
        return None
    sizes = {
        letter: size for term, shape in zip(terms, operands, strict=True) for letter, size in zip(term, shape, strict=True)
    }
    return 2 * prod(sizes.values()) if len(terms) > 1 else 0


def _recurrent(shapes: Shapes, output: Shape, row: Row) -> int | None:
    """Each weight matrix multiplies each step of each sequence once."""
    sequence = _shape(shapes, 0, "input")
    if sequence is None or not 2 <= len(sequence) <= 3:
        return None
    matrices = _weight_matrices(shapes)
    return 2 * prod(sequence[:-1]) * sum(map(prod, matrices))


def _weight_matrices(shapes: Shapes) -> Sequence[Shape]:
    return [shape for location, shape in shapes.items() if isinstance(location, tuple) and len(shape) == 2]


_RULES: dict[str, Callable[[Shapes, Shape, Row], int | None]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(("convtranspose1d", "convtranspose2d", "convtranspose3d"), _transposed_convolution),
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot", "imatmul"), _product(0, "input")),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), _product(1, "mat1")),
    "rmatmul": _reversed_product,
    "scaleddotproductattention": _attention,
    "einsum": _einsum,
    **dict.fromkeys(("lstm", "gru", "rnntanh", "rnnrelu"), _recurrent),
}
