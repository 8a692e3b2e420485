"""The attention that a key means: of an operation, or the only one in a module."""

from torchlens._attention.attention import (
    Attention,
    attention_of,
    call_meant,
    calls_of_attention,
)
from torchlens._capture.selection import first_address
from torchlens._history.log import Log
from torchlens._history.lookup import Lookup
from torchlens._text.error_wording import got


def chosen_attention(
    log: Log, lookup: Lookup, key: int | str, head: int | None = None
) -> Attention:
    """The attention that a key means, of all heads or of one."""
    if not isinstance(key, int | str):
        raise TypeError(f"The key of an attention must be a name or a number, got {got(key)}.")
    inside = _in_module(log, key) if isinstance(key, str) else None
    found = [call_meant(log, lookup.one(key))] if inside is None else [*inside]
    calls = [entry for entry in found if entry is not None]
    if not calls:
        raise ValueError(
            f"There is no attention in {key!r}: neither scaled_dot_product_attention or another "
            "fused kernel, nor a softmax whose result multiplies values."
        )
    if len(calls) > 1:
        labels = log.labels(calls)
        shown = labels if len(labels) < 9 else [*labels[:8], "..."]
        raise KeyError(f"{key!r} has {len(calls)} attentions; say which: {', '.join(shown)}.")
    return one_head(attention_of(log, calls[0]), head)


def entry_attention(log: Log, entry: int, head: int | None = None) -> Attention:
    """The attention of an operation: a fused kernel, a softmax, or a product with its result."""
    call = call_meant(log, entry)
    if call is None:
        raise ValueError(
            f"{log.label(entry)!r} is no attention: neither scaled_dot_product_attention or "
            "another fused kernel, nor a softmax whose result multiplies values, nor that product. "
            "history.attention(module) finds the one in a module."
        )
    return one_head(attention_of(log, call), head)


def one_head(found: Attention, head: int | None) -> Attention:
    """One head of an attention, or all of it."""
    return found if head is None else found.head(head)


def _in_module(log: Log, key: str) -> list[int] | None:
    """The attentions computed in the calls of a module, or in one call (`layers.3:2`); None if the
    key is no module.
    """
    name = first_address(key, log.recording.module_aliases)
    calls = {
        call
        for call, (address, label) in enumerate(
            zip(log.module_call_addresses, log.module_names, strict=True)
        )
        if call and name in (address, label)
    }
    if not calls:
        return None
    chains = log.graph.module_chains
    around = {call for call, chain in enumerate(chains) if not calls.isdisjoint(chain)}
    entries = range(len(log.graph.recorded))
    return calls_of_attention(
        log, [entry for entry in entries if log.row(entry).module_call in around]
    )
