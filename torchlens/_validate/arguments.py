"""Check 3, arguments: what each operation was given is the result of its parents, and has the value
they are saved with.

A parent must be the operation that made the very tensor that was given, not one with the same
value. Where the memory of an argument was written since its tensor was made, the log names several
parents: exactly those who were the last to write some element, and every element must be what the
last of them left there.
"""

from collections.abc import Container
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.memory.saved_values import has_memory
from torchlens._capture.observer import CallKind
from torchlens._recording.regions import Region
from torchlens._replay.snapshots import Snapshot
from torchlens._replay.values import brief, difference, has_elements, same
from torchlens._validate.exemptions import CONTENDED, EARLY, LAZY
from torchlens._validate.memory import NOBODY, Contribution, Painting, paint
from torchlens._validate.report import Finding, NotShown, ValidationReport
from torchlens._validate.sources import Sources
from torchlens._validate.subject import Subject
from torchlens._validate.witness import Call


def check_arguments(subject: Subject, report: ValidationReport) -> None:
    """Compares the arguments of every call, and every output, with what the log says of its
    parents.
    """
    recording = subject.log.recording
    checker = _Checker(subject, report)
    for call in subject.calls:
        arguments = subject.arguments(call)
        checker.sources.begin(call, arguments.values())
        if call.is_early:
            report.exemptions["arguments", EARLY] += len(arguments)
        else:
            checker.check_call(call, arguments)
        checker.sources.end(call)
    tensors = subject.evidence.tensors
    for _, number in recording.outputs:
        if number in tensors:
            arguments = {0: tensors[number]}
            if checker.check_reads(number, number, arguments):
                checker.check_values(number, arguments)
    _check_graph(subject, report)


def contributions_of(
    subject: Subject, number: int, location: object, as_logged: bool = False
) -> list[Contribution]:
    """What the parents of an argument left in memory, in the order they did: as was seen, or as the
    log has it.
    """
    tensors = subject.evidence.tensors
    found = []
    given = subject.given(number).get(location)
    if (
        given is not None and given < 0 and given in tensors
    ):  # a parameter, or a tensor from elsewhere
        found.append(Contribution(given, tensors[given], tensors[given].value))
    side_effects = subject.side_effects
    for source in sorted(subject.reads(number).get(location, ())):
        found += [
            Contribution(source, effect, effect.value) for effect in side_effects.get(source, ())
        ]
        value = (
            subject.seen(source)
            if source in subject.unsteady and not as_logged
            else subject.value(source)
        )
        if source in tensors and isinstance(value, torch.Tensor):
            found.append(Contribution(source, tensors[source], value))
    return found


