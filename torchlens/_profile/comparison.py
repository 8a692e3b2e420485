"""Two profiles side by side: what became faster or slower, larger or smaller, by module address."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from torchlens._profile.quantities import (
    QUANTITIES,
    Quantity,
    checked_quantity,
    full_name,
    module_value,
)
from torchlens._profile.records import MOST_KINDS, Kind, Measurements, kind_words
from torchlens._text.error_wording import check_choice, got
from torchlens._text.grid import Column, laid_out
from torchlens._text.numbers import counted

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


@dataclass(repr=False)
class Comparison:
    """What changed between two profiles, the largest change first; iterate over it, print it, or
    make a table of it.

    >>> print(torchlens.compare(before, after))
    >>> changes = torchlens.compare(before, after, quantity='peak_bytes')
    >>> [change for change in changes if change.ratio > 1.1]
    """

    quantity: str
    changes: list[Change]
    # How the steps before and after differ in kind, or None: if they do, a change need not be one
    # of the model.
    unlike: str | None
    _headline: str
    _width: int | None
    _limit: int | None

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

        columns = ["address", "module_type", "quantity", "before", "after", "difference", "ratio"]
        rows = [(*astuple(change), change.difference, change.ratio) for change in self.changes]
        return pandas.DataFrame(rows, columns=columns)

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
        quantity = QUANTITIES[self.quantity]
        ratios = ["-" if change.ratio is None else f"{change.ratio:.2f}x" for change in shown]
        names = [change.address or "(the model)" for change in shown]
        types = [change.module_type for change in shown]
        return [
            Column("module", names, is_number=False),
            Column("type", types, 1, is_number=False),
            Column("before", [_text(quantity, change.before) for change in shown]),
            Column("after", [_text(quantity, change.after) for change in shown]),
            Column("change", [_text(quantity, change.difference, "+") for change in shown]),
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
    wanted, name = checked_quantity(quantity, "quantity"), full_name(quantity)
    before, after, kind = _alike(before, after, step_kind)
    ours, theirs = before.modules, after.modules
    changes = []
    for address in dict.fromkeys([*ours, *theirs]):
        records = ours.get(address), theirs.get(address)
        types = dict.fromkeys(record.module_type for record in records if record is not None)
        old, new = (None if record is None else module_value(record, wanted) for record in records)
        if old is not None or new is not None:
            changes.append(Change(address, " -> ".join(types), name, old, new))
    changes.sort(
        key=lambda change: float("inf") if change.difference is None else -abs(change.difference)
    )
    models = " and ".join(dict.fromkeys([before.model_name, after.model_name]))
    steps = counted(len(before.measured_steps), "step")
    headline = (
        f"{wanted.title} of {models} in a step{kind}: {steps} before, "
        f"{len(after.measured_steps)} after"
    )
    return Comparison(name, changes, _difference(before, after), headline, width, limit)


def _alike(
    before: Measurements, after: Measurements, step_kind: str | None
) -> tuple[Measurements, Measurements, str]:
    """The steps to compare, and the words for their kind if there are others.

    A kind is named by what distinguishes it from the others of its profile, so the two profiles may
    name the same kind differently.
    """
    ours, theirs = before.by_kind(), after.by_kind()
    pairs = _matching_kinds(ours, theirs)
    if step_kind is not None:
        _check_step_kind(step_kind, ours, theirs, pairs)
        pairs = [pair for pair in pairs if step_kind in pair]
    if not pairs:
        return before, after, ""
    old, new = max(pairs, key=lambda pair: len(ours[pair[0]].steps) + len(theirs[pair[1]].steps))
    names = [name for name, kinds in ((old, ours), (new, theirs)) if len(kinds) > 1]
    return ours[old], theirs[new], f" of {' and '.join(dict.fromkeys(names))}" if names else ""


_Kinds: TypeAlias = dict[str, Measurements]
_Pairs: TypeAlias = list[tuple[str, str]]


def _matching_kinds(ours: _Kinds, theirs: _Kinds) -> _Pairs:
    """The names of kinds of steps that both profiles have."""
    return [
        (old, new)
        for old, new in product(ours, theirs)
        if old == new or _kinds(ours[old]) & _kinds(theirs[new])
    ]


def _check_step_kind(step_kind: str, ours: _Kinds, theirs: _Kinds, pairs: _Pairs) -> None:
    known = dict.fromkeys(name for pair in pairs for name in pair if name)
    if not known:
        raise ValueError(
            f"step_kind must be a kind of step that both profiles have, got {got(step_kind)}. They "
            f"have none in common: {_names(ours)} before, {_names(theirs)} after."
        )
    check_choice("step_kind", step_kind, known)


def _names(kinds: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in kinds if name) or "none"


def _kinds(measurements: Measurements) -> set[Kind]:
    return {step.kind for step in measurements.measured_steps}


def _difference(before: Measurements, after: Measurements) -> str | None:
    """A sentence about how the compared steps differ in kind; None if they do not."""
    for part in range(3):
        old, new = (_kind_texts(each, part) for each in (before, after))
        # Of inputs of many lengths, no two runs have the same.
        if old and new and not old & new and max(len(old), len(new)) <= MOST_KINDS:
            texts = [" and ".join(sorted(words)) for words in (old, new)]
            return f"The steps are not alike: {texts[0]} before, {texts[1]} after."
    return None


def _kind_texts(measurements: Measurements, part: int) -> set[str]:
    return {kind_words(kind)[part] for kind in _kinds(measurements)}


def _text(quantity: Quantity, value: float | None, plus: str = "") -> str:
    if value is None:
        return "-"
    return (plus if value > 0 else "") + quantity.text(value)
