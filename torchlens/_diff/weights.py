"""Which weights of two models correspond: as they are, transposed, permuted, or as a part of a
larger one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from torchlens._diff.fingerprints import Fingerprint, Shelf, fingerprint
from torchlens._diff.layouts import SAME, Layout, layouts_between
from torchlens._diff.weight_sums import sums_of
from torchlens._recording.relative_error import epsilon_of, numbers, relative_error
from torchlens._replay.entries import Weight

Tensor = torch.Tensor
# Of float32, rounded once: copying a weight loses nothing, storing it in a shorter type loses half
# a unit of that.
_CLOSE = 4.0
_MOST_PARTS = 64
_MOST_TRIED = 16


class WeightPair(NamedTuple):
    """A weight of the reference and what it is in the candidate.

    `how` is 'same', 'transposed', 'permuted', 'reshaped', 'sum' (two biases that the other model
    has as one) or 'part' (of which `part` tells which of how many; of 0 if they are not of one
    size).
    """

    reference: int
    candidate: int
    how: str
    layout: Layout = SAME
    part: tuple[int, int] | None = None
    is_of_reference: bool = False  # whether it is the reference's weight that has the parts


@dataclass(frozen=True)
class WeightMatch:
    """All pairs, and to which group each weight belongs: weights that are parts of one another are
    one group.
    """

    pairs: list[WeightPair]
    groups: tuple[dict[int, int], dict[int, int]]
    missing: tuple[list[int], list[int]]
    has_values: bool

    def partners(self, reference: int) -> list[WeightPair]:
        return [pair for pair in self.pairs if pair.reference == reference]

    def odd_ones(self, reference: Sequence[Weight]) -> list[WeightPair]:
        """Square weights that are as they are, where others of their kind are transposed, or the
        other way round.
        """
        kinds: dict[str, list[WeightPair]] = {}
        for pair in self.pairs:
            shape = reference[pair.reference].shape
            if pair.how in ("same", "transposed") and len(shape) == 2 and shape[0] == shape[1]:
                kinds.setdefault(_kind(reference[pair.reference].name), []).append(pair)
        found = []
        for pairs in kinds.values():
            counts = Counter(pair.how for pair in pairs)
            usual, number = counts.most_common(1)[0]
            if number > 1 and number > len(pairs) / 2:
                found += [pair for pair in pairs if pair.how != usual]
        return found

    def summary(self, reference: Sequence[Weight], candidate: Sequence[Weight]) -> str:
        """`53 of 53 found: 26 as they are, 9 transposed, 18 as thirds of `qkv``."""
        if not self.has_values:
            bare = [
                name
                for name, side in (("reference", reference), ("candidate", candidate))
                if _is_bare(side)
            ]
            return (
                f"not saved in the {' nor the '.join(bare)}: save(path, params=True) keeps them"
                if bare
                else "none"
            )
        found = len(self.groups[0])
        total = found + sum(
            _counts(weight)
            for number, weight in enumerate(reference)
            if number not in self.groups[0]
        )
        if not total:
            return "none"
        words = {
            "same": "as they are",
            "transposed": "transposed",
            "permuted": "with permuted axes",
            "reshaped": "reshaped",
        }
        counts = Counter(pair.how for pair in self.pairs if pair.how not in ("part", "sum"))
        said = [f"{counts[how]} {text}" for how, text in words.items() if counts[how]]
        added = len({pair.reference for pair in self.pairs if pair.how == "sum"})
        said += [f"{added} in sums of two"] if added else []
        said += self._part_words(reference, candidate)
        start = f"{found} of {total} found"
        return f"{start}: {', '.join(said)}" if said else start

    def _part_words(self, reference: Sequence[Weight], candidate: Sequence[Weight]) -> list[str]:
        parts = [pair for pair in self.pairs if pair.part is not None]
        kinds: Counter[tuple[int, bool, str]] = Counter()
        for pair in parts:
            assert pair.part is not None
            whole = (
                reference[pair.reference].name
                if pair.is_of_reference
                else candidate[pair.candidate].name
            )
            kinds[pair.part[1], pair.is_of_reference, _stem(whole)] += 1
        merged: dict[tuple[int, bool], list[tuple[str, int]]] = {}
        for (count, is_of_reference, stem), number in kinds.items():
            merged.setdefault((count, is_of_reference), []).append((stem, number))
        found = []
        for (count, is_of_reference), named in merged.items():
            total = sum(number for _, number in named)
            names = ", ".join(f"`{stem}`" for stem, _ in named[:3])
            whose = "" if not is_of_reference else " of the reference"
            found.append(f"{total} as {_fraction(count)} of {names}{whose}")
        return found


def _is_bare(weights: Sequence[Weight]) -> bool:
    return bool(weights) and not any(weight.value is not None for weight in weights)


def _stem(name: str) -> str:
    """`qkv` for `h.0.attn.qkv.weight`."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    return (
        parts[-2]
        if len(parts) > 1 and parts[-1] in ("weight", "bias", "kernel", "w", "b", "scale")
        else parts[-1]
    )


