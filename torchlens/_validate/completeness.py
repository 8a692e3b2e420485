"""Check 6, completeness: nothing was computed, and no memory written, outside the log's knowledge.

The model runs once more under a `TorchDispatchMode`, which stands below the log: torch tells it of
every ATen operation that runs, however it was reached. Each must have run inside a call that left a
row; each that writes memory which was there before the call, inside a call that says so. A run of
its own, because torch takes other ways through some operations while such a mode is on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from torchlens._capture.observer import CallKind, ObservedCall, Observer, PlaceOf
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT, Operation
from torchlens._recording.recording import References, Row
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.user_code import source_line
from torchlens._replay.values import brief
from torchlens._validate.exemptions import ASIDE, CONSTANT, DISTRIBUTED, GRADIENT, UNLOGGED_ATEN
from torchlens._validate.report import Finding, ValidationReport
from torchlens._validate.subject import Subject
from torchlens._validate.unexplained import UnexplainedTensors

Tensor = torch.Tensor
BOUNDARIES = (INPUT, BUFFER, OUTPUT)


class Trespass:
    """An ATen operation that ran, or wrote, outside a logged operation: `row` is the next one to be
    logged.
    """

    __slots__ = ("expected", "found", "is_inside", "row")

    def __init__(self, row: int, is_inside: bool, expected: str, found: str) -> None:
        self.row = row
        self.is_inside = is_inside
        self.expected = expected
        self.found = found


class Census(Observer):
    """Knows, for every ATen operation, which logged call it belongs to."""

    def __init__(self, num_params: int) -> None:
        self.trespasses: list[Trespass] = []
        self.exempted: Counter[str] = Counter()
        # How many ATen operations there were: in this thread, and in each.
        self._count = [0]
        self._counts = [self._count]
        # Storages that the call being made may write to; None while no logged call is being made.
        self._may_write: set[int] | None = None
        self._read: list[str] | None = None
        self._is_aside = False
        self._mode: _Dispatched | None = None
        # Holds the mode aside during calls that do not bear it.
        self._aside = ExitStack()
        self.unexplained = UnexplainedTensors(num_params)
        self._num_before = 0
        self._num_rows = 0
        self._known_storages: set[int] = set()
        # Whose memory is known stays, so that no other gets its number.
        self._alive: list[Any] = []

    @property
    def num_operations(self) -> int:
        """How many ATen operations there were."""
        return sum(count for (count,) in self._counts)

    def for_thread(self) -> "Census":
        """Looks for the same in another thread."""
        other = copy(self)
        other._may_write = other._read = other._mode = None
        other._is_aside = False
        other._aside = ExitStack()
        other._count = [0]
        self._counts.append(other._count)
        return other

    @contextmanager
    def around(self, place: PlaceOf) -> Iterator[None]:
        """Has the dispatcher tell of every ATen operation. Afterwards nothing here holds the run or
        its tensors.
        """
        self._mode = _Dispatched(self, place)
        try:
            with self._mode:
                yield
        finally:
            self._mode = None
            self._known_storages.clear()
            self._alive.clear()

    def pause(self) -> AbstractContextManager[Any]:
        """What is not logged is not looked at: a tracer does not bear it."""
        return nullcontext() if self._mode is None else _without_dispatch_mode(self._mode)

    def add(self, number: int, tensor: Tensor) -> None:
        """Learns memory that exists."""
        self.unexplained.know(number, tensor)
        self._num_rows = max(self._num_rows, number + 1)
        self._known_storages.add(storage_of(tensor))
        self._alive.append(tensor)

    def add_boundary(
        self, number: int, tensor: Tensor, operation: Operation, references: References
    ) -> None:
        """Likewise; an output, or a tensor that the model keeps, may be one that nobody has
        seen.
        """
        if operation is not INPUT:
            self.unexplained.look(number, (tensor,), references)
        self.add(number, tensor)

    def begin(self, call: ObservedCall) -> None:
        """What an opaque call writes to is its own affair; what the recorder copies around others,
        likewise.
        """
        if call.kind not in (CallKind.READ, CallKind.ASIDE):
            for arguments in (call.args, call.kwargs or {}):
                self.unexplained.look(call.first, arguments, call.references)
        if call.kind is CallKind.READ:
            self._read = []
        elif call.kind is CallKind.ASIDE:
            self._is_aside = True
        elif call.kind is CallKind.OPAQUE:
            self._may_write = self._known_storages
            if call.operation.name == "script_function" or isinstance(
                call.operation.func, torch.jit.ScriptModule
            ):
                self._aside.enter_context(
                    self.pause()
                )  # compiled at its first call, which fails where somebody looks
        else:
            self._may_write = set(map(storage_of, call.written))
        self._num_before = self._count[0]

    def abandon(self, call: ObservedCall) -> None:
        """The call is over."""
        self._aside.close()
        self._may_write = self._read = None
        self._is_aside = False

    def end(self, call: ObservedCall, result: Any) -> None:
        """A call that computed tensors must have left a row; a read may compute what it likes if no
        tensor comes of it.
        """
        names = self._read
        self.abandon(call)
        name = call.operation.name
        if call.kind is CallKind.READ:
            given = {
                id(tensor) for tree in (call.args, call.kwargs) for _, tensor in plain_tensors(tree)
            }
            if names and any(id(tensor) not in given for _, tensor in plain_tensors(result)):
                self._trespass(
                    f"{names[0]} to run inside a logged operation",
                    f"{name}, which leaves no entry",
                    False,
                )
        elif (
            call.kind is CallKind.FUNCTION
            and call.last == call.first
            and self._count[0] > self._num_before
        ):
            for _, tensor in plain_tensors(result):
                expected = f"{name} to leave an entry ({_shape(tensor)})"
                self._trespass(expected, "none", is_inside=False)

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: PlaceOf) -> None:
        """Takes note of one ATen operation."""
        self._count[0] += 1
        name = func._schema.name
        if self._read is not None:
            self._read.append(name)
            return
        if self._may_write is None:
            reason = (
                ASIDE
                if self._is_aside
                else f"{name}: {UNLOGGED_ATEN[name]}"
                if name in UNLOGGED_ATEN
                else None
            )
            if reason is not None:
                self.exempt(reason)
                if name == "aten::lift_fresh":
                    self.unexplained.note_fresh(args[0])
            else:
                found = f"it ran outside any{_place_text(*place(2))}"
                self._trespass(f"{name} to run inside a logged operation", found, False)
            return
        for argument, value in _arguments(func._schema, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for _, tensor in plain_tensors(value):
                    storage = storage_of(tensor)
                    if storage in self._known_storages and storage not in self._may_write:
                        expected = f"{name} to write only what the operation says it writes"
                        found = f"it wrote to a tensor of {_shape(tensor)} that was there before"
                        self._trespass(expected, found, True)

    def exempt(self, reason: str) -> None:
        """Something is let pass."""
        self.exempted[reason] += 1

    def _trespass(self, expected: str, found: str, is_inside: bool) -> None:
        self.trespasses.append(Trespass(self._num_rows, is_inside, expected, found))


class _Dispatched(TorchDispatchMode):
    """Tells a census of every ATen operation."""

    # `torch.cond` and its like come as they are, and what they are made of runs inside them.
    supports_higher_order_operators = True

    def __init__(self, census: Census, place: PlaceOf) -> None:
        super().__init__()
        self._census = census
        self._place = place

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._go_into(func, args, kwargs or {})
        # Inside an opaque call the recorder would take the ATen operation for one of the model's
        # own.
        with torch._C.DisableTorchFunction():
            self._census.saw(func, args, kwargs or {}, self._place)
            return func(*args, **(kwargs or {}))

    def _go_into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `torch.while_loop` or its like so that the operations it is made of are seen, by the
        log and here.

        Some (`torch.cond`) will not run where somebody looks: of those, the log alone sees what
        they are made of.
        """
        kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if kernel is None or "_get_current_dispatch_mode" in kernel.__code__.co_names:
            self._census.exempt(f"{func} does not let the dispatcher tell what it is made of")
            return func(*args, **kwargs)
        with self:
            return kernel(*args, **kwargs)


