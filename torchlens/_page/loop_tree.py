"""Loops in a sequence of steps, as a person would say them: "a, then three times (b, twice (c, d)),
then e".

A sequence is what one call of a module did, one symbol per operation or module. A loop is a stretch
in which the same symbols come again and again. What comes again only by chance (a shared layer used
at two places) is no loop: such occurrences are told apart. What comes out are units, one for each
place of the program: occurrences of a symbol in the same loop.

All sequences are read as patterns: a thousand equal iterations are looked at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchlens._page.repetition import (
    Pattern,
    common_order,
    covers_all,
    cut_into_iterations,
    period_of,
    repeating_groups,
    repeats_as_loops,
    similar_runs,
)

_FEWEST_SHARE = 20  # one part in so many
_MOST_REMAINDERS = 60  # loops in a row that share a symbol, before they are taken for one

_Step = tuple[
    int, tuple[int, ...]
]  # the unit, and the loops of which it begins an iteration, outermost first


@dataclass(slots=True)
class LoopTree:
    """For each sequence, the unit and the innermost iteration (-1 for none) of each element; and
    what these are in.

    `orders` has, by loop (-1: outside of all), what is directly in it in an order that all its
    iterations follow: units, and loops as `-1 - loop`. A loop is missing there if its iterations do
    the same in different orders.
    """

    units: list[list[int]] = field(default_factory=list)
    iterations: list[list[int]] = field(default_factory=list)
    loop_of_unit: list[int] = field(default_factory=list)
    loop_above: list[int] = field(default_factory=list)
    loop_of_iteration: list[int] = field(default_factory=list)
    iteration_above: list[int] = field(default_factory=list)
    orders: dict[int, list[int]] = field(default_factory=dict)


class _Reader(Protocol):
    def __call__(
        self, patterns: Sequence[Pattern], loop: int, is_fine: bool, depth: int, /
    ) -> list[list[_Step]]: ...


def find_loops(sequences: Sequence[Sequence[int]], symbol_of: Sequence[int]) -> LoopTree:
    """The loops of sequences of one module's calls. Elements are places; `symbol_of` says what is
    done there.

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

    def parse(
        self, patterns: Sequence[Pattern], loop: int, is_fine: bool, depth: int
    ) -> list[list[_Step]]:
        """The steps of each pattern. All of them are the body of `loop`, or the same place in
        it.
        """
        symbols = [self._symbols(pattern, is_fine) for pattern in patterns]
        group_of = repeating_groups(symbols)
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

    def _symbols(self, pattern: Pattern, is_fine: bool) -> Pattern:
        return pattern if is_fine else tuple([self.symbol_of[place] for place in pattern])

    def _unit(self, loop: int) -> int:
        self.tree.loop_of_unit.append(loop)
        return len(self.tree.loop_of_unit) - 1

    def _each(
        self, reader: "_Reader", patterns: Sequence[Pattern], loop: int, is_fine: bool, depth: int
    ) -> list[list[_Step]]:
        """What a reader makes of the distinct ones of some patterns, for each of them."""
        distinct = list(dict.fromkeys(patterns))
        found = dict(zip(distinct, reader(distinct, loop, is_fine, depth), strict=True))
        return [found[pattern] for pattern in patterns]

    def _stretch(
        self, patterns: Sequence[Pattern], loop: int, is_fine: bool, depth: int
    ) -> list[list[_Step]]:
        """Stretches in which the same symbols come again, in different calls of the module."""
        symbols = [self._symbols(pattern, is_fine) for pattern in patterns]
        if len(set().union(*symbols)) == 1:
            unit = self._unit(loop)
            return [[(unit, ())] * len(pattern) for pattern in patterns]
        periods = [period_of(own) for own in symbols]
        if all(periods) and any(
            period < len(own) for period, own in zip(periods, symbols, strict=True)
        ):
            cuts = [
                [(at, at + period) for at in range(0, len(own), period)]
                for own, period in zip(symbols, periods, strict=True)
            ]
            return self._loop(patterns, cuts, loop, is_fine, depth)
        if not is_fine and all(map(repeats_as_loops, patterns)):
            return self.parse(
                patterns, loop, True, depth
            )  # the places say it plainly, what is done there does not
        cuts = cut_into_iterations(symbols)
        runs = [
            similar_runs([own[a:b] for a, b in cut]) for own, cut in zip(symbols, cuts, strict=True)
        ]
        if any(runs) and all(
            not own if len(cut) == 1 else covers_all(cut, own)
            for cut, own in zip(cuts, runs, strict=True)
        ):
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
            cut[stop - 1][0] + last - cut[start][0]
            for cut, (start, stop, last) in zip(cuts, firsts, strict=True)
            if stop
        )
        # A few that are alike by chance, among many that are not, are no loop.
        is_much = length * _FEWEST_SHARE >= num_elements
        if is_much and (is_plain or 2 * covered >= num_elements) and depth < _MOST_REMAINDERS:
            return self._pieces(patterns, cuts, firsts, loop, is_fine, depth)
        if num_elements >= 2 * len(set().union(*symbols)):
            return self._loop(patterns, cuts, loop, is_fine, depth)
        return self._apart(patterns, cuts, loop, is_fine, depth)

    def _loop(
        self,
        patterns: Sequence[Pattern],
        cuts: Sequence[list[tuple[int, int]]],
        above: int,
        is_fine: bool,
        depth: int,
    ) -> list[list[_Step]]:
        """Each pattern is iterations of one loop, from cut to cut."""
        tree, loop = self.tree, len(self.tree.loop_above)
        tree.loop_above.append(above)
        bodies = list(
            dict.fromkeys(
                [pattern[a:b] for pattern, cut in zip(patterns, cuts, strict=True) for a, b in cut]
            )
        )
        found = self.parse(bodies, loop, is_fine, depth)
        self.order(loop, found)
        starting = {
            body: [(steps[0][0], (loop, *steps[0][1])), *steps[1:]]
            for body, steps in zip(bodies, found, strict=True)
        }
        return [
            [step for a, b in cut for step in starting[pattern[a:b]]]
            for pattern, cut in zip(patterns, cuts, strict=True)
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
        found = common_order(sequences)
        if found is not None:
            self.tree.orders[loop] = found

    def _pieces(
        self,
        patterns: Sequence[Pattern],
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
        self,
        patterns: Sequence[Pattern],
        cuts: Sequence[list[tuple[int, int]]],
        loop: int,
        is_fine: bool,
        depth: int,
    ) -> list[list[_Step]]:
        """No loop: each piece between two cuts is separate from the others, although they look
        alike.
        """
        found: list[list[_Step]] = [[] for _ in patterns]
        for piece in range(max(map(len, cuts))):
            own = [number for number, cut in enumerate(cuts) if piece < len(cut)]
            texts = [patterns[number][slice(*cuts[number][piece])] for number in own]
            for number, steps in zip(
                own, self._each(self.parse, texts, loop, is_fine, depth), strict=True
            ):
                found[number] += steps
        return found
