"""Which value of the candidate is which of the reference.

First by value: fingerprints that do not depend on the order of elements find what may be the same, then the elements are
compared. What is left computes something else or something in between. It is paired by what leads to it (the weights that
were used on the way, and how often), by what it does, and by order.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
import torch

from torchlens.comparing.alignment import aligned
from torchlens.comparing.distances import distance, epsilon_of, numbers
from torchlens.comparing.families import acts, family
from torchlens.comparing.fingerprints import Fingerprint, Shelf, fingerprint, roots
from torchlens.comparing.layouts import Layout, best_layout, layouts_between
from torchlens.comparing.side import Side

__all__ = ["Found", "Matched", "Pairing", "Subject"]

_EXACT_UNITS = 64.0  # so near, two values are the same whatever led to them
_LOOSE_UNITS = 4096.0  # so near, they are if the same led to them
_LOOSEST = 0.02
_FEW = 8  # elements; fewer are alike by chance
_MOST_TRIED = 6
_MOST_CELLS = 4_000_000
_MOST_ALIGNMENTS = 3
_NEAR, _NEARLY = 0.3, 0.5  # errors up to which two values look like one another


@dataclass(slots=True)
class Matched:
    """Two entries, how far their values are apart, and in which layout; `by_value` if that is how they were found."""

    reference: int
    candidate: int
    error: float  # relative to the norm
    eps: float  # the unit of rounding
    layout: Layout | None
    by_value: bool
    is_sure: bool = True  # whether more than order and shape speaks for it

    @property
    def units(self) -> float:
        """The error in units of rounding."""
        return self.error / self.eps


class Subject:
    """A side with what matching needs of it."""

    def __init__(self, side: Side, groups: dict[int, int], shared: Sequence[int], old: "Subject | None" = None) -> None:
        self.side = side
        self._groups = groups
        self._shared = {group: place for place, group in enumerate(shared)}
        self.prints: list[Fingerprint | None] = []
        for entry in range(side.size):
            if old is not None and entry not in side._replaced:
                self.prints.append(old.prints[entry])
            else:
                value = side.value(entry)
                self.prints.append(None if value is None else fingerprint(value))
        self.root = roots(side, self.prints)
        self.cones: list[bytes] = self._cones() if old is None else old.cones

    def again(self, values: "dict[int, torch.Tensor | None]") -> "Subject":
        """The same with other values."""
        return Subject(self.side.with_values(values), self._groups, list(self._shared), self)

    def _cones(self) -> list[bytes]:
        """For each entry, which weights led to it, and how often one after the other: in whatever steps that was done."""
        zero = np.zeros(len(self._shared), dtype=np.int16)
        found: list[np.ndarray] = []
        for entry in range(self.side.size):
            parents = self.side.parents[entry]
            own = {self._shared[g] for g in self.own_groups(entry) if g in self._shared}
            if not parents:
                count = zero
            elif len(parents) == 1:
                count = found[parents[0]]
            else:
                count = np.maximum.reduce([found[parent] for parent in parents])
            if own:
                count = count.copy()
                count[list(own)] += 1
            found.append(count)
        texts: dict[int, bytes] = {}
        return [texts.setdefault(id(count), count.tobytes()) for count in found]

    def own_groups(self, entry: int) -> set[int]:
        return {self._groups[weight] for weight in self.side.own_weights[entry] if weight in self._groups}

    def group_sizes(self) -> dict[int, int]:
        """How many numbers the largest weight of each group has."""
        found: dict[int, int] = {}
        for weight, group in self._groups.items():
            found[group] = max(found.get(group, 0), prod(self.side.weights[weight].shape))
        return found

    @cached_property
    def computed(self) -> list[int]:
        """The entries that computed a value of their own, inputs among them."""
        return [
            entry
            for entry in range(self.side.size)
            if self.root[entry] == entry and self.prints[entry] is not None and self._is_worth(entry)
        ]

    def _is_worth(self, entry: int) -> bool:
        print_ = self.prints[entry]
        return print_ is not None and not print_.is_constant and entry not in self.side._buffers

    @cached_property
    def features(self) -> "_Features":
        return _Features(self)


class _Features:
    """What is compared of entries, as arrays."""

    def __init__(self, subject: Subject) -> None:
        side, entries = subject.side, subject.computed
        self.place = {entry: number for number, entry in enumerate(entries)}
        prints = [subject.prints[entry] for entry in entries]
        self.size = np.array([p.size for p in prints if p is not None], dtype=np.int64)
        self.scale = np.array([p.scale for p in prints if p is not None])
        self.nonfinite = np.array([p.nonfinite for p in prints if p is not None], dtype=np.int64)
        self.features = np.array([p.features for p in prints if p is not None]).reshape(len(entries), -1)
        self.type = np.array([hash(side.type_of(entry)) for entry in entries])
        self.family = np.array([hash(family(side.type_of(entry))) for entry in entries])
        self.acts = np.array([acts(side.type_of(entry)) for entry in entries], dtype=bool)
        shapes = [tuple(sorted(size for size in side.rows[entry].shape if size != 1)) for entry in entries]
        self.dims = np.array([hash(shape) for shape in shapes])
        chained = _chained_groups(subject)
        own = [tuple(sorted(chained[entry])) for entry in entries]
        self.own = np.array([hash(groups) if groups else 0 for groups in own])
        self.has_own = np.array([bool(groups) for groups in own])
        sizes = subject.group_sizes()
        self.main = np.array([max(groups, key=sizes.__getitem__) if groups else -1 for groups in own])
        self.exits = np.array([side.exits(entry) for entry in entries], dtype=bool)
        digits = [tuple(c for c in _words(side.module_of(entry)) if c.isdigit()) for entry in entries]
        self.digits = np.array([hash(words) for words in digits])


def _chained_groups(subject: Subject) -> list[set[int]]:
    """The weights that each entry reads, with those of the product that a bias is added to or that a part is taken of."""
    found: list[set[int]] = []
    from_input = subject.side.graph.has_input_ancestor
    for entry in range(subject.side.size):
        own = set(subject.own_groups(entry))
        # What is made of weights alone (`weight.T`) is as good as a weight.
        own.update(group for parent in subject.side.parents[entry] if not from_input[parent] for group in found[parent])
        parents = [parent for parent in subject.side.parents[entry] if from_input[parent]]
        if len(parents) == 1 and family(subject.side.type_of(entry)) in ("add", "view", "lookup", "cast"):
            own = own | found[parents[0]]
        found.append(own)
    return found


def _words(address: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in address).split()


@dataclass
class Found:
    """What was matched: pairs by entry of either side, and which entries hold what some entry of the other side holds."""

    of_reference: dict[int, Matched] = field(default_factory=dict)
    of_candidate: dict[int, Matched] = field(default_factory=dict)
    twins: tuple[dict[int, Matched], dict[int, Matched]] = field(default_factory=lambda: ({}, {}))

    def add(self, pair: Matched) -> None:
        self.of_reference[pair.reference] = pair
        self.of_candidate[pair.candidate] = pair

    def remove(self, pair: Matched) -> None:
        del self.of_reference[pair.reference], self.of_candidate[pair.candidate]

    def pairs(self) -> list[Matched]:
        return sorted(self.of_reference.values(), key=lambda pair: pair.reference)


class Pairing:
    """Matches two subjects. `fixed` are pairs that are known, in numbers of entries.

    `unit_of` has, by entry of the reference, the unit of rounding where that is known better than from the types.
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
        self.found.add(pair)
        if pair.units <= _EXACT_UNITS:
            self._note_layout(pair)

    def epsilon(self, r: int, c: int) -> float:
        """The unit of rounding of two entries: the coarser model's. A coarser type that only one has is an error."""
        if r in self.unit_of:
            return self.unit_of[r]
        own = [epsilon_of(side.rows[entry].dtype) for side, entry in ((self.reference.side, r), (self.candidate.side, c))]
        return max(self.reference.side.epsilon, self.candidate.side.epsilon, min(own))

    def compared(self, r: int, c: int, by_value: bool) -> Matched:
        """Two entries with the distance of their values."""
        a, b = self.reference.side.value(r), self.candidate.side.value(c)
        eps = self.epsilon(r, c)
        if a is None or b is None:
            return Matched(r, c, float("nan"), eps, None, by_value)
        shapes = (tuple(a.shape), tuple(b.shape))
        known = self._usual_layouts(shapes)
        error, layout = best_layout(numbers(a), numbers(b), _EXACT_UNITS * eps, known)
        if layout is None:
            return Matched(r, c, float("inf"), eps, None, by_value)
        if known and error > 0.1:  # nothing to be seen in the numbers: as others of these shapes
            layout = known[0]
            error = distance(numbers(a), layout.to_reference(numbers(b), shapes[0]))
        return Matched(r, c, error, eps, layout, by_value)

    # -- by value --------------------------------------------------------------------------------------------------

    def _by_value(self) -> None:
        ours, theirs = self.reference, self.candidate
        shelf = Shelf([(c, print_) for c in theirs.computed if (print_ := theirs.prints[c]) is not None])
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
                    possible.append(((pair.units > _EXACT_UNITS, differs, shift), pair))
        for _, pair in sorted(possible, key=lambda item: item[0]):
            is_free = pair.reference not in self.found.of_reference and pair.candidate not in self.found.of_candidate
            if is_free:
                self.found.add(pair)
                self._note_layout(pair)
        self._exchange({(pair.reference, pair.candidate): pair for _, pair in possible})
        for _, pair in sorted(possible, key=lambda item: item[0]):
            if pair.units <= _EXACT_UNITS:
                self.found.twins[0].setdefault(pair.reference, pair)
                self.found.twins[1].setdefault(pair.candidate, pair)

    def _exchange(self, possible: dict[tuple[int, int], Matched]) -> None:
        """Gives two pairs one another's partners where they are nearer: a variance, and the variance with a small eps.

        Such values are the same but for a few units of rounding, and their place in the history does not tell them apart.
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
            return pair.units <= _EXACT_UNITS and size >= _FEW and eps < 1e-4
        return pair.units <= _LOOSE_UNITS and pair.error <= _LOOSEST

    def _usual_layouts(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Layout, ...]:
        """The layouts that others of these shapes have, the most frequent first, or else of as many axes."""
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
            if (layout.axes, layout.of_reference) == (axes, of_reference) or (not axes and layout.is_plain)
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
            self._usual_axes.setdefault(len(shapes[0]), Counter())[axes, pair.layout.of_reference] += 1

    # -- by what led to it -----------------------------------------------------------------------------------------

    def _by_structure(self, ours: Sequence[bytes], theirs: Sequence[bytes]) -> None:
        groups: dict[bytes, tuple[list[int], list[int]]] = {}
        for place, (subject, keys, paired) in enumerate(
            ((self.reference, ours, self.found.of_reference), (self.candidate, theirs, self.found.of_candidate))
        ):
            for entry in subject.computed:
                is_asked_for = subject.side.graph.is_output_ancestor[entry] and subject.side.is_operation(entry)
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
        ends_first, ends_second = _last(self.reference.side, first), _last(self.candidate.side, second)
        is_free = np.array([c not in self.found.of_candidate for c in second])
        place_of = {c: number for number, c in enumerate(second)}
        is_last = np.array([c in ends_second for c in second])
        for row, r in enumerate(first):
            pair = self.found.of_reference.get(r)
            if pair is not None:
                if pair.candidate in place_of:
                    scores[row, place_of[pair.candidate]] = 100.0
                continue
            scores[row] = np.where(is_free, _scores(a, a.place[r], b, columns, is_last & (r in ends_first)), -np.inf)
        for _ in range(_MOST_ALIGNMENTS):
            chosen = [(row, column) for row, column in aligned(scores) if self._is_new(first[row], second[column])]
            strangers = [cell for cell in chosen if not self._reads_alike(first[cell[0]], second[cell[1]])]
            for row, column in strangers:
                scores[row, column] = -np.inf
            if not strangers:
                break
        for row, column in chosen:
            r, c = first[row], second[column]
            pair = self.compared(r, c, False)
            if scores[row, column] == -np.inf or (pair.layout is None and a.size[a.place[r]] == b.size[b.place[c]]):
                continue  # the second: as many numbers, in shapes that nothing leads from one to the other
            pair.is_sure = pair.error <= _NEAR or _is_alike(a, a.place[r], b, b.place[c])
            if pair.is_sure or pair.error <= _NEARLY:
                self.found.add(pair)

    def _is_new(self, r: int, c: int) -> bool:
        is_free = r not in self.found.of_reference and c not in self.found.of_candidate
        return is_free and (r, c) not in self._banned

    def _reads_alike(self, r: int, c: int) -> bool:
        """Whether two entries may be one: they read the same weights, or something of what they are computed from agrees.

        Where one weight makes queries, keys and values, what is done with queries looks like what is done with keys.
        """
        a, b = self.reference.features, self.candidate.features
        row, column = a.place[r], b.place[c]
        if a.has_own[row] and a.own[row] == b.own[column]:
            return True
        ours, theirs = self._known_above(0, r), self._known_above(1, c)
        return not ours or not theirs or bool(ours & theirs)

    def _known_above(self, place: int, entry: int) -> set[int]:
        """The nearest entries above one that agree with one of the other side, in numbers of the reference."""
        subject = (self.reference, self.candidate)[place]
        paired = (self.found.of_reference, self.found.of_candidate)[place]
        twins = self.found.twins[place]
        known = [twins.get(root) or paired.get(root) for root in subject.root]
        stops = [pair is not None and pair.by_value for pair in known]
        ends, _ = subject.side.above(entry, stops)
        from_input = subject.side.graph.has_input_ancestor
        return {pair.reference for end in ends if from_input[end] and stops[end] and (pair := known[end]) is not None}


def _scores(a: _Features, row: int, b: _Features, columns: np.ndarray, both_last: np.ndarray) -> np.ndarray:
    """How well an entry of the reference goes with each of several of the candidate; -inf where it does not at all."""
    same_size = (b.size[columns] == a.size[row]) & (b.nonfinite[columns] == a.nonfinite[row])
    larger = np.maximum(b.scale[columns], a.scale[row])
    apart = np.abs(b.features[columns] - a.features[row]).max(axis=1)
    apart = np.maximum(apart, np.abs(b.scale[columns] - a.scale[row]) / np.where(larger > 0, larger, 1.0))
    close = np.where(same_size, np.clip(1.0 - 2.0 * apart, 0.0, 1.0), 0.0)
    same_dims = b.dims[columns] == a.dims[row]
    same_type = b.type[columns] == a.type[row]
    same_family = b.family[columns] == a.family[row]
    both_act = b.acts[columns] & a.acts[row]
    same_own = (b.own[columns] == a.own[row]) & a.has_own[row]
    both_exit = b.exits[columns] & a.exits[row] & (b.digits[columns] == a.digits[row])
    allowed = same_size & (same_family | both_act | (close > 0.8) | same_own | both_exit | both_last)
    allowed |= same_own & same_family
    allowed &= (b.main[columns] == a.main[row]) | (b.main[columns] < 0) | (a.main[row] < 0)
    score = 1.0 * same_dims + 0.3 * same_size + 1.5 * close**2 + 0.3 * same_type + 0.4 * (same_family | both_act)
    score = score + 0.8 * same_own + 0.7 * both_exit + 0.5 * both_last
    return np.where(allowed, score, -np.inf)


def _is_alike(a: _Features, row: int, b: _Features, column: int) -> bool:
    """Whether two entries do the same kind of thing with the same weights, or are what modules return."""
    if (
        b.family[column] == a.family[row]
        or (a.acts[row] and b.acts[column])
        or (a.has_own[row] and a.own[row] == b.own[column])
    ):
        return True
    return bool(a.exits[row] and b.exits[column] and a.digits[row] == b.digits[column])


def _last(side: Side, entries: Sequence[int]) -> set[int]:
    """The last of the entries, and those that an output shows."""
    return set(entries[-1:])


def _as_set(cone: bytes) -> bytes:
    return (np.frombuffer(cone, dtype=np.int16) > 0).tobytes()
