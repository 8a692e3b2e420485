"""What the calls of a recording cost, from the shapes that were noted; the formulas are in
`flops/`.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

from torchlens._graph.build import Graph
from torchlens._graph.flops.registry import (
    Counting,
    backward_flops,
    counting_of,
    forward_flops,
    may_be_registered,
    registered_flops,
)
from torchlens._graph.flops.shaped_call import VARYING, Location, Shape, ShapedCall
from torchlens._recording.operation_kinds import MAY_RETURN_ARGUMENT
from torchlens._recording.operations import BUFFER, INPUT, Operation
from torchlens._recording.recording import Recording, Row, located

_CHECKPOINT = "CheckpointFunctionBackward"
_PLAIN_SHAPES = frozenset({torch.Size, int, type(None)})
_NOT_COUNTED = {Counting.FREE: 0, Counting.UNKNOWN: None}
_NOT_SEEN: Any = object()


def flops_of_all(recording: Recording, rows: Iterable[Row]) -> list[int | None]:
    """`flops_of` of each row; calls that are the same, as in a loop, are looked at once."""
    known: dict[Hashable, int | None] = {}
    is_counted: dict[Operation, bool] = {}
    found = []
    for row in rows:
        operation = row.operation
        if operation not in is_counted:
            is_free = counting_of(
                operation.layer_type
            ) is not Counting.COUNTED and not may_be_registered(operation.func)
            is_counted[operation] = not is_free
        key = (
            _same_cost(recording, row)
            if is_counted[operation]
            else (operation, bool(row.output_index))
        )
        try:
            cost = known.get(key, _NOT_SEEN)
        except TypeError:  # a list among the arguments
            key, cost = None, _NOT_SEEN
        if cost is _NOT_SEEN:
            cost = flops_of(recording, row)
            if key is not None:
                known[key] = cost
        found.append(cost)
    return found


def _same_cost(recording: Recording, row: Row) -> Hashable | None:
    """What the cost of a call depends on, which may have no hash; None where that is not told at a
    glance.
    """
    references, rows = row.references, recording.rows
    if row.kwargs or type(references) is not tuple:
        return None
    given = [number for number in references if number is not None and number >= 0]
    if any(recording.storages[number] < 0 for number in given):
        return None
    shapes = [
        number if number is None or number < 0 else rows[number].shape for number in references
    ]
    # Symbolic sizes are in tuples of another type, and equal to the numbers of their example.
    if not _PLAIN_SHAPES.issuperset(map(type, (row.shape, *shapes))):
        return None
    return row.operation, row.output_index, row.args, row.shape, *shapes


def flops_of(recording: Recording, row: Row) -> int | None:
    """Floating-point operations of one call: 0 for one that is free by convention, None where they
    are not known.

    A call with several results is counted at its first.
    """
    if row.output_index:
        return 0
    operation = row.operation
    counting = counting_of(operation.layer_type)
    if counting is not Counting.COUNTED and not may_be_registered(
        operation.func
    ):  # most calls of most models
        return _NOT_COUNTED[counting]
    call = _call_of(recording, row)
    registered = registered_flops(operation.func, call)
    return forward_flops(operation.layer_type, call) if registered is None else registered


def backward_flops_of(
    recording: Recording, graph: Graph, number: int, repeated: Collection[int] = ()
) -> int | None:
    """The same for the part of row `number` in a backward pass that comes by, whether it leads to
    an output or not.

    `repeated` are the rows of calls that the backward pass makes again (see
    `repeated_in_backward`).
    """
    row = recording.rows[number]
    # What the call was given, and what was written there since.
    given = (*located(row.references), *graph.located_reads.get(number, ()))
    return 0 if row.output_index else _backward(recording, row, given, repeated)


def reached_backward_flops(
    recording: Recording,
    graph: Graph,
    entries: Iterable[int],
    is_reached: Sequence[bool],
    repeated: Collection[int],
) -> list[int | None]:
    """The same of many in a backward pass from the outputs; 0 where it does not come by
    (`reached_by_gradients`).
    """
    return [
        _reached_backward_flops(recording, graph, entry, is_reached, repeated) for entry in entries
    ]


def _reached_backward_flops(
    recording: Recording,
    graph: Graph,
    entry: int,
    is_reached: Sequence[bool],
    repeated: Collection[int],
) -> int | None:
    number = graph.recorded[entry]
    row = recording.rows[number]
    if row.output_index:
        return 0
    if row.output_index is None:
        comes_by = is_reached[entry]
    else:
        results = (graph.entry_of.get(result) for result in _results_of(recording, number))
        comes_by = any(result is not None and is_reached[result] for result in results)
    return backward_flops_of(recording, graph, number, repeated) if comes_by else 0


def _backward(
    recording: Recording,
    row: Row,
    given: Sequence[tuple[Location, int]],
    repeated: Collection[int] = (),
) -> int | None:
    counting = counting_of(row.operation.layer_type)
    if counting is not Counting.COUNTED:
        return _NOT_COUNTED[counting]
    if any(_is_trained_elsewhere(recording, source) for _, source in given):
        return None  # the shape of that factor was not noted
    wanting = {location for location, source in given if _wants_grad(recording, source, repeated)}
    return backward_flops(row.operation.layer_type, _call_of(recording, row), wanting)


def _results_of(recording: Recording, number: int) -> Iterator[int]:
    """All results of the call whose first one is `number`."""
    yield number
    rows = recording.rows
    if rows[number].output_index == 0:
        for index in range(1, len(rows) - number):
            if rows[number + index].output_index != index:
                return
            yield number + index


def reached_by_gradients(recording: Recording, graph: Graph) -> list[bool]:
    """For each entry, whether a backward pass from the outputs comes by: not past what cannot be
    differentiated.
    """
    rows = [recording.rows[number] for number in graph.recorded]
    if not recording.leaves and all(row.gradfunc is None for row in rows):
        return [False] * len(rows)
    outputs = set(graph.outputs)
    is_reached = [False] * len(rows)
    # Inside a custom autograd function, whose operations have no gradient functions of their own.
    is_inside = [False] * len(rows)
    for entry in reversed(range(len(rows))):
        children = graph.children[entry]
        if rows[entry].gradfunc is None and entry not in outputs:
            is_inside[entry] = any(
                is_inside[child] or (is_reached[child] and _ends_custom_function(rows[child]))
                for child in children
            )
        has_gradient = rows[entry].gradfunc is not None or graph.recorded[entry] in recording.leaves
        is_reached[entry] = (has_gradient and entry in outputs) or any(
            is_inside[child] or (is_reached[child] and rows[child].gradfunc is not None)
            for child in children
        )
    return is_reached


def repeated_in_backward(recording: Recording) -> frozenset[int]:
    """The rows of calls inside reentrant checkpoints: they ran without gradients, and run again
    with them in backward.
    """
    found: set[int] = set()
    pending = [number for number, row in enumerate(recording.rows) if row.gradfunc == _CHECKPOINT]
    while pending:
        for _, number in located(recording.rows[pending.pop()].references):
            row = recording.rows[number] if number >= 0 and number not in found else None
            if row is not None and row.gradfunc is None and row.operation not in (INPUT, BUFFER):
                found.add(number)
                pending.append(number)
    return frozenset(found)


def _ends_custom_function(row: Row) -> bool:
    """Whether a function written in Python gave the result its gradient function; torch numbers its
    own (`MmBackward0`).
    """
    return row.gradfunc is not None and row.gradfunc.endswith("Backward")


def _call_of(recording: Recording, row: Row) -> ShapedCall:
    shapes: dict[Location, Shape] = {}
    for location, number in located(row.references):
        if number >= 0:
            # A tensor without memory of its own is sparse or nested: what it costs is not in its
            # shape.
            is_plain = recording.storages[number] >= 0
            shapes[location] = tuple(recording.rows[number].shape) if is_plain else VARYING
        elif -1 - number < len(recording.params):
            shapes[location] = tuple(recording.params[-1 - number].shape)
    return ShapedCall(shapes, tuple(row.shape), row.args, row.kwargs)


def _is_trained_elsewhere(recording: Recording, number: int) -> bool:
    """Whether gradients are computed for a tensor that is neither the model's nor among its
    inputs.
    """
    return (
        number < -len(recording.params)
        and recording.trained is not None
        and number in recording.trained
    )


def _wants_grad(recording: Recording, number: int, repeated: Collection[int] = ()) -> bool:
    """Whether gradients are computed for an entry or parameter; of what backward does again, as it
    is then.
    """
    if number in repeated:
        sources = _sources_of_repeated(recording, number, repeated)
        return any(_wants_grad(recording, source) for source in sources)
    while number >= 0:
        row = recording.rows[number]
        if row.gradfunc is not None or number in recording.leaves:
            return True
        given = located(row.references)
        # Where it returned the very tensor it was given, that has no gradient function if it is an
        # input or a parameter.
        if row.operation.layer_type not in MAY_RETURN_ARGUMENT or not given:
            return False
        number = given[0][1]
    return -1 - number < len(recording.params) and recording.is_trained(-1 - number)


def _sources_of_repeated(
    recording: Recording, number: int, repeated: Collection[int]
) -> Iterator[int]:
    """What the repeated calls that lead to this one read, other than each other."""
    pending, seen = [number], {number}
    while pending:
        for _, source in located(recording.rows[pending.pop()].references):
            if source not in seen:
                seen.add(source)
                if source in repeated:
                    pending.append(source)
                else:
                    yield source
