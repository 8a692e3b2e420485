"""What is written down while a model is measured: steps, calls of modules, operations."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch

from torchlens._capture.gradients.backward_hooks import sequence_of
from torchlens._health.checking import Checking
from torchlens._history.log import Log
from torchlens._profile.allocators import Memory, storages_of
from torchlens._profile.model_modules import ModelModules
from torchlens._profile.outside import OutsideSpan
from torchlens._profile.profile_options import ProfileOptions
from torchlens._profile.steps import Shape, Signature
from torchlens._recording.recording import Recording, References
from torchlens._recording.regions import shape_of
from torchlens._recording.trees import plain_tensors
from torchlens._text.problems import Problems


@dataclass(slots=True, eq=False)
class TensorFacts:
    """The tensors that went into a module or came out: shapes, bytes, and where their gradients
    arrive.

    A gradient arrives at a node of autograd's graph, known by its sequence number, or at a leaf,
    known by -1 - its id.
    """

    shapes: list[Shape] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    gradient_keys: list[int | None] = field(default_factory=list)

    def note(self, tensors: Sequence[torch.Tensor], has_keys: bool) -> None:
        """Adds some tensors; without `has_keys`, their gradients will not be noticed."""
        for tensor in tensors:
            self.shapes.append(tuple(shape_of(tensor)))
            self.bytes.append(bytes_of(tensor))
            key = _gradient_key(tensor) if has_keys and tensor.requires_grad else None
            self.gradient_keys.append(key)

    def shapes_with_gradient(self, arrived: Collection[int]) -> list[Shape]:
        """The shapes of the tensors whose gradient arrived."""
        pairs = zip(self.shapes, self.gradient_keys, strict=True)
        return [shape for shape, key in pairs if key in arrived]


@dataclass(slots=True)
class PassSpan:
    """The part of a backward pass that a call takes, by two clocks."""

    start: float
    end: float
    start_ns: int
    end_ns: int


@dataclass(slots=True, eq=False)
class MeasuredStep:
    """One step while it is being measured."""

    number: int
    signature: Signature
    is_warmup: bool
    position: int  # in the loop, counting the steps that a schedule skips
    wants_log: bool
    checking: Checking
    calls: list["MeasuredCall"] = field(default_factory=list)
    passes: dict[str, int] = field(default_factory=dict)  # address → calls so far
    start_ns: int = 0
    end_ns: int = 0
    forward_end_ns: int = 0  # of the last call from outside
    around_ns: int = 0  # what a capture session took before and after the model
    outside: list[OutsideSpan] = field(default_factory=list)
    has_memory: bool = False
    has_log: bool = False  # whether a part of it, or all, ran in a capture session
    is_logged: bool = False  # whether all of it did, and each operation was checked
    is_deep: bool = False  # it calls so many modules that some backward nodes are not watched
    memory: Memory | None = None
    backward_tasks: set[int] = field(default_factory=set)  # the backward passes through it

    @property
    def outermost_calls(self) -> list["MeasuredCall"]:
        return [call for call in self.calls if call.parent is None and call.original is None]


@dataclass(slots=True, eq=False)
class MeasuredOperation:
    """One operation that ran under the log: the rows that it left in the recording, when it ran,
    and the backward nodes that it made.
    """

    first: int
    last: int
    call: int  # the index of the module call around it
    sequence: int
    sequence_end: int
    start_ns: int
    end_ns: int
    # of custom autograd functions whose result it made; they have other numbers
    function_nodes: tuple[int, ...] = ()
    code: CodeType | None = None
    instruction: int = 0
    references: References = ()  # what it read, as in Row
    layer_type: str = ""
    shape: Shape = ()
    num_bytes: int = 0
    seconds: float = 0.0
    backward_seconds: float | None = None
    memory: Memory | None = None

    def describe(self, recording: Recording) -> None:
        """Copies what the records need from the recording, which is not kept."""
        row = recording.rows[self.first]
        self.code, self.instruction, self.references = row.code, row.instruction, row.references
        self.layer_type, self.shape = row.operation.layer_type, tuple(row.shape)
        self.seconds = row.seconds
        for made in recording.rows[self.first : self.last]:
            count = made.dtype.itemsize
            for size in made.shape:
                count *= max(size, 0)
            self.num_bytes += count


class LoggedRun(NamedTuple):
    """A call from outside that ran in a capture session."""

    log: Log  # of the first run that did the same
    operations: list[MeasuredOperation]
    is_whole: bool  # False: a part of it ran in other threads, and its operations are not here


@dataclass(slots=True, eq=False)
class MeasuredCall:
    """One call of a module while it is being measured."""

    index: int
    step: MeasuredStep
    address: str
    module_type: str
    parent: "MeasuredCall | None"
    original: "MeasuredCall | None" = None  # the call that this one, in a backward pass, repeats
    depth: int = 0
    pass_num: int = 1
    raised: str | None = None
    inputs: TensorFacts = field(default_factory=TensorFacts)
    outputs: TensorFacts = field(default_factory=TensorFacts)
    start: float = 0.0
    end: float = 0.0
    start_ns: int = 0
    end_ns: int = 0
    # What the profile itself had taken in this thread, by its clock, at the beginning and end.
    own_start: float = 0.0
    own_end: float = 0.0
    sequence: int = 0  # of the first backward node that it makes
    forward_memory: Memory | None = None
    backward_memory: Memory | None = None
    backward_self: float | None = None
    spans: dict[int, PassSpan] = field(default_factory=dict)  # by backward pass
    saved: dict[int, int] = field(default_factory=dict)  # storage → bytes
    run: LoggedRun | None = None  # of a call from outside
    own_flops: int | None = None
    own_flops_backward: int | None = None
    forward_nonfinite: bool | None = None
    grad_in_nonfinite: bool | None = None
    grad_out_nonfinite: bool | None = None


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
            call.step.calls.remove(call)
            call.step.passes.clear()
        del self.calls[num_calls:]

    def forget_all(self) -> None:
        """Removes everything that was written down."""
        self.steps, self.calls, self._operations, self._sequences = [], [], [], []


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
