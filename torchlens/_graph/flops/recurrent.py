"""Formulas of recurrent layers and cells: each weight matrix multiplies each step of each sequence
once.
"""

from collections.abc import Iterator
from math import prod

from torchlens._graph.flops.call import Call, Formula, Location, Operand, Product


def _recurrent(call: Call) -> Iterator[Product]:
    """`lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
    batch_first)`.

    With packed sequences it is `lstm(data, batch_sizes, hx, params, has_biases, ...)`; the data has
    two dimensions then, one row for each step of each sequence.
    """
    sequence = call.locate(0, "input", "data")
    *steps, _ = call.shapes[sequence]
    is_packed = len(steps) == 1
    weights = call.inside(3 if is_packed else 2, "params")
    has_biases = bool(call.value(4 if is_packed else 3, "has_biases"))
    num_layers = call.value(5 if is_packed else 4, "num_layers")
    num_directions = 2 if call.value(8 if is_packed else 7, "bidirectional") else 1
    state = 2 if is_packed else 1
    states = call.inside(state, "hx") or [call.locate(state, "hx")]
    num_steps, num_sequences = prod(steps), call.shapes[states[0]][-2]
    per_layer = len(weights) // (num_layers * num_directions)
    everything = (sequence, *states, *weights)
    for start in range(0, len(weights), per_layer):
        into, across, *rest = weights[start : start + per_layer]
        is_first_layer = start < per_layer * num_directions
        below: Operand = (sequence,) if is_first_layer else everything
        yield _by_weight(call, into, num_steps, below)
        # The first step starts from the given state, which seldom wants a gradient.
        yield _by_weight(call, across, num_sequences, tuple(states))
        yield _by_weight(call, across, num_steps - num_sequences, everything)
        for projection in rest[2 if has_biases else 0 :]:
            yield _by_weight(call, projection, num_steps, everything)


def _by_weight(call: Call, weight: Location, num_rows: int, operand: Operand) -> Product:
    return Product(2 * num_rows * prod(call.shapes[weight]), (operand, (weight,)))


def _cell(call: Call) -> Iterator[Product]:
    """`lstm_cell(input, hx, w_ih, w_hh, b_ih, b_hh)`."""
    rows = prod(call.shape(0, "input")[:-1])
    states = call.inside(1, "hx") or [call.locate(1, "hx")]
    yield _by_weight(call, call.locate(2, "w_ih"), rows, (call.locate(0, "input"),))
    yield _by_weight(call, call.locate(3, "w_hh"), rows, tuple(states[:1]))


RECURRENT: dict[str, Formula] = {
    **dict.fromkeys(("lstm", "gru", "rnntanh", "rnnrelu"), _recurrent),
    **dict.fromkeys(("lstmcell", "grucell", "rnntanhcell", "rnnrelucell"), _cell),
}
