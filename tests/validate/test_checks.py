"""Each check finds what it is there to find, and names the layer.

A history is broken on purpose, after the pass (in the log) or during it (in the recorder), and the
checks are made.
"""

import dataclasses
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.networks import Model
from tests.validate.proof import Proof
from torchlens._capture.memory.saved_values import Memory
from torchlens._recording import operations
from torchlens._recording.operations import Kind, Operation
from torchlens._recording.unseen import NoTorchFunction
from torchlens.api import validate_forward_pass


def diamond(_, x):
    a = torch.sin(x)
    b = torch.cos(x)
    return torch.sub(a, b) * 3


def proof_of(function=diamond):
    return Proof(Model(function), torch.tensor([0.3, 1.2, -2.0]))


def test_an_unbroken_history_has_no_findings():
    assert proof_of().findings() == []


def test_a_wrong_output_is_found_by_the_outputs_check():
    proof = proof_of()
    proof.recording.values[proof.number("output")] = torch.zeros(3)
    assert ("outputs", "output_1_5") in proof.findings()
    assert {layer for _, layer in proof.findings()} == {"output_1_5"}


def test_a_logged_run_that_returns_something_else_is_found_by_the_outputs_check():
    proof = proof_of()
    proof.logged = dataclasses.replace(proof.logged, outputs=[((), proof.logged.outputs[0][1] + 1)])
    assert proof.findings() == [("outputs", "output_1_5")]


def test_a_logged_run_that_draws_other_random_numbers_is_found_by_the_outputs_check():
    proof = proof_of()
    python, numpy, cpu, devices = proof.logged.generators
    changed = cpu.clone()
    changed[-1] += 1
    proof.logged = dataclasses.replace(proof.logged, generators=(python, numpy, changed, devices))
    assert proof.findings() == [("outputs", "")]


def test_a_wrong_parent_is_found_by_the_arguments_check():
    proof = proof_of()
    sub, sin = proof.number("sub"), proof.number("sin")
    assert proof.recording.rows[sub].references[0] == sin
    proof.replace_row(sub, references=(proof.number("input"), proof.number("cos")))
    assert set(proof.findings()) == {("arguments", "sub_1_3")}


def test_a_wrong_parent_with_the_right_value_is_found_by_the_arguments_check():
    proof = proof_of(lambda _, x: torch.sin(x).clone() * 3)
    proof.replace_row(proof.number("mul"), references=(proof.number("sin"), None))
    assert proof.findings() == [("arguments", "mul_1_3")]


def test_a_missing_parent_is_found_by_the_arguments_check():
    proof = proof_of()
    proof.replace_row(proof.number("sub"), references=(None, proof.number("cos")))
    assert proof.findings() == [("arguments", "sub_1_3")]


def test_a_wrong_parameter_is_found_by_the_arguments_check():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.a + self.b

    proof = Proof(Scaled(), torch.ones(3))
    proof.replace_row(proof.number("mul"), references=(0, -2))
    assert ("arguments", "mul_1_1") in proof.findings()


def test_a_wrong_argument_position_is_found_by_the_arguments_check():
    proof = proof_of()
    proof.replace_row(proof.number("sub"), references=(proof.number("cos"), proof.number("sin")))
    assert set(proof.findings()) == {("arguments", "sub_1_3")}


def test_a_stale_value_is_found_by_the_replay_check():
    proof = proof_of(lambda _, x: torch.sin(x).exp() * 3)
    proof.recording.values[proof.number("exp")] = torch.zeros(3)
    assert ("replay", "exp_1_2") in proof.findings()


def test_swapped_values_are_found_by_the_replay_check():
    proof = proof_of()
    sin, cos = proof.number("sin"), proof.number("cos")
    values = proof.recording.values
    values[sin], values[cos] = values[cos], values[sin]
    assert {("replay", "sin_1_1"), ("replay", "cos_1_2")} <= set(proof.findings())


def test_a_wrong_function_is_found_by_the_calls_check():
    proof = proof_of(lambda _, x: torch.relu(x) + torch.clamp_min(x, 0))  # which give the same
    row = proof.recording.rows[proof.number("relu")]
    func = proof.recording.rows[proof.number("clamp_min")].operation.func
    proof.replace_row(proof.number("relu"), operation=dataclasses.replace(row.operation, func=func))
    assert ("calls", "relu_1_1") in proof.findings()