class _Checker:
    """Goes through the calls in the order they were made."""

    def __init__(self, subject: Subject, report: ValidationReport) -> None:
        self._subject = subject
        self._report = report
        self._num_params = len(subject.log.recording.params)
        self._exits = {call: set(numbers) for call, numbers in subject.log.recording.module_exits}
        self._makers = {
            number: call for call in subject.calls for number in range(call.first, call.last)
        }
        self.sources = Sources(subject.evidence)

    def check_call(self, call: Call, arguments: dict[object, Snapshot]) -> None:
        """Each row of a call reads what the call was given; the values need be compared once, but
        for views.
        """
        for number in range(call.first, call.last):
            read = self.read_arguments(call, number, arguments)
            is_right = self.check_reads(number, call.first, read, set(arguments) - set(read))
            if is_right and (number == call.first or self.sources.is_view(number)):
                self.check_values(number, read)

    def read_arguments(
        self, call: Call, number: int, arguments: dict[object, Snapshot]
    ) -> dict[object, Snapshot]:
        """What a row of a call reads.

        Of a collective, which also puts results into what it is given, what the log says; and of a
        function whose result is tied to an operation inside it, nothing else.
        """
        given = self._subject.given(number)
        if call.contended:
            self._report.exemptions["arguments", CONTENDED] += sum(
                a.storage in call.contended for a in arguments.values()
            )
            arguments = {p: a for p, a in arguments.items() if a.storage not in call.contended}
        if call.kind is CallKind.COLLECTIVE or (
            call.kind is CallKind.AUTOGRAD and any(map(_is_captured, given))
        ):
            return {
                location: argument for location, argument in arguments.items() if location in given
            }
        return arguments

    def check_reads(
        self,
        number: int,
        time: int,
        arguments: dict[object, Snapshot],
        unknown: Container[object] = (),
    ) -> bool:
        """What the log says is read must be what was given, and all of it; of the `unknown`
        arguments nobody can say.
        """
        num_before = len(self._report.findings)
        given, reads = self._subject.given(number), self._subject.reads(number)
        for location in dict.fromkeys([*given, *reads]):
            if location not in arguments and location not in unknown and not _is_captured(location):
                self._find(
                    number, "tensors wherever something is read", f"none at argument {location}"
                )
        for location, argument in arguments.items():
            self._check_argument(
                number, time, location, argument, given.get(location), reads.get(location, [])
            )
        return len(self._report.findings) == num_before

    def _check_argument(
        self,
        number: int,
        time: int,
        location: object,
        argument: Snapshot,
        given: int | None,
        reads: list[int],
    ) -> None:
        rows = self.sources.rows_of(argument, time)
        if not rows:
            self._check_unexplained(number, time, location, argument, given)
            return
        param = next((row for row in rows if -self._num_params <= row < 0), None)
        made = [row for row in rows if row >= 0]
        is_right = given == param if param is not None else (
            given in made and self._is_current(given, rows,
            number) if given is not None and given >= 0
            else any(row < 0 for row in rows)
        )  # fmt: skip
        if not is_right:
            maker = self._name(param) if param is not None else f"the result of {self._names(made)}"
            self._find(number, f"{self._what(number, location)} to be {maker}", self._name(given))
            return
        row = next((row for row in rows if row < 0), NOBODY) if given is None else given
        expected, found = self.sources.read(argument, row, number), set(reads)
        if expected is None:
            reason = (
                "parts of its memory were written, in a pattern or of a kind that does not tell "
                "who wrote which"
            )
            self._report.not_shown.append(
                NotShown("arguments", self._subject.label(number), location, reason)
            )
        elif found != expected:
            text = f"{self._what(number, location)} to be read from {self._names(sorted(expected))}"
            self._find(number, text, self._names(sorted(found)))

    def _check_unexplained(
        self, number: int, time: int, location: object, argument: Snapshot, given: int | None
    ) -> None:
        """A tensor that nobody handed out. If it stands for one that somebody did (a shard), it
        must look at its memory.
        """
        if given is None or given < -self._num_params:
            return  # whether it was there before the pass is for the check of completeness to say
        claimed = self._subject.evidence.tensors[given]
        if (
            argument.region is not None
            and claimed.region is not None
            and argument.storage != claimed.storage
        ):
            others = self.sources.looked_at(argument, time)
            mine, theirs = argument.value, claimed.value
            # What FSDP has let go of must not be read.
            is_shard = mine.shape != theirs.shape or not has_memory(theirs) or same(mine, theirs)
            if (
                given < 0 and not others and is_shard
            ):  # FSDP has brought its shards together, in memory of its own
                reason = (
                    "it looks at memory that is nobody's in the log, where shards of a parameter "
                    "may have been brought"
                )
                self._report.not_shown.append(
                    NotShown("arguments", self._subject.label(number), location, reason)
                )
                return
            looked_at = self._names(others)
            self._find(
                number,
                f"{self._what(number, location)} to look at memory of {looked_at}",
                self._name(given),
            )

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
        return is_function and self.sources.is_view(row)

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

    def check_values(self, number: int, arguments: dict[object, Snapshot]) -> None:
        """What was given must be what the parents are saved with."""
        for location, sources in self._subject.reads(number).items():
            argument = arguments.get(location)
            if argument is not None and all(0 <= source < number for source in sources):
                self._report.num_checked["arguments"] += 1
                self._check_value(number, location, argument, sources)

    def _check_value(
        self, number: int, location: object, argument: Snapshot, sources: list[int]
    ) -> None:
        subject = self._subject
        if any(is_lazy(subject.seen(source)) for source in sources):
            self._report.exemptions["arguments", LAZY] += 1
            return
        part = self.sources.part_read(argument, number)
        if not has_elements(part.value):
            return
        source = sources[0]
        value = subject.seen(source) if source in subject.unsteady else subject.value(source)
        if len(sources) == 1 and same(value, argument.value):
            return
        if part.region is None and len(sources) > 1:  # as above: nobody can tell
            return
        painting = paint(part, contributions_of(subject, number, location))
        may_reach_beyond = _reaches_beyond(part.region, argument.region)
        if (
            painting is not None
            and same(painting.value, part.value)
            and (may_reach_beyond or not painting.num_of_nobody)
        ):
            return
        expected = (
            f"{self._what(number, location)} ({brief(argument.value)}) to be what "
            f"{self._names(sources)} saved"
        )
        self._find(number, expected, _explanation(value, sources, part, painting))

    def _find(self, number: int, expected: str, found: str) -> None:
        self._report.findings.append(
            Finding("arguments", self._subject.label(number), expected, found)
        )

    def _what(self, number: int, location: object) -> str:
        is_output = self._subject.log.recording.rows[number].operation.name == "output"
        return "the output" if is_output else f"argument {location}"

    def _names(self, rows: list[int]) -> str:
        return " and ".join(map(self._name, rows)) or "nobody in the log"

    def _name(self, row: int | None) -> str:
        if row is None:
            return "nobody in the log"
        if row >= 0:
            return self._subject.label(row)
        addresses = self._subject.log.recording.param_addresses
        return (
            f"parameter {addresses[-1 - row]}"
            if -row <= len(addresses)
            else "a tensor from outside the model"
        )


