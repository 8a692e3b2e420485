"""Check 5, completeness: nothing was computed, and no memory written, outside the log's knowledge.

The model runs once more under a `TorchDispatchMode`, which stands below the log: torch tells it of every ATen operation
that runs, however it was reached. Each must have run inside a call that left a row; each that writes memory which was
there before the call, inside a call that says so. A run of its own, because torch takes other ways through some
operations while such a mode is on.
"""

from collections.abc import Sequence
from copy import copy
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchlens.capture.memory import storage_of
from torchlens.capture.observer import CallKind, ObservedCall, Observer, PlaceOf
from torchlens.capture.recording import Row
from torchlens.capture.trees import plain_tensors
from torchlens.history.log import source_line
from torchlens.validation.exemptions import ASIDE, UNLOGGED_ATEN
from torchlens.validation.report import Finding, ValidationReport
from torchlens.validation.subject import Subject

__all__ = ["Census", "Trespass", "check_completeness"]

Tensor = torch.Tensor


class Trespass:
    """An ATen operation that ran, or wrote, outside a logged operation: `row` is the next one to be logged."""

    __slots__ = ("expected", "found", "is_inside", "row")

    def __init__(self, row: int, is_inside: bool, expected: str, found: str) -> None:
        self.row = row
        self.is_inside = is_inside
        self.expected = expected
        self.found = found


class Census(Observer):
    """Knows, for every ATen operation, which logged call it belongs to."""

    def __init__(self) -> None:
        self.trespasses: list[Trespass] = []
        self.exempted: dict[str, int] = {}  # by reason
        # How many ATen operations there were: in this thread, and in each.
        self._count = [0]
        self._counts = [self._count]
        # Storages that the call being made may write to; None while no logged call is being made.
        self._may_write: set[int] | None = None
        self._read: list[str] | None = None
        self._is_aside = False
        self._num_before = 0
        self._num_rows = 0
        self._known: set[int] = set()
        # Whose memory is known stays, so that no other gets its number.
        self._alive: list[Any] = []

    @property
    def num_operations(self) -> int:
        """How many ATen operations there were."""
        return sum(count for (count,) in self._counts)

    def for_thread(self) -> "Census":
        """Looks for the same in another thread."""
        other = copy(self)
        other._may_write = other._read = None
        other._is_aside = False
        other._count = [0]
        self._counts.append(other._count)
        return other

    def around(self, place: PlaceOf) -> "_Dispatched":
        """Has the dispatcher tell of every ATen operation."""
        return _Dispatched(self, place)

    def add(self, number: int, tensor: Tensor) -> None:
        """Learns memory that exists."""
        self._num_rows = max(self._num_rows, number + 1)
        self._known.add(storage_of(tensor))
        self._alive.append(tensor)

    def begin(self, call: ObservedCall) -> None:
        """What an opaque call writes to is its own affair; what the recorder copies around others, likewise."""
        if call.kind is CallKind.READ:
            self._read = []
        elif call.kind is CallKind.ASIDE:
            self._is_aside = True
        elif call.kind is CallKind.OPAQUE:
            self._may_write = self._known
        else:
            self._may_write = set(map(storage_of, call.written))
        self._num_before = self._count[0]

    def abandon(self, call: ObservedCall) -> None:
        """The call is over."""
        self._may_write = self._read = None
        self._is_aside = False

    def end(self, call: ObservedCall, result: Any) -> None:
        """A call that computed tensors must have left a row; a read may compute what it likes if no tensor comes of it."""
        names = self._read
        self.abandon(call)
        name = call.operation.name
        if call.kind is CallKind.READ:
            given = {id(tensor) for tree in (call.args, call.kwargs) for _, tensor in plain_tensors(tree)}
            if names and any(id(tensor) not in given for _, tensor in plain_tensors(result)):
                self._trespass(f"{names[0]} to run inside a logged operation", f"{name}, which leaves no entry", False)
        elif call.kind is CallKind.FUNCTION and call.last == call.first and self._count[0] > self._num_before:
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
            reason = ASIDE if self._is_aside else f"{name}: {UNLOGGED_ATEN[name]}" if name in UNLOGGED_ATEN else None
            if reason is not None:
                self.exempted[reason] = self.exempted.get(reason, 0) + 1
            else:
                found = f"it ran outside any{_place_text(*place(2))}"
                self._trespass(f"{name} to run inside a logged operation", found, False)
            return
        for argument, value in _arguments(func._schema, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for _, tensor in plain_tensors(value):
                    storage = storage_of(tensor)
                    if storage in self._known and storage not in self._may_write:
                        expected = f"{name} to write only what the operation says it writes"
                        found = f"it wrote to a tensor of {_shape(tensor)} that was there before"
                        self._trespass(expected, found, True)

    def _trespass(self, expected: str, found: str, is_inside: bool) -> None:
        self.trespasses.append(Trespass(self._num_rows, is_inside, expected, found))


class _Dispatched(TorchDispatchMode):
    """Tells a census of every ATen operation."""

    def __init__(self, census: Census, place: PlaceOf) -> None:
        super().__init__()
        self._census = census
        self._place = place

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Inside an opaque call the recorder would take the ATen operation for one of the model's own.
        with torch._C.DisableTorchFunction():
            self._census.saw(func, args, kwargs or {}, self._place)
            return func(*args, **(kwargs or {}))


def check_completeness(subject: Subject, census: Census, steps: Sequence[Row], report: ValidationReport) -> None:
    """Reports what the census found in a run that did `steps`, and the arguments that calls changed without saying so."""
    rows = subject.log.recording.rows
    report.num_checked["completeness"] += census.num_operations
    for reason, count in census.exempted.items():
        report.exemptions["completeness", reason] += count
    for trespass in census.trespasses:
        number = min(trespass.row, len(rows) - 1) if trespass.is_inside else min(trespass.row, len(rows)) - 1
        label = subject.label(number) if number >= 0 else ""
        place = label if trespass.is_inside or not label else f"after {label}"
        report.findings.append(Finding("completeness", place, trespass.expected, trespass.found))
    for call in subject.evidence.calls:
        for path, change in call.changed:
            name = rows[call.first].operation.name
            where = path[0] if len(path) == 1 else path
            expected = f"{name} to leave argument {where} as it is, for it does not say that it writes there"
            report.findings.append(Finding("completeness", subject.label(call.first), expected, change))
    names, names_again = ([row.operation.name for row in some] for some in (rows, steps))
    if subject.log.recording.branches:  # threads take turns in another order each time
        names, names_again = sorted(names), sorted(names_again)
    if names != names_again:
        expected = f"the same {len(rows)} steps when run again under the dispatcher's eyes"
        report.findings.append(Finding("completeness", "", expected, f"{len(steps)}, or others"))


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each argument of a schema with what was given for it."""
    found = list(zip(schema.arguments, args, strict=False))
    return found + [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]


def _place_text(module: str, code: CodeType | None, instruction: int) -> str:
    inside = f" in module {module!r}" if module else ""
    return inside if code is None else f"{inside}, at {source_line(code, instruction)}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
