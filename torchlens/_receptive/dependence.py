"""What each operation makes of its arguments: which numbers of its result depend on which."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod

import torch

from torchlens._receptive.reading import Axis, ReadCall, Reading, everything, same
from torchlens._receptive.windows import (
    adaptive_pooling,
    convolution,
    padded,
    padding,
    pooling,
    resampling,
)
from torchlens._recording.operation_kinds import (
    ACTIVATIONS,
    ARRANGEMENTS,
    COMPARISONS,
    CONVERSIONS,
    CREATIONS,
    DROPOUTS,
    ELEMENTWISE,
    LOSSES,
    RANDOM,
    REDUCTIONS,
    UNINITIALISED,
    VIEWS,
)

Tensor = torch.Tensor
Rule = Callable[[ReadCall], Reading | None]


def reading_of(call: ReadCall) -> Reading | None:
    """How an argument leads to the result; None if its values do not matter (`zeros_like`).

    Where nothing is known, everything depends on everything.
    """
    if call.kind in _VALUELESS:
        return None
    rule = _RULES.get(call.kind, _group_rule)
    try:
        return rule(call)
    except (IndexError, LookupError, RuntimeError, StopIteration, TypeError, ValueError):
        return everything(is_known=False)


def _group_rule(call: ReadCall) -> Reading | None:
    if call.kind in _BY_ELEMENT:
        return _elementwise(call)
    if call.kind in REDUCTIONS:
        return _reduction(call)
    if call.kind in VIEWS or call.kind in ARRANGEMENTS:
        return Reading(call.again, None) if call.place[0] == 0 else everything(is_known=False)
    return everything(is_known=False)


# Of tensors, these read no more than the shape.
_VALUELESS = (CREATIONS | UNINITIALISED | RANDOM) - {
    "asarray", "astensor", "fill", "scalartensor", "set", "tensor",
}  # fmt: skip
_BY_ELEMENT = (
    ELEMENTWISE | ACTIVATIONS | COMPARISONS | CONVERSIONS | DROPOUTS | LOSSES | CREATIONS
    | {"buffer", "identity", "output"}
)  # fmt: skip


# -- building blocks -------------------------------------------------------------------------------


def _elementwise(call: ReadCall) -> Reading:
    shift = len(call.out) - len(call.shape)
    if not prod(call.out) or shift < 0 or torch.broadcast_shapes(call.shape, call.out) != call.out:
        return everything(is_known=call.kind in LOSSES)
    axes = {
        dim: Axis(dim + shift)
        for dim, size in enumerate(call.shape)
        if size == call.out[dim + shift]
    }
    return Reading(same, axes)


def mixing(call: ReadCall, dims: Sequence[int]) -> Reading:
    """Every number of the result depends on all along these dimensions, whether they stay, become
    1 or go.
    """
    rank = len(call.shape)
    mixed = {dim % rank for dim in dims} if rank else set()
    kept = [size for dim, size in enumerate(call.shape) if dim not in mixed]
    goes = len(call.out) == len(kept) and len(call.out) < rank
    places = {dim: dim - sum(other < dim for other in mixed) * goes for dim in range(rank)}

    def run(tensor: Tensor) -> Tensor:
        return tensor.sum(tuple(mixed), keepdim=not goes) if mixed else tensor

    return Reading(run, {dim: Axis(places[dim]) for dim in range(rank) if dim not in mixed})


def _along(*names: str, default: Sequence[int] | None = None) -> Rule:
    """Mixes the dimensions that an argument names; all of them by default."""

    def rule(call: ReadCall) -> Reading:
        dims = call.dims(*names)
        if dims is None:
            dims = list(range(len(call.shape))) if default is None else list(default)
        return mixing(call, dims)

    return rule


_reduction = _along("dim", "axis", "dims")


def _cumulative(call: ReadCall) -> Reading:
    (dim,) = call.dims("dim", "axis") or [0]
    axes = {own: Axis(own) for own in range(len(call.shape)) if own != dim}
    return Reading(lambda tensor: tensor.cumsum(dim), axes)


def _halves(call: ReadCall) -> Reading:
    (dim,) = call.dims("dim") or [len(call.shape) - 1]
    axes = {own: Axis(own) for own in range(len(call.shape)) if own != dim}
    return Reading(lambda tensor: sum(tensor.chunk(2, dim)), axes)  # type: ignore[arg-type,return-value]


# -- products --------------------------------------------------------------------------------------


def _linear(call: ReadCall) -> Reading:
    if call.place == (0,):
        return mixing(call, [-1])
    if call.place == (1,):
        return Reading(lambda tensor: tensor.sum(-1), {0: Axis(len(call.out) - 1)})
    return _elementwise(call)


def _product(first: int) -> Rule:
    """A product of the arguments `first` and `first + 1`; one before them is added."""

    def rule(call: ReadCall) -> Reading:
        if call.place not in ((first,), (first + 1,)):
            return _elementwise(call)
        is_left = call.place == (first,)
        other = call.other_shape(2 * first + 1 - call.place[0])
        rank, shift = len(call.shape), len(call.out) - len(call.shape)
        if rank == 1:
            return Reading(lambda tensor: tensor.sum(), {})
        summed = rank - 1 if is_left else rank - 2
        if len(other) == 1:  # a vector: the dimension is gone
            return mixing(call, [summed])
        # What is kept comes last but one from the left factor, and last from the right.
        axes = {dim: Axis(dim + shift) for dim in range(rank) if dim != summed}
        return Reading(lambda tensor: tensor.sum(summed, keepdim=True), axes)

    return rule


def _einsum(call: ReadCall) -> Reading:
    equation = str(call.option("equation") or call.row.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    number = call.place[-1] if len(call.place) > 1 else call.place[0] - 1
    own = left.split(",")[number]
    if not arrow or "." in equation or len(set(own)) < len(own):
        return everything(is_known=False)
    kept = [letter for letter in right if letter in own]
    missing = [at for at, letter in enumerate(right) if letter not in own]
    axes = {own.index(letter): Axis(right.index(letter)) for letter in kept}

    def run(tensor: Tensor) -> Tensor:
        found = torch.einsum(f"{own}->{''.join(kept)}", tensor)
        for at in missing:
            found = found.unsqueeze(at)
        return found

    return Reading(run, axes)


def _attention(call: ReadCall) -> Reading:
    """`scaled_dot_product_attention`: a causal query does not look ahead, and a mask of booleans
    is taken as it was logged.
    """
    rank = len(call.shape)
    if call.place == (0,):
        return mixing(call, [rank - 1])
    if call.place not in ((1,), (2,)):
        return mixing(call, [rank - 1])
    shape = (call.out[-2], call.shape[-2])
    allowed = torch.ones(shape)
    if call.option("is_causal"):
        allowed = allowed.tril()
    try:
        mask = call.index_at(3)
        allowed = allowed * mask if mask.dtype is torch.bool else allowed
    except LookupError:  # no mask, or one of numbers
        pass
    is_value = call.place == (2,)

    def run(tensor: Tensor) -> Tensor:
        if rank > 2 and call.out[-3] != call.shape[-3]:  # grouped queries
            tensor = tensor.repeat_interleave(call.out[-3] // call.shape[-3], -3)
        own = tensor if is_value else tensor.sum(-1, keepdim=True)
        return allowed @ own

    return Reading(run, {dim: Axis(dim) for dim in range(rank - 2)})


def _fused_attention(call: ReadCall) -> Reading:
    if call.place in ((0,), (1,), (2,)) and len(call.shape) == 3:
        return mixing(call, [1, 2])
    return everything(is_known=False)


# -- layers ----------------------------------------------------------------------------------------


def _batch_norm(call: ReadCall) -> Reading:
    if call.place != (0,):
        return Reading(lambda tensor: tensor.reshape(-1, *[1] * (len(call.out) - 2)), {})
    is_training = call.option("training", "use_input_stats")
    if "instance" in call.kind:
        return mixing(call, range(2, len(call.shape)))
    if is_training:
        return mixing(call, [dim for dim in range(len(call.shape)) if dim != 1])
    return _elementwise(call)


def _layer_norm(call: ReadCall) -> Reading:
    given = call.option("normalized_shape")
    return mixing(call, range(-len(given), 0)) if call.place == (0,) else _elementwise(call)


def _group_norm(call: ReadCall) -> Reading:
    if call.place != (0,):
        return everything()
    groups = int(call.option("num_groups", "N"))

    def run(tensor: Tensor) -> Tensor:
        grouped = tensor.unflatten(1, (groups, -1))
        inner = tuple(range(2, grouped.dim()))
        return grouped.sum(inner, keepdim=True).expand_as(grouped).flatten(1, 2)

    return Reading(run, {0: Axis(0)})


def _recurrent(call: ReadCall) -> Reading:
    """A layer over a sequence: in one direction, a step depends on those before it."""
    is_batch_first, is_both = call.option("batch_first"), call.option("bidirectional")
    if call.place != (0,) or len(call.shape) != 3:
        return everything(is_known=False)
    time = 1 if is_batch_first else 0
    if call.row.output_index:  # the last states, as (layers, batch, channels)
        return Reading(lambda tensor: tensor.sum((time, 2))[None, :, None], {1 - time: Axis(1)})

    def run(tensor: Tensor) -> Tensor:
        found = tensor.sum(2, keepdim=True)
        return found.sum(time, keepdim=True) if is_both else found.cumsum(time)

    return Reading(run, {1 - time: Axis(1 - time)})


# -- indices ---------------------------------------------------------------------------------------


def _selection(call: ReadCall) -> Reading:
    """Elements chosen by indices, which are those that were logged."""
    if call.place == (0,):
        return Reading(call.again, None)
    if call.kind in ("gather", "takealongdim"):
        return _elementwise(call)
    if call.kind == "indexselect":
        dim = int(call.option("dim", default=0)) % len(call.out)
        sizes = [-1 if own == dim else 1 for own in range(len(call.out))]
        return Reading(lambda tensor: tensor.view(sizes), {0: Axis(dim)})
    return everything(is_known=False)


def _embedding(call: ReadCall) -> Reading:
    if call.shape == call.out[:-1]:
        return Reading(
            lambda tensor: tensor.unsqueeze(-1), {dim: Axis(dim) for dim in range(len(call.shape))}
        )
    return Reading(call.again, {1: Axis(len(call.out) - 1)})


def _scattered(call: ReadCall) -> Reading:
    """`scatter`, `scatter_add`, `scatter_reduce`: elements go where the indices say."""
    (dim,) = call.dims("dim") or [0]
    if call.place == (0,):
        return _elementwise(call)
    index = call.index_at(2)
    axes = {own: Axis(own) for own in range(len(call.out)) if own != dim}

    def run(tensor: Tensor) -> Tensor:
        size = [slice(0, length) for length in index.shape]
        return tensor.new_zeros(call.out).scatter_add(dim, index, tensor[tuple(size)])

    return Reading(run, axes)


def _index_added(call: ReadCall) -> Reading:
    (dim,) = call.dims("dim") or [0]
    if call.place == (0,):
        return _elementwise(call)
    index = call.index_at(2)
    axes = {own: Axis(own) for own in range(len(call.out)) if own != dim}
    return Reading(lambda tensor: tensor.new_zeros(call.out).index_add(dim, index, tensor), axes)


def _written(call: ReadCall) -> Reading:
    """`x[i] = v` and its like: what is not written stays."""
    if call.place == (0,):
        return Reading(call.again, {dim: Axis(dim) for dim in range(len(call.shape))})
    return Reading(call.again, {})


def _overwritten(call: ReadCall) -> Reading | None:
    """`x.copy_(y)`, `x.fill_(y)`: nothing of x is left."""
    return None if call.place == (0,) else _elementwise(call)


def _shaped_like(call: ReadCall) -> Reading | None:
    """`x.view_as(y)`: of y, only the shape is read."""
    if call.place == (1,):
        return None
    return Reading(call.again, None) if call.kind in VIEWS else _elementwise(call)


def _joined(call: ReadCall) -> Reading:
    """Concatenation: along its dimension, each part has a place of its own."""
    (dim,) = call.dims("dim", "axis") or [0]
    # torch.cat ignores empty vectors among the parts.
    before = sum(shape[dim] for shape in call.shapes_before() if shape != (0,))
    after = call.out[dim] - before - call.shape[dim]
    axes = {own: Axis(own) for own in range(len(call.shape))}
    place = Axis(dim, low=Fraction(-before), high=Fraction(-before))
    return Reading(lambda tensor: padded(tensor, dim, before, after), axes | {dim: place})


def _rules(kinds: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(kinds.split(), rule)


_RULES: dict[str, Rule] = {
    **_rules("linear", _linear),
    **_rules("matmul mm bmm mv dot", _product(0)),
    **_rules("addmm baddbmm addmv", _product(1)),
    **_rules("einsum", _einsum),
    **_rules("softmax logsoftmax softmin gumbelsoftmax safesoftmax", _along("dim", default=[-1])),
    **_rules("glu", _halves),
    **_rules("cumsum cumprod cummax cummin logcumsumexp", _cumulative),
    **_rules("sort argsort topk kthvalue", _along("dim", "stable", default=[-1])),
    **_rules("conv1d conv2d conv3d convtranspose1d convtranspose2d convtranspose3d", convolution),
    **_rules(
        "maxpool1d maxpool2d maxpool3d avgpool1d avgpool2d avgpool3d maxpool1dwithindices "
        "maxpool2dwithindices maxpool3dwithindices",
        pooling,
    ),
    **_rules(
        "adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d adaptivemaxpool1d "
        "adaptivemaxpool2d adaptivemaxpool3d",
        adaptive_pooling,
    ),
    **_rules(
        "upsamplenearest1d upsamplenearest2d upsamplenearest3d upsamplenearestexact1d "
        "upsamplenearestexact2d upsamplenearestexact3d upsamplelinear1d upsamplebilinear2d "
        "upsamplebicubic2d upsampletrilinear3d",
        resampling,
    ),
    **_rules("pad constantpadnd", padding),
    **_rules("batchnorm nativebatchnorm instancenorm", _batch_norm),
    **_rules("layernorm rmsnorm nativelayernorm fusedrmsnorm", _layer_norm),
    **_rules("groupnorm nativegroupnorm", _group_norm),
    **_rules("lstm gru rnntanh rnnrelu", _recurrent),
    **_rules("lstmcell grucell rnntanhcell rnnrelucell", _along("dim", default=[-1])),
    **_rules("scaleddotproductattention", _attention),
    **_rules("nativemultiheadattention transformerencoderlayerfwd", _fused_attention),
    **_rules("gather takealongdim indexselect take index maskedselect", _selection),
    **_rules("embedding", _embedding),
    **_rules("scatter scatteradd scatterreduce", _scattered),
    **_rules("indexadd indexcopy", _index_added),
    **_rules("setitem indexput", _written),
    **_rules("copy fill", _overwritten),
    **_rules("expandas viewas reshapeas typeas", _shaped_like),
    **_rules("cat concat concatenate", _joined),
    **_rules("viewascomplex", lambda call: mixing(call, [-1])),
    **_rules("viewasreal", lambda call: Reading(lambda tensor: tensor.unsqueeze(-1), {})),
}
