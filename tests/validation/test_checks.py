"""Each check finds what it is there to find, and names the layer.

A history is broken on purpose, after the pass (in the log) or during it (in the recorder), and the checks are made.
"""

import dataclasses

import pytest
import torch
from networks import Model
from torch import nn

from torchlens.capture import operations
from torchlens.capture.memory import Memory
from torchlens.capture.operations import Kind, Operation
from torchlens.capture.session import CaptureOptions, Session
from torchlens.graph.build import build_graph
from torchlens.history.log import Log
from torchlens.validation import validate_forward_pass
from torchlens.validation.arguments import check_arguments
from torchlens.validation.completeness import Census, check_completeness
from torchlens.validation.dependence import check_dependence
from torchlens.validation.outputs import check_outputs, outcome_of
from torchlens.validation.replay import check_replay
from torchlens.validation.report import ValidationReport
from torchlens.validation.state import State
from torchlens.validation.subject import Subject
from torchlens.validation.witness import Witness


def diamond(_, x):
    a = torch.sin(x)
    b = torch.cos(x)
    return torch.sub(a, b) * 3


class Proof:
    """A pass of `diamond` with its evidence, to be broken before it is checked."""

    def __init__(self, function=diamond):
        model, x = Model(function), torch.tensor([0.3, 1.2, -2.0])
        self.state = State(model, x)
        self.plain = outcome_of(model(x), self.state)
        witness, self.census = Witness(), Census()
        session, counted = Session(model, CaptureOptions(), witness), Session(model, CaptureOptions(), self.census)
        self.logged = outcome_of(session.run([x], {}), self.state)
        counted.run([x], {})
        self.steps = counted.recording.rows
        self.recording = session.recording
        self.subject = Subject(Log(self.recording, build_graph(self.recording)), witness.evidence)

    def number(self, name):
        return next(n for n, row in enumerate(self.recording.rows) if row.operation.name == name)

    def rebuild(self):
        self.subject.log = Log(self.recording, build_graph(self.recording))

    def findings(self):
        report = ValidationReport("Model")
        check_outputs(self.subject, self.plain, self.logged, report)
        check_arguments(self.subject, report)
        check_replay(self.subject, report)
        check_dependence(self.subject, report)
        check_completeness(self.subject, self.census, self.steps, report)
        return [(finding.check, finding.layer) for finding in report.findings]


def replace_row(proof, name, **fields):
    number = proof.number(name)
    proof.recording.rows[number] = proof.recording.rows[number]._replace(**fields)
    proof.rebuild()


def test_an_unbroken_history_has_no_findings():
    assert Proof().findings() == []


def test_a_wrong_output_is_found_by_the_outputs_check():
    proof = Proof()
    proof.recording.values[proof.number("output")] = torch.zeros(3)
    assert ("outputs", "output_1_5") in proof.findings()
    assert {layer for _, layer in proof.findings()} == {"output_1_5"}


def test_a_logged_run_that_returns_something_else_is_found_by_the_outputs_check():
    proof = Proof()
    proof.logged = dataclasses.replace(proof.logged, outputs=[((), proof.logged.outputs[0][1] + 1)])
    assert proof.findings() == [("outputs", "output_1_5")]


def test_a_logged_run_that_draws_other_random_numbers_is_found_by_the_outputs_check():
    proof = Proof()
    python, numpy, cpu, devices = proof.logged.generators
    changed = cpu.clone()
    changed[-1] += 1
    proof.logged = dataclasses.replace(proof.logged, generators=(python, numpy, changed, devices))
    assert proof.findings() == [("outputs", "")]


def test_a_wrong_parent_is_found_by_the_arguments_check():
    proof = Proof()
    sin, source = proof.number("sin"), proof.number("input")
    assert proof.recording.rows[proof.number("sub")].references[0] == sin
    replace_row(proof, "sub", references=(source, proof.number("cos")))
    assert proof.findings() == [("arguments", "sub_1_3")]


def test_a_wrong_argument_position_is_found_by_the_arguments_check():
    proof = Proof()
    replace_row(proof, "sub", references=(proof.number("cos"), proof.number("sin")))
    assert proof.findings() == [("arguments", "sub_1_3")] * 2


def test_a_stale_value_is_found_by_the_replay_check():
    proof = Proof(lambda _, x: torch.sin(x).exp() * 3)
    proof.recording.values[proof.number("exp")] = torch.zeros(3)
    assert proof.findings() == [("arguments", "mul_1_3"), ("replay", "exp_1_2")]


def test_a_wrong_function_is_found_by_the_replay_check():
    proof = Proof()
    row = proof.recording.rows[proof.number("cos")]
    replace_row(proof, "cos", operation=dataclasses.replace(row.operation, func=torch.tan))
    assert proof.findings() == [("replay", "cos_1_2")]


