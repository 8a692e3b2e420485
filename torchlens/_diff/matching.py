"""Matches the values of two models.

First by value: fingerprints that do not depend on the order of elements find possible pairs, whose
elements are then compared. The other entries, which differ or are intermediate steps, are aligned
by the weights that led to them, by operation, and by order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchlens._diff.compared_model import ComparedModel, EntryFeatures
from torchlens._diff.fingerprints import Shelf
from torchlens._diff.layouts import AxisOrder, best_layout, layouts_between
from torchlens._recording.tolerance import (
    are_whole,
    comparable,
    epsilon_of,
    relative_error,
)

Tensor = torch.Tensor
_EXACT_UNITS = 64.0  # values that differ by less are the same, whichever weights led to them
_LOOSE_UNITS = 4096.0  # values that differ by less are the same if the same weights led to them
_LOOSEST = 0.02
_FEW = 8  # values of fewer elements are alike by chance
_MOST_TRIED = 6
_MOST_CELLS = 4_000_000
_MOST_ALIGNMENTS = 3
_NEAR, _NEARLY = 0.3, 0.5  # relative errors up to which two values look alike


@dataclass(slots=True)
class Matched:
    """Two entries that correspond, with the error between their values.

    `by_value` if they were matched by value; `is_sure` if not by order and shape alone.
    """

    reference: int
    candidate: int
    error: float  # relative
    eps: float  # the unit of rounding
    layout: AxisOrder | None
    by_value: bool
    is_sure: bool = True
    is_whole: bool = False  # both are whole numbers

    @property
    def units(self) -> float:
        """The error in units of rounding."""
        return self.error / self.eps

    def allowed(self, units: float) -> float:
        """`units`, or 0 for whole numbers, which are exact."""
        return 0.0 if self.is_whole else units

    def units_between(self, reference: Tensor | None, candidate: Tensor | None) -> float:
        """The error between other values of the two entries, in units of rounding."""
        if reference is None or candidate is None or reference.numel() != candidate.numel():
            return float("inf")
        if self.layout is None:
            return float("inf")
        back = self.layout.to_reference(comparable(candidate), tuple(reference.shape))
        return relative_error(comparable(reference), back) / self.eps

    def on(self, side: int) -> int:
        """The entry of one side: 0 is the reference, 1 the candidate."""
        return self.candidate if side else self.reference


class Pairing:
    """The pairs of entries of two models. `fixed` pairs are known.

    `of` has the pairs by side and entry; `twins` has, for entries without a pair, one with the same
    value. `unit_of` has, by entry of the reference, units of rounding that replace those of the
    types.
    """

    def __init__(
        self,
        reference: ComparedModel,
        candidate: ComparedModel,
        fixed: Sequence[tuple[int, int]] = (),
        unit_of: dict[int, float] | None = None,
    ) -> None:
        self.models = (reference, candidate)
        self.reference, self.candidate = self.models
        self.unit_of = unit_of or {}
        self.of: tuple[dict[int, Matched], dict[int, Matched]] = ({}, {})
        self.twins: tuple[dict[int, Matched], dict[int, Matched]] = ({}, {})
        # Counts of layouts by the shapes of both sides, and of orders of axes by their number.
        self._usual: dict[tuple[tuple[int, ...], tuple[int, ...]], Counter[AxisOrder]] = {}
        self._usual_axes: dict[int, Counter[tuple[tuple[int, ...], bool]]] = {}
        for r, c in fixed:
            self._fix(r, c)
        self._match_values()
        weights = [model.weight_history for model in self.models]
        self._align_by(weights[0], weights[1])
        self._align_by(*([_without_counts(text) for text in texts] for texts in weights))
        self._align_by(*([b""] * model.size for model in self.models))

    def at(self, side: int, entry: int) -> Matched | None:
        """The pair whose value an entry holds."""
        return self.of[side].get(entry) or self.twins[side].get(entry)

    def pairs(self) -> list[Matched]:
        """All pairs in the order of the reference."""
        return sorted(self.of[0].values(), key=lambda pair: pair.reference)

    def remove(self, pair: Matched) -> None:
        """Removes a pair."""
        del self.of[0][pair.reference], self.of[1][pair.candidate]

    def is_free(self, r: int, c: int) -> bool:
        """True if neither entry has a pair."""
        return r not in self.of[0] and c not in self.of[1]

    def _add(self, pair: Matched) -> None:
        self.of[0][pair.reference] = self.of[1][pair.candidate] = pair

    def _fix(self, r: int, c: int) -> None:
        pair = self.compared(r, c, True)
        if self.is_free(r, c) and pair.error == pair.error:  # both were saved
            self._add(pair)
            if pair.units <= pair.allowed(_EXACT_UNITS):
                self._note_layout(pair)

    def _epsilon(self, r: int, c: int) -> float:
        """The unit of rounding of two entries: that of the coarser model, or of both entries. A
        coarser type of only one entry is an error.
        """
        own = [epsilon_of(model.rows[entry].dtype) for model, entry in zip(self.models, (r, c),
            strict=True)]  # fmt: skip
        return self.unit_of.get(r) or max(self.reference.epsilon, self.candidate.epsilon, min(own))

    def compared(self, r: int, c: int, by_value: bool) -> Matched:
        """Two entries with the error between their values, NaN if one was not saved."""
        a, b = self.reference.value(r), self.candidate.value(c)
        eps = self._epsilon(r, c)
        if a is None or b is None:
            return Matched(r, c, float("nan"), eps, None, by_value)
        shapes = (tuple(a.shape), tuple(b.shape))
        known = self._usual_layouts(shapes)
        is_whole = are_whole(a, b)
        a, b = comparable(a), comparable(b)
        error, layout = best_layout(a, b, 0.0 if is_whole else _EXACT_UNITS * eps, known)
        if layout is not None and known and error > 0.1:
            # The values do not determine the layout: the usual one of these shapes.
            layout = known[0]
            error = relative_error(a, layout.to_reference(b, shapes[0]))
        return Matched(r, c, error, eps, layout, by_value, is_whole=is_whole)

    # -- layouts
    # ----------------------------------------------------------------------------------------------

    def _usual_layouts(
        self, shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> tuple[AxisOrder, ...]:
        """The layouts of other pairs of these shapes, the most frequent first, or else of other
        pairs with this number of axes.
        """
        if shapes in self._usual:
            return tuple(layout for layout, _ in self._usual[shapes].most_common())
        possible = layouts_between(*shapes)
        counts = self._usual_axes.get(len(shapes[0]), Counter())
        if len(possible) < 2 or not counts:
            return ()
        return tuple(
            layout
            for (axes, of_reference), _ in counts.most_common()
            for layout in possible
            if (layout.axes, layout.of_reference) == (axes, of_reference)
            or (not axes and layout.is_plain)
        )

    def _note_layout(self, pair: Matched) -> None:
        ours, theirs = (tuple(model.rows[pair.on(side)].shape)
                        for side, model in enumerate(self.models))  # fmt: skip
        if pair.layout is None:
            return
        if len(layouts_between(ours, theirs)) > 1:
            self._usual.setdefault((ours, theirs), Counter())[pair.layout] += 1
        if len(ours) == len(theirs) and 1 not in ours:
            axes = () if pair.layout.is_plain else pair.layout.axes
            counts = self._usual_axes.setdefault(len(ours), Counter())
            counts[axes, pair.layout.of_reference] += 1

    # -- by value
    # ----------------------------------------------------------------------------------------------

    def _match_values(self) -> None:
        possible = self._same_values()
        for pair in possible:
            if self.is_free(pair.reference, pair.candidate):
                self._add(pair)
                self._note_layout(pair)
        self._exchange({(pair.reference, pair.candidate): pair for pair in possible})
        for pair in possible:
            if pair.units <= pair.allowed(_EXACT_UNITS):
                self.twins[0].setdefault(pair.reference, pair)
                self.twins[1].setdefault(pair.candidate, pair)

    def _same_values(self) -> list[Matched]:
        """Possible pairs of entries with the same value, the best first."""
        found: list[tuple[tuple[bool, bool, float], Matched]] = []
        for r, near in self._near_values().items():
            for differs, _, shift, c in sorted(near)[:_MOST_TRIED]:
                pair = self.compared(r, c, True)
                if pair.layout is not None and self._is_same_value(pair, differs):
                    is_loose = pair.units > pair.allowed(_EXACT_UNITS)
                    found.append(((is_loose, differs, shift), pair))
        return [pair for _, pair in sorted(found, key=lambda item: item[0])]

    def _near_values(self) -> dict[int, list[tuple[bool, float, float, int]]]:
        """For each free entry of the reference, entries of the candidate with a near fingerprint:
        (other weights led to it, distance of fingerprints, distance in order, entry).
        """
        ours, theirs = self.models
        shelf = Shelf([(c, own) for c in theirs.computed if (own := theirs.prints[c]) is not None])
        limit = max(2e-3, min(8 * max(ours.epsilon, theirs.epsilon), 0.05))
        found = {}
        for r in ours.computed:
            own = ours.prints[r]
            if own is not None and r not in self.of[0]:
                found[r] = [
                    (
                        ours.weight_history[r] != theirs.weight_history[c],
                        apart,
                        abs(r / ours.size - c / theirs.size),
                        c,
                    )
                    for apart, c in shelf.near(own, limit, 10 * limit)
                ]
        return found

    def _is_same_value(self, pair: Matched, other_weights: bool) -> bool:
        if not other_weights:
            return pair.units <= _LOOSE_UNITS and pair.error <= _LOOSEST
        own = self.reference.prints[pair.reference]
        is_telling = own is not None and own.size >= _FEW
        is_short = max(self.reference.epsilon, self.candidate.epsilon) >= 1e-4
        return is_telling and not is_short and pair.units <= pair.allowed(_EXACT_UNITS)

    def _exchange(self, possible: dict[tuple[int, int], Matched]) -> None:
        """Exchanges the partners of two pairs if that reduces their errors.

        A variance and the same variance plus a small eps differ by a few units of rounding, so that
        order may pair the wrong ones.
        """
        for (r, c), nearer in possible.items():
            mine, theirs = self.of[0].get(r), self.of[1].get(c)
            if mine is None or theirs is None or mine is theirs:
                continue
            rest = possible.get((theirs.reference, mine.candidate))
            if rest is None or (mine.reference, mine.candidate) not in possible:
                continue
            if max(nearer.units, rest.units) < max(mine.units, theirs.units) / 2:
                self.remove(mine)
                self.remove(theirs)
                self._add(nearer)
                self._add(rest)

    # -- by order
    # ----------------------------------------------------------------------------------------------

    def _align_by(self, ours: Sequence[bytes], theirs: Sequence[bytes]) -> None:
        """Aligns the entries of both sides that have the same key."""
        groups: dict[bytes, tuple[list[int], list[int]]] = {}
        for side, keys in enumerate((ours, theirs)):
            for entry in self._results(side):
                groups.setdefault(keys[entry], ([], []))[side].append(entry)
        for group in groups.values():
            free = [[e for e in group[side] if e not in self.of[side]] for side in (0, 1)]
            if free[0] and free[1]:
                if len(group[0]) * len(group[1]) > _MOST_CELLS:
                    group = free[0][:2000], free[1][:2000]
                self._align(*group)

    def _results(self, side: int) -> list[int]:
        """The entries that lead to an output, and those that have a pair."""
        model = self.models[side]
        return [
            entry
            for entry in model.computed
            if (model.graph.is_output_ancestor[entry] and model.is_operation(entry))
            or entry in self.of[side]
        ]

    def _align(self, first: Sequence[int], second: Sequence[int]) -> None:
        a, b = self.reference.features, self.candidate.features
        for r, c in self._in_order(first, second):
            row, column = a.place[r], b.place[c]
            pair = self.compared(r, c, False)
            if pair.layout is None and a.size[row] == b.size[column]:
                continue  # no layout leads from one shape to the other
            pair.is_sure = pair.error <= _NEAR or _is_alike(a, row, b, column)
            if pair.is_sure or pair.error <= _NEARLY:
                self._add(pair)

    def _in_order(self, first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
        """The best alignment of free entries, without pairs whose inputs do not correspond."""
        scores = self._scores(first, second)
        for _ in range(_MOST_ALIGNMENTS):
            cells = _aligned(scores)
            pairs = {cell: (first[cell[0]], second[cell[1]]) for cell in cells}
            pairs = {cell: pair for cell, pair in pairs.items() if self.is_free(*pair)}
            wrong = [cell for cell, pair in pairs.items() if not self._reads_alike(*pair)]
            for cell in wrong:
                scores[cell] = -np.inf
                del pairs[cell]
            if not wrong:
                break
        return list(pairs.values())

    def _scores(self, first: Sequence[int], second: Sequence[int]) -> np.ndarray:
        """The similarity of each of the first entries and each of the second; highest for pairs."""
        a, b = self.reference.features, self.candidate.features
        columns = np.array([b.place[c] for c in second])
        place_of = {c: number for number, c in enumerate(second)}
        is_taken = np.array([c in self.of[1] for c in second])
        is_last = np.arange(len(second)) == len(second) - 1
        scores = np.full((len(first), len(second)), -np.inf)
        for row, r in enumerate(first):
            pair = self.of[0].get(r)
            if pair is None:
                scores[row] = _similarity(a, a.place[r], b, columns, is_last & (r == first[-1]))
                scores[row, is_taken] = -np.inf
            elif pair.candidate in place_of:
                scores[row, place_of[pair.candidate]] = 100.0
        return scores

    def _reads_alike(self, r: int, c: int) -> bool:
        """True if two entries read the same weights, or have a matched ancestor in common.

        If one weight makes queries, keys and values, operations on queries resemble those on keys.
        """
        a, b = self.reference.features, self.candidate.features
        row, column = a.place[r], b.place[c]
        if a.has_own[row] and a.own[row] == b.own[column]:
            return True
        ours, theirs = self._known_above(0, r), self._known_above(1, c)
        return not ours or not theirs or bool(ours & theirs)

    def _known_above(self, side: int, entry: int) -> set[int]:
        """The nearest entries above one whose values have pairs, as entries of the reference."""
        model = self.models[side]
        known = [self.twins[side].get(root) or self.of[side].get(root) for root in model.root]
        stops = [pair is not None and pair.by_value for pair in known]
        ends, _ = model.above(entry, stops)
        return {pair.reference for end in ends if stops[end] and (pair := known[end]) is not None
            and model.graph.has_input_ancestor[end]}  # fmt: skip


def _without_counts(weight_history: bytes) -> bytes:
    """Which weights led to an entry, without how often."""
    return (np.frombuffer(weight_history, dtype=np.int16) > 0).tobytes()


def _similarity(
    a: EntryFeatures, row: int, b: EntryFeatures, columns: np.ndarray, both_last: np.ndarray
) -> np.ndarray:
    """The similarity of an entry of the reference and each of several of the candidate, by
    operation, weights and module; -inf if they cannot correspond.
    """
    same_size = (b.size[columns] == a.size[row]) & (b.nonfinite[columns] == a.nonfinite[row])
    larger = np.maximum(b.scale[columns], a.scale[row])
    apart = np.abs(b.scale[columns] - a.scale[row]) / np.where(larger > 0, larger, 1.0)
    apart = np.maximum(apart, np.abs(b.moments[columns] - a.moments[row]).max(axis=1))
    close = np.where(same_size, np.clip(1.0 - 2.0 * apart, 0.0, 1.0), 0.0)
    same_family = b.family[columns] == a.family[row]
    alike = same_family | (b.is_activation[columns] & a.is_activation[row])
    same_own = (b.own[columns] == a.own[row]) & a.has_own[row]
    both_exit = b.exits[columns] & a.exits[row] & (b.digits[columns] == a.digits[row])
    possible = same_size & (alike | (close > 0.8) | same_own | both_exit | both_last)
    possible |= same_own & same_family
    largest = b.largest[columns]
    possible &= (largest == a.largest[row]) | (largest < 0) | (a.largest[row] < 0)
    score = (
        1.0 * (b.dims[columns] == a.dims[row])
        + 0.3 * same_size
        + 1.5 * close**2
        + 0.3 * (b.type[columns] == a.type[row])
        + 0.4 * alike
        + 0.8 * same_own
        + 0.7 * both_exit
        + 0.5 * both_last
    )
    return np.where(possible, score, -np.inf)


def _is_alike(a: EntryFeatures, row: int, b: EntryFeatures, column: int) -> bool:
    """True if two entries have operations of one kind, or the same weights, or are both returned by
    modules with the same numbers.
    """
    same_own = a.has_own[row] and a.own[row] == b.own[column]
    both_exit = a.exits[row] and b.exits[column] and a.digits[row] == b.digits[column]
    both_act = a.is_activation[row] and b.is_activation[column]
    return bool(a.family[row] == b.family[column] or both_act or same_own or both_exit)


def _aligned(scores: np.ndarray) -> list[tuple[int, int]]:
    """The pairs (row, column), both ascending, with the largest sum of scores; -inf is no pair."""
    rows, columns = scores.shape
    best = np.zeros((rows + 1, columns + 1))
    for row in range(rows):
        diagonal = best[row, :-1] + scores[row]
        best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], diagonal))
    found = []
    row, column = rows, columns
    while row and column:
        here = best[row, column]
        if here == best[row - 1, column]:
            row -= 1
        elif here == best[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            found.append((row, column))
    return found[::-1]
