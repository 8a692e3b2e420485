"""The data about the sections of an origin from which reasons are found: values, weights,
constants, and results of running a section again.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchlens._diff.compared_model import ComparedModel, family
from torchlens._diff.divergence import ErrorOrigin, Section
from torchlens._diff.layouts import best_layout
from torchlens._diff.matching import Pairing
from torchlens._diff.weights import WeightMatch
from torchlens._history.argument_words import plain_argument
from torchlens._recording.functions import argument_names
from torchlens._recording.recording import Row
from torchlens._recording.tolerance import comparable, dense, numbers, relative_error
from torchlens._replay.replay import Instead, Replay
from torchlens.errors import NotReplayableError

Tensor = torch.Tensor
# Fingerprints of the same numbers in another order differ by less, because of rounding.
_SAME_NUMBERS = 1e-3
# Names of arguments that say nothing about what is computed.
_NOISE = {
    *("", "self", "input", "other", "cudnn_enabled", "generator", "inplace", "keepdim"),
    *("enable_gqa", "sparse", "benchmark"),
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

    @property
    def may_be_eps(self) -> bool:
        """True for a small positive fraction."""
        return isinstance(self.value, float) and 0 < self.value <= 0.01

    def is_same(self, other: "Constant") -> bool:
        """True if both mean the same: dividing by a number is multiplying by its inverse."""
        first, second = self.value, other.value
        if isinstance(first, bool) or isinstance(second, bool):
            return first is second and self.name == other.name
        if isinstance(first, float | int) and isinstance(second, float | int):
            near = abs(first - second) <= 1e-5 * max(abs(first), abs(second))
            return near or (first * second != 0 and abs(first * second - 1) <= 1e-5)
        if isinstance(first, list | tuple) and isinstance(second, list | tuple):
            return [*first] == [*second]
        return bool(first == second)

    def against(self, other: "Constant") -> str:
        """`eps 1e-05 in the reference, 1e-06 in the candidate`"""
        name = self.name if self.name == other.name and self.name not in _NOISE else ""
        name = "eps" if self.may_be_eps else name
        return f"{name} {self} in the reference, {other} in the candidate".strip()


def number_text(value: Any) -> str:
    """A number as a reason prints it."""
    return f"{value:.6g}" if isinstance(value, float) else plain_argument(value)


@dataclass
class TriedChange:
    """A change to a section that runs again: weights by number, functions by entry, values by
    entry. `says` is the reason if it removes the error.
    """

    says: str
    weights: dict[int, Tensor] = field(default_factory=dict)
    instead: dict[int, Instead] = field(default_factory=dict)
    given: dict[int, Tensor] = field(default_factory=dict)
    of_reference: bool = False  # the reference's section runs, not the candidate's


class Evidence:
    """What is known about one origin: its sections, both models, their weights, and the operations
    that can run again.

    `theirs` has the values of the run in which the origin was found. `replays` are those of the two
    models.
    """

    def __init__(
        self,
        origin: ErrorOrigin,
        pairing: Pairing,
        theirs: ComparedModel,
        weights: WeightMatch,
        replays: tuple[Replay, Replay],
    ) -> None:
        self.pair, self.reference, self.candidate = origin.pair, origin.reference, origin.candidate
        self.models = self.ours, self.theirs = pairing.reference, theirs
        # Both models, each with its section and its name.
        self.sides = (
            (self.ours, self.reference, "reference"),
            (self.theirs, self.candidate, "candidate"),
        )
        self.weights = weights
        self.untried: list[str] = []  # experiments that cost too much
        self.can_run = replays[1].is_live  # whether the candidate's operations can run again
        self._replays = replays
        self._pairing = pairing

    # -- values
    # ----------------------------------------------------------------------------------------------

    def result(self) -> tuple[Tensor, Tensor] | None:
        """The results of both from the reference's inputs, in the reference's shape; None if no
        layout fits.
        """
        a, layout = self.ours.value(self.pair.reference), self.pair.layout
        b = self.candidate_result()
        if a is None or b is None or layout is None:
            return None
        return numbers(a), layout.to_reference(numbers(b), tuple(a.shape))

    def candidate_result(self) -> Tensor | None:
        """The candidate's result, from running the section again if that is possible."""
        if self.can_run:
            try:
                return dense(self.again())
            except NotReplayableError:
                pass
        # A replaced value is the reference's.
        is_replaced = self.theirs.is_replaced(self.pair.candidate)
        return None if is_replaced else self.theirs.value(self.pair.candidate)

    def inputs(self) -> list[Tensor]:
        """The floating-point inputs of the reference's section."""
        values = [self.ours.value(entry) for entry in self.reference.inputs]
        return [numbers(v) for v in values if v is not None and v.dtype.is_floating_point]

    def input_units(self) -> float:
        """The largest error of the inputs, in units of rounding."""
        pairs = [self._pairing.of[0].get(entry) for entry in self.reference.inputs]
        return max((pair.units for pair in pairs if pair is not None), default=0.0)

    def reference_of(self, entry: int) -> int | None:
        """The entry of the reference whose value an entry of the candidate holds."""
        pair = self._pairing.at(1, entry)
        return None if pair is None else pair.reference

    def has_partner(self, entry: int) -> bool:
        """True if an entry of the reference has a pair."""
        return entry in self._pairing.of[0]

    # -- running again
    # ----------------------------------------------------------------------------------------------

    def units_left(self, change: TriedChange) -> float:
        """The error that is left with a change, in units of rounding; infinite if it cannot run."""
        try:
            result = dense(self.again(change))
        except NotReplayableError:
            return float("inf")
        if change.of_reference:
            return self.pair.units_between(result, self.candidate_result())
        target = self.ours.value(self.pair.reference)
        if self.pair.layout is not None or target is None or result is None:
            return self.pair.units_between(target, result)
        return best_layout(comparable(target), comparable(result), 0.0)[0] / self.pair.eps

    def again(self, change: TriedChange | None = None) -> Tensor:
        """The result of running a section again, from the inputs with which it was found."""
        change = change or TriedChange("")
        model = self.ours if change.of_reference else self.theirs
        replay = self._replays[not change.of_reference]
        if not replay.is_live:
            raise NotReplayableError("it is not live")
        entries = self.affected(change)
        parents = {parent for entry in entries for parent in model.parents[entry]}
        given = {entry: model.raw(entry) for entry in parents - {*entries}}
        if not all(isinstance(value, Tensor) for value in given.values()):
            raise NotReplayableError("an input was not saved")
        return replay.part(entries, given | change.given, change.weights, change.instead)

    def affected(self, change: TriedChange) -> Sequence[int]:
        """The entries that must run again for a change: those of the section that depend on it, or
        all if an operation writes in place or a value between them was not saved.
        """
        model, section = (
            (self.ours, self.reference) if change.of_reference else (self.theirs, self.candidate)
        )
        found: list[int] = []
        changed = {*change.instead, *change.given}
        for entry in section.entries:
            if model.rows[entry].operation.written or not isinstance(model.raw(entry), Tensor):
                return section.entries
            if (
                entry in change.instead
                or not changed.isdisjoint(model.parents[entry])
                or not change.weights.keys().isdisjoint(model.graph.params[entry])
            ):
                changed.add(entry)
                found.append(entry)
        is_whole = not found or found[-1] != section.entries[-1]
        return section.entries if is_whole else found

    # -- views
    # ----------------------------------------------------------------------------------------------

    def rearranged(self) -> Iterator[tuple[int, int]]:
        """Views of the sections and their inputs that have the same shape and the same numbers in
        another order.
        """
        for c in _views(self.theirs, self.candidate):
            for r in _views(self.ours, self.reference):
                a, b = self.ours.value(r), self.theirs.value(c)
                one, other = self.ours.prints[r], self.theirs.prints[c]
                if a is None or b is None or one is None or other is None:
                    continue
                is_other_order = a.shape == b.shape and a.dim() > 1
                if is_other_order and one.apart(other) <= _SAME_NUMBERS < relative_error(a, b):
                    yield r, c

    # -- weights
    # ----------------------------------------------------------------------------------------------

    def weights_of(self, model: ComparedModel, section: Section) -> list[int]:
        """The weights that a section reads."""
        return list(dict.fromkeys(w for entry in section.entries for w in model.own_weights[entry]))

    # -- constants
    # ----------------------------------------------------------------------------------------------

    def constants_apart(self) -> tuple[list[Constant], list[Constant]]:
        """The constants that only one of the two sections has: fractions, and those with names that
        the other has, too.
        """
        ours = _constants(self.ours, self.reference)
        theirs = _constants(self.theirs, self.candidate)
        return _apart(ours, theirs), _apart(theirs, ours)


def _apart(own: Sequence[Constant], other: Sequence[Constant]) -> list[Constant]:
    names = {constant.name for constant in other} - _NOISE
    return [
        one
        for one in own
        if (isinstance(one.value, float) or one.name in names)
        and not any(one.is_same(another) for another in other)
    ]


def _views(model: ComparedModel, section: Section) -> list[int]:
    """The views in a section and among its inputs."""
    read = {parent for entry in section.entries for parent in model.parents[entry]}
    views = [entry for entry in section.entries if family(model.type_of(entry)) == "view"]
    given = sorted(read - set(section.entries))
    return [*views, *(entry for entry in given if model.root[entry] != entry)]


def _constants(model: ComparedModel, section: Section) -> list[Constant]:
    """Numbers and flags of the operations of a section, without those of views and joins."""
    found: list[Constant] = []
    for entry in section.entries:
        row = model.rows[entry]
        if model.is_operation(entry) and family(row.operation.layer_type) not in ("view", "join"):
            found += _constants_of(entry, row)
    return found


def _constants_of(entry: int, row: Row) -> Iterator[Constant]:
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