def _kind(name: str) -> str:
    """The address without its numbers."""
    return ".".join("" if part.isdigit() else part for part in name.split("."))


def _fraction(count: int) -> str:
    return {0: "parts", 2: "halves", 3: "thirds", 4: "quarters"}.get(count, f"one of {count} parts")


def match_weights(
    reference: Sequence[Weight],
    candidate: Sequence[Weight],
    used: tuple[set[int], set[int]],
    forced: Sequence[tuple[int, int]] = (),
) -> WeightMatch:
    """Pairs of weights. Those that are `used` come first where several hold the same numbers, then
    the order counts.
    """
    if not any(w.value is not None for w in reference) or not any(
        w.value is not None for w in candidate
    ):
        pairs = [WeightPair(a, b, "same") for a, b in forced]
        return WeightMatch(pairs, ({p.reference: p.reference for p in pairs},
            {p.candidate: p.reference for p in pairs}),
                           ([], []), False)  # fmt: skip
    finder = _Finder(reference, candidate)
    pairs = [finder.forced(a, b) for a, b in forced]
    taken = {pair.candidate for pair in pairs}
    known = {pair.reference for pair in pairs}
    order = sorted(range(len(reference)), key=lambda number: (number not in used[0], number))
    for number in order:
        if number not in known:
            pair = finder.whole(number, taken, used[1])
            if pair is not None:
                pairs.append(pair)
                taken.add(pair.candidate)
                known.add(number)
    for number in order:
        if number not in known:
            found = finder.parts_of_reference(number, taken)
            if found:
                pairs += found
                known.add(number)
                taken.update(pair.candidate for pair in found)
    for number in range(len(candidate)):
        if number not in taken:
            found = finder.parts_of_candidate(number, known)
            if found:
                pairs += found
                known.update(pair.reference for pair in found)
                taken.add(number)
    for found in finder.sums(known, taken):
        pairs += found
        known.update(pair.reference for pair in found)
        taken.update(pair.candidate for pair in found)
    for number in order:  # one weight in two places: tied here, copied there
        if number not in known:
            pair = finder.whole(number, set(), used[1])
            if pair is not None:
                pairs.append(pair)
                known.add(number)
    for number in range(len(candidate)):
        if number not in taken:
            pair = finder.again(number)
            if pair is not None:
                pairs.append(pair)
                taken.add(number)
    return _grouped(sorted(pairs), reference, candidate, used, True)


def _grouped(
    pairs: list[WeightPair],
    reference: Sequence[Weight],
    candidate: Sequence[Weight],
    used: tuple[set[int], set[int]],
    has_values: bool,
) -> WeightMatch:
    groups: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for pair in pairs:
        a, b = groups[0].get(pair.reference), groups[1].get(pair.candidate)
        group = (
            pair.reference if a is None and b is None else min(x for x in (a, b) if x is not None)
        )
        for own in groups:
            for number, old in list(own.items()):
                if old in (a, b):
                    own[number] = group
        groups[0][pair.reference] = groups[1][pair.candidate] = group
    missing = (
        [
            n
            for n in range(len(reference))
            if n in used[0] and n not in groups[0] and _counts(reference[n])
        ],
        [
            n
            for n in range(len(candidate))
            if n in used[1] and n not in groups[1] and _counts(candidate[n])
        ],
    )
    return WeightMatch(pairs, groups, missing, has_values)


