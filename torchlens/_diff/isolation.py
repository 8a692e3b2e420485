"""Finds every error by itself: the reference's values replace those of layers that differ, and the
rest of the candidate runs again.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from torchlens._diff.divergence import (
    Analysis,
    ErrorOrigin,
    analyse,
    distinct,
    grouped,
    origins_at_outputs,
    section_of,
    stops_of,
)
from torchlens._diff.layouts import best_layout
from torchlens._diff.matching import Matched, Pairing
from torchlens._recording.tolerance import comparable, dense
from torchlens._replay.replay import Replay

Tensor = torch.Tensor
_MOST_ROUNDS = 200


@dataclass
class Isolated:
    """All origins, the pairing and its analysis in the last round, and the own errors of the layers
    in units of rounding. `output_error` is the error of the outputs with the reference's values at
    all origins.
    """

    origins: list[ErrorOrigin]
    pairing: Pairing
    analysis: Analysis
    own_units: dict[int, float]
    output_error: float | None


def isolate(
    pairing: Pairing,
    analysis: Analysis,
    replay: Replay,
    fixed: Sequence[tuple[int, int]],
    outputs: Sequence[tuple[int, int]],
    tolerance: float,
) -> Isolated:
    """Substitutes the reference's values, round by round, until nothing else differs."""
    at_outputs = origins_at_outputs(outputs, pairing, analysis, tolerance)
    origins: dict[int, ErrorOrigin] = {}
    trusted: dict[int, Matched] = {}
    kinds: set[tuple[str, ...]] = set()
    candidate = pairing.candidate
    for _ in range(_MOST_ROUNDS):
        new = _new_origins(analysis, trusted)
        origins |= new
        for number, origin in new.items():
            trusted[number] = origin.pair
            kinds.add(_kind(pairing, origin.pair))
        _trust(pairing, analysis, kinds if new else set(), trusted)
        substitution = Substitution(pairing, trusted.values())
        values = replay.run(substitution)
        if not new:
            break
        known = [*fixed, *((pair.reference, pair.candidate) for pair in trusted.values())]
        pairing = Pairing(pairing.reference, candidate.with_values(values), known, pairing.unit_of)
        analysis = analyse(pairing, tolerance, trusted=trusted)
    origins = _wrong_by_themselves(pairing, origins, trusted, substitution, replay, tolerance)
    left = origins_at_outputs(outputs, pairing, analysis, tolerance)
    at_outputs += [each for each in left if _could_run(replay, each[1])]
    differing = [origin.pair for origin in origins.values()]
    put_right = Substitution(pairing, [*differing, *(output for output, _ in at_outputs)], False)
    mended = replay.run(put_right)
    ordered = sorted([*origins.values(), *distinct(at_outputs)], key=_place_in_reference)
    return Isolated(
        grouped(ordered, pairing),
        pairing,
        analysis,
        substitution.own_units,
        _output_error(pairing, outputs, mended),
    )


def _place_in_reference(origin: ErrorOrigin) -> int:
    return origin.pair.reference


def _could_run(replay: Replay, origin: ErrorOrigin) -> bool:
    """True if all operations of the candidate's section ran again."""
    return replay.pinned.keys().isdisjoint(origin.candidate.entries)


def _new_origins(analysis: Analysis, trusted: Collection[int]) -> dict[int, ErrorOrigin]:
    return {
        pair.reference: ErrorOrigin(pair, *analysis.sections[pair.reference])
        for pair in analysis.origins
        if pair.reference not in trusted
    }


def _trust(
    pairing: Pairing,
    analysis: Analysis,
    kinds: set[tuple[str, ...]],
    trusted: dict[int, Matched],
) -> None:
    """Adds to `trusted` the pairs that agree, and those of the given kinds: a mistake in one layer
    or pass may be in all of them, and their own errors show it later.
    """
    for pair in analysis.pairs:
        is_suspect = pair.is_sure and pair.layout is not None and _kind(pairing, pair) in kinds
        if pair.reference in analysis.agreeing or (is_suspect and pair.reference not in trusted):
            trusted[pair.reference] = pair


