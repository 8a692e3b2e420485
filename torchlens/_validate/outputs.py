"""Check 1, outputs: the logged run returned, and left behind, what a plain run does."""

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchlens._capture.session import generator_states
from torchlens._history.log import path_text
from torchlens._recording.trees import Path, named_data, named_tensors
from torchlens._recording.unseen import unseen
from torchlens._replay.model_state import State, copy_of
from torchlens._replay.values import brief, difference, same
from torchlens._validate.exemptions import UNSTEADY
from torchlens._validate.report import Finding, ValidationReport
from torchlens._validate.subject import Subject


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run returned, and how it left model, inputs and generators."""

    outputs: list[tuple[Path, torch.Tensor]]
    data: list[tuple[Path, Any]] = field(
        default_factory=list
    )  # numbers, text and arrays among them
    changes: dict[int, torch.Tensor] = field(default_factory=dict)
    generators: tuple[Any, ...] = ()


def outcome_of(result: Any, state: State) -> Outcome:
    """Takes down the outcome of a run that began at `state` and returned `result`."""
    generators = generator_states()
    with unseen():
        outputs = [(path, copy_of(tensor)) for path, tensor in named_tensors(result)]
    data = [(path, value) for path, value in named_data(result) if not _holds_objects(value)]
    return Outcome(outputs, copy.deepcopy(data), state.changes(), generators)


def _holds_objects(value: Any) -> bool:
    """Whether it is an array of Python objects: as with all objects, there is no telling whether
    two are the same.
    """
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def same_outputs(first: Outcome, second: Outcome) -> bool:
    """Whether two runs returned the same tensors, in the same places."""
    if _names(first) != _names(second):
        return False
    with unseen():
        return all(same(a, b) for (_, a), (_, b) in zip(first.outputs, second.outputs, strict=True))


def different_data(first: Outcome, second: Outcome) -> dict[str, tuple[Any, Any]]:
    """Where two runs returned other numbers, text or arrays: by name, the two; None stands for what
    only one returned.
    """
    ours, theirs = (
        {path_text("output", path): value for path, value in outcome.data}
        for outcome in (first, second)
    )
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if not _same_data(*pair)}


def _same_data(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        is_number = first.dtype.kind in "fc" and second.dtype.kind in "fc"
        return first.dtype == second.dtype and bool(
            np.array_equal(first, second, equal_nan=is_number)
        )
    return bool(first == second or (first != first and second != second))  # NaN is NaN


def _check_data(
    plain: Outcome, logged: Outcome, report: ValidationReport, unsteady: Collection[str]
) -> None:
    report.num_checked["outputs"] += len(plain.data)
    for name, (expected, returned) in different_data(plain, logged).items():
        if name in unsteady:
            report.exemptions["outputs", UNSTEADY] += 1
        else:
            found = f"from the logged run {_short(returned)}"
            report.findings.append(
                Finding("outputs", "", f"{name} of a plain run ({_short(expected)})", found)
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_outputs(
    subject: Subject,
    plain: Outcome,
    logged: Outcome,
    report: ValidationReport,
    unsteady: Collection[str] = (),
) -> None:
    """Compares a plain run with the logged one, and the latter with the log's output layers.

    `unsteady` are the names of data that differs between two plain runs, too.
    """
    _check_data(plain, logged, report, unsteady)
    log, findings = subject.log, report.findings
    names = _names(plain)
    numbers = [number for _, number in log.recording.outputs]
    report.num_checked["outputs"] += len(names)
    if names != _names(logged) or names != [
        path_text("output", path) for path, _ in log.recording.outputs
    ]:
        found = f"{len(logged.outputs)} from the logged run, {len(numbers)} in the log, or others"
        findings.append(
            Finding("outputs", "", f"the {len(names)} output tensors of a plain run", found)
        )
        return
    for number, name, (_, expected), (_, returned) in zip(
        numbers, names, plain.outputs, logged.outputs, strict=True
    ):
        label, saved = subject.label(number), subject.value(number)
        if not same(expected, returned):
            found = f"from the logged run {difference(expected, returned)}"
            findings.append(
                Finding("outputs", label, f"{name} of a plain run ({brief(expected)})", found)
            )
        elif not same(returned, saved):
            is_tensor = isinstance(saved, torch.Tensor)
            found = f"saved {difference(returned, saved) if is_tensor else brief(saved)}"
            findings.append(
                Finding("outputs", label, f"{name} of the model ({brief(returned)})", found)
            )
    if plain.changes.keys() != logged.changes.keys() or not all(
        same(plain.changes[number], logged.changes[number]) for number in plain.changes
    ):
        expected_text = "the model's tensors and inputs to be left as a plain run leaves them"
        findings.append(Finding("outputs", "", expected_text, "other values after the logged run"))
    if not _same_generators(plain.generators, logged.generators):
        expected_text = "the generators to be left as a plain run leaves them"
        findings.append(Finding("outputs", "", expected_text, "another state after the logged run"))


def _names(outcome: Outcome) -> list[str]:
    return [path_text("output", path) for path, _ in outcome.outputs]


def _same_generators(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    (python, numpy, cpu, devices), (python_2, numpy_2, cpu_2, devices_2) = first, second
    return (
        python == python_2
        and all(
            bool((a == b).all()) if hasattr(a, "all") else a == b
            for a, b in zip(numpy, numpy_2, strict=True)
        )
        and torch.equal(cpu, cpu_2)
        and all(map(torch.equal, devices, devices_2))
    )
