"""Validates a log of a JAX callable: makes the runs, then the checks, in order.

JAX's arrays never change, so there is no memory to follow: an operation read what it was given.
"""

from typing import Any

import numpy as np
import torch

from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import seed_generators
from torchlens._history.log import Log
from torchlens._jax.arrays import is_array, to_torch
from torchlens._jax.callables import KeptState
from torchlens._jax.patches import SeenCall, witnessed
from torchlens._jax.pytrees import TreePart, array_leaves
from torchlens._recording.interruptions import interrupts
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Recording, Row, located
from torchlens._replay.values import brief, difference, same
from torchlens._validate.report import (
    ValidationReport,
    make_check,
    make_run,
)

Tensor = torch.Tensor
# Primitives that leave no entry if they only pass on a constant or an array.
_PASSING_ON = frozenset({"stage", "convert_element_type", "broadcast_in_dim", "device_put"})


def validate_jax(
    model: Any, args: list[Any], kwargs: dict[str, Any], random_seed: int | None
) -> ValidationReport:
    """Validates the log of a JAX callable: see `validate_forward_pass`."""
    report = ValidationReport(model.name)
    state = KeptState(model.forward, (args, kwargs))
    seen: list[SeenCall] = []

    def begin() -> None:
        state.restore()
        if random_seed is not None:
            seed_generators(random_seed)

    def run_plainly() -> list[TreePart]:
        begin()
        return array_leaves(model.run_plainly(args, kwargs))

    def run_logged() -> tuple[list[TreePart], Recording]:
        begin()
        session = model.session(CaptureOptions(keeps_args=True))
        return array_leaves(session.run(args, kwargs)), session.recording

    def run_witnessed() -> tuple[list[TreePart], Recording]:
        with witnessed() as calls:
            outcome = run_logged()
        seen.extend(calls)
        return outcome

    try:
        plain = make_run(report, "plain run", "outputs", run_plainly)
        logged = make_run(report, "logged run", "outputs", run_logged)
        outcome = make_run(report, "witnessed run", "outputs", run_witnessed)
        if plain is not None and logged is not None and outcome is not None:
            check = _JaxChecks(outcome[1], report)
            make_check(report, "outputs", lambda: check.check_outputs(plain, outcome[0]))
            make_check(report, "calls", lambda: check.check_calls(logged[1], seen))
            make_check(report, "replay", check.check_operations)
    finally:
        state.restore()
    return report


class _JaxChecks:
    """The checks of one recording. A group is the rows of one call."""

    def __init__(self, recording: Recording, report: ValidationReport) -> None:
        self._recording = recording
        self._report = report
        self._groups = _groups(recording)

    def check_outputs(self, plain: list[TreePart], logged: list[TreePart]) -> None:
        """The logged run returned, and the log saved, what a plain run returns."""
        self._report.num_checked["outputs"] += len(plain)
        if [part.path for part in plain] != [part.path for part in logged]:
            expected = f"{len(plain)} arrays, as a plain run returns"
            self._find("outputs", "", expected, f"{len(logged)}")
        outputs = self._recording.outputs
        for one, other, (_, number) in zip(plain, logged, outputs, strict=False):
            expected_value = to_torch(one.value)
            for value in (to_torch(other.value), self._recording.values[number]):
                if not same(expected_value, value):
                    expected = f"the result of a plain run ({brief(expected_value)})"
                    self._find(
                        "outputs", str(one.path), expected, difference(expected_value, value)
                    )

    def check_calls(self, first: Recording, seen: list[SeenCall]) -> None:
        """Each primitive that ran has an entry with its values, or passed something on; and each
        entry is a primitive that ran.
        """
        if _outputs(first) != _outputs(self._recording):
            expected = "two runs that do the same"
            self._find("calls", "", expected, "two that differ: nothing can be compared")
        self._report.num_checked["completeness"] += len(seen)
        place = 0
        for call in seen:
            results = [to_torch(result) for result in call.results if is_array(result)]
            if self._is_of(call, results, place):
                self._check_arguments(call, self._groups[place][0])
                place += 1
            elif results and not _passes_on(call, results[0]):
                name = f"{call.primitive.name} ({brief(results[0])})"
                self._find("completeness", "", f"an entry for {name}, which ran", "none")
        self._report.num_checked["calls"] += place
        for number, *_ in self._groups[place:]:
            name = self._recording.rows[number].operation.name
            self._find("calls", str(number), f"an operation that ran for {name}", "none")

    def _is_of(self, call: SeenCall, results: list[Tensor], place: int) -> bool:
        """True if the entries at a place are the results of a call."""
        if not results or place >= len(self._groups):
            return False
        group = self._groups[place]
        name = self._recording.rows[group[0]].operation.name
        if name != call.primitive.name or len(results) != len(group):
            return False
        return all(
            same(self._recording.values[number], result)
            for number, result in zip(group, results, strict=True)
        )

    def _check_arguments(self, call: SeenCall, number: int) -> None:
        """The arguments of row `number` in the log have the values of the call."""
        row = self._recording.rows[number]
        read = dict(located(row.references))
        for place, arg in enumerate(call.args):
            self._report.num_checked["arguments"] += 1
            if place in read:
                value = self._value(read[place])
            else:
                value = _constant(row.args[place], getattr(arg, "dtype", None))
            given = _constant(arg)
            logged = value.to(given.dtype)
            if not same(given, logged):
                expected = f"argument {place} to be what was given ({brief(given)})"
                self._find("arguments", self._step(number), expected, difference(given, logged))

    def _value(self, number: int) -> Tensor:
        """The value of a row, or of a parameter (-1 - k)."""
        recording = self._recording
        value: Tensor = (
            recording.values[number] if number >= 0 else recording.params[-1 - number].data
        )
        return value

    def check_operations(self) -> None:
        """Each operation gives its saved value again, and another one if an argument changes."""
        log = Log(self._recording)
        label_of = {number: log.label(entry) for number, entry in log.graph.entry_of.items()}
        changes = _Alternatives()
        for group in self._groups:
            row = self._recording.rows[group[0]]
            label = label_of.get(group[0], self._step(group[0]))
            args, params = self._recording.saved_args[group[0]]
            self._report.num_checked["replay"] += 1
            results = _run_again(row, args, params)
            for number, result in zip(group, results, strict=True):
                saved = self._recording.values[number]
                if not same(saved, result):
                    expected = f"{row.operation.name} to give its saved value again"
                    self._find("replay", label, expected, difference(saved, result))
            for place, _ in located(row.references):
                self._report.num_checked["dependence"] += 1
                reason = changes.in_vain(row, args, params, place, results)
                if reason is not None:
                    self._report.add_not_shown("dependence", label, place, reason)

    def _step(self, number: int) -> str:
        return f"step {number} ({self._recording.rows[number].operation.name})"

    def _find(self, check: str, layer: str, expected: str, found: str) -> None:
        self._report.add_finding(check, layer, expected, found)


