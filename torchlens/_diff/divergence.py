"""Where two models diverge: the pairs whose inputs agree and whose values do not."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from torchlens._diff.compared_model import ComparedModel
from torchlens._diff.known_pairs import saved_output, shown_by
from torchlens._diff.matching import Matched, Pairing
from torchlens._recording.tolerance import dense
from torchlens._replay.replay import Replay
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
# How many times the error of its inputs the error of a correct layer may be. It is less if the
# unit is the reference's own error, which grows from layer to layer, too.
_GROWTH = 4.0
_GROWTH_OF_OWN = 2.0
# A pair is false if its error is so many times that of everything computed from it.
_VANISHED = 20.0
# Outputs may differ so many times more than the values that they show: a cast adds rounding.
_AS_FAR = 2.0


@dataclass(frozen=True)
class Section:
    """The entries between a pair and the pairs above it, on one side, and their inputs."""

    inputs: tuple[int, ...]
    entries: tuple[int, ...]


@dataclass
class ErrorOrigin:
    """A pair at which an error begins, with its sections. `others` are pairs of the same
    computation.
    """

    pair: Matched
    reference: Section
    candidate: Section
    others: list[Matched] = field(default_factory=list)


@dataclass(frozen=True)
class Analysis:
    """All pairs in the order of the reference; the rest is by entry of the reference.

    `origins` are the pairs at which an error begins, `sections` has those of pairs that do not
    agree, and `limits` the largest error, in units, that counts as rounding.
    """

    pairs: list[Matched]
    agreeing: set[int]
    origins: list[Matched]
    sections: dict[int, tuple[Section, Section]]
    limits: dict[int, float]


def analyse(
    pairing: Pairing,
    tolerance: float,
    replay: Replay | None = None,
    trusted: Collection[int] = (),
) -> Analysis:
    """Finds the pairs that agree and those at which an error begins. Removes false pairs from
    `pairing`: those that differ although everything computed from them agrees.

    `replay`, of the candidate, gives the own error of a pair; without it, errors may grow by a
    fixed factor from layer to layer. `trusted` pairs, by entry of the reference, agree.
    """
    for _ in range(4):
        analysis = _analysed(pairing, tolerance, replay, trusted)
        false = [pair for pair in analysis.pairs if _is_false(pairing, pair, analysis)]
        if not false:
            break
        for pair in false:
            pairing.remove(pair)
    return analysis


def _analysed(
    pairing: Pairing, tolerance: float, replay: Replay | None, trusted: Collection[int]
) -> Analysis:
    stops = stops_of(pairing, 0), stops_of(pairing, 1)
    analysis = Analysis(pairing.pairs(), set(trusted), [], {}, {})
    waiting: list[Matched] = []
    for pair in analysis.pairs:
        analysis.limits[pair.reference] = pair.allowed(tolerance)
    for pair in (pair for pair in analysis.pairs if pair.reference not in trusted):
        allowed = pair.allowed(tolerance)
        ours = section_of(pairing, 0, pair, stops[0])
        theirs = section_of(pairing, 1, pair, stops[1])
        inputs = _pairs_of_inputs(pairing, ours, theirs)
        is_good = partial(_is_good_input, pair=pair, analysis=analysis, tolerance=tolerance)
        good = list(filter(is_good, inputs))
        has_good_inputs = len(good) == len(inputs)
        inherited = _inherited_units(pairing, pair, good, trusted)
        limit = analysis.limits[pair.reference] = allowed + inherited
        if _is_rounding(pairing, pair, limit, allowed, theirs, replay if has_good_inputs else None):
            analysis.agreeing.add(pair.reference)
        else:
            analysis.sections[pair.reference] = (ours, theirs)
            (analysis.origins if has_good_inputs else waiting).append(pair)
    if not analysis.origins:  # each depends on another: the order of the reference decides
        analysis.origins.extend(waiting[:1])
    return analysis


def _is_rounding(
    pairing: Pairing,
    pair: Matched,
    limit: float,
    allowed: float,
    section: Section,
    replay: Replay | None,
) -> bool:
    """True if the error of a pair is rounding: its own error, if that can be computed, is at most
    `allowed`; or else the whole error is at most `limit`.
    """
    own = own_units(pairing, pair, section, replay) if pair.units > allowed else None
    return pair.units <= limit if own is None else own <= allowed


def _inherited_units(
    pairing: Pairing, pair: Matched, inputs: Sequence[Matched], trusted: Collection[int]
) -> float:
    """How much of the error of a pair, in units of rounding, the errors of its inputs explain."""
    growth = _GROWTH_OF_OWN if pairing.unit_of else _GROWTH
    errors = (other.error for other in inputs if other.reference not in trusted)
    return growth * max(errors, default=0.0) / pair.eps


def _pairs_of_inputs(pairing: Pairing, ours: Section, theirs: Section) -> list[Matched]:
    above = [pairing.at(0, entry) for entry in ours.inputs]
    above += [pairing.at(1, entry) for entry in theirs.inputs]
    return [pair for pair in above if pair is not None]


def _is_good_input(other: Matched, pair: Matched, analysis: Analysis, tolerance: float) -> bool:
    """True if an input of a pair agrees. One that comes later in the reference is not analysed yet:
    its whole error counts.
    """
    is_later = other.reference >= pair.reference
    return other.reference in analysis.agreeing or (
        is_later and other.units <= other.allowed(tolerance)
    )


def stops_of(pairing: Pairing, side: int) -> list[bool]:
    """For each entry of a side, whether its value has a pair."""
    return [pairing.at(side, root) is not None for root in pairing.models[side].root]


def section_of(pairing: Pairing, side: int, pair: Matched, stops: Sequence[bool]) -> Section:
    """The section of a pair on one side.

    An entry above that holds the value of the pair itself (a norm before it is multiplied by ones)
    is part of it.
    """
    model, stops = pairing.models[side], list(stops)
    while True:
        ends, passed = model.above(pair.on(side), stops)
        own = []
        for end in ends:
            other = pairing.at(side, model.root[end]) if stops[end] else None
            if other is not None and other.on(1 - side) == pair.on(1 - side):
                own.append(end)
        if not own:
            return Section(tuple(dict.fromkeys(model.root[end] for end in ends)), tuple(passed))
        for end in own:
            stops[end] = False


def _is_false(pairing: Pairing, pair: Matched, analysis: Analysis) -> bool:
    """True if a pair that was not matched by value differs although everything computed from it
    agrees.
    """
    if pair.by_value or pair.reference not in analysis.sections:
        return False
    below = _below(pairing, pair.candidate)
    if not below:
        return not pairing.candidate.graph.is_output_ancestor[pair.candidate]
    if any(other.reference not in analysis.agreeing for other in below):
        return False
    return pair.units > _VANISHED * max(other.units for other in below)


def _below(pairing: Pairing, entry: int) -> list[Matched]:
    """The nearest pairs below an entry of the candidate."""
    model, pairs = pairing.candidate, dict[int, Matched]()
    seen, waiting = {entry}, [entry]
    while waiting:
        for child in model.children[waiting.pop()]:
            if child not in seen:
                seen.add(child)
                root = model.root[child]
                pair = None if root == entry else pairing.at(1, root)
                if pair is None:
                    waiting.append(child)
                else:
                    pairs[pair.reference] = pair
    return list(pairs.values())


# -- a layer's own error
# --------------------------------------------------------------------------------------------------


def own_units(
    pairing: Pairing, pair: Matched, section: Section, replay: Replay | None
) -> float | None:
    """The error of a pair, in units of rounding, if the candidate computes it from the reference's
    inputs; None if it cannot.
    """
    target = pairing.reference.value(pair.reference)
    if replay is None or target is None or pair.layout is None:
        return None
    entries, given = _with_views(pairing.candidate, section)
    known = _reference_values(pairing, given)
    if len(known) < len(given):
        return None
    try:
        result = dense(replay.part(entries | {pair.candidate}, known))
    except NotReplayableError:
        return None
    is_comparable = result is not None and result.numel() == target.numel()
    return pair.units_between(target, result) if is_comparable else None


def _reference_values(pairing: Pairing, entries: Collection[int]) -> dict[int, Tensor]:
    """The reference's values for those of the entries of the candidate that have one."""
    values = {entry: _reference_value(pairing, entry) for entry in entries}
    return {entry: value for entry, value in values.items() if value is not None}


