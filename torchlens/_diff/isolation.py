"""Every error by itself: where the candidate goes wrong, the reference's value is put in and the
rest runs again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchlens._diff.divergence import (
    GROWTH,
    GROWTH_OF_OWN,
    Analysis,
    Origin,
    Section,
    analyse,
    section_of,
    stops_of,
)
from torchlens._diff.matched import Matched
from torchlens._diff.matching import Pairing
from torchlens._diff.outputs import distinct, origins_at_outputs
from torchlens._diff.subject import Subject
from torchlens._recording.relative_error import comparable, dense, relative_error
from torchlens._replay.replay import Replay

Tensor = torch.Tensor
_MOST_ROUNDS = 200


@dataclass
class Isolated:
    """All origins, the pairs of the last round, the own errors of those that agree, and what could
    not run again.
    """

    origins: list[Origin]
    analysis: Analysis
    own_units: dict[int, float]
    output_error: float | None
    pinned: dict[int, str]
    subject: Subject


def isolate(
    reference: Subject,
    candidate: Subject,
    replay: Replay,
    fixed: Sequence[tuple[int, int]],
    tolerance: float,
    first: tuple[Pairing, Analysis],
    outputs: Sequence[tuple[int, int]],
    output_error: Callable[[dict[int, Tensor | None]], float | None],
) -> Isolated:
    """Puts the reference's values in until nothing differs any more."""
    pairing, analysis = first
    origins: dict[int, Origin] = {}
    own_units: dict[int, float] = {}
    trusted: dict[int, Matched] = {}
    kinds: set[tuple[str, ...]] = set()
    subject = candidate
    for _ in range(_MOST_ROUNDS):
        found = [pair for pair in analysis.origins if pair.reference not in trusted]
        for pair in found:
            ours, theirs = analysis.sections[pair.reference]
            origins[pair.reference] = Origin(pair, ours, theirs)
            trusted[pair.reference] = pair
            kinds.add(_kind(reference, subject, pair))
        for pair in analysis.pairs:
            # What went wrong in one layer, or in one pass, may have gone wrong in all of its kind:
            # their own errors tell.
            is_alike = (
                found
                and pair.is_sure
                and pair.layout is not None
                and _kind(reference, subject, pair) in kinds
            )
            if pair.reference in analysis.agreeing or (is_alike and pair.reference not in trusted):
                trusted[pair.reference] = pair
        own_units = {}
        values = replay.run(_put_in(reference, list(trusted.values()), pairing, own_units))
        if not found:
            break
        changed = {
            entry: value for entry, value in values.items() if entry not in subject.side._buffers
        }
        subject = candidate.again(changed)
        known = [*fixed, *((pair.reference, pair.candidate) for pair in trusted.values())]
        pairing = Pairing(reference, subject, known, (), pairing.unit_of)
        growth = GROWTH_OF_OWN if pairing.unit_of else GROWTH
        analysis = analyse(reference, subject, pairing.run(), tolerance, set(trusted), growth)
    # Only now is every error a layer's own: all that goes in is the reference's.
    for number, pair in trusted.items():
        if (
            number not in origins
            and own_units.get(number, 0.0) > pair.allowed(tolerance)
            and _runs(pair, replay)
        ):
            origins[number] = Origin(pair, *_sections(reference, subject, pairing, pair))
    for number, origin in list(origins.items()):
        if own_units.get(number, float("inf")) <= origin.pair.allowed(tolerance):
            del origins[number]
    for number, origin in origins.items():
        origin.pair.error = own_units.get(number, origin.pair.units) * origin.pair.eps
    at_outputs = origins_at_outputs(outputs, *first, tolerance)
    for output, origin in origins_at_outputs(outputs, pairing, analysis, tolerance):
        if not any(entry in replay.pinned for entry in origin.candidate.entries):
            at_outputs.append((output, origin))
    kept = sorted(
        [*origins.values(), *distinct(at_outputs)], key=lambda origin: origin.pair.reference
    )
    put_right = [
        *(origin.pair for origin in origins.values()),
        *(output for output, _ in at_outputs),
    ]
    mended = replay.run(_put_in(reference, put_right, None, {}))
    return Isolated(
        grouped(kept, reference, subject),
        analysis,
        own_units,
        output_error(mended),
        dict(replay.pinned),
        subject,
    )


