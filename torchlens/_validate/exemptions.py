"""The operations and arguments that validation does not check, and why. Nothing else is exempt."""

from dataclasses import dataclass
from typing import Any

# Operations that are not run again: {name: why}.
UNINITIALISED = "its result is uninitialised memory"
REPLAY: dict[str, str] = dict.fromkeys(
    (
        "Tensor", "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided",
        "new", "new_empty",
        "new_empty_strided", "resize_", "resize_as_",
    ),
    UNINITIALISED,
)  # fmt: skip
REPLAY["backward"] = REPLAY["grad"] = (
    "a derivative is taken of autograd's graph, which the values of the arguments do not hold"
)
REPLAY["_make_dual"] = REPLAY["_unpack_dual"] = (
    "a dual number lives in a level of forward differentiation, which is over"
)
# The same of calls that are recorded as a whole.
OPAQUE_REPLAY: dict[str, str] = dict.fromkeys(
    ("object_to_tensor", "tensor_to_object"), "a pickle holds more of a tensor than its values"
)
EARLY = "it was given memory that a collective was still writing, and that nobody had waited for"
COLLECTIVE = (
    "it needs the other processes, which would have to run it again at the same time and as often"
)


@dataclass(frozen=True, slots=True)
class Exemption:
    """Operations whose result need not depend on the arguments at `locations` (None: on any), and
    why.
    """

    names: frozenset[str]
    locations: frozenset[Any] | None
    reason: str


# Consulted only after changing the argument did not change the result.
DEPENDENCE: tuple[Exemption, ...] = (
    Exemption(
        frozenset({
            "empty_like", "full_like", "new", "new_empty", "new_empty_strided", "new_full",
            "new_ones", "new_tensor",
            "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
        }),
        frozenset({0, "self", "input"}),
        "only the shape, type and device of the argument are used",
    ),
    Exemption(
        frozenset({"broadcast_to", "expand_as", "reshape_as", "resize_as_", "sum_to_size", "to",
        "type_as", "view_as"}),
        frozenset({1, "other", "the_template", "tensor"}),
        "only the shape, type and device of the argument are used",
    ),
    Exemption(
        frozenset({
            "__setitem__", "bernoulli_", "cauchy_", "copy_", "data", "exponential_", "fill_",
            "geometric_", "index_copy_",
            "index_fill_", "index_put_", "index_reduce_", "log_normal_", "masked_fill_", "normal_",
            "random_",
            "scatter_", "scatter_reduce", "scatter_reduce_", "set_", "uniform_", "zero_",
        }),
        frozenset({0}),
        "all of the argument is written over",
    ),
    Exemption(
        frozenset({"_indices", "ccol_indices", "col_indices", "crow_indices", "indices",
        "row_indices"}),
        frozenset({0}),
        "a sparse tensor is changed in its values, and these are its pattern",
    ),
    Exemption(
        frozenset({"__array_wrap__"}),
        frozenset({0, "self"}),
        "numpy has computed the result from the argument, out of torch's sight",
    ),
    Exemption(
        frozenset({"batch_norm", "instance_norm", "native_batch_norm"}),
        frozenset({3, 4, "running_mean", "running_var"}),
        "in training the statistics are written, and only the batch's own are used",
    ),
)  # fmt: skip

# Parents that an operation need not depend on whatever it is: why.
VIEW = "a view that was written over since: it is how the reader got to the memory"
PART = "one of several that wrote the argument, in a part of it that the operation does not pick"
MANY = "one of many that wrote parts of one argument, of which some were tried"
CAPTURED = "a tensor that a function captured cannot be changed from outside"
CONTENDED = "another thread wrote to an argument while the operation ran"
UNSTEADY = "a number or a text that differs between two plain runs, too, such as a time"
EMPTY = "a tensor without elements"
LAZY = "a tensor of a lazy module, which had no value before the pass"

# ATen operations that may run outside a logged one: {name: why}.
UNLOGGED_ATEN: dict[str, str] = {
    "aten::detach": "autograd's own bookkeeping, around custom functions and checkpoints; nothing "
                    "is computed",
    "aten::alias": "autograd's own bookkeeping; nothing is computed",
    "aten::lift_fresh": "marks a tensor made from Python numbers; nothing is computed",
    **dict.fromkeys(
        (
            "aten::dim", "aten::is_contiguous", "aten::is_non_overlapping_and_dense",
            "aten::is_pinned",
            "aten::is_strides_like_format", "aten::numel", "aten::size", "aten::storage_offset",
            "aten::stride",
            "aten::sym_is_contiguous", "aten::sym_numel", "aten::sym_size",
            "aten::sym_storage_offset", "aten::sym_stride",
            "prim::device", "prim::layout",
        ),
        "tells about a tensor of somebody's own kind; nothing is computed",
    ),
}  # fmt: skip

GRADIENT = "a gradient that a backward pass inside the model left at a parameter"
CONSTANT = (
    "a tensor made from Python numbers by a constructor that torch does not report, such as "
    "torch.IntTensor([3])"
)
DISTRIBUTED = "a tensor that torch.distributed keeps between its own operations"
ASIDE = (
    "FSDP, bringing the shards of parameters together or apart: the layers that read the "
    "parameters are logged"
)


def dependence_exemption(name: str, location: Any) -> str | None:
    """Why the result of the operation need not depend on the argument there; None if it must."""
    head = location[0] if isinstance(location, tuple) else location
    if head == "out":
        return "all of the argument is written over"
    for exemption in DEPENDENCE:
        if name in exemption.names and (exemption.locations is None or head in exemption.locations):
            return exemption.reason
    return None
