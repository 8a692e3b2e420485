"""Formulas of matrix products and convolutions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from torchlens._graph.flops.shaped_call import (
    Formula,
    Operand,
    Product,
    Shape,
    ShapedCall,
    matrix_product,
    named,
)

# The names of the two factors. Those of functions that add the product to a first argument come
# first, since that argument may be called `input`.
_LEFT = ("mat1", "mat", "vec1", "batch1", "input", "self", "tensor", "x", "a", "x1")
_RIGHT = ("mat2", "vec", "vec2", "batch2", "other", "tensor", "y", "b", "x2", "weight")

# From a call and the shapes of both factors (None if not recorded) to a number or a shape.
_Number = Callable[[ShapedCall, Shape, Shape], int]
_Shaped = Callable[[ShapedCall, Shape, Shape], Iterable[int]]


def _product(
    summed: _Number, output: _Shaped = lambda call, a, b: call.output, first: int = 0
) -> Formula:
    """A product of arguments `first` and `first + 1`, with `summed` terms for each number of the
    output.
    """

    def formula(call: ShapedCall) -> Iterator[Product]:
        left, right = call.operand(first, *_LEFT), call.operand(first + 1, *_RIGHT)
        shapes = [call.shapes[own[0]] if own else None for own in (left, right)]
        if not left + right:
            raise LookupError("neither factor was recorded")
        # A formula that needs a missing shape raises TypeError.
        a, b = shapes
        num_terms = summed(call, a, b)  # type: ignore[arg-type]
        yield matrix_product(tuple(output(call, a, b)), num_terms, left, right)  # type: ignore[arg-type]

    return formula


def _outer(first: int = 0) -> Formula:
    """One multiplication for each number of the result, and nothing to add."""

    def formula(call: ShapedCall) -> Iterator[Product]:
        left, right = call.locate(first, *_LEFT), call.locate(first + 1, *_RIGHT)
        yield Product(prod(call.shapes[left]) * prod(call.shapes[right]), ((left,), (right,)))

    return formula


def _last_but_one(shape: Shape) -> int:
    """The size that a right factor is summed over; of a vector, the only one."""
    return shape[-2] if len(shape) > 1 else shape[0]


def _rows_by_columns(call: ShapedCall, a: Shape, b: Shape) -> int:
    """Either shape is enough."""
    return _last_but_one(b) if a is None else a[-1]


def _tensordot(call: ShapedCall, a: Shape, b: Shape) -> int:
    """`dims` is a number of dimensions, the dimensions of the first tensor, or those of both."""
    dims = call.value(2, "dims_self", call.value(2, "dims", 2))
    if isinstance(dims, int):
        return prod(a[len(a) - dims :])
    if dims and not isinstance(dims[0], int):
        dims = dims[0]
    return prod(a[axis] for axis in dims)


def _grouped(call: ShapedCall) -> Iterator[Product]:
    """`_grouped_mm`: rows are dealt out to matrices; each row meets one of them. Of two matrices,
    the summed dimension is dealt out.
    """
    left, right = call.locate(0, *_LEFT), call.locate(1, *_RIGHT)
    a, b = call.shapes[left], call.shapes[right]
    output = (a[0], b[1]) if len(a) == len(b) == 2 else call.output
    yield matrix_product(output, a[-1], (left,), (right,))


def _bilinear(call: ShapedCall) -> Iterator[Product]:
    """The weight by one input, the result by the other."""
    first, second = call.locate(0, "input1"), call.locate(1, "input2")
    weight = call.locate(2, "weight")
    outputs, left, right = call.shapes[weight]
    num_rows = prod(call.output[:-1])
    yield matrix_product((num_rows, outputs, right), left, (first,), (weight,))
    yield matrix_product((num_rows, outputs), right, (first, weight), (second,))


def _filter_size(call: ShapedCall, image: Shape, weight: Shape) -> int:
    """A convolution sums over the kernel and the channels of a group."""
    return prod(weight[1:])


_convolution = _product(_filter_size)
# Each number of the input is spread over the kernel and the channels of its group.
_transposed_convolution = _product(_filter_size, lambda call, image, weight: image)


def _either_convolution(call: ShapedCall) -> Iterable[Product]:
    """`aten::convolution` says by an argument which of the two it is."""
    is_transposed = call.value(6, "transposed", False)
    return _transposed_convolution(call) if is_transposed else _convolution(call)


# -- einsum ----------------------------------------------------------------------------------------

# A letter, or the number of a dimension of an ellipsis, counted from the end.
_Index = str | int


def _einsum(call: ShapedCall) -> Iterator[Product]:
    """Operands are multiplied two at a time: from left to right, or along the path that torch was
    given. An index that only one of the two has, and that is not kept, is summed before.
    """
    given = [location for location in call.shapes if location not in (0, "equation")]
    locations = call.inside(1, "operands") or given
    shapes = [call.shapes[own] for own in locations]
    terms, result = _parse(call.value(0, "equation"), shapes)
    sizes = _index_sizes(terms, shapes)
    operands: list[Operand] = [(location,) for location in locations]
    factors = list(zip(map(set, terms), operands, strict=True))
    path = list(call.value(2, "path") or ())
    made_at = len(factors) if path else 0  # with a path, a product is the last factor
    while len(factors) > 1:
        second, first = (factors.pop(at) for at in sorted(path[:2] or (0, 1), reverse=True))
        del path[:2]
        kept = result.union(*(indices for indices, _ in factors))
        count = _num_operations(first[0], second[0], kept, sizes)
        yield Product(count, (first[1], second[1]))
        factors.insert(made_at, ((first[0] | second[0]) & kept, first[1] + second[1]))


def _num_operations(
    first: set[_Index], second: set[_Index], kept: set[_Index], sizes: Mapping[_Index, int]
) -> int:
    """The multiplications of two factors, and as many additions if an index is summed over."""
    summed = (first & second) - kept
    count = prod(sizes[index] for index in (first | second) & (kept | summed))
    return 2 * count if any(sizes[index] > 1 for index in summed) else count


def _index_sizes(terms: Iterable[list[_Index]], shapes: Iterable[Shape]) -> dict[_Index, int]:
    """The size of each index; one of 1 is expanded to that of another operand."""
    sizes: dict[_Index, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for index, size in zip(term, shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 0))
    return sizes


def _parse(equation: str, shapes: Sequence[Shape]) -> tuple[list[list[_Index]], set[_Index]]:
    """The indices of each operand and of the result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_expand(term, len(own)) for term, own in zip(left.split(","), shapes, strict=True)]
    everything = [index for term in terms for index in term]
    hidden = {index for index in everything if isinstance(index, int)}
    if arrow:
        letters: set[_Index] = set(right.replace("...", ""))
        return terms, letters | hidden if "..." in right else letters
    return terms, hidden | {index for index in everything if everything.count(index) == 1}


