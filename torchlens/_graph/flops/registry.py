"""What an operation costs, by its layer type: a formula, nothing by convention, or unknown."""

import sys
from collections.abc import Callable, Container
from enum import Enum
from typing import Any

import torch

from torchlens._graph.flops.jax_primitives import JAX_PRIMITIVES
from torchlens._graph.flops.linalg import LINALG
from torchlens._graph.flops.networks import NETWORK_LAYERS
from torchlens._graph.flops.products import PRODUCTS
from torchlens._graph.flops.shaped_call import Formula, Location, Product, ShapedCall
from torchlens._recording.operation_kinds import (
    ACTIVATIONS,
    ARRANGEMENTS,
    BOUNDARIES,
    COLLECTIVES,
    COMPARISONS,
    CONVERSIONS,
    CREATIONS,
    DISTANCES,
    DROPOUTS,
    ELEMENTWISE,
    INDEXING,
    LOSSES,
    NORMALISATIONS,
    POOLING,
    RANDOM,
    REDUCTIONS,
    UNINITIALISED,
    VIEWS,
)

FORMULAS: dict[str, Formula] = {
    **PRODUCTS,
    **NETWORK_LAYERS,
    **LINALG,
    **JAX_PRIMITIVES,
}


# Operations that take a few steps, or none, for each number that they read or write. They hardly
# count beside the products of a model, and `torch.utils.flop_counter` leaves them out as well. The
# list is explicit: an operation that is not on it is reported as unknown.
FREE: frozenset[str] = frozenset().union(
    ACTIVATIONS, ARRANGEMENTS, BOUNDARIES, COLLECTIVES, COMPARISONS, CONVERSIONS, CREATIONS,
    DISTANCES, DROPOUTS,
    ELEMENTWISE, INDEXING, LOSSES, NORMALISATIONS, POOLING, RANDOM, REDUCTIONS, UNINITIALISED,
    VIEWS,
)  # fmt: skip


class Counting(Enum):
    """How the operations of a layer type are counted."""

    COUNTED = "counted"  # by a formula
    FREE = "free"  # as nothing
    UNKNOWN = "unknown"


def counting_of(layer_type: str) -> Counting:
    if layer_type in FORMULAS:
        return Counting.COUNTED
    return Counting.FREE if layer_type in FREE else Counting.UNKNOWN


def products_of(layer_type: str, call: ShapedCall) -> list[Product] | None:
    """The products that a call is made of; none for a free one, None where they are not known.

    None also if the call does not match its formula: the shape of an operand is unknown, or a
    tensor is sparse or nested with varying sizes.
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


def forward_flops(layer_type: str, call: ShapedCall) -> int | None:
    """Floating-point operations of a call: 0 for a free one, None where they are not known."""
    products = products_of(layer_type, call)
    return None if products is None else sum(product.flops for product in products)


def backward_flops(
    layer_type: str, call: ShapedCall, wants_grad: Container[Location]
) -> int | None:
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


# -- formulas that the user gave to torch: `torch.utils.flop_counter.register_flop_formula` --------


def may_be_registered(func: Callable[..., Any]) -> bool:
    """Whether there may be a formula for it: only operators have one."""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def registered_flops(func: Callable[..., Any], call: ShapedCall) -> int | None:
    """What the formula registered for an operator of the user's own says; None if there is none."""
    operator = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    # Who registered a formula has imported the module; for the others it takes too long to import.
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None or not isinstance(operator, torch._ops.OpOverloadPacket):
        return None
    formula = counter.flop_registry.get(operator)
    is_of_torch = operator._qualified_op_name.startswith("aten::")  # which are ours to count
    if (
        formula is None
        or is_of_torch
        or any(size < 0 for shape in (*call.shapes.values(), call.output) for size in shape)
    ):
        return None
    args, kwargs = _arguments(operator, call)
    try:
        return int(formula(*args, **kwargs, out_val=torch.empty(call.output, device="meta")))
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):  # it cannot make sense of this call
        return None


def _arguments(operator: Any, call: ShapedCall) -> tuple[list[Any], dict[Any, Any]]:
    arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **(call.kwargs or {})}
    # A formula takes shapes, or the tensors themselves: tensors without numbers serve for both.
    for location, shape in call.shapes.items():
        path = location if isinstance(location, tuple) else (location,)
        arguments[path[0]] = _with_tensor(arguments[path[0]], path[1:], shape)
    args = [arguments.pop(position) for position in range(len(call.args))]
    # What was given by name comes by position, as torch's dispatcher hands it on.
    for name in _positional_names(operator)[len(args) :]:
        if name not in arguments:
            break
        args.append(arguments.pop(name))
    return args, arguments


def _positional_names(operator: Any) -> list[str]:
    schema = getattr(operator, operator.overloads()[0])._schema
    return [argument.name for argument in schema.arguments if not argument.kwarg_only]


def _with_tensor(argument: Any, path: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
    if not path:
        return torch.empty(shape, device="meta")
    items = dict(argument) if isinstance(argument, dict) else dict(enumerate(argument))
    items[path[0]] = _with_tensor(items[path[0]], path[1:], shape)
    return items if isinstance(argument, dict) else list(items.values())
