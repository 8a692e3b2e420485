"""An operation while it is being measured, and what the operations of a step cost."""

from collections import Counter
from types import CodeType

from torchlens._graph.costs import backward_flops_of, flops_of
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._profile.measuring.calls import Step
from torchlens._profile.measuring.logged_session import Mark
from torchlens._recording.recording import Recording, Row


class Operation:
    """One operation of one step."""

    __slots__ = (
        "backward_seconds", "code", "flops", "flops_backward", "instruction", "layer_type", "mark",
        "memory", "num_bytes",
        "num_events", "references", "seconds", "shape", "step",
    )  # fmt: skip

    def __init__(self, step: Step, mark: Mark, recording: Recording) -> None:
        row = recording.rows[mark.first]
        self.step = step
        self.mark = mark
        self.layer_type = row.operation.layer_type
        self.shape = tuple(row.shape)
        self.num_bytes = sum(
            _num_bytes(recording.rows[number]) for number in range(mark.first, mark.last)
        )
        self.references = row.references  # what it read, as in Row
        self.seconds = row.seconds
        self.code: CodeType | None = row.code
        self.instruction = row.instruction
        self.flops: int | None = None
        self.flops_backward: int | None = None
        self.backward_seconds: float | None = None
        self.num_events = 0  # what the allocators reported meanwhile
        self.memory: tuple[int, int] | None = None


def count_flops(log: Log) -> tuple[dict[int, tuple[int | None, int | None]], dict[str, int]]:
    """FLOPs of each row, forward and backward, and how many calls of which layer type could not be
    counted.

    Those of backward are for each time that gradients go through: a loss may use what leads to no
    output of the model.
    """
    recording, graph = log.recording, log.graph
    found: dict[int, tuple[int | None, int | None]] = {}
    not_counted: Counter[str] = Counter()
    for number, row in enumerate(recording.rows):
        entry = graph.entry_of.get(number)
        forward = flops_of(recording, row)
        backward = None if forward is None else 0
        if row.gradfunc is not None:
            backward = backward_flops_of(recording, graph, number, log.repeated_in_backward)
        elif entry is not None:  # inside a checkpoint or a custom autograd function, perhaps
            backward = LayerEntry(log, entry).flops_backward
        found[number] = forward, backward
        if forward is None:
            not_counted[row.operation.layer_type] += 1
    return found, dict(not_counted)


def _num_bytes(row: Row) -> int:
    count = row.dtype.itemsize
    for size in row.shape:
        count *= max(size, 0)
    return count
