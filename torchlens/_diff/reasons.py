"""Reasons why a layer may compute something different, as text, the likeliest first."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product

import torch

from torchlens._diff.compared_model import ComparedModel, family
from torchlens._diff.divergence import Section
from torchlens._diff.evidence import Evidence, number_text
from torchlens._diff.experiments import experiments
from torchlens._diff.known_functions import ACTIVATIONS, attention_variants, norm_variants
from torchlens._recording.operation_kinds import NORMALISATIONS
from torchlens._recording.recording import reads_elsewhere
from torchlens._recording.tolerance import epsilon_of, numbers, relative_error

Tensor = torch.Tensor
Sentences = Iterator[str]
_EXPLAINED = 64.0  # units of rounding: an explanation with a smaller error is right
_MOST_REASONS = 4


def reasons_for(evidence: Evidence) -> list[str]:
    """Reasons, the likeliest first."""
    for proof in _PROOFS:
        found = list(proof(evidence))
        if found:
            return found[:_MOST_REASONS]
    for guesses in (_OBSERVATIONS, _LAST_GUESSES):
        found += [reason for guess in guesses for reason in guess(evidence)]
        if found:
            break
    found = list(dict.fromkeys(found))[:_MOST_REASONS]
    if evidence.untried:
        found.append(f"not tried, as it takes long: {', '.join(evidence.untried)}")
    return found


def _names(evidence: Evidence, side: int, weights: Sequence[int]) -> str:
    return ", ".join(f"`{evidence.models[side].weights[number].name}`" for number in weights[:3])


# -- proofs: known functions
# --------------------------------------------------------------------------------------------------


def _random(evidence: Evidence) -> Sentences:
    for model, section, whose in evidence.sides:
        for entry in section.entries:
            if model.is_random(entry):
                yield (
                    f"{model.label(entry)} of the {whose} draws random numbers: compare in "
                    "eval(), or seed both"
                )
                return


def _flag(evidence: Evidence) -> Sentences:
    """One function with another flag: `training` of a BatchNorm, `is_causal` of attention."""
    names = [
        [model.rows[entry].operation.name for entry in section.entries if model.is_operation(entry)]
        for model, section, _ in evidence.sides
    ]
    if len(names[0]) == 1 and names[0] == names[1]:
        ours, theirs = evidence.constants_apart()
        for r, c in product(ours, theirs):
            if r.name == c.name and isinstance(r.value, bool) and isinstance(c.value, bool):
                yield r.against(c)


def _activation(evidence: Evidence) -> Sentences:
    inputs = evidence.inputs()
    if len(inputs) == 1:
        known = ((name, function(inputs[0])) for name, function in ACTIVATIONS.items())
        yield from _known_function(evidence, known, _EXPLAINED)


def _attention(evidence: Evidence) -> Sentences:
    model, entry = evidence.ours, evidence.pair.reference
    values = [model.value(parent) for parent in model.parents[entry]]
    tensors = [numbers(value) for value in values if value is not None]
    if model.type_of(entry) == "scaleddotproductattention" and len(tensors) == len(values) == 3:
        yield from _known_function(evidence, attention_variants(*tensors), _EXPLAINED)


def _norm(evidence: Evidence) -> Sentences:
    inputs = evidence.inputs()
    if len(inputs) == 1 and _is_norm(evidence):
        weights = evidence.weights_of(evidence.ours, evidence.reference)
        values = [evidence.ours.weights[number].value for number in weights]
        vectors = [numbers(value) for value in values if value is not None and value.dim() == 1]
        scale, shift = [*vectors, None, None][:2]
        known = norm_variants(inputs[0], scale, shift)
        yield from _known_function(evidence, known, min(8.0, evidence.pair.units / 4))


def _known_function(
    evidence: Evidence, known: Iterator[tuple[str, Tensor]], limit: float
) -> Sentences:
    """Names the known function that the candidate computes, if its result is within `limit` units
    and the reference does not compute the same function.
    """
    both = evidence.result()
    if both is None:
        return
    nearest: list[tuple[float, str]] = [(float("inf"), "")] * 2
    for name, result in known:
        for side, value in enumerate(both):
            if result.shape == value.shape:
                found = relative_error(value, result), name
                nearest[side] = min(nearest[side], found, key=lambda item: item[0])
    ours, theirs = (name if error <= limit * evidence.pair.eps else "" for error, name in nearest)
    if theirs and theirs != nearest[0][1]:
        yield f"the candidate computes {theirs}" + (f"; the reference {ours}" if ours else "")


def _is_norm(evidence: Evidence) -> bool:
    kinds = {model.type_of(entry) for model, section, _ in evidence.sides
             for entry in section.entries}  # fmt: skip
    return bool(kinds & (NORMALISATIONS | {"rsqrt", "sqrt", "var", "std"}))


# -- observations: inputs
# --------------------------------------------------------------------------------------------------


def _casts(evidence: Evidence) -> Sentences:
    model, eps = evidence.theirs, max(each.epsilon for each in evidence.models)
    for entry in evidence.candidate.entries:
        dtype = model.rows[entry].dtype
        if dtype.is_floating_point and epsilon_of(dtype) > eps:
            name = str(dtype).removeprefix("torch.")
            yield f"cast to {name} on the way ({model.label(entry)})"
            return


def _other_weights(evidence: Evidence) -> Sentences:
    """The weights that only one of the two uses."""
    if not evidence.weights.has_values:
        return
    lost, extra = _weights_apart(evidence)
    missing, added = _names(evidence, 0, lost), _names(evidence, 1, extra)
    if lost and extra:
        others = _partner_names(evidence, extra)
        note = f", which is the reference's {others}," if others else ""
        yield f"other weights: {added}{note} where the reference uses {missing}"
    elif "running" in missing:
        yield (
            f"{missing} not used: the candidate normalises with the batch's own statistics "
            "(training mode?)"
        )
    elif lost:
        yield f"{missing} not used by the candidate: left out?"
    elif extra:
        yield f"the candidate also uses {added}"


def _partner_names(evidence: Evidence, weights: Sequence[int]) -> str:
    """The names of the reference's weights that correspond to weights of the candidate."""
    partners = {pair.candidate: pair.reference for pair in evidence.weights.pairs[::-1]}
    return _names(evidence, 0, [partners[weight] for weight in weights if weight in partners])