def _outputs(recording: Recording) -> list[Any]:
    return [row[:4] for row in recording.rows if row.operation is OUTPUT]


def _groups(recording: Recording) -> list[list[int]]:
    """The rows of each call."""
    found: list[list[int]] = []
    for number, row in enumerate(recording.rows):
        if row.operation in (INPUT, OUTPUT, BUFFER):
            continue
        if row.output_index:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _constant(value: Any, dtype: Any = None) -> Tensor:
    """An array or a number as a tensor, of the given type."""
    if is_array(value):
        return to_torch(value)
    number = np.asarray(value)
    return to_torch(number if dtype is None else number.astype(dtype))


def _passes_on(call: SeenCall, result: Tensor) -> bool:
    """True if the primitive converted a number, or returned its argument unchanged."""
    given = call.args[0] if call.args else None
    if call.primitive.name not in _PASSING_ON:
        return False
    return not result.ndim or (is_array(given) and same(to_torch(given), result))


def _run_again(row: Row, args: Any, params: dict[str, Any]) -> list[Tensor]:
    result = row.operation.func(*args, **params)
    return list(result) if isinstance(result, list) else [result]


class _Alternatives:
    """Other values for an argument, to show that the result depends on it."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def in_vain(
        self, row: Row, args: Any, params: dict[str, Any], place: int, results: list[Tensor]
    ) -> str | None:
        """None if the result depends on the argument; otherwise what was tried."""
        value = args[place]
        if not value.numel() or not any(result.numel() for result in results):
            return "it is empty"
        num_tried = 0
        for other in self._others(value):
            try:
                again = _run_again(row, [*args[:place], other, *args[place + 1 :]], params)
            except Exception as error:  # the operation does not accept this value
                if interrupts(error):
                    raise
                continue
            num_tried += 1
            if not all(map(same, results, again)):
                return None
        if not num_tried:
            return "the operation accepts no other value"
        return f"the result is the same for {num_tried} other values"

    def _others(self, value: Tensor) -> list[Tensor]:
        if value.dtype is torch.bool:
            return [~value, torch.rand(value.shape, generator=self._generator) > 0.5]
        if not value.dtype.is_floating_point and not value.dtype.is_complex:
            plain = value.to(torch.int64)
            made = [plain + 1, plain * 0, plain.flip(0) if value.ndim else plain]
        else:
            wide = value.to(torch.complex64 if value.dtype.is_complex else torch.float32)
            noise = torch.randn(value.shape, generator=self._generator)
            made = [noise, wide + noise.abs() + 0.5, wide * 0 + 1, -wide - 1e3]
        return [other.to(value.dtype) for other in made]
