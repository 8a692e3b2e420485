"""Formulas of the primitives of JAX. What JAX writes as several, such as a linear layer, is counted
at its product.
"""

from collections.abc import Iterator
from math import prod

from torchlens._graph.flops.linalg import transform_flops
from torchlens._graph.flops.shaped_call import Formula, Product, ShapedCall, matrix_product


def _dot_general(call: ShapedCall) -> Iterator[Product]:
    """A product of two arrays, summed over the dimensions that `dimension_numbers` names."""
    left, right = call.operand(0), call.operand(1)
    (summed_left, summed_right), _ = call.value(2, "dimension_numbers")
    shape, dims = (call.shapes[0], summed_left) if left else (call.shapes[1], summed_right)
    yield matrix_product(call.output, prod(shape[dim] for dim in dims), left, right)


def _ragged_dot(call: ShapedCall) -> Iterator[Product]:
    """Each row meets the matrix of its own group."""
    rows, matrices = call.shapes[0], call.shapes[1]
    yield matrix_product((*rows[:-1], matrices[-1]), rows[-1], (0,), (1,))


def _convolution(call: ShapedCall) -> Iterator[Product]:
    """Padding is computed with; the zeros between the numbers of a transposed convolution's input
    are not.
    """
    images, kernel = call.shapes[0], call.shapes[1]
    numbers = call.value(2, "dimension_numbers")
    of_kernel = prod(kernel[dim] for dim in numbers.rhs_spec[2:])
    channels_out, channels_in = (kernel[dim] for dim in numbers.rhs_spec[:2])
    if prod(call.value(2, "lhs_dilation") or ()) > 1:
        places = prod(images[dim] for dim in (numbers.lhs_spec[0], *numbers.lhs_spec[2:]))
        yield Product(2 * places * channels_out * channels_in * of_kernel, ((0,), (1,)))
    else:
        yield matrix_product(call.output, channels_in * of_kernel, (0,), (1,))


def _fourier(call: ShapedCall) -> Iterator[Product]:
    lengths = call.value(1, "fft_lengths")
    kind = call.value(1, "fft_type")
    kind = getattr(kind, "name", None) or str(kind)  # of a file, it is text
    is_real = "RFFT" in kind
    shape = (*(call.output if "IRFFT" in kind else call.shapes[0])[: -len(lengths)], *lengths)
    yield Product(transform_flops(shape, prod(lengths), is_real), ((0,),))


JAX_PRIMITIVES: dict[str, Formula] = {
    "dotgeneral": _dot_general,
    "raggeddotgeneral": _ragged_dot,
    "convgeneraldilated": _convolution,
    "fft": _fourier,
}
