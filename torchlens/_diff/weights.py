"""Matches the weights of two models: as they are, transposed, permuted, or as a part of a larger
weight.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchlens._diff.fingerprints import Fingerprint, Shelf, fingerprint
from torchlens._diff.layouts import AxisOrder, layouts_between
from torchlens._recording.tolerance import epsilon_of, numbers, relative_error
from torchlens._replay.numbered_entries import Weight
from torchlens._text.numbers import first_few

Tensor = torch.Tensor
# In units of rounding: copying a weight is exact, storing it in a shorter type is half a unit off.
_CLOSE = 4.0
_MOST_PARTS = 64
_MOST_TRIED = 16
_NEIGHBOURS = 8  # the two terms of a sum are at most so many weights apart

Weights = Sequence[Weight]


class WeightPair(NamedTuple):
    """A weight of the reference and the weight of the candidate that corresponds to it.

    `how` is 'same', 'transposed', 'permuted', 'reshaped', 'sum' (two biases that the other model
    has as one) or 'part' (one of `parts` equal parts; 0 if their sizes differ).
    """

    reference: int
    candidate: int
    how: str
    parts: int = 0
    is_whole_in_reference: bool = False


@dataclass(frozen=True)
class WeightMatch:
    """The weights of both models, all pairs, and the group of each: a weight and its parts are one.
    `missing` are the used weights that only one of the two models has.
    """

    weights: tuple[Weights, Weights]
    pairs: list[WeightPair]
    groups: tuple[dict[int, int], dict[int, int]]
    missing: tuple[list[int], list[int]]
    has_values: bool

    def odd_ones(self) -> list[WeightPair]:
        """Square weights that are transposed although most of their kind are not, or vice versa."""
        kinds: dict[str, list[WeightPair]] = {}
        for pair in self.pairs:
            weight = self.weights[0][pair.reference]
            if _is_square(weight.shape) and pair.how in ("same", "transposed"):
                kinds.setdefault(_kind(weight.name), []).append(pair)
        found = []
        for pairs in kinds.values():
            usual, number = Counter(pair.how for pair in pairs).most_common(1)[0]
            if number > 1 and number > len(pairs) / 2:
                found += [pair for pair in pairs if pair.how != usual]
        return found


def _is_square(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and shape[0] == shape[1]


def match_weights(
    reference: Weights,
    candidate: Weights,
    used: tuple[set[int], set[int]],
    forced: Sequence[tuple[int, int]] = (),
) -> WeightMatch:
    """Pairs of weights that hold the same numbers; weights that are `used` come first. `forced`
    pairs are known.
    """
    both = reference, candidate
    if not all(both) or any(map(_is_bare, both)):
        pairs = [WeightPair(a, b, "same") for a, b in forced]
        return WeightMatch(both, pairs, _groups(pairs), ([], []), False)
    pairs = _WeightMatcher(both, used).run(forced)
    groups = _groups(pairs)
    ours, theirs = (
        [n for n in sorted(used[side]) if n not in groups[side] and not weights[n].is_buffer]
        for side, weights in enumerate(both)
    )  # the other model may compute a buffer, such as a mask or a table of positions
    return WeightMatch(both, pairs, groups, (ours, theirs), True)


def _is_bare(weights: Weights) -> bool:
    return bool(weights) and all(weight.value is None for weight in weights)


def _groups(pairs: Sequence[WeightPair]) -> tuple[dict[int, int], dict[int, int]]:
    """For each weight of either side, the number of its group."""
    groups: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for pair in pairs:
        old = {groups[0].get(pair.reference), groups[1].get(pair.candidate)} - {None}
        group = min((number for number in old if number is not None), default=pair.reference)
        for own in groups:
            own.update({weight: group for weight, number in own.items() if number in old})
        groups[0][pair.reference] = groups[1][pair.candidate] = group
    return groups


class _WeightMatcher:
    """Finds pairs in passes: whole weights, parts, sums, and weights that are in two places.

    Sides are numbered: 0 is the reference, 1 the candidate.
    """

    def __init__(self, weights: tuple[Weights, Weights], used: tuple[set[int], set[int]]) -> None:
        self._weights = weights
        self._used = used
        self._pairs: list[WeightPair] = []
        self._known: tuple[set[int], set[int]] = (set(), set())
        self._values: list[dict[int, Tensor]] = []
        self._prints: list[dict[int, Fingerprint]] = []
        for side in weights:
            values = {n: numbers(w.value) for n, w in enumerate(side) if w.value is not None}
            self._values.append(values)
            self._prints.append({number: fingerprint(value) for number, value in values.items()})
        self._shelves = [Shelf(list(prints.items())) for prints in self._prints]
        self._limit = _CLOSE * epsilon_of(*(w.value.dtype for side in weights for w in side
            if w.value is not None))  # fmt: skip

    def run(self, forced: Sequence[tuple[int, int]]) -> list[WeightPair]:
        """The pairs, in the order of the reference."""
        for a, b in forced:
            self._add([self._pair(0, a, b) or WeightPair(a, b, "same")])
        orders = [sorted(values, key=lambda n: (n not in self._used[0], n) if side == 0 else (n,))
                  for side, values in enumerate(self._values)]  # fmt: skip

        def each_free(side: int, find: Callable[[int, int], list[WeightPair]]) -> None:
            for number in orders[side]:
                if number not in self._known[side]:
                    self._add(find(side, number))

        each_free(0, lambda side, number: self._whole(side, number, self._known[1]))
        for side in (0, 1):
            each_free(side, self._parts)
        for side in (0, 1):
            self._find_sums(side)
        for side in (0, 1):  # one weight in two places: tied in one model, copied in the other
            each_free(side, lambda side, number: self._whole(side, number, ()))
        return sorted(self._pairs)

    def _add(self, pairs: Sequence[WeightPair]) -> None:
        self._pairs += pairs
        for pair in pairs:
            self._known[0].add(pair.reference)
            self._known[1].add(pair.candidate)

    # -- whole weights
    # ----------------------------------------------------------------------------------------------

    def _whole(self, side: int, number: int, taken: Collection[int]) -> list[WeightPair]:
        """The weight of the other side that holds the same numbers and has the nearest name."""
        found = []
        for other in self._near(side, self._prints[side][number]):
            pair = None if other in taken else self._pair(side, number, other)
            if pair is not None:
                names = self._weights[side][number].name, self._weights[1 - side][other].name
                is_used = other in self._used[1 - side]
                found.append(((not is_used, pair.how != "same", _unlike(*names)), other, pair))
            if len(found) > _MOST_TRIED:
                break
        return [min(found)[2]] if found else []

    def _pair(self, side: int, number: int, other: int) -> WeightPair | None:
        """The pair of two weights; None if they hold other numbers."""
        if number not in self._values[side] or other not in self._values[1 - side]:
            return None
        a, b = (number, other) if side == 0 else (other, number)
        dtypes = [w.value.dtype for w in (self._weights[0][a], self._weights[1][b])
                  if w.value is not None]  # fmt: skip
        first, second = self._values[0][a], self._values[1][b]
        layout = _layout(first, second, _CLOSE * epsilon_of(*dtypes))
        return None if layout is None else WeightPair(a, b, _how(layout, first, second))

    def _near(self, side: int, own: Fingerprint) -> list[int]:
        """Weights of the other side that may hold the same numbers, in the order of that model."""
        limit = 16 * self._limit
        return sorted(number for _, number in self._shelves[1 - side].near(own, limit, limit))

    # -- parts
    # ----------------------------------------------------------------------------------------------

    def _parts(self, side: int, number: int) -> list[WeightPair]:
        """Weights of the other side that are consecutive parts of a weight, such as thirds."""
        others, count = self._parts_of(side, self._values[side][number])
        pairs = [(number, other) if side == 0 else (other, number) for other in others]
        return [WeightPair(a, b, "part", count, side == 0) for a, b in pairs]

    def _parts_of(self, side: int, whole: Tensor) -> tuple[list[int], int]:
        """The parts of a value, and their number (0 if their sizes differ).

        All equal parts, or else parts of different sizes (many queries, few keys and values), or
        else some of the equal parts, if there is a mistake in the others.
        """
        sizes = self._free_sizes(1 - side, whole.numel())
        best: tuple[list[int], int] = ([], 0)
        for axis, size in _equal_lengths(whole, sizes):
            count = whole.shape[axis] // size
            found = self._walk(side, whole, axis, [size], is_equal=True)
            if len(found) == count:
                return found, count
            if not best[0] and len(found) >= min(count - 1, 2):
                best = found, count
        for axis in range(whole.dim()):
            found = self._walk(side, whole, axis, _lengths(whole, axis, sizes), is_equal=False)
            if found:
                return found, 0
        return best

    def _free_sizes(self, side: int, below: int) -> Counter[int]:
        """How many free weights of a side have each number of elements below a limit."""
        known = self._known[side]
        sizes = (value.numel() for n, value in self._values[side].items() if n not in known)
        return Counter(size for size in sizes if size < below)

    def _walk(
        self, side: int, whole: Tensor, axis: int, lengths: Sequence[int], is_equal: bool
    ) -> list[int]:
        """Weights that follow one another along an axis; if sizes differ, they must fill it."""
        found: list[int] = []
        start, total = 0, whole.shape[axis]
        while start < total and len(found) < _MOST_PARTS:
            for length in lengths:
                if length <= total - start:
                    other = self._holder(side, whole.narrow(axis, start, length), found)
                    if other is not None:
                        found.append(other)
                        start += length
                        break
            else:
                if not is_equal:
                    return []
                start += lengths[0]
        return found

    def _holder(self, side: int, value: Tensor, taken: Collection[int]) -> int | None:
        """The first free weight of the other side that holds a value."""
        for other in self._near(side, fingerprint(value)):
            is_free = other not in taken and other not in self._known[1 - side]
            if is_free and _layout(value, self._values[1 - side][other], self._limit) is not None:
                return other
        return None

    # -- sums
    # ----------------------------------------------------------------------------------------------

    def _find_sums(self, side: int) -> None:
        """Adds pairs of biases that the other side has as one: `bias_ih + bias_hh` of torch."""
        for first, second in list(self._neighbours(side)):
            if {first, second} & self._known[side]:
                continue
            total = self._values[side][first] + self._values[side][second]
            other = self._holder(side, total, ())
            wholes = self._parts_of(side, total)[0] if other is None else [other]
            pairs = [(term, whole) for term in (first, second) for whole in wholes]
            self._add([WeightPair(*(pair if side == 0 else pair[::-1]), "sum") for pair in pairs])

    def _neighbours(self, side: int) -> Iterator[tuple[int, int]]:
        vectors = [(n, value) for n, value in self._values[side].items()
            if n not in self._known[side] and value.dim() == 1 and len(value) > 1
            and bool(value.any())]  # fmt: skip
        for place, (first, one) in enumerate(vectors):
            for second, two in vectors[place + 1 :]:
                if second - first <= _NEIGHBOURS and one.shape == two.shape:
                    yield first, second


def _layout(first: Tensor, second: Tensor, limit: float) -> AxisOrder | None:
    """The layout in which the second tensor holds the numbers of the first."""
    shape = tuple(first.shape)
    for layout in layouts_between(shape, tuple(second.shape)):
        if relative_error(first, layout.to_reference(second, shape)) <= limit:
            return layout
    return None


def _how(layout: AxisOrder, first: Tensor, second: Tensor) -> str:
    if layout.is_plain:
        return "same" if first.shape == second.shape else "reshaped"
    is_transposed = len(layout.axes) == first.dim() == second.dim() == 2
    return "transposed" if is_transposed else "permuted"


def _lengths(whole: Tensor, axis: int, sizes: Collection[int]) -> list[int]:
    """The lengths along an axis of parts that have one of the `sizes`, the longest first."""
    unit = whole.numel() // max(whole.shape[axis], 1)
    if not unit:
        return []
    fitting = (size for size in sizes if size >= unit and size % unit == 0)
    return sorted((size // unit for size in fitting), reverse=True)


def _equal_lengths(whole: Tensor, sizes: Counter[int]) -> Iterator[tuple[int, int]]:
    """(axis, length) of equal parts, such that several weights have the size of one part."""
    for axis, total in enumerate(whole.shape):
        for length in _lengths(whole, axis, sizes):
            is_division = total % length == 0 and total <= length * _MOST_PARTS
            if is_division and sizes[length * (whole.numel() // total)] > 1:
                yield axis, length


def _unlike(first: str, second: str) -> int:
    """How little two addresses have in common: the numbers in them, then the words."""
    a, b = first.replace("_", ".").split("."), second.replace("_", ".").split(".")
    numbers_differ = [x for x in a if x.isdigit()] != [x for x in b if x.isdigit()]
    return 8 * numbers_differ - len(set(a) & set(b))


# -- in words
# --------------------------------------------------------------------------------------------------

_WORDS = {
    "same": "as they are",
    "transposed": "transposed",
    "permuted": "with permuted axes",
    "reshaped": "reshaped",
}
_FRACTIONS = {0: "parts", 2: "halves", 3: "thirds", 4: "quarters"}


def weights_text(match: WeightMatch) -> str:
    """`53 of 53 found: 26 as they are, 27 transposed`, and which are missing or unusual."""
    sides = dict(zip(("reference", "candidate"), match.weights, strict=True))
    if not match.has_values:
        bare = " nor the ".join(name for name, weights in sides.items() if _is_bare(weights))
        return f"not saved in the {bare}: save(path, params=True) keeps them" if bare else "none"
    text = _found_words(match)
    for missing, (whose, weights) in zip(match.missing, sides.items(), strict=True):
        if missing:
            text += f"; only in the {whose}: {first_few([weights[n].name for n in missing])}"
    odd = [match.weights[1][pair.candidate].name for pair in match.odd_ones()]
    if odd:
        text += f"; {len(odd)} stand{'s' * (len(odd) == 1)} out: {', '.join(odd[:3])}"
    return text


def _found_words(match: WeightMatch) -> str:
    """`53 of 53 found: 26 as they are, 9 transposed, 18 as thirds of `qkv``"""
    found = len(match.groups[0])
    params = [number for number, weight in enumerate(match.weights[0]) if not weight.is_buffer]
    total = found + len(set(params) - match.groups[0].keys())
    if not total:
        return "none"
    said = ", ".join([*_whole_words(match), *_part_words(match)])
    return f"{found} of {total} found" + (f": {said}" if said else "")


def _whole_words(match: WeightMatch) -> list[str]:
    """`26 as they are`, `9 transposed`, `2 in sums of two`"""
    counts = Counter(pair.how for pair in match.pairs)
    said = [f"{counts[how]} {words}" for how, words in _WORDS.items() if counts[how]]
    added = len({pair.reference for pair in match.pairs if pair.how == "sum"})
    return [*said, f"{added} in sums of two"] if added else said


def _part_words(match: WeightMatch) -> list[str]:
    """`18 as thirds of `qkv` of the reference`"""
    kinds: dict[tuple[int, bool], Counter[str]] = {}
    for pair in match.pairs:
        if pair.how == "part":
            is_ours = pair.is_whole_in_reference
            ours, theirs = match.weights
            whole = ours[pair.reference] if is_ours else theirs[pair.candidate]
            kinds.setdefault((pair.parts, is_ours), Counter())[_stem(whole.name)] += 1
    found = []
    for (count, is_ours), stems in kinds.items():
        names = ", ".join(f"`{stem}`" for stem in [*stems][:3])
        whose = " of the reference" if is_ours else ""
        fraction = _FRACTIONS.get(count, f"one of {count} parts")
        found.append(f"{stems.total()} as {fraction} of {names}{whose}")
    return found


def _stem(name: str) -> str:
    """`qkv` for `h.0.attn.qkv.weight`."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    is_generic = parts[-1] in ("weight", "bias", "kernel", "w", "b", "scale")
    return parts[-2] if len(parts) > 1 and is_generic else parts[-1]


def _kind(name: str) -> str:
    """The address without its numbers."""
    return ".".join("" if part.isdigit() else part for part in name.split("."))