def _weights_apart(evidence: Evidence) -> tuple[list[int], list[int]]:
    """The weights that only the reference's section, or only the candidate's, reads."""
    groups = evidence.weights.groups
    used = [evidence.weights_of(model, section) for model, section, _ in evidence.sides]
    own = [{groups[side].get(weight, -1) for weight in used[side]} - {-1} for side in (0, 1)]
    ours, theirs = (
        [
            weight
            for weight in used[side]
            if groups[side].get(weight, -1) not in own[1 - side]
            and _is_fraction(model.weights[weight].value)
        ]
        for side, model in enumerate(evidence.models)
    )
    return ours, theirs


def _is_fraction(value: Tensor | None) -> bool:
    return value is None or value.dtype.is_floating_point


def _other_inputs(evidence: Evidence) -> Sentences:
    """The inputs that only one of the two reads."""
    model = evidence.ours
    ours = set(evidence.reference.inputs)
    values = map(evidence.reference_of, evidence.candidate.inputs)
    theirs = {entry for entry in values if entry is not None}
    lost = [entry for entry in ours - theirs if model.graph.has_input_ancestor[entry]]
    names, others = _named(model, lost), _named(model, theirs - ours)
    has_partner = bool(lost) and evidence.has_partner(lost[0])
    if has_partner and others:
        yield f"the candidate reads what is {others} in the reference, where that reads {names}"
    elif has_partner:
        yield f"the reference also reads {names}: a residual or skip connection left out?"
    elif others:
        yield f"the candidate also reads {others}"


def _named(model: ComparedModel, entries: Collection[int]) -> str:
    modules = {entry: model.module_of(entry) for entry in list(entries)[:2]}
    return ", ".join(model.label(e) + (f" ({name})" if name else "") for e, name in modules.items())


# -- observations: results
# --------------------------------------------------------------------------------------------------


