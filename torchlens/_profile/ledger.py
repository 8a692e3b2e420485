"""What is written down while a model is measured: steps, calls of modules, operations."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch

from torchlens._capture.gradients.backward_hooks import NodeRun, sequence_of
from torchlens._health.checking import Checking
from torchlens._history.log import Log
from torchlens._profile.allocators import Timeline, storages_of
from torchlens._profile.model_modules import ModelModules
from torchlens._profile.profile_options import ProfileOptions
from torchlens._profile.records import CallRecord, OperationRecord, ProfiledStep, Signature
from torchlens._recording.recording import Recording, References
from torchlens._recording.regions import shape_of
from torchlens._recording.trees import plain_tensors
from torchlens._text.problems import Problems

# Shape, bytes, and where the gradient of a tensor arrives: at a node of autograd's graph, known by
# its sequence number, or at a leaf, known by -1 - its id. None: its gradient is not watched.
TensorFacts: TypeAlias = tuple[tuple[int, ...], int, int | None]


def facts_of(tensors: Sequence[torch.Tensor], has_keys: bool) -> list[TensorFacts]:
    """What is noted of the tensors that enter or leave a module."""
    return [
        (
            shape_of(tensor),
            bytes_of(tensor),
            _gradient_key(tensor) if has_keys and tensor.requires_grad else None,
        )
        for tensor in tensors
    ]


@dataclass(slots=True)
class PassSpan:
    """The part of a backward pass that a call takes, by two clocks."""

    start: float
    end: float
    start_ns: int
    end_ns: int


@dataclass(kw_only=True, eq=False, repr=False)
class MeasuredStep(ProfiledStep):
    """A step while it is being measured; afterwards, its record."""

    signature: Signature
    wants_log: bool = False
    checking: Checking = Checking.NOTHING
    calls: list["MeasuredCall"] = field(default_factory=list)
    passes: dict[str, int] = field(default_factory=dict)  # address → calls so far
    around_ns: int = 0  # what a capture session took before and after the model
    is_logged: bool = False  # whether all of it ran under the log, and each operation was checked
    is_deep: bool = False  # it calls so many modules that some backward nodes are not watched
    backward_tasks: set[int] = field(default_factory=set)  # the backward passes through it

    @property
    def outermost_calls(self) -> list["MeasuredCall"]:
        return [call for call in self.calls if call.around is None and call.original is None]


@dataclass(kw_only=True, eq=False, repr=False)
class MeasuredOperation(OperationRecord):
    """One operation that ran under the log, and its record: its rows in the recording (from
    `entry` to before `last`), and the backward nodes that it made.
    """

    last: int
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


class LoggedRun(NamedTuple):
    """A call from outside that ran in a capture session."""

    log: Log  # of the first run that did the same
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
    run: LoggedRun | None = None  # of a call from outside
    own_flops: int | None = None
    own_flops_backward: int | None = None

    def __init__(
        self,
        index: int,
        measured_step: MeasuredStep,
        address: str,
        module_type: str,
        around: "MeasuredCall | None",
        original: "MeasuredCall | None" = None,
    ) -> None:
        self.index, self.measured_step = index, measured_step
        self.step = measured_step.number
        self.address, self.module_type = address, module_type
        self.around, self.original = around, original  # it repeats `original`, in a backward pass
        self.parent = None if around is None else around.index
        self.depth = 0 if around is None else around.depth + 1
        self.is_recomputed = original is not None
        self.spans: dict[int, PassSpan] = {}  # by backward pass
        self.saved: dict[int, int] = {}  # storage → bytes


class Ledger:
    """Steps, calls and operations of one model, in the order in which they began."""

    def __init__(self, model: torch.nn.Module, options: ProfileOptions, problems: Problems) -> None:
        self.model = model
        self.options = options
        self.problems = problems
        self.modules = ModelModules(model)
        self.start_ns = 0
        self.steps: list[MeasuredStep] = []
        self.calls: list[MeasuredCall] = []
        self.current: MeasuredCall | None = None  # the innermost call that is running
        # Of this step, by `time_ns`: memory allocated in these spans is the profile's own.
        self.own_spans: list[tuple[int, int]] = []
        # Where gradients arrived, as in `TensorFacts`, and how often.
        self.arrived: Counter[int] = Counter()
        self.left_out: set[int] = set()  # nodes that did not compute all gradients that they can
        self.num_gradients: Counter[int] = Counter()  # by the id of a parameter
        self._operations: list[MeasuredOperation] = []
        self._sequences: list[int] = []  # of the operations
        self._function_operations: dict[int, MeasuredOperation] = {}  # by `function_nodes`
        # From which sequence number on which call makes nodes.
        self._owner_sequences: list[int] = []
        self._owners: list[MeasuredCall | None] = []
        self._parameter_calls: dict[int, MeasuredCall] = {}
        self._num_calls_then = 0  # how many calls there were when that was found

    # -- backward nodes

    def enter_nodes(self, sequence: int, call: MeasuredCall | None) -> None:
        """From `sequence` on, nodes are made by `call`. They are numbered as they are made."""
        self._owner_sequences.append(sequence)
        self._owners.append(call)

    def owner_of(self, sequence: int) -> MeasuredCall | None:
        """The innermost call that made a node; None for a node made outside the model."""
        position = bisect_right(self._owner_sequences, sequence) - 1
        return self._owners[position] if position >= 0 else None

    def calls_of_parameters(self, step: MeasuredStep) -> dict[int, MeasuredCall]:
        """For each parameter, the first of a step's calls of the module that owns it."""
        first: dict[str, MeasuredCall] = {}
        for call in step.calls:
            first.setdefault(call.address, call)
        owners = self.modules.owners.items()
        return {parameter: first[address] for parameter, address in owners if address in first}

    def parameter_call(self, parameter: int) -> MeasuredCall | None:
        """The call that the gradient of a parameter (its id) belongs to."""
        if self._num_calls_then != len(self.calls):
            self._num_calls_then = len(self.calls)
            self._parameter_calls = self.calls_of_parameters(self.steps[-1])
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
        nodes = [*range(operation.sequence, operation.sequence_end), *operation.function_nodes]
        if not nodes:
            return min(len(self.calls[operation.call].spans), 1)
        return max(self.arrived[node] for node in nodes)

    def backward_flops(self, operation: MeasuredOperation, each: int | None) -> int | None:
        """FLOPs of all backward passes through an operation, `each` being those of a pass that
        computes all gradients.
        """
        nodes = range(operation.sequence, operation.sequence_end)
        if each is None or (each and not self.left_out.isdisjoint(nodes)):
            return None
        return each * self.num_backward_passes(operation)

    # -- kept for backward

    def keep(self, tree: Any) -> None:
        """Notes that the running call keeps the tensors in `tree` for its backward pass, although
        no node of autograd does.
        """
        call = self.current
        if call is not None and call.original is None:
            with torch._C.DisableTorchFunction():
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
        """Removes all but so many calls: the model is run once more."""
        for call in self.calls[num_calls:]:
            call.measured_step.calls.remove(call)
            call.measured_step.passes.clear()
        del self.calls[num_calls:]

    def let_go(self) -> None:
        """Turns what was measured into plain records, which know neither logs nor each other."""
        for call in self.calls:
            for operation in () if call.run is None else call.run.operations:
                _make_plain(operation, OperationRecord)
        for call in self.calls:
            _make_plain(call, CallRecord)
        for step in self.steps:
            _make_plain(step, ProfiledStep)

    def forget_all(self) -> None:
        """Removes everything that was written down."""
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


