"""The printed table of a profile."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.profiling.profile_records import made_up, module, operations
from torchlens.profiling.output.table import summary


def rows_of(text: str) -> list[str]:
    """The lines of the table proper, without heading and rule."""
    return text.split("\n\n")[1].splitlines()[2:]


def first_words(text: str) -> list[str]:
    return [row.split()[0] for row in rows_of(text)]


def test_the_table_of_a_profile(golden: Callable[[str, str], None]):
    measurements = made_up(
        flops_not_counted={"fft": 3}, problems=["The backward of step 2 was not timed: it was interrupted."]
    )
    golden("profile_wide.txt", f"{summary(measurements, width=140)}\n")


def test_the_table_in_a_narrow_terminal(golden: Callable[[str, str], None]):
    golden("profile_narrow.txt", f"{summary(made_up(), width=60)}\n")


def test_the_table_of_operations(golden: Callable[[str, str], None]):
    measurements = made_up(level="operation", operations=operations())
    golden("profile_operations.txt", f"{summary(measurements, by='operation', sort_by='forward_time', width=100)}\n")


@pytest.mark.parametrize("width", [30, 48, 60, 80, 100, 120, 200])
def test_the_table_fits_the_terminal(width: int):
    text = str(summary(made_up(problems=["word " * 60]), width=width))
    assert max(map(len, text.splitlines())) <= max(width, 40)
    assert max(map(len, text.split("\n\n")[1].splitlines())) <= width


def test_the_terminal_says_how_wide_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert str(summary(made_up())) == str(summary(made_up(), width=60))


def test_depth_limits_the_tree():
    assert first_words(str(summary(made_up(), depth=0))) == ["Net"]
    assert first_words(str(summary(made_up(), depth=1))) == ["Net", "stem", "head", "spare"]
    assert first_words(str(summary(made_up()))) == ["Net", "stem", "conv", "act", "head", "spare"]


def test_a_large_model_is_cut_to_what_fits_and_says_so():
    inner = [module(f"blocks.{number}", "Block", [], []) for number in range(100)]
    root = module("", "Big", [], [module("blocks", "ModuleList", [], inner)])
    text = str(summary(made_up(root=root)))
    assert first_words(text) == ["Net", "blocks"]
    assert "Shown to depth 1 of 2; summary(depth=2) shows all." in text
    assert len(rows_of(str(summary(made_up(root=root), depth=2)))) == 102


def test_sorting_lists_full_addresses_with_the_most_first():
    text = str(summary(made_up(), sort_by="forward_self_time"))
    assert first_words(text) == ["stem.conv", "stem.act", "Net", "stem", "head", "spare"]
    assert first_words(str(summary(made_up(), sort_by="peak_bytes", limit=2))) == ["Net", "stem"]


def test_what_is_sorted_by_is_always_shown():
    assert "memory added in backward" in str(summary(made_up(), sort_by="added_bytes_backward", width=60))


def test_numbers_are_medians_of_the_measured_steps_and_warm_up_is_left_out():
    (row,) = (row for row in rows_of(str(summary(made_up(), width=200))) if "head" in row)
    assert "625 µs" in row  # of 0.5 and 0.75 ms, not of the 50 ms of the first step


def test_the_table_says_what_was_not_measured():
    text = str(summary(made_up(steps=[], flops_not_counted={"fft": 1})))
    assert "The model was not called, so nothing was measured." in text
    text = str(summary(made_up(flops_not_counted={"fft": 2, "svd": 5}), width=120))
    assert "FLOPs of these are not counted (calls in a step): svd (5), fft (2)." in text
    assert "Modules with parameters that were not called: spare." in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sort_by": "speed"}, "sort_by must be 'forward_time', "),
        ({"sort_by": "forward_tim"}, "Did you mean 'forward_time'"),
        ({"depth": -1}, "depth must be at least 0, got -1"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"by": "layer"}, "by must be 'module', 'operation' or 'type', got 'layer'"),
        ({"by": "operation"}, "level='operation'"),
    ],
)
def test_a_bad_option_says_what_is_accepted(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        summary(made_up(), **options)


def test_columns_go_before_names_are_cut():
    name = "an_attention_dropout_layer"
    root = module("", "Net", made_up().root.calls, [module(name, "Dropout", made_up().modules["head"].calls, [])])
    heading, _, _, row = str(summary(made_up(root=root), width=76)).split("\n\n")[1].splitlines()
    assert row.startswith(f"  {name}  Dropout")
    assert "own" not in heading
    assert f"{name[-8:]}  " in str(summary(made_up(root=root), width=40))
