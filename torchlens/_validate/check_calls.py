"""Check 2, calls: each entry is one tensor of one call, with the right function, arguments and
modules.

The tests of torchlens also check the bookkeeping that follows from it: lines of code, layers,
passes, the names of parameters and buffers.
"""

import inspect
from typing import Any

import torch

from torchlens._recording.recording import Recording, Row
from torchlens._recording.regions import shape_of
from torchlens._recording.trees import Path, named_tensors, path_text
from torchlens._replay.values import brief
from torchlens._validate.report import ValidationReport
from torchlens._validate.snapshots import is_same_as_frozen
from torchlens._validate.witness import Subject, WitnessedCall


def check_calls(
    subject: Subject,
    logged: Recording,
    model: torch.nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    report: ValidationReport,
) -> None:
    """Compares each row of the log with the call it stands for.

    `logged` is a recording of another run. The model must be in the state it began the runs in.
    """
    addresses = {id(module): _address(name) for name, module in model.named_modules()}
    for module, outermost, name in subject.witness.running_modules.values():
        if outermost is model:  # some modules were made in the pass
            addresses.setdefault(id(module), _address(name))
    check = _CallsCheck(subject, logged, report, set(addresses.values()))
    check.check_tensors()
    for call in subject.calls:
        running = [addresses[module] for module in call.modules if addresses.get(module)]
        for number in range(call.first, call.last):
            check.check_row(call, number)
            check.check_modules(number, running)
    recording = subject.log.recording
    for _, number in (*recording.inputs, *recording.buffers, *recording.outputs):
        check.check_modules(number, [])
    check.check_inputs(_inputs_by_path(model, args, kwargs))
    check.check_booleans()


class _CallsCheck:
    def __init__(
        self, subject: Subject, logged: Recording, report: ValidationReport, known: set[str]
    ) -> None:
        self._subject = subject
        self._known = known  # addresses; a function may make further modules while it runs
        self._logged = logged
        self._report = report
        self._recording = subject.log.recording
        self._tensors = subject.witness.tensors

    def _find(self, number: int, expected: str, found: str) -> None:
        label = self._subject.label(number) if number >= 0 else ""
        self._report.add_finding("calls", label, expected, found)

    def check_tensors(self) -> None:
        """Each tensor that was seen has one row, with its shape and dtype."""
        rows = self._recording.rows
        num_seen = 1 + max(self._tensors, default=-1)
        self._report.num_checked["calls"] += num_seen
        if len(rows) != num_seen:
            self._find(-1, f"{num_seen} entries, one for each tensor", str(len(rows)))
        for number, row in enumerate(rows):
            seen = self._tensors.get(number)
            if seen is None:
                continue
            if tuple(row.shape) != tuple(shape_of(seen.value)) or row.dtype != seen.value.dtype:
                self._find(number, brief(seen.value), f"{tuple(row.shape)} {row.dtype}")

    def check_row(self, call: WitnessedCall, number: int) -> None:
        """The row has the function and the arguments of the call."""
        row, name = self._recording.rows[number], call.operation.name
        if row.operation != call.operation:
            self._find(number, f"{name}, which was called", _function(row))
        elif not _has_arguments_of(row, call):
            other = self._logged.rows[number] if number < len(self._logged.rows) else row
            if other.operation == row.operation and not _has_arguments_of(other, call):
                label = self._subject.label(number)
                reason = f"{name} has other arguments in each run, or changes them"
                self._report.add_not_shown("calls", label, "numbers", reason)
            else:
                self._find(number, f"the arguments that {name} was called with", "others")

    def check_modules(self, number: int, running: list[str]) -> None:
        """The row is in the modules that were running."""
        found = self._modules_of(self._recording.rows[number].module_call)
        if self._recording.branches:  # a thread's stack does not show where it was started
            found = found[len(found) - len(running) :] if running else []
        if found != running:
            self._find(number, f"to run in {_chain(running)}", _chain(found))

    def _modules_of(self, call: int) -> list[str]:
        """The modules that were running according to the log, outermost first, without the model
        itself.
        """
        calls, found = self._recording.module_calls, list[str]()
        while 0 < call < len(calls) and len(found) <= len(calls):
            found.append(calls[call].address)
            call = calls[call].parent
        return [address for address in found[::-1] if address in self._known]

    def check_inputs(self, inputs: dict[Path, torch.Tensor]) -> None:
        """The input entries are the tensors of the arguments that they are named after."""
        for path, number in self._recording.inputs:
            tensor, seen = inputs.get(path), self._tensors.get(number)
            if tensor is not None and (seen is None or seen.identity != id(tensor)):
                self._find(number, f"the tensor {path_text('input', path)}", "another")

    def check_booleans(self) -> None:
        """The entries that an `if` read are marked, with the value that it read."""
        seen: dict[int, set[bool]] = {}
        marks = self._recording.booleans
        for rows, value in self._booleans_read():
            for row in rows:
                seen.setdefault(row, set()).add(value)
            if rows and marks.keys().isdisjoint(rows):
                self._find(rows[-1], "a mark, for an `if` read it", "none")
        for row, marked in marks.items():
            if marked not in seen.get(row, ()):
                read = " or ".join(map(str, seen.get(row, ()))) or "none"
                self._find(row, f"an `if` that read {marked}", read)

    def _booleans_read(self) -> list[tuple[list[int], bool]]:
        """For each `if` that the witness saw, the rows of the tensor, and the value."""
        rows_of: dict[int, list[int]] = {}
        for number, snapshot in self._tensors.items():
            rows_of.setdefault(snapshot.identity, []).append(number)
        return [
            ([row for row in rows_of.get(identity, ()) if 0 <= row < time], value)
            for time, identity, value in self._subject.witness.booleans
        ]


def _has_arguments_of(row: Row, call: WitnessedCall) -> bool:
    is_same = is_same_as_frozen(row.args, call.args)
    return is_same and is_same_as_frozen(row.kwargs or {}, call.kwargs)


def _function(row: Row) -> str:
    return f"{row.operation.name} of {getattr(row.operation.func, '__module__', None)}"


def _address(name: str) -> str:
    """As the log writes it: without the wrapper of a compiled module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _inputs_by_path(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]
) -> dict[Path, torch.Tensor]:
    """The input tensors by the names of the arguments of `forward`, as Python itself binds them."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # it has no signature
        return {}
    found = {}
    for name, value in bound.arguments.items():
        is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        for key, item in value.items() if is_rest else [(name, value)]:
            found.update({(key, *path): tensor for path, tensor in named_tensors(item)})
    return found


def _chain(addresses: list[str]) -> str:
    inside = " in ".join(f"module {address}" for address in reversed(addresses))
    return inside or "no module but the model"
