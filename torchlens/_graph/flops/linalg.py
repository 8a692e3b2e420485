"""Formulas of linear algebra and Fourier transforms: the textbook counts (Golub and Van Loan) of
the usual algorithms.

What such a call costs backward is taken to be what it costs forward, for each argument that wants a
gradient.
"""

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from math import log2, prod
from typing import Any

from torchlens._graph.flops.shaped_call import Formula, Product, Shape, ShapedCall, named

_MATRIX = ("A", "input", "self", "LU", "B")


def _matrix(count: Callable[[int, int], Any]) -> Formula:
    """Of a function of one batch of matrices, by rows and columns; the smaller of the two is given
    last.
    """

    def formula(call: ShapedCall) -> Iterator[Product]:
        location = call.locate(0, *_MATRIX)
        *batch, rows, columns = call.shapes[location]
        yield Product(
            int(prod(batch) * count(max(rows, columns), min(rows, columns))), ((location,),)
        )

    return formula


def _system(factor: Callable[[int], Any], per_column: int, matrix: int = 0) -> Formula:
    """Of solving a system: the matrix is argument `matrix`, the right-hand side the other of the
    first two.
    """

    def formula(call: ShapedCall) -> Iterator[Product]:
        left = call.locate(matrix, *_MATRIX)
        right = call.operand(1 - matrix, "B", "b", "other", "input2")
        size = call.shapes[left][-1]
        batch = prod(call.shapes[left][:-2])
        columns = prod(call.output) // size if size else 0  # of all systems together
        yield Product(int(batch * factor(size)), ((left,),))
        yield Product(per_column * size**2 * columns, ((left,), right))

    return formula


def _triangular(call: ShapedCall) -> Iterable[Product]:
    """torch's function takes the matrix second, JAX's primitive first."""
    return _system(lambda n: 0, 1, matrix=0 if "left_side" in (call.kwargs or {}) else 1)(call)


def _least_squares(call: ShapedCall) -> Iterator[Product]:
    left, right = call.locate(0, "input", "A", "self"), call.locate(1, "b", "B")
    *batch, rows, columns = call.shapes[left]
    sides = prod(call.shapes[right]) // max(rows, 1)
    large, small = max(rows, columns), min(rows, columns)
    yield Product(int(prod(batch) * _qr(large, small)), ((left,),))
    yield Product(4 * rows * columns * sides, ((left,), (right,)))


def _power(call: ShapedCall) -> Iterator[Product]:
    """By repeated squaring."""
    location = call.locate(0, "input", "A", "self")
    exponent = abs(call.value(1, "n"))
    num_products = max(exponent.bit_length() - 1, 0) + max(exponent.bit_count() - 1, 0)
    yield Product(
        2 * prod(call.shapes[location]) * call.shapes[location][-1] * num_products,
        ((location,), (location,)),
    )


def _norm(call: ShapedCall) -> Iterator[Product]:
    """Some norms of matrices are those of the singular values; all others only add."""
    order = call.value(1, "ord", call.value(1, "p", "fro"))
    location = call.locate(0, *_MATRIX)
    shape = call.shapes[location]
    dims = call.value(2, "dim", (-2, -1) if len(shape) > 1 else -1)
    if order in (2, -2, "nuc") and not isinstance(dims, int) and len(dims) == 2:
        small, large = sorted(shape[dim] for dim in dims)
        count = prod(shape) // (small * large) if small else 0
        yield Product(int(count * _singular_values(large, small)), ((location,),))


def _qr(rows: int, columns: int) -> Fraction:
    return 2 * rows * columns**2 - Fraction(2, 3) * columns**3


def _singular_values(rows: int, columns: int) -> Fraction:
    return 4 * rows * columns**2 - Fraction(4, 3) * columns**3


def _lu(size: int) -> Fraction:
    return Fraction(2, 3) * size**3


def _cholesky(size: int) -> Fraction:
    return Fraction(1, 3) * size**3


# -- Fourier transforms ----------------------------------------------------------------------------


def _transform(num_dims: int | None, real: str = "") -> Formula:
    """5 n log₂ n for each transform of n numbers, half of it where one side is real.

    `num_dims` is 1 or 2 where the function says how many dimensions it transforms, None where all
    of them are; `real` is the side that is real, "input", "output" or neither.
    """

    def formula(call: ShapedCall) -> Iterator[Product]:
        location = call.locate(0, "input", "self")
        shape = list(call.output)
        dims = _dims_of(call, num_dims)
        if real == "input":
            given = call.value(1, "n" if num_dims == 1 else "s")
            wanted = given[-1] if isinstance(given, list | tuple) else given
            shape[dims[-1]] = wanted or call.shapes[location][dims[-1]]
        yield Product(
            transform_flops(tuple(shape), prod(shape[dim] for dim in dims), bool(real)),
            ((location,),),
        )

    return formula


