"""Validates a log of a PyTorch model: makes the runs, then the checks, in order."""

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchlens._capture.distributed.collectives import num_collectives
from torchlens._capture.memory.process_memory import freed_memory
from torchlens._capture.observer import Observer
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session, finished, seed_generators
from torchlens._graph.build import build_graph
from torchlens._history.log import Log
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.recording import Recording
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._replay.model_state import State
from torchlens._text.lazy_import import lazy_function
from torchlens._validate.check_arguments import check_arguments
from torchlens._validate.check_calls import check_calls
from torchlens._validate.check_completeness import Census, check_completeness
from torchlens._validate.check_dependence import check_dependence
from torchlens._validate.check_outputs import (
    Outcome,
    check_outputs,
    different_data,
    outcome_of,
    same_outputs,
)
from torchlens._validate.check_replay import check_replay, check_unwitnessed
from torchlens._validate.report import ValidationReport, make_check, make_run
from torchlens._validate.witness import Subject, Witness

if TYPE_CHECKING:
    from torchlens._validate.check_jax import validate_jax
else:
    validate_jax = lazy_function("torchlens._validate.check_jax", "validate_jax")


_COMPILER = "torch._dynamo"


def validate(
    model: Any, args: list[Any], kwargs: dict[str, Any], random_seed: int | None
) -> ValidationReport:
    """See `torchlens.validate_forward_pass`, which checks the arguments."""
    if isinstance(model, OtherModel):
        return validate_jax(model, args, kwargs, random_seed)
    assert isinstance(model, torch.nn.Module)
    report = ValidationReport(getattr(model, "title", type(model).__name__))
    had_compiler = _COMPILER in sys.modules
    try:
        state = State(model, (args, kwargs))
        try:
            _check_all(_Runs(model, args, kwargs, random_seed, state, report), report)
        finally:
            state.restore()
            for problem in state.problems:
                expected = "everything to be kept and restored"
                report.add_finding("outputs", "", expected, problem)
    finally:
        if not had_compiler and _COMPILER in sys.modules:
            # torch imports it under a dispatch mode, which leaves a reference cycle that holds
            # frames of the model
            gc.collect()
        freed_memory().drop(lambda: None)
    return report


def _check_all(runs: "_Runs", report: ValidationReport) -> None:
    """Makes all runs, then all checks."""
    num_before = num_collectives()
    plain = runs.plain("plain run")
    logged = None if plain is None else runs.logged("logged run", "outputs", None)
    if plain is None or logged is None:
        return
    again = None
    # Other processes might not repeat their part of a collective.
    if num_before is not None and num_collectives() == num_before:
        again = _repeated(runs, plain, logged[0], report)
        if again is None:
            return
    num_params = len(logged[1].params)
    witness, census = Witness(num_params), Census(num_params)
    witness.know(runs.state.copies())
    witnessed = runs.logged("witnessed run", "outputs", witness)
    witness.finish()
    counted = runs.logged("dispatched run", "completeness", census)
    runs.state.restore()
    freed_memory().note_use()
    if witnessed is None:
        return
    recording = witnessed[1]
    with unseen(), NoTorchFunction():
        subject = Subject(Log(recording, graph=build_graph(recording)), witness)
    _note_valueless(subject, report)
    steps = None if counted is None else counted[1].rows
    outcomes = (plain, logged[0], witnessed[0])
    inputs = (runs.model, runs.args, runs.kwargs)

    def check(name: str, function: Callable[..., None], *arguments: Any) -> None:
        # The copies are many, none of them is garbage, and the collector would walk them all.
        run = partial(function, subject, *arguments, report)
        without_collector(partial(make_check, report, name, run))

    # The order of operations in several threads differs from run to run.
    if not recording.branches:
        check("replay", check_unwitnessed, logged[1])
    check("outputs", check_outputs, outcomes, again)
    check("calls", check_calls, logged[1], *inputs)
    check("arguments", check_arguments)
    check("replay", check_replay)
    check("dependence", check_dependence)
    check("completeness", check_completeness, census, steps)


def _repeated(
    runs: "_Runs", plain: Outcome, logged: Outcome, report: ValidationReport
) -> Outcome | None:
    """The outcome of a second plain run, which is made only if the logged run differs from the
    first; None, and a finding, if the plain runs differ.
    """
    if same_outputs(plain, logged) and not different_data(plain, logged):
        return plain
    again = runs.plain("second plain run")
    if again is not None and not same_outputs(plain, again):
        expected = "two plain runs from one state to return the same"
        found = "a model that does not repeat itself: nothing can be compared"
        report.add_finding("outputs", "", expected, found)
        return None
    return again


class _Runs:
    """Runs the model, each time from the same state."""

    def __init__(
        self,
        model: torch.nn.Module,
        args: list[Any],
        kwargs: dict[str, Any],
        random_seed: int | None,
        state: State,
        report: ValidationReport,
    ) -> None:
        self.model = model
        self.args = args
        self.kwargs = kwargs
        self._random_seed = random_seed
        self.state = state
        self._report = report

    def plain(self, name: str) -> Outcome | None:
        """A run without torchlens."""
        call = lambda: finished(self.model(*self.args, **self.kwargs))  # noqa: E731
        return self._run(name, "outputs", call)

    def logged(
        self, name: str, check: str, observer: Observer | None
    ) -> tuple[Outcome, Recording] | None:
        """A run that is logged as by `log_forward_pass`, with an observer."""
        sessions: list[Session] = []

        def run() -> Any:
            sessions.append(Session(self.model, CaptureOptions(), observer))
            return sessions[0].run(self.args, self.kwargs)

        outcome = self._run(name, check, run)
        return None if outcome is None else (outcome, sessions[0].recording)

    def _run(self, name: str, check: str, run: Callable[[], Any]) -> Outcome | None:
        """The outcome of a run; None, and a finding, if the model raised."""
        self.state.restore()
        if self._random_seed is not None:
            seed_generators(self._random_seed)
        return make_run(self._report, name, check, lambda: outcome_of(run(), self.state))


def _note_valueless(subject: Subject, report: ValidationReport) -> None:
    """Counts the tensors that have no values to check."""
    outputs = set(subject.log.graph.outputs)
    for entry, reason in subject.log.valueless_entries().items():
        exempt = f"values, as the tensors have none ({reason}); shapes and types are"
        report.exemptions["outputs" if entry in outputs else "replay", exempt] += 1
