"""Between the begin of a step and that of the next: what ran backward then, and what was allocated, is put in its place."""

from torchlens.capture.backward import NodeRun
from torchlens.profiling.measuring.allocators import AllocatorEvents, Timeline
from torchlens.profiling.measuring.backward_times import charge, extend, memory_of
from torchlens.profiling.measuring.calls import Call, Step
from torchlens.profiling.measuring.ledger import Ledger

__all__ = ["Window", "settle"]


class Window:
    """The time of one step. Its backward passes may well be those of earlier ones."""

    def __init__(self, step: Step, first_call: int) -> None:
        self.step = step
        self.first_call = first_call
        self.last_call = first_call
        self.has_memory = False
        self.events = AllocatorEvents()
        self.runs: list[NodeRun] = []
        self.ignored: list[tuple[int, int]] = []  # spans of time that the profile took for itself


def settle(ledger: Ledger, window: Window, timeline: Timeline) -> None:
    """Gives each call its share of what was measured."""
    runs = window.runs
    touched: dict[int, Call] = {}
    for run, maker, seconds in charge(runs, ledger.owners, ledger.modules.calls_of_parameters(window.step)):
        call = maker.original or maker
        call.backward_self = (call.backward_self or 0.0) + seconds
        extend(call.step.runs, run)
        around: Call | None = call
        while around is not None:
            extend(around.spans, run)
            touched[around.index] = around
            around = around.parent
    for run in runs:
        if run.sequence >= 0:
            ledger.arrived.add(run.sequence)
        elif run.parameter is not None:
            ledger.arrived.add(-1 - run.parameter)
            ledger.num_gradients[run.parameter] = ledger.num_gradients.get(run.parameter, 0) + 1
    for run in runs:
        operation = ledger.operation_at(run.sequence)
        if operation is not None:
            operation.backward_seconds = (operation.backward_seconds or 0.0) + run.end - run.start
    if window.has_memory:
        window.step.memory = timeline.whole
        for operation in window.step.operations:
            operation.memory = timeline.between(operation.mark.start_ns, operation.mark.end_ns)
        for call in ledger.calls[window.first_call : window.last_call]:
            call.forward_memory = timeline.between(call.start_ns, call.end_ns)
        passes = {run.task for run in runs}
        for call in touched.values():
            _add_memory(call, memory_of([span for task, span in call.spans.items() if task in passes], timeline))


def _add_memory(call: Call, memory: tuple[int, int] | None) -> None:
    before = call.backward_memory
    if memory is not None and before is not None:
        memory = max(memory[0], before[0]), memory[1] + before[1]
    call.backward_memory = memory