def _expand(term: str, num_dims: int) -> list[_Index]:
    before, dots, after = term.partition("...")
    num_hidden = num_dims - len(before) - len(after)
    if num_hidden and not dots:
        raise ValueError(f"{term} has other dimensions than its operand")
    return [*before, *range(num_hidden, 0, -1), *after]


PRODUCTS: dict[str, Formula] = {
    **named(
        "matmul mm bmm mv dot vdot linalgmatmul scaledmm intmm weightint8packmm weightint4packmm",
        _product(_rows_by_columns),
    ),
    **named(
        "linear linearrelu lineardynamic linearreludynamic linearleakyrelu lineartanh",
        _product(lambda call, rows, weight: (weight if rows is None else rows)[-1]),
    ),
    **named("addmm addmv addmmactivation", _product(_rows_by_columns, first=1)),
    **named("baddbmm", _product(lambda call, a, b: a[-1], first=1)),
    **named("addbmm", _product(lambda call, a, b: a[2], lambda call, a, b: (*a[:2], b[2]), 1)),
    # `a.__rmatmul__(b)` is `b @ a`.
    **named("rmatmul", _product(lambda call, a, b: _last_but_one(a))),
    **named("inner", _product(lambda call, a, b: a[-1] if len(a) else 1)),
    **named(
        "linalgvecdot vecdot",
        _product(lambda call, a, b: max(own[call.value(2, "dim", -1)] for own in (a, b))),
    ),
    **named("tensordot", _product(_tensordot)),
    # Distances of all pairs, as the matrix product of the same shape.
    **named("cdist cdistforward euclideandist", _product(lambda call, a, b: a[-1])),
    **named("outer ger kron", _outer()),
    **named("addr", _outer(first=1)),
    **named("groupedmm scaledgroupedmm", _grouped),
    **named("bilinear", _bilinear),
    **named("einsum", _einsum),
    **named(
        "conv1d conv2d conv3d slowconv2dforward thnnconv2d slowconv3d deformconv2d conv1drelu "
        "conv2drelu conv3drelu convdepthwise3d slowconvdilated2d slowconvdilated3d",
        _convolution,
    ),
    **named(
        "convtranspose1d convtranspose2d convtranspose3d slowconvtranspose2d",
        _transposed_convolution,
    ),
    **named("convolution convolutionoverrideable", _either_convolution),
}
