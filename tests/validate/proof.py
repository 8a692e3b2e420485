"""A pass with all that validation gathers about it, to be falsified before the checks are made."""

import copy
from typing import Any

import torch

from tests.validate.bookkeeping import CloseWitness, check_bookkeeping
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import Session
from torchlens._graph.build import build_graph
from torchlens._history.log import Log
from torchlens._recording.unseen import unseen
from torchlens._replay.model_state import State
from torchlens._validate.check_arguments import check_arguments
from torchlens._validate.check_calls import check_calls
from torchlens._validate.check_completeness import Census, check_completeness
from torchlens._validate.check_dependence import check_dependence
from torchlens._validate.check_outputs import check_outputs, outcome_of
from torchlens._validate.check_replay import check_replay, check_unwitnessed
from torchlens._validate.report import ValidationReport
from torchlens._validate.witness import Subject

_COPIED = (
    "rows", "values", "storages", "writes", "inputs", "outputs", "buffers", "params",
    "param_addresses", "module_calls",
    "booleans", "module_exits", "regions",
)  # fmt: skip


class Proof:
    """The runs that validation makes, each from the same state; then `report()` makes the
    checks.
    """

    def __init__(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        self.model, self.args, self.kwargs = model, list(args), kwargs
        self.state = State(model, (self.args, kwargs))
        self.plain = outcome_of(model(*args, **kwargs), self.state)
        self.logged, self.unwitnessed = self._run(None)
        num_params = len(self.unwitnessed.params)
        self.witness, self.census = CloseWitness(num_params), Census(num_params)
        self.witnessed, self.recording = self._run(self.witness)
        self.witness.finish()
        self.steps = self._run(self.census)[1].rows
        self.state.restore()
        self.graph = build_graph(self.recording)

    def _run(self, observer):
        self.state.restore()
        session = Session(self.model, CaptureOptions(), observer)
        return outcome_of(session.run(self.args, self.kwargs), self.state), session.recording

    def copied(self) -> "Proof":
        """The same evidence, and a log of its own to falsify."""
        proof = copy.copy(self)
        proof.recording = copy.copy(self.recording)
        for name in _COPIED:
            setattr(proof.recording, name, copy.copy(getattr(self.recording, name)))
        proof.graph = copy.copy(self.graph)
        for name in (
            "parents",
            "layers",
            "layer_of",
            "pass_of",
            "params",
            "recorded",
            "entry_of",
            "located_reads",
        ):
            object.__setattr__(proof.graph, name, copy.copy(getattr(self.graph, name)))
        object.__setattr__(proof.graph, "children", [list(own) for own in self.graph.children])
        return proof

    def number(self, name: str) -> int:
        """The first row of an operation."""
        return next(n for n, row in enumerate(self.recording.rows) if row.operation.name == name)

    def rebuild(self) -> None:
        """Makes the graph anew, of a recording that was changed."""
        self.graph = build_graph(self.recording)

    def replace_row(self, number: int, **fields: Any) -> None:
        """Falsifies a row, and the graph with it."""
        self.recording.rows[number] = self.recording.rows[number]._replace(**fields)
        self.rebuild()

    def report(self, with_bookkeeping: bool = False) -> ValidationReport:
        """Makes the checks of the library; what a check raises comes out."""
        report = ValidationReport("Model")
        with unseen():
            subject = Subject(Log(self.recording, graph=self.graph), self.witness)
            outcomes = (self.plain, self.logged, self.witnessed)
            check_outputs(subject, outcomes, None, report)
            if not self.recording.branches:
                check_unwitnessed(subject, self.unwitnessed, report)
            inputs = (self.model, self.args, self.kwargs)
            check_calls(subject, self.unwitnessed, *inputs, report)
            check_arguments(subject, report)
            check_replay(subject, report)
            check_dependence(subject, report)
            check_completeness(subject, self.census, self.steps, report)
            if with_bookkeeping:
                check_bookkeeping(subject, self.witness, self.model, report)
        return report

    def findings(self, with_bookkeeping: bool = False) -> list[tuple[str, str]]:
        """The check and the layer of each finding, once."""
        found = self.report(with_bookkeeping).findings
        return list(dict.fromkeys((finding.check, finding.layer) for finding in found))


def prove(model: torch.nn.Module, *args: Any, **kwargs: Any) -> ValidationReport:
    """Makes the checks of `validate_forward_pass` and those of the bookkeeping."""
    proof = Proof(model, *args, **kwargs)
    try:
        return proof.report(with_bookkeeping=True)
    finally:
        proof.state.restore()
