"""What is known about the sections in which an error lies: values, weights, constants, and their
results when run again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchlens._diff.divergence import Origin, Section
from torchlens._diff.families import family
from torchlens._diff.layouts import best_layout
from torchlens._diff.matching import Pairing
from torchlens._diff.subject import Subject
from torchlens._diff.weights import WeightMatch
from torchlens._history.argument_words import plain_argument
from torchlens._recording.functions import argument_names
from torchlens._recording.recording import Row
from torchlens._recording.relative_error import comparable, dense, numbers, relative_error
from torchlens._replay.replay import Instead, NotReplayableError, Replay

Tensor = torch.Tensor
_SHAPING = ("view", "join")
# how far apart the moments and quantiles of the same numbers are at most, but for rounding
_SAME_NUMBERS = 1e-3
# Names of arguments that say nothing about what is computed.
_NOISE = {
    "",
    "self",
    "input",
    "other",
    "cudnn_enabled",
    "generator",
    "inplace",
    "keepdim",
    "enable_gqa",
    "sparse",
    "benchmark",
}


@dataclass(frozen=True)
class Constant:
    """A number or a flag among the arguments of an operation."""

    entry: int
    location: Any  # position or keyword
    name: str
    value: Any

    def __str__(self) -> str:
        return number_text(self.value)

    def is_same(self, other: "Constant") -> bool:
        """Whether it stands for the same: dividing by a number is multiplying by its inverse."""
        first, second = self.value, other.value
        if isinstance(first, bool) or isinstance(second, bool):
            return first is second
        if isinstance(first, float | int) and isinstance(second, float | int):
            near = abs(first - second) <= 1e-5 * max(abs(first), abs(second))
            return near or (first * second != 0 and abs(first * second - 1) <= 1e-5)
        if isinstance(first, list | tuple) and isinstance(second, list | tuple):
            return [*first] == [*second]
        return bool(first == second)

    def against(self, other: "Constant") -> str:
        """`eps 1e-05 in the reference, 1e-06 in the candidate`."""
        is_eps = isinstance(self.value, float) and 0 < self.value <= 0.01
        name = (
            "eps"
            if is_eps
            else self.name
            if self.name == other.name and self.name not in _NOISE
            else ""
        )
        return f"{name} {self} in the reference, {other} in the candidate".strip()


def number_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else plain_argument(value)


class Evidence:
    """Both sides, their weights, and the candidate's operations if they can run again."""

    def __init__(
        self,
        ours: Subject,
        theirs: Subject,
        weights: WeightMatch,
        replays: tuple[Replay, Replay],
        pairing: Pairing,
    ) -> None:
        self.ours = ours
        self.theirs = theirs
        self.weights = weights
        self.reference_replay, self.replay = (
            replay if replay.is_live else None for replay in replays
        )
        self._pairs = pairing.found.of_reference
        self._found = pairing.found

    # -- values
    # ----------------------------------------------------------------------------------------------

    def result(self, origin: Origin) -> tuple[Tensor, Tensor] | None:
        """What the two computed from the reference's inputs, both in the reference's shape; None
        where shapes differ.
        """
        a, layout = self.ours.side.value(origin.pair.reference), origin.pair.layout
        b = self.candidate_result(origin)
        if a is None or b is None or layout is None:
            return None
        return numbers(a), layout.to_reference(numbers(b), tuple(a.shape))

    def candidate_result(self, origin: Origin) -> Tensor | None:
        """What the candidate computes from the inputs it had, or has when it runs again."""
        if self.replay is not None:
            try:
                return dense(self.again(origin))
            except NotReplayableError:
                pass
        return self.theirs.side.value(origin.pair.candidate)

    def again(
        self,
        origin: Origin,
        weights: dict[int, Tensor] | None = None,
        instead: dict[int, Instead] | None = None,
        of_reference: bool = False,
        given_instead: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """What a section gives when it runs again, from the inputs of the round in which it was
        found, or others.
        """
        replay = self.reference_replay if of_reference else self.replay
        if replay is None:
            raise NotReplayableError("it is not live")
        section = origin.reference if of_reference else origin.candidate
        side = self.ours.side if of_reference else self.theirs.side
        given = {}
        inside = set(section.entries)
        for entry in {parent for own in section.entries for parent in side.parents[own]} - inside:
            value = side.raw(entry)
            if not isinstance(value, Tensor):
                raise NotReplayableError("an input was not saved")
            given[entry] = value
        return replay.part(section.entries, given | (given_instead or {}), weights, instead)

    def units(self, origin: Origin, candidate: Tensor) -> float:
        """How far a result of the candidate's is from the reference's, in units of rounding."""
        a, b = self.ours.side.value(origin.pair.reference), dense(candidate)
        if a is None or b is None or a.numel() != b.numel():
            return float("inf")
        if origin.pair.layout is None:
            return best_layout(comparable(a), comparable(b), 0.0)[0] / origin.pair.eps
        back = origin.pair.layout.to_reference(comparable(b), tuple(a.shape))
        return relative_error(comparable(a), back) / origin.pair.eps

    def units_between(self, origin: Origin, reference: Tensor) -> float:
        """How far something that the reference might have computed is from what the candidate did,
        in units of rounding.
        """
        layout, b, a = origin.pair.layout, self.candidate_result(origin), dense(reference)
        if layout is None or b is None or a is None or b.numel() != a.numel():
            return float("inf")
        return (
            relative_error(comparable(a), layout.to_reference(comparable(b), tuple(a.shape)))
            / origin.pair.eps
        )

    def inputs(self, origin: Origin) -> list[Tensor]:
        """The numbers that go into the reference's section."""
        values = [self.ours.side.value(entry) for entry in origin.reference.inputs]
        return [
            numbers(value)
            for value in values
            if value is not None and value.dtype.is_floating_point
        ]

    def input_units(self, origin: Origin) -> float:
        """How far the inputs are apart."""
        return max(
            (self._pairs[e].units for e in origin.reference.inputs if e in self._pairs), default=0.0
        )

    def reference_of(self, entry: int) -> int | None:
        """The entry of the reference that an entry of the candidate is."""
        pair = self._found.of_candidate.get(entry) or self._found.twins[1].get(entry)
        return None if pair is None else pair.reference

    def has_partner(self, entry: int) -> bool:
        return entry in self._pairs

    # -- views
    # ----------------------------------------------------------------------------------------------

    def rearranged(self, origin: Origin) -> Iterator[tuple[int, int]]:
        """Views, in the sections and where they read, that show the same numbers in one shape, but
        in another order.
        """
        ours, theirs = _views(self.ours, origin.reference), _views(self.theirs, origin.candidate)
        for c in theirs:
            for r in ours:
                a, b = self.ours.side.value(r), self.theirs.side.value(c)
                one, other = self.ours.prints[r], self.theirs.prints[c]
                if (
                    a is None
                    or b is None
                    or a.shape != b.shape
                    or a.dim() < 2
                    or one is None
                    or other is None
                ):
                    continue
                if one.apart(other) <= _SAME_NUMBERS < relative_error(comparable(a), comparable(b)):
                    yield r, c

    # -- weights
    # ----------------------------------------------------------------------------------------------

    def weights_of(self, subject: Subject, section: Section) -> list[int]:
        found: dict[int, None] = {}
        for entry in section.entries:
            found.update(dict.fromkeys(subject.side.own_weights[entry]))
        return list(found)

    def names(self, subject: Subject, weights: list[int]) -> str:
        return ", ".join(f"`{subject.side.weights[number].name}`" for number in weights[:3])

    # -- constants
    # ----------------------------------------------------------------------------------------------

    def constants_apart(self, origin: Origin) -> tuple[list[Constant], list[Constant]]:
        """The constants that only one of the two sections has: fractions, and all else that has a
        namesake in the other.
        """
        ours, theirs = (
            self.constants(self.ours, origin.reference),
            self.constants(self.theirs, origin.candidate),
        )
        found = []
        for own, other in ((ours, theirs), (theirs, ours)):
            names = {constant.name for constant in other} - _NOISE
            apart = [one for one in own if not any(one.is_same(another) for another in other)]
            found.append(
                [one for one in apart if isinstance(one.value, float) or one.name in names]
            )
        return found[0], found[1]

    def constants(self, subject: Subject, section: Section) -> list[Constant]:
        """Numbers and flags of the operations of a section; sizes of views and the like are
        none.
        """
        found: list[Constant] = []
        for entry in section.entries:
            row = subject.side.rows[entry]
            if (
                subject.side.is_operation(entry)
                and family(row.operation.layer_type) not in _SHAPING
            ):
                found += _constants(entry, row)
        return found


def _views(subject: Subject, section: Section) -> list[int]:
    """The views in a section, and those of what it is given."""
    inside = set(section.entries)
    read = {parent for entry in section.entries for parent in subject.side.parents[entry]} - inside
    views = [entry for entry in section.entries if family(subject.side.type_of(entry)) == "view"]
    return [*views, *sorted(entry for entry in read if subject.root[entry] != entry)]


def _constants(entry: int, row: Row) -> Iterator[Constant]:
    names = argument_names(row.operation.func) if callable(row.operation.func) else ()
    for position, value in enumerate(row.args):
        if _is_constant(value):
            name = names[position] if position < len(names) else ""
            yield Constant(entry, position, name, value)
    for name, value in (row.kwargs or {}).items():
        if _is_constant(value):
            yield Constant(entry, name, name, value)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple) and any(isinstance(item, slice) for item in value):
        return all(isinstance(item, int | slice | type(Ellipsis) | None) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, int | float) for item in value)
    return isinstance(value, bool | int | str)
