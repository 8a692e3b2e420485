"""The steps of a comparison, in order: weights, pairs, divergences, each error by itself,
reasons.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchlens._diff.diff import Diff, Divergence, Outputs, Pair, Unmatched
from torchlens._diff.divergence import GROWTH, GROWTH_OF_OWN, Analysis, Origin, analyse
from torchlens._diff.evidence import Evidence
from torchlens._diff.inputs import paired_inputs
from torchlens._diff.isolation import grouped, isolate
from torchlens._diff.layouts import best_layout
from torchlens._diff.mapping import fixed_by_name
from torchlens._diff.matched import Matched
from torchlens._diff.matching import Pairing
from torchlens._diff.outputs import (
    PairedOutputs,
    distinct,
    origins_at_outputs,
    output_errors,
    output_path,
    paired_outputs,
    saved_output,
    shown_by,
)
from torchlens._diff.own_error import own_error_in
from torchlens._diff.precision import OWN_ERRORS, dtype_name, own_errors, short_type
from torchlens._diff.reasons import reasons_for
from torchlens._diff.subject import Subject
from torchlens._diff.weights import WeightMatch, match_weights
from torchlens._history.model_history import ModelHistory
from torchlens._recording.relative_error import TOLERANCE, comparable, dense, epsilon_of
from torchlens._replay.entries import Entries
from torchlens._replay.replay import Replay
from torchlens.errors import CannotCompareError

Tensor = torch.Tensor


def compare_histories(
    reference: ModelHistory,
    candidate: ModelHistory,
    tolerance: float = TOLERANCE,
    mapping: Mapping[str, str] | None = None,
    isolates: bool = False,
) -> Diff:
    """Where `candidate` parts from `reference`; raises CannotCompareError where that cannot be
    told.
    """
    sides = Entries(reference._log), Entries(candidate._log)
    for name, side in zip(("reference", "candidate"), sides, strict=True):
        _check_saved(name, side)
    named, named_weights = fixed_by_name(mapping or {}, *sides)
    used = _used(sides[0]), _used(sides[1])
    weights = match_weights(sides[0].weights, sides[1].weights, used, named_weights)
    shared = sorted(_groups(weights.groups[0], used[0]) & _groups(weights.groups[1], used[1]))
    ours, theirs = (
        Subject(side, weights.groups[place], shared) for place, side in enumerate(sides)
    )
    inputs = paired_inputs(ours, theirs)
    outputs = paired_outputs(ours, theirs)
    fixed = [(ours.root[r], theirs.root[c]) for r, c in [*inputs, *named, *outputs.pairs]]
    short = short_type(*sides)
    short_errors = None if short is None else own_errors(sides[0], short)
    if short_errors:
        tolerance /= OWN_ERRORS
    growth = GROWTH_OF_OWN if short_errors else GROWTH
    pairing = Pairing(ours, theirs, fixed, (), short_errors)
    replay = Replay(sides[1])
    found_pairs = pairing.run()
    own_error = own_error_in(ours, theirs, replay, found_pairs) if replay.is_live else None
    analysis = analyse(ours, theirs, found_pairs, tolerance, growth=growth, own_error=own_error)
    compared = output_errors(outputs.pairs, pairing, analysis, tolerance)
    notes: list[str] = []
    own: dict[int, float] = {}
    mended = None
    subject, before = theirs, analysis
    if isolates:
        _check_live(replay)

        def error_of(values: dict[int, Tensor | None]) -> float | None:
            return _mended_error(sides, outputs.pairs, values)

        found = isolate(
            ours, theirs, replay, fixed, tolerance, (pairing, analysis), outputs.pairs, error_of
        )
        origins, analysis, own, mended = (
            found.origins,
            found.analysis,
            found.own_units,
            found.output_error,
        )
        subject = found.subject
        notes += _pinned_notes(sides[1], found.pinned)
    else:
        sections = analysis.sections
        begun = [Origin(pair, *sections[pair.reference]) for pair in analysis.origins]
        begun += distinct(origins_at_outputs(outputs.pairs, pairing, analysis, tolerance))
        origins = grouped(begun, ours, theirs)
    evidence = Evidence(ours, subject, weights, (Replay(sides[0]), replay), pairing)
    culprits = [
        _divergence(origin, ours, subject, tolerance, isolates, evidence) for origin in origins
    ]
    is_same = not culprits
    if is_same:
        _check_outputs_saved(outputs, sides, compared)
    culprits += _not_returned(outputs, sides, tolerance, isolates)
    largest = max(
        (u for number, u in own.items() if number in analysis.agreeing and u <= tolerance),
        default=0.0,
    )
    notes += _precision_notes(sides)
    return Diff(
        reference_name=_name(reference, sides[0]),
        candidate_name=_name(candidate, sides[1]),
        ok=not culprits,
        pairs=[_pair(pair, ours, theirs, before) for pair in before.pairs],
        culprits=culprits,
        unmatched=_unmatched(ours, theirs, before),
        outputs=replace(_outputs(compared, outputs, sides, is_same), mended=mended),
        weights=_weights_text(weights, sides),
        layers=_layers_text(ours, theirs, before),
        tolerance=tolerance,
        is_isolated=isolates,
        notes=tuple(notes),
        num_replayed=sum(map(sides[1].is_operation, range(sides[1].size))),
        largest_own=largest,
        unit="eps"
        if short_errors is None or short is None
        else f"times the reference's own {dtype_name(short)} error",
        _histories=(reference, candidate),
    )


# -- what can be compared
# ----------------------------------------------------------------------------------------------


def _check_saved(name: str, side: Entries) -> None:
    operations = [entry for entry in range(side.size) if side.is_operation(entry)]
    if not operations:
        raise CannotCompareError(f"The {name} has no operations: there is nothing to compare.")
    if not any(side.value(entry) is not None for entry in operations):
        raise CannotCompareError(
            f"The {name} has no saved values: there is nothing to compare. Log it with "
            "layers_to_save='all'."
        )


def _check_outputs_saved(
    outputs: PairedOutputs,
    sides: tuple[Entries, Entries],
    compared: Sequence[tuple[Matched, float]],
) -> None:
    """Layers that agree say little where nobody knows what was returned."""
    if len(compared) == len(outputs.pairs):
        return
    for whose, side, entries in zip(
        ("reference", "candidate"), sides, zip(*outputs.pairs, strict=True), strict=True
    ):
        for entry in entries:
            if side.value(saved_output(side, entry)) is None:
                raise CannotCompareError(
                    f"The {whose} has no saved value of its output ({output_path(side, entry)}), "
                    "so nobody can tell whether both models return the same; what was saved of "
                    "both agrees. Log it with layers_to_save='all'."
                )


def _check_live(replay: Replay) -> None:
    if not replay.is_live:
        raise CannotCompareError(
            "isolate needs the live candidate, because its operations run again: this one has no "
            "functions or no weights to run with. Give no file, but the history that "
            "log_forward_pass returned; on the command line, module:name or file.py:name."
        )


def _used(side: Entries) -> set[int]:
    return {weight for own in side.own_weights for weight in own}


def _groups(groups: dict[int, int], used: set[int]) -> set[int]:
    return {group for weight, group in groups.items() if weight in used}


def _name(history: ModelHistory, side: Entries) -> str:
    return history.model_name


# -- outputs
# --------------------------------------------------------------------------------------------------


def _outputs(
    compared: Sequence[tuple[Matched, float]],
    outputs: PairedOutputs,
    sides: tuple[Entries, Entries],
    is_same: bool,
) -> Outputs:
    """How far apart the outputs are. Where each layer computes the same (`is_same`), what is left
    is rounding.
    """
    worst = max((pair for pair, _ in compared), key=lambda pair: pair.units, default=None)
    return Outputs(
        error=float("nan") if worst is None else worst.error,
        units=float("nan") if worst is None else worst.units,
        agree=is_same or all(pair.units <= limit for pair, limit in compared),
        missing=tuple(output_path(sides[0], r) for r in outputs.missing),
        extra=tuple(output_path(sides[1], c) for c in outputs.extra),
    )


def _mended_error(
    sides: tuple[Entries, Entries],
    outputs: Sequence[tuple[int, int]],
    values: dict[int, Tensor | None],
) -> float | None:
    errors = []
    for r, c in outputs:
        a, b = sides[0].value(r), dense(values.get(c))
        if a is not None and b is not None:
            errors.append(best_layout(comparable(a), comparable(b), 0.0)[0])
    return max(errors, default=None)


# -- records
# --------------------------------------------------------------------------------------------------


def _pair(pair: Matched, ours: Subject, theirs: Subject, analysis: Analysis) -> Pair:
    layout = "" if pair.layout is None or pair.layout.is_plain else str(pair.layout)
    return Pair(
        ours.side.label(pair.reference),
        theirs.side.label(pair.candidate),
        ours.side.module_of(pair.reference),
        theirs.side.module_of(pair.candidate),
        pair.error,
        pair.units,
        pair.reference in analysis.agreeing,
        layout,
    )


def _divergence(
    origin: Origin,
    ours: Subject,
    theirs: Subject,
    tolerance: float,
    is_own: bool,
    evidence: Evidence,
) -> Divergence:
    reasons, constants = reasons_for(origin, evidence)
    rearranged = {c for _, c in evidence.rearranged(origin)}
    steps = sorted({*origin.candidate.entries, *rearranged})
    return Divergence(
        **_where("reference", ours.side, origin.pair.reference, origin.reference.entries),
        **_where("candidate", theirs.side, origin.pair.candidate, steps),
        error=origin.pair.error,
        units=origin.pair.units,
        tolerance=origin.pair.allowed(tolerance),
        input_units=0.0 if is_own else evidence.input_units(origin),
        is_own=is_own,
        constants=constants,
        reasons=tuple(reasons),
        also=tuple(theirs.side.label(pair.candidate) for pair in origin.others),
    )


def _where(whose: str, side: Entries, entry: int | None, steps: Sequence[int]) -> dict[str, Any]:
    """The fields of a divergence that tell where it is on one side; without an entry, there is
    nothing on that side.
    """
    return {
        whose: "" if entry is None else side.label(entry),
        f"{whose}_module": "" if entry is None else side.module_of(entry),
        f"{whose}_line": "" if entry is None else side.place_of(entry),
        f"{whose}_type": "" if entry is None else side.type_of(entry),
        f"{whose}_shape": () if entry is None else tuple(side.rows[entry].shape),
        f"{whose}_operations": tuple(side.label(step) for step in steps if side.is_operation(step)),
    }


def _not_returned(
    outputs: PairedOutputs, sides: tuple[Entries, Entries], tolerance: float, is_own: bool
) -> list[Divergence]:
    """One divergence for all outputs that only the reference returns, and one for those that only
    the candidate does.
    """
    found = []
    names = ("reference", "candidate")
    for entries, side, whose, other in zip(
        (outputs.missing, outputs.extra), sides, names, names[::-1], strict=True
    ):
        if entries:
            paths = [output_path(side, entry) for entry in entries]
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            steps = [shown_by(side, entry) for entry in entries]
            found.append(
                Divergence(
                    **_where(whose, side, steps[0], steps),
                    **_where(other, side, None, ()),
                    error=float("inf"),
                    units=float("inf"),
                    tolerance=tolerance,
                    input_units=0.0,
                    is_own=is_own,
                    reasons=(f"the {other} does not return {', '.join(paths[:3])}{more}",),
                )
            )
    return found


def _unmatched(ours: Subject, theirs: Subject, analysis: Analysis) -> Unmatched:
    known = {pair.reference for pair in analysis.pairs}, {pair.candidate for pair in analysis.pairs}
    found = []
    for subject, paired in zip((ours, theirs), known, strict=True):
        left = [
            entry
            for entry in subject.computed
            if entry not in paired and subject.side.is_operation(entry)
        ]
        found.append(tuple(subject.side.label(entry) for entry in left))
    return Unmatched(*found)


# -- words
# --------------------------------------------------------------------------------------------------


def _weights_text(weights: WeightMatch, sides: tuple[Entries, Entries]) -> str:
    text = weights.summary(sides[0].weights, sides[1].weights)
    for missing, side, whose in zip(
        weights.missing, sides, ("reference", "candidate"), strict=True
    ):
        names = [side.weights[number].name for number in missing]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text += f"; only in the {whose}: {', '.join(names[:3])}{more}"
    odd = weights.odd_ones(sides[0].weights)
    if odd:
        names = [sides[1].weights[pair.candidate].name for pair in odd]
        text += f"; {len(odd)} stand{'s' * (len(odd) == 1)} out: {', '.join(names[:3])}"
    return text


def _layers_text(ours: Subject, theirs: Subject, analysis: Analysis) -> str:
    paired = [pair for pair in analysis.pairs if ours.side.is_operation(pair.reference)]
    # An output is matched whatever it computes, a constant, too.
    total = {*filter(ours.side.is_operation, ours.computed), *(pair.reference for pair in paired)}
    text = f"{len(paired)} of {len(total)} matched by value, weights and order"
    layouts = Counter(
        str(pair.layout) for pair in paired if pair.layout is not None and not pair.layout.is_plain
    )
    if layouts:
        text += (
            f"; layouts: {', '.join(f'{count} {name}' for name, count in layouts.most_common(3))}"
        )
    return text


def _pinned_notes(side: Entries, pinned: dict[int, str]) -> list[str]:
    if not pinned:
        return []
    reasons = Counter(pinned.values())
    told = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common(3))
    return [
        (
            f"{len(pinned)} operations of the candidate could not run again and kept their values "
            f"({told})."
        )
    ]


def _precision_notes(sides: tuple[Entries, Entries]) -> list[str]:
    dtype = max((side.dtype for side in sides), key=epsilon_of)
    eps = epsilon_of(dtype)
    if eps < 1e-4:
        return []
    told = (
        f"In {dtype_name(dtype)} a mistake smaller than its rounding ({eps:.1e}) is invisible: an "
        "eps, or gelu's tanh form."
    )
    return [f"{told} To see those, compare in float32."]
