"""Check 2, calls: each entry of the log stands for one tensor of one call that was seen, and says
of the call what is so.

The function, its arguments other than tensors, the place in the user's code, the modules that were
running, shape and type of the result; what input, parameter and buffer each name stands for; which
tensors were asked for their truth; and that no layer has passes of different operations.
"""

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from torchlens._capture.observer import CallKind
from torchlens._capture.unreported import is_of_unseen
from torchlens._history.log import path_text
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Row
from torchlens._recording.regions import shape_of
from torchlens._recording.trees import Path, named_tensors
from torchlens._recording.user_code import source_line
from torchlens._replay.snapshots import is_same_as_frozen
from torchlens._validate.report import Finding, NotShown, ValidationReport
from torchlens._validate.subject import Subject
from torchlens._validate.witness import Call

# Calls that leave a row for each tensor they return; the rest leave rows for those that are not
# there already, or yet.
_WITH_ALL_RESULTS = (CallKind.FUNCTION, CallKind.OPAQUE, CallKind.IDENTITY)


def check_calls(
    subject: Subject,
    model: torch.nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    steps: Sequence[Row] | None,
    report: ValidationReport,
) -> None:
    """Compares each row of the log with the call it stands for; `steps` are the rows of yet another
    run.

    The model must be in the state it began the run in.
    """
    checker = _Checker(subject, model, steps, report)
    checker.check_rows()
    for call in subject.evidence.calls:
        checker.check_call(call)
    checker.check_sources(args, kwargs)
    checker.check_booleans()
    checker.check_layers()