def _with_views(model: ComparedModel, section: Section) -> tuple[set[int], set[int]]:
    """The entries of a section with the views that it reads, and the inputs of all of these."""
    entries, given = set(section.entries), set[int]()
    for entry in section.entries:
        for parent in model.parents[entry]:
            root = model.root[parent]
            if parent in entries or root in given:
                continue
            given.add(root)
            while parent != root:
                entries.add(parent)
                parent = model.parents[parent][0]
    return entries, given


def _reference_value(pairing: Pairing, entry: int) -> Tensor | None:
    """The reference's value for an entry of the candidate; its own if it comes from no input."""
    raw, pair = pairing.candidate.raw(entry), pairing.at(1, entry)
    if not isinstance(raw, Tensor):
        return None
    if pair is None or not raw.is_floating_point():
        is_given = pair is None and pairing.candidate.graph.has_input_ancestor[entry]
        return None if is_given else raw
    value = pairing.reference.value(pair.reference)
    if value is None or pair.layout is None or value.numel() != raw.numel():
        return None
    return pair.layout.to_candidate(value, tuple(raw.shape)).to(raw.dtype)


# -- outputs
# --------------------------------------------------------------------------------------------------


def output_errors(
    outputs: Sequence[tuple[int, int]], pairing: Pairing, analysis: Analysis, tolerance: float
) -> list[tuple[Matched, float]]:
    """Each pair of saved outputs, with its limit in units of rounding."""
    ours, theirs = pairing.models
    found = []
    for r, c in outputs:
        pair = pairing.compared(saved_output(ours, r), saved_output(theirs, c), True)
        if pair.error == pair.error:
            limit = analysis.limits.get(ours.root[pair.reference], tolerance)
            found.append((pair, pair.allowed(limit)))
    return found


