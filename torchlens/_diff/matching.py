"""Which value of the candidate corresponds to which of the reference.

First by value: fingerprints that do not depend on the order of elements find what may be the same,
then the elements are compared. What is left computes something else or something in between. It is
paired by what leads to it (the weights that were used on the way, and how often), by what it does,
and by order.
"""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from torchlens._diff.alignment import aligned
from torchlens._diff.fingerprints import Shelf
from torchlens._diff.layouts import Layout, best_layout, layouts_between
from torchlens._diff.likeness import is_alike, scores_of
from torchlens._diff.matched import Found, Matched
from torchlens._diff.subject import Subject
from torchlens._recording.relative_error import are_whole, comparable, epsilon_of, relative_error
from torchlens._replay.entries import Entries

_EXACT_UNITS = 64.0  # so near, two values are the same whatever led to them
_LOOSE_UNITS = 4096.0  # so near, they are if the same led to them
_LOOSEST = 0.02
_FEW = 8  # elements; fewer are alike by chance
_MOST_TRIED = 6
_MOST_CELLS = 4_000_000
_MOST_ALIGNMENTS = 3
_NEAR, _NEARLY = 0.3, 0.5  # errors up to which two values look like one another


class Pairing:
    """Matches two subjects. `fixed` are pairs that are known, in numbers of entries.

    `unit_of` has, by entry of the reference, the unit of rounding where that is known better than
    from the types.
    """

    def __init__(
        self,
        reference: Subject,
        candidate: Subject,
        fixed: Sequence[tuple[int, int]] = (),
        banned: Collection[tuple[int, int]] = (),
        unit_of: dict[int, float] | None = None,
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self._banned = banned
        self.unit_of = unit_of or {}
        self.found = Found()
        # Layouts that were found, by the shapes of both sides, and orders of axes by their number.
        self._usual: dict[tuple[tuple[int, ...], tuple[int, ...]], Counter[Layout]] = {}
        self._usual_axes: dict[int, Counter[tuple[tuple[int, ...], bool]]] = {}
        for r, c in fixed:
            if r not in self.found.of_reference and c not in self.found.of_candidate:
                self._add(r, c, True)

    def run(self) -> Found:
        self._by_value()
        self._by_structure(self.reference.cones, self.candidate.cones)
        sets = [[_as_set(cone) for cone in side.cones] for side in (self.reference, self.candidate)]
        self._by_structure(sets[0], sets[1])
        nothing = [b""] * max(self.reference.side.size, self.candidate.side.size)
        self._by_structure(nothing, nothing)
        return self.found

    def _add(self, r: int, c: int, by_value: bool) -> None:
        pair = self.compared(r, c, by_value)
        if pair.error != pair.error:
            return  # not saved: nobody can tell whether they agree
        self.found.add(pair)
        if pair.units <= pair.allowed(_EXACT_UNITS):
            self._note_layout(pair)

    def epsilon(self, r: int, c: int) -> float:
        """The unit of rounding of two entries: the coarser model's. A coarser type that only one
        has is an error.
        """
        if r in self.unit_of:
            return self.unit_of[r]
        own = [
            epsilon_of(side.rows[entry].dtype)
            for side, entry in ((self.reference.side, r), (self.candidate.side, c))
        ]
        return max(self.reference.side.epsilon, self.candidate.side.epsilon, min(own))

    def compared(self, r: int, c: int, by_value: bool) -> Matched:
        """Two entries with the distance of their values."""
        a, b = self.reference.side.value(r), self.candidate.side.value(c)
        eps = self.epsilon(r, c)
        if a is None or b is None:
            return Matched(r, c, float("nan"), eps, None, by_value)
        shapes = (tuple(a.shape), tuple(b.shape))
        known = self._usual_layouts(shapes)
        is_whole = are_whole(a, b)
        a, b = comparable(a), comparable(b)
        error, layout = best_layout(a, b, 0.0 if is_whole else _EXACT_UNITS * eps, known)
        if layout is None:
            return Matched(r, c, float("inf"), eps, None, by_value, is_whole=is_whole)
        if known and error > 0.1:  # nothing to be seen in the numbers: as others of these shapes
            layout = known[0]
            error = relative_error(a, layout.to_reference(b, shapes[0]))
        return Matched(r, c, error, eps, layout, by_value, is_whole=is_whole)

    # -- by value
    # ----------------------------------------------------------------------------------------------

    def _by_value(self) -> None:
        ours, theirs = self.reference, self.candidate
        shelf = Shelf(
            [(c, print_) for c in theirs.computed if (print_ := theirs.prints[c]) is not None]
        )
        limit = max(2e-3, min(8 * max(ours.side.epsilon, theirs.side.epsilon), 0.05))
        possible: list[tuple[tuple[bool, bool, float], Matched]] = []
        for r in ours.computed:
            own = ours.prints[r]
            assert own is not None
            if r in self.found.of_reference:
                continue
            near = [
                (ours.cones[r] != theirs.cones[c], apart, self._out_of_order(r, c), c)
                for apart, c in shelf.near(own, limit, 10 * limit)
            ]
            for differs, _, shift, c in sorted(near)[:_MOST_TRIED]:
                pair = self.compared(r, c, True)
                if pair.layout is not None and self._is_same_value(pair, differs, own.size):
                    possible.append(
                        ((pair.units > pair.allowed(_EXACT_UNITS), differs, shift), pair)
                    )
        for _, pair in sorted(possible, key=lambda item: item[0]):
            is_free = (
                pair.reference not in self.found.of_reference
                and pair.candidate not in self.found.of_candidate
            )
            if is_free:
                self.found.add(pair)
                self._note_layout(pair)
        self._exchange({(pair.reference, pair.candidate): pair for _, pair in possible})
        for _, pair in sorted(possible, key=lambda item: item[0]):
            if pair.units <= pair.allowed(_EXACT_UNITS):
                self.found.twins[0].setdefault(pair.reference, pair)
                self.found.twins[1].setdefault(pair.candidate, pair)

    def _exchange(self, possible: dict[tuple[int, int], Matched]) -> None:
        """Gives two pairs one another's partners where they are nearer: a variance, and the
        variance with a small eps.

        Such values are the same but for a few units of rounding, and their place in the history
        does not tell them apart.
        """
        of_reference, of_candidate = self.found.of_reference, self.found.of_candidate
        for (r, c), nearer in possible.items():
            mine, theirs = of_reference.get(r), of_candidate.get(c)
            if mine is None or theirs is None or mine is theirs:
                continue
            rest = possible.get((theirs.reference, mine.candidate))
            if rest is None or (mine.reference, mine.candidate) not in possible:
                continue
            if max(nearer.units, rest.units) < max(mine.units, theirs.units) / 2:
                for pair in (mine, theirs):
                    self.found.remove(pair)
                for pair in (nearer, rest):
                    self.found.add(pair)

    def _out_of_order(self, r: int, c: int) -> float:
        return abs(r / self.reference.side.size - c / self.candidate.side.size)

    def _is_same_value(self, pair: Matched, differs: bool, size: int) -> bool:
        if differs:
            eps = max(self.reference.side.epsilon, self.candidate.side.epsilon)
            return pair.units <= pair.allowed(_EXACT_UNITS) and size >= _FEW and eps < 1e-4
        return pair.units <= _LOOSE_UNITS and pair.error <= _LOOSEST

    def _usual_layouts(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Layout, ...]:
        """The layouts that others of these shapes have, the most frequent first, or else of as many
        axes.
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
        shapes = (
            tuple(self.reference.side.rows[pair.reference].shape),
            tuple(self.candidate.side.rows[pair.candidate].shape),
        )
        if pair.layout is None:
            return
        if len(layouts_between(*shapes)) > 1:
            self._usual.setdefault(shapes, Counter())[pair.layout] += 1
        if len(shapes[0]) == len(shapes[1]) and 1 not in shapes[0]:
            axes = () if pair.layout.is_plain else pair.layout.axes
            self._usual_axes.setdefault(len(shapes[0]), Counter())[
                axes, pair.layout.of_reference
            ] += 1

    # -- by what led to it
    # -----------------------------------------------------------------------------------------

    def _by_structure(self, ours: Sequence[bytes], theirs: Sequence[bytes]) -> None:
        groups: dict[bytes, tuple[list[int], list[int]]] = {}
        for place, (subject, keys, paired) in enumerate(
            (
                (self.reference, ours, self.found.of_reference),
                (self.candidate, theirs, self.found.of_candidate),
            )
        ):
            for entry in subject.computed:
                is_asked_for = subject.side.graph.is_output_ancestor[
                    entry
                ] and subject.side.is_operation(entry)
                if is_asked_for or entry in paired:
                    groups.setdefault(keys[entry], ([], []))[place].append(entry)
        for first, second in groups.values():
            if any(r not in self.found.of_reference for r in first) and any(
                c not in self.found.of_candidate for c in second
            ):
                self._align(first, second)

    def _align(self, first: list[int], second: list[int]) -> None:
        if len(first) * len(second) > _MOST_CELLS:
            first = [r for r in first if r not in self.found.of_reference]
            second = [c for c in second if c not in self.found.of_candidate]
            if len(first) * len(second) > _MOST_CELLS:
                first, second = first[:2000], second[:2000]
        scores = np.full((len(first), len(second)), -np.inf)
        a, b = self.reference.features, self.candidate.features
        columns = np.array([b.place[c] for c in second])
        ends_first, ends_second = (
            _last(self.reference.side, first),
            _last(self.candidate.side, second),
        )
        is_free = np.array([c not in self.found.of_candidate for c in second])
        place_of = {c: number for number, c in enumerate(second)}
        is_last = np.array([c in ends_second for c in second])
        for row, r in enumerate(first):
            pair = self.found.of_reference.get(r)
            if pair is not None:
                if pair.candidate in place_of:
                    scores[row, place_of[pair.candidate]] = 100.0
                continue
            scores[row] = np.where(
                is_free, scores_of(a, a.place[r], b, columns, is_last & (r in ends_first)), -np.inf
            )
        for _ in range(_MOST_ALIGNMENTS):
            chosen = [
                (row, column)
                for row, column in aligned(scores)
                if self._is_new(first[row], second[column])
            ]
            mismatched = [
                cell for cell in chosen if not self._reads_alike(first[cell[0]], second[cell[1]])
            ]
            for row, column in mismatched:
                scores[row, column] = -np.inf
            if not mismatched:
                break
        for row, column in chosen:
            r, c = first[row], second[column]
            pair = self.compared(r, c, False)
            if scores[row, column] == -np.inf or (
                pair.layout is None and a.size[a.place[r]] == b.size[b.place[c]]
            ):
                # the second: as many numbers, in shapes that nothing leads from one to the other
                continue
            pair.is_sure = pair.error <= _NEAR or is_alike(a, a.place[r], b, b.place[c])
            if pair.is_sure or pair.error <= _NEARLY:
                self.found.add(pair)

    def _is_new(self, r: int, c: int) -> bool:
        is_free = r not in self.found.of_reference and c not in self.found.of_candidate
        return is_free and (r, c) not in self._banned

    def _reads_alike(self, r: int, c: int) -> bool:
        """Whether two entries may be one: they read the same weights, or something of what they are
        computed from agrees.

        Where one weight makes queries, keys and values, what is done with queries looks like what
        is done with keys.
        """
        a, b = self.reference.features, self.candidate.features
        row, column = a.place[r], b.place[c]
        if a.has_own[row] and a.own[row] == b.own[column]:
            return True
        ours, theirs = self._known_above(0, r), self._known_above(1, c)
        return not ours or not theirs or bool(ours & theirs)

    def _known_above(self, place: int, entry: int) -> set[int]:
        """The nearest entries above one that agree with one of the other side, in numbers of the
        reference.
        """
        subject = (self.reference, self.candidate)[place]
        paired = (self.found.of_reference, self.found.of_candidate)[place]
        twins = self.found.twins[place]
        known = [twins.get(root) or paired.get(root) for root in subject.root]
        stops = [pair is not None and pair.by_value for pair in known]
        ends, _ = subject.side.above(entry, stops)
        from_input = subject.side.graph.has_input_ancestor
        return {
            pair.reference
            for end in ends
            if from_input[end] and stops[end] and (pair := known[end]) is not None
        }


def _last(side: Entries, entries: Sequence[int]) -> set[int]:
    """The last of the entries, and those that an output shows."""
    return set(entries[-1:])


def _as_set(cone: bytes) -> bytes:
    return (np.frombuffer(cone, dtype=np.int16) > 0).tobytes()
