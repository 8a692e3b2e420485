"""Finds repetition in a sequence of keys, for layers, drawings and pages alike."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Repetition(NamedTuple):
    """The elements from `start` to `stop`, in which the first `period` elements repeat."""

    start: int
    stop: int
    period: int

    @property
    def times(self) -> int:
        """The number of periods."""
        return (self.stop - self.start) // self.period


class UnionFind:
    """Sets of numbers; the smallest member represents its set."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}

    def find(self, item: int) -> int:
        """The representative of the set of an item. An item not joined yet is a set of its own."""
        above = self._above
        while (parent := above.get(item, item)) != item:
            above[item] = item = above.get(parent, parent)
        return item

    def join(self, a: int, b: int) -> None:
        """Makes one set of the sets of two items."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self._above[max(a, b)] = min(a, b)

    def join_all(self, items: Sequence[int]) -> None:
        """Makes one set of all items."""
        for item in items[1:]:
            self.join(items[0], item)

    def sets(self, items: Iterable[int]) -> dict[int, list[int]]:
        """Representative → the given items in its set, in their order."""
        found: dict[int, list[int]] = {}
        for item in items:
            found.setdefault(self.find(item), []).append(item)
        return found


def next_occurrences(keys: Iterable[tuple[int, Hashable]]) -> Iterator[tuple[int, int]]:
    """Each place with the next place that has the same key, from (place, key)."""
    last: dict[Hashable, int] = {}
    for place, key in keys:
        before = last.get(key)
        if before is not None:
            yield before, place
        last[key] = place


def stretches(
    keys: Sequence[Hashable], period: int, places: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """The widest ranges around some places, in order, in which each key is repeated after `period`
    elements, as the keys at the places are.
    """
    limit, end = len(keys) - period, 0
    for place in places:
        if place < end:
            continue
        start = place
        while start > end and keys[start - 1] == keys[start - 1 + period]:
            start -= 1
        end = place + 1
        while end < limit and keys[end] == keys[end + period]:
            end += 1
        yield start, end


def find_runs(
    keys: Sequence[Hashable], longest_period: int, fewest: Callable[[int, int], int]
) -> list[Repetition]:
    """Runs that do not overlap, from left to right: at each start the longest. `fewest(start,
    stop)` is the least number of repetitions of the elements from `start` to `stop`.
    """
    covering = _repeated_stretches(keys, longest_period)
    found: list[Repetition] = []
    open_now: list[tuple[int, int]] = []
    at = 0
    for place in range(len(keys)):
        open_now += covering.get(place, ())
        if place < at or not open_now:
            continue
        open_now = [(end, period) for end, period in open_now if end >= place + period]
        runs = [
            Repetition(place, place + (1 + (end - place) // period) * period, period)
            for end, period in open_now
        ]
        runs = [run for run in runs if run.times >= fewest(place, place + run.period)]
        if runs:
            found.append(max(runs, key=lambda run: (run.stop, -run.period)))
            at = found[-1].stop
    return found


def _repeated_stretches(
    keys: Sequence[Hashable], longest_period: int
) -> dict[int, list[tuple[int, int]]]:
    """Start → (end, period) of each stretch in which every key is repeated after the period."""
    found: dict[int, list[tuple[int, int]]] = {}
    for period in range(1, min(longest_period, len(keys) // 2) + 1):
        again = (at for at in range(len(keys) - period) if keys[at] == keys[at + period])
        for start, end in stretches(keys, period, again):
            if end - start >= period:
                found.setdefault(start, []).append((end, period))
    return found
