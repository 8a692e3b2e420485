"""The attention of models that compute it in steps: a softmax whose result multiplies values."""

from collections.abc import Iterator

import torch

from torchlens._attention.fused import Rebuilt
from torchlens._history.log import Log
from torchlens._recording.operation_kinds import DROPOUTS
from torchlens._recording.recording import located
from torchlens._replay.call_arguments import call_arguments
from torchlens._replay.replay import call_again

Tensor = torch.Tensor
_SOFTMAX = {"softmax", "safesoftmax"}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "mm"}
# What may happen to weights before they multiply the values.
_HANDED_ON = DROPOUTS | {
    *("to", "typeas", "type", "float", "half", "bfloat16", "clone", "contiguous", "identity"),
    *("view", "reshape", "expand", "unsqueeze", "squeeze", "flatten", "getitem", "maskedfill"),
    *("nantonum", "transpose", "permute", "where"),
}
# What may happen to scores before the softmax.
_SCORING = _HANDED_ON | {"truediv", "div", "mul", "imul", "itruediv", "add", "iadd", "radd", "sub"}
_SCORING |= {"tanh", "clamp", "rmul"}
_MOST_STEPS = 12


def product_after(log: Log, softmax: int) -> int | None:
    """The product of a softmax's result with values; None if there is none."""
    at = softmax
    if _kind(log, softmax) not in _SOFTMAX:
        return None
    for _ in range(_MOST_STEPS):
        readers = log.graph.children[at]
        product = next((one for one in readers if _kind(log, one) in PRODUCTS), None)
        if product is not None:
            return product if len(_operands(log, product)) == 2 else None
        onward = [one for one in readers if _kind(log, one) in _HANDED_ON]
        if not onward:
            return None
        at = onward[0]
    return None


def softmax_before(log: Log, product: int) -> int | None:
    """The softmax that gave the weights of a product; None if there is none."""
    if _kind(log, product) not in PRODUCTS:
        return None
    for operand in _operands(log, product):
        for at in _back(log, operand, _HANDED_ON):
            if _kind(log, at) in _SOFTMAX and product_after(log, at) == product:
                return at
    return None


def eager_attention(log: Log, product: int, softmax: int) -> Rebuilt:
    """The attention that a product applies; its result is the product computed again."""
    operands = _operands(log, product)
    used, value = operands
    if softmax not in _back(log, used, _HANDED_ON):
        used, value = value, used
    products = (at for at in _back(log, softmax, _SCORING) if _kind(log, at) in PRODUCTS)
    scores = next(products, None)
    # The equation of an einsum may have the axes in any order.
    is_plain = scores is not None and _kind(log, scores) != "einsum"
    sources = _operands(log, scores)[-2:] if scores is not None and is_plain else []
    arguments = call_arguments(log, product, (product, softmax, *operands, *sources))
    _check_dropout(log, used)
    row = log.row(product)
    args, kwargs = list(arguments.values())[: len(row.args)], row.kwargs or {}
    named = {name: arguments[name] for name in kwargs}
    result = call_again(row.operation.func, args, named)[0].detach()
    query, key = _query_and_key(log, sources)
    weights, values = log.value(used).detach(), log.value(value).detach()
    return Rebuilt(weights, query, key, values, result, result.abs().amax().expand_as(result))


def _check_dropout(log: Log, used: int) -> None:
    """Raises if a dropout changed the weights on their way to the values."""
    for at in _back(log, used, _HANDED_ON):
        given = log.graph.parents[at][:1]
        is_known = _kind(log, at) in DROPOUTS and given and log.is_saved(given[0])
        if is_known and not torch.equal(log.value(at), log.value(given[0])):
            raise ValueError(f"dropout was active ({log.label(at)}). Log the model in eval mode")


def _query_and_key(log: Log, sources: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """The operands of the scores, as (..., tokens, channels)."""
    if len(sources) != 2:
        return None, None
    query, key = (log.value(source).detach() for source in sources)
    return query, key.mT


def _back(log: Log, start: int, kinds: set[str] | frozenset[str]) -> Iterator[int]:
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


def _operands(log: Log, product: int) -> list[int]:
    """The entries that a product multiplies, in their order."""
    entry_of = log.graph.entry_of
    numbers = [number for _, number in located(log.row(product).references)]
    return [entry_of[number] for number in numbers if number in entry_of]


def _kind(log: Log, entry: int) -> str:
    return log.row(entry).operation.layer_type
