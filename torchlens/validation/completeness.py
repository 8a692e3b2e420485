"""Check 5, completeness: nothing was computed, and no memory written, outside the log's knowledge.

The model runs once more under a `TorchDispatchMode`, which stands below the log: torch tells it of every ATen operation
that runs, however it was reached. Each must have run inside a call that left a row; each that writes memory which was
there before the call, inside a call that says so. A run of its own, because torch takes other ways through some
operations while such a mode is on.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchlens.capture.memory import storage_of
from torchlens.capture.operations import Kind, operation_of
from torchlens.capture.recorder import Recorder
from torchlens.capture.session import Session
from torchlens.capture.trees import plain_tensors
from torchlens.history.log import source_line
from torchlens.validation.exemptions import UNLOGGED_ATEN
from torchlens.validation.report import Finding, ValidationReport
from torchlens.validation.subject import Subject

__all__ = ["CensusSession", "Trespass", "check_completeness"]

Tensor = torch.Tensor


class Trespass:
    """An ATen operation that ran, or wrote, outside a logged operation: `row` is the next one to be logged."""

    __slots__ = ("expected", "found", "is_inside", "row")

    def __init__(self, row: int, is_inside: bool, expected: str, found: str) -> None:
        self.row = row
        self.is_inside = is_inside
        self.expected = expected
        self.found = found


class Census(Recorder):
    """A recorder that knows, for every ATen operation, which logged call it belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trespasses: list[Trespass] = []
        self.exempted: dict[str, int] = {}
        self.num_operations = 0
        # Storages that the call being made may write to; None while no logged call is being made.
        self._may_write: set[int] | None = None
        self._read: list[str] | None = None
        self._known: set[int] = set()
        self._num_known = 0
        # Whose memory is known stays, so that no other gets its number.
        self._alive: list[Any] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = operation_of(func)
        if self.collected is not None or operation.kind is Kind.INLINE:
            return super().__torch_function__(func, types, args, kwargs)
        if operation.kind is not Kind.OPERATION:
            return self._watch_read(func, types, args, kwargs)
        if self.operator is not None:
            operation = self.operator
        self._know()
        self._may_write = set(map(storage_of, self._written(operation, args, kwargs)))
        first = len(self.rows)
        seen = self.num_operations
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        finally:
            self._may_write = None
        if len(self.rows) == first and self.num_operations > seen and any(True for _ in plain_tensors(result)):
            self._trespass(f"{operation.name} to leave an entry", "none", is_inside=False)
        return result

    def record_opaque(self, name: str, func: Callable[..., Any], run: Callable[[], Any], arguments: Any) -> Any:
        """As in Recorder; what it writes to is its own affair."""
        self._know()
        self._may_write = self._known
        try:
            return super().record_opaque(name, func, run, arguments)
        finally:
            self._may_write = None

    def record_identity(self, tensor: Tensor) -> int:
        """As in Recorder, which may copy a value that it saved: its own affair too."""
        self._may_write = set()
        try:
            return super().record_identity(tensor)
        finally:
            self._may_write = None

    def tie_function(self, name: str, func: Any, args: tuple[Any, ...], outputs: Sequence[Tensor], first: int) -> None:
        """As in Recorder; likewise."""
        self._may_write = set()
        try:
            super().tie_function(name, func, args, outputs, first)
        finally:
            self._may_write = None

    def _watch_read(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Reading a value may compute what it likes, as long as no tensor comes of it."""
        self._read = []
        try:
            result = super().__torch_function__(func, types, args, kwargs)
            names = self._read
        finally:
            self._read = None
        given = {id(tensor) for tree in (args, kwargs) for _, tensor in plain_tensors(tree)}
        made = [tensor for _, tensor in plain_tensors(result) if id(tensor) not in given]
        if made and names:
            name = operation_of(func).name
            self._trespass(f"{names[0]} to run inside a logged operation", f"{name}, which leaves no entry", False)
        return result

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes note of one ATen operation."""
        self.num_operations += 1
        name = func._schema.name
        if self._read is not None:
            self._read.append(name)
            return
        if self._may_write is None:
            if name in UNLOGGED_ATEN:
                self.exempted[name] = self.exempted.get(name, 0) + 1
            else:
                self._trespass(f"{name} to run inside a logged operation", f"it ran outside any{self._place()}", False)
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
        self.trespasses.append(Trespass(len(self.rows), is_inside, expected, found))

    def _know(self) -> None:
        """Learns the memory that exists before a call."""
        with torch._C.DisableTorchFunction():
            self._complete()
        storages = self.memory.storages
        self._known.update(storages[self._num_known :])
        self._alive += self.memory.values[self._num_known :]
        self._num_known = len(storages)
        if len(self._known) == self._num_known:
            self._known.update(map(storage_of, self.outside))

    def _place(self) -> str:
        code, instruction = self.user_code(sys._getframe(3))
        module = self.module_calls[self.module_call].address
        inside = f" in module {module!r}" if module else ""
        return inside if code is None else f"{inside}, at {source_line(code, instruction)}"


class _Dispatched(TorchDispatchMode):
    """Tells a census of every ATen operation."""

    def __init__(self, census: Census) -> None:
        super().__init__()
        self._census = census

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Inside an opaque call the recorder would take the ATen operation for one of the model's own.
        with torch._C.DisableTorchFunction():
            self._census.saw(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


class CensusSession(Session):
    """A session that counts what runs below the log."""

    recorder_type = Census

    @property
    def census(self) -> Census:
        assert isinstance(self._recorder, Census)
        return self._recorder

    def _run_logged(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        with _Dispatched(self.census):
            return super()._run_logged(args, kwargs)


def check_completeness(subject: Subject, census: Census, report: ValidationReport) -> None:
    """Reports what the census found, and the arguments that calls changed without saying so."""
    rows = subject.log.recording.rows
    report.num_checked["completeness"] += census.num_operations
    for name, count in census.exempted.items():
        report.exemptions["completeness", f"{name}: {UNLOGGED_ATEN[name]}"] += count
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
    if [row.operation.name for row in rows] != [row[0].name for row in census.rows]:
        expected = f"the same {len(rows)} steps when run again under the dispatcher's eyes"
        report.findings.append(Finding("completeness", "", expected, f"{len(census.rows)}, or others"))


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each argument of a schema with what was given for it."""
    found = list(zip(schema.arguments, args, strict=False))
    return found + [(argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs]


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
