"""Two profiles side by side: what became faster or slower, larger or smaller, by module address."""

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from torchlens._profile.quantities import (
    QUANTITIES,
    Quantity,
    checked_quantity,
    full_name,
    module_value,
)
from torchlens._profile.records import MOST_KINDS, Kind, Measurements, Shape
from torchlens._text.error_wording import check_choice, got
from torchlens._text.grid import Column, laid_out
from torchlens._text.numbers import shape_text

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity of one module, before and after; None if it was not measured or there is no such
    module.
    """

    address: str  # '' for the model itself
    module_type: str
    quantity: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float | None:
        """After minus before; None if either is not known."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def ratio(self) -> float | None:
        """After divided by before; None if either is not known, or `before` is 0."""
        return self.after / self.before if self.before and self.after is not None else None


class Comparison:
    """What changed between two profiles, the largest change first; iterate over it, print it, or
    make a table of it.

    >>> print(torchlens.compare(before, after))
    >>> changes = torchlens.compare(before, after, quantity='peak_bytes')
    >>> [change for change in changes if change.ratio > 1.1]
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
        # How the steps before and after differ in kind, or None: if they do, a change need not be
        # one of the model.
        self.unlike = unlike
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
        import pandas  # slow to import

        names = ("address", "module_type", "quantity", "before", "after", "difference", "ratio")
        return pandas.DataFrame(
            [[getattr(change, name) for name in names] for change in self.changes],
            columns=list(names),
        )

    def __str__(self) -> str:
        room = shutil.get_terminal_size((100, 24)).columns if self._width is None else self._width
        shown = self.changes[: self._limit]
        lines = [*textwrap.wrap(self._headline, max(room, 40)), ""]
        lines += laid_out(self._columns(shown), room)
        if len(shown) < len(self.changes):
            lines += ["", f"The first {len(shown)} of {len(self.changes)} modules."]
        if self.unlike is not None:
            lines += ["", *textwrap.wrap(self.unlike, max(room, 40))]
        return "\n".join(line.rstrip() for line in lines)

    def _columns(self, shown: list[Change]) -> list[Column]:
        text = partial(_text, QUANTITIES[self.quantity])
        ratios = ["-" if change.ratio is None else f"{change.ratio:.2f}x" for change in shown]
        names = [change.address or "(the model)" for change in shown]
        types = [change.module_type for change in shown]
        return [
            Column("module", names, is_number=False),
            Column("type", types, 1, is_number=False),
            Column("before", [text(change.before) for change in shown]),
            Column("after", [text(change.after) for change in shown]),
            Column("change", [text(change.difference, has_sign=True) for change in shown]),
            Column("ratio", ratios),
        ]

    __repr__ = __str__


def compare_measurements(
    before: Measurements,
    after: Measurements,
    quantity: str,
    width: int | None = None,
    limit: int | None = None,
    step_kind: str | None = None,
) -> Comparison:
    """Matches modules by address, the largest change first; modules that only one of the two has
    come last.

    Compares steps of one kind: if both profiles have several, the one with the most steps.
    """
    wanted = checked_quantity(quantity, "quantity")
    quantity = full_name(quantity)
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
    changes = [
        change for change in changes if change.before is not None or change.after is not None
    ]
    changes.sort(
        key=lambda change: float("inf") if change.difference is None else -abs(change.difference)
    )
    models = " and ".join(dict.fromkeys([before.model_name, after.model_name]))
    num_before = len(before.measured_steps)
    steps = f"{num_before} step{'s' * (num_before != 1)} before, {len(after.measured_steps)} after"
    headline = f"{wanted.title} of {models} in a step{kind}: {steps}"
    return Comparison(quantity, changes, headline, width, limit, _difference(before, after))


def _alike(
    before: Measurements, after: Measurements, step_kind: str | None
) -> tuple[Measurements, Measurements, str]:
    """The steps to compare, and the words for their kind if there are others.

    A kind is named by what distinguishes it from the others of its profile, so the two profiles may
    name the same kind differently.
    """
    ours, theirs = (each.by_kind() if each.steps else {} for each in (before, after))
    pairs = _matching_kinds(ours, theirs)
    if step_kind is not None:
        _check_step_kind(step_kind, ours, theirs, pairs)
        pairs = [pair for pair in pairs if step_kind in pair]
    if not pairs:
        return before, after, ""
    old, new = max(pairs, key=lambda pair: len(ours[pair[0]].steps) + len(theirs[pair[1]].steps))
    names = [name for name, kinds in ((old, ours), (new, theirs)) if len(kinds) > 1]
    return ours[old], theirs[new], f" of {' and '.join(dict.fromkeys(names))}" if names else ""


def _matching_kinds(
    ours: Mapping[str, Measurements], theirs: Mapping[str, Measurements]
) -> list[tuple[str, str]]:
    """The names of kinds of steps that both profiles have."""
    return [
        (old, new)
        for old, new in product(ours, theirs)
        if old == new or _kinds(ours[old]) & _kinds(theirs[new])
    ]


def _kinds(measurements: Measurements) -> set[Kind]:
    return {step.kind for step in measurements.measured_steps}


def _check_step_kind(
    step_kind: str, ours: Iterable[str], theirs: Iterable[str], pairs: list[tuple[str, str]]
) -> None:
    if not pairs:
        before, after = (" and ".join(map(repr, names)) or "none" for names in (ours, theirs))
        raise ValueError(
            f"step_kind must be a kind of step that both profiles have, got {got(step_kind)}. They "
            f"have none in common: {before} before, {after} after."
        )
    check_choice("step_kind", step_kind, dict.fromkeys(name for pair in pairs for name in pair))


def _difference(before: Measurements, after: Measurements) -> str | None:
    """A sentence about how the compared steps differ in kind; None if they do not."""
    ours, theirs = _kinds(before), _kinds(after)
    wordings: list[Callable[[Any], str]] = [
        str,
        _autograd_text,
        _inputs_text,
    ]  # of each part of a kind
    for place, words in enumerate(wordings):
        old, new = ({kind[place] for kind in kinds} for kinds in (ours, theirs))
        if (
            old & new or max(len(old), len(new)) > MOST_KINDS
        ):  # of inputs of many lengths, no two runs have the same
            continue
        texts = [" and ".join(sorted(map(words, values))) for values in (old, new)]
        if all(texts):  # neither profile is empty
            return f"The steps are not alike: {texts[0]} before, {texts[1]} after."
    return None


def _autograd_text(has_grad: bool) -> str:
    return "with gradients" if has_grad else "without gradients"


def _inputs_text(shapes: tuple[Shape, ...]) -> str:
    return "inputs " + ", ".join(map(shape_text, shapes)) if shapes else "no inputs"


def _text(quantity: Quantity, value: float | None, has_sign: bool = False) -> str:
    if value is None:
        return "-"
    sign = "+" if has_sign and value > 0 else ""
    return sign + quantity.text(value)
