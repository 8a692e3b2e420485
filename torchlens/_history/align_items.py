"""Aligns two sequences in order: pairs their items such that the pairs are worth the most."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

_MOST_CELLS = 8_000_000  # of the table; a larger one is computed near its diagonal only
_LEAST_MARGIN = 64


class AlignedItem(NamedTuple):
    """One thing in a sequence, by numbers that are equal where the things are. `weight` is how much
    is in it.

    Two items may be matched if they have the same `kind` and share `sort`, `name` or `inside`; 0 is
    shared with nothing. The rest makes one match better than another: `place` only where nothing
    else does.
    """

    kind: int
    sort: int
    name: int
    inside: int
    exact: int  # equal where nothing differs
    form: int
    settings: int
    holds: int
    same: int  # parameters of the same values
    place: int
    weight: float


_WORTH = {
    "sort": 4.0,
    "name": 5.0,
    "inside": 3.0,
    "exact": 3.0,
    "form": 1.5,
    "settings": 1.5,
    "holds": 1.5,
    "same": 6.0,
}
_PLACE_WORTH = 0.1
# Where the best worth of a cell comes from: the cell at its left, a match, or the cell above.
_LEFT, _MATCHED, _ABOVE = 0, 1, 2


def align(first: Sequence[AlignedItem], second: Sequence[AlignedItem]) -> list[tuple[int, int]]:
    """The matches as pairs of positions, both rising."""
    shorter = min(len(first), len(second))
    start = _num_same(first, second, shorter)
    end = _num_same(first[::-1], second[::-1], shorter - start)
    found = [(k, k) for k in range(start)]
    left, right = _matchable(first, second, start, end), _matchable(second, first, start, end)
    if left and right:
        inner = _best([first[k] for k in left], [second[k] for k in right])
        found += [(left[a], right[b]) for a, b in inner]
    return found + [(len(first) - k, len(second) - k) for k in range(end, 0, -1)]


def _num_same(first: Sequence[AlignedItem], second: Sequence[AlignedItem], most: int) -> int:
    """How many items at the beginning are the same, up to `most`."""
    for number, (one, other) in enumerate(islice(zip(first, second, strict=False), most)):
        if not _is_same(one, other):
            return number
    return most


def _is_same(one: AlignedItem, other: AlignedItem) -> bool:
    return (one.kind, one.exact, one.name, one.same) == (
        other.kind,
        other.exact,
        other.name,
        other.same,
    )


def _matchable(
    own: Sequence[AlignedItem], other: Sequence[AlignedItem], start: int, end: int
) -> list[int]:
    """The positions between the equal ends of items that some item of the other could be."""
    keys = {key for item in other[start : len(other) - end] for key in _keys(item)}
    return [k for k in range(start, len(own) - end) if not keys.isdisjoint(_keys(own[k]))]


def _keys(item: AlignedItem) -> list[tuple[int, str, int]]:
    named = (("sort", item.sort), ("name", item.name), ("inside", item.inside))
    return [(item.kind, what, number) for what, number in named if number]


def _best(first: Sequence[AlignedItem], second: Sequence[AlignedItem]) -> list[tuple[int, int]]:
    """By a table of the best worth of all beginnings, row by row; nothing is lost by leaving an
    item out.
    """
    columns = {
        name: np.array([getattr(item, name) for item in second]) for name in AlignedItem._fields
    }
    num_rows, num_columns = len(first), len(second)
    margin = num_columns
    if num_rows * num_columns > _MOST_CELLS:
        margin = max(_LEAST_MARGIN, _MOST_CELLS // (2 * num_rows))
    slope = num_columns / num_rows
    before = np.zeros(num_columns + 1)
    starts, choices = [], []
    for number, item in enumerate(first):
        low = max(0, int(number * slope) - margin)
        high = min(num_columns, int((number + 1) * slope) + margin + 1)
        worth = _worth(item, {name: column[low:high] for name, column in columns.items()})
        matched = np.where(worth > 0, before[low:high] + worth, -1.0)
        row = before.copy()
        row[low + 1 : high + 1] = np.maximum(row[low + 1 : high + 1], matched)
        row = np.maximum.accumulate(row)
        is_above = row[low + 1 : high + 1] == before[low + 1 : high + 1]
        is_matched = (row[low + 1 : high + 1] == matched) & ~is_above
        choices.append(
            np.where(is_matched, _MATCHED, np.where(is_above, _ABOVE, _LEFT)).astype(np.uint8)
        )
        starts.append(low)
        before = row
    return _way_back(starts, choices, num_columns)


def _way_back(
    starts: list[int], choices: list[np.ndarray], num_columns: int
) -> list[tuple[int, int]]:
    """The pairs that were matched on the best way through the table, from its end."""
    found = []
    a, b = len(starts), num_columns
    while a and b:
        choice, at = choices[a - 1], b - 1 - starts[a - 1]
        step = _ABOVE if at < 0 else _LEFT if at >= len(choice) else int(choice[at])
        if step == _MATCHED:
            found.append((a - 1, b - 1))
            a, b = a - 1, b - 1
        elif step == _ABOVE:
            a -= 1
        else:
            b -= 1
    return found[::-1]


def _worth(item: AlignedItem, others: dict[str, np.ndarray]) -> np.ndarray:
    def shares(name: str) -> np.ndarray:
        number = getattr(item, name)
        shared: np.ndarray = (others[name] == number) & (number != 0)
        return shared

    may = (others["kind"] == item.kind) & (shares("sort") | shares("name") | shares("inside"))
    total = sum(worth * shares(name) for name, worth in _WORTH.items()) + _PLACE_WORTH * shares(
        "place"
    )
    worth: np.ndarray = may * total * np.minimum(others["weight"], item.weight)
    return worth