def _gradient_key(tensor: torch.Tensor) -> int | None:
    try:
        node = tensor.grad_fn
    except RuntimeError:  # a view whose base was written without autograd's knowledge
        return None
    return -1 - id(tensor) if node is None else sequence_of(node)


# -- what a step did, once it is over


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
        call.measured_step.backward_tasks.add(run.task)
        around: MeasuredCall | None = call
        while around is not None:
            _extend(around.spans, run)
            touched[around.index] = around
            around = around.around
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
    step.peak_bytes, step.added_bytes = timeline.whole
    for call in ledger.calls[first_call:]:
        call.peak_bytes, call.added_bytes = timeline.between(call.start_ns, call.end_ns)
        for operation in call.run.operations if call.run is not None else ():
            operation.peak_bytes, operation.added_bytes = timeline.between(
                operation.start_ns, operation.end_ns
            )


def _add_backward_memory(call: MeasuredCall, spans: Sequence[PassSpan], timeline: Timeline) -> None:
    found = [timeline.between(span.start_ns, span.end_ns) for span in _merged(spans)]
    if (None, None) not in found:
        for peak, added in found:
            call.peak_bytes_backward = max(call.peak_bytes_backward or 0, peak or 0)
            call.added_bytes_backward = (call.added_bytes_backward or 0) + (added or 0)


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
