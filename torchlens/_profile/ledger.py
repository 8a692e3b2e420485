"""The data gathered while a model is measured: steps, calls of modules and operations, and which of
them backward passes are charged to. Times are those of `perf_counter` until the records are made.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch

from torchlens._capture.gradients.backward_hooks import NodeRun
from torchlens._health.checking import Checking
from torchlens._profile.allocators import Span, Timeline, joined, storages_of
from torchlens._profile.model_modules import ModelModules, NamedModule
from torchlens._profile.outside import OutsideSpan
from torchlens._profile.profile_options import ProfileOptions
from torchlens._profile.records import CallRecord, OperationRecord, ProfiledStep, Signature
from torchlens._recording.recording import Recording, References
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction
from torchlens._text.problems import Problems

# Shape, bytes, and where the gradient of a tensor arrives: at a node of autograd's graph, by the
# number it has in the watch, or at a leaf, by -1 - its id. None: its gradient is not watched.
TensorFacts: TypeAlias = tuple[tuple[int, ...], int, int | None]


@dataclass(kw_only=True, eq=False, repr=False)
class MeasuredStep(ProfiledStep):
    """A step while it is being measured; afterwards, its record."""

    signature: Signature
    wants_log: bool = False
    checking: Checking = Checking.NOTHING
    start: float = 0.0
    end: float = 0.0
    forward_end: float = 0.0
    outside: list[OutsideSpan] = field(default_factory=list)
    calls: list["MeasuredCall"] = field(default_factory=list)
    passes: dict[str, int] = field(default_factory=dict)  # address → calls so far
    around_seconds: float = 0.0  # what a capture session took before and after the model
    is_logged: bool = False  # whether all of it ran under the log, and each operation was checked
    is_deep: bool = False  # it calls so many modules that some backward nodes are not watched
    backward_tasks: set[int] = field(default_factory=set)  # the backward passes through it

    def next_pass(self, address: str) -> int:
        """The number of the call of a module that begins now."""
        number = self.passes[address] = self.passes.get(address, 0) + 1
        return number

    @property
    def outermost_calls(self) -> list["MeasuredCall"]:
        return [call for call in self.calls if call.around is None and call.original is None]


@dataclass(kw_only=True, eq=False, repr=False)
class MeasuredOperation(OperationRecord):
    """One operation that ran under the log, and its record: its rows in the recording (from
    `entry` to before `last`), and the backward nodes that it made.
    """

    last: int
    start: float
    end: float
    sequence: int
    sequence_end: int
    # of custom autograd functions whose result it made; they have other numbers
    function_nodes: tuple[int, ...] = ()
    code: CodeType | None = None
    instruction: int = 0
    references: References = ()  # what it read, as in Row

    def describe(self, recording: Recording) -> None:
        """Copies what is needed from the recording, which is not kept."""
        row = recording.rows[self.entry]
        self.code, self.instruction, self.references = row.code, row.instruction, row.references
        self.layer_type, self.shape = row.operation.layer_type, tuple(row.shape)
        self.forward_seconds = row.seconds
        for made in recording.rows[self.entry : self.last]:
            count = made.dtype.itemsize
            for size in made.shape:
                count *= max(size, 0)
            self.num_bytes += count

    @property
    def nodes(self) -> list[int]:
        """The sequence numbers of its backward nodes."""
        return [*range(self.sequence, self.sequence_end), *self.function_nodes]


class LoggedRun(NamedTuple):
    """A call from outside that ran in a capture session."""

    recording: Recording  # of the first run that did the same
    operations: list[MeasuredOperation]
    is_whole: bool  # False: a part of it ran in other threads, and its operations are not here


class MeasuredCall(CallRecord):
    """One call of a module while it is being measured; afterwards, its record.

    Creating one takes time in every step, so only the fields that differ from their default, which
    the class has, are set.
    """

    inputs: Sequence[TensorFacts] = ()
    outputs: Sequence[TensorFacts] = ()
    start = end = 0.0
    # The time that the profile itself had taken in this thread, at the beginning and at the end.
    own_start = own_end = 0.0
    sequence = 0  # of the first backward node that it makes
    backward_self: float | None = None
    original: "MeasuredCall | None" = None  # the call that it repeats, in a backward pass
    run: LoggedRun | None = None  # of a call from outside
    own_flops: int | None = None
    own_flops_backward: int | None = None

    def __init__(
        self,
        index: int,
        measured_step: MeasuredStep,
        module: NamedModule,
        around: "MeasuredCall | None",
        original: "MeasuredCall | None" = None,
    ) -> None:
        self.index, self.measured_step, self.around = index, measured_step, around
        self.address, self.module_type, self.step = module[0], module[1], measured_step.number
        if around is not None:
            self.parent, self.depth = around.index, around.depth + 1
        if original is None:
            self.pass_num = measured_step.next_pass(self.address)
        else:
            self.original, self.is_recomputed, self.pass_num = original, True, original.pass_num
        self.spans: dict[int, Span] = {}  # by backward pass
        self.saved: dict[int, int] = {}  # storage → bytes

    def add_span(self, run: NodeRun) -> None:
        """Extends the span of the backward pass of a node that ran."""
        start, end = self.spans.get(run.task, (run.start, run.end))
        self.spans[run.task] = min(start, run.start), max(end, run.end)

    def with_those_around(self) -> Iterator["MeasuredCall"]:
        """This call, and the calls around it."""
        call: MeasuredCall | None = self
        while call is not None:
            yield call
            call = call.around


class Ledger:
    """Steps, calls and operations of one model, in the order in which they began."""

    def __init__(self, model: torch.nn.Module, options: ProfileOptions, problems: Problems) -> None:
        self.model = model
        self.options = options
        self.problems = problems
        self.modules = ModelModules(model)
        self.start = 0.0
        self.steps: list[MeasuredStep] = []
        self.calls: list[MeasuredCall] = []
        self.current: MeasuredCall | None = None  # the innermost call that is running
        self.own_spans: list[Span] = []  # of this step: memory allocated then is the profile's own
        # Backward nodes: number in the watch → the call that made it; None: outside the model.
        self.makers: dict[int, MeasuredCall | None] = {}
        self.arrived: set[int] = set()  # where gradients arrived, as in `TensorFacts`
        self.num_runs: Counter[int] = Counter()  # of the model's nodes, by sequence number
        self.left_out: set[int] = set()  # nodes that computed only some of their gradients
        self.num_gradients: Counter[int] = Counter()  # by the id of a parameter
        self._operations: list[MeasuredOperation] = []
        self._sequences: list[int] = []  # of the operations
        self._function_operations: dict[int, MeasuredOperation] = {}  # by `function_nodes`
        self._parameter_calls: dict[int, MeasuredCall] = {}
        self._num_calls_then = 0  # the number of calls when `_parameter_calls` was made

    def ns(self, time: float) -> int:
        """A time in nanoseconds from the beginning of the profile."""
        return round((time - self.start) * 1e9)

    def parameter_call(self, parameter: int) -> MeasuredCall | None:
        """The call that the gradient of a parameter (its id) belongs to: the first in the last step
        of the module that owns it.
        """
        if self._num_calls_then != len(self.calls):
            self._num_calls_then = len(self.calls)
            first = {call.address: call for call in reversed(self.steps[-1].calls)}
            owners = {
                key: address.rpartition(".")[0]
                for key, (address, _) in self.modules.parameters.items()
            }
            self._parameter_calls = {key: first[own] for key, own in owners.items() if own in first}
        return self._parameter_calls.get(parameter)

    # -- operations

    def add_operations(self, operations: list[MeasuredOperation]) -> None:
        """Adds the operations of a call, in the order in which they ran."""
        self._operations += operations
        self._sequences += [operation.sequence for operation in operations]
        for operation in operations:
            for node in operation.function_nodes:
                self._function_operations[node] = operation

    def operation_at(self, sequence: int) -> MeasuredOperation | None:
        """The operation that made a backward node."""
        if sequence in self._function_operations:
            return self._function_operations[sequence]
        position = bisect_right(self._sequences, sequence) - 1
        if position < 0 or sequence >= self._operations[position].sequence_end:
            return None
        return self._operations[position]

    def num_backward_passes(self, operation: MeasuredOperation) -> int:
        """How often gradients went through an operation.

        An operation without backward nodes ran in a checkpoint, which made them later: it has those
        of its module.
        """
        if not operation.nodes:
            return min(len(self.calls[operation.call].spans), 1)
        return max(self.num_runs[node] for node in operation.nodes)

    def backward_flops(self, operation: MeasuredOperation, each: int | None) -> int | None:
        """FLOPs of all backward passes through an operation, `each` being those of a pass that
        computes all gradients.
        """
        if each is None or (each and not self.left_out.isdisjoint(operation.nodes)):
            return None
        return each * self.num_backward_passes(operation)

    # -- kept for backward

    def keep(self, tree: Any) -> None:
        """Notes that the running call keeps the tensors in `tree` for its backward pass, although
        no node of autograd does.
        """
        call = self.current
        if call is not None and call.original is None:
            with NoTorchFunction():
                for _, tensor in plain_tensors(tree):
                    self.note_saved(call, storages_of(tensor))

    def note_saved(self, call: MeasuredCall, storages: Iterable[tuple[int, int]]) -> None:
        """Notes storages, with their bytes, that a call keeps for backward; parameters and buffers
        exist anyway.
        """
        for storage, num_bytes in storages:
            if storage not in self.modules.storages:
                call.saved[storage] = num_bytes

    # -- calls that do not count

    def repeated_call(self, address: str) -> MeasuredCall | None:
        """The call that a call inside a backward pass repeats."""
        for step in reversed(self.steps):
            if address in step.passes:
                calls = [call for call in step.calls if call.address == address]
                first = [call for call in calls if call.original is None]
                again = len(calls) - len(first)
                # Backward goes from the last to the first.
                return first[-1 - again % len(first)] if first else None
        return None

    def forget_since(self, num_calls: int) -> None:
        """Removes all calls but the first `num_calls`, because the model runs again."""
        for call in self.calls[num_calls:]:
            call.measured_step.calls.remove(call)
            call.measured_step.passes.clear()
        del self.calls[num_calls:]

    def let_go(self) -> None:
        """Turns everything into plain records, which refer neither to logs nor to each other."""
        for call in self.calls:
            for operation in () if call.run is None else call.run.operations:
                _make_plain(operation, OperationRecord)
        for call in self.calls:
            _make_plain(call, CallRecord)
        for step in self.steps:
            _make_plain(step, ProfiledStep)
        self.makers.clear()

    def forget_all(self) -> None:
        """Removes all data."""
        self.steps, self.calls, self._operations, self._sequences = [], [], [], []


def _make_plain(measured: Any, record_type: type[Any]) -> None:
    """Makes a measured call, step or operation an instance of its record's class, without the
    fields that only measuring needs.
    """
    for name in vars(measured).keys() - {each.name for each in fields(record_type)}:
        delattr(measured, name)
    measured.__class__ = record_type


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor's elements; 0 where torch cannot tell."""
    try:
        return int(tensor.nbytes)
    except (RuntimeError, NotImplementedError, ValueError):  # some layouts, lazy and nested tensors
        return 0


