"""What the log says beyond the promises of `validate_forward_pass`: lines, results, names, layers,
and exactly which operations are the parents, compared with what an independent observer saw.

The checks find mistakes of the library, so they belong to its tests: `prove` makes them all.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from torchlens._capture.observer import CallKind, ObservedCall
from torchlens._capture.unreported import is_of_unseen
from torchlens._graph.edges import own_references
from torchlens._recording.cells import cells_of
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Row
from torchlens._recording.regions import Region
from torchlens._recording.trees import plain_tensors
from torchlens._recording.user_code import source_line
from torchlens._validate.check_arguments import checked_arguments
from torchlens._validate.report import ValidationFinding, ValidationReport
from torchlens._validate.snapshots import Snapshot, frozen_tensors
from torchlens._validate.witness import Subject, Witness, WitnessedCall

# Calls that leave a row for each tensor they return; the rest leave rows for those that have none.
_WITH_ALL_RESULTS = (CallKind.FUNCTION, CallKind.OPAQUE, CallKind.IDENTITY)
_BOUNDARIES = (INPUT, BUFFER, OUTPUT)


@dataclass(frozen=True)
class Details:
    """More of a call: the line that made it, and the ids of its results (or of what it wrote to)."""

    place: tuple[CodeType | None, int]
    results: list[int]


class CloseWitness(Witness):
    """Also notes the details of each call."""

    def __init__(self, num_params: int) -> None:
        super().__init__(num_params)
        self.details: dict[WitnessedCall, Details] = {}

    def end(self, call: ObservedCall, result: Any) -> None:
        num_before = len(self.calls)
        super().end(call, result)
        for mine in self.calls[num_before:]:
            results = [id(tensor) for _, tensor in plain_tensors(result)]
            place = (call.code, call.instruction)
            self.details[mine] = Details(place, results or list(map(id, call.written)))


def check_bookkeeping(
    subject: Subject, witness: CloseWitness, model: nn.Module, report: ValidationReport
) -> None:
    """Makes all checks of this file. The model must be in the state it began the run in."""
    calls = _CallsCheck(subject, witness, model, report)
    calls.check_rows()
    for call in subject.calls:
        calls.check_call(call)
    calls.check_sources()
    calls.check_layers()
    _ParentsCheck(subject, report).run()


class _CallsCheck:
    """Results, lines of code, buffers, parameters and layers."""

    def __init__(
        self, subject: Subject, witness: CloseWitness, model: nn.Module, report: ValidationReport
    ) -> None:
        self._subject = subject
        self._witness = witness
        self._recording = subject.log.recording
        self._tensors = witness.tensors
        self._model = model
        self._report = report

    def _find(self, number: int, expected: str, found: object) -> None:
        label = self._subject.label(number) if number >= 0 else ""
        self._report.findings.append(ValidationFinding("calls", label, expected, str(found)))

    def check_rows(self) -> None:
        """Every row is an input, a buffer, an output, or made by one call."""
        rows, recording = self._recording.rows, self._recording
        made = [n for call in self._witness.calls for n in range(call.first, call.last)]
        boundary = [
            n for part in (recording.inputs, recording.buffers, recording.outputs) for _, n in part
        ]
        claimed = set(made) | set(boundary)
        for number in range(len(rows)):
            if number not in claimed and not is_of_unseen(rows[number].operation):
                self._find(number, "a call, an input, a buffer or an output for each entry", "none")
            is_boundary = rows[number].operation in (INPUT, BUFFER, OUTPUT)
            if number in boundary and not is_boundary:
                self._find(number, "an input, a buffer or an output", rows[number].operation.name)
        for number in {*set(made).intersection(boundary), *(n for n in claimed if n >= len(rows))}:
            self._find(-1, f"one entry for step {number}", "none, or more than one")

    def check_call(self, call: WitnessedCall) -> None:
        """The rows of a call are its results, in order, and name its line."""
        name, details = call.operation.name, self._witness.details[call]
        num_rows, num_results = call.last - call.first, len(details.results)
        if call.kind in _WITH_ALL_RESULTS and num_rows != num_results:
            expected = f"{num_results} entries, one for each result of {name}"
            self._find(call.first, expected, num_rows)
            return
        for index, number in enumerate(range(call.first, call.last)):
            row = self._recording.rows[number]
            if call.kind in _WITH_ALL_RESULTS:
                if self._tensors[number].identity != details.results[index]:
                    self._find(number, f"result {index} of {name}", "another tensor")
                if row.output_index not in ((index,) if num_results > 1 else (None, 0)):
                    self._find(number, f"number {index} of the results", row.output_index)
            if (row.code, row.instruction) != details.place and not _is_same_line(
                row, *details.place
            ):
                self._find(number, f"the line that called {name}", "another")

    def check_sources(self) -> None:
        """Buffers and parameters are the tensors that their names stand for."""
        for address, number in self._recording.buffers:
            tensor = _at(self._model, address)
            if tensor is not None and self._tensors[number].identity != id(tensor):
                self._find(number, f"the tensor that {address} stands for", "another")
        addresses = self._recording.param_addresses
        for parameter, address in zip(self._recording.params, addresses, strict=False):
            there = _at(self._model, address)
            if there is not None and there is not parameter:
                self._find(-1, f"a parameter to be {address}", "another tensor")

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


def _at(model: Any, address: str) -> Any:
    """What stands at an address of the model; None where it cannot be told."""
    for part in address.split("."):
        model = getattr(model, part, None)
    return model if isinstance(model, torch.Tensor) else None


# -- parents
# -------------------------------------------------------------------------------------------------


class _ParentsCheck:
    """Each argument is read from exactly those that were the last to write its elements."""

    def __init__(self, subject: Subject, report: ValidationReport) -> None:
        self._subject = subject
        self._report = report
        self._num_params = len(subject.log.recording.params)
        self._exits = {call: set(numbers) for call, numbers in subject.log.recording.module_exits}
        self._makers = {
            number: call for call in subject.calls for number in range(call.first, call.last)
        }
        self._sources = Sources(subject.witness)

    def run(self) -> None:
        for call in self._subject.calls:
            arguments = self._subject.arguments(call)
            self._sources.begin(call, arguments.values())
            for number in () if call.is_early else range(call.first, call.last):
                given = self._subject.given(number)
                own = own_references(self._subject.log.recording.rows[number])
                of_others = given.keys() - {location for location, _ in own}
                for location, argument in checked_arguments(call, given, arguments).items():
                    if location not in of_others:
                        self._check(number, call.first, location, argument)
            self._sources.end(call)
        for _, number in self._subject.log.recording.outputs:
            if number in self._subject.witness.tensors:
                self._check(number, number, 0, self._subject.witness.tensors[number])

    def _check(self, number: int, time: int, location: object, argument: Snapshot) -> None:
        rows = self._sources.rows_of(argument, time)
        given = self._subject.given(number).get(location)
        if not rows or any(-self._num_params <= row < 0 for row in rows):
            return
        if given is not None and given >= 0 and not self._is_current(given, rows, number):
            self._find(number, f"argument {location} to be the last that handed it on", given)
            return
        row = next((row for row in rows if row < 0), _NOBODY) if given is None else given
        expected = self._sources.read(argument, row, number)
        found = set(self._subject.reads(number).get(location, ()))
        if expected is not None and found != expected:
            self._find(number, f"argument {location} to be read from {sorted(expected)}", found)

    def _find(self, number: int, expected: str, found: object) -> None:
        label = self._subject.label(number)
        self._report.findings.append(ValidationFinding("arguments", label, expected, str(found)))

    def _is_current(self, given: int, rows: list[int], number: int) -> bool:
        """Whether the tensor is this row for who reads it here, and not another of the `rows` that
        handed it out.

        Operations that return what they are given (`contiguous`, a module that returns its input)
        count while the module call that they ran in goes on; afterwards if it returned the tensor,
        while the one around it goes on, and so forth.
        """
        running = self._module_calls(self._subject.log.recording.rows[number].module_call)
        handed_back = [row for row in rows[1:] if self._is_handed_back(row)]
        if given in handed_back and not self._counts(given, running):
            return False
        return not any(row > given and self._counts(row, running) for row in handed_back)

    def _is_handed_back(self, row: int) -> bool:
        """Of rows beyond the first that are one tensor: whether nothing was done to it. What was is
        found by its memory.
        """
        maker = self._makers.get(row)  # none for an input
        is_function = (
            maker is not None and not maker.written and maker.kind is not CallKind.COLLECTIVE
        )
        return is_function and self._sources.is_view(row)

    def _counts(self, row: int, running: set[int]) -> bool:
        call = self._subject.log.recording.rows[row].module_call
        while call not in running:
            if row not in self._exits.get(call, ()):
                return False
            call = self._subject.log.recording.module_calls[call].parent
        return True

    def _module_calls(self, call: int) -> set[int]:
        calls, found = self._subject.log.recording.module_calls, set()
        while call >= 0 and call not in found:
            found.add(call)
            call = calls[call].parent
        return found


_NOBODY = np.iinfo(np.int64).min


class _LastWriters:
    """The last row to have written each part of one storage, which some regions divide it into."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._cells = cells_of(list(dict.fromkeys(regions)))
        self._rows = np.full(self._cells.shape, _NOBODY)
        # False where the regions are so irregular that their parts cannot be told.
        self.is_exact = not self._cells.inexact

    def of(self, region: Region) -> set[int]:
        """The rows that wrote a region; `_NOBODY` among them if a part of it was not written."""
        found: set[int] = set()
        for part in self._cells.parts[region]:
            found.update(np.unique(self._rows[part]).tolist())
        return found

    def write(self, region: Region, row: int) -> None:
        for part in self._cells.parts[region]:
            self._rows[part] = row


