"""The steps of a comparison, in order: weights, pairs, divergences, reasons."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from torchlens._diff.compared_model import ComparedModel
from torchlens._diff.divergence import (
    Analysis,
    ErrorOrigin,
    analyse,
    distinct,
    grouped,
    origins_at_outputs,
    output_errors,
)
from torchlens._diff.evidence import Evidence
from torchlens._diff.isolation import Isolated, isolate
from torchlens._diff.known_pairs import (
    PairedOutputs,
    output_path,
    paired_inputs,
    paired_outputs,
    pairs_by_name,
    saved_output,
    shown_by,
)
from torchlens._diff.matching import Matched, Pairing
from torchlens._diff.reasons import reasons_for
from torchlens._diff.result import Diff, Divergence, Outputs, Pair, Unmatched
from torchlens._diff.weights import WeightMatch, match_weights, weights_text
from torchlens._history.model_history import ModelHistory
from torchlens._recording.tolerance import (
    TOLERANCE,
    dense,
    epsilon_of,
    numbers,
    relative_error,
)
from torchlens._replay.replay import Replay
from torchlens._text.numbers import first_few
from torchlens.errors import CannotCompareError

_NAMES = ("reference", "candidate")
_SHORT_TYPES = {2.0**-7: torch.bfloat16, 2.0**-10: torch.float16}
# If the unit is the reference's own error in a short type, the tolerance is divided by this.
_OWN_ERRORS = 4.0
_LEAST_OWN_ERROR = 0.25  # of the unit of rounding: a value may be exact by chance
_MOST_PINNED = 0.3


def compare_histories(
    reference: ModelHistory,
    candidate: ModelHistory,
    tolerance: float = TOLERANCE,
    mapping: Mapping[str, str] | None = None,
    isolates: bool = False,
) -> Diff:
    """Finds where `candidate` diverges from `reference`; raises CannotCompareError if the histories
    lack what the comparison needs.
    """
    models = ComparedModel(reference._log), ComparedModel(candidate._log)
    ours, theirs = models
    for name, model in zip(_NAMES, models, strict=True):
        _check_saved(name, model)
    named, named_weights = pairs_by_name(mapping or {}, ours, theirs)
    weights = _matched_weights(ours, theirs, named_weights)
    inputs, outputs = paired_inputs(ours, theirs), paired_outputs(ours, theirs)
    fixed = [(ours.root[r], theirs.root[c]) for r, c in [*inputs, *named, *outputs.pairs]]
    scale = _scale_of(ours, theirs, tolerance)
    tolerance = scale.tolerance
    pairing, replay = Pairing(ours, theirs, fixed, scale.own_errors), Replay(theirs)
    analysis = analyse(pairing, tolerance, replay if replay.is_live else None)
    compared = output_errors(outputs.pairs, pairing, analysis, tolerance)
    result = Diff(
        reference_name=reference.model_name,
        candidate_name=candidate.model_name,
        ok=True,
        pairs=[_pair(pair, pairing, analysis) for pair in analysis.pairs],
        culprits=[],
        unmatched=_unmatched(pairing, analysis),
        outputs=_outputs(compared, outputs, models),
        weights=weights_text(weights),
        layers=_layers_text(pairing, analysis),
        tolerance=tolerance,
        is_isolated=isolates,
        num_replayed=sum(map(theirs.is_operation, range(theirs.size))),
        unit=scale.unit,
        _histories=(reference, candidate),
    )
    notes = _precision_notes(models)
    if isolates:
        _check_live(replay)
        found = isolate(pairing, analysis, replay, fixed, outputs.pairs, tolerance)
        origins, theirs = found.origins, found.pairing.candidate
        mended = replace(result.outputs, mended=found.output_error)
        result = replace(result, largest_own=_largest_own(found, tolerance), outputs=mended)
        notes = _pinned_notes(replay.pinned) + notes
    else:
        origins = _origins(pairing, analysis, outputs, tolerance)
    replays = Replay(ours), replay
    culprits = [
        _divergence(
            origin, Evidence(origin, pairing, theirs, weights, replays), tolerance, isolates
        )
        for origin in origins
    ]
    if not culprits:
        _check_outputs_saved(outputs, models, compared)
        # Every layer computes the same: the rest is rounding.
        result = replace(result, outputs=replace(result.outputs, agree=True))
    culprits += _not_returned(outputs, models, tolerance, isolates)
    return replace(result, ok=not culprits, culprits=culprits, notes=tuple(notes))


def _matched_weights(
    ours: ComparedModel, theirs: ComparedModel, named: Sequence[tuple[int, int]]
) -> WeightMatch:
    """Matches the weights, and tells both models which of them correspond."""
    used = ours.used_weights(), theirs.used_weights()
    weights = match_weights(ours.weights, theirs.weights, used, named)
    first, second = (
        {group for weight, group in groups.items() if weight in own}
        for groups, own in zip(weights.groups, used, strict=True)
    )
    for model, groups in zip((ours, theirs), weights.groups, strict=True):
        model.set_groups(groups, sorted(first & second))
    return weights


class _Scale(NamedTuple):
    """The tolerance and its unit: the unit of rounding, or the reference's own error in a short
    type, which `own_errors` has by entry.
    """

    tolerance: float
    unit: str = "eps"
    own_errors: dict[int, float] | None = None


def _scale_of(ours: ComparedModel, theirs: ComparedModel, tolerance: float) -> _Scale:
    short_type = _SHORT_TYPES.get(theirs.epsilon) if ours.epsilon < theirs.epsilon else None
    own_errors = None if short_type is None else _errors_in(short_type, ours)
    if not own_errors:
        return _Scale(tolerance)
    unit = f"times the reference's own {_name_of(short_type)} error"
    return _Scale(tolerance / _OWN_ERRORS, unit, own_errors)


def _origins(
    pairing: Pairing, analysis: Analysis, outputs: PairedOutputs, tolerance: float
) -> list[ErrorOrigin]:
    """Where errors begin, without running anything again."""
    found = [ErrorOrigin(pair, *analysis.sections[pair.reference]) for pair in analysis.origins]
    found += distinct(origins_at_outputs(outputs.pairs, pairing, analysis, tolerance))
    return grouped(found, pairing)


def _largest_own(found: Isolated, tolerance: float) -> float:
    """The largest own error of the layers that agree."""
    own = [found.own_units.get(number, 0.0) for number in found.analysis.agreeing]
    return max((units for units in own if units <= tolerance), default=0.0)


def _errors_in(short_type: torch.dtype, reference: ComparedModel) -> dict[int, float] | None:
    """For each entry, the error of the reference if it runs in a short type; None if it cannot
    run.
    """
    replay = Replay(reference)
    if not replay.is_live:
        return None
    values = replay.run(dtype=short_type)
    if len(replay.pinned) > _MOST_PINNED * reference.size:
        return None
    least = _LEAST_OWN_ERROR * epsilon_of(short_type)
    found = {}
    for entry, value in values.items():
        own, short = reference.value(entry), dense(value)
        if own is None or short is None or own.shape != short.shape:
            continue
        if own.is_floating_point():
            error = relative_error(numbers(own), numbers(short))
            found[entry] = max(error, least) if error < float("inf") else least
    return found


def _name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


# -- what can be compared
# --------------------------------------------------------------------------------------------------


def _check_saved(name: str, model: ComparedModel) -> None:
    operations = [entry for entry in range(model.size) if model.is_operation(entry)]
    if not operations:
        raise CannotCompareError(f"The {name} has no operations: there is nothing to compare.")
    if not any(model.value(entry) is not None for entry in operations):
        raise CannotCompareError(
            f"The {name} has no saved values: there is nothing to compare. Log it with "
            "layers_to_save='all'."
        )


def _check_outputs_saved(
    outputs: PairedOutputs,
    models: Sequence[ComparedModel],
    compared: Sequence[tuple[Matched, float]],
) -> None:
    """Refuses to say that the models agree if outputs were not saved."""
    if len(compared) == len(outputs.pairs):
        return
    for side, (whose, model) in enumerate(zip(_NAMES, models, strict=True)):
        for pair in outputs.pairs:
            if model.value(saved_output(model, pair[side])) is None:
                raise CannotCompareError(
                    f"The {whose} has no saved value of its output "
                    f"({output_path(model, pair[side])}), so whether both models return the same "
                    "is unknown; what was saved of both agrees. Log it with layers_to_save='all'."
                )


def _check_live(replay: Replay) -> None:
    if not replay.is_live:
        raise CannotCompareError(
            "isolate needs the live candidate, because its operations run again: this one has no "
            "functions or no weights to run with. Give no file, but the history that "
            "log_forward_pass returned; on the command line, module:name or file.py:name."
        )


# -- records
# --------------------------------------------------------------------------------------------------


def _outputs(
    compared: Sequence[tuple[Matched, float]],
    outputs: PairedOutputs,
    models: Sequence[ComparedModel],
) -> Outputs:
    worst = max((pair for pair, _ in compared), key=lambda pair: pair.units, default=None)
    return Outputs(
        error=float("nan") if worst is None else worst.error,
        units=float("nan") if worst is None else worst.units,
        agree=all(pair.units <= limit for pair, limit in compared),
        missing=tuple(output_path(models[0], r) for r in outputs.missing),
        extra=tuple(output_path(models[1], c) for c in outputs.extra),
    )


def _pair(pair: Matched, pairing: Pairing, analysis: Analysis) -> Pair:
    ours, theirs = pairing.models
    return Pair(
        ours.label(pair.reference),
        theirs.label(pair.candidate),
        ours.module_of(pair.reference),
        theirs.module_of(pair.candidate),
        pair.error,
        pair.units,
        pair.reference in analysis.agreeing,
        "" if pair.layout is None or pair.layout.is_plain else str(pair.layout),
    )


def _divergence(
    origin: ErrorOrigin, evidence: Evidence, tolerance: float, is_own: bool
) -> Divergence:
    ours, theirs = evidence.constants_apart()
    steps = {*origin.candidate.entries, *(c for _, c in evidence.rearranged())}
    return Divergence(
        **_where("reference", evidence.ours, origin.pair.reference, origin.reference.entries),
        **_where("candidate", evidence.theirs, origin.pair.candidate, sorted(steps)),
        error=origin.pair.error,
        units=origin.pair.units,
        tolerance=origin.pair.allowed(tolerance),
        input_units=0.0 if is_own else evidence.input_units(),
        is_own=is_own,
        constants=(tuple(dict.fromkeys(map(str, ours))), tuple(dict.fromkeys(map(str, theirs)))),
        reasons=tuple(reasons_for(evidence)),
        also=tuple(evidence.theirs.label(pair.candidate) for pair in origin.others),
    )


def _where(
    whose: str, model: ComparedModel, entry: int | None, steps: Sequence[int]
) -> dict[str, Any]:
    """The fields of a divergence for one side; they are empty without an entry."""
    operations = tuple(model.label(step) for step in steps if model.is_operation(step))
    values: tuple[Any, ...] = ("", "", "", "", ())
    if entry is not None:
        values = (
            model.label(entry),
            model.module_of(entry),
            model.place_of(entry),
            model.type_of(entry),
            tuple(model.rows[entry].shape),
        )
    fields = (whose, *(f"{whose}_{part}" for part in ("module", "line", "type", "shape")))
    return {**dict(zip(fields, values, strict=True)), f"{whose}_operations": operations}


def _not_returned(
    outputs: PairedOutputs, models: Sequence[ComparedModel], tolerance: float, is_own: bool
) -> list[Divergence]:
    """One divergence for all outputs that only the reference returns, and one for those that only
    the candidate does.
    """
    found = []
    for side, entries in enumerate((outputs.missing, outputs.extra)):
        if entries:
            model, whose, other = models[side], _NAMES[side], _NAMES[1 - side]
            steps = [shown_by(model, entry) for entry in entries]
            paths = first_few([output_path(model, entry) for entry in entries])
            found.append(
                Divergence(
                    **_where(whose, model, steps[0], steps),
                    **_where(other, model, None, ()),
                    error=float("inf"),
                    units=float("inf"),
                    tolerance=tolerance,
                    input_units=0.0,
                    is_own=is_own,
                    reasons=(f"the {other} does not return {paths}",),
                )
            )
    return found


def _unmatched(pairing: Pairing, analysis: Analysis) -> Unmatched:
    found = []
    for side, model in enumerate(pairing.models):
        known = {pair.on(side) for pair in analysis.pairs}
        left = [e for e in model.computed if e not in known and model.is_operation(e)]
        found.append(tuple(map(model.label, left)))
    return Unmatched(*found)


# -- text
# --------------------------------------------------------------------------------------------------


def _layers_text(pairing: Pairing, analysis: Analysis) -> str:
    model = pairing.reference
    paired = [pair for pair in analysis.pairs if model.is_operation(pair.reference)]
    # An output has a pair even if it is a constant.
    total = {*filter(model.is_operation, model.computed), *(pair.reference for pair in paired)}
    text = f"{len(paired)} of {len(total)} matched by value, weights and order"
    layouts = Counter(str(pair.layout) for pair in paired
                      if pair.layout is not None and not pair.layout.is_plain)  # fmt: skip
    if layouts:
        text += f"; layouts: {', '.join(f'{n} {name}' for name, n in layouts.most_common(3))}"
    return text


def _pinned_notes(pinned: dict[int, str]) -> list[str]:
    if not pinned:
        return []
    counts = Counter(pinned.values()).most_common(3)
    reasons = "; ".join(f"{count}: {reason}" for reason, count in counts)
    count = len(pinned)
    kept = "operations of the candidate could not run again and kept their values"
    return [f"{count} {kept} ({reasons})."]


def _precision_notes(models: Sequence[ComparedModel]) -> list[str]:
    dtype = max((model.dtype for model in models), key=epsilon_of)
    if epsilon_of(dtype) < 1e-4:
        return []
    rounding = f"a mistake smaller than its rounding ({epsilon_of(dtype):.1e}) is invisible"
    examples = "an eps, or gelu's tanh form. To see those, compare in float32."
    return [f"In {_name_of(dtype)} {rounding}: {examples}"]
