"""Check 5, dependence: changing what a parent gave changes what the operation gives.

That the parents are those who made the arguments is proved elsewhere (`arguments.py`). This shows
that the arguments count: each is changed, and the operation run again, with noise first, then in
the ways that are hard to ignore (very large numbers, NaN, what the other arguments are compared
with), and at last with the other arguments changed too, for they may hide it: a mask, a zero, a
NaN. An operation that raises on the changed argument has read it. Where nothing makes an argument
count (`x ** 0`, `argmax` of one element), that is reported apart: nothing is wrong with the log.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchlens._capture.observer import CallKind
from torchlens._recording.recording import Row
from torchlens._replay.snapshots import Snapshot
from torchlens._replay.values import close, has_elements, same
from torchlens._validate.arguments import contributions_of
from torchlens._validate.changes import Changes, numbers_in
from torchlens._validate.exemptions import CAPTURED, EMPTY, MANY, PART, VIEW, dependence_exemption
from torchlens._validate.memory import Painting, paint
from torchlens._validate.replay import replay_exemption, run_again
from torchlens._validate.report import NotShown, ValidationReport
from torchlens._validate.subject import Subject
from torchlens._validate.witness import Call

Tensor = torch.Tensor
_SEED = 20_240_229
# How many times the other arguments are changed too, and how many values the argument gets each
# time.
_NUM_STYLES = 8
_NUM_BESIDE = 4
# Of those that wrote parts of one argument, so many are tried.
_MOST_WRITERS = 32


def check_dependence(subject: Subject, report: ValidationReport) -> None:
    """Changes every parent of every operation, and looks for a change in its results."""
    checker = _Checker(subject, report)
    for call in subject.calls:
        if call.kind is not CallKind.IDENTITY:
            checker.check(call)


@dataclass(slots=True)
class _Attempts:
    """What was tried on one argument: the values it got, and how many of them with other arguments
    changed too.
    """

    num_alone: int = 0
    num_beside: int = 0
    exemption: str | None = None


@dataclass(slots=True)
class _Case:
    """A call that is made again and again."""

    call: Call
    rows: Sequence[Row]
    arguments: dict[Any, Snapshot]
    before: list[Any]
    numbers: list[int | float]
    is_exact: bool  # whether it gives the very same bits each time
    paintings: dict[tuple[int, Any], Painting | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.rows[0].operation.name

    def is_wild(self, value: Tensor) -> bool:
        """Whether values out of all range may be tried: not where they may be indices or counts,
        nor in others' kernels.
        """
        if _is_of_others(self.rows[0].operation.func):
            return False
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return True
        return all(
            isinstance(result, Tensor) and _is_alike(result, value) for result in self.before
        )


class _Checker:
    def __init__(self, subject: Subject, report: ValidationReport) -> None:
        self._subject = subject
        self._report = report
        self._changes = Changes(_SEED)

    def check(self, call: Call) -> None:
        """Changes each parent of the call; one that gave several arguments, at each until it
        shows.
        """
        rows = self._subject.log.recording.rows[call.first : call.last]
        before = [self._subject.seen(number) for number in range(call.first, call.last)]
        numbers = numbers_in(call.args) + numbers_in(call.kwargs)
        is_exact = call.first not in self._subject.inexact
        case = _Case(call, rows, self._subject.arguments(call), before, numbers, is_exact)
        places: dict[
            int, dict[Any, int]
        ] = {}  # by parent and location, the first row that reads it there
        for number in range(call.first, call.last):
            for location, sources in self._subject.reads(number).items():
                for source in sources[:_MOST_WRITERS]:
                    places.setdefault(source, {}).setdefault(location, number)
                if number == call.first and len(sources) > _MOST_WRITERS:
                    self._report.exemptions["dependence", MANY] += len(sources) - _MOST_WRITERS
        for parent, readers in places.items():
            attempts, locations = _Attempts(), list(readers)
            if any(
                self._depends(case, parent, location, readers[location], attempts)
                for location in locations
            ):
                self._report.num_checked["dependence"] += 1
            elif attempts.exemption is not None:
                self._report.exemptions["dependence", attempts.exemption] += 1
            else:
                self._report.num_checked["dependence"] += 1
                argument = locations[0] if len(locations) == 1 else locations
                reason = self._reason(case, parent, attempts)
                self._report.not_shown.append(
                    NotShown("dependence", self._subject.label(call.first), argument, reason)
                )

    def _reason(self, case: _Case, parent: int, attempts: _Attempts) -> str:
        if not attempts.num_alone:
            return (
                f"{case.name} could not be tried with anything else: no other value could be made"
            )
        beside = (
            f", {attempts.num_beside} of them with other arguments beside it"
            if attempts.num_beside
            else ""
        )
        tried = f"{attempts.num_alone + attempts.num_beside} values tried{beside}"
        return (
            f"{case.name} gives {_described(case.before)} whatever {self._subject.label(parent)} "
            f"is: {tried}"
        )

    def _depends(
        self, case: _Case, parent: int, location: Any, number: int, attempts: _Attempts
    ) -> bool:
        """Whether the results depend on the parent there; if not, `attempts` says why they need
        not, or what was tried.
        """
        argument = case.arguments.get(location)
        if argument is None:
            attempts.exemption = CAPTURED
            return False
        if not has_elements(argument.value) or not any(
            isinstance(v, Tensor) and has_elements(v) for v in case.before
        ):
            attempts.exemption = EMPTY
            return False
        if (reason := replay_exemption(case.call, case.rows[0])) is not None:
            attempts.exemption = dependence_exemption(case.name, location) or reason
            return False
        part = self._part_of(case, number, location, argument, parent)
        if part is not None and not bool(part.any()):
            attempts.exemption = VIEW
            return False
        value, is_wild = argument.value, case.is_wild(argument.value)
        others = [snapshot.value for place, snapshot in case.arguments.items() if place != location]
        for changed in self._changes.of(value, others, case.numbers, is_wild):
            attempts.num_alone += 1
            given = (
                changed if part is None else torch.where(part.to(changed.device), changed, value)
            )
            if _changes_result(case, {location: given}, case.before):
                return True
            if (
                attempts.num_alone == 1
                and (reason := dependence_exemption(case.name, location)) is not None
            ):
                attempts.exemption = reason
                return False
        if part is not None:
            whole = next(self._changes.of(value, others, case.numbers, is_wild), value)
            if _changes_result(case, {location: whole}, case.before):
                attempts.exemption = PART
                return False
        return self._is_hidden(case, location, attempts)

    def _part_of(
        self, case: _Case, number: int, location: Any, argument: Snapshot, parent: int
    ) -> Tensor | None:
        """Which elements of the argument the parent wrote; None for all.

        A view is all that the parent wrote of what it looks at: any change of the argument must
        show there.
        """
        if len(self._subject.reads(number)[location]) == 1:
            return None
        result = self._subject.evidence.tensors[number]
        is_view = result.region is not None and result.storage == argument.storage
        is_view = is_view and argument.storage not in case.call.written_storages
        if (number, location) not in case.paintings:
            contributions = contributions_of(self._subject, number, location)
            case.paintings[number, location] = paint(result if is_view else argument, contributions)
        painting = case.paintings[number, location]
        if painting is None:
            return None
        part = painting.part_of(parent)
        return None if is_view and bool(part.any()) else part

    def _is_hidden(self, case: _Case, location: Any, attempts: _Attempts) -> bool:
        """Whether the argument matters once the others have other values."""
        beside = {
            p: s.value for p, s in case.arguments.items() if p != location and has_elements(s.value)
        }
        if not beside:
            return False
        value = case.arguments[location].value
        for style in range(_NUM_STYLES):
            try:
                changed = {
                    place: self._changes.partner(other, style) for place, other in beside.items()
                }
                if style >= 4:
                    changed[location] = self._changes.partner(value, style)
                before = run_again(case.call, case.rows, changed)
            except Exception:  # these values are not to be had together
                continue
            for number in range(_NUM_BESIDE):
                attempts.num_beside += 1
                changed = {**changed, location: self._changes.partner(value, number)}
                if _changes_result(case, changed, before):
                    return True
        return False


def _changes_result(case: _Case, changed: dict[Any, Tensor], before: Sequence[Any]) -> bool:
    try:
        with torch.sparse.check_sparse_tensor_invariants(
            True
        ):  # a broken pattern is to raise, not to crash
            after = run_again(case.call, case.rows, changed)
        return len(after) != len(before) or not all(
            map(same if case.is_exact else close, before, after)
        )
    except (
        Exception
    ):  # the arguments differ in nothing but their values: those are what it raised about
        return True


def _is_of_others(func: Any) -> bool:
    """Whether the function is none of torch's own: its kernels may not look whether an index is in
    range.
    """
    qualified = getattr(func, "_qualified_op_name", None) or getattr(func, "_schema", None)
    if qualified is not None:
        return str(getattr(qualified, "name", qualified)).partition("::")[0] not in (
            "aten",
            "prim",
            "prims",
            "quantized",
        )
    return False


def _is_alike(result: Tensor, value: Tensor) -> bool:
    """Whether the result has one element for each of the value: no size depends on it then."""
    try:
        return torch.broadcast_shapes(result.shape, value.shape) == result.shape
    except RuntimeError:
        return False


def _described(results: Sequence[Any]) -> str:
    """`nan everywhere`, or `the same`."""
    first = results[0] if len(results) == 1 else None
    if (
        not isinstance(first, Tensor)
        or first.layout is not torch.strided
        or first.is_nested
        or first.is_quantized
    ):
        return "the same"
    try:
        elements = first.reshape(-1).unique()
    except (NotImplementedError, RuntimeError):
        return "the same"
    is_nan = (
        bool(elements.isnan().all()) if first.is_floating_point() or first.is_complex() else False
    )
    if is_nan or elements.numel() == 1:
        return f"{elements[0].item()}{' everywhere' if first.numel() > 1 else ''}"
    return "the same"
