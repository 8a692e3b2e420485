"""Check 1, outputs: the logged run returned, and left behind, what a plain run does."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchlens._capture.session import generator_states
from torchlens._recording.trees import Path, named_data, named_tensors, path_text
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._replay.model_state import State, copy_of
from torchlens._replay.values import brief, difference, same
from torchlens._validate.exemptions import UNSTEADY
from torchlens._validate.report import ValidationReport
from torchlens._validate.witness import Subject


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run returned (tensors; numbers, text and arrays), and how it left the model, its
    inputs and the generators.
    """

    outputs: list[tuple[Path, torch.Tensor]]
    data: list[tuple[Path, Any]] = field(default_factory=list)
    changes: dict[int, torch.Tensor] = field(default_factory=dict)
    generators: tuple[Any, ...] = ()


def outcome_of(result: Any, state: State) -> Outcome:
    """The outcome of a run that began at `state` and returned `result`."""
    generators = generator_states()
    with unseen(), NoTorchFunction():
        outputs = [(path, copy_of(tensor)) for path, tensor in named_tensors(result)]
    data = [(path, value) for path, value in named_data(result) if not _holds_objects(value)]
    return Outcome(outputs, copy.deepcopy(data), state.changes(), generators)


def _holds_objects(value: Any) -> bool:
    """Whether it is an array of Python objects, which cannot be compared reliably."""
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def same_outputs(first: Outcome, second: Outcome) -> bool:
    """Whether two runs returned the same tensors, in the same places."""
    if _names(first) != _names(second):
        return False
    with unseen(), NoTorchFunction():
        return all(same(a, b) for (_, a), (_, b) in zip(first.outputs, second.outputs, strict=True))


def different_data(first: Outcome, second: Outcome) -> dict[str, tuple[Any, Any]]:
    """By name, the numbers, text and arrays that two runs returned differently; None is what only
    one returned.
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


def check_outputs(
    subject: Subject,
    outcomes: tuple[Outcome, Outcome, Outcome],
    again: Outcome | None,
    report: ValidationReport,
) -> None:
    """Compares a plain run with a logged one, and a witnessed one with the output layers of its
    log.

    `outcomes` are of these three runs; `again` is that of a second plain run, if there was one.
    """
    plain, logged, witnessed = outcomes

    def find(layer: str, expected: str, found: str) -> None:
        report.add_finding("outputs", layer, expected, found)

    _check_data(plain, logged, again, report)
    outputs = subject.log.recording.outputs
    names = _names(plain)
    report.num_checked["outputs"] += len(names)
    if not (names == _names(logged) == _names(witnessed) == _path_names(outputs)):
        found = f"{len(logged.outputs)} from the logged run, {len(outputs)} in the log, or others"
        find("", f"the {len(names)} output tensors of a plain run", found)
        return
    for place, (name, (_, number)) in enumerate(zip(names, outputs, strict=True)):
        expected, returned = plain.outputs[place][1], logged.outputs[place][1]
        seen, saved = witnessed.outputs[place][1], subject.value(number)
        if not same(expected, returned):
            found = f"from the logged run {difference(expected, returned)}"
            find(subject.label(number), f"{name} of a plain run ({brief(expected)})", found)
        elif not same(seen, saved):
            is_tensor = isinstance(saved, torch.Tensor)
            found = f"saved {difference(seen, saved) if is_tensor else brief(saved)}"
            find(subject.label(number), f"{name} of the model ({brief(seen)})", found)
    if plain.changes.keys() != logged.changes.keys() or not all(
        same(plain.changes[number], logged.changes[number]) for number in plain.changes
    ):
        what = "the model's tensors and inputs to be left as a plain run leaves them"
        find("", what, "other values after the logged run")
    if not _same_generators(plain.generators, logged.generators):
        what = "the generators to be left as a plain run leaves them"
        find("", what, "another state after the logged run")


def _check_data(
    plain: Outcome, logged: Outcome, again: Outcome | None, report: ValidationReport
) -> None:
    report.num_checked["outputs"] += len(plain.data)
    unsteady = () if again is None else different_data(plain, again)
    for name, (expected, returned) in different_data(plain, logged).items():
        if name in unsteady:
            report.exemptions["outputs", UNSTEADY] += 1
        else:
            what, found = f"{name} of a plain run ({_short(expected)})", _short(returned)
            report.add_finding("outputs", "", what, f"from the logged run {found}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _names(outcome: Outcome) -> list[str]:
    return _path_names(outcome.outputs)


def _path_names(pairs: Sequence[tuple[Path, Any]]) -> list[str]:
    return [path_text("output", path) for path, _ in pairs]


def _same_generators(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    (python, numpy, cpu, devices), (python_2, numpy_2, cpu_2, devices_2) = first, second
    return (
        python == python_2
        and all(map(np.array_equal, numpy, numpy_2))
        and torch.equal(cpu, cpu_2)
        and all(map(torch.equal, devices, devices_2))
    )
