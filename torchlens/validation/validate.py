"""The runs and the checks, in order."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from torchlens.capture.collectives import num_collectives
from torchlens.capture.freed_memory import freed_memory
from torchlens.capture.session import CaptureOptions, Session, seed_generators
from torchlens.capture.valueless import is_in_fake_mode
from torchlens.graph.build import build_graph
from torchlens.history.log import Log
from torchlens.options import LogOptions, check_inputs
from torchlens.validation.arguments import check_arguments
from torchlens.validation.completeness import Census, check_completeness
from torchlens.validation.dependence import check_dependence
from torchlens.validation.outputs import Outcome, check_outputs, outcome_of
from torchlens.validation.replay import check_replay
from torchlens.validation.report import CHECKS, Finding, ValidationReport
from torchlens.validation.state import State
from torchlens.validation.subject import Subject
from torchlens.validation.witness import Witness

__all__ = ["validate_forward_pass", "validate_saved_activations"]

_COMPILER = "torch._dynamo"


def validate_saved_activations(
    model: torch.nn.Module,
    input_args: Any,
    input_kwargs: dict[str, Any] | None = None,
    random_seed: int | None = None,
    verbose: bool = False,
) -> bool:
    """Whether the log of this model on this input is right; `verbose` prints what was found. See `validate_forward_pass`.

    >>> validate_saved_activations(model, x)
    True
    """
    report = validate_forward_pass(model, input_args, input_kwargs, random_seed)
    if verbose:
        sys.stdout.write(f"{report}\n")
    return report.passed


def validate_forward_pass(
    model: torch.nn.Module,
    input_args: Any,
    input_kwargs: dict[str, Any] | None = None,
    random_seed: int | None = None,
) -> ValidationReport:
    """Proves the log of a forward pass against the model, and says what does not hold.

    Runs the model three times, plainly, logged, and under the dispatcher's eyes, each time from the same state, then
    every operation again, and once more for each of its parents. Leaves model, inputs, generators and gradients as they
    were. A model that raises is a finding; bad arguments are a TypeError, as elsewhere.

    >>> print(validate_forward_pass(model, x))
    """
    LogOptions(random_seed=random_seed)
    args, kwargs = check_inputs(model, input_args, input_kwargs)
    if is_in_fake_mode():
        raise ValueError(
            "validate_forward_pass compares values, and inside a FakeTensorMode there are none. Call it outside the mode, "
            "on a model with its weights."
        )
    report = ValidationReport(type(model).__name__)
    had_compiler = _COMPILER in sys.modules
    try:
        _validate_from_here(model, args, kwargs, random_seed, report)
    finally:
        if not had_compiler and _COMPILER in sys.modules:
            gc.collect()  # torch imports it under a dispatch mode, and leaves a circle that holds the frames of that time
        freed_memory().give_back()
    return report


def _validate_from_here(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], random_seed: int | None, report: ValidationReport
) -> None:
    """Validates, and leaves everything as it is now."""
    state = State(model, (args, kwargs))
    try:
        _validate(model, args, kwargs, random_seed, state, report)
    finally:
        state.restore()


def _validate(
    model: torch.nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    random_seed: int | None,
    state: State,
    report: ValidationReport,
) -> None:
    def begin() -> None:
        state.restore()
        if random_seed is not None:
            seed_generators(random_seed)

    plain = logged = dispatched = None
    num_before = num_collectives()
    with _timed(report, "plain run"):
        begin()
        plain = _plain_run(model, args, kwargs, state, report)
    if plain is None:
        return
    with _timed(report, "logged run"):
        begin()
        witness = Witness()
        witness.know(state.copies())
        session = Session(model, CaptureOptions(), witness)
        logged = _logged_run(session, args, kwargs, state, report)
    if logged is None:
        return
    with _timed(report, "dispatched run"):
        begin()
        census = Census()
        counted = Session(model, CaptureOptions(), census)
        dispatched = _logged_run(counted, args, kwargs, state, report, is_census=True)
        state.restore()
    freed_memory().note_use()
    recording = session.recording
    subject = Subject(Log(recording, build_graph(recording)), witness.evidence)
    _note_valueless(subject, report)
    with _timed(report, "outputs"):
        check_outputs(subject, plain, logged, report)
        is_alone = num_before is not None and num_collectives() == num_before
        if not report.passed and is_alone:  # other processes may have nothing to explain
            begin()
            _explain_nondeterminism(model, args, kwargs, plain, state, report)
    with _timed(report, "arguments"):
        check_arguments(subject, report)
    with _timed(report, "replay"):
        check_replay(subject, report)
    with _timed(report, "dependence"):
        check_dependence(subject, report)
    with _timed(report, "completeness"):
        if dispatched is not None:
            check_completeness(subject, census, counted.recording.rows, report)


def _note_valueless(subject: Subject, report: ValidationReport) -> None:
    """Of tensors without values, what is checked is not that the values are right."""
    reasons = subject.log.valueless_entries()
    outputs = set(subject.log.graph.outputs)
    for entry, reason in reasons.items():
        exempt = f"values, as the tensors have none ({reason}); shapes and types are"
        report.exemptions["outputs" if entry in outputs else "replay", exempt] += 1


def _plain_run(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], state: State, report: ValidationReport
) -> Outcome | None:
    try:
        return outcome_of(model(*args, **kwargs), state)
    except Exception as error:  # the model's own failure is the finding
        report.findings.append(Finding("outputs", "", "a plain run to return", _failure(error)))
        return None


def _logged_run(
    session: Session,
    args: list[Any],
    kwargs: dict[str, Any],
    state: State,
    report: ValidationReport,
    is_census: bool = False,
) -> Outcome | None:
    try:
        return outcome_of(session.run(args, kwargs), state)
    except Exception as error:  # a plain run returned
        check, run = ("completeness", "run under the dispatcher's eyes") if is_census else ("outputs", "logged run")
        report.findings.append(Finding(check, "", f"the {run} to return, as a plain run does", _failure(error)))
        return None


def _explain_nondeterminism(
    model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any], plain: Outcome, state: State, report: ValidationReport
) -> None:
    """Where outputs differ, sees whether those of two plain runs do too."""
    again = _plain_run(model, args, kwargs, state, report)
    if again is None or len(again.outputs) != len(plain.outputs):
        is_same = False
    else:
        pairs = zip(again.outputs, plain.outputs, strict=True)
        is_same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs if a.shape == b.shape)
    if not is_same:
        expected = "two plain runs from one state to return the same"
        report.findings.append(Finding("outputs", "", expected, "a model that does not repeat itself"))


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextmanager
def _timed(report: ValidationReport, name: str) -> Iterator[None]:
    """Times a step. A check that cannot be made, on a kind of tensor nobody thought of, is a finding too."""
    start = perf_counter()
    try:
        yield
    except Exception as error:
        check = name if name in CHECKS else "outputs"
        report.findings.append(Finding(check, "", f"the {name} to be looked at", _failure(error)))
    finally:
        report.seconds[name] = perf_counter() - start
