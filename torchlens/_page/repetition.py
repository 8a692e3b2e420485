"""How a sequence of symbols repeats itself: its period, the stretches that repeat, and where one
iteration ends.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

Pattern = tuple[int, ...]


def repeating_groups(sequences: Sequence[Pattern]) -> dict[int, int]:
    """Symbol → the stretch that it is in, for symbols in stretches in which something repeats. A
    stretch has no gaps.
    """
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
    while (
        is_growing
    ):  # what lies between symbols of one stretch in another call belongs to the stretch
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


def common_order(sequences: Sequence[list[int]]) -> list[int] | None:
    """An order that all sequences follow (of several, the one by first appearance); None if there
    is none.
    """
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


def period_of(own: Pattern) -> int:
    """The number of elements after which everything repeats, to the end; the length of the sequence
    if nothing does.

    0 if the elements within a period repeat in another way than as loops: then this is a
    coincidence or a condition.
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
    return period if repeats_as_loops(own[:period], len(own)) else 0


def repeats_as_loops(own: Pattern, shorter_than: int = 0) -> bool:
    """Whether all repetitions in it are loops, possibly nested, with nothing left over.

    With `shorter_than`, the loops must be shorter than that.
    """
    group_of = repeating_groups([own])
    at = 0
    while at < len(own):
        end = at + 1
        group = group_of.get(own[at])
        while group is not None and end < len(own) and group_of.get(own[end]) == group:
            end += 1
        inner = own[at:end]
        if len(set(inner)) > 1 and (
            len(inner) == shorter_than or not 0 < period_of(inner) < len(inner)
        ):
            return False
        at = end
    return True


def cut_into_iterations(sequences: Sequence[Pattern]) -> list[list[tuple[int, int]]]:
    """Cuts each sequence into iterations that are as similar as possible.

    An iteration begins with the symbol that the first one begins with: at each occurrence or, if
    that symbol is in a loop of its own, at its first occurrence after the rarest symbol.
    """
    repeated = [own for own in sequences if len(set(own)) < len(own)]
    first = next(
        (own[0] for own in repeated if own[0] in own[1:]), max(repeated[0], key=repeated[0].count)
    )
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
        return len(
            {
                tuple(dict.fromkeys(own[a:b]))
                for own, cut in zip(sequences, cuts, strict=True)
                for a, b in cut
            }
        )

    is_cut = any(len(cut) > 1 for cut in other)
    return other if is_cut and num_forms(other) < num_forms(plain) else plain


def _cut(own: Pattern, first: int, after: int) -> list[tuple[int, int]]:
    """Cuts before each `first` that follows an `after`; whatever comes before the first cut is a
    piece of its own.
    """
    starts = [0]
    is_due = own[0] == after
    for at in range(1, len(own)):
        if own[at] == first and is_due:
            starts.append(at)
            is_due = False
        is_due = is_due or own[at] == after
    return list(zip(starts, [*starts[1:], len(own)], strict=True))


def covers_all(cut: list[tuple[int, int]], runs: list[tuple[int, int, int]]) -> bool:
    return runs == [(0, len(cut), cut[-1][1] - cut[-1][0])]


def similar_runs(pieces: list[Pattern]) -> list[tuple[int, int, int]]:
    """Runs of similar consecutive iterations: start, stop, and the length of the last, which may
    continue differently.
    """
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


def _alike(one: Pattern, other: Pattern) -> bool:
    if one == other:
        return True
    a, b = set(one), set(other)
    return 2 * len(a & b) > len(a | b)


def _as_before(earlier: list[Pattern], piece: Pattern) -> int:
    """How much of a piece is one more iteration like the earlier ones, with the end of one of them;
    0 if nothing is.
    """
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
