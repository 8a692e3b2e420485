"""Check 3, arguments: the parents of an operation made its arguments, with their saved values.

An argument whose memory was written after its tensor was made has several parents. Their saved
values are written, in order, over a copy of the memory; the argument must equal the result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.observer import CallKind
from torchlens._recording.regions import Region
from torchlens._replay.values import brief, difference, has_elements, same
from torchlens._validate.exemptions import CONTENDED, EARLY, LAZY
from torchlens._validate.report import ValidationReport
from torchlens._validate.snapshots import Snapshot
from torchlens._validate.witness import Subject, WitnessedCall

Tensor = torch.Tensor
# The source of memory that no parent wrote.
_UNWRITTEN = torch.iinfo(torch.int64).min
# Tensors of any type begin at a multiple of this many bytes.
_ALIGNMENT = 16
_PATTERN = "parts of its memory were written, in a pattern that does not show the writer of each"


def check_arguments(subject: Subject, report: ValidationReport) -> None:
    """Compares the arguments of every call, and every output, with the parents in the log."""
    check = _ArgumentsCheck(subject, report)
    for call in subject.calls:
        arguments = subject.arguments(call)
        if call.is_early:
            report.exemptions["arguments", EARLY] += len(arguments)
        else:
            for number in range(call.first, call.last):
                check.check(number, arguments, call)
    for _, number in subject.log.recording.outputs:
        if number in subject.witness.tensors:
            check.check(number, {0: subject.witness.tensors[number]}, None)
    check.check_graph()


class _ArgumentsCheck:
    def __init__(self, subject: Subject, report: ValidationReport) -> None:
        self._subject = subject
        self._report = report
        self._num_params = len(subject.log.recording.params)
        # By identity of a tensor, the rows (or -1 - k) that it is the tensor of.
        self._rows: dict[int, list[int]] = {}
        for number, snapshot in sorted(subject.witness.tensors.items()):
            for identity in (snapshot.identity, *snapshot.inner):
                self._rows.setdefault(identity, []).append(number)

    def check(
        self, number: int, arguments: dict[Any, Snapshot], call: WitnessedCall | None
    ) -> None:
        """Checks what row `number` reads; an output has no call."""
        time = number if call is None else call.first
        checked = checked_arguments(call, self._subject.given(number), arguments)
        if call is not None and call.contended:
            self._report.exemptions["arguments", CONTENDED] += len(arguments) - len(checked)
        if not self._check_parents(number, time, arguments, checked):
            return
        for location, sources in self._subject.reads(number).items():
            if location not in checked or max(sources) >= number:
                continue
            is_view = self._subject.is_view(number, checked[location], call)
            if number == time or is_view:  # several results of one call read the same
                self._check_value(number, location, checked[location], sources, is_view)

    def _check_parents(
        self, number: int, time: int, arguments: dict[Any, Snapshot], checked: dict[Any, Snapshot]
    ) -> bool:
        """True if each tensor argument has the right parent, and no other argument has one."""
        num_before, given = len(self._report.findings), self._subject.given(number)
        for location in {**given, **self._subject.reads(number)}:
            if location not in arguments and not is_captured(location):
                expected = "tensors wherever something is read"
                self._find(number, expected, f"none at argument {location}")
        for location, argument in checked.items():
            rows = [row for row in self._rows.get(argument.identity, ()) if row < time]
            if rows and not self._is_explained(given.get(location), rows):
                expected = f"{self._what(number, location)} to be {self._maker(rows)}"
                self._find(number, expected, self._name(given.get(location)))
        return len(self._report.findings) == num_before

    def check_graph(self) -> None:
        """The parents of an entry are what it reads, and it is a child of each of them."""
        graph, name = self._subject.log.graph, self._name
        for entry, number in enumerate(graph.recorded):
            read = {source for own in self._subject.reads(number).values() for source in own}
            parents = sorted(graph.recorded[parent] for parent in graph.parents[entry])
            if parents != sorted(read):
                expected = f"what it reads to be its parents ({', '.join(map(name, read))})"
                self._find(number, expected, ", ".join(map(name, parents)) or "none")
            if any(entry not in graph.children[parent] for parent in graph.parents[entry]):
                self._find(number, "to be a child of its parents", "not of all")

    def _is_explained(self, given: int | None, rows: list[int]) -> bool:
        """True if the parent is one of the rows of the same tensor object."""
        if any(-self._num_params <= row < 0 for row in rows) or (given is not None and given >= 0):
            return given in rows
        return any(row < 0 for row in rows)

    def _check_value(
        self, number: int, location: Any, argument: Snapshot, sources: list[int], is_view: bool
    ) -> None:
        subject, value = self._subject, self._subject.value(sources[0])
        self._report.num_checked["arguments"] += 1
        if any(is_lazy(subject.witness.tensors[source].value) for source in sources):
            self._report.exemptions["arguments", LAZY] += 1
            return
        # A view reads only its own part of the argument.
        part = subject.witness.tensors[number] if is_view else argument
        if not has_elements(part.value) or (len(sources) == 1 and same(value, argument.value)):
            return
        if part.region is None and len(sources) > 1:
            self._report.add_not_shown("arguments", subject.label(number), location, _PATTERN)
        else:
            self._check_painted(number, location, argument, sources, part)

    def _check_painted(
        self, number: int, location: Any, argument: Snapshot, sources: list[int], part: Snapshot
    ) -> None:
        """The part of an argument that is read has the values of those that wrote it."""
        subject, value = self._subject, self._subject.value(sources[0])
        painting = paint(part, contributions_of(subject, number, location))
        if painting is not None and _is_explained_by(painting, part, argument):
            return
        saved_by = " and ".join(map(self._name, sources))
        expected = (
            f"{self._what(number, location)} ({brief(argument.value)}) to be what {saved_by} saved"
        )
        self._find(number, expected, _explanation(value, sources, part, painting))

    def _find(self, number: int, expected: str, found: str) -> None:
        label = self._subject.label(number)
        self._report.add_finding("arguments", label, expected, found)

    def _what(self, number: int, location: Any) -> str:
        is_output = self._subject.log.recording.rows[number].operation.name == "output"
        return "the output" if is_output else f"argument {location}"

    def _maker(self, rows: list[int]) -> str:
        param = next((row for row in rows if -self._num_params <= row < 0), None)
        made = " and ".join(self._name(row) for row in rows if row >= 0)
        return self._name(param) if param is not None else f"the result of {made}"

    def _name(self, row: int | None) -> str:
        if row is None:
            return "no layer of the log"
        if row >= 0:
            return self._subject.label(row)
        if row < -self._num_params:
            return "a tensor from outside the model"
        return f"parameter {self._subject.log.recording.param_addresses[-1 - row]}"


def checked_arguments(
    call: WitnessedCall | None, given: dict[Any, int], arguments: dict[Any, Snapshot]
) -> dict[Any, Snapshot]:
    """The arguments whose parents can be checked.

    Not those in memory that another thread wrote to. A collective also writes results to its
    arguments, and an autograd function with captured tensors may read nothing else: of those, only
    the arguments that the log says they read.
    """
    if call is None:
        return arguments
    is_told = call.kind is CallKind.COLLECTIVE
    is_told |= call.kind is CallKind.AUTOGRAD and any(map(is_captured, given))
    return {
        location: argument
        for location, argument in arguments.items()
        if argument.storage not in call.contended and (location in given or not is_told)
    }


def is_captured(location: Any) -> bool:
    """Whether it is the location of a tensor that a function captured in a closure."""
    return isinstance(location, tuple) and location[0] == "captured"


def _is_explained_by(painting: "Painting", part: Snapshot, argument: Snapshot) -> bool:
    """True if the painting has the values of the part, and all of it was painted."""
    # `as_strided` may read memory outside of its argument.
    is_beyond = _reaches_beyond(part.region, argument.region)
    return same(painting.value, part.value) and (is_beyond or not painting.num_unwritten)


def _reaches_beyond(part: Region | None, whole: Region | None) -> bool:
    if part is None or whole is None:
        return False
    return part.start < whole.start or part.end > whole.end


def _explanation(
    value: Any, sources: list[int], argument: Snapshot, painting: "Painting | None"
) -> str:
    if len(sources) > 1 and painting is not None:
        if painting.num_unwritten:
            count = argument.value.numel()
            return f"{painting.num_unwritten} of {count} elements that none of them wrote"
        return difference(painting.value, argument.value)
    return difference(value, argument.value) if isinstance(value, Tensor) else "nothing saved"


# -- memory
# -------------------------------------------------------------------------------------------------


class StorageCopy:
    """A copy of the part of one storage that some regions cover."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self._start = min(region.start for region in regions) // _ALIGNMENT * _ALIGNMENT
        end = max(region.end for region in regions)
        self._bytes = torch.zeros(end - self._start, dtype=torch.uint8, device=device)

    def look_at(self, snapshot: Snapshot) -> Tensor:
        """A view of this memory, with the region and type of the snapshot's tensor."""
        region = snapshot.region
        assert region is not None
        tensor = torch.empty(0, dtype=snapshot.value.dtype, device=self._bytes.device)
        offset = (region.start - self._start) // region.item_bytes
        tensor = tensor.set_(self._bytes.untyped_storage(), offset, region.shape, region.strides)
        if snapshot.is_conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if snapshot.is_neg else tensor

    def write(self, where: Snapshot, value: Tensor) -> None:
        """Writes `value` to the snapshot's region."""
        tensor = self.look_at(where)
        for dim in _repeated(tensor):
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        tensor.copy_(value)


