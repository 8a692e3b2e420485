"""When a step is over, gives each call its share of what ran backward and of what was allocated."""

from collections.abc import Iterator, Sequence

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._profile.allocators import Memory, Timeline
from torchlens._profile.ledger import Ledger, MeasuredCall, MeasuredStep, PassSpan


def charge_step(
    ledger: Ledger,
    step: MeasuredStep,
    runs: Sequence[NodeRun],
    timeline: Timeline | None,
    first_call: int,
) -> None:
    """`runs` are the backward nodes that ran during the step, possibly for earlier steps; the calls
    of the step are those from `first_call` on. Without a timeline, memory was not measured.
    """
    touched: dict[int, MeasuredCall] = {}
    for run, maker, seconds in _charges(ledger, step, of_measured_steps(runs)):
        call = maker.original or maker
        call.backward_self = (call.backward_self or 0.0) + seconds
        call.step.backward_tasks.add(run.task)
        around: MeasuredCall | None = call
        while around is not None:
            _extend(around.spans, run)
            touched[around.index] = around
            around = around.parent
    for run in runs:
        _note_arrival(ledger, run)
    if timeline is not None:
        _charge_memory(ledger, step, timeline, first_call)
        passes = {run.task for run in runs}
        for call in touched.values():
            own = [span for task, span in call.spans.items() if task in passes]
            _add_backward_memory(call, own, timeline)


def of_measured_steps(runs: Sequence[NodeRun]) -> list[NodeRun]:
    """The runs of backward passes through steps that were measured.

    Other passes are seen only where they give gradients to parameters, because all passes share the
    nodes that do so.
    """
    tasks = {run.task for run in runs if run.parameter is None}
    return [run for run in runs if run.task in tasks]


def _charges(
    ledger: Ledger, step: MeasuredStep, runs: Sequence[NodeRun]
) -> Iterator[tuple[NodeRun, MeasuredCall, float]]:
    """For each run of a node that belongs to a module call: the call, and the seconds charged to
    it.

    These are the seconds since the node before it ended, in the same backward pass, because what
    autograd does in between it does for the next node. So they add up to the time of the pass,
    without the time of the profile's own hooks and without other passes that ran meanwhile.

    A node that adds to the gradient of a parameter belongs to the module that owns the parameter;
    if that was not called, to the call whose node ran before.
    """
    parameter_calls = ledger.calls_of_parameters(step)
    before: MeasuredCall | None = None
    last_of_task: dict[int, NodeRun] = {}
    ended: list[tuple[float, float]] = []  # begin and seconds of runs, which may lie inside others
    for run in runs:
        last = last_of_task.get(run.task)
        begin, own = (run.start, run.own_start) if last is None else (last.end, last.own_end)
        last_of_task[run.task] = run
        seconds = max(run.end - begin - (run.own_end - own), 0.0)
        inside = 0.0
        while ended and ended[-1][0] >= begin:
            inside += ended.pop()[1]
        ended.append((begin, seconds))
        if run.sequence >= 0:
            call = before = ledger.owner_of(run.sequence)
        else:
            call = parameter_calls.get(run.parameter or 0, before)
        if call is not None:
            yield run, call, max(seconds - inside, 0.0)


def _note_arrival(ledger: Ledger, run: NodeRun) -> None:
    """Counts the gradient that a node was given, and the time of the operation that made it."""
    if run.sequence >= 0:
        ledger.arrived[run.sequence] += 1
    elif run.parameter is not None:
        ledger.arrived[-1 - run.parameter] += 1
        ledger.num_gradients[ledger.modules.parameter_of(run.parameter)] += 1
    operation = ledger.operation_at(run.sequence)
    if operation is not None:
        operation.backward_seconds = (operation.backward_seconds or 0.0) + run.seconds


def _extend(spans: dict[int, PassSpan], run: NodeRun) -> None:
    """Makes the span of the backward pass of a run include the run."""
    span = spans.get(run.task)
    if span is None:
        spans[run.task] = PassSpan(run.start, run.end, run.start_ns, run.end_ns)
        return
    if run.start < span.start:
        span.start, span.start_ns = run.start, run.start_ns
    if run.end > span.end:
        span.end, span.end_ns = run.end, run.end_ns


# -- memory


def _charge_memory(ledger: Ledger, step: MeasuredStep, timeline: Timeline, first_call: int) -> None:
    step.memory = timeline.whole
    for call in ledger.calls[first_call:]:
        call.forward_memory = timeline.between(call.start_ns, call.end_ns)
        for operation in call.run.operations if call.run is not None else ():
            operation.memory = timeline.between(operation.start_ns, operation.end_ns)


def _add_backward_memory(call: MeasuredCall, spans: Sequence[PassSpan], timeline: Timeline) -> None:
    found = [timeline.between(span.start_ns, span.end_ns) for span in _merged(spans)]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return
    if call.backward_memory is not None:
        known.append(call.backward_memory)
    peak, added = max(each.peak for each in known), sum(each.added for each in known)
    call.backward_memory = Memory(peak, added)


def _merged(spans: Sequence[PassSpan]) -> list[PassSpan]:
    """Spans in order, overlapping ones made one: a backward pass may run inside another."""
    found: list[PassSpan] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1].end:
            if span.end > found[-1].end:
                found[-1].end, found[-1].end_ns = span.end, span.end_ns
        else:
            found.append(PassSpan(span.start, span.end, span.start_ns, span.end_ns))
    return found
