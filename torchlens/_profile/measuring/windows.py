"""Between the begin of a step and that of the next: what ran backward then, and what was allocated,
is put in its place.
"""

from time import time_ns

from torchlens._capture.gradients.backward_hooks import BackwardWatch, NodeRun
from torchlens._capture.own_time import SHORT, coldness_of
from torchlens._profile.measuring.allocators import AllocatorEvents, AllocatorWatch, Timeline
from torchlens._profile.measuring.backward_times import charge, extend, memory_of
from torchlens._profile.measuring.calls import Call, Signature, Step
from torchlens._profile.measuring.details import Details
from torchlens._profile.measuring.ledger import Ledger
from torchlens._profile.measuring.outside import OutsideWatch

_MOST_WAITING = 100_000  # events of the allocators


class Window:
    """The time of one step. Its backward passes may well be those of earlier ones."""

    def __init__(self, step: Step, first_call: int) -> None:
        self.step = step
        self.first_call = first_call
        self.last_call = first_call
        self.has_memory = False
        self.events = AllocatorEvents()
        self.runs: list[NodeRun] = []
        self.own_spans: list[tuple[int, int]] = []


class Windows:
    """Opens a window for each step, and closes it when the next begins. `backward` watches all the
    time.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.backward = BackwardWatch()
        self.outside = OutsideWatch(ledger.keep)
        self._ledger = ledger
        self._memory = AllocatorWatch(time_ns)
        self._open: Window | None = None
        self._waiting: list[Window] = []
        self.details = Details(ledger.options)

    @property
    def step(self) -> Step | None:
        """The step that has begun last and is not over."""
        return None if self._open is None else self._open.step

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass ran in it."""
        return bool(self.backward.runs)

    def begin(self, signature: Signature, is_warmup: bool) -> Step:
        """Begins a step of some kind."""
        ledger, problems = self._ledger, self._ledger.problems
        wanted = self.details.wanted(signature, is_warmup, ledger.modules.is_compiled)
        step = Step(len(ledger.steps) + 1, signature, is_warmup, wanted.log, wanted.checking)
        ledger.steps.append(step)
        self.outside.take()  # what came before it
        self._put_late_runs()
        step.start_ns = time_ns()
        self._open = window = Window(step, len(ledger.calls))
        if ledger.options.memory and wanted.memory:
            try:
                window.has_memory = self._memory.start()
            except Exception as error:  # everything else can be measured all the same
                self._memory.stop()
                problems.add_failure(error, "Memory was not measured")
                return step
            if not window.has_memory:
                problems.add(
                    "Memory was not measured in some steps: another profiler was running "
                    "(torch.profiler, or a profile of another model in this thread), and only one "
                    "can run at a time"
                )
        return step

    def end(self) -> Step | None:
        """A step is over; returns it, if there was one. What it left is put in its place later."""
        window, self._open = self._open, None
        if window is None:
            return None
        step = window.step
        step.end_ns = time_ns()
        if not step.is_warmup:
            has_raised = any(call.raised for call in step.calls if call.parent is None)
            self.details.has_run(step.signature, step.has_log, window.has_memory, has_raised)
        step.outside = self.outside.take()
        window.events = self._memory.stop()
        window.runs, self.backward.runs = self.backward.runs, []
        window.own_spans, self._ledger.own_spans = _joined(self._ledger.own_spans), []
        window.last_call = len(self._ledger.calls)
        # That can wait until the user's code is done, unless there is too much of it.
        self._waiting.append(window)
        if sum(each.events.num_events for each in self._waiting) > _MOST_WAITING:
            self.settle_all()
        return step

    def settle_all(self) -> None:
        """Puts in its place what the steps that are over have left."""
        self._put_late_runs()
        self._ledger.left_out |= self.backward.left_out
        waiting, self._waiting = self._waiting, []
        for window in waiting:
            self._settle(window, self._memory.timeline(window.events, window.own_spans))

    def stop(self) -> None:
        """Ends listening and watching. May be called again."""
        self._memory.stop()
        self.backward.stop()
        self.outside.stop()
        for failure in self.backward.failures:
            self._ledger.problems.add(
                f"A look at a backward pass failed ({failure}): its numbers are incomplete"
            )
        self.backward.failures.clear()

    def _put_late_runs(self) -> None:
        """What ran backward between two windows belongs to the first, if it ran through steps that
        were measured.
        """
        if self._open is None:
            late, self.backward.runs = _of_measured_steps(self.backward.runs), []
            if self._waiting:
                self._waiting[-1].runs += late

    def _settle(self, window: Window, timeline: Timeline) -> None:
        """Gives each call its share of what was measured."""
        ledger, runs = self._ledger, window.runs
        touched: dict[int, Call] = {}
        charges = charge(
            _of_measured_steps(runs), ledger.owners, ledger.modules.calls_of_parameters(window.step)
        )
        coldness = coldness_of(run.name for run, _, _ in charges)
        for (run, maker, charged), how_cold in zip(charges, coldness, strict=True):
            call = maker.original or maker
            call.backward_self = (
                charged if call.backward_self is None else call.backward_self + charged
            )
            call.num_nodes += 1
            call.short_node_seconds += min(run.seconds, SHORT)
            call.node_coldness += how_cold
            call.step.backward_tasks.add(run.task)
            around: Call | None = call
            while around is not None:
                extend(around.spans, run)
                touched[around.index] = around
                around = around.parent
        for run in runs:
            if run.sequence >= 0:
                ledger.arrived[run.sequence] += 1
            elif run.parameter is not None:
                ledger.arrived[-1 - run.parameter] += 1
                parameter = ledger.modules.parameter_of(run.parameter)
                ledger.num_gradients[parameter] = ledger.num_gradients.get(parameter, 0) + 1
            operation = ledger.operation_at(run.sequence)
            if operation is not None:
                operation.backward_seconds = (operation.backward_seconds or 0.0) + run.seconds
        if window.has_memory:
            self._settle_memory(window, timeline, touched)

    def _settle_memory(self, window: Window, timeline: Timeline, touched: dict[int, Call]) -> None:
        window.step.memory = timeline.whole
        for operation in window.step.operations:
            operation.memory = timeline.between(operation.mark.start_ns, operation.mark.end_ns)
            operation.num_events = timeline.num_events(
                operation.mark.start_ns, operation.mark.end_ns
            )
        for call in self._ledger.calls[window.first_call : window.last_call]:
            call.forward_memory = timeline.between(call.start_ns, call.end_ns)
            call.num_events = timeline.num_events(call.start_ns, call.end_ns)
        passes = {run.task for run in window.runs}
        for call in touched.values():
            _add_memory(
                call,
                memory_of([span for task, span in call.spans.items() if task in passes], timeline),
            )


def _of_measured_steps(runs: list[NodeRun]) -> list[NodeRun]:
    """The runs of backward passes through steps that were measured.

    Those through others, and those of other threads or of a loss that is made of parameters alone,
    are seen where they give gradients to parameters: as long as somebody holds a loss, all share
    the nodes that do so.
    """
    tasks = {run.task for run in runs if run.parameter is None}
    return [run for run in runs if run.task in tasks]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same moments in spans that do not overlap, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _add_memory(call: Call, memory: tuple[int, int] | None) -> None:
    before = call.backward_memory
    if memory is not None and before is not None:
        memory = max(memory[0], before[0]), memory[1] + before[1]
    call.backward_memory = memory
