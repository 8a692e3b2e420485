"""What an operation costs, by its layer type: a formula, nothing by convention, or unknown."""

from collections.abc import Container
from enum import Enum

from torchlens._graph.flops.attention import ATTENTION
from torchlens._graph.flops.call import Call, Formula, Location, Product
from torchlens._graph.flops.einsum import einsum
from torchlens._graph.flops.free import FREE
from torchlens._graph.flops.jax_primitives import JAX_PRIMITIVES
from torchlens._graph.flops.linalg import LINALG
from torchlens._graph.flops.products import PRODUCTS
from torchlens._graph.flops.recurrent import RECURRENT

FORMULAS: dict[str, Formula] = {
    **PRODUCTS,
    **ATTENTION,
    **RECURRENT,
    **LINALG,
    **JAX_PRIMITIVES,
    "einsum": einsum,
}


class Counting(Enum):
    """How the operations of a layer type are counted."""

    COUNTED = "counted"  # by a formula
    FREE = "free"  # as nothing: see free.py
    UNKNOWN = "unknown"


def counting_of(layer_type: str) -> Counting:
    if layer_type in FORMULAS:
        return Counting.COUNTED
    return Counting.FREE if layer_type in FREE else Counting.UNKNOWN


def products_of(layer_type: str, call: Call) -> list[Product] | None:
    """The products that a call is made of; none for a free one, None where they are not known.

    Not known is also a call that does not look as its formula expects: an operand whose shape
    nobody noted, a sparse tensor, a nested one whose sizes vary.
    """
    formula = FORMULAS.get(layer_type)
    if formula is None:
        return [] if layer_type in FREE else None
    if any(size < 0 for shape in (*call.shapes.values(), call.output) for size in shape):
        return None
    try:
        return list(formula(call))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def forward_flops(layer_type: str, call: Call) -> int | None:
    """Floating-point operations of a call: 0 for a free one, None where they are not known."""
    products = products_of(layer_type, call)
    return None if products is None else sum(product.flops for product in products)


def backward_flops(layer_type: str, call: Call, wants_grad: Container[Location]) -> int | None:
    """The same for its part in the backward pass; `wants_grad` has the arguments that gradients are
    computed for.
    """
    products = products_of(layer_type, call)
    if products is None:
        return None
    return sum(
        product.flops
        * sum(any(location in wants_grad for location in operand) for operand in product.operands)
        for product in products
    )