def test_wrong_numbers_among_the_arguments_are_found_by_the_calls_check():
    proof = proof_of(lambda _, x: torch.softmax(x[None], dim=1))
    proof.replace_row(proof.number("softmax"), kwargs={"dim": 0})
    assert proof.findings() == [("calls", "softmax_1_2")]


def test_a_wrong_module_is_found_by_the_calls_check():
    proof = Proof(nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.ReLU()), torch.ones(3))
    calls = [call.address for call in proof.recording.module_calls]
    assert calls == ["", "0", "0.0", "1"]
    proof.replace_row(proof.number("linear"), module_call=1)
    assert proof.findings() == [("calls", "linear_1_1")]


def test_a_wrong_shape_is_found_by_the_calls_check():
    proof = proof_of()
    proof.replace_row(proof.number("cos"), shape=(1, 3))
    assert proof.findings() == [("calls", "cos_1_2")]


def test_an_operation_that_is_logged_twice_is_found_by_the_calls_check():
    proof = proof_of()
    cos = proof.number("cos")
    proof.recording.rows.insert(cos + 1, proof.recording.rows[cos])
    proof.recording.values.insert(cos + 1, proof.recording.values[cos])
    proof.recording.storages.insert(cos + 1, proof.recording.storages[cos])
    proof.recording.outputs[:] = [(path, number + 1) for path, number in proof.recording.outputs]
    proof.rebuild()
    assert "calls" in {check for check, _ in proof.findings()}


def test_swapped_names_of_inputs_are_found_by_the_calls_check():
    proof = Proof(Model(lambda _, x, y: x - y), torch.ones(3), torch.ones(3))
    (first, one), (second, other) = proof.recording.inputs
    proof.recording.inputs[:] = [(first, other), (second, one)]
    assert ("calls", "input_1_0") in proof.findings()


def test_a_wrong_branch_is_found_by_the_calls_check():
    def forward(_, x):
        return x * 2 if x.sum() > 0 else x - 1

    proof = proof_of(forward)
    assert proof.recording.booleans == {proof.number("gt"): False}
    proof.recording.booleans[proof.number("gt")] = True
    assert [check for check, _ in proof.findings()] == ["calls"]
    proof.recording.booleans.clear()
    assert [check for check, _ in proof.findings()] == ["calls"]


def test_a_parent_that_is_not_read_is_found_by_the_arguments_check():
    proof = proof_of().copied()
    cos, sin = proof.graph.entry_of[proof.number("cos")], proof.graph.entry_of[proof.number("sin")]
    proof.graph.parents[cos] = (*proof.graph.parents[cos], sin)
    proof.graph.children[sin].append(cos)
    assert proof.findings() == [("arguments", "cos_1_2")]


def test_a_parent_that_is_forgotten_in_the_graph_is_found_by_the_arguments_check():
    proof = proof_of().copied()
    cos, source = (
        proof.graph.entry_of[proof.number("cos")],
        proof.graph.entry_of[proof.number("input")],
    )
    proof.graph.parents[cos] = ()
    proof.graph.children[source].remove(cos)
    assert proof.findings() == [("arguments", "cos_1_2")]


def test_an_argument_that_never_matters_could_not_be_shown():
    @torch.library.custom_op("validated_checks::first", mutates_args=())
    def first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + 1

    report = proof_of(lambda _, x: first(torch.sin(x), torch.cos(x))).report()
    assert report.passed
    assert [(item.check, item.layer, item.argument) for item in report.not_shown] == [
        ("dependence", "first_1_3", 1)
    ]
    assert "whatever cos_1_2 is" in report.not_shown[0].reason
    assert "1 could not be shown" in str(report)


def test_a_missing_operation_is_found_by_the_completeness_check(monkeypatch):
    monkeypatch.setitem(
        operations.KNOWN_OPERATIONS, torch.cos, Operation(torch.cos, "cos", "cos", Kind.READ)
    )
    assert ("completeness", "after sin_1_1") in proof_of().findings()


