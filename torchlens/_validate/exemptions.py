"""The complete list of what validation does not check, with the reasons."""

from dataclasses import dataclass
from typing import Any

# Operations that are not run again, with the reason.
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
    "a derivative depends on autograd's graph, which the values of the arguments do not hold"
)
REPLAY["_make_dual"] = REPLAY["_unpack_dual"] = (
    "a dual number belongs to a level of forward differentiation, which has ended"
)
# The same, for calls that are recorded as a whole.
OPAQUE_REPLAY: dict[str, str] = dict.fromkeys(
    ("object_to_tensor", "tensor_to_object"), "a pickle holds more of a tensor than its values"
)
EARLY = "its argument is the memory of a collective that had not finished"
COLLECTIVE = "a collective cannot run again without the other processes"


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
        "the argument is overwritten",
    ),
    Exemption(
        frozenset({"_indices", "ccol_indices", "col_indices", "crow_indices", "indices",
        "row_indices"}),
        frozenset({0}),
        "validation changes the values of a sparse tensor, not its pattern",
    ),
    Exemption(
        frozenset({"__array_wrap__"}),
        frozenset({0, "self"}),
        "NumPy computed the result, which torch does not see",
    ),
    Exemption(
        frozenset({"batch_norm", "instance_norm", "native_batch_norm"}),
        frozenset({3, 4, "running_mean", "running_var"}),
        "in training, the running statistics are written, but not read",
    ),
)  # fmt: skip

# Reasons that do not depend on the operation.
VIEW = "a view whose memory was overwritten before the operation"
PART = "a parent that wrote a part of the argument that the operation does not read"
MANY = "one of many parents of one argument or call, of which only some were changed"
CAPTURED = "a tensor that a function captured cannot be changed from outside"
CONTENDED = "another thread wrote to an argument while the operation ran"
UNSTEADY = "a number or text that also differs between two plain runs, such as a time"
EMPTY = "a tensor without elements"
LAZY = "a tensor of a lazy module, which had no value before the pass"

# ATen operations that may run outside a logged operation, with the reason.
UNLOGGED_ATEN: dict[str, str] = {
    "aten::detach": "autograd's own bookkeeping; nothing is computed",
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
        "reads metadata of a tensor subclass; nothing is computed",
    ),
}  # fmt: skip

GRADIENT = "the gradient of a parameter, from a backward pass inside the model"
CONSTANT = (
    "a tensor made from Python numbers by a constructor that torch does not report, such as "
    "torch.IntTensor([3])"
)
DISTRIBUTED = "a tensor that torch.distributed keeps between its own operations"
ASIDE = "FSDP gathers or splits parameters; the layers that read them are logged"


def dependence_exemption(name: str, location: Any) -> str | None:
    """The reason why the result may not depend on the argument; None if it must."""
    head = location[0] if isinstance(location, tuple) else location
    if head == "out":
        return "the argument is overwritten"
    for exemption in DEPENDENCE:
        if name in exemption.names and (exemption.locations is None or head in exemption.locations):
            return exemption.reason
    return None
