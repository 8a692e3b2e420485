"""Loops in a sequence of steps, as a person would say them: "a, then three times (b, twice (c, d)), then e".

A sequence is what one call of a module did, one symbol per operation or module. A loop is a stretch in which the same
symbols come again and again. What comes again only by chance (a shared layer used at two places) is no loop: such
occurrences are told apart. What comes out are units, one for each place of the program: occurrences of a symbol in the
same loop.

All sequences are read as patterns: a thousand equal iterations are looked at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Protocol

__all__ = ["LoopTree", "find_loops"]

_FEWEST_SHARE = 20  # one part in so many
_MOST_REMAINDERS = 60  # loops in a row that share a symbol, before they are taken for one

_Pattern = tuple[int, ...]
_Step = tuple[int, tuple[int, ...]]  # the unit, and the loops of which it begins an iteration, outermost first


@dataclass(slots=True)
class LoopTree:
    """For each sequence, the unit and the innermost iteration (-1 for none) of each element; and what these are in.

    `orders` has, by loop (-1: outside of all), what is directly in it in an order that all its iterations follow: units,
    and loops as `-1 - loop`. A loop is missing there if its iterations do the same in different orders.
    """

    units: list[list[int]] = field(default_factory=list)
    iterations: list[list[int]] = field(default_factory=list)
    loop_of_unit: list[int] = field(default_factory=list)
    loop_above: list[int] = field(default_factory=list)
    loop_of_iteration: list[int] = field(default_factory=list)
    iteration_above: list[int] = field(default_factory=list)
    orders: dict[int, list[int]] = field(default_factory=dict)


class _Reader(Protocol):
    def __call__(self, patterns: Sequence[_Pattern], loop: int, is_fine: bool, depth: int, /) -> list[list[_Step]]: ...


def find_loops(sequences: Sequence[Sequence[int]], symbol_of: Sequence[int]) -> LoopTree:
    """The loops of sequences of one module's calls. Elements are places; `symbol_of` says what is done there.

    Where what is done repeats in no plain way, the same at different places counts as different.
    """
    parser = _Parser(symbol_of)
    patterns = [tuple(sequence) for sequence in sequences]
    distinct = list(dict.fromkeys(patterns))
    found = dict(zip(distinct, parser.parse(distinct, -1, False, 0), strict=True))
    tree = parser.tree
    parser.order(-1, list(found.values()))
    for pattern in patterns:
        now: dict[int, int] = {}  # loop → its running iteration
        units, iterations = [], []
        for unit, started in found[pattern]:
            for loop in started:
                now[loop] = len(tree.loop_of_iteration)
                tree.loop_of_iteration.append(loop)
                tree.iteration_above.append(now.get(tree.loop_above[loop], -1))
            units.append(unit)
            iterations.append(now.get(tree.loop_of_unit[unit], -1))
        tree.units.append(units)
        tree.iterations.append(iterations)
    return tree


class _Parser:
    def __init__(self, symbol_of: Sequence[int]) -> None:
        self.symbol_of = symbol_of
        self.tree = LoopTree()

    def parse(self, patterns: Sequence[_Pattern], loop: int, is_fine: bool, depth: int) -> list[list[_Step]]:
        """The steps of each pattern. All of them are the body of `loop`, or the same place in it."""
        symbols = [self._symbols(pattern, is_fine) for pattern in patterns]
        group_of = _repeating(symbols)
        unit_of: dict[int, int] = {}
        stretches: dict[int, list[tuple[int, int, int]]] = {}
        found: list[list[_Step]] = []
        for number, own in enumerate(symbols):
            steps: list[_Step] = []
            at = 0
            while at < len(own):
                group = group_of.get(own[at]) if group_of else None
                if group is None:
                    if own[at] not in unit_of:
                        unit_of[own[at]] = self._unit(loop)
                    steps.append((unit_of[own[at]], ()))
                    at += 1
                    continue
                end = at + 1
                while end < len(own) and group_of.get(own[end]) == group:
                    end += 1
                stretches.setdefault(group, []).append((number, at, end))
                steps += [(-1, ())] * (end - at)
                at = end
            found.append(steps)
        for places in stretches.values():
            cut = [patterns[number][start:end] for number, start, end in places]
            for (number, start, end), steps in zip(
                places, self._each(self._stretch, cut, loop, is_fine, depth), strict=True
            ):
                found[number][start:end] = steps
        return found

    def _symbols(self, pattern: _Pattern, is_fine: bool) -> _Pattern:
        return pattern if is_fine else tuple([self.symbol_of[place] for place in pattern])

    def _unit(self, loop: int) -> int:
        self.tree.loop_of_unit.append(loop)
        return len(self.tree.loop_of_unit) - 1

    def _each(
        self, reader: "_Reader", patterns: Sequence[_Pattern], loop: int, is_fine: bool, depth: int
    ) -> list[list[_Step]]:
        """What a reader makes of the distinct ones of some patterns, for each of them."""
        distinct = list(dict.fromkeys(patterns))
        found = dict(zip(distinct, reader(distinct, loop, is_fine, depth), strict=True))
        return [found[pattern] for pattern in patterns]

    def _stretch(self, patterns: Sequence[_Pattern], loop: int, is_fine: bool, depth: int) -> list[list[_Step]]:
        """Stretches in which the same symbols come again, in different calls of the module."""
        symbols = [self._symbols(pattern, is_fine) for pattern in patterns]
        if len(set().union(*symbols)) == 1:
            unit = self._unit(loop)
            return [[(unit, ())] * len(pattern) for pattern in patterns]
        periods = [_period(own) for own in symbols]
        if all(periods) and any(period < len(own) for period, own in zip(periods, symbols, strict=True)):
            cuts = [
                [(at, at + period) for at in range(0, len(own), period)]
                for own, period in zip(symbols, periods, strict=True)
            ]
            return self._loop(patterns, cuts, loop, is_fine, depth)
        if not is_fine and all(map(_is_plain, patterns)):
            return self.parse(patterns, loop, True, depth)  # the places say it plainly, what is done there does not
        cuts = _cuts(symbols)
        runs = [_runs([own[a:b] for a, b in cut]) for own, cut in zip(symbols, cuts, strict=True)]
        if any(runs) and all(not own if len(cut) == 1 else _covers(cut, own) for cut, own in zip(cuts, runs, strict=True)):
            return self._loop(patterns, cuts, loop, is_fine, depth)
        if not is_fine and len(set().union(*patterns)) > len(set().union(*symbols)):
            return self.parse(patterns, loop, True, depth)
        num_elements = sum(map(len, symbols))
        covered = sum(
            cut[stop - 1][0] + last - cut[start][0]
            for cut, own in zip(cuts, runs, strict=True)
            for start, stop, last in own
        )
        is_plain = any(own and own[0][1] - own[0][0] > 2 for own in runs) or all(
            own and own[0][1] == len(cut) for cut, own in zip(cuts, runs, strict=True)
        )
        firsts = [own[0] if own else (0, 0, 0) for own in runs]
        length = sum(
            cut[stop - 1][0] + last - cut[start][0] for cut, (start, stop, last) in zip(cuts, firsts, strict=True) if stop
        )
        # A few that are alike by chance, among many that are not, are no loop.
        is_much = length * _FEWEST_SHARE >= num_elements
        if is_much and (is_plain or 2 * covered >= num_elements) and depth < _MOST_REMAINDERS:
            return self._pieces(patterns, cuts, firsts, loop, is_fine, depth)
        if num_elements >= 2 * len(set().union(*symbols)):
            return self._loop(patterns, cuts, loop, is_fine, depth)
        return self._apart(patterns, cuts, loop, is_fine, depth)

    def _loop(
        self, patterns: Sequence[_Pattern], cuts: Sequence[list[tuple[int, int]]], above: int, is_fine: bool, depth: int
    ) -> list[list[_Step]]:
        """Each pattern is iterations of one loop, from cut to cut."""
        tree, loop = self.tree, len(self.tree.loop_above)
        tree.loop_above.append(above)
        bodies = list(dict.fromkeys([pattern[a:b] for pattern, cut in zip(patterns, cuts, strict=True) for a, b in cut]))
        found = self.parse(bodies, loop, is_fine, depth)
        self.order(loop, found)
        starting = {
            body: [(steps[0][0], (loop, *steps[0][1])), *steps[1:]] for body, steps in zip(bodies, found, strict=True)
        }
        return [
            [step for a, b in cut for step in starting[pattern[a:b]]] for pattern, cut in zip(patterns, cuts, strict=True)
        ]

    def order(self, loop: int, bodies: Sequence[list[_Step]]) -> None:
        """Notes the order of what is directly in a loop, if all its iterations agree on one."""
        loop_of_unit, loop_above = self.tree.loop_of_unit, self.tree.loop_above
        sequences: list[list[int]] = []
        for steps in bodies:
            keys: list[int] = []
            for unit, _ in steps:
                key, around = unit, loop_of_unit[unit]
                while around != loop:
                    key, around = -1 - around, loop_above[around]
                if not keys or keys[-1] != key:
                    keys.append(key)
            sequences.append(keys)
        found = _common_order(sequences)
        if found is not None:
            self.tree.orders[loop] = found

    def _pieces(
        self,
        patterns: Sequence[_Pattern],
        cuts: Sequence[list[tuple[int, int]]],
        runs: Sequence[tuple[int, int, int]],
        loop: int,
        is_fine: bool,
        depth: int,
    ) -> list[list[_Step]]:
        """Each pattern is something, then a loop, then something else."""
        before, inside, inner_cuts, after = [], [], [], []
        for pattern, cut, (start, stop, last) in zip(patterns, cuts, runs, strict=True):
            begin = cut[start][0] if stop else len(pattern)
            end = cut[stop - 1][0] + last if stop else len(pattern)
            before.append(pattern[:begin])
            inside.append(pattern[begin:end])
            inner_cuts.append([(a - begin, min(b, end) - begin) for a, b in cut[start:stop]])
            after.append(pattern[end:])
        first = self._each(self.parse, before, loop, is_fine, depth + 1)
        middle = self._loop(inside, inner_cuts, loop, is_fine, depth)
        last_steps = self._each(self.parse, after, loop, is_fine, depth + 1)
        return [a + b + c for a, b, c in zip(first, middle, last_steps, strict=True)]

    def _apart(
        self, patterns: Sequence[_Pattern], cuts: Sequence[list[tuple[int, int]]], loop: int, is_fine: bool, depth: int
    ) -> list[list[_Step]]:
        """No loop: what stands between two cuts is apart from the rest, though it looks alike."""
        found: list[list[_Step]] = [[] for _ in patterns]
        for piece in range(max(map(len, cuts))):
            own = [number for number, cut in enumerate(cuts) if piece < len(cut)]
            texts = [patterns[number][slice(*cuts[number][piece])] for number in own]
            for number, steps in zip(own, self._each(self.parse, texts, loop, is_fine, depth), strict=True):
                found[number] += steps
        return found


def _repeating(sequences: Sequence[_Pattern]) -> dict[int, int]:
    """The symbols in stretches where something comes again, by the stretch they are in. A stretch is without gaps."""
    above: dict[int, int] = {}

    def find(symbol: int) -> int:
        while above[symbol] != symbol:
            above[symbol] = above[above[symbol]]
            symbol = above[symbol]
        return symbol

    for own in sequences:
        if len(set(own)) == len(own):
            continue
        last = {symbol: at for at, symbol in enumerate(own)}
        at = 0
        while at < len(own):
            end, here = last[own[at]], at
            if end == at:
                at += 1
                continue
            root = find(above.setdefault(own[at], own[at]))
            while here <= end:
                end = max(end, last[own[here]])
                above[find(above.setdefault(own[here], own[here]))] = root
                here += 1
            at = end + 1
    if not above or len(sequences) == 1:
        return {symbol: find(symbol) for symbol in above}
    is_growing = True
    while is_growing:  # what stands between symbols of one stretch in another call belongs to it
        is_growing = False
        for own in sequences:
            last = {find(symbol): at for at, symbol in enumerate(own) if symbol in above}
            end, root = -1, -1
            for at, symbol in enumerate(own):
                if symbol not in above and at > end:
                    continue
                mine = find(above.setdefault(symbol, symbol))
                if at > end:
                    root, end = mine, last[mine]
                elif mine != find(root):
                    above[mine] = root = find(root)
                    end, is_growing = max(end, last.get(mine, at)), True
    return {symbol: find(symbol) for symbol in above}


def _common_order(sequences: Sequence[list[int]]) -> list[int] | None:
    """One order that all sequences follow, the first come first where several would do; None where there is none."""
    place: dict[int, int] = {}
    for own in sequences:
        for key in own:
            place.setdefault(key, len(place))
    if all(place[a] < place[b] for own in sequences for a, b in pairwise(own)):
        return list(place)
    below: dict[int, set[int]] = {key: set() for key in place}
    for own in sequences:
        for a, b in pairwise(own):
            below[a].add(b)
    left = dict.fromkeys(place, 0)
    for found in below.values():
        for key in found:
            left[key] += 1
    ready = [(place[key], key) for key, count in left.items() if not count]
    heapify(ready)
    order = []
    while ready:
        _, key = heappop(ready)
        order.append(key)
        for child in below[key]:
            left[child] -= 1
            if not left[child]:
                heappush(ready, (place[child], child))
    return order if len(order) == len(place) else None


def _period(own: _Pattern) -> int:
    """After how many elements all comes again, over and over to the end; its length where it does not come again.

    0 where the elements between repeat in another way than as loops, so that this is a coincidence or a condition.
    """
    if len(own) == 1:
        return 1
    shift = [0] * len(own)  # the length of the longest beginning that ends here, too
    length = 0
    for at in range(1, len(own)):
        while length and own[at] != own[length]:
            length = shift[length - 1]
        if own[at] == own[length]:
            length += 1
        shift[at] = length
    period = len(own) - shift[-1]
    if len(own) % period:
        period = len(own)
    return period if _is_plain(own[:period], len(own)) else 0


def _is_plain(own: _Pattern, shorter_than: int = 0) -> bool:
    """Whether what comes again in it does so as loops, which may be nested, and which leave nothing over.

    Loops are shorter than what they were looked for in, if that is given.
    """
    group_of = _repeating([own])
    at = 0
    while at < len(own):
        end = at + 1
        group = group_of.get(own[at])
        while group is not None and end < len(own) and group_of.get(own[end]) == group:
            end += 1
        inner = own[at:end]
        if len(set(inner)) > 1 and (len(inner) == shorter_than or not 0 < _period(inner) < len(inner)):
            return False
        at = end
    return True


def _cuts(sequences: Sequence[_Pattern]) -> list[list[tuple[int, int]]]:
    """Each sequence cut into iterations that are as much alike as can be.

    An iteration begins with what the first one begins with: each time, or, where that is in a loop of its own, the first
    time after what is rarest.
    """
    repeated = [own for own in sequences if len(set(own)) < len(own)]
    first = next((own[0] for own in repeated if own[0] in own[1:]), max(repeated[0], key=repeated[0].count))
    counts: dict[int, int] = {}
    for own in sequences:
        for symbol in own:
            counts[symbol] = counts.get(symbol, 0) + 1
    rarest = min(counts, key=lambda symbol: counts[symbol])
    plain = [_cut(own, first, first) for own in sequences]
    if counts[rarest] == counts[first]:
        return plain
    other = [_cut(own, first, rarest) for own in sequences]

    def num_forms(cuts: list[list[tuple[int, int]]]) -> int:
        return len({tuple(dict.fromkeys(own[a:b])) for own, cut in zip(sequences, cuts, strict=True) for a, b in cut})

    is_cut = any(len(cut) > 1 for cut in other)
    return other if is_cut and num_forms(other) < num_forms(plain) else plain


def _cut(own: _Pattern, first: int, after: int) -> list[tuple[int, int]]:
    """Before each `first` that comes after an `after`; what comes before the first of them is a piece of its own."""
    starts = [0]
    is_due = own[0] == after
    for at in range(1, len(own)):
        if own[at] == first and is_due:
            starts.append(at)
            is_due = False
        is_due = is_due or own[at] == after
    return list(zip(starts, [*starts[1:], len(own)], strict=True))


def _covers(cut: list[tuple[int, int]], runs: list[tuple[int, int, int]]) -> bool:
    return runs == [(0, len(cut), cut[-1][1] - cut[-1][0])]


def _runs(pieces: list[_Pattern]) -> list[tuple[int, int, int]]:
    """Iterations in a row that are alike: from, to, and the length of the last, which may go on otherwise."""
    found: list[tuple[int, int, int]] = []
    start = 0
    while start + 1 < len(pieces):
        stop = start + 1
        while stop < len(pieces) and _alike(pieces[stop - 1], pieces[stop]):
            stop += 1
        own = pieces[start:stop]
        if stop < len(pieces) and (length := _as_before(own, pieces[stop])):
            stop += 1
            found.append((start, stop, length))
        elif len(own) > 1:
            length = 0 if own[-1] == own[-2] else _as_before(own[:-1], own[-1])
            found.append((start, stop, length or len(own[-1])))
        start = stop
    return found


def _alike(one: _Pattern, other: _Pattern) -> bool:
    if one == other:
        return True
    a, b = set(one), set(other)
    return 2 * len(a & b) > len(a | b)


def _as_before(earlier: list[_Pattern], piece: _Pattern) -> int:
    """How much of a piece is one more iteration like the earlier ones, ending where one of them did; 0 if none of it."""
    bodies = set(earlier)
    follows = {pair for body in bodies for pair in pairwise(body)}
    ends = {body[-1] for body in bodies}
    starts = {body[0] for body in bodies}
    if piece[0] not in starts:
        return 0
    length = 1
    while length < len(piece) and (piece[length - 1], piece[length]) in follows:
        length += 1
    while length and piece[length - 1] not in ends:
        length -= 1
    return length if 2 * length >= min(map(len, bodies)) else 0
