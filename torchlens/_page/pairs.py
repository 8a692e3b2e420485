"""Pairs the corresponding parts of two pages, operations and boxes: by their entries, or as the
caller says.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchlens._history.correspondence import Matching
from torchlens._history.model_history import ModelHistory
from torchlens._page.page_data import Carried
from torchlens._page.parts import Part
from torchlens._text.error_wording import got


@dataclass(frozen=True, slots=True)
class ShownPair:
    """Two things that correspond in two histories, and what to say about them.

    `a` and `b` are any keys that find a layer, or addresses of modules; None if there is no
    counterpart. A pair with a `note` is listed among the differences. `error` is the relative error
    between the two values. `colour` is any CSS colour; by default, it shows how the two differ.

    >>> ShownPair('h.0.ln_1', 'blocks.0.norm1', note='an eps?', error=5.6e-3, colour='crimson')
    """

    a: str | None
    b: str | None
    note: str = ""
    error: float | None = None
    colour: str = ""


class Side(NamedTuple):
    """One of the two histories, and the data of its page."""

    history: ModelHistory
    carried: Carried

    @property
    def above(self) -> list[int]:
        """The box around each part; -1 around the outermost."""
        above: list[int] = self.carried.data["parts"]["parent"]
        return above

    def boxes_around(self, number: int) -> list[int]:
        """The boxes around a part, from inside to outside, without the outermost."""
        found = []
        while (number := self.above[number]) > 0:
            found.append(number)
        return found


@dataclass(slots=True)
class PartPair:
    """Two parts, by their numbers in the pages (-1 for none), and the pairs of entries in them."""

    a: int
    b: int
    entries: list[tuple[int, int]] = field(default_factory=list)
    note: str = ""
    error: float | None = None
    colour: str = ""


def matched_pairs(a: Side, b: Side, matching: Matching) -> list[PartPair]:
    """Pairs parts whose entries and module calls are matched."""
    votes: Counter[tuple[int, int]] = Counter()
    homes = _part_of_calls(a.carried.parts), _part_of_calls(b.carried.parts)
    matched = {one for one, _ in matching.entries}, {other for _, other in matching.entries}
    for one, other in matching.calls:
        if one in homes[0] and other in homes[1]:
            mine, theirs = homes[0][one], homes[1][other]
            if not _is_one_of_several(a.carried.parts[mine], b.carried.parts[theirs], matched):
                votes[mine, theirs] += 1
    modules = [PartPair(*pair) for pair in _elected(votes, (set(), set()))]
    return _joined(a, b, modules, [*matching.entries, *_failed_calls(a, b)])


def _is_one_of_several(one: Part, other: Part, matched: tuple[set[int], set[int]]) -> bool:
    """True if a module is one operation in one history, and several in the other.

    Then that operation is paired with its counterpart, not with the box around it.
    """
    if (one.kind == "operation") == (other.kind == "operation"):
        return False
    which, unit = (0, one) if one.kind == "operation" else (1, other)
    return any(entry in matched[which] for own in unit.passes for entry in own)


def _failed_calls(a: Side, b: Side) -> list[tuple[int, int]]:
    """Pairs the failed calls, which come after the last entry, if the same operation failed."""
    logs = a.history._log, b.history._log
    failures = [log.recording.failure for log in logs]
    names = [
        failure.operation.name if failure and failure.operation else "" for failure in failures
    ]
    if failures[0] is None or failures[1] is None or names[0] != names[1]:
        return []
    return [(len(logs[0].graph.recorded), len(logs[1].graph.recorded))]


def _as_pair(given: Any) -> ShownPair:
    """Reads a pair given by the caller: `(a, b)`, or a dict such as `{'a': ..., 'note': ...}`."""
    if isinstance(given, ShownPair):
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        return ShownPair(*given)
    known = {"a": None, "b": None, "note": "", "error": None, "colour": ""}
    if not isinstance(given, Mapping) or not given.keys() <= known.keys():
        raise TypeError(
            "pairs must be made of tuples (a, b) or dicts with the keys a, b, note, error and "
            f"colour, got {got(given)} in it."
        )
    return ShownPair(**(known | dict(given)))


def given_pairs(a: Side, b: Side, pairs: Iterable[Any]) -> list[PartPair]:
    """Pairs the parts that the caller names, and the boxes that contain most of them."""
    found: list[PartPair] = []
    entries: list[tuple[int, int]] = []
    for pair in pairs:
        pair = _as_pair(pair)
        if pair.a is None and pair.b is None:
            raise ValueError(
                "A pair must name something in at least one of the two histories, got None for "
                "both."
            )
        mine, theirs = _find(a, pair.a, "a"), _find(b, pair.b, "b")
        parts = zip(mine[0] or [-1], theirs[0] or [-1], strict=False)
        found += [
            PartPair(one, other, [], pair.note, pair.error, pair.colour) for one, other in parts
        ]
        entries += zip(mine[1], theirs[1], strict=False)
    return _joined(a, b, found, entries)


def _find(side: Side, key: str | None, name: str) -> tuple[list[int], list[int]]:
    """The parts that a key names, and the entries of all their passes."""
    if key is None:
        return [], []
    boxes = [
        number
        for number, part in enumerate(side.carried.parts)
        if part.address and part.address == key
    ]
    try:
        entries = side.history._lookup.many(key)
    except ValueError as error:
        if not boxes:
            raise ValueError(
                f"A pair names {key!r} in the history {name}, and no layer has that name."
            ) from error
        return boxes, []
    parts = boxes or list(dict.fromkeys(side.carried.part_of[entry] for entry in entries))
    return parts, entries


def _part_of_calls(parts: Sequence[Part]) -> dict[int, int]:
    return {call: number for number, part in enumerate(parts) if number for call in part.calls}


def _joined(
    a: Side, b: Side, known: list[PartPair], entries: Sequence[tuple[int, int]]
) -> list[PartPair]:
    """Known pairs, then those of operations and boxes that share the most entries."""
    homes = a.carried.part_of, b.carried.part_of
    shared: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for one, other in entries:
        if one in homes[0] and other in homes[1]:
            shared[homes[0][one], homes[1][other]].append((one, other))
    taken = {pair.a for pair in known}, {pair.b for pair in known}
    for pair in known:
        pair.entries = shared.get((pair.a, pair.b), [])
    units = Counter({pair: len(own) for pair, own in shared.items()})
    found = [PartPair(*pair, shared[pair]) for pair in _elected(units, taken)]
    boxes = [PartPair(*pair) for pair in _elected(_box_votes(a, b, units), taken)]
    return [PartPair(0, 0), *known, *found, *boxes]


def _box_votes(a: Side, b: Side, units: Counter[tuple[int, int]]) -> Counter[tuple[int, int]]:
    """The share of two boxes' operations that are paired with each other, in thousandths. Between
    equal shares, boxes of the same kind and address win.
    """
    votes: Counter[tuple[int, int]] = Counter()
    sizes: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for (one, other), count in units.items():
        chains = a.boxes_around(one), b.boxes_around(other)
        for mine in chains[0]:
            sizes[0][mine] += count
            for theirs in chains[1]:
                votes[mine, theirs] += count
        for theirs in chains[1]:
            sizes[1][theirs] += count

    def share(mine: int, theirs: int, count: int) -> int:
        one, other = a.carried.parts[mine], b.carried.parts[theirs]
        likeness = 2 * (one.kind == other.kind) + (one.address == other.address)
        return 1 + 4 * (1000 * count // (sizes[0][mine] + sizes[1][theirs] - count)) + likeness

    return Counter({pair: share(*pair, count) for pair, count in votes.items()})


def _elected(
    votes: Counter[tuple[int, int]], taken: tuple[set[int], set[int]]
) -> list[tuple[int, int]]:
    """The pairs with the most votes, of parts that are not in `taken`, and are added to it."""
    found = []
    for (one, other), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
        if one not in taken[0] and other not in taken[1]:
            taken[0].add(one)
            taken[1].add(other)
            found.append((one, other))
    return sorted(found)
