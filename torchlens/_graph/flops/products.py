"""Formulas of matrix products and convolutions."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from torchlens._graph.flops.shaped_call import (
    Formula,
    Operand,
    Product,
    Shape,
    ShapedCall,
    matrix_product,
    named,
)

_LEFT = ("input", "self", "mat1", "tensor", "x", "a", "x1")
_RIGHT = ("other", "mat2", "vec", "vec2", "tensor", "y", "b", "x2", "weight")
# Where a bias or the like comes first.
_SECOND = ("mat1", "mat", "vec1")
_THIRD = ("mat2", "vec", "vec2")


def _product(left: Sequence[str] = _LEFT, right: Sequence[str] = _RIGHT, first: int = 0) -> Formula:
    """The formula of an operation that sums over the last dimension of argument `first` and the
    last but one of the next.

    The shape of one of the two is enough.
    """

    def formula(call: ShapedCall) -> Iterator[Product]:
        rows, columns = _given(call, first, *left), _given(call, first + 1, *right)
        summed = call.shapes[rows[0]][-1] if rows else _last_but_one(call.shapes[columns[0]])
        yield matrix_product(call.output, summed, rows, columns)

    return formula


def _given(call: ShapedCall, position: int, *names: str) -> Operand:
    """An argument as an operand; nothing where its shape was not noted."""
    return (call.locate(position, *names),) if call.has(position, *names) else ()


def _last_but_one(shape: Shape) -> int:
    """The size that a right factor is summed over; of a vector, the only one."""
    return shape[-2] if len(shape) > 1 else shape[0]


def _linear(call: ShapedCall) -> Iterator[Product]:
    rows, weight = _given(call, 0, "input"), _given(call, 1, "weight")
    yield matrix_product(call.output, call.shapes[(rows or weight)[0]][-1], rows, weight)


def _reversed_product(call: ShapedCall) -> Iterator[Product]:
    """`a.__rmatmul__(b)` is `b @ a`."""
    right = call.locate(0, "self")
    yield matrix_product(
        call.output, _last_but_one(call.shapes[right]), _given(call, 1, "other"), (right,)
    )


def _summed_batches(call: ShapedCall) -> Iterator[Product]:
    """`addbmm` adds up the products of all matrices of a batch."""
    left, right = call.locate(1, "batch1"), call.locate(2, "batch2")
    batch, rows, summed = call.shapes[left]
    yield matrix_product((batch, rows, call.shapes[right][-1]), summed, (left,), (right,))


def _batched_addition(call: ShapedCall) -> Iterator[Product]:
    left, right = call.locate(1, "batch1"), call.locate(2, "batch2")
    yield matrix_product(call.output, call.shapes[left][-1], (left,), (right,))


def _outer(left: Sequence[str] = _LEFT, right: Sequence[str] = _RIGHT, first: int = 0) -> Formula:
    """One multiplication for each number of the result, and nothing to add."""

    def formula(call: ShapedCall) -> Iterator[Product]:
        rows, columns = call.locate(first, *left), call.locate(first + 1, *right)
        yield Product(prod(call.shapes[rows]) * prod(call.shapes[columns]), ((rows,), (columns,)))

    return formula


def _inner(call: ShapedCall) -> Iterator[Product]:
    """Both arguments are summed over their last dimension."""
    left, right = call.locate(0, *_LEFT), call.locate(1, *_RIGHT)
    yield matrix_product(
        call.output, call.shapes[left][-1] if call.shapes[left] else 1, (left,), (right,)
    )


def _vector_products(call: ShapedCall) -> Iterator[Product]:
    """`linalg.vecdot`: products of vectors along one dimension of two broadcast tensors."""
    left, right = call.locate(0, *_LEFT), call.locate(1, *_RIGHT)
    axis = call.value(2, "dim", -1)
    yield matrix_product(
        call.output, max(call.shapes[left][axis], call.shapes[right][axis]), (left,), (right,)
    )


def _tensordot(call: ShapedCall) -> Iterator[Product]:
    left, right = call.locate(0, *_LEFT), call.locate(1, *_RIGHT)
    dims = call.value(2, "dims_self", call.value(2, "dims", 2))
    shape = call.shapes[left]
    summed = (
        shape[len(shape) - dims :]
        if isinstance(dims, int)
        else [shape[axis] for axis in _of_first(dims)]
    )
    yield matrix_product(call.output, prod(summed), (left,), (right,))


def _of_first(dims: Sequence[int] | Sequence[Sequence[int]]) -> Sequence[int]:
    """The dimensions of the first tensor, of ([0, 1], [1, 0]) or as they are."""
    first = dims[0] if dims else ()
    return dims if isinstance(first, int) else first  # type: ignore[return-value]


def _chain(call: ShapedCall) -> Iterator[Product]:
    """A chain of matrices, multiplied in the cheapest order, as `linalg.multi_dot` does."""
    locations = call.inside(0, "tensors", "matrices") or sorted(call.shapes)
    shapes = [call.shapes[location] for location in locations]
    if len(shapes[0]) == 1:
        shapes[0] = (1, *shapes[0])
    if len(shapes[-1]) == 1:
        shapes[-1] = (*shapes[-1], 1)
    sizes = [rows for rows, _ in shapes] + [shapes[-1][1]]
    cheapest = _cheapest_splits(sizes)

    def parts(start: int, end: int) -> Iterator[Product]:
        if end - start > 1:
            split = cheapest[start, end]
            yield from parts(start, split)
            yield from parts(split, end)
            operands = tuple(locations[start:split]), tuple(locations[split:end])
            yield matrix_product((sizes[start], sizes[end]), sizes[split], *operands)

    return parts(0, len(locations))


def _cheapest_splits(sizes: Sequence[int]) -> dict[tuple[int, int], int]:
    """Where to split each stretch of a chain of matrices whose sizes follow one another."""
    count = len(sizes) - 1
    costs = {(start, start + 1): 0 for start in range(count)}
    splits = {}
    for length in range(2, count + 1):
        for start in range(count - length + 1):
            end = start + length
            options = [
                (
                    costs[start, split]
                    + costs[split, end]
                    + sizes[start] * sizes[split] * sizes[end],
                    split,
                )
                for split in range(start + 1, end)
            ]
            costs[start, end], splits[start, end] = min(options)
    return splits


def _bilinear(call: ShapedCall) -> Iterator[Product]:
    """The weight by one input, the result by the other."""
    first, second, weight = (
        call.locate(0, "input1"),
        call.locate(1, "input2"),
        call.locate(2, "weight"),
    )
    outputs, left, right = call.shapes[weight]
    num_rows = prod(call.output[:-1])
    yield matrix_product((num_rows, outputs, right), left, (first,), (weight,))
    yield matrix_product((num_rows, outputs), right, (first, weight), (second,))


def _distances(call: ShapedCall) -> Iterator[Product]:
    """Distances of all pairs, as the matrix product of the same shape."""
    left, right = call.locate(0, "x1", "input"), call.locate(1, "x2")
    yield matrix_product(call.output, call.shapes[left][-1], (left,), (right,))


def _own_distances(call: ShapedCall) -> Iterator[Product]:
    (left,) = call.shapes
    yield matrix_product(call.output, call.shapes[left][-1], (left,))


def _covariance(call: ShapedCall) -> Iterator[Product]:
    """The product of the centred observations with themselves."""
    location = call.locate(0, "input", "self")
    variables, observations = (
        call.shapes[location] if len(call.shapes[location]) == 2 else (1, *call.shapes[location])
    )
    yield matrix_product((variables, variables), observations, (location,), (location,))


def _grouped(call: ShapedCall) -> Iterator[Product]:
    """`_grouped_mm`: rows are dealt out to matrices; each row meets one of them."""
    left, right = call.locate(0, *_LEFT), call.locate(1, *_RIGHT)
    if (
        len(call.shapes[left]) == len(call.shapes[right]) == 2
    ):  # the summed dimension is dealt out: (m, k) (k, n)
        rows, columns = call.shapes[left][0], call.shapes[right][1]
        yield matrix_product((rows, columns), call.shapes[left][1], (left,), (right,))
    else:
        yield matrix_product(call.output, call.shapes[left][-1], (left,), (right,))


# -- convolutions ----------------------------------------------------------------------------------


def _convolution(call: ShapedCall) -> Iterator[Product]:
    """Each number of the result is a sum over the kernel and the channels of its group."""
    weight = call.locate(1, "weight")
    yield matrix_product(
        call.output, prod(call.shapes[weight][1:]), _given(call, 0, "input"), (weight,)
    )


def _transposed_convolution(call: ShapedCall) -> Iterator[Product]:
    """Each number of the input is spread over the kernel and the channels of its group."""
    image, weight = call.locate(0, "input"), call.locate(1, "weight")
    yield matrix_product(call.shapes[image], prod(call.shapes[weight][1:]), (image,), (weight,))


def _either_convolution(call: ShapedCall) -> Iterator[Product]:
    """`aten::convolution` says by an argument which of the two it is."""
    is_transposed = call.value(6, "transposed", False)
    return _transposed_convolution(call) if is_transposed else _convolution(call)


def _causal_convolution(call: ShapedCall) -> Iterator[Product]:
    """`conv_tbc`: the weight is (kernel, channels in, channels out)."""
    weight = call.locate(1, "weight")
    kernel, channels, _ = call.shapes[weight]
    yield matrix_product(call.output, kernel * channels, (call.locate(0, "input"),), (weight,))


# -- einsum ----------------------------------------------------------------------------------------

_Term = tuple[str, ...]  # the index of each dimension


class _Factor(NamedTuple):
    indices: frozenset[str]
    operand: Operand


def _einsum(call: ShapedCall) -> Iterator[Product]:
    """Operands are multiplied two at a time: from left to right, or along the path that torch was
    given.
    """
    equation = call.value(0, "equation")
    if not isinstance(equation, str):
        raise TypeError(f"an equation is text, not {equation!r}")
    locations = call.inside(1, "operands") or [
        location for location in call.shapes if location not in (0, "equation")
    ]
    shapes = [call.shapes[location] for location in locations]
    terms, result = _parse(equation, shapes)
    sizes = _index_sizes(terms, shapes)
    factors = [
        _Factor(frozenset(term), (location,))
        for term, location in zip(terms, locations, strict=True)
    ]
    path = call.value(2, "path")
    while len(factors) > 1:
        places = path[:2] if path else (0, 1)
        first, second = factors[places[0]], factors[places[1]]
        others = [factor for place, factor in enumerate(factors) if place not in places]
        kept = frozenset(result).union(*(factor.indices for factor in others))
        yield _product_of_two(first, second, kept, sizes)
        made = _Factor((first.indices | second.indices) & kept, (*first.operand, *second.operand))
        factors = [*others, made] if path else [made, *others]
        path = path[2:] if path else None


def _product_of_two(
    first: _Factor, second: _Factor, kept: frozenset[str], sizes: dict[str, int]
) -> Product:
    """An index that only one of the factors has, and that is not kept, is summed before they are
    multiplied.
    """
    summed = (first.indices & second.indices) - kept
    size = prod(sizes[index] for index in (first.indices | second.indices) & (kept | summed))
    has_sums = any(sizes[index] > 1 for index in summed)
    return Product(2 * size if has_sums else size, (first.operand, second.operand))


def _index_sizes(terms: Sequence[_Term], shapes: Sequence[Shape]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for index, size in zip(term, shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 0))
    return sizes


def _parse(equation: str, shapes: Sequence[Shape]) -> tuple[list[_Term], _Term]:
    """The indices of each operand and of the result; the dimensions of an ellipsis are numbered
    from the end.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    terms = [_expand(term, len(shape)) for term, shape in zip(written, shapes, strict=True)]
    if arrow:
        num_hidden = (
            sum(index.startswith(".") for index in set().union(*terms)) if "..." in right else 0
        )
        return terms, _expand(right, len(right.replace("...", "")) + num_hidden)
    everything = [index for term in terms for index in term]
    alone = {index for index in everything if index.startswith(".") or everything.count(index) == 1}
    return terms, tuple(alone)