def _counts(weight: Weight) -> bool:
    """Whether one would miss it: a mask or a table of positions is made anew in every port."""
    return not weight.is_buffer


class _Finder:
    def __init__(self, reference: Sequence[Weight], candidate: Sequence[Weight]) -> None:
        self._sides = (reference, candidate)
        self._numbers = tuple(
            [None if w.value is None else numbers(w.value) for w in side] for side in self._sides
        )
        self._prints = tuple(
            [None if value is None else fingerprint(value) for value in side]
            for side in self._numbers
        )
        dtypes = [
            weight.value.dtype
            for side in self._sides
            for weight in side
            if weight.value is not None
        ]
        self._coarsest = _CLOSE * epsilon_of(*dtypes)
        self._shelves = [
            Shelf([(number, print_) for number, print_ in enumerate(prints) if print_ is not None])
            for prints in self._prints
        ]

    def _close(self, a: int, b: int) -> float:
        first, second = self._sides[0][a].value, self._sides[1][b].value
        assert first is not None
        assert second is not None
        return _CLOSE * epsilon_of(first.dtype, second.dtype)

    def forced(self, a: int, b: int) -> WeightPair:
        return self._pair(a, b) or WeightPair(a, b, "same")

    def whole(self, number: int, taken: set[int], used: set[int]) -> WeightPair | None:
        """The candidate's weight that holds the same numbers: the first of those that are used and
        not yet taken.
        """
        own = self._prints[0][number]
        if own is None:
            return None
        found = []
        for other in self._near(0, own, taken):
            pair = self._pair(number, other)
            if pair is not None:
                names = self._sides[0][number].name, self._sides[1][other].name
                found.append(
                    ((other not in used, pair.how != "same", _unlike(*names)), other, pair)
                )
            if len(found) > _MOST_TRIED:
                break
        return min(found)[2] if found else None

    def again(self, number: int) -> WeightPair | None:
        """A weight of the candidate that holds what another holds that was taken before."""
        own = self._prints[1][number]
        for other in () if own is None else self._near(1, own, set()):
            pair = self._pair(other, number)
            if pair is not None:
                return pair
        return None

    def sums(self, known: set[int], taken: set[int]) -> Iterator[list[WeightPair]]:
        """Biases of one side that the other has as two, which it adds."""
        free = tuple(
            [number for number, value in enumerate(own) if value is not None and number not in gone]
            for own, gone in zip(self._numbers, (known, taken), strict=True)
        )
        for side in (0, 1):
            others = 1 - side
            for terms, wholes in sums_of(
                self._numbers[side], free[side], self._numbers[others], free[others], self._coarsest
            ):
                pairs = [(term, whole) for term in terms for whole in wholes]
                yield [
                    WeightPair(a, b, "sum") if side == 0 else WeightPair(b, a, "sum")
                    for a, b in pairs
                ]

    def _near(self, side: int, own: Fingerprint, taken: set[int]) -> list[int]:
        """Weights of the other side that may hold the same numbers, in their order."""
        limit = 16 * self._coarsest
        return sorted(
            number
            for _, number in self._shelves[1 - side].near(own, limit, limit)
            if number not in taken
        )

    def _pair(self, a: int, b: int) -> WeightPair | None:
        first, second = self._numbers[0][a], self._numbers[1][b]
        if first is None or second is None:
            return None
        shape = tuple(first.shape)
        for layout in layouts_between(shape, tuple(second.shape)):
            if relative_error(first, layout.to_reference(second, shape)) <= self._close(a, b):
                return WeightPair(a, b, _how(layout, shape, tuple(second.shape)), layout)
        return None

    def parts_of_reference(self, number: int, taken: set[int]) -> list[WeightPair]:
        """Weights of the candidate that are thirds, say, of one of the reference."""
        return self._parts(0, number, taken)

    def parts_of_candidate(self, number: int, taken: set[int]) -> list[WeightPair]:
        return self._parts(1, number, taken)

    def _parts(self, side: int, number: int, taken: set[int]) -> list[WeightPair]:
        whole = self._numbers[side][number]
        if whole is None or whole.dim() < 1 or whole.numel() < 2:
            return []
        free = [
            n
            for n, value in enumerate(self._numbers[1 - side])
            if value is not None and n not in taken
        ]
        best: list[WeightPair] = []
        for axis, count in _divisions(whole, self._sides[1 - side], free):
            pieces = whole.chunk(count, dim=axis)
            found = [
                self._piece(side, number, piece, (place, count), free)
                for place, piece in enumerate(pieces)
            ]
            pairs = [pair for pair in found if pair is not None]
            if len(pairs) == count:
                return pairs
            if not best and (len(pairs) > 1 or (pairs and count == 2)):
                best = pairs
        for axis in range(whole.dim()):
            pairs = self._uneven_parts(side, number, axis, free)
            if pairs:
                return pairs
        return best

    def _uneven_parts(
        self, side: int, number: int, axis: int, free: Sequence[int]
    ) -> list[WeightPair]:
        """Parts of different sizes that follow one another and fill the whole: many queries, few
        keys and values.
        """
        whole = self._numbers[side][number]
        assert whole is not None
        total = whole.shape[axis]
        slice_size = whole.numel() // total if total else 0
        sizes = Counter(prod(self._sides[1 - side][other].shape) for other in free)
        lengths = sorted(
            {size // slice_size for size in sizes if slice_size and not size % slice_size},
            reverse=True,
        )
        found: list[WeightPair] = []
        start = 0
        while start < total and len(found) < _MOST_PARTS:
            for length in lengths:
                if 0 < length <= total - start and length < total:
                    piece = whole.narrow(axis, start, length)
                    left = [
                        other for other in free if other not in {pair[1 - side] for pair in found}
                    ]
                    pair = self._piece(side, number, piece, (len(found), 0), left)
                    if pair is not None:
                        found.append(pair)
                        start += length
                        break
            else:
                return []
        return found

    def _piece(
        self, side: int, number: int, piece: Tensor, part: tuple[int, int], free: Sequence[int]
    ) -> WeightPair | None:
        shape = tuple(piece.shape)
        scale = float(piece.norm()) / piece.numel() ** 0.5
        for other in free:
            value, own = self._numbers[1 - side][other], self._prints[1 - side][other]
            if value is None or own is None or value.numel() != piece.numel() or own.nonfinite:
                continue
            if abs(own.scale - scale) > 16 * self._coarsest * max(own.scale, scale):
                continue
            limit = self._close(number, other) if side == 0 else self._close(other, number)
            for layout in layouts_between(shape, tuple(value.shape)):
                if relative_error(piece, layout.to_reference(value, shape)) <= limit:
                    a, b = (number, other) if side == 0 else (other, number)
                    return WeightPair(a, b, "part", SAME, part, side == 0)
        return None


def _divisions(
    whole: Tensor, others: Sequence[Weight], free: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(axis, number of parts) for which there are weights of the size of a part."""
    sizes = Counter(prod(others[number].shape) for number in free)
    for axis in range(whole.dim()):
        for count in range(2, min(whole.shape[axis], _MOST_PARTS) + 1):
            if whole.shape[axis] % count == 0 and sizes[whole.numel() // count] >= 2:
                yield axis, count


def _how(layout: Layout, reference: tuple[int, ...], candidate: tuple[int, ...]) -> str:
    if layout.is_plain:
        return "same" if reference == candidate else "reshaped"
    return (
        "transposed"
        if len(layout.axes) == 2 and len(reference) == len(candidate) == 2
        else "permuted"
    )


def _unlike(first: str, second: str) -> int:
    """How little two addresses have in common: the numbers in them, then the words."""
    a, b = first.replace("_", ".").split("."), second.replace("_", ".").split(".")
    numbers_differ = [x for x in a if x.isdigit()] != [x for x in b if x.isdigit()]
    return 8 * numbers_differ - len(set(a) & set(b))
