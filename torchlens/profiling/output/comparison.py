"""Two profiles side by side: what became faster or slower, larger or smaller, by module address."""

import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchlens.history.grid import Column, laid_out
from torchlens.history.units import shape_text
from torchlens.profiling.output.quantities import QUANTITIES, Quantity, checked_quantity, full_name, module_value
from torchlens.profiling.output.units import text_of
from torchlens.profiling.records import Measurements
from torchlens.profiling.steps import Shape
from torchlens.wording import check_choice

if TYPE_CHECKING:
    import pandas

__all__ = ["Change", "Comparison", "compare_measurements"]


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity of one module, before and after; None where it was not measured, or where there is no such module."""

    address: str  # '' for the model itself
    module_type: str
    quantity: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        """What was added; None if either is not known."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def ratio(self) -> float | None:
        """After over before; None if either is not known, or the first is nothing."""
        return None if self.before is None or self.after is None or self.before == 0 else self.after / self.before


class Comparison:
    """What changed between two profiles, the largest change first; iterate over it, print it, or make a table of it.

    >>> print(torchlens.compare(before, after))
    >>> [change for change in torchlens.compare(before, after, quantity='peak_bytes') if change.ratio > 1.1]
    """

    def __init__(
        self,
        quantity: str,
        changes: list[Change],
        headline: str,
        width: int | None,
        limit: int | None,
        unlike: str | None = None,
    ) -> None:
        self.quantity = quantity
        self.changes = changes
        self.unlike = unlike  # what the steps before and after differ in, so that not all changes are the model's; or None
        self._headline = headline
        self._width = width
        self._limit = limit

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __getitem__(self, address: str) -> Change:
        for change in self.changes:
            if change.address == address:
                return change
        raise KeyError(f"No module {address!r} in either profile.")

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per module."""
        import pandas  # slow to import, so imported by those who want a table

        names = ("address", "module_type", "quantity", "before", "after", "difference", "ratio")
        return pandas.DataFrame([[getattr(change, name) for name in names] for change in self.changes], columns=list(names))

    def __str__(self) -> str:
        quantity = QUANTITIES[self.quantity]
        room = shutil.get_terminal_size((100, 24)).columns if self._width is None else self._width
        shown = self.changes if self._limit is None else self.changes[: self._limit]
        columns = [
            Column("module", [change.address or "(the model)" for change in shown], is_number=False),
            Column("type", [change.module_type for change in shown], 1, is_number=False),
            Column("before", [_text(quantity, change.before) for change in shown]),
            Column("after", [_text(quantity, change.after) for change in shown]),
            Column("change", [_text(quantity, change.difference, has_sign=True) for change in shown]),
            Column("ratio", ["-" if change.ratio is None else f"{change.ratio:.2f}x" for change in shown]),
        ]
        lines = [*textwrap.wrap(self._headline, max(room, 40)), "", *laid_out(columns, room)]
        if len(shown) < len(self.changes):
            lines += ["", f"The first {len(shown)} of {len(self.changes)} modules."]
        if self.unlike is not None:
            lines += ["", *textwrap.wrap(self.unlike, max(room, 40))]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def compare_measurements(
    before: Measurements,
    after: Measurements,
    quantity: str,
    width: int | None = None,
    limit: int | None = None,
    step_kind: str | None = None,
) -> Comparison:
    """Matches modules by address, the largest change first; what only one of the two has comes last.

    Steps of one kind are compared with their like: of several kinds that both have, the one with the most steps.
    """
    wanted = checked_quantity(quantity, "quantity")
    quantity = str(full_name(quantity))
    before, after, kind = _alike(before, after, step_kind)
    ours, theirs = before.modules, after.modules
    changes = []
    for address in dict.fromkeys([*ours, *theirs]):
        old, new = ours.get(address), theirs.get(address)
        names = dict.fromkeys(record.module_type for record in (old, new) if record is not None)
        changes.append(
            Change(
                address,
                " -> ".join(names),
                quantity,
                None if old is None else module_value(old, wanted),
                None if new is None else module_value(new, wanted),
            )
        )
    changes = [change for change in changes if change.before is not None or change.after is not None]
    changes.sort(key=lambda change: float("inf") if change.difference is None else -abs(change.difference))
    models = " and ".join(dict.fromkeys([before.model_name, after.model_name]))
    steps = f"{len(before.measured_steps)} steps before, {len(after.measured_steps)} after"
    headline = f"{wanted.title} of {models} in a step{kind}: {steps}"
    return Comparison(quantity, changes, headline, width, limit, _difference(before, after))


def _alike(before: Measurements, after: Measurements, step_kind: str | None) -> tuple[Measurements, Measurements, str]:
    """The steps to compare, and in words of which kind they are, if there are others."""
    ours, theirs = (each.by_kind() if each.steps else {} for each in (before, after))
    common = [name for name in ours if name in theirs]
    if step_kind is not None:
        check_choice("step_kind", step_kind, tuple(common))
    elif max(len(ours), len(theirs)) < 2 or not common:
        return before, after, ""
    chosen = step_kind or max(common, key=lambda name: len(ours[name].steps) + len(theirs[name].steps))
    return ours[chosen], theirs[chosen], f" of {chosen}"


def _difference(before: Measurements, after: Measurements) -> str | None:
    """What the steps of two profiles differ in, though they were compared."""
    ours, theirs = ({step.kind for step in each.measured_steps} for each in (before, after))
    wordings: list[Callable[[Any], str]] = [str, _autograd_text, _inputs_text]  # of each part of a kind
    for place, words in enumerate(wordings):
        old, new = ({kind[place] for kind in kinds} for kinds in (ours, theirs))
        if len(old) == len(new) == 1 and old != new:  # of inputs of many lengths, no two runs have the same
            return f"The steps are not alike: {words(old.pop())} before, {words(new.pop())} after."
    return None


def _autograd_text(has_grad: bool) -> str:
    return "with gradients" if has_grad else "without gradients"


def _inputs_text(shapes: tuple[Shape, ...]) -> str:
    return "inputs " + ", ".join(map(shape_text, shapes)) if shapes else "no inputs"


def _text(quantity: Quantity, value: float | None, has_sign: bool = False) -> str:
    if value is None:
        return "-"
    sign = "+" if has_sign and value > 0 else ""
    return sign + text_of(quantity.unit)(value)
