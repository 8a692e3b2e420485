"""Runs a program plainly and logged, and compares the log with what it must say."""

from typing import Any

import torch

from tests.fuzz.machine import Program
from tests.fuzz.oracle import Oracle
from torchlens import log_forward_pass

HOW = ("all", "none", "arguments")


def check_program(steps: list[Any], how: str = "all", has_grad: bool = False) -> int:
    """Raises AssertionError where log and oracle differ; returns the number of entries compared.

    `how`: with every tensor saved, with none, or with the arguments of each call kept too.
    """
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model, inputs = Program(steps), program_inputs()
    model.observer = oracle = Oracle(inputs, [model.memory, model.spread])
    with torch.set_grad_enabled(has_grad):
        expected = model(*inputs)
        oracle.finish(expected)
    expected = tuple(tensor.detach().clone() for tensor in expected)
    after, memory = torch.get_rng_state(), model.memory.clone()

    torch.set_rng_state(state)
    model, inputs_logged = Program(steps), program_inputs()
    with torch.set_grad_enabled(has_grad):
        history = log_forward_pass(
            model,
            inputs_logged,
            layers_to_save="none" if how == "none" else "all",
            save_function_args=how == "arguments",
        )
    assert torch.equal(torch.get_rng_state(), after), "the generator was left in another state"
    assert torch.equal(model.memory, memory), "the buffer was left with another value"
    assert all(map(torch.equal, inputs, inputs_logged)), "the inputs were left with other values"
    _compare(history, oracle, how)
    return len(oracle.entries)


def program_inputs() -> list[torch.Tensor]:
    """What every program is given."""
    return [torch.linspace(-2, 2, 12).reshape(3, 4), torch.linspace(-1, 1, 4)]


def _compare(history: Any, oracle: Oracle, how: str) -> None:
    log = history._log
    rows, graph = log.recording.rows, log.graph
    names = [row.operation.name for row in rows]
    assert [name.strip("_") for name in names] == [
        entry.name.strip("_") for entry in oracle.entries
    ], "other operations"
    assert set(graph.recorded) == oracle.connected(), "other entries belong to the log"
    for entry, number in enumerate(graph.recorded):
        must = oracle.entries[number]
        label = log.label(entry)
        parents = {graph.recorded[parent] for parent in graph.parents[entry]}
        assert parents == must.parents, (
            f"{label} (step {number}) has the parents {_named(parents, names)}, not "
            f"{_named(must.parents, names)}"
        )
        assert tuple(rows[number].shape) == tuple(must.value.shape), (
            f"{label} (step {number}) has another shape"
        )
        if how != "none":
            saved = history.layer_list[entry].tensor_contents
            assert torch.equal(saved, must.value), (
                f"{label} (step {number}) was saved with another value"
            )
        if how == "arguments" and must.given and must.name != "identity":
            kept = history.layer_list[entry]
            for path, value in must.given.items():
                found = _at(
                    (kept.creation_kwargs if isinstance(path[0], str) else kept.creation_args), path
                )
                assert torch.equal(found, value), (
                    f"argument {path} of {label} (step {number}) was kept with another value"
                )


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _named(numbers: set[int], names: list[str]) -> str:
    return ", ".join(f"{names[number]} (step {number})" for number in sorted(numbers)) or "none"
