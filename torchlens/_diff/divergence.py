"""Where two histories diverge: the pairs whose inputs agree and whose outputs do not."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torchlens._diff.matched import Found, Matched
from torchlens._diff.subject import Subject

# How much larger than that of its inputs the error of a correct layer may be.
GROWTH = 4.0
GROWTH_OF_OWN = 2.0  # where the unit of error is the reference's own, which grows, too
# An error that much larger than that of all that is computed from it was none: two steps in between
# were taken for one.
_VANISHED = 20.0


# The own error of a pair, given the candidate's section: in units of rounding, or None.
OwnError = Callable[[Matched, "Section"], float | None]


@dataclass(frozen=True)
class Section:
    """What lies between a pair and the pairs above it, on one side: what goes in, and what is
    computed.
    """

    inputs: tuple[int, ...]
    entries: tuple[int, ...]


@dataclass
class Origin:
    """A pair at which an error begins, and the sections that it lies in. `others` are results of
    the same computation.
    """

    pair: Matched
    reference: Section
    candidate: Section
    others: list[Matched] = field(default_factory=list)


@dataclass(frozen=True)
class Analysis:
    """All pairs in the order of the reference, those that agree, and those where an error begins,
    with their sections.
    """

    pairs: list[Matched]
    agreeing: set[int]  # by entry of the reference
    origins: list[Matched]
    sections: dict[
        int, tuple[Section, Section]
    ]  # of the pairs that do not agree, by entry of the reference
    limits: dict[int, float]  # the largest error, in units of rounding, that counts as rounding


def analyse(
    reference: Subject,
    candidate: Subject,
    found: Found,
    tolerance: float,
    trusted: set[int] | None = None,
    growth: float = GROWTH,
    own_error: OwnError | None = None,
) -> Analysis:
    """Sorts the pairs. Pairs that turn out to be none (all that is computed from them agrees) are
    taken out of `found`.

    `trusted`, by entry of the reference, are pairs whose error is known to be put right.
    `own_error` tells, where it can be told, what of a pair's error is its own; without it, errors
    may grow from layer to layer, and how much is a guess.
    """
    for _ in range(4):
        analysis = _sorted(
            reference, candidate, found, tolerance, trusted or set(), growth, own_error
        )
        false = [pair for pair in analysis.pairs if _is_false(pair, candidate, found, analysis)]
        if not false:
            break
        for pair in false:
            found.remove(pair)
    return analysis


def _sorted(
    reference: Subject,
    candidate: Subject,
    found: Found,
    tolerance: float,
    trusted: set[int],
    growth: float,
    own_error: OwnError | None,
) -> Analysis:
    stops = stops_of(reference, found, 0), stops_of(candidate, found, 1)
    agreeing: set[int] = set(trusted)
    limits: dict[int, float] = {}
    sections: dict[int, tuple[Section, Section]] = {}
    origins, waiting = [], []
    pairs = found.pairs()
    for pair in pairs:
        if pair.reference in trusted:
            limits[pair.reference] = pair.allowed(tolerance)
            continue
        ours, theirs = (
            section_of(pair, 0, reference, found, stops[0]),
            section_of(pair, 1, candidate, found, stops[1]),
        )
        above = [_pair_at(found, 0, end) for end in ours.inputs] + [
            _pair_at(found, 1, end) for end in theirs.inputs
        ]
        known = [p for p in above if p is not None]
        # An input that the candidate reads and that comes later in the reference is judged by
        # itself.
        good = [
            p
            for p in known
            if p.reference in agreeing
            or (p.reference >= pair.reference and p.units <= p.allowed(tolerance))
        ]
        largest = max((p.error for p in good if p.reference not in trusted), default=0.0)
        allowed = pair.allowed(tolerance)
        limits[pair.reference] = limit = allowed + growth * largest / pair.eps
        is_in_question = pair.units > allowed and len(good) == len(known) and own_error is not None
        own = own_error(pair, theirs) if is_in_question and own_error is not None else None
        if (pair.units if own is None else own) <= (limit if own is None else allowed):
            agreeing.add(pair.reference)
            continue
        sections[pair.reference] = (ours, theirs)
        if len(good) == len(known):
            origins.append(pair)
        else:
            waiting.append(pair)
    if not origins and waiting:  # each waits for another: the order of the reference decides
        origins = waiting[:1]
    return Analysis(pairs, agreeing, origins, sections, limits)


def stops_of(subject: Subject, found: Found, side: int) -> list[bool]:
    """For each entry of a side, whether it is known what it is on the other."""
    paired = (found.of_reference, found.of_candidate)[side]
    return [root in paired or root in found.twins[side] for root in subject.root]


def section_of(
    pair: Matched, side: int, subject: Subject, found: Found, stops: list[bool]
) -> Section:
    """What lies between a pair and the pairs above it, on one side.

    An entry above that holds the same as the pair itself (a norm before it is multiplied by ones)
    lies in between, too.
    """
    entry = (pair.reference, pair.candidate)[side]
    while True:
        ends, passed = subject.side.above(entry, stops)
        own = [
            end
            for end in ends
            if stops[end] and _is_itself(_pair_at(found, side, subject.root[end]), pair, side)
        ]
        if not own:
            return Section(tuple(dict.fromkeys(subject.root[end] for end in ends)), tuple(passed))
        stops = list(stops)
        for end in own:
            stops[end] = False


def _is_itself(other: Matched | None, pair: Matched, side: int) -> bool:
    if other is None:
        return False
    return other.reference == pair.reference if side else other.candidate == pair.candidate


def _pair_at(found: Found, side: int, entry: int) -> Matched | None:
    own = (found.of_reference, found.of_candidate)[side].get(entry)
    return own if own is not None else found.twins[side].get(entry)


def _is_false(pair: Matched, candidate: Subject, found: Found, analysis: Analysis) -> bool:
    """Whether a pair that was found by structure differs while all that is computed from it
    agrees.
    """
    if pair.by_value or pair.reference not in analysis.sections:
        return False
    below = _below(candidate, pair.candidate, found)
    if not below:
        return not _leads_on(candidate, pair.candidate)
    if any(p.reference not in analysis.agreeing for p in below):
        return False
    return pair.units > _VANISHED * max(p.units for p in below)


def _below(subject: Subject, entry: int, found: Found) -> list[Matched]:
    """The first pairs that one comes to going down from an entry of the candidate."""
    pairs: dict[int, Matched] = {}
    seen = {entry}
    waiting = [entry]
    while waiting:
        for child in subject.side.children[waiting.pop()]:
            if child in seen:
                continue
            seen.add(child)
            root = subject.root[child]
            pair = None if root == entry else _pair_at(found, 1, root)
            if pair is None:
                waiting.append(child)
            else:
                pairs[pair.reference] = pair
    return list(pairs.values())


def _leads_on(subject: Subject, entry: int) -> bool:
    return subject.side.graph.is_output_ancestor[entry]