def _kind(reference: Subject, candidate: Subject, pair: Matched) -> tuple[str, ...]:
    """What a pair is, whatever the number of its layer and its pass: the types, the lines, the
    modules without numbers.
    """
    found: list[str] = []
    for side, entry in ((reference.side, pair.reference), (candidate.side, pair.candidate)):
        module = "".join(letter for letter in side.module_of(entry) if not letter.isdigit())
        found += [side.type_of(entry), side.place_of(entry), module]
    return tuple(found)


def _runs(pair: Matched, replay: Replay) -> bool:
    return pair.candidate not in replay.pinned


def _sections(
    reference: Subject, candidate: Subject, pairing: Pairing, pair: Matched
) -> tuple[Section, Section]:
    found = pairing.found
    ours = section_of(pair, 0, reference, found, stops_of(reference, found, 0))
    return ours, section_of(pair, 1, candidate, found, stops_of(candidate, found, 1))


def _put_in(
    reference: Subject,
    pairs: Sequence[Matched],
    pairing: Pairing | None,
    own_units: dict[int, float],
) -> Callable[[int, Tensor], Tensor | None]:
    """Gives, for each entry of the candidate that is one of `pairs`, the reference's value, and
    notes the own error.

    Other entries that hold what one of the reference holds get that, too.
    """
    by_candidate = {pair.candidate: pair for pair in pairs}
    by_reference = {pair.reference: pair for pair in pairs}
    twins = {} if pairing is None else pairing.found.twins[1]

    def put_in(entry: int, value: Tensor) -> Tensor | None:
        pair = by_candidate.get(entry) or twins.get(entry)
        if pair is None or (
            entry not in by_candidate and _comes_later(by_reference.get(pair.reference), entry)
        ):
            return None
        target = reference.side.value(pair.reference)
        if target is None:
            return None
        if pair.layout is None:
            if tuple(target.shape) != tuple(value.shape) and target.dim() != value.dim():
                return None
            own_units[pair.reference] = float("inf")
            return target.to(value.dtype)
        own = dense(value)
        if own is None or own.numel() != target.numel():
            return None
        if entry in by_candidate:
            back = pair.layout.to_reference(comparable(own), tuple(target.shape))
            own_units[pair.reference] = relative_error(comparable(target), back) / pair.eps
        changed = pair.layout.to_candidate(target, tuple(own.shape))
        return (
            torch.view_as_complex(changed.contiguous())
            if value.is_complex()
            else changed.to(value.dtype)
        )

    return put_in


def _comes_later(pair: Matched | None, entry: int) -> bool:
    """Whether what an entry holds is the result of a computation that it is itself a step of."""
    return pair is not None and pair.candidate > entry


def grouped(origins: Sequence[Origin], reference: Subject, candidate: Subject) -> list[Origin]:
    """Origins that share a computation become one: q, k and v of one `qkv` go wrong together."""
    found: list[Origin] = []
    for origin in origins:
        for known in found:
            ours = _computed(reference, known.reference) & _computed(reference, origin.reference)
            theirs = _computed(candidate, known.candidate) & _computed(candidate, origin.candidate)
            is_one = _is_one_layer(reference, candidate, known.pair, origin.pair) or _is_one_line(
                candidate, known, origin
            )
            if ours or theirs or is_one:
                known.others.append(origin.pair)
                break
        else:
            found.append(origin)
    return found


def _is_one_layer(reference: Subject, candidate: Subject, first: Matched, second: Matched) -> bool:
    """Whether two pairs are passes of one layer on both sides."""
    ours, theirs = reference.side.graph.layer_of, candidate.side.graph.layer_of
    is_one = (
        ours[first.reference] == ours[second.reference]
        and theirs[first.candidate] == theirs[second.candidate]
    )
    return is_one and first.reference != second.reference


def _is_one_line(candidate: Subject, first: Origin, second: Origin) -> bool:
    """Whether two origins are one line of the candidate's code that takes two things from one: `a,
    b = x[::2], x[1::2]`.
    """
    side = candidate.side
    places = [
        (side.place_of(o.pair.candidate), side.log.module_chain(o.pair.candidate))
        for o in (first, second)
    ]
    return (
        bool(places[0][0])
        and places[0] == places[1]
        and first.candidate.inputs == second.candidate.inputs
    )


def _computed(subject: Subject, section: Section) -> set[int]:
    """The entries of a section that compute something, from the input on."""
    from_input = subject.side.graph.has_input_ancestor
    return {
        e
        for e in section.entries
        if from_input[e] and subject.side.is_operation(e) and subject.root[e] == e
    }
