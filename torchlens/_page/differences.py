"""Finds the differences between two histories whose parts are paired: their kinds, their sizes, and
which of them only follow from others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchlens._history.argument_words import argument_words
from torchlens._history.log import Log
from torchlens._page.pairs import PartPair, Side
from torchlens._page.parts import Part
from torchlens._recording.operation_kinds import SAME_NUMBERS
from torchlens._recording.recording import Row
from torchlens._recording.tolerance import dense, is_rounding, relative_error
from torchlens.errors import ValueChangedError

# From the strongest to the weakest; a part has the colour of its strongest difference.
KINDS_OF_DIFFERENCE = (
    "removed", "added", "operation", "passes", "argument", "parameters", "weights", "shape",
    "dtype", "values", "name", "note",
)  # fmt: skip
# Something has no counterpart.
_UNMATCHED = frozenset({"removed", "added", "operation", "passes"})
# The result differs, which the operations that read it inherit.
_CARRIED = frozenset({"shape", "dtype", "values"})


@dataclass(slots=True)
class Difference:
    """One difference between two parts (-1 for none). `words` has a text for each kind; it
    `follows` if the parts differ only because their inputs do.
    """

    a: int
    b: int
    words: dict[str, str] = field(default_factory=dict)
    error: float | None = None
    colour: str = ""
    follows: bool = False
    is_listed: bool = True


def given_differences(pairs: Sequence[PartPair]) -> list[Difference]:
    """The differences given by the caller: pairs with a note, and parts without a counterpart."""
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
    """All differences, in the order in which the models run."""
    return _DifferenceFinder((a, b), pairs).find()


class _DifferenceFinder:
    """Compares paired parts. `matched` has the paired entries of each side, `changed` those whose
    result differs from that of their partner.
    """

    def __init__(self, sides: tuple[Side, Side], pairs: Sequence[PartPair]) -> None:
        self.sides, self.pairs = sides, pairs
        self.logs: tuple[Log, Log] = sides[0].history._log, sides[1].history._log
        self.operations = _Operations(self.logs)
        self.pair_of = {pair.a: pair for pair in pairs}, {pair.b: pair for pair in pairs}
        self.paired_parts = {tuple(map(id, self._parts(pair))) for pair in pairs}
        entries = [own for pair in pairs for own in pair.entries]
        self.matched = {one for one, _ in entries}, {other for _, other in entries}
        self.changed: tuple[set[int], set[int]] = set(), set()

    def find(self) -> list[Difference]:
        found = [self._of_pair(pair) for pair in self.pairs]
        for difference, pair in zip(found, self.pairs, strict=True):
            difference.follows = self._follows(difference, pair)
        found = [one for one in found if one.words]
        found += [*self._without_counterpart(0), *self._without_counterpart(1)]
        found += [*self._unmatched_passes(0, found), *self._unmatched_passes(1, found)]
        return sorted(found, key=self._order())

    def _parts(self, pair: PartPair) -> tuple[Part, Part]:
        return self.sides[0].carried.parts[pair.a], self.sides[1].carried.parts[pair.b]

    # -- pairs -------------------------------------------------------------------------------------

    def _of_pair(self, pair: PartPair) -> Difference:
        one, other = self._parts(pair)
        found = Difference(pair.a, pair.b, _without_empty(self._box_changes(one, other)))
        if one.kind == other.kind == "operation":
            for entries in pair.entries:
                if entries[0] < len(self.logs[0].graph.recorded):  # a failed call has no result
                    self._add_operation(entries, found)
        return found

    def _box_changes(self, one: Part, other: Part) -> dict[str, str]:
        found: dict[str, str] = {}
        if one.address and other.address:
            names = one.address.rpartition(".")[2], other.address.rpartition(".")[2]
            if not (names[0].isdecimal() and names[1].isdecimal()) and names[0] != names[1]:
                found["name"] = _change(one.address, other.address)
            classes = [log.recording.module_classes for log in self.logs]
            found["operation"] = _change(
                classes[0].get(one.address, ""), classes[1].get(other.address, "")
            )
        # Folded parts are no passes: if one of several identical parts was changed, the others are
        # two groups.
        if "repeat" not in (one.kind, other.kind) and not self._boxes_differ_in_passes(one, other):
            found["passes"] = _change(f"× {one.num_passes}", f"× {other.num_passes}")
        return found

    def _boxes_differ_in_passes(self, one: Part, other: Part) -> bool:
        """True if the boxes around two parts are a pair with different numbers of passes, which is
        reported for the boxes.
        """
        boxes = one.above, other.above
        if boxes[0] is None or boxes[1] is None or boxes[0].num_passes == boxes[1].num_passes:
            return False
        return tuple(map(id, boxes)) in self.paired_parts

    def _add_operation(self, entries: tuple[int, int], found: Difference) -> None:
        """Adds what differs between two entries. Where passes differ in the same way, the text of
        the first stays.
        """
        words = self.operations.changes(entries)
        error = self.operations.error(entries)
        if error is not None and "shape" not in words:
            found.error = max(found.error or 0.0, error)
            words |= self._words_of_error(error, entries)
        if error or words.keys() & _CARRIED:
            self.changed[0].add(entries[0])
            self.changed[1].add(entries[1])
        is_several = "values" in words and "values" in found.words
        found.words = words | found.words
        if is_several and found.error is not None:
            found.words["values"] = f"relative error up to {_error_text(found.error)}"

    def _words_of_error(self, error: float, entries: tuple[int, int]) -> dict[str, str]:
        is_told = error and not self.operations.is_rounding(error, entries)
        return {"values": f"relative error {_error_text(error)}"} if is_told else {}

    def _follows(self, found: Difference, pair: PartPair) -> bool:
        """True if two parts differ only in their results, and read something that differs."""
        kinds = set(found.words)
        if "shape" in kinds and self.operations.is_view(pair.entries[0][0]):
            kinds.discard("argument")  # the sizes given to a view are those of its input
        if not kinds or kinds - _CARRIED:
            return False
        return any(
            parent in self.changed[which] or parent not in self.matched[which]
            for entries in pair.entries
            for which in (0, 1)
            for parent in self.logs[which].graph.parents[entries[which]]
        )

    # -- parts without a counterpart ---------------------------------------------------------------

    def _without_counterpart(self, which: int) -> Iterator[Difference]:
        """Boxes and operations without a counterpart. Listed is only the outermost box in which
        nothing has one.
        """
        above, pair_of = self.sides[which].above, self.pair_of[which]
        has_pair = set(pair_of)
        for number in range(len(above) - 1, 0, -1):
            if number in has_pair:
                has_pair.add(above[number])
        for number in range(1, len(above)):
            if number not in has_pair and not self._is_partly_matched(which, number):
                box = above[number]
                is_listed = box in has_pair and not self._is_exchanged(which, box)
                yield (
                    Difference(number, -1, {"removed": ""}, is_listed=is_listed)
                    if which == 0
                    else Difference(-1, number, {"added": ""}, is_listed=is_listed)
                )

    def _is_exchanged(self, which: int, box: int) -> bool:
        """True if a box is paired with a single operation: the box itself is then listed."""
        pair = self.pair_of[which].get(box)
        return box > 0 and pair is not None and self._parts(pair)[1 - which].kind == "operation"

    def _is_partly_matched(self, which: int, number: int) -> bool:
        """True if some passes of an operation have a counterpart, in another part."""
        passes = self.sides[which].carried.parts[number].passes
        return any(entry in self.matched[which] for own in passes for entry in own)

    def _unmatched_passes(self, which: int, found: Sequence[Difference]) -> Iterator[Difference]:
        """Paired operations with passes that have no counterpart, unless that is already listed for
        them or for a box around them.
        """
        side, pair_of = self.sides[which], self.pair_of[which]
        listed = {
            (one.a, one.b)[which]
            for one in found
            if one.is_listed and _UNMATCHED & one.words.keys()
        }
        for number, part in enumerate(side.carried.parts):
            missing = sum(own[0] not in self.matched[which] for own in part.passes)
            if (
                missing
                and number in pair_of
                and part.passes[0][0] < len(self.logs[which].graph.recorded)  # did not fail
                and listed.isdisjoint((number, *side.boxes_around(number)))
            ):
                text = f"{missing} of {len(part.passes)} without a counterpart"
                yield Difference(pair_of[number].a, pair_of[number].b, {"passes": text})

    def _order(self) -> Callable[[Difference], tuple[int, int, int]]:
        """Sorts by the first model's order. What only the second has comes after what it follows
        there.
        """
        last, after = 0, []
        for number in range(len(self.sides[1].carried.parts)):
            pair = self.pair_of[1].get(number)
            last = max(last, last if pair is None else pair.a)
            after.append(last)
        return lambda found: (found.a, 0, 0) if found.a >= 0 else (after[found.b], 1, found.b)


class _Operations:
    """Compares paired operations, given as the entries of both logs."""

    def __init__(self, logs: tuple[Log, Log]) -> None:
        self.logs = logs
        self.weight_errors: dict[tuple[int, int], float] = {}

    def changes(self, entries: tuple[int, int]) -> dict[str, str]:
        """Kind of difference → text, without the values."""
        one, other = self._rows(entries)
        found = {
            "operation": _change(one.operation.layer_type, other.operation.layer_type),
            "shape": _change(_size(one.shape), _size(other.shape)),
            "dtype": _change(str(one.dtype), str(other.dtype)).replace("torch.", ""),
            **self._param_changes(entries),
        }
        if not found["operation"]:
            found["argument"] = _changed_arguments(*self._arguments(entries))
        return _without_empty(found)

    def error(self, entries: tuple[int, int]) -> float | None:
        """The relative error of the saved values; None if they cannot be compared."""
        try:
            values = [log.value(entry) for log, entry in zip(self.logs, entries, strict=True)]
        except ValueChangedError:
            return None
        return _error_between(*values)

    def is_rounding(self, error: float, entries: tuple[int, int]) -> bool:
        """True if an error is within the rounding of the values' types."""
        return is_rounding(error, *(row.dtype for row in self._rows(entries)))

    def is_view(self, entry: int) -> bool:
        """True if an entry of the first log is a view, such as a reshape."""
        return self.logs[0].row(entry).operation.layer_type in SAME_NUMBERS

    def _rows(self, entries: tuple[int, int]) -> tuple[Row, Row]:
        return self.logs[0].row(entries[0]), self.logs[1].row(entries[1])

    def _arguments(self, entries: tuple[int, int]) -> list[str]:
        return [
            "" if entry in log.boundary_addresses else argument_words(log.recording, log.row(entry))
            for log, entry in zip(self.logs, entries, strict=True)
        ]

    def _param_changes(self, entries: tuple[int, int]) -> dict[str, str]:
        mine, theirs = (
            log.graph.params[entry] for log, entry in zip(self.logs, entries, strict=True)
        )
        shapes = [
            ", ".join(_size(log.recording.params[number].shape) for number in own) or "none"
            for log, own in zip(self.logs, (mine, theirs), strict=True)
        ]
        if shapes[0] != shapes[1]:
            return {"parameters": _change(*shapes)}
        worst = max(map(self._weight_error, mine, theirs), default=0.0)
        return {"weights": f"relative error {_error_text(worst)}" if worst else ""}

    def _weight_error(self, mine: int, theirs: int) -> float:
        """The relative error of two parameters; each pair is compared once."""
        if (mine, theirs) not in self.weight_errors:
            params = [log.recording.params for log in self.logs]
            error = _error_between(params[0][mine], params[1][theirs])
            self.weight_errors[mine, theirs] = error or 0.0
        return self.weight_errors[mine, theirs]


def _change(mine: str, theirs: str) -> str:
    """`3×3 → 5×5`; empty if the two are equal."""
    return "" if mine == theirs else f"{mine} → {theirs}"


def _without_empty(words: dict[str, str]) -> dict[str, str]:
    return {kind: text for kind, text in words.items() if text}


def _size(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _changed_arguments(mine: str, theirs: str) -> str:
    """`stride 1 → stride 2`: the arguments that the two do not share; empty if they are equal."""
    if mine == theirs:
        return ""
    own, other = mine.split(", "), theirs.split(", ")
    left = ", ".join(word for word in own if word not in other)
    right = ", ".join(word for word in other if word not in own)
    return f"{left or 'default'} → {right or 'default'}"


def _error_text(error: float) -> str:
    return "∞" if math.isinf(error) else f"{error:.2g}"


def _error_between(reference: Any, other: Any) -> float | None:
    """The relative error of two values; None if they cannot be compared."""
    a, b = dense(reference), dense(other)
    return None if a is None or b is None or a.shape != b.shape else relative_error(a, b)
