"""Finds nested loops in sequences of operations, such as "a, 3 x (b, 2 x (c, d)), e".

A sequence lists the operations and module calls in one call of a module, one symbol for each. A
loop is a stretch in which the same symbols repeat. Coincidental repetition (a shared layer used at
two places) is not a loop: such occurrences are kept apart. The result is a set of units, one for
each place of the program: the occurrences of a symbol in the same loop.

Equal sequences and equal iterations are parsed once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torchlens._graph.paths import topological_order
from torchlens._graph.repeats import UnionFind

Pattern = tuple[int, ...]
_Cut = list[tuple[int, int]]  # where the iterations of a pattern begin and end
# (unit, loops in which this step begins an iteration, outermost first)
_Step = tuple[int, tuple[int, ...]]


class _Position(NamedTuple):
    """The context of patterns: the enclosing loop (-1 for none). If `is_fine`, the same symbol at
    different places counts as different.
    """

    loop: int = -1
    is_fine: bool = False


@dataclass(slots=True)
class LoopTree:
    """For each sequence, the unit and the innermost iteration (-1 for none) of each element, and
    the nesting of units, iterations and loops.

    `orders` maps a loop (-1: outside all loops) to its direct contents, units and loops as
    `-1 - loop`, in an order that all its iterations follow. It has no entry for a loop whose
    iterations follow different orders.
    """

    units: list[list[int]] = field(default_factory=list)
    iterations: list[list[int]] = field(default_factory=list)
    loop_of_unit: list[int] = field(default_factory=list)
    loop_above: list[int] = field(default_factory=list)
    loop_of_iteration: list[int] = field(default_factory=list)
    iteration_above: list[int] = field(default_factory=list)
    sequence_of_iteration: list[int] = field(default_factory=list)
    orders: dict[int, list[int]] = field(default_factory=dict)

    def contents(self) -> dict[int, list[int]]:
        """Loop (-1: outside all loops) → its direct contents: units, and loops as `-1 - loop`."""
        found: dict[int, list[int]] = {}
        for unit, loop in enumerate(self.loop_of_unit):
            found.setdefault(loop, []).append(unit)
        for loop, above in enumerate(self.loop_above):
            found.setdefault(above, []).append(-1 - loop)
        return found


_Reader = Callable[[Sequence[Pattern], _Position], list[list[_Step]]]


def find_loops(sequences: Sequence[Sequence[int]], symbol_of: Sequence[int]) -> LoopTree:
    """The loops in the sequences of one module's calls.

    Elements are places; `symbol_of` gives the symbol of each. Where the symbols do not
    repeat regularly, the same symbol at different places counts as different.
    """
    parser = _Parser(symbol_of)
    patterns = [tuple(sequence) for sequence in sequences]
    distinct = list(dict.fromkeys(patterns))
    found = dict(zip(distinct, parser.parse(distinct, _Position()), strict=True))
    tree = parser.tree
    parser.order(-1, list(found.values()))
    for number, pattern in enumerate(patterns):
        now: dict[int, int] = {}  # loop → its running iteration
        units, iterations = [], []
        for unit, started in found[pattern]:
            for loop in started:
                now[loop] = len(tree.loop_of_iteration)
                tree.loop_of_iteration.append(loop)
                tree.iteration_above.append(now.get(tree.loop_above[loop], -1))
                tree.sequence_of_iteration.append(number)
            units.append(unit)
            iterations.append(now.get(tree.loop_of_unit[unit], -1))
        tree.units.append(units)
        tree.iterations.append(iterations)
    return tree


class _Parser:
    def __init__(self, symbol_of: Sequence[int]) -> None:
        self.symbol_of = symbol_of
        self.tree = LoopTree()

    def parse(self, patterns: Sequence[Pattern], at: _Position) -> list[list[_Step]]:
        """The steps of each pattern. All of them are at the same position."""
        symbols = [self._symbols(pattern, at) for pattern in patterns]
        group_of = _repeating_groups(symbols)
        unit_of: dict[int, int] = {}
        stretches: dict[int, list[tuple[int, int, int]]] = {}
        found: list[list[_Step]] = []
        for number, own in enumerate(symbols):
            steps: list[_Step] = []
            for group, start, end in _pieces_by_group(own, group_of):
                if group is None:
                    if own[start] not in unit_of:
                        unit_of[own[start]] = self._unit(at)
                    steps.append((unit_of[own[start]], ()))
                else:
                    stretches.setdefault(group, []).append((number, start, end))
                    steps += [(-1, ())] * (end - start)
            found.append(steps)
        for places in stretches.values():
            cut = [patterns[number][start:end] for number, start, end in places]
            parsed = self._each(self._stretch, cut, at)
            for (number, start, end), steps in zip(places, parsed, strict=True):
                found[number][start:end] = steps
        return found

    def _symbols(self, pattern: Pattern, at: _Position) -> Pattern:
        return pattern if at.is_fine else tuple([self.symbol_of[place] for place in pattern])

    def _unit(self, at: _Position) -> int:
        self.tree.loop_of_unit.append(at.loop)
        return len(self.tree.loop_of_unit) - 1

    def _each(
        self, reader: _Reader, patterns: Sequence[Pattern], at: _Position
    ) -> list[list[_Step]]:
        """Applies a reader to the distinct patterns; returns its result for each pattern."""
        distinct = list(dict.fromkeys(patterns))
        found = dict(zip(distinct, reader(distinct, at), strict=True))
        return [found[pattern] for pattern in patterns]

    def _stretch(self, patterns: Sequence[Pattern], at: _Position) -> list[list[_Step]]:
        """Parses stretches with repeated symbols, from different calls of the module."""
        symbols = [self._symbols(pattern, at) for pattern in patterns]
        if _num_distinct(symbols) == 1:
            unit = self._unit(at)
            return [[(unit, ())] * len(pattern) for pattern in patterns]
        exact = _exact_cuts(symbols)
        if exact is not None:
            return self._loop(patterns, exact, at)
        if not at.is_fine and _num_distinct(patterns) > _num_distinct(symbols):
            return self.parse(patterns, at._replace(is_fine=True))
        cuts = _cut_into_iterations(symbols)
        if sum(map(len, symbols)) >= 2 * _num_distinct(symbols):
            return self._loop(patterns, cuts, at)
        return self._apart(patterns, cuts, at)

    def _loop(
        self, patterns: Sequence[Pattern], cuts: Sequence[_Cut], at: _Position
    ) -> list[list[_Step]]:
        """Parses patterns that consist of the iterations of one loop, given by `cuts`."""
        loop = len(self.tree.loop_above)
        self.tree.loop_above.append(at.loop)
        cut_patterns = [
            [pattern[a:b] for a, b in cut] for pattern, cut in zip(patterns, cuts, strict=True)
        ]
        bodies = list(dict.fromkeys([body for own in cut_patterns for body in own]))
        found = self.parse(bodies, at._replace(loop=loop))
        self.order(loop, found)
        starting = {
            body: [(steps[0][0], (loop, *steps[0][1])), *steps[1:]]
            for body, steps in zip(bodies, found, strict=True)
        }
        return [[step for body in own for step in starting[body]] for own in cut_patterns]

    def order(self, loop: int, bodies: Sequence[list[_Step]]) -> None:
        """Stores the order of the direct contents of a loop, if all its iterations follow one."""
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

    def _apart(
        self, patterns: Sequence[Pattern], cuts: Sequence[_Cut], at: _Position
    ) -> list[list[_Step]]:
        """Parses the pieces between the cuts separately, without a loop."""
        found: list[list[_Step]] = [[] for _ in patterns]
        for piece in range(max(map(len, cuts))):
            own = [number for number, cut in enumerate(cuts) if piece < len(cut)]
            texts = [patterns[number][slice(*cuts[number][piece])] for number in own]
            for number, steps in zip(own, self._each(self.parse, texts, at), strict=True):
                found[number] += steps
        return found


# -- repetition in patterns ------------------------------------------------------------------------


def _num_distinct(patterns: Sequence[Pattern]) -> int:
    return len(set().union(*patterns))


def _repeating_groups(sequences: Sequence[Pattern]) -> dict[int, int]:
    """Symbol → its stretch, for symbols in stretches that contain repetition.

    A stretch has no gaps: symbols between its symbols, in any of the sequences, belong to it.
    """
    counts = [Counter(own) for own in sequences if len(set(own)) < len(own)]
    repeated = {symbol for own in counts for symbol, count in own.items() if count > 1}
    joined = UnionFind()
    is_growing = bool(repeated)
    while is_growing:
        grown = [_join_overlapping(own, joined, repeated) for own in sequences]
        is_growing = any(grown) and len(sequences) > 1
    return {symbol: joined.find(symbol) for symbol in repeated}


def _join_overlapping(own: Pattern, joined: UnionFind, repeated: set[int]) -> bool:
    """Joins each repeated symbol with the symbols between its occurrences, and adds these to
    `repeated`. Returns whether any were joined.
    """
    last = {joined.find(symbol): at for at, symbol in enumerate(own) if symbol in repeated}
    root, end, is_grown = -1, -1, False
    for at, symbol in enumerate(own):
        mine = joined.find(symbol)
        if at > end and symbol in repeated:
            root, end = mine, last[mine]
        elif at <= end and mine != joined.find(root):
            joined.join(mine, root)
            repeated.add(symbol)
            end, is_grown = max(end, last.get(mine, at)), True
    return is_grown


def _pieces_by_group(own: Pattern, group_of: dict[int, int]) -> list[tuple[int | None, int, int]]:
    """(group, start, end) of the stretches in a pattern. An element outside all stretches is a
    piece with group None.
    """
    found: list[tuple[int | None, int, int]] = []
    for at, symbol in enumerate(own):
        group = group_of.get(symbol)
        if group is not None and found and found[-1][0] == group:
            found[-1] = group, found[-1][1], at + 1
        else:
            found.append((group, at, at + 1))
    return found


def _common_order(sequences: Sequence[list[int]]) -> list[int] | None:
    """An order that all sequences follow (of several, the one by first appearance); None if there
    is none.
    """
    keys = list(dict.fromkeys(key for own in sequences for key in own))
    place = {key: number for number, key in enumerate(keys)}
    below: list[set[int]] = [set() for _ in keys]
    for own in sequences:
        for a, b in pairwise(own):
            below[place[a]].add(place[b])
    order = topological_order(below)
    return [keys[number] for number in order] if len(order) == len(keys) else None


def _exact_cuts(symbols: Sequence[Pattern]) -> list[_Cut] | None:
    """Cuts into iterations of equal symbols; None if some pattern is not periodic."""
    periods = list(map(_period_of, symbols))
    if not all(periods) or all(map(int.__eq__, periods, map(len, symbols))):
        return None
    return [
        [(at, at + period) for at in range(0, len(own), period)]
        for own, period in zip(symbols, periods, strict=True)
    ]


def _period_of(own: Pattern) -> int:
    """The period of the sequence; its length if it is not periodic.

    0 if the repetition within a period is not made of loops: it is a coincidence or a condition.
    """
    if len(own) == 1:
        return 1
    shift = [0] * len(own)  # the length of the longest prefix that also ends here
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
    return period if _repeats_as_loops(own[:period], len(own)) else 0


def _repeats_as_loops(own: Pattern, shorter_than: int = 0) -> bool:
    """True if all repetition in the sequence consists of complete, possibly nested loops.

    With `shorter_than`, the loops must be shorter than that.
    """
    for _, start, end in _pieces_by_group(own, _repeating_groups([own])):
        inner = own[start:end]
        if len(set(inner)) > 1 and (
            len(inner) == shorter_than or not 0 < _period_of(inner) < len(inner)
        ):
            return False
    return True


def _cut_into_iterations(sequences: Sequence[Pattern]) -> list[_Cut]:
    """Cuts each sequence into iterations that are as similar as possible.

    All iterations begin with the same symbol: at each occurrence of it or, if it is in an inner
    loop, at its first occurrence after the rarest symbol.
    """
    first = _first_of_iteration(sequences)
    counts = Counter(symbol for own in sequences for symbol in own)
    rarest = min(counts, key=lambda symbol: counts[symbol])
    plain = [_cut(own, first, first) for own in sequences]
    if counts[rarest] == counts[first]:
        return plain
    other = [_cut(own, first, rarest) for own in sequences]
    is_cut = any(len(cut) > 1 for cut in other)
    is_better = is_cut and _num_forms(sequences, other) < _num_forms(sequences, plain)
    return other if is_better else plain


def _first_of_iteration(sequences: Sequence[Pattern]) -> int:
    """The symbol that begins an iteration: the first of a sequence if it repeats, else the most
    frequent.
    """
    repeated = [own for own in sequences if len(set(own)) < len(own)]
    for own in repeated:
        if own[0] in own[1:]:
            return own[0]
    return max(repeated[0], key=repeated[0].count)


def _num_forms(sequences: Sequence[Pattern], cuts: Sequence[_Cut]) -> int:
    """The number of different iterations, ignoring repetition inside them."""
    return len(
        {
            tuple(dict.fromkeys(own[a:b]))
            for own, cut in zip(sequences, cuts, strict=True)
            for a, b in cut
        }
    )


def _cut(own: Pattern, first: int, after: int) -> _Cut:
    """Cuts before each `first` that follows an `after`. Elements before the first cut are a piece
    of their own.
    """
    starts = [0]
    is_due = own[0] == after
    for at in range(1, len(own)):
        if own[at] == first and is_due:
            starts.append(at)
            is_due = False
        is_due = is_due or own[at] == after
    return list(zip(starts, [*starts[1:], len(own)], strict=True))
