"""A module call while it is being measured: what the watcher writes down, before it becomes a
record.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch

from torchlens._capture.gradients.backward_hooks import sequence_of
from torchlens._capture.own_time import OwnTime
from torchlens._health.checking import Checking
from torchlens._profile.measuring.outside import OutsideSpan
from torchlens._profile.steps import Shape
from torchlens._recording.regions import shape_of

# What a step begins with: whether the model is in training, whether autograd records, the shapes of
# the inputs.
Signature: TypeAlias = tuple[bool, bool, tuple[Shape, ...]]


class Span:
    """From the first moment of something to the last, by two clocks."""

    __slots__ = ("end", "end_ns", "start", "start_ns")

    def __init__(self, start: float, end: float, start_ns: int, end_ns: int) -> None:
        self.start, self.end, self.start_ns, self.end_ns = start, end, start_ns, end_ns


class TensorFacts:
    """The tensors that went into a module or came out: shapes, bytes, and where their gradients
    arrive.

    A gradient arrives at a node of autograd's graph, known by its sequence number, or at a leaf,
    known by -1 - its id.
    """

    __slots__ = ("bytes", "gradient_keys", "shapes")

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        self.bytes: list[int] = []
        self.gradient_keys: list[int | None] = []

    def shapes_with_gradient(self, arrived: Collection[int]) -> list[Shape]:
        """The shapes of those whose gradient arrived."""
        return [
            shape
            for shape, key in zip(self.shapes, self.gradient_keys, strict=True)
            if key in arrived
        ]


class Clock:
    """How much of what we took for ourselves, and how many of the things we looked at, lie in a
    span.
    """

    __slots__ = (
        "coldness", "handling_seconds", "num_cells", "num_modules", "num_operations", "num_plain",
        "num_reads",
        "own_seconds", "seconds_at_end", "short_seconds",
    )  # fmt: skip

    def __init__(self) -> None:
        self.own_seconds = self.seconds_at_end = self.short_seconds = self.handling_seconds = (
            self.coldness
        ) = 0.0
        self.num_operations = self.num_plain = self.num_cells = self.num_reads = (
            self.num_modules
        ) = 0

    def begin(self, own: OwnTime) -> None:
        """The span begins."""
        self.num_operations, self.num_reads, self.num_modules = (
            own.num_operations,
            own.num_reads,
            own.num_modules,
        )
        self.num_plain, self.num_cells, self.handling_seconds = (
            own.num_plain,
            own.num_cells,
            own.handling_seconds,
        )
        self.short_seconds, self.coldness, self.own_seconds = (
            own.short_seconds,
            own.coldness,
            own.seconds,
        )

    def end(self, own: OwnTime) -> None:
        """It has ended."""
        self.seconds_at_end = own.seconds
        self.own_seconds = own.seconds - self.own_seconds
        self.short_seconds = own.short_seconds - self.short_seconds
        self.handling_seconds = own.handling_seconds - self.handling_seconds
        self.coldness = own.coldness - self.coldness
        self.num_operations = own.num_operations - self.num_operations
        self.num_plain = own.num_plain - self.num_plain
        self.num_cells = own.num_cells - self.num_cells
        self.num_reads = own.num_reads - self.num_reads
        self.num_modules = own.num_modules - self.num_modules


class Call:
    """One call of a module."""

    __slots__ = (
        "address",
        "backward_memory",
        "backward_self",
        "clock",
        "depth",
        "end",
        "end_ns",
        "forward_memory",
        "forward_nonfinite",
        "grad_in_nonfinite",
        "grad_out_nonfinite",
        "index",
        "inputs",
        "module_type",
        "node_coldness",
        "num_events",
        "num_nodes",
        "original",
        "outputs",
        "own_flops",
        "own_flops_backward",
        "parent",
        "pass_num",
        "raised",
        "saved",
        "sequence",
        "sequence_end",
        "short_node_seconds",
        "spans",
        "start",
        "start_ns",
        "step",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        step: "Step",
        address: str,
        module_type: str,
        parent: "Call | None",
        original: "Call | None" = None,
    ) -> None:
        self.index = index
        self.step = step
        self.address = address
        self.module_type = module_type
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.original = original  # the call that this one, inside a backward pass, does again
        self.pass_num: int = 1 if original is None else original.pass_num
        self.raised: str | None = None
        self.inputs = TensorFacts()
        self.outputs = TensorFacts()
        self.start = self.end = 0.0
        self.start_ns = self.end_ns = 0
        self.clock = Clock()
        self.num_events = 0  # what the allocators reported meanwhile
        self.sequence = self.sequence_end = 0  # of the backward nodes that it made
        self.forward_memory: tuple[int, int] | None = None
        self.backward_memory: tuple[int, int] | None = None
        self.backward_self: float | None = None
        self.num_nodes = 0  # backward nodes that were charged to it
        self.short_node_seconds = 0.0  # what those took, each no more than SHORT
        self.node_coldness = 0.0  # how many of those had not run for a while (see OwnTime)
        self.spans: dict[int, Span] = {}  # by backward pass
        self.saved: dict[int, int] | None = None  # storage → bytes
        self.own_flops: int | None = None
        self.own_flops_backward: int | None = None
        self.forward_nonfinite: bool | None = None
        self.grad_in_nonfinite: bool | None = None
        self.grad_out_nonfinite: bool | None = None


class Step:
    """One step while it is being measured."""

    __slots__ = (
        "around_ns", "backward_tasks", "calls", "checking", "end_ns", "forward_end_ns", "has_log",
        "is_deep", "is_logged",
        "is_warmup", "memory", "number", "operations", "outside", "passes", "position", "signature",
        "start_ns",
        "wants_log",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        signature: Signature = (False, False, ()),
        is_warmup: bool = False,
        wants_log: bool = True,
        checking: Checking = Checking.EVERYTHING,
    ) -> None:
        self.number = number
        self.calls: list[Call] = []
        self.operations: list[Any] = []  # at operation level, if it ran in a capture session
        self.passes: dict[str, int] = {}  # address → calls so far
        self.signature = signature
        self.is_warmup = is_warmup
        self.wants_log = wants_log  # at module level, if it is the first of its kind
        self.checking = checking
        self.position = number  # in the loop, with the steps that a schedule lets pass
        self.start_ns = self.end_ns = 0
        self.forward_end_ns = 0  # of the last call from outside
        self.around_ns = 0  # what a capture session took before and after it
        self.outside: list[OutsideSpan] = []
        self.has_log = False  # whether a part of it, or all, ran in a capture session
        self.is_deep = (
            False  # whether it calls so many modules that the backward nodes of some are not seen
        )
        self.is_logged = False  # whether all of it did, and each operation was looked at
        self.memory: tuple[int, int] | None = None
        self.backward_tasks: set[int] = set()  # the backward passes through it

    @property
    def has_grad(self) -> bool:
        """Whether autograd records."""
        return self.signature[1]


def note_tensors(seen: TensorFacts, tensors: Sequence[torch.Tensor], has_keys: bool = True) -> None:
    """Notes shapes, bytes and, with `has_keys`, gradient keys of some tensors."""
    for tensor in tensors:
        seen.shapes.append(tuple(shape_of(tensor)))
        seen.bytes.append(bytes_of(tensor))
        seen.gradient_keys.append(
            _gradient_key(tensor) if has_keys and tensor.requires_grad else None
        )


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor's elements; 0 where torch cannot tell."""
    try:
        return int(tensor.nbytes)
    except (RuntimeError, NotImplementedError, ValueError):  # some layouts, lazy and nested tensors
        return 0


def _gradient_key(tensor: torch.Tensor) -> int | None:
    try:
        node = tensor.grad_fn
    except RuntimeError:  # one of several views whose base was written behind autograd's back
        return None
    return -1 - id(tensor) if node is None else sequence_of(node)
