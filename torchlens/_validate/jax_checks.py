"""The same proof for a log of JAX: the runs and the checks, in order.

JAX's arrays never change, so there is no memory to follow: what an operation was given is what it
read.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import seed_generators
from torchlens._history.log import Log
from torchlens._jax.arrays import is_array, to_torch
from torchlens._jax.callables import KeptState
from torchlens._jax.patches import SeenCall, witnessed
from torchlens._jax.pytrees import array_leaves
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._recording.recording import Recording, Row, located
from torchlens._replay.values import brief, difference, same
from torchlens._validate.report import Finding, NotShown, ValidationReport

# What only passes a constant or an array on, and leaves no entry where it does.
_PASSING_ON = frozenset({"stage", "convert_element_type", "broadcast_in_dim", "device_put"})


def validate_jax(
    model: Any, args: list[Any], kwargs: dict[str, Any], random_seed: int | None
) -> ValidationReport:
    """Proves the log of a JAX callable: see `validate_forward_pass`."""
    report = ValidationReport(model.name)
    state = KeptState(model.forward, (args, kwargs))
    try:
        _Validation(model, args, kwargs, random_seed, state, report).run()
    finally:
        state.restore()
    return report


class _Validation:
    def __init__(
        self,
        model: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        random_seed: int | None,
        state: KeptState,
        report: ValidationReport,
    ) -> None:
        self._model = model
        self._arguments = (args, kwargs)
        self._random_seed = random_seed
        self._state = state
        self._report = report

    def run(self) -> None:
        plain = self._run("plain run", self._run_plainly)
        seen: list[SeenCall] = []
        logged = self._run("logged run", lambda: self._run_logged(seen, is_watched=False))
        watched = self._run("witnessed run", lambda: self._run_logged(seen, is_watched=True))
        if plain is None or logged is None or watched is None:
            return
        (_, first), (result, recording) = logged, watched
        for name, check in (
            ("outputs", lambda: self._check_outputs(plain, result, recording)),
            ("calls", lambda: self._check_calls(first, recording, seen)),
            ("replay", lambda: self._check_each(recording)),
        ):
            start = perf_counter()
            check()
            self._report.seconds[name] = perf_counter() - start

    # -- runs
    # ----------------------------------------------------------------------------------------------

    def _run(self, name: str, run: Callable[[], Any]) -> Any:
        self._state.restore()
        if self._random_seed is not None:
            seed_generators(self._random_seed)
        start = perf_counter()
        try:
            return run()
        except Exception as error:  # whatever the function raises is the finding
            text = str(error).strip().partition("\n")[0]
            self._find("outputs", "", f"the {name} to return", f"{type(error).__name__}: {text}")
            return None
        finally:
            self._report.seconds[name] = perf_counter() - start

    def _run_plainly(self) -> Any:
        args, kwargs = self._arguments
        return self._model.run_plainly(args, kwargs)

    def _run_logged(self, seen: list[SeenCall], is_watched: bool) -> tuple[Any, Recording]:
        session = self._model.session(CaptureOptions(keeps_args=True))
        args, kwargs = self._arguments
        if not is_watched:
            return session.run(args, kwargs), session.recording
        with witnessed() as calls:
            result = session.run(args, kwargs)
        seen += calls
        return result, session.recording

    # -- checks
    # ----------------------------------------------------------------------------------------------

    def _check_outputs(self, plain: Any, result: Any, recording: Recording) -> None:
        expected, found = array_leaves(plain), array_leaves(result)
        self._report.num_checked["outputs"] += len(expected)
        if [part.path for part in expected] != [part.path for part in found]:
            self._find(
                "outputs", "", f"{len(expected)} arrays, as a plain run returns", f"{len(found)}"
            )
        for one, other, (_, number) in zip(expected, found, recording.outputs, strict=False):
            for value in (to_torch(other.value), recording.values[number]):
                if not same(to_torch(one.value), value):
                    found_text = difference(to_torch(one.value), value)
                    self._find(
                        "outputs",
                        str(one.path),
                        f"what a plain run returns ({brief(value)})",
                        found_text,
                    )

    def _check_calls(self, first: Recording, recording: Recording, seen: list[SeenCall]) -> None:
        """Each primitive that ran is an entry, or passed something on; each entry is one that ran,
        with its values.
        """
        if [row[:4] for row in first.rows if row.operation is OUTPUT] != [
            row[:4] for row in recording.rows if row.operation is OUTPUT
        ]:
            self._find(
                "calls", "", "two runs that do the same", "two that differ: nothing can be compared"
            )
        groups = _groups(recording)
        place = 0
        for call in seen:
            self._report.num_checked["completeness"] += 1
            results = [to_torch(result) for result in call.results if is_array(result)]
            if not results:
                continue
            if place < len(groups) and self._is_of(call, results, recording, groups[place]):
                self._check_arguments(call, recording, groups[place])
                place += 1
            elif not (call.primitive.name in _PASSING_ON and _passes_on(call, results)):
                missing = (
                    f"an entry for each operation that ran, {call.primitive.name} of "
                    f"{brief(results[0])} too"
                )
                self._find("completeness", "", missing, "none")
        self._report.num_checked["calls"] += place
        for group in groups[place:]:
            self._find(
                "calls",
                str(group[0]),
                f"an operation that ran for {recording.rows[group[0]].operation.name}",
                "none",
            )

    def _is_of(
        self, call: SeenCall, results: list[torch.Tensor], recording: Recording, group: list[int]
    ) -> bool:
        row = recording.rows[group[0]]
        if row.operation.name != call.primitive.name or len(results) != len(group):
            return False
        return all(
            same(recording.values[number], result)
            for number, result in zip(group, results, strict=True)
        )

    def _check_arguments(self, call: SeenCall, recording: Recording, group: list[int]) -> None:
        """What the log says an operation read has the value that it was given."""
        row = recording.rows[group[0]]
        read = dict(located(row.references))
        for place, arg in enumerate(call.args):
            self._report.num_checked["arguments"] += 1
            if place in read:
                number = read[place]
                value = (
                    recording.values[number] if number >= 0 else recording.params[-1 - number].data
                )
            else:
                value = _constant(row.args[place], getattr(arg, "dtype", None))
            given = _constant(arg)
            if not same(given, value.to(given.dtype)):
                expected = f"argument {place} to be what was given ({brief(given)})"
                self._find(
                    "arguments",
                    _step(recording, group[0]),
                    expected,
                    difference(given, value.to(given.dtype)),
                )

    def _check_each(self, recording: Recording) -> None:
        """Each operation gives its saved value again, and another one where one of its arguments is
        another.
        """
        log = Log(recording)
        label_of = {number: log.label(entry) for number, entry in log.graph.entry_of.items()}
        changed = _Changes()
        for group in _groups(recording):
            row, label = (
                recording.rows[group[0]],
                label_of.get(group[0], _step(recording, group[0])),
            )
            args, params = recording.saved_args[group[0]]
            self._report.num_checked["replay"] += 1
            results = _run_again(row, args, params)
            for number, result in zip(group, results, strict=True):
                if not same(recording.values[number], result):
                    found = difference(recording.values[number], result)
                    self._find(
                        "replay",
                        label,
                        f"{row.operation.name} to give its saved value again",
                        found,
                    )
            for place, _ in located(row.references):
                self._report.num_checked["dependence"] += 1
                reason = changed.in_vain(row, args, params, place, results)
                if reason is not None:
                    self._report.not_shown.append(NotShown("dependence", label, place, reason))

    def _find(self, check: str, layer: str, expected: str, found: str) -> None:
        self._report.findings.append(Finding(check, layer, expected, found))


def _step(recording: Recording, number: int) -> str:
    return f"step {number} ({recording.rows[number].operation.name})"


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


def _constant(value: Any, dtype: Any = None) -> torch.Tensor:
    """An array or a number as a tensor. A number of Python's has more digits than torch's default
    type.
    """
    if is_array(value):
        return to_torch(value)
    number = np.asarray(value)
    return to_torch(number if dtype is None else number.astype(dtype))


def _passes_on(call: SeenCall, results: list[torch.Tensor]) -> bool:
    """Whether the result is what was given, or a number as an array."""
    given = call.args[0]
    if not results[0].ndim:
        return True
    return (
        is_array(given)
        and np.shape(given) == tuple(results[0].shape)
        and same(to_torch(given), results[0])
    )


def _run_again(row: Row, args: Any, params: dict[str, Any]) -> list[torch.Tensor]:
    result = row.operation.func(*args, **params)
    return list(result) if isinstance(result, list) else [result]


class _Changes:
    """Other values for an argument, to see whether the result is another, too."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def in_vain(
        self, row: Row, args: Any, params: dict[str, Any], place: int, results: list[torch.Tensor]
    ) -> str | None:
        """Why nothing could be shown; None where the result depends on the argument, as it
        should.
        """
        value = args[place]
        if not value.numel() or not any(result.numel() for result in results):
            return "it is empty"
        num_tried = 0
        for other in self._others(value):
            try:
                again = _run_again(row, [*args[:place], other, *args[place + 1 :]], params)
            except Exception:  # this value is not to be had there
                continue
            num_tried += 1
            if not all(same(one, two) for one, two in zip(results, again, strict=True)):
                return None
        return (
            "whatever was tried in its place, the result was the same"
            if num_tried
            else "it takes no other value"
        )

    def _others(self, value: torch.Tensor) -> list[torch.Tensor]:
        if value.dtype is torch.bool:
            return [~value, torch.rand(value.shape, generator=self._generator) > 0.5]
        if not value.dtype.is_floating_point and not value.dtype.is_complex:
            plain = value.to(torch.int64)
            return [
                (plain + 1).to(value.dtype),
                (plain * 0).to(value.dtype),
                plain.flip(0).to(value.dtype) if value.ndim else value,
            ]
        wide = value.to(torch.complex64 if value.dtype.is_complex else torch.float32)
        noise = torch.randn(value.shape, generator=self._generator)
        return [
            other.to(value.dtype)
            for other in (noise, wide + noise.abs() + 0.5, wide * 0 + 1, -wide - 1e3)
        ]
