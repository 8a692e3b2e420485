"""Which outputs correspond, how far apart they are, and those that differ although the values that
they show agree.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torchlens._diff.divergence import Analysis, Origin, Section, stops_of
from torchlens._diff.matched import Matched
from torchlens._diff.matching import Pairing
from torchlens._diff.subject import Subject
from torchlens._recording.operations import IDENTITY, OUTPUT
from torchlens._replay.entries import Entries

# Outputs that show two values in the same way are as far apart as these; a cast on the way may add
# a little.
_AS_FAR = 2.0


class PairedOutputs(NamedTuple):
    """Pairs of outputs, and those that only one side returns, in numbers of entries."""

    pairs: list[tuple[int, int]]
    missing: list[int]  # in the candidate
    extra: list[int]


def paired_outputs(ours: Subject, theirs: Subject) -> PairedOutputs:
    """Outputs by their keys and attributes, the others in their order; where one side has more, the
    nearest first.
    """
    first, second = list(ours.side.graph.outputs), list(theirs.side.graph.outputs)
    are_as_many = len(first) == len(second)
    of_path = {output_path(theirs.side, c): c for c in second}
    found: dict[int, int] = {}
    for r in first:
        path = output_path(ours.side, r)
        # A place in a tuple says nothing where the other tuple is shorter.
        if (are_as_many or _is_named(path)) and path in of_path:
            found[r] = of_path.pop(path)
    if not are_as_many:
        _pair_nearest(ours, theirs, found)
    taken = set(found.values())
    rest = [r for r in first if r not in found], [c for c in second if c not in taken]
    in_order = list(zip(*rest, strict=False))
    return PairedOutputs(
        sorted([*found.items(), *in_order]), rest[0][len(in_order) :], rest[1][len(in_order) :]
    )


def output_path(side: Entries, entry: int) -> str:
    """`output.logits`"""
    return side.log.boundary_addresses.get(entry, ["output"])[0]


def _is_named(path: str) -> bool:
    return not all(part.isdigit() for part in path.split(".")[1:])


def _pair_nearest(ours: Subject, theirs: Subject, found: dict[int, int]) -> None:
    taken = set(found.values())
    apart = [
        (own.apart(other), r, c)
        for r in ours.side.graph.outputs
        for c in theirs.side.graph.outputs
        if (own := ours.prints[r]) is not None and (other := theirs.prints[c]) is not None
    ]
    for distance, r, c in sorted(apart):
        if r not in found and c not in taken and distance < float("inf"):
            found[r] = c
            taken.add(c)


def shown_by(side: Entries, entry: int) -> int:
    """The entry that an output shows."""
    while side.rows[entry].operation in (OUTPUT, IDENTITY) and side.parents[entry]:
        entry = side.parents[entry][0]
    return entry


def saved_output(side: Entries, entry: int) -> int:
    """An output, or the entry that it shows where that alone was saved."""
    return entry if side.value(entry) is not None else shown_by(side, entry)


# -- how far apart
# --------------------------------------------------------------------------------------------------


def output_errors(
    outputs: Sequence[tuple[int, int]], pairing: Pairing, analysis: Analysis, tolerance: float
) -> list[tuple[Matched, float]]:
    """Each pair of outputs that were saved, and how far apart they may be in units of rounding."""
    sides = pairing.reference.side, pairing.candidate.side
    compared = [
        pairing.compared(saved_output(sides[0], r), saved_output(sides[1], c), True)
        for r, c in outputs
    ]
    root = pairing.reference.root
    return [
        (pair, pair.allowed(analysis.limits.get(root[pair.reference], tolerance)))
        for pair in compared
        if pair.error == pair.error
    ]


def origins_at_outputs(
    outputs: Sequence[tuple[int, int]], pairing: Pairing, analysis: Analysis, tolerance: float
) -> list[tuple[Matched, Origin]]:
    """Outputs that differ although the values that they show agree: in another order, or another
    value is returned.

    Each comes with the origin of its error, which is what it shows.
    """
    found = []
    ours, theirs = pairing.reference, pairing.candidate
    for output, limit in output_errors(outputs, pairing, analysis, tolerance):
        r, c = ours.root[output.reference], theirs.root[output.candidate]
        shown = pairing.found.of_reference.get(r)
        if shown is not None and shown.candidate == c:
            is_explained = r not in analysis.agreeing
            limit = max(limit, _AS_FAR * shown.units)
        else:
            is_explained = _is_behind(output, pairing, analysis.origins)
        if is_explained or output.units <= limit:
            continue
        ends = shown_by(ours.side, output.reference), shown_by(theirs.side, output.candidate)
        sections = _section(pairing, 0, ends[0]), _section(pairing, 1, ends[1])
        found.append((output, Origin(pairing.compared(*ends, True), *sections)))
    return found


def distinct(at_outputs: Sequence[tuple[Matched, Origin]]) -> list[Origin]:
    """The origins, one for all outputs that show the same."""
    return list(
        {
            (origin.pair.reference, origin.pair.candidate): origin for _, origin in at_outputs
        }.values()
    )


def _is_behind(output: Matched, pairing: Pairing, origins: Sequence[Matched]) -> bool:
    """Whether something that differs leads to an output."""
    _, ours = pairing.reference.side.above(output.reference, [False] * pairing.reference.side.size)
    _, theirs = pairing.candidate.side.above(
        output.candidate, [False] * pairing.candidate.side.size
    )
    return any(origin.reference in ours or origin.candidate in theirs for origin in origins)


def _section(pairing: Pairing, place: int, entry: int) -> Section:
    """What lies between an entry that is returned and the values above it that are known, their
    views included.
    """
    subject = (pairing.reference, pairing.candidate)[place]
    known = stops_of(subject, pairing.found, place)
    stops = [is_known and subject.root[number] == number for number, is_known in enumerate(known)]
    if stops[entry]:
        return Section((entry,), ())
    ends, passed = subject.side.above(entry, stops)
    return Section(tuple(ends), tuple(passed))