def _is_captured(location: object) -> bool:
    return isinstance(location, tuple) and location[0] == "captured"


def _reaches_beyond(part: Region | None, whole: Region | None) -> bool:
    """Whether a view looks at memory that the tensor it is made from does not (`as_strided`)."""
    return (
        part is not None
        and whole is not None
        and (part.start < whole.start or part.end > whole.end)
    )


def _explanation(
    value: Any, sources: list[int], argument: Snapshot, painting: Painting | None
) -> str:
    if len(sources) > 1 and painting is not None:
        if painting.num_of_nobody:
            return (
                f"{painting.num_of_nobody} of {argument.value.numel()} elements that none of them "
                "wrote"
            )
        return difference(painting.value, argument.value)
    return difference(value, argument.value) if isinstance(value, torch.Tensor) else "nothing saved"


def _check_graph(subject: Subject, report: ValidationReport) -> None:
    """The parents of an entry are what it reads, each once, and it is a child of each of them."""
    graph = subject.log.graph
    for entry, number in enumerate(graph.recorded):
        read = {source for sources in subject.reads(number).values() for source in sources}
        parents = {graph.recorded[parent] for parent in graph.parents[entry]}
        for source in sorted(read ^ parents):
            what = "what it reads" if source in read else "only what is read"
            found = f"{subject.label(source)} {'missing' if source in read else 'too'}"
            report.findings.append(
                Finding("arguments", subject.log.label(entry), f"{what} to be its parents", found)
            )
    children: list[list[int]] = [[] for _ in graph.parents]
    for entry, parents_of_entry in enumerate(graph.parents):
        for parent in parents_of_entry:
            children[parent].append(entry)
    for entry, own in enumerate(children):
        if sorted(own) != sorted(graph.children[entry]):
            found = f"{len(graph.children[entry])}, or others"
            report.findings.append(
                Finding("arguments", subject.log.label(entry), f"{len(own)} children", found)
            )