@contextmanager
def _without_dispatch_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """Takes a mode off the dispatcher's stack for a while, if it is there, and puts it back in its
    place.
    """
    stack = _get_current_dispatch_mode_stack()
    place = next((level for level, own in enumerate(stack) if own is mode), len(stack))
    above = [_pop_mode() for _ in range(len(stack) - place)]
    try:
        for other in reversed(above[:-1]):
            _push_mode(other)
        yield
    finally:
        if above:
            for _ in above[:-1]:
                _pop_mode()
            for other in reversed(above):
                _push_mode(other)


def check_completeness(
    subject: Subject, census: Census, steps: Sequence[Row] | None, report: ValidationReport
) -> None:
    """Reports what the census found in a run that did `steps`, and the arguments that calls changed
    without saying so.
    """
    rows = subject.log.recording.rows
    report.num_checked["completeness"] += census.num_operations
    for reason, count in census.exempted.items():
        report.exemptions["completeness", reason] += count

    def find(layer: str, expected: str, found: str) -> None:
        report.findings.append(Finding("completeness", layer, expected, found))

    for trespass in census.trespasses:
        number = (
            min(trespass.row, len(rows) - 1)
            if trespass.is_inside
            else min(trespass.row, len(rows)) - 1
        )
        label = subject.label(number) if number >= 0 else ""
        find(
            label if trespass.is_inside or not label else f"after {label}",
            trespass.expected,
            trespass.found,
        )
    for call in subject.evidence.calls:
        for path, change in call.changed:
            name = (
                rows[call.first].operation.name if call.first < len(rows) else call.operation.name
            )
            where = path[0] if len(path) == 1 else path
            expected = (
                f"{name} to leave argument {where} as it is, for it does not say that it writes "
                "there"
            )
            find(subject.label(call.first), expected, change)
    for number, path in subject.evidence.unexplained.made_since(census.unexplained):
        tensor = subject.evidence.unexplained.found[number, path]
        unexplained = subject.evidence.unexplained
        if (number, path) in census.unexplained.constants:
            report.exemptions["completeness", CONSTANT] += 1
        elif (number, path) in unexplained.gradients or (number, path) in unexplained.distributed:
            report.exemptions[
                "completeness", GRADIENT if (number, path) in unexplained.gradients else DISTRIBUTED
            ] += 1
        else:
            expected = "each tensor that is made in the pass to come from an entry"
            find(
                subject.label(number),
                expected,
                f"{brief(tensor)} from nowhere, made anew in each run",
            )
    if steps is not None:
        names, names_again = ([row.operation.name for row in some] for some in (rows, steps))
        if subject.log.recording.branches:  # threads take turns in another order each time
            names, names_again = sorted(names), sorted(names_again)
        if names != names_again:
            expected = f"the same {len(rows)} steps when run again under the dispatcher's eyes"
            find("", expected, f"{len(steps)}, or others")
    _check_left_out(subject, find)