def _expand(term: str, num_dims: int) -> _Term:
    before, dots, after = term.partition("...")
    num_hidden = num_dims - len(before) - len(after)
    if num_hidden and not dots:
        raise ValueError(f"{term} has other dimensions than its operand")
    return (*before, *(f".{number}" for number in range(num_hidden, 0, -1)), *after)


PRODUCTS: dict[str, Formula] = {
    "einsum": _einsum,
    **named(
        "linear linearrelu lineardynamic linearreludynamic linearleakyrelu lineartanh", _linear
    ),
    **named(
        "matmul mm bmm mv dot vdot linalgmatmul scaledmm intmm weightint8packmm weightint4packmm",
        _product(),
    ),
    **named("linalgvecdot vecdot", _vector_products),
    **named("addmm addmv addmmactivation", _product(_SECOND, _THIRD, first=1)),
    **named("baddbmm", _batched_addition),
    **named("addbmm", _summed_batches),
    **named("rmatmul", _reversed_product),
    **named("inner", _inner),
    **named("outer ger kron", _outer()),
    **named("addr", _outer(_SECOND, _THIRD, first=1)),
    **named("tensordot", _tensordot),
    **named("chainmatmul linalgmultidot multidot", _chain),
    **named("bilinear", _bilinear),
    **named("cdist cdistforward euclideandist", _distances),
    **named("pdist", _own_distances),
    **named("cov corrcoef", _covariance),
    **named("groupedmm scaledgroupedmm", _grouped),
    **named(
        "conv1d conv2d conv3d slowconv2dforward thnnconv2d slowconv3d deformconv2d", _convolution
    ),
    **named(
        "conv1drelu conv2drelu conv3drelu convdepthwise3d slowconvdilated2d slowconvdilated3d",
        _convolution,
    ),
    **named(
        "convtranspose1d convtranspose2d convtranspose3d slowconvtranspose2d",
        _transposed_convolution,
    ),
    **named("convolution convolutionoverrideable", _either_convolution),
    **named("convtbc", _causal_convolution),
}