class Sources:
    """Answers, call after call in the order they were made, who made what a call was given."""

    def __init__(self, witness: Witness) -> None:
        self._tensors = witness.tensors
        # By identity, the rows (or -1 - k) that handed the tensor out, in order.
        self._rows: dict[int, list[int]] = {}
        self._by_storage: dict[int, list[int]] = {}
        for number, snapshot in sorted(witness.tensors.items()):
            for identity in (snapshot.identity, *snapshot.inner):
                self._rows.setdefault(identity, []).append(number)
            self._by_storage.setdefault(snapshot.storage, []).append(number)
        self._made = {number for call in witness.calls for number in range(call.first, call.last)}
        self._views: set[int] = set()
        self._owners = _owners_of_written(witness)
        self._writers: set[tuple[int, int]] = set()

    def rows_of(self, argument: Snapshot, time: int) -> list[int]:
        """The rows made before row `time` whose result is this very tensor; -1 - k for what came
        from outside.
        """
        return [number for number in self._rows.get(argument.identity, ()) if number < time]

    def looked_at(self, argument: Snapshot, time: int) -> list[int]:
        """The rows before row `time` that look at the same memory."""
        if argument.region is None:
            return []
        return [number for number in self._by_storage.get(argument.storage, ()) if number < time]

    def read(self, argument: Snapshot, row: int, reader: int) -> set[int] | None:
        """The entries that row `reader` reads by reading the argument as row `row` handed it out; None
        if that is not known.

        Rows from outside the log are not among them.
        """
        itself = {row} if row >= 0 else set()
        owners, region = self._owners.get(argument.storage), self.part_read(argument, reader).region
        # What no call made was there before the pass, whenever the log took it up.
        since = row if row in self._made else _NOBODY
        if region is None and any(
            own == argument.storage and since < writer < reader for writer, own in self._writers
        ):
            return None  # quantized and the like, in parts
        if owners is None or region is None or not region.num_elements:
            return itself
        if not owners.is_exact:
            return None
        found = owners.of(region)
        writers = {writer for writer in found if writer > since}
        return (
            writers if len(writers) == len(found) and row not in self._views else itself | writers
        )

    def part_read(self, argument: Snapshot, reader: int) -> Snapshot:
        """What row `reader` reads of an argument: what it looks at itself, if it is a view of
        it.
        """
        result = self._tensors[reader]
        is_of_it = result.region is not None and result.storage == argument.storage
        return result if is_of_it and reader in self._views else argument

    def is_view(self, row: int) -> bool:
        """Whether the row's result looks at memory that was there before it."""
        return row in self._views

    def begin(self, call: WitnessedCall, arguments: Iterable[Snapshot]) -> None:
        """The next call: takes note of which of its results are views."""
        self._writers.update(
            (self._writer_of(call, snapshot), snapshot.storage) for snapshot in call.written
        )
        storages = {argument.storage for argument in arguments}
        for number in range(call.first, call.last):
            storage = self._tensors[number].storage
            if storage in storages and (number, storage) not in self._writers:
                self._views.add(number)

    def end(self, call: WitnessedCall) -> None:
        """It was made: takes note of what it wrote."""
        for snapshot in call.written:
            owners = self._owners.get(snapshot.storage)
            if owners is not None and snapshot.region is not None:
                owners.write(snapshot.region, self._writer_of(call, snapshot))

    def _writer_of(self, call: WitnessedCall, written: Snapshot) -> int:
        """The row of a tensor that was written: the call's first where it is no result."""
        own = [
            n for n in range(call.first, call.last) if self._tensors[n].identity == written.identity
        ]
        return own[-1] if own else call.first


def _owners_of_written(witness: Witness) -> dict[int, _LastWriters]:
    """For each storage that is ever written, divided by all that is ever seen of it."""
    regions: dict[int, list[Region]] = {}
    for call in witness.calls:
        for snapshot in call.written:
            if snapshot.region is not None:
                regions.setdefault(snapshot.storage, [])
    for snapshot in _all_snapshots(witness) if regions else ():
        if snapshot.storage in regions and snapshot.region is not None:
            regions[snapshot.storage].append(snapshot.region)
    return {storage: _LastWriters(own) for storage, own in regions.items()}


def _all_snapshots(witness: Witness) -> Iterable[Snapshot]:
    yield from witness.tensors.values()
    for call in witness.calls:
        yield from call.written
        for frozen in (call.args, call.kwargs):
            yield from (snapshot for _, snapshot in frozen_tensors(frozen))
