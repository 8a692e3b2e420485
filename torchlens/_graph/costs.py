"""The FLOPs of the calls of a recording, computed from the recorded shapes; the formulas are in
`flops/`.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchlens._graph.build import Graph
from torchlens._graph.edges import find_edges
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
# What an entry sends to the entries that it reads in a backward pass. Inside a custom autograd
# function, entries have no gradient functions of their own.
_NOTHING, _GRADIENT, _INSIDE = range(3)


def flops_of_all(recording: Recording, rows: Iterable[Row]) -> list[int | None]:
    """`flops_of` of each row, computed once for equal calls, as in a loop."""
    known: dict[Hashable, int | None] = {}
    uncounted: dict[Operation, bool] = {}
    found = []
    for row in rows:
        operation = row.operation
        if operation not in uncounted:
            uncounted[operation] = _is_uncounted(operation)
        is_later = bool(row.output_index)
        key = (operation, is_later) if uncounted[operation] else _same_cost(recording, row)
        try:
            cost = known[key] if key is not None else flops_of(recording, row)
        except KeyError:
            cost = known[key] = flops_of(recording, row)
        except TypeError:  # a list among the arguments has no hash
            cost = flops_of(recording, row)
        found.append(cost)
    return found


def _is_uncounted(operation: Operation) -> bool:
    """Whether neither torchlens nor torch has a formula for an operation."""
    counting = counting_of(operation.layer_type)
    return counting is not Counting.COUNTED and not may_be_registered(operation.func)


def _same_cost(recording: Recording, row: Row) -> Hashable | None:
    """A key that is equal for calls of equal cost; None if the call is too irregular for one.

    It has no hash if there is a list among the arguments.
    """
    references, rows, storages = row.references, recording.rows, recording.storages
    if row.kwargs or type(references) is not tuple:
        return None
    shapes: list[Any] = [row.shape]
    for number in references:
        if number is None or number < 0:
            shapes.append(number)
        elif storages[number] < 0:  # sparse or nested
            return None
        else:
            shapes.append(rows[number].shape)
    # Symbolic sizes are in tuples of another type, and equal to the numbers of their example.
    if not _PLAIN_SHAPES.issuperset(map(type, shapes)):
        return None
    return row.operation, row.output_index, row.args, *shapes


def flops_of(recording: Recording, row: Row) -> int | None:
    """Floating-point operations of one call: 0 if free by convention, None if not known.

    A call with several results is counted at the first of them.
    """
    if row.output_index:
        return 0
    operation = row.operation
    if _is_uncounted(operation):
        return _NOT_COUNTED[counting_of(operation.layer_type)]
    call = _call_of(recording, row)
    registered = registered_flops(operation.func, call)
    return forward_flops(operation.layer_type, call) if registered is None else registered


def flops_of_rows(recording: Recording) -> list[tuple[int | None, int | None]]:
    """FLOPs of each row: forward, and in a backward pass that reaches it; no graph is built.

    Rows without a backward node have none in backward, unless they ran inside a reentrant
    checkpoint or a custom autograd function, whose backward may call them again.
    """
    reads = find_edges(recording).located_reads if recording.writes else {}
    repeated, inside = repeated_in_backward(recording), _inside_custom_functions(recording)
    found = []
    for number, forward in enumerate(flops_of_all(recording, recording.rows)):
        backward = None if forward is None else 0
        if recording.rows[number].gradfunc is not None or not inside.isdisjoint(
            _results_of(recording, number)
        ):
            backward = _backward_flops_of(recording, reads, number, repeated)
        found.append((forward, backward))
    return found


def _backward_flops_of(
    recording: Recording,
    located_reads: Mapping[int, Sequence[tuple[Location, int]]],
    number: int,
    repeated: Collection[int],
) -> int | None:
    """Floating-point operations of row `number` in a backward pass that reaches it.

    `located_reads` are those of the edges: what was written to the arguments' memory since.
    `repeated` are the rows of calls that the backward pass makes again (`repeated_in_backward`).
    """
    row = recording.rows[number]
    given = (*located(row.references), *located_reads.get(number, ()))
    return 0 if row.output_index else _backward(recording, row, given, repeated)


def reached_backward_flops(
    recording: Recording,
    graph: Graph,
    entries: Iterable[int],
    is_reached: Sequence[bool],
    repeated: Collection[int],
) -> list[int | None]:
    """FLOPs of entries in a backward pass from the outputs; 0 for those that it does not reach
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
        is_any_reached = is_reached[entry]
    else:
        results = (graph.entry_of.get(result) for result in _results_of(recording, number))
        is_any_reached = any(result is not None and is_reached[result] for result in results)
    if not is_any_reached:
        return 0
    return _backward_flops_of(recording, graph.located_reads, number, repeated)


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
        return None  # the shape of that factor was not recorded
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
    """For each entry, whether a backward pass from the outputs reaches it: not past what cannot be
    differentiated.
    """
    outputs = set(graph.outputs)
    is_reached = [False] * len(graph.recorded)
    sends = [_NOTHING] * len(graph.recorded)  # what each entry sends to the entries that it reads
    for entry in reversed(range(len(graph.recorded))):
        number = graph.recorded[entry]
        gradfunc = recording.rows[number].gradfunc
        has_node = gradfunc is not None or number in recording.leaves
        received = max(map(sends.__getitem__, graph.children[entry]), default=_NOTHING)
        if entry in outputs:
            is_reached[entry] = has_node or received > _NOTHING
        else:
            # What ran under no_grad has no node, and receives nothing.
            is_reached[entry] = received > (_NOTHING if has_node else _GRADIENT)
            if gradfunc is None and received == _INSIDE:
                sends[entry] = _INSIDE
        if is_reached[entry] and gradfunc is not None:
            sends[entry] = _INSIDE if _is_of_custom_function(gradfunc) else _GRADIENT
    return is_reached


