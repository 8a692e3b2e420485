"""What differs between two histories whose parts are paired: in which way, by how much, and what
follows from what.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlens._history.argument_words import argument_words
from torchlens._history.log import Log
from torchlens._page.pairs import PartPair, Side
from torchlens._page.parts import Part
from torchlens._recording.operation_kinds import SAME_NUMBERS
from torchlens._recording.relative_error import dense, is_rounding, relative_error

# From the strongest to the weakest; the page paints a part by the first that it has.
KINDS_OF_DIFFERENCE = (
    "removed", "added", "operation", "passes", "argument", "parameters", "weights", "shape",
    "dtype", "values", "name",
    "note",
)  # fmt: skip
_UNMATCHED = frozenset(
    {"removed", "added", "operation", "passes"}
)  # what says that something has no counterpart
_CARRIED = frozenset(
    {"shape", "dtype", "values"}
)  # what an operation hands on to those that read it


@dataclass(slots=True)
class Difference:
    """One difference: the parts (-1 for none), what to say by kind, and whether it only follows
    from what they read.
    """

    a: int
    b: int
    words: dict[str, str] = field(default_factory=dict)
    error: float | None = None
    colour: str = ""
    follows: bool = False
    is_listed: bool = True


def given_differences(pairs: Sequence[PartPair]) -> list[Difference]:
    """What the caller says: pairs with a note, and parts without a counterpart."""
    found = []
    for pair in pairs:
        words = {"removed": ""} if pair.b < 0 else {"added": ""} if pair.a < 0 else {}
        if pair.note:
            words["note"] = pair.note
        if words or pair.error is not None or pair.colour:
            found.append(
                Difference(pair.a, pair.b, words, pair.error, pair.colour, is_listed=bool(words))
            )
    return found


def find_differences(a: Side, b: Side, pairs: Sequence[PartPair]) -> list[Difference]:
    """All differences, in the order in which the models come to them."""
    return _Finder(a, b, pairs).find()


class _Finder:
    def __init__(self, a: Side, b: Side, pairs: Sequence[PartPair]) -> None:
        self.a, self.b = a, b
        self.logs: tuple[Log, Log] = a.history._log, b.history._log
        self.pairs = pairs
        self.paired_parts = {
            (id(a.carried.parts[pair.a]), id(b.carried.parts[pair.b])) for pair in pairs
        }
        self.weights: dict[tuple[int, int], float | None] = {}
        self.matched = (
            {one for pair in pairs for one, _ in pair.entries},
            {other for pair in pairs for _, other in pair.entries},
        )
        self.carries: tuple[set[int], set[int]] = (
            set(),
            set(),
        )  # entries that hand on something else than their partners

    def find(self) -> list[Difference]:
        by_entry = [difference for pair in self.pairs for difference in self._of_pair(pair)]
        paired = {pair.a for pair in self.pairs}, {pair.b for pair in self.pairs}
        gone = [
            *self._without(self.a, paired[0], lambda part: Difference(part, -1, {"removed": ""})),
            *self._without(self.b, paired[1], lambda part: Difference(-1, part, {"added": ""})),
        ]
        self._mark_followers(by_entry)
        found = [*by_entry, *gone]
        found += [*self._passed_over(0, found), *self._passed_over(1, found)]
        return sorted(found, key=self._order())

    def _passed_over(self, which: int, found: Sequence[Difference]) -> Iterator[Difference]:
        """Operations with passes that have no counterpart, unless something listed, or around them,
        already says so.
        """
        side = (self.a, self.b)[which]
        listed = {
            (one.a, one.b)[which]
            for one in found
            if one.is_listed and _UNMATCHED & one.words.keys()
        }
        above, partner = (
            side.carried.data["parts"]["parent"],
            {(pair.a, pair.b)[which]: pair for pair in self.pairs},
        )
        for number, part in enumerate(side.carried.parts):
            missing = sum(own[0] not in self.matched[which] for own in part.passes)
            around = number
            while around > 0 and around not in listed:
                around = above[around]
            if not missing or around > 0 or number not in partner:
                continue
            if part.passes[0][0] < len(
                side.history._log.graph.recorded
            ):  # not the call that failed
                text = f"{missing} of {len(part.passes)} without a counterpart"
                yield Difference(partner[number].a, partner[number].b, {"passes": text})

    # -- pairs
    # ----------------------------------------------------------------------------------------------

    def _of_pair(self, pair: PartPair) -> Iterator[Difference]:
        one, other = self.a.carried.parts[pair.a], self.b.carried.parts[pair.b]
        found = Difference(pair.a, pair.b)
        self._compare_boxes(one, other, found, pair)
        if one.kind == other.kind == "operation":
            for mine, theirs in pair.entries:
                if mine < len(self.logs[0].graph.recorded):  # what failed made nothing to compare
                    self._compare(mine, theirs, found)
        if found.words:
            yield found

    def _compare_boxes(self, one: Part, other: Part, found: Difference, pair: PartPair) -> None:
        if pair.a and one.address and other.address:
            names = one.address.rpartition(".")[2], other.address.rpartition(".")[2]
            if names[0] != names[1] and not (names[0].isdecimal() and names[1].isdecimal()):
                found.words["name"] = f"{one.address} → {other.address}"
            kinds = [
                log.recording.module_classes.get(part.address, "")
                for log, part in zip(self.logs, (one, other), strict=True)
            ]
            if kinds[0] != kinds[1]:
                found.words["operation"] = f"{kinds[0]} → {kinds[1]}"
        # Identical parts that are folded are no passes of anything: one that was changed among them
        # leaves two rows.
        is_folded = "repeat" in (one.kind, other.kind)
        if (
            one.num_passes != other.num_passes
            and not is_folded
            and not self._differ_above(one, other)
        ):
            found.words["passes"] = f"× {one.num_passes} → × {other.num_passes}"

    def _differ_above(self, one: Part, other: Part) -> bool:
        """Whether what is around two parts is a pair that runs another number of times, so that it
        is said of that.
        """
        if (
            one.above is None
            or other.above is None
            or one.above.num_passes == other.above.num_passes
        ):
            return False
        return (id(one.above), id(other.above)) in self.paired_parts

    def _compare(self, mine: int, theirs: int, found: Difference) -> None:
        """Adds what differs between two entries to what is known of their parts: what the first
        pass says stays.
        """
        rows = [log.row(entry) for log, entry in zip(self.logs, (mine, theirs), strict=True)]
        words: dict[str, str] = {}
        names = [row.operation.layer_type for row in rows]
        if names[0] != names[1]:
            words["operation"] = f"{names[0]} → {names[1]}"
        shapes = ["×".join(map(str, row.shape)) or "scalar" for row in rows]
        if shapes[0] != shapes[1]:
            words["shape"] = f"{shapes[0]} → {shapes[1]}"
        if rows[0].dtype != rows[1].dtype:
            words["dtype"] = " → ".join(str(row.dtype).removeprefix("torch.") for row in rows)
        given = [
            "" if entry in log.boundary_addresses else argument_words(log.recording, row)
            for log, entry, row in zip(self.logs, (mine, theirs), rows, strict=True)
        ]
        if given[0] != given[1] and "operation" not in words:
            words["argument"] = _changed_words(*given)
        words |= self._compare_params(mine, theirs)
        error = self._error(mine, theirs)
        if error is not None and "shape" not in words:
            if error and not is_rounding(error, *(row.dtype for row in rows)):
                words["values"] = f"relative error {_error_text(error)}"
            found.error = error if found.error is None else max(found.error, error)
        if words.keys() & _CARRIED or error:
            self.carries[0].add(mine)
            self.carries[1].add(theirs)
        worse = "values" in words and "values" in found.words
        for kind, text in words.items():
            found.words.setdefault(kind, text)
        if worse and found.error is not None:
            found.words["values"] = f"relative error up to {_error_text(found.error)}"

    def _error(self, mine: int, theirs: int) -> float | None:
        values = []
        for log, entry in zip(self.logs, (mine, theirs), strict=True):
            number = log.graph.recorded[entry]
            value, version = log.recording.values[number], log.recording.versions[number]
            if value is None or (version >= 0 and value._version != version):
                return None
            values.append(value)
        return _error_between(*values)

    def _compare_params(self, mine: int, theirs: int) -> dict[str, str]:
        numbers = [
            log.graph.params[entry] for log, entry in zip(self.logs, (mine, theirs), strict=True)
        ]
        held = [
            [log.recording.params[number] for number in own]
            for log, own in zip(self.logs, numbers, strict=True)
        ]
        shapes = [["×".join(map(str, param.shape)) or "scalar" for param in own] for own in held]
        if shapes[0] != shapes[1]:
            return {
                "parameters": f"{', '.join(shapes[0]) or 'none'} → {', '.join(shapes[1]) or 'none'}"
            }
        worst = 0.0
        for pair in zip(*numbers, strict=True):
            if pair not in self.weights:
                params = [
                    log.recording.params[number]
                    for log, number in zip(self.logs, pair, strict=True)
                ]
                self.weights[pair] = _error_between(*params)
            worst = max(worst, self.weights[pair] or 0.0)
        return {"weights": f"relative error {_error_text(worst)}"} if worst else {}

    # -- parts without a counterpart
    # -----------------------------------------------------------------------------------

    def _without(self, side: Side, paired: set[int], make: Any) -> Iterator[Difference]:
        """Boxes and operations without a counterpart; if that is true of everything in a box, only
        the box.
        """
        above = side.carried.data["parts"]["parent"]
        count = len(above)
        has_pair = [number in paired for number in range(count)]
        for number in range(count - 1, 0, -1):
            if has_pair[number]:
                has_pair[above[number]] = True
        for number in range(1, count):
            if has_pair[number] or not self._is_all_alone(side, number):
                continue
            found: Difference = make(number)
            found.is_listed = has_pair[above[number]] and not self._is_exchanged(
                side, above[number], paired
            )
            yield found

    def _is_exchanged(self, side: Side, box: int, paired: set[int]) -> bool:
        """Whether a box is paired with a single operation: that it does something else is said of
        the box.
        """
        if box == 0 or box not in paired:
            return False
        pair = next(pair for pair in self.pairs if (pair.a if side is self.a else pair.b) == box)
        return (
            self.b.carried.parts[pair.b] if side is self.a else self.a.carried.parts[pair.a]
        ).kind == "operation"

    def _is_all_alone(self, side: Side, number: int) -> bool:
        """Whether no entry of an operation has a partner; some passes of it may, and be shown
        elsewhere.
        """
        part = side.carried.parts[number]
        matched = self.matched[0 if side is self.a else 1]
        return not any(entry in matched for own in part.passes for entry in own)

    # -- the whole
    # ----------------------------------------------------------------------------------------------

    def _mark_followers(self, found: Sequence[Difference]) -> None:
        """Which differ only in what they hand on, and read something that differs."""
        entries: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for pair in self.pairs:
            entries[pair.a, pair.b] += pair.entries
        for difference in found:
            own = entries[difference.a, difference.b]
            kinds = set(difference.words)
            if own and kinds & {"argument"} and "shape" in kinds and self._is_view(own[0][0]):
                kinds -= {
                    "argument"
                }  # the sizes that a view is given are those of what it is a view of
            if not own or not kinds or kinds - _CARRIED:
                continue
            difference.follows = any(
                parent in self.carries[0] or parent not in self.matched[0]
                for one, _ in own
                for parent in self.logs[0].graph.parents[one]
            ) or any(
                parent in self.carries[1] or parent not in self.matched[1]
                for _, other in own
                for parent in self.logs[1].graph.parents[other]
            )

    def _is_view(self, entry: int) -> bool:
        return self.logs[0].row(entry).operation.layer_type in SAME_NUMBERS

    def _order(self) -> Any:
        """Sorts by where the first model comes to a part; what only the second has stands after
        what is before it there.
        """
        place = {pair.b: pair.a for pair in self.pairs}
        last, after = 0, []
        for number in range(len(self.b.carried.parts)):
            last = max(last, place.get(number, last))
            after.append(last)
        return lambda found: (found.a, 0, 0) if found.a >= 0 else (after[found.b], 1, found.b)


def _changed_words(mine: str, theirs: str) -> str:
    """`stride 1 → stride 2`: the words that the two do not share."""
    own, other = mine.split(", "), theirs.split(", ")
    left, right = (
        [word for word in own if word not in other],
        [word for word in other if word not in own],
    )
    return f"{', '.join(left) or 'default'} → {', '.join(right) or 'default'}"


def _error_text(error: float) -> str:
    return "∞" if math.isinf(error) else f"{error:.2g}"


def _error_between(reference: Any, other: Any) -> float | None:
    """The relative error of two values; None if they cannot be compared."""
    a, b = dense(reference), dense(other)
    return None if a is None or b is None or a.shape != b.shape else relative_error(a, b)