class _Checker:
    def __init__(
        self,
        subject: Subject,
        model: torch.nn.Module,
        steps: Sequence[Row] | None,
        report: ValidationReport,
    ) -> None:
        self._subject = subject
        self._steps = steps or ()
        self._recording = subject.log.recording
        self._tensors = subject.evidence.tensors
        self._model = model
        self._report = report
        self._addresses = {id(module): _address(name) for name, module in model.named_modules()}

    def _find(self, number: int, expected: str, found: object) -> None:
        label = self._subject.label(number) if number >= 0 else ""
        self._report.findings.append(Finding("calls", label, expected, str(found)))

    # -- rows and calls
    # --------------------------------------------------------------------------------------------

    def check_rows(self) -> None:
        """Every row stands for a tensor that was seen, and is an input, a buffer, an output, or
        made by one call.
        """
        rows, recording = self._recording.rows, self._recording
        num_seen = 1 + max((number for number in self._tensors if number >= 0), default=-1)
        self._report.num_checked["calls"] += num_seen
        if len(rows) != num_seen:
            self._find(-1, f"{num_seen} entries, one for each tensor that was seen", len(rows))
        made = [n for call in self._subject.evidence.calls for n in range(call.first, call.last)]
        boundary = [
            n for part in (recording.inputs, recording.buffers, recording.outputs) for _, n in part
        ]
        claimed = set(made) | set(boundary)
        for number in range(len(rows)):
            if number not in claimed and not is_of_unseen(rows[number].operation):
                self._find(number, "a call, an input, a buffer or an output for each entry", "none")
        for number in {*set(made).intersection(boundary), *(n for n in claimed if n >= len(rows))}:
            self._find(-1, f"one entry for step {number}", "none, or more than one")
        for number in boundary:
            if number < len(rows) and (
                rows[number].operation not in (INPUT, BUFFER, OUTPUT) or rows[number].module_call
            ):
                found = (
                    f"{rows[number].operation.name} in "
                    f"{_chain(self._modules_of(rows[number].module_call))}"
                )
                self._find(number, "an input, a buffer or an output, outside all modules", found)
        for number in range(min(len(rows), num_seen)):
            row, seen = rows[number], self._tensors.get(number)
            if seen is not None and (
                tuple(row.shape) != tuple(shape_of(seen.value)) or row.dtype != seen.value.dtype
            ):
                expected = f"{_text(shape_of(seen.value))} {seen.value.dtype}"
                self._find(number, expected, f"{_text(row.shape)} {row.dtype}")

    def check_call(self, call: Call) -> None:
        """What the rows of a call say of it."""
        name = call.operation.name
        numbers = range(call.first, call.last)
        if call.kind in _WITH_ALL_RESULTS and len(numbers) != len(call.results):
            self._find(
                call.first,
                f"{len(call.results)} entries, one for each result of {name}",
                len(numbers),
            )
            return
        modules = [
            self._addresses[module] for module in call.modules if self._addresses.get(module)
        ]
        for index, number in enumerate(numbers):
            if number < len(self._recording.rows):
                self._check_row(call, number, index, modules)

    def _check_row(self, call: Call, number: int, index: int, modules: list[str]) -> None:
        row, name = self._recording.rows[number], call.operation.name
        if row.operation.name != name or not _is_same_function(
            row.operation.func, call.operation.func
        ):
            self._find(number, f"{name}, which was called", row.operation.name)
            return
        if not is_same_as_frozen(row.args, call.args) or not is_same_as_frozen(
            row.kwargs or {}, call.kwargs
        ):
            if self._is_called_differently(call, number):
                reason = f"{name} is given other numbers each time the model runs"
                self._report.not_shown.append(
                    NotShown("calls", self._subject.label(number), "numbers", reason)
                )
                self._subject.varied.add(call.first)
            else:
                self._find(number, f"the arguments that {name} was called with", "others")
        if call.kind in _WITH_ALL_RESULTS:
            if self._tensors[number].identity != call.results[index]:
                self._find(number, f"result {index} of {name}", "another tensor")
            if row.output_index not in ((index,) if len(call.results) > 1 else (None, 0)):
                self._find(number, f"number {index} of the results of {name}", row.output_index)
        if (row.code, row.instruction) != call.place and not _is_same_line(row, *call.place):
            self._find(number, f"the line that called {name}", "another")
        found = self._modules_of(row.module_call)
        if self._recording.branches:  # a thread's stack does not show where it was started
            found = found[len(found) - len(modules) :] if modules else []
        if found != modules:
            self._find(number, f"to run in {_chain(modules)}", _chain(found))

    def _is_called_differently(self, call: Call, number: int) -> bool:
        """Whether the arguments differ between two runs neither of which is the log: a time of day,
        say.
        """
        if number >= len(self._steps) or self._steps[number].operation.name != call.operation.name:
            return False
        step = self._steps[number]
        return not (
            is_same_as_frozen(step.args, call.args)
            and is_same_as_frozen(step.kwargs or {}, call.kwargs)
        )

    def _modules_of(self, call: int) -> list[str]:
        """The modules that were running according to the log, the outermost first; the model itself
        is none of them.
        """
        calls, found = self._recording.module_calls, list[str]()
        while 0 < call < len(calls) and len(found) <= len(calls):
            found.append(calls[call].address)
            call = calls[call].parent
        return found[::-1]

    # -- names
    # ----------------------------------------------------------------------------------------------

    def check_sources(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Inputs, buffers and parameters are the tensors that their names stand for."""
        inputs = _tensors_by_name(self._model, args, kwargs)
        for path, number in self._recording.inputs:
            self._check_source(number, path_text("input", path), inputs.get(path))
        for address, number in self._recording.buffers:
            self._check_source(number, address, _at(self._model, address))
        for number, (parameter, address) in enumerate(
            zip(self._recording.params, self._recording.param_addresses, strict=False)
        ):
            there = _at(self._model, address)
            if there is not None and there is not parameter:
                self._find(-1, f"parameter {number} to be {address}", "another tensor")

    def _check_source(self, number: int, name: str, tensor: object) -> None:
        if tensor is not None and (
            number not in self._tensors or self._tensors[number].identity != id(tensor)
        ):
            self._find(number, f"the tensor that {name} stands for", "another")

    # -- truth
    # ----------------------------------------------------------------------------------------------

    def check_booleans(self) -> None:
        """The entries that `if` read, and what it read there."""
        claims = dict(self._recording.booleans)
        rows_of: dict[int, list[int]] = {}
        for number, snapshot in self._tensors.items():
            if number >= 0:
                rows_of.setdefault(snapshot.identity, []).append(number)
        seen: dict[int, set[bool]] = {}
        for time, identity, value in self._subject.evidence.booleans:
            rows = [row for row in rows_of.get(identity, ()) if row < time]
            for row in rows:
                seen.setdefault(row, set()).add(value)
            if rows and claims.keys().isdisjoint(rows):
                self._find(rows[-1], "a mark, for an `if` read it", "none")
        for row, value in claims.items():
            if value not in seen.get(row, ()):
                self._find(
                    row,
                    f"an `if` that read {value}",
                    " or ".join(map(str, seen.get(row, ()))) or "none",
                )

    # -- layers
    # ----------------------------------------------------------------------------------------------

    def check_layers(self) -> None:
        """The passes of a layer are one operation with the same parameters, and its name says
        which.
        """
        graph = self._subject.log.graph
        listed: dict[int, int] = {}
        for number, layer in enumerate(graph.layers):
            kinds = {
                (self._operation(entry), frozenset(graph.params[entry])) for entry in layer.entries
            }
            label = layer.entries[0] if layer.entries else -1
            if len(kinds) != 1 or next(iter(kinds))[0] != layer.type:
                found = ", ".join(sorted(str(kind) for kind, _ in kinds))
                self._find(
                    graph.recorded[label], f"one operation in all passes of {layer.label}", found
                )
            for pass_num, entry in enumerate(layer.entries, start=1):
                listed[entry] = listed.get(entry, 0) + 1
                if graph.layer_of[entry] != number or (
                    len(layer.entries) > 1 and graph.pass_of[entry] != pass_num
                ):
                    self._find(
                        graph.recorded[entry],
                        f"pass {pass_num} of {layer.label}",
                        "another layer or pass",
                    )
        for entry, number in enumerate(graph.recorded):
            if listed.get(entry) != 1:
                self._find(number, "to be in one layer", listed.get(entry, 0))
            if set(graph.params[entry]) != self._params(number):
                self._find(number, "the parameters that it was given", graph.params[entry])

    def _operation(self, entry: int) -> str:
        return self._subject.log.row(entry).operation.layer_type

    def _params(self, number: int) -> set[int]:
        given = self._subject.given(number).values()
        return {-1 - row for row in given if -len(self._recording.params) <= row < 0}


def _is_same_line(row: Row, code: CodeType | None, instruction: int) -> bool:
    """Whether a row names the line of a place. One call may be several instructions, more of them
    as Python warms up.
    """
    if row.code != code or code is None:
        return False
    return source_line(code, row.instruction) == source_line(code, instruction)


def _is_same_function(first: Any, second: Any) -> bool:
    """Whether two functions are one. What the model defines or compiles as it runs is made anew
    each time.
    """
    if first == second:
        return True
    if isinstance(first, torch.nn.Module):
        return type(first) is type(second)
    if isinstance(first, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(first) == str(
            second
        )  # torch makes its objects of an operator anew when another of the name has gone
    names = [
        (getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (first, second)
    ]
    return names[0] == names[1] and "<locals>" in (names[0][1] or "")


def _address(name: str) -> str:
    """As the log writes it: a compiled module's inner one is no module of its own."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _at(model: Any, address: str) -> Any:
    """What stands at an address of the model; None where it cannot be told."""
    for part in address.split("."):
        model = getattr(model, part, None)
    return model if isinstance(model, torch.Tensor) else None


def _tensors_by_name(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]
) -> dict[Path, torch.Tensor]:
    """The input tensors by the names of the arguments of `forward`, as Python itself binds them."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # no signature to be had
        return {}
    found = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        values = value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        for key, item in values.items():
            found.update({(key, *path): tensor for path, tensor in named_tensors(item)})
    return found


def _chain(addresses: list[str]) -> str:
    return (
        " in ".join(f"module {address}" for address in reversed(addresses))
        or "no module but the model"
    )


def _text(shape: Any) -> str:
    return "x".join(map(str, shape)) or "scalar"
