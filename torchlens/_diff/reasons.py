"""Why a layer may compute something different: guesses in plain words, those confirmed by an
experiment first.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchlens._diff.divergence import Origin
from torchlens._diff.evidence import Evidence, number_text
from torchlens._diff.experiments import EXPERIMENTS
from torchlens._diff.families import family
from torchlens._diff.hypotheses import ACTIVATIONS, attention_variants, norm_variants
from torchlens._recording.operation_kinds import NORMALISATIONS
from torchlens._recording.relative_error import numbers, relative_error
from torchlens._replay.replay import NotReplayableError

Tensor = torch.Tensor
_CONFIRMED = 64.0  # units of rounding: so near, an explanation explains
_MOST_REASONS = 4


def reasons_for(
    origin: Origin, evidence: Evidence
) -> tuple[list[str], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Guesses, the best first, and the constants that only the reference, or only the candidate,
    has.
    """
    constants = evidence.constants_apart(origin)
    found: dict[str, None] = {}
    for guesses in (_TELLING, _VAGUE):
        for guess in guesses:
            try:
                found.update(dict.fromkeys(guess(origin, evidence)))
            except NotReplayableError:
                continue
            if guess in _CONCLUSIVE and found:
                break
        if found:
            break
    ours, theirs = constants
    texts = (tuple(dict.fromkeys(map(str, ours))), tuple(dict.fromkeys(map(str, theirs))))
    return list(found)[:_MOST_REASONS], texts


# -- random numbers
# --------------------------------------------------------------------------------------------------


def _random(origin: Origin, evidence: Evidence) -> Iterator[str]:
    for subject, section, whose in _sections(origin, evidence):
        for entry in section.entries:
            if subject.side.is_random(entry):
                yield (
                    f"{subject.side.label(entry)} of the {whose} draws random numbers: compare in "
                    "eval(), or seed both"
                )
                return


# -- weights
# --------------------------------------------------------------------------------------------------


