"""Check 6, completeness: the log knows every operation that ran and every write to memory.

The model runs once more under a `TorchDispatchMode`, which sees every ATen operation, however it
was reached. Each must have run inside a call that left a row; each that writes to memory which
existed before the call, inside a call that declares it. It is a run of its own, because torch takes
other ways through some operations while such a mode is on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
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
from torchlens._recording.operations import INPUT, Operation
from torchlens._recording.recording import References, Row
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction
from torchlens._recording.user_code import source_line
from torchlens._replay.values import brief
from torchlens._validate.exemptions import ASIDE, UNLOGGED_ATEN
from torchlens._validate.report import ValidationReport
from torchlens._validate.witness import Subject, UnexplainedTensors, WitnessedCall, location_of

Tensor = torch.Tensor
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


@dataclass(frozen=True, slots=True)
class Trespass:
    """An ATen operation that ran, or wrote, outside a logged operation; `row` is the next one to be
    logged.
    """

    row: int
    is_inside: bool
    expected: str
    found: str


class Census(Observer):
    """Finds the logged call that each ATen operation belongs to."""

    def __init__(self, num_params: int) -> None:
        self.trespasses: list[Trespass] = []
        self.exempted: Counter[str] = Counter()
        # How many ATen operations there were: in this thread, and in each.
        self._count = [0]
        self._counts = [self._count]
        # The logged call in progress, and the storages that it may write to.
        self._call: ObservedCall | None = None
        self._may_write: set[int] = set()
        # The ATen operations inside a call that only reads a value.
        self._read: list[str] = []
        self._mode: _Dispatched | None = None
        # Takes the mode off during calls that do not work under it.
        self._aside = ExitStack()
        self.unexplained = UnexplainedTensors(num_params)
        self._num_before = 0
        self._num_rows = 0
        self._known_storages: set[int] = set()
        # Keeps known memory alive, so that its addresses stay unique.
        self._alive: list[Any] = []

    @property
    def num_operations(self) -> int:
        """How many ATen operations there were."""
        return sum(count for (count,) in self._counts)

    def for_thread(self) -> "Census":
        """A census of another thread, with the same results."""
        other = copy(self)
        other._call = other._mode = None
        other._aside = ExitStack()
        other._count = [0]
        self._counts.append(other._count)
        return other

    @contextmanager
    def around(self, place: PlaceOf) -> Iterator[None]:
        """Has the dispatcher report every ATen operation. Afterwards releases the run's tensors."""
        self._mode = mode = _Dispatched(self, place)
        try:
            with _no_mode_left(), _told_of_higher_order(), self._mode:
                yield
        finally:
            mode.is_on, self._mode = False, None
            self._known_storages.clear()
            self._alive.clear()

    def pause(self) -> AbstractContextManager[Any]:
        """Takes the mode off where nothing is logged: a tracer does not work under it."""
        return nullcontext() if self._mode is None else _without_dispatch_mode(self._mode)

    def add(self, number: int, tensor: Tensor) -> None:
        """Notes memory that exists now."""
        self.unexplained.know(number, tensor)
        self._num_rows = max(self._num_rows, number + 1)
        self._known_storages.add(storage_of(tensor))
        self._alive.append(tensor)

    def add_boundary(
        self, number: int, tensor: Tensor, operation: Operation, references: References
    ) -> None:
        """Likewise; an output or a tensor that the model keeps may come from an unseen place."""
        if operation is not INPUT:
            self.unexplained.look(number, (tensor,), references)
        self.add(number, tensor)

    def begin(self, call: ObservedCall) -> None:
        """Notes what the call may write to: an opaque one, to anything."""
        self._call = call
        self._read = []
        self._num_before = self._count[0]
        if call.kind in (CallKind.READ, CallKind.ASIDE):
            return
        for arguments in (call.args, call.kwargs or {}):
            self.unexplained.look(call.first, arguments, call.references)
        if call.kind is not CallKind.OPAQUE:
            self._may_write = set(map(storage_of, call.written))
            return
        self._may_write = self._known_storages
        func, name = call.operation.func, call.operation.name
        if name == "script_function" or isinstance(func, torch.jit.ScriptModule):
            # compiled at its first call, which fails under a mode
            self._aside.enter_context(self.pause())

    def abandon(self, call: ObservedCall) -> None:
        """The call is over."""
        self._aside.close()
        self._call = None

    def end(self, call: ObservedCall, result: Any) -> None:
        """A call that computed tensors must have left a row; a read may run anything, as long as it
        makes no tensor.
        """
        self.abandon(call)
        name = call.operation.name
        if call.kind is CallKind.READ and self._read:
            given = {id(tensor) for _, tensor in plain_tensors((call.args, call.kwargs))}
            if any(id(tensor) not in given for _, tensor in plain_tensors(result)):
                expected = f"{self._read[0]} to run inside a logged operation"
                self._trespass(expected, f"{name}, which leaves no entry")
        elif call.kind is CallKind.FUNCTION and self._count[0] > self._num_before:
            for _, tensor in plain_tensors(result) if call.last == call.first else ():
                self._trespass(f"{name} to leave an entry ({brief(tensor)})", "none")

    def note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: PlaceOf
    ) -> None:
        """Notes one ATen operation."""
        self._count[0] += 1
        if self._call is None or self._call.kind is CallKind.ASIDE:
            self._note_outside(func._schema.name, args, place)
        elif self._call.kind is CallKind.READ:
            self._read.append(func._schema.name)
        else:
            self._note_writes(func._schema, args, kwargs)

    def _note_outside(self, name: str, args: tuple[Any, ...], place: PlaceOf) -> None:
        """An operation outside all logged calls."""
        if self._call is not None:
            self.exempt(ASIDE)
        elif name in UNLOGGED_ATEN:
            self.exempt(f"{name}: {UNLOGGED_ATEN[name]}")
            if name == "aten::lift_fresh":
                self.unexplained.note_from_numbers(args[0])
        else:
            where = _place_text(*place(3))
            self._trespass(f"{name} to run inside a logged operation", f"it ran outside any{where}")

    def _note_writes(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation inside a logged call may write only what that declares."""
        for argument, value in _arguments(schema, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for _, tensor in plain_tensors(value):
                storage = storage_of(tensor)
                if storage in self._known_storages and storage not in self._may_write:
                    expected = f"{schema.name} to write only what the operation says it writes"
                    found = f"it wrote to an existing tensor ({brief(tensor)})"
                    self._trespass(expected, found, is_inside=True)

    def exempt(self, reason: str) -> None:
        """Counts an operation that need not be logged."""
        self.exempted[reason] += 1

    def _trespass(self, expected: str, found: str, is_inside: bool = False) -> None:
        self.trespasses.append(Trespass(self._num_rows, is_inside, expected, found))


class _Dispatched(TorchDispatchMode):
    """Reports every ATen operation to a census."""

    # `torch.cond` and its like come as one operation; their parts run inside them.
    supports_higher_order_operators = True

    def __init__(self, census: Census, place: PlaceOf) -> None:
        super().__init__()
        self._census = census
        self._place = place
        self.is_on = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._go_into(func, args, kwargs or {})
        # Inside an opaque call the recorder would take the ATen operation for one of the model.
        with NoTorchFunction():
            self._census.note(func, args, kwargs or {}, self._place)
            return func(*args, **(kwargs or {}))

    def _go_into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `torch.while_loop` or its like so that its parts are seen, by the log and here.

        Some (`torch.cond`) do not run under a mode: of those, only the log sees the parts.
        """
        kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if kernel is None or "_get_current_dispatch_mode" in kernel.__code__.co_names:
            self._census.exempt(f"{func} does not show its parts to the dispatcher")
            return func(*args, **kwargs)
        with self:
            return kernel(*args, **kwargs)


def _hand_to_mode(operator: Any, mode: _Dispatched, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


@contextmanager
def _told_of_higher_order() -> Iterator[None]:
    """Has the dispatcher hand `torch.cond` and its like to a `_Dispatched`. Without
    `supports_higher_order_operators` (torch 2.6), each operator keeps a table of modes.
    """
    is_asked = hasattr(TorchDispatchMode, "supports_higher_order_operators")
    tables = [
        (operator, operator.python_key_table)
        for operator in (() if is_asked else torch._ops._higher_order_ops.values())
    ]
    for operator, table in tables:
        table[_Dispatched] = partial(_hand_to_mode, operator)
    try:
        yield
    finally:
        for _, table in tables:
            table.pop(_Dispatched, None)


@contextmanager
def _no_mode_left() -> Iterator[None]:
    """Takes off the dispatch modes that are left, twice: Ctrl-C may cut the first time short."""
    num_before = _num_dispatch_modes()
    try:
        try:
            yield
        finally:
            _keep_modes(num_before)
    finally:
        _keep_modes(num_before)


def _keep_modes(num: int) -> None:
    while _num_dispatch_modes() > num:
        _pop_mode()


@contextmanager
def _without_dispatch_mode(mode: "_Dispatched") -> Iterator[None]:
    """Takes a mode off the dispatcher's stack, if it is there, and puts it back in its place."""
    stack = _get_current_dispatch_mode_stack()
    place = stack.index(mode) if mode in stack else len(stack)
    try:
        _set_modes_from(place, stack[place + 1 :])
        yield
    finally:
        if mode.is_on:  # after Ctrl-C, this may come too late
            _set_modes_from(place, stack[place:])


def _set_modes_from(place: int, modes: Sequence[TorchDispatchMode]) -> None:
    """Makes these the dispatch modes from this place of the stack on."""
    _keep_modes(place)
    for mode in modes:
        _push_mode(mode)


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each argument of a schema with what was given for it."""
    named = [(own, kwargs[own.name]) for own in schema.arguments if own.name in kwargs]
    return [*zip(schema.arguments, args, strict=False), *named]


def _place_text(module: str, code: CodeType | None, instruction: int) -> str:
    inside = f" in module {module!r}" if module else ""
    return inside if code is None else f"{inside}, at {source_line(code, instruction)}"


# -- the check
# -------------------------------------------------------------------------------------------------

_Find = Callable[[str, str, str], None]


def check_completeness(
    subject: Subject, census: Census, steps: Sequence[Row] | None, report: ValidationReport
) -> None:
    """Reports what the census found in a run that did `steps`, and what the witness saw change."""
    report.num_checked["completeness"] += census.num_operations
    for reason, count in census.exempted.items():
        report.exemptions["completeness", reason] += count

    def find(layer: str, expected: str, found: str) -> None:
        report.add_finding("completeness", layer, expected, found)

    for trespass in census.trespasses:
        _report_trespass(subject, trespass, find)
    for call in subject.witness.calls:
        _report_changes(subject, call, find)
    _check_unexplained(subject, census.unexplained, report, find)
    _check_left_out(subject, find)
    names = [row.operation.name for row in subject.log.recording.rows]
    names_again = names if steps is None else [row.operation.name for row in steps]
    if subject.log.recording.branches:  # threads take turns in another order each time
        names, names_again = sorted(names), sorted(names_again)
    if names != names_again:
        find(
            "",
            f"the same {len(names)} steps under a dispatch mode",
            f"{len(names_again)}, or others",
        )


def _report_trespass(subject: Subject, trespass: Trespass, find: _Find) -> None:
    num_rows = len(subject.log.recording.rows)
    if trespass.is_inside:
        layer = subject.label(min(trespass.row, num_rows - 1))
    else:
        last = min(trespass.row, num_rows) - 1
        layer = f"after {subject.label(last)}" if last >= 0 else ""
    find(layer, trespass.expected, trespass.found)


def _report_changes(subject: Subject, call: WitnessedCall, find: _Find) -> None:
    for path, change in call.changed:
        where = f"argument {location_of(path)}"
        expected = f"{call.operation.name} to leave {where}, which it does not say it writes to"
        find(subject.label(call.first), expected, change)


def _check_unexplained(
    subject: Subject, others: UnexplainedTensors, report: ValidationReport, find: _Find
) -> None:
    unexplained = subject.witness.unexplained
    for place in unexplained.made_since(others):
        reason = unexplained.reasons.get(place) or others.reasons.get(place)
        if reason is not None:
            report.exemptions["completeness", reason] += 1
        else:
            expected = "each tensor that is made in the pass to come from an entry"
            found = f"{brief(unexplained.found[place])} from nowhere, made anew in each run"
            find(subject.label(place[0]), expected, found)


def _check_left_out(subject: Subject, find: _Find) -> None:
    """Operations between an input and an output are in the log; without inputs or outputs, all."""
    recording, graph = subject.log.recording, subject.log.graph
    if recording.inputs and recording.outputs:
        for number in sorted(_between(subject) - set(graph.recorded)):
            expected = "what leads from an input to an output to be in the log"
            find(subject.label(number), expected, "it was left out")
        return
    made = {number for call in subject.calls for number in range(call.first, call.last)}
    if made and made.isdisjoint(graph.recorded):
        find("", f"the {len(made)} operations that ran to be in the log", "none")


def _between(subject: Subject) -> set[int]:
    """The rows on a path from an input to an output."""
    recording = subject.log.recording
    reads = [set().union(*subject.reads(n).values()) for n in range(len(recording.rows))]
    after_input = {number for _, number in recording.inputs}
    before_output = {number for _, number in recording.outputs}
    for number, own in enumerate(reads):
        if own & after_input:
            after_input.add(number)
    for number in reversed(range(len(reads))):
        if number in before_output:
            before_output |= reads[number]
    return after_input & before_output
