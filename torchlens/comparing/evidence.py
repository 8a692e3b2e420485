"""What is known of the regions that an error lies in: values, weights, constants, and what they give when run again."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchlens.capture.functions import argument_names
from torchlens.capture.recording import Row
from torchlens.comparing.distances import distance, numbers
from torchlens.comparing.divergence import Region
from torchlens.comparing.families import family
from torchlens.comparing.isolation import Origin
from torchlens.comparing.layouts import best_layout
from torchlens.comparing.matching import Pairing, Subject
from torchlens.comparing.replay import NotReplayableError, Replay
from torchlens.comparing.weights import WeightMatch

__all__ = ["Constant", "Evidence", "number_text"]

Tensor = torch.Tensor
_SHAPING = ("view", "lookup", "join")


@dataclass(frozen=True)
class Constant:
    """A number or a flag among the arguments of an operation."""

    entry: int
    location: Any  # position or keyword
    name: str
    value: Any

    def __str__(self) -> str:
        return number_text(self.value)


def number_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Evidence:
    """Both sides, their weights, and the candidate's operations if they can run again."""

    def __init__(
        self, ours: Subject, theirs: Subject, weights: WeightMatch, replay: Replay | None, pairing: Pairing
    ) -> None:
        self.ours = ours
        self.theirs = theirs
        self.weights = weights
        self.replay = replay
        self._pairs = pairing.found.of_reference
        self._found = pairing.found

    # -- values ----------------------------------------------------------------------------------------------------

    def result(self, origin: Origin) -> tuple[Tensor, Tensor] | None:
        """What the two computed from the reference's inputs, both in the reference's shape; None where shapes differ."""
        a, layout = self.ours.side.value(origin.pair.reference), origin.pair.layout
        b = self.candidate_result(origin)
        if a is None or b is None or layout is None:
            return None
        return numbers(a), layout.to_reference(numbers(b), tuple(a.shape))

    def candidate_result(self, origin: Origin) -> Tensor | None:
        """What the candidate computes from the inputs it had, or has when it runs again."""
        if self.replay is not None:
            try:
                return self.again(origin)
            except NotReplayableError:
                pass
        return self.theirs.side.value(origin.pair.candidate)

    def again(
        self,
        origin: Origin,
        weights: dict[int, Tensor] | None = None,
        constants: dict[int, dict[Any, Any]] | None = None,
    ) -> Tensor:
        """What the candidate's region gives, from the inputs of the round in which it was found."""
        if self.replay is None:
            raise NotReplayableError("the candidate is not live")
        region = origin.candidate
        given = {}
        inside = set(region.entries)
        for entry in {parent for own in region.entries for parent in self.theirs.side.parents[own]} - inside:
            value = self.theirs.side.value(entry)
            if value is None:
                raise NotReplayableError("an input was not saved")
            given[entry] = value
        return self.replay.part(region.entries, given, weights, constants)

    def units(self, origin: Origin, candidate: Tensor) -> float:
        """How far a result of the candidate's is from the reference's, in units of rounding."""
        a = self.ours.side.value(origin.pair.reference)
        if a is None or a.numel() != candidate.numel():
            return float("inf")
        if origin.pair.layout is None:
            return best_layout(numbers(a), numbers(candidate), 0.0)[0] / origin.pair.eps
        back = origin.pair.layout.to_reference(numbers(candidate), tuple(a.shape))
        return distance(numbers(a), back) / origin.pair.eps

    def inputs(self, origin: Origin) -> list[Tensor]:
        """The numbers that go into the reference's region."""
        values = [self.ours.side.value(entry) for entry in origin.reference.inputs]
        return [numbers(value) for value in values if value is not None and value.dtype.is_floating_point]

    def input_units(self, origin: Origin) -> float:
        """How far the inputs are apart."""
        return max((self._pairs[e].units for e in origin.reference.inputs if e in self._pairs), default=0.0)

    def reference_of(self, entry: int) -> int | None:
        """The entry of the reference that an entry of the candidate is."""
        pair = self._found.of_candidate.get(entry) or self._found.twins[1].get(entry)
        return None if pair is None else pair.reference

    def has_partner(self, entry: int) -> bool:
        return entry in self._pairs

    # -- weights ---------------------------------------------------------------------------------------------------

    def weights_of(self, subject: Subject, region: Region) -> list[int]:
        found: dict[int, None] = {}
        for entry in region.entries:
            found.update(dict.fromkeys(subject.side.own_weights[entry]))
        return list(found)

    def names(self, subject: Subject, weights: list[int]) -> str:
        return ", ".join(f"`{subject.side.weights[number].name}`" for number in weights[:3])

    # -- constants -------------------------------------------------------------------------------------------------

    def constants(self, subject: Subject, region: Region) -> list[Constant]:
        """Numbers and flags of the operations of a region; sizes of views and the like are none."""
        found: list[Constant] = []
        for entry in region.entries:
            row = subject.side.rows[entry]
            if subject.side.is_operation(entry) and family(row.operation.layer_type) not in _SHAPING:
                found += _constants(entry, row)
        return found


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
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(item, int | float) for item in value)
    return isinstance(value, bool | int | str)