def test_an_operation_the_log_never_hears_of_is_found_by_the_completeness_check():
    def forward(_, x):
        y = torch.sin(x)
        with NoTorchFunction():
            y = y * 2
        return y + 1

    report = validate_forward_pass(Model(forward), torch.ones(2))
    places = [(finding.check, finding.layer) for finding in report.findings]
    assert places == [
        ("completeness", "after sin_1_1"),
        ("completeness", "add_1_2"),
    ]  # which reads a tensor from nowhere
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
    assert {layer for _, layer in found} <= {"sin_1_1", "sneak_1_2"}


def test_an_operation_that_writes_to_a_tensor_it_was_not_given_is_found():
    stash: list[torch.Tensor] = []

    def reach(a):
        stash[0].add_(1)
        return a.clone()

    library = torch.library.Library("validated_reach", "DEF")
    library.define("reach(Tensor a) -> Tensor")
    library.impl(
        "reach", reach, "CompositeImplicitAutograd"
    )  # made of operations that the dispatcher sees

    def forward(_, x):
        stash[:] = [torch.sin(x)]  # made just now, by an operation of the log
        return torch.ops.validated_reach.reach(x) + 1

    with torch.no_grad():
        report = validate_forward_pass(Model(forward), torch.ones(2))
    library._destroy()
    assert ("completeness", "reach_1_2") in {
        (finding.check, finding.layer) for finding in report.findings
    }


def test_values_that_are_not_copied_before_a_write_are_found(monkeypatch):
    monkeypatch.setattr(Memory, "before_write", lambda self, targets: None)
    monkeypatch.setattr(Memory, "keep_copy", lambda self, entry, tensor: False)
    found = proof_of(lambda _, x: torch.sin(x).add_(1) * 2).findings()
    assert ("replay", "sin_1_1") in found
    assert {layer for _, layer in found} <= {"sin_1_1", "add_1_2"}


def test_a_writer_that_is_left_out_is_found_by_the_arguments_check():
    def forward(_, x):
        y = torch.sin(x)
        y[0].add_(5)
        return y * 2

    proof = proof_of(forward)
    proof.recording.writes.clear()
    proof.rebuild()
    assert proof.findings() == [("arguments", "mul_1_4")]


def test_a_finding_is_one_readable_line():
    proof = proof_of()
    proof.replace_row(proof.number("sub"), references=(proof.number("input"), proof.number("cos")))
    report = proof.report()
    assert str(report.findings[0]) == (
        "[arguments] sub_1_3: expected argument 0 to be the result of sin_1_1; found input_1_0"
    )
    assert not report
    assert "FAILED, 1 finding" in str(report)


def test_a_value_that_nobody_logged_is_one_readable_line():
    def forward(_, x):
        y = torch.sin(x)
        y.numpy()[:] = 7
        return y * 2

    report = proof_of(forward).report()
    assert str(report.findings[0]) == (
        "[arguments] mul_1_2: expected argument 0 (3 float32) to be what sin_1_1 saved; found 3 "
        "of 3 elements differ (at [0]: 0.29552, here 7)"
    )


def test_operations_in_threads_of_the_models_are_part_of_the_proof():
    pool = ThreadPoolExecutor(1)  # whose thread is there before the pass
    pool.submit(int).result()

    def forward(_, x):
        results = []
        thread = threading.Thread(target=lambda: results.append((x * 2).sum()))
        thread.start()
        thread.join()
        return pool.submit(torch.sin, x).result() + results[0]

    start = threading.Thread.start
    report = validate_forward_pass(Model(forward), torch.ones(2))
    pool.shutdown()
    assert threading.Thread.start is start
    assert report.passed, str(report)
    assert report.num_checked["replay"] == 4


def test_a_tensor_from_nowhere_is_found_by_the_completeness_check():
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work():
        while (x := jobs.get()) is not None:
            results.put(torch.sin(x))

    worker = threading.Thread(target=work)  # the model gives it work, and torchlens cannot know
    worker.start()

    def forward(_, x):
        jobs.put(x)
        return results.get() + 1

    report = validate_forward_pass(Model(forward), torch.ones(2))
    jobs.put(None)
    worker.join()
    assert [(finding.check, finding.layer) for finding in report.findings] == [
        ("completeness", "add_1_1")
    ]
    assert "from nowhere" in report.findings[0].found