# -- charging a step that is over


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
    own_runs = of_the_model(ledger, runs)
    for run, maker, seconds in _charges(ledger, own_runs):
        call = maker.original or maker
        call.backward_self = (call.backward_self or 0.0) + seconds
        call.measured_step.backward_tasks.add(run.task)
        for around in call.with_those_around():
            around.add_span(run)
            touched[around.index] = around
    for run in runs:
        _note_arrival(ledger, run)
    if timeline is not None:
        _charge_memory(ledger, step, timeline, first_call)
        _charge_backward_memory(touched.values(), {run.task for run in own_runs}, timeline)


def of_the_model(ledger: Ledger, runs: Sequence[NodeRun]) -> list[NodeRun]:
    """The runs of backward passes through measured steps.

    Of other passes, only the nodes that add to the gradients of parameters and inputs are watched,
    because all passes share these nodes.
    """
    tasks = {run.task for run in runs if ledger.makers.get(run.number) is not None}
    return [run for run in runs if run.task in tasks]


def _charges(
    ledger: Ledger, runs: Iterable[NodeRun]
) -> Iterator[tuple[NodeRun, MeasuredCall, float]]:
    """For each run of a node that belongs to a module call: the call, and the seconds charged to
    it.

    These are the seconds since the previous node of the same backward pass ended, because autograd
    works for the next node in between. They add up to the time of the pass, without the time of the
    profile's own hooks and of other passes that ran meanwhile.

    A node that adds to the gradient of a parameter belongs to the module that owns the parameter;
    if that was not called, to the call whose node ran before.
    """
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
        if run.parameter is None:
            call = before = ledger.makers.get(run.number)
        else:
            call = ledger.parameter_call(run.parameter) or before
        if call is not None:
            yield run, call, max(seconds - inside, 0.0)


