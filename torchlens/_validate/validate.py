"""The runs and the checks, in order."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from torchlens._capture.distributed.collectives import num_collectives
from torchlens._capture.memory.freed_memory import freed_memory
from torchlens._capture.observer import Observer
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session, finished, seed_generators
from torchlens._graph.build import build_graph
from torchlens._history.log import Log
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.recording import Recording
from torchlens._recording.unseen import unseen
from torchlens._replay.model_state import State
from torchlens._text.lazy_import import lazy_function
from torchlens._validate.arguments import check_arguments
from torchlens._validate.calls import check_calls
from torchlens._validate.completeness import Census, check_completeness
from torchlens._validate.dependence import check_dependence
from torchlens._validate.outputs import (
    Outcome,
    check_outputs,
    different_data,
    outcome_of,
    same_outputs,
)
from torchlens._validate.replay import check_replay
from torchlens._validate.report import Finding, ValidationReport
from torchlens._validate.subject import Subject
from torchlens._validate.witness import Witness

if TYPE_CHECKING:
    from torchlens._validate.jax_checks import validate_jax
else:
    validate_jax = lazy_function("torchlens._validate.jax_checks", "validate_jax")


_COMPILER = "torch._dynamo"


def validate(
    model: Any, args: list[Any], kwargs: dict[str, Any], random_seed: int | None
) -> ValidationReport:
    """See `torchlens.validate_forward_pass`; the arguments are checked."""
    if isinstance(model, OtherModel):
        return validate_jax(model, args, kwargs, random_seed)
    assert isinstance(model, torch.nn.Module)
    report = ValidationReport(type(model).__name__)
    had_compiler = _COMPILER in sys.modules
    try:
        _validate_from_here(model, args, kwargs, random_seed, report)
    finally:
        if not had_compiler and _COMPILER in sys.modules:
            # torch imports it under a dispatch mode, and leaves a circle that holds the frames of
            # that time
            gc.collect()
        freed_memory().drop(lambda: None)
    return report


def _validate_from_here(
    model: torch.nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    random_seed: int | None,
    report: ValidationReport,
) -> None:
    """Validates, and leaves everything as it is now."""
    state = State(model, (args, kwargs))
    try:
        _Validation(model, args, kwargs, random_seed, state, report).run()
    finally:
        state.restore()
        for problem in state.problems:
            report.findings.append(
                Finding("outputs", "", "everything to be kept and put back", problem)
            )


class _Validation:
    def __init__(
        self,
        model: torch.nn.Module,
        args: list[Any],
        kwargs: dict[str, Any],
        random_seed: int | None,
        state: State,
        report: ValidationReport,
    ) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._random_seed = random_seed
        self._state = state
        self._report = report

    def run(self) -> None:
        """All runs, then all checks. Evidence is released when nothing needs it any more."""
        num_before = num_collectives()
        plain = self._outcome("plain run", "outputs", "a plain run to return", self._run_plainly)
        if plain is None:
            return
        logged = self._logged("logged run", "outputs", None)
        if logged is None:
            return
        outcome, recording = logged
        is_alone = (
            num_before is not None and num_collectives() == num_before
        )  # others may have nothing to explain
        if is_alone and not same_outputs(plain, outcome) and not self._repeats_itself(plain):
            expected = "two plain runs from one state to return the same"
            self._find(
                "outputs", expected, "a model that does not repeat itself: nothing can be compared"
            )
            return
        unsteady = different_data(plain, outcome) if is_alone else {}
        if unsteady:
            again = self._outcome(
                "second plain run", "outputs", "a plain run to return", self._run_plainly
            )
            unsteady = {} if again is None else different_data(plain, again)
        num_params = len(recording.params)
        witness = Witness(num_params)
        witness.know(self._state.copies())
        witnessed = self._logged("witnessed run", "outputs", witness)
        witness.finish()
        census = Census(num_params)
        counted = self._logged("dispatched run", "completeness", census)
        self._state.restore()
        freed_memory().note_use()
        if witnessed is None:
            return
        if (
            recording.branches
        ):  # threads take turns in another order each time: only the witnessed log can be followed
            outcome, recording = witnessed
        steps = None if counted is None else counted[1].rows
        del witnessed, counted
        with unseen():
            subject = Subject(Log(recording, build_graph(recording)), witness.evidence)
        report = self._report
        _note_valueless(subject, report)
        self._check("outputs", lambda: check_outputs(subject, plain, outcome, report, unsteady))
        self._check(
            "calls",
            lambda: check_calls(subject, self._model, self._args, self._kwargs, steps, report),
        )
        self._check("arguments", lambda: check_arguments(subject, report))
        self._check("replay", lambda: check_replay(subject, report))
        self._check("dependence", lambda: check_dependence(subject, report))
        self._check("completeness", lambda: check_completeness(subject, census, steps, report))

    # -- runs
    # ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._state.restore()
        if self._random_seed is not None:
            seed_generators(self._random_seed)

    def _run_plainly(self) -> Any:
        return finished(self._model(*self._args, **self._kwargs))

    def _logged(
        self, name: str, check: str, observer: Observer | None
    ) -> tuple[Outcome, Recording] | None:
        """A run that is logged, exactly as a log is made where nobody observes it."""
        session: list[Session] = []

        def run() -> Any:
            session.append(Session(self._model, CaptureOptions(), observer))
            return session[0].run(self._args, self._kwargs)

        outcome = self._outcome(name, check, f"the {name} to return, as a plain run does", run)
        return None if outcome is None else (outcome, session[0].recording)

    def _outcome(
        self, name: str, check: str, expected: str, run: Callable[[], Any]
    ) -> Outcome | None:
        """What came of a run; None, and a finding, where the model raised."""
        with _timed(self._report, name):
            self._begin()
            try:
                return outcome_of(run(), self._state)
            except KeyboardInterrupt:
                raise
            except (
                BaseException
            ) as error:  # whatever the model raises, SystemExit too, is the finding
                self._find(check, expected, _failure(error))
        return None

    def _repeats_itself(self, plain: Outcome) -> bool:
        again = self._outcome(
            "second plain run", "outputs", "a plain run to return", self._run_plainly
        )
        return again is not None and same_outputs(plain, again)

    # -- checks
    # ----------------------------------------------------------------------------------------------

    def _check(self, name: str, check: Callable[[], None]) -> None:
        """Makes a check. One that cannot be made, on a kind of tensor nobody thought of, is a
        finding too.
        """
        with _timed(self._report, name):
            try:
                with unseen():
                    check()
            except Exception as error:
                self._find(name, f"the {name} to be looked at", _failure(error))

    def _find(self, check: str, expected: str, found: str) -> None:
        self._report.findings.append(Finding(check, "", expected, found))


def _failure(error: BaseException) -> str:
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # an exception that cannot say what it is
        text = "(without a message)"
    return f"{type(error).__name__}: {text}"


@contextmanager
def _timed(report: ValidationReport, name: str) -> Iterator[None]:
    start = perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = perf_counter() - start


def _note_valueless(subject: Subject, report: ValidationReport) -> None:
    """Of tensors without values, what is checked is not that the values are right."""
    outputs = set(subject.log.graph.outputs)
    for entry, reason in subject.log.valueless_entries().items():
        exempt = f"values, as the tensors have none ({reason}); shapes and types are"
        report.exemptions["outputs" if entry in outputs else "replay", exempt] += 1
