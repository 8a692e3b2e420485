"""Which module call each run of a backward node belongs to."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from torchlens.capture.backward import NodeRun
from torchlens.profiling.measuring.allocators import Timeline
from torchlens.profiling.measuring.calls import Call, Span

__all__ = ["Overheads", "Owners", "charge", "extend", "memory_of", "merged_seconds"]


class Owners:
    """Sequence number of a node → the innermost module call that made it.

    Nodes are numbered as they are made, so it is enough to know who was running from which number on.
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


class Overheads:
    """Spans of time that the profile took for itself, in order, by both clocks."""

    def __init__(self) -> None:
        self._spans_ns: list[tuple[int, int]] = []
        self._ends: list[float] = []
        self._sums = [0.0]

    def add(self, start: float, end: float, start_ns: int, end_ns: int) -> None:
        """A span has ended."""
        self._spans_ns.append((start_ns, end_ns))
        self._ends.append(end)
        self._sums.append(self._sums[-1] + end - start)

    def add_outside(self, start_ns: int, end_ns: int) -> None:
        """A span that lies outside all that is timed has ended: it matters for memory alone."""
        self._spans_ns.append((start_ns, end_ns))

    def take_spans(self) -> list[tuple[int, int]]:
        """The spans since the last time, by `time_ns`."""
        taken, self._spans_ns = self._spans_ns, []
        return sorted(taken)

    def within(self, span: Span) -> float:
        """The seconds of overhead in a span."""
        return self._sums[bisect_right(self._ends, span.end)] - self._sums[bisect_left(self._ends, span.start)]


def charge(runs: Sequence[NodeRun], owners: Owners, parameter_calls: dict[int, Call]) -> list[tuple[NodeRun, Call, float]]:
    """For each run of a node that belongs to a module call: the call, and the seconds without other runs inside it.

    `parameter_calls` has the call to which the run that adds to the gradient of a parameter (its id) belongs; without
    one it belongs with the node that ran before it, which made the last of the gradients that are added.
    """
    found = []
    before: Call | None = None
    open_runs: list[NodeRun] = []
    for run in runs:
        inside = 0.0
        while open_runs and open_runs[-1].start >= run.start:
            inner = open_runs.pop()
            inside += inner.end - inner.start
        open_runs.append(run)
        if run.sequence >= 0:
            call = owners.of(run.sequence)
            before = call
        else:
            call = parameter_calls.get(run.parameter or 0, before)
        if call is not None:
            found.append((run, call, max(run.end - run.start - inside, 0.0)))
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


def merged_seconds(spans: Sequence[Span], overheads: Overheads) -> float | None:
    """The seconds of several spans, overlapping ones counted once, without overheads; None if there are none."""
    if not spans:
        return None
    whole = merged(spans)
    return max(sum(span.end - span.start - overheads.within(span) for span in whole), 0.0)


def memory_of(spans: Sequence[Span], timeline: Timeline) -> tuple[int, int] | None:
    """Peak and what remained over several spans; None if one was not listened to."""
    found = [timeline.between(span.start_ns, span.end_ns) for span in merged(spans)]
    known = [memory for memory in found if memory is not None]
    return (
        (max(peak for peak, _ in known), sum(added for _, added in known)) if known and len(known) == len(found) else None
    )