def transform_flops(shape: Shape, num_points: int, is_real: bool) -> int:
    """Of the numbers in `shape`, each transform taking `num_points` of them."""
    return int((2.5 if is_real else 5) * prod(shape) * log2(num_points)) if num_points > 1 else 0


def _dims_of(call: ShapedCall, num_dims: int | None) -> list[int]:
    default = -1 if num_dims == 1 else (-2, -1) if num_dims == 2 else None
    dims = call.value(2, "dim", default)
    if dims is None:
        sizes = call.value(1, "s")
        dims = range(-len(sizes) if sizes else -len(call.output), 0)
    return [dims] if isinstance(dims, int) else list(dims)


def _short_time(call: ShapedCall) -> Iterator[Product]:
    """`stft`: a real transform of `n_fft` numbers for each frame."""
    location = call.locate(0, "input", "self")
    num_points = call.value(1, "n_fft")
    is_split = call.value(8, "return_complex") is False and call.output[-1] == 2
    *batch, _, frames = call.output[:-1] if is_split else call.output
    yield Product(
        transform_flops((prod(batch), frames, num_points), num_points, True), ((location,),)
    )


def _inverse_short_time(call: ShapedCall) -> Iterator[Product]:
    location = call.locate(0, "input", "self")
    num_points = call.value(1, "n_fft")
    *batch, _, frames = call.shapes[location]
    yield Product(
        transform_flops((prod(batch), frames, num_points), num_points, True), ((location,),)
    )


LINALG: dict[str, Formula] = {
    **named("linalgcholesky linalgcholeskyex cholesky", _matrix(lambda m, n: _cholesky(n))),
    **named("linalglufactor linalglufactorex linalglu lu luwithinfo linalgldlfactor "
            "linalgldlfactorex", _matrix(
        lambda m, n: m * n**2 - Fraction(1, 3) * n**3)),
    **named("linalgdet det linalgslogdet slogdet logdet", _matrix(lambda m, n: _lu(n))),
    **named("linalginv linalginvex inverse linalgtensorinv", _matrix(lambda m, n: 2 * n**3)),
    **named("choleskyinverse", _matrix(lambda m, n: Fraction(2, 3) * n**3)),
    **named("linalgqr qr", _matrix(lambda m, n: 2 * _qr(m, n))),
    **named("geqrf householderproduct linalghouseholderproduct orgqr", _matrix(_qr)),
    **named("linalgsvdvals linalgcond linalgmatrixrank nuclearnorm", _matrix(_singular_values)),
    **named("linalgsvd svd", _matrix(lambda m, n: 6 * m * n**2 + 20 * n**3)),
    **named("linalgpinv pinverse", _matrix(lambda m, n: 8 * m * n**2 + 20 * n**3)),
    **named("linalgeigh eigh", _matrix(lambda m, n: 9 * n**3)),
    **named("linalgeigvalsh", _matrix(lambda m, n: Fraction(4, 3) * n**3)),
    **named("linalgeig eig", _matrix(lambda m, n: 25 * n**3)),
    **named("linalgeigvals", _matrix(lambda m, n: 10 * n**3)),
    **named("linalgsolve linalgsolveex", _system(_lu, 2)),
    **named("linalglusolve", _system(lambda n: 0, 2)),
    **named("choleskysolve lusolve", _system(lambda n: 0, 2, matrix=1)),
    **named("linalgsolvetriangular", _system(lambda n: 0, 1)),
    **named("triangularsolve", _triangular),
    **named("linalglstsq", _least_squares),
    **named("linalgmatrixpower matrixpower", _power),
    **named("linalgmatrixnorm linalgnorm", _norm),
    **named("fftfft fftifft", _transform(1)),
    **named("fftfft2 fftifft2", _transform(2)),
    **named("fftfftn fftifftn", _transform(None)),
    **named("fftrfft fftihfft", _transform(1, "input")),
    **named("fftrfft2 fftihfft2", _transform(2, "input")),
    **named("fftrfftn fftihfftn", _transform(None, "input")),
    **named("fftirfft ffthfft", _transform(1, "output")),
    **named("fftirfft2 ffthfft2", _transform(2, "output")),
    **named("fftirfftn ffthfftn", _transform(None, "output")),
    **named("stft", _short_time),
    **named("istft", _inverse_short_time),
}  # fmt: skip