def _other_weights(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Which weights only one of the two uses."""
    if not evidence.weights.has_values:
        return
    ours = evidence.weights_of(evidence.ours, origin.reference)
    theirs = evidence.weights_of(evidence.theirs, origin.candidate)
    groups = evidence.weights.groups
    own = (
        {groups[0][w] for w in ours if w in groups[0]},
        {groups[1][w] for w in theirs if w in groups[1]},
    )
    lost = [w for w in ours if groups[0].get(w, -1) not in own[1] and _is_number(evidence, 0, w)]
    extra = [w for w in theirs if groups[1].get(w, -1) not in own[0] and _is_number(evidence, 1, w)]
    if lost and extra:
        other = [p.reference for w in extra for p in evidence.weights.pairs if p.candidate == w]
        note = (
            f", which is the reference's {evidence.names(evidence.ours, other)}," if other else ""
        )
        yield (
            f"other weights: {evidence.names(evidence.theirs, extra)}{note} where the reference "
            f"uses {evidence.names(evidence.ours, lost)}"
        )
    elif lost:
        names = evidence.names(evidence.ours, lost)
        if any("running" in evidence.ours.side.weights[w].name for w in lost):
            yield (
                f"{names} not used: the candidate normalises with the batch's own statistics "
                "(training mode?)"
            )
        else:
            yield f"{names} not used by the candidate: left out?"
    elif extra:
        yield f"the candidate also uses {evidence.names(evidence.theirs, extra)}"


def _is_number(evidence: Evidence, side: int, weight: int) -> bool:
    own = (evidence.ours, evidence.theirs)[side].side.weights[weight]
    return own.value is None or own.value.dtype.is_floating_point


# -- constants
# --------------------------------------------------------------------------------------------------


def _constants(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Numbers that differ: an eps, or arguments of one name."""
    ours, theirs = evidence.constants_apart(origin)
    for c in theirs:
        for r in ours:
            if (
                isinstance(c.value, float)
                and isinstance(r.value, float)
                and 0 < c.value <= 0.01
                and 0 < r.value <= 0.01
            ):
                yield f"{r} in the reference, {c} in the candidate: an eps?"
                return
            if r.name and r.name == c.name and type(r.value) is type(c.value):
                yield r.against(c)


def _lonely_eps(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """An eps that only one of the two shows as a number."""
    ours, theirs = evidence.constants_apart(origin)
    small = [
        [c for c in side if isinstance(c.value, float) and 0 < c.value <= 0.01]
        for side in (ours, theirs)
    ]
    if bool(small[0]) != bool(small[1]) and _is_norm(origin, evidence):
        known = [c for side in small for c in side]
        whose = "reference" if small[0] else "candidate"
        yield f"{known[0]} in the {whose} alone: an eps?"


def _is_norm(origin: Origin, evidence: Evidence) -> bool:
    kinds = {evidence.ours.side.type_of(e) for e in origin.reference.entries}
    kinds |= {evidence.theirs.side.type_of(e) for e in origin.candidate.entries}
    return bool(kinds & (NORMALISATIONS | {"rsqrt", "sqrt", "var", "std"}))


# -- known functions
# --------------------------------------------------------------------------------------------------


def _activation(origin: Origin, evidence: Evidence) -> Iterator[str]:
    both = evidence.result(origin)
    inputs = evidence.inputs(origin)
    if both is None or len(inputs) != 1 or inputs[0].shape != both[0].shape:
        return
    names = [
        _recognised(value, ((n, f(inputs[0])) for n, f in ACTIVATIONS.items()), origin)
        for value in both
    ]
    if names[1] is not None and names[0] != names[1]:
        yield f"the candidate computes {names[1]}" + (
            f"; the reference {names[0]}" if names[0] else ""
        )


def _recognised(value: Tensor, known: Iterator[tuple[str, Tensor]], origin: Origin) -> str | None:
    """The first of the known results that a value is."""
    for name, result in known:
        if (
            result.shape == value.shape
            and relative_error(value, result) <= _CONFIRMED * origin.pair.eps
        ):
            return name
    return None


def _norm(origin: Origin, evidence: Evidence) -> Iterator[str]:
    both, inputs = evidence.result(origin), evidence.inputs(origin)
    if (
        both is None
        or len(inputs) != 1
        or inputs[0].shape != both[0].shape
        or not _is_norm(origin, evidence)
    ):
        return
    owned = [
        evidence.ours.side.weights[w].value
        for w in evidence.weights_of(evidence.ours, origin.reference)
    ]
    vectors = [numbers(value) for value in owned if value is not None and value.dim() == 1]
    scale, shift = (vectors[0] if vectors else None), (vectors[1] if len(vectors) > 1 else None)
    known = [(name, relative_error(both[0], value), relative_error(both[1], value))
             for name, value in norm_variants(inputs[0], scale, shift)]  # fmt: skip
    ours, theirs = min(known, key=lambda item: item[1]), min(known, key=lambda item: item[2])
    limit = min(8.0, origin.pair.units / 4) * origin.pair.eps
    if theirs[2] <= limit and ours[0] != theirs[0]:
        note = f"; the reference {ours[0]}" if ours[1] <= limit else ""
        yield f"the candidate computes {theirs[0]}{note}"


def _attention(origin: Origin, evidence: Evidence) -> Iterator[str]:
    side = evidence.ours.side
    entry = origin.pair.reference
    both = evidence.result(origin)
    if (
        both is None
        or side.type_of(entry) != "scaleddotproductattention"
        or len(side.parents[entry]) != 3
    ):
        return
    values = [side.value(parent) for parent in side.parents[entry]]
    if any(value is None for value in values):
        return
    q, k, v = (numbers(value) for value in values if value is not None)
    names = [_recognised(value, attention_variants(q, k, v), origin) for value in both]
    if names[1] is not None and names[1] != names[0]:
        yield f"the candidate computes {names[1]}" + (
            f"; the reference {names[0]}" if names[0] else ""
        )


def _softmax(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Over which axis numbers add up to one, on either side."""
    axes = []
    for subject, section, _ in _sections(origin, evidence):
        found: dict[int, None] = {}
        for entry in section.entries:
            value = subject.side.value(entry)
            kind = family(subject.side.type_of(entry))
            if (
                kind in ("softmax", "div")
                and value is not None
                and value.dim()
                and value.dtype.is_floating_point
            ):
                own = numbers(value)
                if bool((own >= 0).all()):
                    sums = [
                        a
                        for a in range(own.dim())
                        if own.shape[a] > 1 and bool(((own.sum(a) - 1).abs() < 1e-3).all())
                    ]
                    found.update(dict.fromkeys(axis - own.dim() for axis in sums))
        axes.append(list(found))
    if axes[0] and axes[1] and not set(axes[0]) & set(axes[1]):
        yield (
            f"softmax over axis {axes[1][0]} in the candidate, over axis {axes[0][0]} in the "
            "reference"
        )


# -- what the numbers look like
# ----------------------------------------------------------------------------------------


def _simple(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """A factor, a sign, something added to every row, a shift."""
    both = evidence.result(origin)
    if both is None or both[0].numel() < 4:
        return
    a, b = both
    limit = _CONFIRMED * origin.pair.eps
    size = float(a.flatten().dot(a.flatten()))
    factor = float(a.flatten().dot(b.flatten())) / size if size else 0.0
    if factor and abs(factor - 1) > 1e-4 and relative_error(a * factor, b) <= limit:
        yield (
            f"the candidate is {number_text(factor)} times the "
            f"reference{_known_factor(factor, a, evidence, origin)}"
        )
    difference = b - a
    for axis in range(a.dim()):
        others = tuple(other for other in range(a.dim()) if other != axis)
        if a.shape[axis] > 1 and others and a.numel() > a.shape[axis]:
            vector = difference.mean(others)
            shape = [a.shape[axis] if other == axis else 1 for other in range(a.dim())]
            if relative_error(difference, vector.reshape(shape).expand_as(difference)) <= 1e-4:
                name = _weight_like(vector, evidence)
                yield f"the same vector is missing or added everywhere along axis {axis}{name}"
                break
    for axis in range(a.dim()):
        for shift in (1, -1):
            if a.shape[axis] > 2:
                kept = slice(1, -1)
                index = tuple(kept if other == axis else slice(None) for other in range(a.dim()))
                if relative_error(a[index], b.roll(shift, axis)[index]) <= limit:
                    yield f"shifted by one along axis {axis}: an index off by one?"
        if a.shape[axis] > 1 and relative_error(a, b.flip(axis)) <= limit:
            yield f"reversed along axis {axis}"


def _known_factor(factor: float, value: Tensor, evidence: Evidence, origin: Origin) -> str:
    sizes = {size for entry in (*origin.reference.entries, *origin.reference.inputs)
             for size in evidence.ours.side.rows[entry].shape if size > 1}  # fmt: skip
    for size in sorted(sizes):
        less = size / (size - 1)
        for what, known in ((f"sqrt({size})", size**0.5), (f"{size}", float(size)),
            (f"{size}/{size - 1}", less),
                            (f"sqrt({size}/{size - 1})", less**0.5)):  # fmt: skip
            for text, number in ((what, known), (f"1/{what}", 1 / known)):
                if abs(factor - number) <= 1e-4 * abs(number):
                    hint = ": the unbiased variance?" if "/" in what and "sqrt(" in what else ""
                    return f" ({text}{hint})"
    return " (a sign)" if abs(factor + 1) < 1e-4 else ""


def _weight_like(vector: Tensor, evidence: Evidence) -> str:
    for weight in evidence.ours.side.weights:
        if weight.value is not None and weight.value.numel() == vector.numel():
            own = numbers(weight.value).flatten()
            for sign, word in ((1.0, "added twice, or to the wrong place"), (-1.0, "left out")):
                if relative_error(own * sign, vector) <= 1e-3:
                    return f": `{weight.name}` {word}"
    return ""


def _positions(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """Whole numbers, positions say, that differ by a constant."""
    found = []
    for subject, section, _ in _sections(origin, evidence):
        entries = {*section.entries, *(p for e in section.entries for p in subject.side.parents[e])}
        values = [subject.side.value(entry) for entry in sorted(entries)]
        found.append(
            [
                v
                for v in values
                if v is not None and v.dtype in (torch.int64, torch.int32) and v.numel() > 1
            ]
        )
    for a in found[0]:
        for b in found[1][::-1]:
            if a.numel() == b.numel():
                difference = (b.flatten() - a.flatten()).unique()
                if difference.numel() == 1 and int(difference[0]):
                    yield f"whole numbers (positions?) are off by {int(difference[0])}"
                    return


def _casts(origin: Origin, evidence: Evidence) -> Iterator[str]:
    for entry in origin.candidate.entries:
        dtype = evidence.theirs.side.rows[entry].dtype
        if dtype.is_floating_point and torch.finfo(dtype).eps > max(
            evidence.ours.side.epsilon, evidence.theirs.side.epsilon
        ):
            label = evidence.theirs.side.label(entry)
            yield f"cast to {str(dtype).removeprefix('torch.')} on the way ({label})"
            return


# -- what is done
# --------------------------------------------------------------------------------------------------


def _other_inputs(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """What only one of the two reads."""
    ours = set(origin.reference.inputs)
    theirs = {evidence.reference_of(entry) for entry in origin.candidate.inputs} - {None}
    lost = [entry for entry in ours - theirs if evidence.ours.side.graph.has_input_ancestor[entry]]
    extra = [entry for entry in theirs - ours if entry is not None]
    names = ", ".join(_named(evidence, entry) for entry in lost[:2])
    if lost and extra and evidence.has_partner(lost[0]):
        others = ", ".join(_named(evidence, entry) for entry in extra[:2])
        yield f"the candidate reads what is {others} in the reference, where that reads {names}"
    elif lost and evidence.has_partner(lost[0]):
        yield f"the reference also reads {names}: a residual or skip connection left out?"
    elif extra:
        yield (
            f"the candidate also reads {', '.join(_named(evidence, entry) for entry in extra[:2])}"
        )


def _named(evidence: Evidence, entry: int) -> str:
    module = evidence.ours.side.module_of(entry)
    return f"{evidence.ours.side.label(entry)}{f' ({module})' if module else ''}"


def _operations(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """What only one of the two does."""
    kinds = []
    for subject, section, _ in _sections(origin, evidence):
        done = Counter(
            family(subject.side.type_of(entry)) for entry in section.entries
            if subject.side.is_operation(entry) and subject.root[entry] == entry
        )  # fmt: skip
        done.pop("view", None)
        kinds.append(done)
    lost, extra = kinds[0] - kinds[1], kinds[1] - kinds[0]
    num = sum(kinds[0].values()), sum(kinds[1].values())
    if max(num) > 4 * min(num) + 4:
        return  # one operation against twenty: what they are called says nothing
    if lost and not extra:
        yield f"the reference also does: {', '.join(lost)}"
    elif extra and not lost:
        yield f"the candidate also does: {', '.join(extra)}"
    elif lost and extra:
        yield f"the reference does: {', '.join(lost)}; the candidate: {', '.join(extra)}"


def _reordered(origin: Origin, evidence: Evidence) -> Iterator[str]:
    """The same numbers in another order."""
    a, b = evidence.ours.side.value(origin.pair.reference), evidence.candidate_result(origin)
    if a is None or b is None or a.numel() != b.numel() or a.numel() < 2:
        return
    if (
        relative_error(*(numbers(value).flatten().sort().values for value in (a, b)))
        <= _CONFIRMED * origin.pair.eps
    ):
        yield "the same numbers in another order"


def _sections(origin: Origin, evidence: Evidence) -> list[tuple[Any, Any, str]]:
    return [
        (evidence.ours, origin.reference, "reference"),
        (evidence.theirs, origin.candidate, "candidate"),
    ]


_Guess = Callable[[Origin, Evidence], Iterator[str]]
# In order. After one that an experiment or a known function has confirmed, nothing more is guessed.
_TELLING: tuple[_Guess, ...] = (
    _random, _activation, _attention, *EXPERIMENTS, _norm, _positions, _casts, _other_weights,
    _other_inputs, _softmax,
    _simple, _constants,
)  # fmt: skip
_CONCLUSIVE: tuple[_Guess, ...] = (_random, _activation, _attention, *EXPERIMENTS, _norm)
# Said where nothing else is known.
_VAGUE: tuple[_Guess, ...] = (_reordered, _lonely_eps, _operations)
