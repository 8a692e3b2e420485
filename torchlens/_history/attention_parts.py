"""Finds attention in a graph: the operations that read queries, keys and values, and their result.

An attention is one call of `scaled_dot_product_attention`, or a softmax whose result multiplies
values. Whether the projections before it are fused does not matter.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torchlens._history.log import Log
from torchlens._recording.operation_kinds import DROPOUTS
from torchlens._recording.recording import located

_FUSED = "scaleddotproductattention"
_SOFTMAX = frozenset({"softmax", "safesoftmax"})
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "mm", "imatmul"})
# What may happen to weights before they multiply the values.
HANDED_ON = DROPOUTS | {
    *("to", "typeas", "type", "float", "half", "bfloat16", "clone", "contiguous", "identity"),
    *("view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "getitem", "maskedfill"),
    *("isnan", "nantonum", "transpose", "permute", "where"),
}
# What may happen to scores before the softmax.
_SCORING = HANDED_ON | {"truediv", "div", "mul", "imul", "itruediv", "add", "iadd", "radd", "sub"}
_SCORING |= {"tanh", "clamp", "rmul"}
# What repeats the heads of grouped keys and values.
_REPEATING = frozenset({"expand", "getitem", "repeatinterleave", "reshape", "unsqueeze", "view"})
_MOST_STEPS = 12


class AttentionParts(NamedTuple):
    """One attention with heads: the innermost call of a module that runs it, and its entries.

    `q`, `k` and `v` have the shape (batch, heads, tokens, size); `weights` is the softmax, which a
    fused call does not show.
    """

    call: int
    out: int
    q: int
    k: int
    v: int
    weights: int | None = None


def attentions_in(log: Log, call: int) -> list[AttentionParts]:
    """The attentions with heads that ran inside a call of a module; in call 0, all."""
    found = []
    for entry in range(len(log.graph.recorded)):
        row = log.row(entry)
        if call and call not in log.graph.module_chains[row.module_call]:
            continue
        if len(row.shape) != 4:
            continue
        if row.operation.layer_type == _FUSED:
            found.append(_fused(log, entry))
        elif (softmax := softmax_before(log, entry)) is not None:
            found.append(_eager(log, entry, softmax))
    return [one for one in found if one is not None]


def _fused(log: Log, entry: int) -> AttentionParts | None:
    row = log.row(entry)
    given = {location: log.graph.entry_of.get(number) for location, number in
             located(row.references)}  # fmt: skip
    read = [given.get(number, given.get(name)) for number, name in
            enumerate(("query", "key", "value"))]  # fmt: skip
    if None in read:
        return None
    q, k, v = (entry for entry in read if entry is not None)
    return AttentionParts(row.module_call, entry, q, _ungrouped(log, k), _ungrouped(log, v))


def _eager(log: Log, product: int, softmax: int) -> AttentionParts | None:
    scores = scores_before(log, softmax)
    read = [] if scores is None else operands(log, scores)[-2:]
    if len(read) != 2 or any(len(log.row(entry).shape) != 4 for entry in read):
        return None
    q, k = read
    if log.row(k).operation.layer_type in ("transpose", "permute", "mT") and log.graph.parents[k]:
        k = log.graph.parents[k][0]
    _, value = weights_and_value(log, product, softmax)
    call = log.row(softmax).module_call
    return AttentionParts(call, product, q, _ungrouped(log, k), _ungrouped(log, value), softmax)


def _ungrouped(log: Log, entry: int) -> int:
    """The keys or values before their heads were repeated for groups of queries."""
    at = entry
    for _ in range(_MOST_STEPS):
        row = log.row(at)
        if row.operation.layer_type not in _REPEATING or not log.graph.parents[at]:
            return entry
        at = log.graph.parents[at][0]
        shape, own = log.row(at).shape, log.row(entry).shape
        if len(shape) == 4 and shape[1] < own[1] and shape[2:] == own[2:]:
            return at
    return entry


# -- in steps --------------------------------------------------------------------------------------


def product_after(log: Log, softmax: int) -> int | None:
    """The product of a softmax's result with values; None if there is none."""
    at = softmax
    if _kind(log, softmax) not in _SOFTMAX:
        return None
    for _ in range(_MOST_STEPS):
        readers = log.graph.children[at]
        product = next((one for one in readers if _kind(log, one) in _PRODUCTS), None)
        if product is not None:
            return product if len(operands(log, product)) == 2 else None
        onward = [one for one in readers if _kind(log, one) in HANDED_ON]
        if not onward:
            return None
        at = onward[0]
    return None


def softmax_before(log: Log, product: int) -> int | None:
    """The softmax that gave the weights of a product; None if there is none."""
    if _kind(log, product) not in _PRODUCTS:
        return None
    for operand in operands(log, product):
        for at in way_back(log, operand, HANDED_ON):
            if _kind(log, at) in _SOFTMAX and product_after(log, at) == product:
                return at
    return None


def scores_before(log: Log, softmax: int) -> int | None:
    """The product of queries and keys that a softmax normalises; None if there is none."""
    way = way_back(log, softmax, _SCORING)
    return next((at for at in way if _kind(log, at) in _PRODUCTS), None)


def weights_and_value(log: Log, product: int, softmax: int) -> tuple[int, int]:
    """The two operands of a product with a softmax's result: the weights first."""
    weights, value = operands(log, product)
    if softmax not in way_back(log, weights, HANDED_ON):
        return value, weights
    return weights, value


def operands(log: Log, product: int) -> list[int]:
    """The entries that a product multiplies, in their order."""
    entry_of = log.graph.entry_of
    numbers = [number for _, number in located(log.row(product).references)]
    return [entry_of[number] for number in numbers if number in entry_of]


def way_back(log: Log, start: int, kinds: frozenset[str]) -> Iterator[int]:
    """An entry, and those before it over operations of some kinds, each by its first parent that
    depends on an input.
    """
    at = start
    for _ in range(_MOST_STEPS):
        yield at
        if at != start and _kind(log, at) not in kinds:
            return
        parents = [one for one in log.graph.parents[at] if log.graph.has_input_ancestor[one]]
        if not parents:
            return
        at = parents[0]


def _kind(log: Log, entry: int) -> str:
    return log.row(entry).operation.layer_type
