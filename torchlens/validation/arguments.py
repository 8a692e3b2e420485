"""Check 2, arguments: what each operation was given is what its parents are saved with.

Where the memory of an argument was written since its tensor was made, the log names several parents: then every element
must be what the last of them to write it left there.
"""

import torch

from torchlens.validation.exemptions import CONTENDED, EARLY
from torchlens.validation.memory import Contribution, Painting, paint
from torchlens.validation.report import Finding, ValidationReport
from torchlens.validation.snapshots import Snapshot
from torchlens.validation.subject import Subject
from torchlens.validation.values import brief, difference, same

__all__ = ["NOBODY", "check_arguments", "contributions_of", "side_effects_of"]

# Stands for memory that none of the parents wrote.
NOBODY = torch.iinfo(torch.int64).min


def check_arguments(subject: Subject, report: ValidationReport) -> None:
    """Compares the arguments of every call, and every output, with the saved values of its parents."""
    recording = subject.log.recording
    side_effects = side_effects_of(subject)
    for call in subject.evidence.calls:
        arguments = subject.arguments(call)
        for location in _missing_locations(subject, call.first, arguments):
            found = f"no tensor at argument {location}"
            report.findings.append(Finding("arguments", subject.label(call.first), "an argument for each parent", found))
        if call.is_early:
            report.exemptions["arguments", EARLY] += len(arguments)
            continue
        for location, argument in arguments.items():
            if argument.storage in call.contended:
                report.exemptions["arguments", CONTENDED] += 1
                continue
            _check(subject, report, call.first, location, argument, side_effects)
    for _, number in recording.outputs:
        for location in subject.given(number):
            _check(subject, report, number, location, subject.evidence.tensors[number], side_effects)


def side_effects_of(subject: Subject) -> dict[int, list[Snapshot]]:
    """By row, what the call that made it wrote to beside its result."""
    return {call.first: call.written for call in subject.evidence.calls if call.written}


def contributions_of(
    subject: Subject, number: int, location: object, side_effects: dict[int, list[Snapshot]]
) -> list[Contribution]:
    """What the parents of an argument left in memory according to the log, in the order they did."""
    tensors = subject.evidence.tensors
    found = []
    given = subject.given(number).get(location)
    if given is not None and given < 0 and given in tensors:  # a parameter, or a tensor from elsewhere
        found.append(Contribution(given, tensors[given], tensors[given].value))
    for source in sorted(subject.reads(number).get(location, ())):
        found += [Contribution(source, effect, effect.value) for effect in side_effects.get(source, ())]
        value = subject.value(source)
        if source in tensors and isinstance(value, torch.Tensor):
            found.append(Contribution(source, tensors[source], value))
    return found


def _missing_locations(subject: Subject, number: int, arguments: dict[object, Snapshot]) -> list[object]:
    """Where the log says that something is read, but the call was given no tensor."""
    captured = {location for location in subject.reads(number) if isinstance(location, tuple) and location[0] == "captured"}
    return [location for location in subject.reads(number) if location not in arguments and location not in captured]


def _check(
    subject: Subject,
    report: ValidationReport,
    number: int,
    location: object,
    argument: Snapshot,
    side_effects: dict[int, list[Snapshot]],
) -> None:
    sources = subject.reads(number).get(location, [])
    if not sources:
        return
    report.num_checked["arguments"] += 1
    if len(sources) == 1 and same(subject.value(sources[0]), argument.value):
        return
    painting = paint(argument, contributions_of(subject, number, location, side_effects), NOBODY)
    if painting is not None and bool((painting.sources != NOBODY).all()) and same(painting.value, argument.value):
        return
    names = " and ".join(subject.label(source) for source in sources)
    what = "the output" if subject.log.recording.rows[number].operation.name == "output" else f"argument {location}"
    expected = f"{what} ({brief(argument.value)}) to be what {names} saved"
    report.findings.append(
        Finding("arguments", subject.label(number), expected, _explanation(subject, sources, argument, painting))
    )


def _explanation(subject: Subject, sources: list[int], argument: Snapshot, painting: Painting | None) -> str:
    if len(sources) > 1 and painting is not None:
        unexplained = int((painting.sources == NOBODY).sum())
        if unexplained:
            return f"{unexplained} of {argument.value.numel()} elements that none of them wrote"
        return difference(painting.value, argument.value)
    value = subject.value(sources[0])
    return difference(value, argument.value) if isinstance(value, torch.Tensor) else f"nothing saved for {sources[0]}"