def origins_at_outputs(
    outputs: Sequence[tuple[int, int]], pairing: Pairing, analysis: Analysis, tolerance: float
) -> list[tuple[Matched, ErrorOrigin]]:
    """Outputs that differ although the values that they show agree (the order of elements differs,
    or another value is returned), each with the origin of its error.
    """
    found = []
    ours, theirs = pairing.models
    for output, limit in output_errors(outputs, pairing, analysis, tolerance):
        shown = pairing.of[0].get(ours.root[output.reference])
        if shown is not None and shown.candidate == theirs.root[output.candidate]:
            is_explained = shown.reference not in analysis.agreeing
            limit = max(limit, _AS_FAR * shown.units)
        else:
            is_explained = _is_behind(output, pairing, analysis.origins)
        if not is_explained and output.units > limit:
            ends = shown_by(ours, output.reference), shown_by(theirs, output.candidate)
            first, second = (_section_of_output(pairing, s, end) for s, end in enumerate(ends))
            found.append((output, ErrorOrigin(pairing.compared(*ends, True), first, second)))
    return found


def _is_behind(output: Matched, pairing: Pairing, origins: Sequence[Matched]) -> bool:
    """True if something that differs leads to an output."""
    above = [
        model.above(output.on(side), [False] * model.size)[1]
        for side, model in enumerate(pairing.models)
    ]
    return any(o.reference in above[0] or o.candidate in above[1] for o in origins)


def _section_of_output(pairing: Pairing, side: int, entry: int) -> Section:
    """The section between a returned entry and the values above it that have pairs; it includes
    views of these.
    """
    model = pairing.models[side]
    stops = [is_known and model.root[number] == number
             for number, is_known in enumerate(stops_of(pairing, side))]  # fmt: skip
    if stops[entry]:
        return Section((entry,), ())
    ends, passed = model.above(entry, stops)
    return Section(tuple(ends), tuple(passed))


def distinct(at_outputs: Sequence[tuple[Matched, ErrorOrigin]]) -> list[ErrorOrigin]:
    """The origins of outputs, without those that show the same values as another."""
    return list({(o.pair.reference, o.pair.candidate): o for _, o in at_outputs}.values())


# -- one computation
# --------------------------------------------------------------------------------------------------


def grouped(origins: Sequence[ErrorOrigin], pairing: Pairing) -> list[ErrorOrigin]:
    """Merges origins that share a computation, such as q, k and v of one `qkv`."""
    found: list[ErrorOrigin] = []
    for origin in origins:
        for known in found:
            if (
                _share_steps(pairing, known, origin)
                or _are_passes(pairing, known.pair, origin.pair)
                or _are_one_line(pairing, known, origin)
            ):
                known.others.append(origin.pair)
                break
        else:
            found.append(origin)
    return found


def _share_steps(pairing: Pairing, first: ErrorOrigin, second: ErrorOrigin) -> bool:
    """True if, on either side, both have a step in common that depends on the input."""
    ours = set(first.reference.entries) & set(second.reference.entries)
    theirs = set(first.candidate.entries) & set(second.candidate.entries)
    return any(
        model.graph.has_input_ancestor[entry]
        and model.is_operation(entry)
        and model.root[entry] == entry
        for model, shared in zip(pairing.models, (ours, theirs), strict=True)
        for entry in shared
    )


def _are_passes(pairing: Pairing, first: Matched, second: Matched) -> bool:
    """True if two pairs are passes of one layer on both sides."""
    layers = [model.graph.layer_of for model in pairing.models]
    is_one = all(layers[side][first.on(side)] == layers[side][second.on(side)] for side in (0, 1))
    return is_one and first.reference != second.reference


def _are_one_line(pairing: Pairing, first: ErrorOrigin, second: ErrorOrigin) -> bool:
    """True if one line of the candidate computes both from one value: `a, b = x[::2], x[1::2]`."""
    model = pairing.candidate
    ours, theirs = (
        (model.place_of(o.pair.candidate), model.log.module_chain(o.pair.candidate))
        for o in (first, second)
    )
    return bool(ours[0]) and ours == theirs and first.candidate.inputs == second.candidate.inputs
