"""Check 5, dependence: changing a parent's value changes the result of the operation.

`check_arguments.py` proves that the parents made the arguments; this shows that the results depend
on them. Each argument is changed, and the operation runs again: first with noise, then with values
that are hard to ignore (very large numbers, NaN, values near those of the other arguments), finally
with the other arguments changed, too, because they may hide the change (a mask, a zero, a NaN). An
operation that raises an error on the changed argument has read it. If no change of an argument
changes the result (`x ** 0`, `argmax` of one element), the report lists it as not shown: the log
may still be right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchlens._capture.observer import CallKind
from torchlens._recording.interruptions import interrupts
from torchlens._recording.recording import Row
from torchlens._replay.values import close, has_elements, same
from torchlens._validate.check_arguments import Painting, contributions_of, paint
from torchlens._validate.check_replay import replay_exemption, run_again
from torchlens._validate.exemptions import CAPTURED, EMPTY, MANY, PART, VIEW, dependence_exemption
from torchlens._validate.other_values import Changes, fits_into, numbers_in
from torchlens._validate.report import ValidationReport
from torchlens._validate.snapshots import Snapshot
from torchlens._validate.witness import Subject, WitnessedCall

Tensor = torch.Tensor
_SEED = 20_240_229
# How often the other arguments are changed, too, and how many values the argument gets each time.
_NUM_STYLES = 8
_NUM_BESIDE = 4
# The most parents of one argument, and of one call, that are tried.
_MAX_WRITERS = 32
_MAX_PARENTS = 64
_OWN_NAMESPACES = ("aten", "prim", "prims", "quantized")


def check_dependence(subject: Subject, report: ValidationReport) -> None:
    """Changes every parent of every operation, and looks for a change in its results."""
    changes = Changes(_SEED)
    for call in subject.calls:
        if call.kind is not CallKind.IDENTITY:
            _DependenceCheck(subject, report, changes, call).run()


@dataclass(slots=True)
class _Attempts:
    """How many values one argument was given: alone, and with other arguments changed, too; or why
    it is exempt.
    """

    num_alone: int = 0
    num_beside: int = 0
    exemption: str | None = None


@dataclass(slots=True)
class _DependenceCheck:
    """Replays one call with changed arguments."""

    subject: Subject
    report: ValidationReport
    changes: Changes
    call: WitnessedCall
    rows: Sequence[Row] = field(init=False)
    arguments: dict[Any, Snapshot] = field(init=False)
    results: list[Any] = field(init=False)
    paintings: dict[tuple[int, Any], Painting | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        call, subject = self.call, self.subject
        self.rows = subject.log.recording.rows[call.first : call.last]
        self.arguments = subject.arguments(call)
        self.results = [subject.witness.tensors[n].value for n in range(call.first, call.last)]

    def run(self) -> None:
        """Changes each parent; one that gave several arguments, at each until it shows."""
        parents = list(self._parents().items())
        tried = parents[:: -(-len(parents) // _MAX_PARENTS) or 1]
        if len(tried) < len(parents):
            self.report.exemptions["dependence", MANY] += len(parents) - len(tried)
        for parent, readers in tried:
            attempts, locations = _Attempts(), list(readers)
            depends = any(
                self._depends(parent, location, readers[location], attempts)
                for location in locations
            )
            if not depends and attempts.exemption is not None:
                self.report.exemptions["dependence", attempts.exemption] += 1
                continue
            self.report.num_checked["dependence"] += 1
            if not depends:
                argument = locations[0] if len(locations) == 1 else locations
                label, reason = self.subject.label(self.call.first), self._reason(parent, attempts)
                self.report.add_not_shown("dependence", label, argument, reason)

    def _parents(self) -> dict[int, dict[Any, int]]:
        """By parent and location of the argument, the first row of the call that reads it there."""
        found: dict[int, dict[Any, int]] = {}
        for number in range(self.call.first, self.call.last):
            for location, sources in self.subject.reads(number).items():
                for source in sources[:_MAX_WRITERS]:
                    found.setdefault(source, {}).setdefault(location, number)
                if number == self.call.first and len(sources) > _MAX_WRITERS:
                    self.report.exemptions["dependence", MANY] += len(sources) - _MAX_WRITERS
        return found

    @property
    def _name(self) -> str:
        return self.rows[0].operation.name

    def _reason(self, parent: int, attempts: _Attempts) -> str:
        if not attempts.num_alone:
            return f"{self._name} could not be tried with another value: none could be made"
        tried = f"{attempts.num_alone + attempts.num_beside} values tried"
        if attempts.num_beside:
            tried += f", {attempts.num_beside} of them with other arguments changed, too"
        result = _described(self.results)
        return f"{self._name} gives {result} whatever {self.subject.label(parent)} is: {tried}"

    def _depends(self, parent: int, location: Any, number: int, attempts: _Attempts) -> bool:
        """Whether the results depend on the parent there; if not, `attempts` says why they need
        not, or what was tried.
        """
        attempts.exemption = self._exemption(location)
        if attempts.exemption is not None:
            return False
        part = self._part_of(number, location, parent)
        if part is not None and not bool(part.any()):
            attempts.exemption = VIEW
            return False
        if self._is_shown(location, part, attempts):
            return True
        if attempts.exemption is None and part is not None:
            whole = next(iter(self._changed(location)), self.arguments[location].value)
            if self._matters({location: whole}, self.results):
                attempts.exemption = PART
        return attempts.exemption is None and self._is_hidden(location, attempts)

    def _is_shown(self, location: Any, part: Tensor | None, attempts: _Attempts) -> bool:
        """Whether some other value of the argument, or of a part of it, changes the results."""
        value = self.arguments[location].value
        for changed in self._changed(location):
            attempts.num_alone += 1
            given = (
                changed if part is None else torch.where(part.to(changed.device), changed, value)
            )
            if self._matters({location: given}, self.results):
                return True
            if attempts.num_alone == 1:
                attempts.exemption = dependence_exemption(self._name, location)
                if attempts.exemption is not None:
                    return False
        return False

    def _exemption(self, location: Any) -> str | None:
        """Why changing the argument cannot show anything."""
        argument = self.arguments.get(location)
        if argument is None:
            return CAPTURED
        results = [value for value in self.results if isinstance(value, Tensor)]
        if not has_elements(argument.value) or not any(map(has_elements, results)):
            return EMPTY
        reason = replay_exemption(self.call, self.rows[0])
        return reason and (dependence_exemption(self._name, location) or reason)

    def _changed(self, location: Any) -> Any:
        """Other values for the argument at `location`."""
        value = self.arguments[location].value
        others = [own.value for place, own in self.arguments.items() if place != location]
        numbers = numbers_in(self.call.args) + numbers_in(self.call.kwargs)
        return self.changes.of(value, others, numbers, self._may_be_wild(value))

    def _may_be_wild(self, value: Tensor) -> bool:
        """Whether values out of the range may be tried: not for indices or counts, nor in kernels
        that are not torch's own.
        """
        if _is_foreign(self.rows[0].operation.func):
            return False
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return True
        # Elementwise functions: no size of a result depends on the elements.
        return all(isinstance(own, Tensor) and fits_into(value, own) for own in self.results)

    def _part_of(self, number: int, location: Any, parent: int) -> Tensor | None:
        """Which elements of the argument the parent wrote; None for all.

        A view counts as all of what the parent wrote: any change of the argument must show there.
        """
        subject, argument = self.subject, self.arguments[location]
        if len(subject.reads(number)[location]) == 1:
            return None
        is_view = subject.is_view(number, argument, self.call)
        if (number, location) not in self.paintings:
            where = subject.witness.tensors[number] if is_view else argument
            painting = paint(where, contributions_of(subject, number, location))
            self.paintings[number, location] = painting
        painting = self.paintings[number, location]
        part = None if painting is None else painting.part_of(parent)
        return None if is_view and part is not None and bool(part.any()) else part

    def _is_hidden(self, location: Any, attempts: _Attempts) -> bool:
        """Whether the argument matters once the others have other values."""
        value = self.arguments[location].value
        for changed, before in self._with_others_changed(location):
            for number in range(_NUM_BESIDE):
                attempts.num_beside += 1
                changed[location] = self.changes.beside(value, number)
                if self._matters(changed, before):
                    return True
        return False

    def _with_others_changed(self, location: Any) -> Iterator[tuple[dict[Any, Tensor], list[Any]]]:
        """Other values for the other arguments, and the results of the call with them."""
        beside = {
            place: own.value
            for place, own in self.arguments.items()
            if place != location and has_elements(own.value)
        }
        for style in range(_NUM_STYLES) if beside else ():
            changed = {place: self.changes.beside(own, style) for place, own in beside.items()}
            if style >= 4:
                changed[location] = self.changes.beside(self.arguments[location].value, style)
            try:
                before = run_again(self.call, self.rows, changed)
            except Exception as error:  # the operation refuses this combination of values
                if interrupts(error):
                    raise
                continue
            yield changed, before

    def _matters(self, changed: dict[Any, Tensor], before: Sequence[Any]) -> bool:
        """Whether the call gives other results than `before` with the changed arguments."""
        is_equal = close if self.call.first in self.subject.inexact else same
        try:
            # a broken sparse pattern is to raise, not to crash
            with torch.sparse.check_sparse_tensor_invariants(True):
                after = run_again(self.call, self.rows, changed)
            return len(after) != len(before) or not all(map(is_equal, before, after))
        except Exception as error:  # only values have changed: the operation has read them
            if interrupts(error):
                raise
            return True


def _is_foreign(func: Any) -> bool:
    """Whether a custom operator runs, whose kernel may not check whether an index is in range."""
    name = getattr(func, "_qualified_op_name", None)
    name = name or getattr(getattr(func, "_schema", None), "name", None)
    return name is not None and str(name).partition("::")[0] not in _OWN_NAMESPACES


def _described(results: Sequence[Any]) -> str:
    """`nan everywhere`, or `the same`."""
    first = results[0]
    try:
        elements = first.reshape(-1).unique()
        is_nan = bool(elements.numel()) and bool((elements != elements).all())
        if len(results) == 1 and (is_nan or elements.numel() == 1):
            return f"{elements[0].item()}{' everywhere' if first.numel() > 1 else ''}"
    except (AttributeError, NotImplementedError, RuntimeError):  # not a plain tensor
        pass
    return "the same"
