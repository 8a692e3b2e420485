"""The attention of models that compute it in steps: a softmax whose result multiplies values."""

import torch

from torchlens._attention.fused import Rebuilt
from torchlens._history.attention_parts import (
    HANDED_ON,
    operands,
    scores_before,
    way_back,
    weights_and_value,
)
from torchlens._history.log import Log
from torchlens._recording.operation_kinds import DROPOUTS
from torchlens._replay.call_arguments import call_arguments
from torchlens._replay.replay import call_again

Tensor = torch.Tensor


def eager_attention(log: Log, product: int, softmax: int) -> Rebuilt:
    """The attention that a product applies; its result is the product computed again."""
    used, value = weights_and_value(log, product, softmax)
    scores = scores_before(log, softmax)
    # The equation of an einsum may have the axes in any order.
    is_plain = scores is not None and log.row(scores).operation.layer_type != "einsum"
    sources = operands(log, scores)[-2:] if scores is not None and is_plain else []
    arguments = call_arguments(log, product, (product, softmax, used, value, *sources))
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
    for at in way_back(log, used, HANDED_ON):
        given = log.graph.parents[at][:1]
        is_dropout = log.row(at).operation.layer_type in DROPOUTS
        is_known = is_dropout and given and log.is_saved(given[0])
        if is_known and not torch.equal(log.value(at), log.value(given[0])):
            raise ValueError(f"dropout was active ({log.label(at)}). Log the model in eval mode")


def _query_and_key(log: Log, sources: list[int]) -> tuple[Tensor | None, Tensor | None]:
    """The operands of the scores, as (..., tokens, channels)."""
    if len(sources) != 2:
        return None, None
    query, key = (log.value(source).detach() for source in sources)
    return query, key.mT