def _note_arrival(ledger: Ledger, run: NodeRun) -> None:
    """Counts the gradient that a node received, and adds its time to the operation that made it."""
    if run.parameter is not None:
        ledger.arrived.add(-1 - run.parameter)
        ledger.num_gradients[ledger.modules.parameter_of(run.parameter)] += 1
        return
    ledger.arrived.add(run.number)
    if ledger.makers.get(run.number) is not None:
        ledger.num_runs[run.sequence] += 1
        operation = ledger.operation_at(run.sequence)
        if operation is not None:
            operation.backward_seconds = (operation.backward_seconds or 0.0) + run.seconds


def _charge_memory(ledger: Ledger, step: MeasuredStep, timeline: Timeline, first_call: int) -> None:
    step.peak_bytes, step.added_bytes = timeline.whole
    for call in ledger.calls[first_call:]:
        call.peak_bytes, call.added_bytes = timeline.between(call.start, call.end)
        for operation in call.run.operations if call.run is not None else ():
            use = timeline.between(operation.start, operation.end)
            operation.peak_bytes, operation.added_bytes = use


def _charge_backward_memory(
    calls: Iterable[MeasuredCall], passes: Container[int], timeline: Timeline
) -> None:
    for call in calls:
        spans = [span for task, span in call.spans.items() if task in passes]
        _add_backward_memory(call, spans, timeline)


def _add_backward_memory(call: MeasuredCall, spans: Iterable[Span], timeline: Timeline) -> None:
    found = [timeline.between(start, end) for start, end in joined(spans)]
    if (None, None) not in found:
        for peak, added in found:
            call.peak_bytes_backward = max(call.peak_bytes_backward or 0, peak or 0)
            call.added_bytes_backward = (call.added_bytes_backward or 0) + (added or 0)