def _check_left_out(subject: Subject, find: Callable[[str, str, str], None]) -> None:
    """What lies between input and output is in the log; and where no tensor goes in, or none comes
    out, all that ran is.
    """
    recording, graph = subject.log.recording, subject.log.graph
    inputs = {number for _, number in recording.inputs}
    outputs = {number for _, number in recording.outputs}
    if not inputs or not outputs:
        left_out = sum(row.operation not in BOUNDARIES for row in recording.rows)
        if left_out and all(
            recording.rows[number].operation in BOUNDARIES for number in graph.recorded
        ):
            find("", f"the {left_out} operations that ran to be in the log", "none")
        return
    reads = [
        {s for sources in subject.reads(n).values() for s in sources}
        for n in range(len(recording.rows))
    ]
    reached = set(inputs)
    for number, own in enumerate(reads):
        if not own.isdisjoint(reached):
            reached.add(number)
    leading = set(outputs)
    for number in range(len(reads) - 1, -1, -1):
        if number in leading:
            leading |= reads[number]
    for number in sorted(reached & leading - set(graph.recorded)):
        find(
            subject.label(number),
            "what leads from an input to an output to be in the log",
            "it was left out",
        )


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each argument of a schema with what was given for it."""
    found = list(zip(schema.arguments, args, strict=False))
    return found + [
        (argument, kwargs[argument.name])
        for argument in schema.arguments
        if argument.name in kwargs
    ]


def _place_text(module: str, code: CodeType | None, instruction: int) -> str:
    inside = f" in module {module!r}" if module else ""
    return inside if code is None else f"{inside}, at {source_line(code, instruction)}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