class Contribution(NamedTuple):
    """Row `source` wrote `value` to the region of `where`."""

    source: int
    where: Snapshot
    value: Tensor


class Painting(NamedTuple):
    """The elements of a tensor after the contributions were written, and the row that wrote each.

    `sources` has one axis more than `value`: several rows may have written parts of one element.
    """

    value: Tensor
    sources: Tensor

    @property
    def num_unwritten(self) -> int:
        """How many elements no contribution wrote, at least in part."""
        return int((self.sources == _UNWRITTEN).any(-1).sum())

    def part_of(self, source: int) -> Tensor:
        """Which elements a source wrote, at least in part."""
        return (self.sources == source).any(-1)


def contributions_of(subject: Subject, number: int, location: object) -> list[Contribution]:
    """The values that the parents of an argument wrote to memory, in order."""
    tensors, found = subject.witness.tensors, []
    given = subject.given(number).get(location)
    if given is not None and given < 0 and given in tensors:  # a parameter, or from outside
        found.append(Contribution(given, tensors[given], tensors[given].value))
    for source in sorted(subject.reads(number).get(location, ())):
        found += [Contribution(source, own, own.value) for own in subject.written.get(source, ())]
        value = subject.value(source)
        if source in tensors and isinstance(value, Tensor):
            found.append(Contribution(source, tensors[source], value))
    return found