def _kind(pairing: Pairing, pair: Matched) -> tuple[str, ...]:
    """The types, the lines and the modules of a pair, without the numbers of layers."""
    found: list[str] = []
    for side, model in enumerate(pairing.models):
        entry = pair.on(side)
        module = "".join(letter for letter in model.module_of(entry) if not letter.isdigit())
        found += [model.type_of(entry), model.place_of(entry), module]
    return tuple(found)


def _wrong_by_themselves(
    pairing: Pairing,
    origins: dict[int, ErrorOrigin],
    trusted: dict[int, Matched],
    substitution: "Substitution",
    replay: Replay,
    tolerance: float,
) -> dict[int, ErrorOrigin]:
    """The origins whose own error, given the reference's inputs, is more than rounding."""
    stops = [stops_of(pairing, side) for side in (0, 1)]
    found = {}
    for number, pair in trusted.items():
        origin = origins.get(number)
        own = substitution.own_units.get(number, 0.0 if origin is None else float("inf"))
        if own <= pair.allowed(tolerance):
            continue
        if origin is None and pair.candidate in replay.pinned:
            continue
        ours, theirs = (section_of(pairing, side, pair, stops[side]) for side in (0, 1))
        found[number] = origin = origin or ErrorOrigin(pair, ours, theirs)
        own = substitution.own_units.get(number, origin.pair.units)
        origin.pair.error = own * origin.pair.eps
    return found


class Substitution:
    """Replaces the values of `pairs` by the reference's, for `Replay.run`, and stores their own
    errors in units of rounding.

    With twins, other entries that hold a value of the reference are replaced, too.
    """

    def __init__(self, pairing: Pairing, pairs: Iterable[Matched], with_twins: bool = True) -> None:
        pairs = list(pairs)
        self.own_units: dict[int, float] = {}
        self._reference = pairing.reference
        self._pair_of = {pair.candidate: pair for pair in pairs}
        self._by_reference = {pair.reference: pair for pair in pairs}
        self._twins = pairing.twins[1] if with_twins else {}

    def __call__(self, entry: int, value: Tensor) -> Tensor | None:
        pair = self._pair_of.get(entry) or self._twin(entry)
        target = None if pair is None else self._reference.value(pair.reference)
        if pair is None or target is None:
            return None
        if pair.layout is None:
            return self._of_other_shape(pair, target, value)
        own = dense(value)
        if own is None or own.numel() != target.numel():
            return None
        if entry in self._pair_of:
            self.own_units[pair.reference] = pair.units_between(target, own)
        changed = pair.layout.to_candidate(target, tuple(own.shape))
        if value.is_complex():
            return torch.view_as_complex(changed.contiguous())
        return changed.to(value.dtype)

    def _of_other_shape(self, pair: Matched, target: Tensor, value: Tensor) -> Tensor | None:
        """The reference's value if no layout leads to the candidate's shape."""
        if target.dim() != value.dim():
            return None
        self.own_units[pair.reference] = float("inf")
        return target.to(value.dtype)

    def _twin(self, entry: int) -> Matched | None:
        """The pair whose value an entry holds, unless the entry is a step that computes it."""
        twin = self._twins.get(entry)
        if twin is None:
            return None
        known = self._by_reference.get(twin.reference)
        return None if known is not None and known.candidate > entry else twin


def _output_error(
    pairing: Pairing, outputs: Sequence[tuple[int, int]], values: dict[int, Tensor | None]
) -> float | None:
    """The largest relative error of the outputs, given the values of a run."""
    errors = []
    for r, c in outputs:
        a, b = pairing.reference.value(r), dense(values.get(c))
        if a is not None and b is not None:
            errors.append(best_layout(comparable(a), comparable(b), 0.0)[0])
    return max(errors, default=None)