def test_a_model_that_keeps_a_queue_is_not_made_to_wait_for_ever():
    """A queue's attributes hold the threads that wait at it: restored to what they were, none
    would be woken.
    """
    jobs: queue.Queue[Any] = queue.Queue()
    results: queue.Queue[Any] = queue.Queue()

    def work():
        while (job := jobs.get()) is not None:
            results.put(torch.tanh(job))

    def forward(model, x):
        model.jobs.put(x)
        return model.results.get(timeout=60) + 1

    model = Model(forward)
    model.jobs, model.results = jobs, results
    worker = threading.Thread(target=work)
    worker.start()
    try:
        report = validate_forward_pass(model, torch.rand(3))
    finally:
        jobs.put(None)
        worker.join()
    assert [finding.check for finding in report.findings] == ["completeness"], str(report)


def test_a_constant_of_the_models_is_no_tensor_from_nowhere():
    constant = torch.arange(4.0)
    report = validate_forward_pass(
        Model(lambda _, x: x + constant[2:] * constant[:2]), torch.ones(2)
    )
    assert report.passed, str(report)


def test_a_log_without_the_operations_that_ran_is_found_by_the_completeness_check():
    proof = Proof(Model(lambda _, number: (torch.ones(3) * number).sum().item()), 3.0).copied()
    assert proof.findings() == []
    for name in (
        "recorded",
        "entry_of",
        "parents",
        "children",
        "layers",
        "layer_of",
        "pass_of",
        "params",
    ):
        getattr(proof.graph, name).clear()
    assert proof.findings() == [("completeness", "")]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_every_type_of_number_can_be_proved(dtype):
    report = validate_forward_pass(
        Model(lambda _, x: (x.clone().t().contiguous(), x == x)), torch.ones(2, 3).to(dtype)
    )
    assert report.passed, str(report)


def test_meta_tensors_have_nothing_to_compare():
    report = validate_forward_pass(nn.Linear(3, 2, device="meta"), torch.ones(2, 3, device="meta"))
    assert report.passed, str(report)


def test_text_that_the_logged_run_returns_instead_is_found_by_the_outputs_check():
    """A model that returns no tensor is compared by what it does return."""

    def forward(_, x):
        return {
            "said": f"{torch._C._len_torch_function_stack()} looking",
            "sum": [float((x * 2).sum())],
        }

    report = validate_forward_pass(Model(forward), torch.ones(3))
    (finding,) = [finding for finding in report.findings if finding.check == "outputs"]
    assert "output.said of a plain run ('0 looking')" in str(finding)
    assert "'1 looking'" in str(finding)
    assert report.num_checked["outputs"] == 2


@pytest.mark.parametrize(
    "result",
    [
        "text",
        3,
        float("nan"),
        True,
        np.array([1.0, np.nan]),
        np.array([object()]),
        np.float32(2),
        b"bytes",
        [],
        None,
    ],
)
def test_data_that_is_the_same_is_no_finding(result):
    assert validate_forward_pass(
        Model(lambda _, x: ((x * 2).sum().item(), [result])), torch.ones(3)
    ).passed


def test_a_call_is_at_the_same_line_when_python_has_warmed_up():
    """Python 3.11 comes to make calls of built-in functions by another instruction of the same
    line.
    """
    for num_before in range(12):
        scope: dict[str, Any] = {}
        exec(
            compile(
                "def forward(_, x):\n    return x + sum(part * 2 for part in [x, x])\n",
                __file__,
                "exec",
            ),
            scope,
        )
        for _ in range(num_before):
            scope["forward"](None, torch.ones(3))
        report = validate_forward_pass(Model(scope["forward"]), torch.ones(3))
        assert report.passed, str(report)


def test_a_time_among_the_outputs_is_no_finding():
    report = validate_forward_pass(
        Model(lambda _, x: (x * 2, {"took": time.perf_counter()})), torch.ones(3)
    )
    assert report.passed, report
    assert sum(count for (check, _), count in report.exemptions.items() if check == "outputs") == 1
