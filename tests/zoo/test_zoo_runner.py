"""The runner survives what its models do to it."""

import multiprocessing
import os
import threading

import pytest

from benchmarks.zoo import SPECIMENS, processes
from benchmarks.zoo.check import Result
from benchmarks.zoo.table import write_table


def test_a_crash_a_hang_and_a_result_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(processes, "get_context", lambda method: context)
    monkeypatch.setattr(context, "set_forkserver_preload", lambda modules: None, raising=False)
    behaviours = {
        "crash": lambda: os._exit(3),
        "hang": lambda: threading.Event().wait(),
        "fine": lambda: None,
    }

    def behave(name, sender):
        behaviours[name]()
        sender.send(Result(name, entries=3))
        sender.close()

    monkeypatch.setattr(processes, "_work", behave)
    # The one that hangs is given little time, the others all that a busy machine may take.
    results = {
        result.name: result
        for result in processes.check_all(["crash", "fine"], num_jobs=2, timeout=600)
    }
    results |= {
        result.name: result for result in processes.check_all(["hang"], num_jobs=1, timeout=1)
    }
    assert results["fine"].passed
    assert results["crash"].reasons == ["the process crashed (exit code 3)"]
    assert results["hang"].reasons == ["no result after 1 s; stopped"]


def test_the_table_names_every_failure_with_its_reason(tmp_path) -> None:
    results = [
        Result(
            "torch.nn/good",
            entries=5,
            layers=4,
            passes=2,
            time_ratio=1.5,
            memory_ratio=2.0,
            validated=True,
        ),
        Result("torch.nn/bad", reasons=["something | differs"]),
        Result("timm/gone", absence="timm 9 has no gone"),
    ]
    write_table(tmp_path / "zoo.md", results)
    text = (tmp_path / "zoo.md").read_text()
    assert "| good | 5 | 4 | 2 |  | ×1.5 | ×2.0 | holds |" in text
    assert "- `torch.nn/bad`: something \\| differs" in text
    assert "- `timm/gone`: timm 9 has no gone" in text


def test_names_are_unique_and_there_are_enough() -> None:
    assert len(SPECIMENS) >= 200
    assert all(name == specimen.name for name, specimen in SPECIMENS.items())