def test_a_parent_that_is_not_read_is_found_by_the_dependence_check():
    proof = Proof()
    graph = proof.subject.log.graph
    sub, exp = graph.entry_of[proof.number("cos")], graph.entry_of[proof.number("sin")]
    graph.parents[sub] = (*graph.parents[sub], exp)
    assert proof.findings() == [("dependence", "cos_1_2")]


def test_an_argument_that_does_not_matter_is_found_by_the_dependence_check():
    @torch.library.custom_op("validated_checks::first", mutates_args=())
    def first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + 1

    proof = Proof(lambda _, x: first(torch.sin(x), torch.cos(x)))
    assert proof.findings() == [("dependence", "first_1_3")]


def test_a_missing_operation_is_found_by_the_completeness_check(monkeypatch):
    monkeypatch.setitem(operations.KNOWN_OPERATIONS, torch.cos, Operation(torch.cos, "cos", "cos", Kind.READ))
    assert ("completeness", "after sin_1_1") in Proof().findings()


def test_an_operation_the_log_never_hears_of_is_found_by_the_completeness_check():
    def forward(_, x):
        y = torch.sin(x)
        with torch._C.DisableTorchFunction():
            y = y * 2
        return y + 1

    report = validate_forward_pass(Model(forward), torch.ones(2))
    assert [(finding.check, finding.layer) for finding in report.findings] == [("completeness", "after sin_1_1")]
    assert "aten::mul" in report.findings[0].expected
    assert "test_checks.py" in report.findings[0].found


def test_a_write_that_no_entry_owns_up_to_is_found_by_the_completeness_check():
    def sneak(a):
        a.add_(1)
        return a * 2

    library = torch.library.Library("validated_sneak", "DEF")
    library.define("sneak(Tensor a) -> Tensor")
    library.impl("sneak", sneak, "CompositeExplicitAutograd")

    def forward(_, x):
        y = torch.sin(x)
        return torch.ops.validated_sneak.sneak(y) + 1

    report = validate_forward_pass(Model(forward), torch.ones(2))
    library._destroy()
    found = {(finding.check, finding.layer) for finding in report.findings}
    assert ("completeness", "sneak_1_2") in found
    assert found <= {("completeness", "sneak_1_2"), ("replay", "sin_1_1"), ("arguments", "sneak_1_2")}


def test_an_operation_that_writes_to_a_tensor_it_was_not_given_is_found():
    stash = []

    def reach(a):
        stash[0].add_(1)
        return a.clone()

    library = torch.library.Library("validated_reach", "DEF")
    library.define("reach(Tensor a) -> Tensor")
    library.impl("reach", reach, "CompositeImplicitAutograd")  # made of operations that the dispatcher sees

    def forward(_, x):
        stash[:] = [torch.sin(x)]  # made just now, by an operation of the log
        return torch.ops.validated_reach.reach(x) + 1

    with torch.no_grad():
        report = validate_forward_pass(Model(forward), torch.ones(2))
    library._destroy()
    assert ("completeness", "reach_1_2") in {(finding.check, finding.layer) for finding in report.findings}


def test_values_that_are_not_copied_before_a_write_are_found(monkeypatch):
    monkeypatch.setattr(Memory, "before_write", lambda self, targets: None)
    monkeypatch.setattr(Memory, "replace", lambda self, entry, copy: None)
    found = Proof(lambda _, x: torch.sin(x).add_(1) * 2).findings()
    assert ("replay", "sin_1_1") in found
    assert {layer for _, layer in found} <= {"sin_1_1", "add_1_2"}


def test_a_writer_that_is_left_out_is_found_by_the_arguments_check():
    def forward(_, x):
        y = torch.sin(x)
        y[0].add_(5)
        return y * 2

    proof = Proof(forward)
    proof.recording.writes.clear()
    proof.rebuild()
    assert proof.findings() == [("arguments", "mul_1_4")]


def test_a_finding_is_one_readable_line():
    proof = Proof()
    replace_row(proof, "sub", references=(proof.number("input"), proof.number("cos")))
    report = ValidationReport("Model")
    check_arguments(proof.subject, report)
    assert str(report.findings[0]) == (
        "[arguments] sub_1_3: expected argument 0 (3 float32) to be what input_1_0 saved; found 3 of 3 elements differ "
        "(at [0]: 0.3, here 0.29552)"
    )
    assert not report
    assert "FAILED, 1 finding" in str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_type_of_number_can_be_proved(dtype):
    report = validate_forward_pass(Model(lambda _, x: (x.clone().t().contiguous(), x == x)), torch.ones(2, 3).to(dtype))
    assert report.passed, str(report)


def test_meta_tensors_have_nothing_to_compare():
    report = validate_forward_pass(nn.Linear(3, 2, device="meta"), torch.ones(2, 3, device="meta"))
    assert report.passed, str(report)
