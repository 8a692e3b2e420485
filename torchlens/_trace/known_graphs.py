"""Graphs that were written before: a call that did what another did needs no new one.

The last ones stay for traces to come, too, where they are small and consist of nothing but plain
values: making the JSON of a graph takes as long as a small model, and a trace for each step of a
training is an ordinary thing to write.
"""

import threading
from collections import deque
from typing import Any, NamedTuple

import torch

from torchlens._recording.recording import Recording, Row
from torchlens._trace.document import is_told, renumbered

_FEW = 8  # graphs that stay
_FEW_ROWS = 1000  # of a graph that stays
_Parameter = torch.nn.Parameter


class KnownGraph(NamedTuple):
    """A graph that was written: the first call that had it, what its rows are called in each, and
    its JSON.
    """

    recording: Recording  # without values and parameters
    params: list[tuple[Any, ...]]  # what the JSON says of them
    names: list[str]
    text: bytes


_kept: deque[KnownGraph] = deque(maxlen=_FEW)
_lock = threading.Lock()


def known_graph_of(recording: Recording, names: list[str], text: bytes) -> KnownGraph:
    kept = Recording(**{
        **{name: getattr(recording, name) for name in recording.__slots__},
        "values": [], "versions": [], "saved_args": {}, "gradients": {}, "slices": [],
        "param_stand_ins": [], "params": [],
    })  # fmt: skip
    return KnownGraph(kept, _params_of(recording), names, text)


def remember(known: KnownGraph) -> None:
    """Keeps a graph for other traces, unless it would keep more alive than itself."""
    recording = known.recording
    if len(recording.rows) > _FEW_ROWS or recording.branches or recording.failure is not None:
        return
    paths = [path for path, _ in (*recording.inputs, *recording.outputs)]
    if is_told(paths) and all(is_told(row.args) and is_told(row.kwargs) for row in recording.rows):
        with _lock:
            _kept.append(known)


def remembered(recording: Recording) -> KnownGraph | None:
    """The graph of another trace that is this call's, too."""
    if len(recording.rows) > _FEW_ROWS:
        return None
    with _lock:
        graphs = list(reversed(_kept))
    return next((known for known in graphs if is_same_graph(known, recording)), None)


_SAME = (
    "model_name", "module_calls", "inputs", "outputs", "buffers", "module_entries", "module_exits",
    "booleans", "reads",
    "returns_data", "received", "sent", "leaves", "branches", "param_addresses", "module_params",
    "module_classes",
    "joint_params", "framework",
)  # fmt: skip


def is_same_graph(known: KnownGraph, other: Recording) -> bool:
    """Whether a call did the very same as the one that the graph was made of."""
    one = known.recording
    if len(one.rows) != len(other.rows) or one.failure is not None or other.failure is not None:
        return False
    try:
        if any(getattr(one, name) != getattr(other, name) for name in _SAME):
            return False
        if known.params != _params_of(other) or not _is_same_memory(one, other):
            return False
        if one.rows is other.rows:  # of one compiled program
            return True
        return all(map(_is_same_row, one.rows, other.rows)) and all(
            a.code is b.code for a, b in zip(one.module_calls, other.module_calls, strict=True)
        )
    except Exception:  # an argument that is not to be compared, such as an array
        return False


def _is_same_row(a: Row, b: Row) -> bool:
    # 1 and True are equal, and so are two pieces of code at one line of different files.
    is_same = a.code is b.code and list(map(type, a.args)) == list(map(type, b.args))
    return is_same and a[:7] == b[:7] and a[8:] == b[8:]


def _is_same_memory(one: Recording, other: Recording) -> bool:
    """Whether writes mean the same. What is given to a model may share memory in one call and not
    in another.
    """
    return _memory_of(one) == _memory_of(other) if one.writes or other.writes else True


def _memory_of(recording: Recording) -> Any:
    """What looks at which memory, and what writes there: wherever that memory is, and wherever in
    it they begin.
    """
    writes = recording.writes
    numbers = renumbered(
        [*recording.storages, *recording.outside_storages, *(write.storage for write in writes)]
    )
    looks = [
        (numbers[entry], region)
        for entry, region in recording.regions.items()
        if entry < len(recording.storages)
    ]
    looks += zip(
        numbers[len(numbers) - len(writes) :], (write.region for write in writes), strict=True
    )
    starts: dict[int, int] = {}
    for number, region in looks:
        starts[number] = min(starts.get(number, region.start), region.start)
    places = [(number, region.start - starts[number], *region[1:]) for number, region in looks]
    return numbers, list(recording.regions), [write.entry for write in writes], places


def _params_of(recording: Recording) -> list[tuple[Any, ...]]:
    return [
        (
            param.dtype,
            param.shape if type(param) is _Parameter else _shape_of(param),
            param.requires_grad,
        )
        for param in recording.params
    ]


def _shape_of(param: torch.nn.Parameter) -> Any:
    return None if isinstance(param, torch.nn.UninitializedParameter) else param.shape
