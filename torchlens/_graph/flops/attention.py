"""Formulas of attention, as one call or with the layers around it."""

from collections.abc import Iterator
from math import prod

from torchlens._graph.flops.call import Call, Formula, Location, Operand, Product, matrix_product


def _attention(call: Call) -> Iterator[Product]:
    """Queries by keys, then the weights by values. A mask, causal or not, leaves nothing out."""
    query, key, value = call.locate(0, "query"), call.locate(1, "key"), call.locate(2, "value")
    num_keys, width = call.shapes[key][-2:]
    num_queries = prod(call.output[:-1])  # over batch and heads, of which the keys may have fewer
    yield matrix_product((num_queries, num_keys), width, (query,), (key,))
    yield matrix_product((num_queries, call.shapes[value][-1]), num_keys, (query, key), (value,))


def _self_attention(
    call: Call, source: Operand, tokens: tuple[int, int], weight: Location, projection: Location
) -> Iterator[Product]:
    """The projections to queries, keys and values as one, attention, and the projection of what
    comes out.
    """
    batch, length = tokens
    width = call.shapes[weight][-1]
    seen = (*source, weight)
    yield matrix_product((batch, length, 3 * width), width, source, (weight,))
    yield matrix_product((batch, length, length), width, seen, seen)
    yield matrix_product((batch, length, width), length, seen, seen)
    yield matrix_product((batch, length, width), width, seen, (projection,))


def _multi_head_attention(call: Call) -> Iterator[Product]:
    """`_native_multi_head_attention(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias,
    proj_weight, ...)`.
    """
    query, key = call.locate(0, "query"), call.locate(1, "key")
    if call.shapes[query] != call.shapes[key]:
        raise ValueError("the fast path is for self-attention")
    batch, length, _ = call.shapes[query]
    yield from _self_attention(
        call, (query,), (batch, length), call.locate(5, "qkv_weight"), call.locate(7, "proj_weight")
    )


def _encoder_layer(call: Call) -> Iterator[Product]:
    """`_transformer_encoder_layer_fwd`: self-attention, then two linear layers."""
    source = call.locate(0, "src")
    batch, length, width = call.shapes[source]
    weight, projection = call.locate(3, "qkv_weight"), call.locate(5, "proj_weight")
    yield from _self_attention(call, (source,), (batch, length), weight, projection)
    first, second = call.locate(14, "ffn_weight_1"), call.locate(16, "ffn_weight_2")
    hidden = call.shapes[first][0]
    seen = (source, weight, projection)
    yield matrix_product((batch, length, hidden), width, seen, (first,))
    yield matrix_product((batch, length, width), hidden, (*seen, first), (second,))


ATTENTION: dict[str, Formula] = {
    **dict.fromkeys(
        (
            "scaleddotproductattention", "scaleddotproductattentionmath",
            "scaleddotproductflashattention",
            "scaleddotproductflashattentionforcpu", "scaleddotproductefficientattention",
            "scaleddotproductcudnnattention", "scaleddotproductfusedattentionoverrideable",
            "flexattention",
        ),
        _attention,
    ),
    "nativemultiheadattention": _multi_head_attention,
    "transformerencoderlayerfwd": _encoder_layer,
}  # fmt: skip
