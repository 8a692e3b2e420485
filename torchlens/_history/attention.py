"""Finds attention in a graph: the operations that read queries, keys and values, and their result.

An attention is one call of `scaled_dot_product_attention`, or a softmax between two matrix
products. Whether the projections before it are fused does not matter.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchlens._history.log import Log
from torchlens._recording.operation_kinds import DROPOUTS
from torchlens._recording.recording import located

_FUSED = "scaleddotproductattention"
_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "imatmul"})
# Between the product of queries and keys, the softmax, and the product with the values.
_BETWEEN = DROPOUTS | frozenset({
    "add", "iadd", "clone", "contiguous", "div", "expand", "float", "getitem", "imul", "itruediv",
    "maskedfill", "mul", "reshape", "rmul", "sub", "to", "truediv", "type", "typeas",
    "unsqueeze", "view", "where",
})  # fmt: skip
# What repeats the heads of grouped keys and values.
_REPEATING = frozenset({"expand", "getitem", "repeatinterleave", "reshape", "unsqueeze", "view"})
_FARTHEST = 12


class Attention(NamedTuple):
    """One attention: the innermost call of a module that runs it, and its entries.

    `q`, `k` and `v` have the shape (batch, heads, tokens, size); `weights` is the softmax, which a
    fused call does not show.
    """

    call: int
    out: int
    q: int
    k: int
    v: int
    weights: int | None = None


def attentions_in(log: Log, call: int) -> list[Attention]:
    """The attentions that ran inside a call of a module; in call 0, all."""
    found = []
    for entry in range(len(log.graph.recorded)):
        row = log.row(entry)
        if call and call not in log.graph.module_chains[row.module_call]:
            continue
        if row.operation.layer_type == _FUSED:
            found.append(_fused(log, entry))
        elif row.operation.layer_type == "softmax" and len(row.shape) == 4:
            found.append(_of_softmax(log, entry))
    return [one for one in found if one is not None]


def _fused(log: Log, entry: int) -> Attention | None:
    row = log.row(entry)
    given = {location: log.graph.entry_of.get(number) for location, number in
             located(row.references)}  # fmt: skip
    read = [given.get(number, given.get(name)) for number, name in
            enumerate(("query", "key", "value"))]  # fmt: skip
    if None in read or len(row.shape) != 4:
        return None
    q, k, v = (entry for entry in read if entry is not None)
    return Attention(row.module_call, entry, q, _ungrouped(log, k), _ungrouped(log, v))


def _of_softmax(log: Log, softmax: int) -> Attention | None:
    scores = _product(log, softmax, log.graph.parents)
    out = _product(log, softmax, log.graph.children)
    if scores is None or out is None or len(log.row(out).shape) != 4:
        return None
    read = [parent for parent in _read(log, scores) if len(log.row(parent).shape) == 4]
    values = [parent for parent in _read(log, out) if not _is_above(log, softmax, parent)]
    if len(read) != 2 or len(values) != 1:
        return None
    q, k = read
    if log.row(k).operation.layer_type in ("transpose", "permute", "mT") and log.graph.parents[k]:
        k = log.graph.parents[k][0]
    call = log.row(softmax).module_call
    return Attention(call, out, q, _ungrouped(log, k), _ungrouped(log, values[0]), softmax)


def _read(log: Log, entry: int) -> list[int]:
    """The entries among an operation's arguments, in their order."""
    numbers = [number for _, number in located(log.row(entry).references)]
    return [log.graph.entry_of[number] for number in numbers if number in log.graph.entry_of]


def _is_above(log: Log, softmax: int, entry: int) -> bool:
    """True if an entry is the softmax, or made of it alone."""
    for _ in range(_FARTHEST):
        if entry == softmax:
            return True
        parents = log.graph.parents[entry]
        if not parents or log.row(entry).operation.layer_type not in _BETWEEN:
            return False
        entry = parents[0]
    return False


def _product(log: Log, start: int, ways: Sequence[Sequence[int]]) -> int | None:
    """The nearest matrix product in one direction, over operations between it and a softmax."""
    waiting, passed = [start], {start}
    for _ in range(_FARTHEST):
        following = []
        for entry in waiting:
            for other in ways[entry]:
                kind = log.row(other).operation.layer_type
                if kind in _PRODUCTS:
                    return other
                if kind in _BETWEEN and other not in passed:
                    passed.add(other)
                    following.append(other)
        waiting = following
    return None


def _ungrouped(log: Log, entry: int) -> int:
    """The keys or values before their heads were repeated for groups of queries."""
    at = entry
    for _ in range(_FARTHEST):
        row = log.row(at)
        if row.operation.layer_type not in _REPEATING or not log.graph.parents[at]:
            return entry
        at = log.graph.parents[at][0]
        shape, own = log.row(at).shape, log.row(entry).shape
        if len(shape) == 4 and shape[1] < own[1] and shape[2:] == own[2:]:
            return at
    return entry
