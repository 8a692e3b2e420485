"""Formulas of attention, as one call or with the layers around it, and of recurrent layers."""

from collections.abc import Iterator
from math import prod

from torchlens._graph.flops.shaped_call import (
    Formula,
    Location,
    Operand,
    Product,
    ShapedCall,
    matrix_product,
)


def _attention(call: ShapedCall) -> Iterator[Product]:
    """Queries by keys, then the weights by values. A mask, causal or not, leaves nothing out."""
    query, key, value = call.locate(0, "query"), call.locate(1, "key"), call.locate(2, "value")
    num_keys, width = call.shapes[key][-2:]
    num_queries = prod(call.output[:-1])  # over batch and heads, of which the keys may have fewer
    yield matrix_product((num_queries, num_keys), width, (query,), (key,))
    yield matrix_product((num_queries, call.shapes[value][-1]), num_keys, (query, key), (value,))


def _self_attention(
    call: ShapedCall,
    source: Operand,
    tokens: tuple[int, int],
    weight: Location,
    projection: Location,
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


def _multi_head_attention(call: ShapedCall) -> Iterator[Product]:
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


def _encoder_layer(call: ShapedCall) -> Iterator[Product]:
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


# -- recurrent: each weight matrix multiplies each step of each sequence once ----------------------


def _recurrent(call: ShapedCall) -> Iterator[Product]:
    """`lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
    batch_first)`.

    With packed sequences it is `lstm(data, batch_sizes, hx, params, has_biases, ...)`; then the
    data has two dimensions, one row for each step of each sequence.
    """
    sequence = call.locate(0, "input", "data")
    *steps, _ = call.shapes[sequence]
    shift = len(steps) == 1  # by how many places the other arguments are further on
    states = call.inside(1 + shift, "hx") or [call.locate(1 + shift, "hx")]
    weights = call.inside(2 + shift, "params")
    has_biases = bool(call.value(3 + shift, "has_biases"))
    num_layers = call.value(4 + shift, "num_layers")
    num_directions = 2 if call.value(7 + shift, "bidirectional") else 1
    num_steps, num_sequences = prod(steps), call.shapes[states[0]][-2]
    per_layer = len(weights) // (num_layers * num_directions)
    everything = (sequence, *states, *weights)
    for start in range(0, len(weights), per_layer):
        into, across, *rest = weights[start : start + per_layer]
        is_first_layer = start < per_layer * num_directions
        below: Operand = (sequence,) if is_first_layer else everything
        yield _by_weight(call, into, num_steps, below)
        # The first step starts from the given state, which rarely requires a gradient.
        yield _by_weight(call, across, num_sequences, tuple(states))
        yield _by_weight(call, across, num_steps - num_sequences, everything)
        for projection in rest[2 if has_biases else 0 :]:
            yield _by_weight(call, projection, num_steps, everything)


def _by_weight(call: ShapedCall, weight: Location, num_rows: int, operand: Operand) -> Product:
    return Product(2 * num_rows * prod(call.shapes[weight]), (operand, (weight,)))


def _cell(call: ShapedCall) -> Iterator[Product]:
    """`lstm_cell(input, hx, w_ih, w_hh, b_ih, b_hh)`."""
    given = call.locate(0, "input")
    rows = prod(call.shapes[given][:-1])
    states = call.inside(1, "hx") or [call.locate(1, "hx")]
    yield _by_weight(call, call.locate(2, "w_ih"), rows, (given,))
    yield _by_weight(call, call.locate(3, "w_hh"), rows, tuple(states[:1]))


NETWORK_LAYERS: dict[str, Formula] = {
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
    **dict.fromkeys(("lstm", "gru", "rnntanh", "rnnrelu"), _recurrent),
    **dict.fromkeys(("lstmcell", "grucell", "rnntanhcell", "rnnrelucell"), _cell),
}  # fmt: skip
