"""The matches: pairs of entries with the distance between their values, and lookups from either
side.
"""

from dataclasses import dataclass, field

from torchlens._diff.layouts import Layout


@dataclass(slots=True)
class Matched:
    """Two entries, how far their values are apart, and in which layout; `by_value` if that is how
    they were found.
    """

    reference: int
    candidate: int
    error: float  # relative to the norm
    eps: float  # the unit of rounding
    layout: Layout | None
    by_value: bool
    is_sure: bool = True  # whether more than order and shape speaks for it
    is_whole: bool = False  # whether both are whole numbers

    @property
    def units(self) -> float:
        """The error in units of rounding."""
        return self.error / self.eps

    def allowed(self, units: float) -> float:
        """So many units of rounding; none for whole numbers, which are exact."""
        return 0.0 if self.is_whole else units


@dataclass
class Found:
    """What was matched: pairs by entry of either side, and which entries hold what some entry of
    the other side holds.
    """

    of_reference: dict[int, Matched] = field(default_factory=dict)
    of_candidate: dict[int, Matched] = field(default_factory=dict)
    twins: tuple[dict[int, Matched], dict[int, Matched]] = field(default_factory=lambda: ({}, {}))

    def add(self, pair: Matched) -> None:
        self.of_reference[pair.reference] = pair
        self.of_candidate[pair.candidate] = pair

    def remove(self, pair: Matched) -> None:
        del self.of_reference[pair.reference], self.of_candidate[pair.candidate]

    def pairs(self) -> list[Matched]:
        return sorted(self.of_reference.values(), key=lambda pair: pair.reference)