def paint(where: Snapshot, contributions: Sequence[Contribution]) -> Painting | None:
    """Writes the contributions, in order, over a copy of the memory of `where`; None if the memory
    is unknown.
    """
    region = where.region
    own = [
        (each, each.where.region)
        for each in contributions
        if each.where.storage == where.storage and each.where.region is not None
    ]
    fits = all(each.value.shape == each.where.value.shape for each, _ in own)
    if region is None or where.value.is_meta or not fits:
        return None
    regions = [region, *(each for _, each in own)]
    memory, owners = StorageCopy(regions, where.value.device), _Owners(regions)
    memory.write(where, where.value)
    for contribution, place in own:
        memory.write(contribution.where, contribution.value)
        owners.write(place, contribution.source)
    return Painting(memory.look_at(where), owners.of(region).to(where.value.device))


class _Owners:
    """The row that wrote each place of a storage; a place is as wide as the smallest item."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._unit = min(region.item_bytes for region in regions)
        self._start = min(region.start for region in regions)
        end = max(region.end for region in regions)
        self._rows = torch.full(((end - self._start) // self._unit,), _UNWRITTEN)

    def of(self, region: Region) -> Tensor:
        unit, item = self._unit, region.item_bytes
        strides = [stride * item // unit for stride in region.strides]
        offset = (region.start - self._start) // unit
        return self._rows.as_strided((*region.shape, item // unit), (*strides, 1), offset)

    def write(self, region: Region, row: int) -> None:
        places = self.of(region)
        for dim in _repeated(places):
            places = places.narrow(dim, 0, 1)
        places.fill_(row)


def _repeated(tensor: Tensor) -> list[int]:
    """The expanded dimensions (of stride 0), to which torch does not write."""
    return [d for d, stride in enumerate(tensor.stride()) if stride == 0 and tensor.size(d) > 1]