def _factor(evidence: Evidence) -> Sentences:
    both = evidence.result()
    if both is not None and both[0].numel() >= 4:
        a, b = both
        size = float(a.flatten().dot(a.flatten()))
        factor = float(a.flatten().dot(b.flatten())) / size if size else 0.0
        is_other = factor and abs(factor - 1) > 1e-4
        if is_other and relative_error(a * factor, b) <= _EXPLAINED * evidence.pair.eps:
            text = f"the candidate is {number_text(factor)} times the reference"
            yield text + _known_factor(factor, evidence)


def _known_factor(factor: float, evidence: Evidence) -> str:
    """` (1/sqrt(8))`: a factor in terms of the sizes of the axes."""
    entries = (*evidence.reference.entries, *evidence.reference.inputs)
    shapes = [evidence.ours.rows[entry].shape for entry in entries]
    for size in sorted({size for shape in shapes for size in shape if size > 1}):
        unbiased = size / (size - 1)
        known = {
            f"sqrt({size})": size**0.5,
            f"{size}": float(size),
            f"{size}/{size - 1}": unbiased,
            f"sqrt({size}/{size - 1}): the unbiased variance?": unbiased**0.5,
        }
        known |= {f"1/{name}": 1 / number for name, number in known.items()}
        for name, number in known.items():
            if abs(factor - number) <= 1e-4 * abs(number):
                return f" ({name})"
    return " (a sign)" if abs(factor + 1) < 1e-4 else ""


def _constants(evidence: Evidence) -> Sentences:
    """Numbers that differ: an eps, or arguments of one name."""
    ours, theirs = evidence.constants_apart()
    for c in theirs:
        for r in ours:
            if c.may_be_eps and r.may_be_eps:
                yield f"{r} in the reference, {c} in the candidate: an eps?"
                return
            if r.name and r.name == c.name and type(r.value) is type(c.value):
                yield r.against(c)


# -- last guesses
# --------------------------------------------------------------------------------------------------


def _reordered(evidence: Evidence) -> Sentences:
    a, b = evidence.ours.value(evidence.pair.reference), evidence.candidate_result()
    if a is not None and b is not None and a.numel() == b.numel() > 1:
        ours, theirs = (numbers(value).flatten().sort().values for value in (a, b))
        if relative_error(ours, theirs) <= _EXPLAINED * evidence.pair.eps:
            yield "the same numbers in another order"


def _tensors_from_elsewhere(evidence: Evidence) -> Sentences:
    """A tensor that neither a module holds nor an operation made."""
    for model, section, whose in evidence.sides:
        num_params = len(model.log.recording.params)
        for entry in section.entries:
            if reads_elsewhere(model.rows[entry].references, num_params):
                yield (
                    f"{model.label(entry)} of the {whose} reads a tensor from outside the model, "
                    "which the log does not have: compare it yourself"
                )
                return


def _operations(evidence: Evidence) -> Sentences:
    """The operations of only one of the two."""
    ours, theirs = (Counter(_kinds(model, section)) for model, section, _ in evidence.sides)
    few, many = sorted((ours.total(), theirs.total()))
    if many > 4 * few + 4:
        return  # one operation against twenty: their names say nothing
    lost, extra = ", ".join(ours - theirs), ", ".join(theirs - ours)
    if lost and extra:
        yield f"the reference does: {lost}; the candidate: {extra}"
    elif lost:
        yield f"the reference also does: {lost}"
    elif extra:
        yield f"the candidate also does: {extra}"


def _kinds(model: ComparedModel, section: Section) -> list[str]:
    """The families of the operations of a section that compute a value, without views."""
    steps = [entry for entry in section.entries if model.is_operation(entry)]
    kinds = [family(model.type_of(entry)) for entry in steps if model.root[entry] == entry]
    return [kind for kind in kinds if kind != "view"]


_Guess = Callable[[Evidence], Sentences]
# Tried in order until one yields a reason.
_PROOFS: tuple[_Guess, ...] = (_random, _flag, _activation, _attention, experiments, _norm)
# Without a proof, all of these are reported, ...
_OBSERVATIONS: tuple[_Guess, ...] = (_casts, _other_weights, _other_inputs, _factor, _constants)
# ... and these only if there is nothing else.
_LAST_GUESSES: tuple[_Guess, ...] = (_reordered, _operations, _tensors_from_elsewhere)