def repeated_in_backward(recording: Recording) -> frozenset[int]:
    """The rows of calls inside reentrant checkpoints: they run without gradients in the forward
    pass, and again, with gradients, in the backward pass.
    """
    return _rows_without_nodes(recording, lambda gradfunc: gradfunc == _CHECKPOINT)


def _inside_custom_functions(recording: Recording) -> frozenset[int]:
    """The rows of calls inside custom autograd functions, to which reentrant checkpoints belong."""
    return _rows_without_nodes(recording, _is_of_custom_function)


def _rows_without_nodes(recording: Recording, is_function: Callable[[str], bool]) -> frozenset[int]:
    """The rows that lead to the result of such a function and have no backward node themselves."""
    found: set[int] = set()
    pending = [row for row in recording.rows if row.gradfunc and is_function(row.gradfunc)]
    while pending:
        for _, number in located(pending.pop().references):
            if number < 0 or number in found:
                continue
            row = recording.rows[number]
            if row.gradfunc is None and row.operation not in (INPUT, BUFFER):
                found.add(number)
                pending.append(row)
    return frozenset(found)


def _is_of_custom_function(gradfunc: str) -> bool:
    """Whether it is the node of a `torch.autograd.Function`; the names of torch's own nodes end in
    a number (`MmBackward0`).
    """
    return gradfunc.endswith("Backward")


def _call_of(recording: Recording, row: Row) -> ShapedCall:
    shapes: dict[Location, Shape] = {}
    for location, number in located(row.references):
        if number >= 0:
            # A tensor without a storage is sparse or nested: its shape does not tell its cost.
            is_plain = recording.storages[number] >= 0
            shapes[location] = tuple(recording.rows[number].shape) if is_plain else VARYING
        elif -1 - number < len(recording.params):
            shapes[location] = tuple(recording.params[-1 - number].shape)
    return ShapedCall(shapes, tuple(row.shape), row.args, row.kwargs)


def _is_trained_elsewhere(recording: Recording, number: int) -> bool:
    """Whether gradients are computed for a tensor that belongs neither to the model nor to its
    inputs.
    """
    return (
        number < -len(recording.params)
        and recording.trained is not None
        and number in recording.trained
    )


def _wants_grad(recording: Recording, number: int, repeated: Collection[int] = ()) -> bool:
    """Whether gradients are computed for an entry or parameter; for a repeated call, whether they
    are when it is made again.
    """
    if number in repeated:
        sources = _sources_of_repeated(recording, number, repeated)
        return any(_wants_grad(recording, source) for source in sources)
    while number >= 0:
        row = recording.rows[number]
        if row.gradfunc is not None or number in recording.leaves:
            return True
        given = located(row.references)
        # A call that returned its argument has no gradient function if that is a leaf.
        if row.operation.layer_type not in MAY_RETURN_ARGUMENT or not given:
            return False
        number = given[0][1]
    return -1 - number < len(recording.params) and recording.is_trained(-1 - number)


def _sources_of_repeated(
    recording: Recording, number: int, repeated: Collection[int]
) -> Iterator[int]:
    """The entries and parameters that the repeated calls leading to this one read from outside."""
    pending, seen = [number], {number}
    while pending:
        for _, source in located(recording.rows[pending.pop()].references):
            if source not in seen:
                seen.add(source)
                if source in repeated:
                    pending.append(source)
                else:
                    yield source
