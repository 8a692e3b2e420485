"""Which module call each run of a backward node belongs to."""

from bisect import bisect_right
from collections.abc import Sequence

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._profile.measuring.allocators import Timeline
from torchlens._profile.measuring.calls import Call, Span


class Owners:
    """Sequence number of a node → the innermost module call that made it.

    Nodes are numbered as they are made, so it is enough to know who was running from which number
    on.
    """

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._calls: list[Call | None] = []

    def enter(self, sequence: int, call: Call | None) -> None:
        """From `sequence` on, nodes are made by `call`."""
        self._sequences.append(sequence)
        self._calls.append(call)

    def of(self, sequence: int) -> Call | None:
        """Who made a node; None for what was made outside the model."""
        position = bisect_right(self._sequences, sequence) - 1
        return self._calls[position] if position >= 0 else None


def charge(
    runs: Sequence[NodeRun], owners: Owners, parameter_calls: dict[int, Call]
) -> list[tuple[NodeRun, Call, float]]:
    """For each run of a node that belongs to a module call: the call, and the seconds that are
    charged to it.

    Those are the seconds since the node before it ended, in the same backward pass: what autograd
    does in between it does for the node that is next. So they add up to the time of the pass,
    without what was spent on looking and without other passes that ran meanwhile.

    `parameter_calls` has the call to which the run that adds to the gradient of a parameter (its
    id) belongs; without one it belongs with the node that ran before it, which made the last of the
    gradients that are added.
    """
    found = []
    before: Call | None = None
    last_of_task: dict[int, NodeRun] = {}
    inner: list[
        tuple[float, float]
    ] = []  # begin and seconds of what has run and may lie inside what is still running
    for run in runs:
        last = last_of_task.get(run.task)
        begin, own = (run.start, run.own_start) if last is None else (last.end, last.own_end)
        last_of_task[run.task] = run
        seconds = max(run.end - begin - (run.own_end - own), 0.0)
        inside = 0.0
        while inner and inner[-1][0] >= begin:
            inside += inner.pop()[1]
        inner.append((begin, seconds))
        if run.sequence >= 0:
            call = owners.of(run.sequence)
            before = call
        else:
            call = parameter_calls.get(run.parameter or 0, before)
        if call is not None:
            found.append((run, call, max(seconds - inside, 0.0)))
    return found


def extend(spans: dict[int, Span], run: NodeRun) -> None:
    """Makes the span of the backward pass of a run hold the run."""
    span = spans.get(run.task)
    if span is None:
        spans[run.task] = Span(run.start, run.end, run.start_ns, run.end_ns)
        return
    if run.start < span.start:
        span.start, span.start_ns = run.start, run.start_ns
    if run.end > span.end:
        span.end, span.end_ns = run.end, run.end_ns


def merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in order, those that overlap made one: a backward pass may run inside another."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1].end:
            if span.end > found[-1].end:
                found[-1].end, found[-1].end_ns = span.end, span.end_ns
        else:
            found.append(Span(span.start, span.end, span.start_ns, span.end_ns))
    return found


def memory_of(spans: Sequence[Span], timeline: Timeline) -> tuple[int, int] | None:
    """Peak and what remained over several spans; None if one was not listened to."""
    found = [timeline.between(span.start_ns, span.end_ns) for span in merged(spans)]
    known = [memory for memory in found if memory is not None]
    return (
        (max(peak for peak, _ in known), sum(added for _, added in known))
        if known and len(known) == len(found)
        else None
    )
