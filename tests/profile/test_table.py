"""The printed table of a profile."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchlens
from tests.profile.profile_records import MS, call, made_up, module, operations
from torchlens._profile.exports import profile_data, to_pandas
from torchlens._profile.records import Measurements, ProfiledStep, TypicalSteps
from torchlens._profile.table import summary, wrapped


def rows_of(text: str) -> list[str]:
    """The lines of the table proper, without heading and rule."""
    return text.split("\n\n")[1].splitlines()[2:]


def first_words(text: str) -> list[str]:
    return [row.split()[0] for row in rows_of(text)]


def test_the_table_of_a_profile(golden: Callable[[str, str], None]):
    measurements = made_up(
        flops_not_counted={"fft": 3},
        problems=["The backward of step 2 was not timed: it was interrupted."],
    )
    golden("profile_wide.txt", f"{summary(measurements, width=140)}\n")


def test_the_table_in_a_narrow_terminal(golden: Callable[[str, str], None]):
    golden("profile_narrow.txt", f"{summary(made_up(), width=60)}\n")


def test_the_table_of_operations(golden: Callable[[str, str], None]):
    measurements = made_up(level="operation", operations=operations())
    golden(
        "profile_operations.txt",
        f"{summary(measurements, by='operation', sort_by='forward_time', width=100)}\n",
    )


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


def test_the_table_of_a_large_model_is_cut_with_a_note():
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


def test_the_column_that_is_sorted_by_is_always_shown():
    assert "memory added in backward" in str(
        summary(made_up(), sort_by="added_bytes_backward", width=60)
    )


def test_numbers_are_medians_of_the_measured_steps_and_warm_up_is_left_out():
    (row,) = (row for row in rows_of(str(summary(made_up(), width=200))) if "head" in row)
    assert "625 µs" in row  # of 0.5 and 0.75 ms, not of the 50 ms of the first step


def test_the_table_notes_missing_measurements():
    text = str(summary(made_up(steps=[], flops_not_counted={"fft": 1})))
    assert "The model was not called, so nothing was measured." in text
    text = str(summary(made_up(flops_not_counted={"fft": 2, "svd": 5}), width=120))
    assert "FLOPs of these are not counted (calls in a step): svd (5), fft (2)." in text
    assert "Modules with parameters that were not called: spare." in text


class Caller(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Listing(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(part(x))
        return x


@pytest.mark.parametrize("level", ["module", "operation"])
def test_the_table_names_the_modules_that_have_several_rows(level):
    note = "Called by several modules, each with a row below every one of them: {}."
    shared = nn.Linear(4, 4)
    for model, is_noted in (
        (nn.Sequential(Caller(shared), shared), True),
        (Listing(nn.ModuleList([Caller(shared), shared])), True),
        (nn.Sequential(Caller(shared), nn.Sequential(nn.Sequential(shared))), True),
        (nn.Sequential(Caller(shared), Caller(nn.Linear(4, 4))), False),
        (nn.Sequential(Caller(nn.Sequential(shared, shared))), False),
        (Listing(nn.ModuleList([Caller(nn.Linear(4, 4)), nn.ReLU()])), False),
    ):
        with torchlens.profile(model, level=level) as profile:
            model(torch.rand(2, 4))
        names = [
            name
            for name in ("0.inner", "parts.0.inner")
            if note.format(name) in str(profile.summary(width=200))
        ]
        assert len(names) == is_noted, model


def test_the_table_notes_that_flops_leave_out_checkpointing():
    note = "What checkpointing ran again is in the backward time and in no FLOPs."
    once = made_up()
    assert note not in str(summary(once))
    again = call(3, "head", 2, is_recomputed=True)
    assert note in str(summary(made_up(calls=[*once.calls, again])))


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
def test_the_error_for_a_bad_option_lists_the_accepted_values(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        summary(made_up(), **options)


def test_columns_go_before_names_are_cut():
    name = "an_attention_dropout_layer"
    root = module(
        "",
        "Net",
        made_up().root.calls,
        [module(name, "Dropout", made_up().modules["head"].calls, [])],
    )
    heading, _, _, row = str(summary(made_up(root=root), width=76)).split("\n\n")[1].splitlines()
    assert row.startswith(f"  {name}  Dropout")
    assert "own" not in heading
    assert f"{name[-8:]}  " in str(summary(made_up(root=root), width=40))


def listed(text: str, name: str) -> dict[str, str]:
    """The row of that name, by heading, counted from the right: a container has no output."""
    heading, _, *rows = text.split("\n\n")[1].splitlines()
    words = [re.split(r" {2,}", row.strip()) for row in (heading, *rows)]
    return dict(
        zip(words[0][::-1], next(row for row in words if row[0] == name)[::-1], strict=False)
    )


def blocks_of() -> Measurements:
    """A model with a list of two layers, of which each takes long in one of two steps."""
    calls: dict[str, list[Any]] = {"": [], "blocks.0": [], "blocks.1": []}
    for step, (first, second) in {2: (1, 9), 3: (9, 1)}.items():
        calls[""].append(call(step, "", forward_seconds=12 * MS, flops=300))
        for number, time in enumerate((first, second)):
            calls[f"blocks.{number}"].append(
                call(step, f"blocks.{number}", forward_seconds=time * MS, flops=100)
            )
    inside = [
        module(f"blocks.{number}", "Linear", calls[f"blocks.{number}"], []) for number in (0, 1)
    ]
    root = module("", "Net", calls[""], [module("blocks", "ModuleList", [], inside)])
    return made_up(root=root)


@pytest.mark.parametrize(
    ("times", "seconds"), [("typical", "10.0 ms"), ("minimum", "10.0 ms"), ("p95", "10.0 ms")]
)
def test_a_container_has_the_sum_of_its_modules_in_each_step(times: Any, seconds: str):
    row = listed(str(summary(blocks_of(), width=160, times=times)), "blocks")
    assert (
        row["forward"] == seconds
    )  # and not the sum of the slowest times of each, which were in different steps
    assert row["FLOPs"] == "200"
    assert row["FLOP/s"] == "20.0 k"
    assert row["own fwd"] == "-"


def test_a_container_has_numbers_in_every_form():
    measurements = blocks_of()
    table = to_pandas(measurements).set_index("address")
    assert table.loc["blocks", "forward_p95"] == pytest.approx(10 * MS)
    assert table.loc["blocks", "share"] == pytest.approx(10 / 12)
    assert table.loc["blocks.0", "total_seconds"] == pytest.approx(5 * MS)
    assert table.loc["blocks", "flops_per_second"] == pytest.approx(200 / (10 * MS))
    info = profile_data(measurements)["Net"]["children"]["blocks"]["info"]
    assert info["forward_latency"] == pytest.approx(10 * MS)
    assert info["flops"] == 200


def test_flops_per_second_are_the_flops_over_the_time_beside_them():
    row = listed(str(summary(made_up(), width=160)), "head")
    assert (row["FLOPs"], row["forward"], row["FLOP/s"]) == ("200 k", "625 µs", "320 M")
    row = listed(str(summary(made_up(), width=160, times="minimum")), "head")
    assert (row["FLOPs"], row["forward"], row["FLOP/s"]) == ("200 k", "500 µs", "400 M")


@pytest.mark.parametrize("by", ["operation", "type"])
def test_every_table_shows_the_times_that_were_asked_for(by: Any):
    measurements = made_up(level="operation", operations=operations())
    name = {"operation": "conv2d_1_1", "type": "Conv2d"}[by]
    heading = {"operation": "logged fwd", "type": "forward"}[by]
    found = {
        times: listed(str(summary(measurements, by=by, width=160, times=times)), name)[heading]
        for times in ("typical", "minimum", "p95")
    }
    assert found == {"typical": "7.50 ms", "minimum": "6.00 ms", "p95": "8.85 ms"}


def test_times_outside_the_model_are_of_the_same_steps_as_the_rows():
    """A step whose forward pass was quick and whose backward pass was slow is typical for neither
    or for both.
    """
    ns = 1_000_000

    def step(number: int, forward: int, backward: int) -> ProfiledStep:
        whole = forward + backward
        return ProfiledStep(
            number=number, is_warmup=False, start_ns=0, forward_end_ns=forward * ns,
            end_ns=whole * ns,
            outside_spans=(("backward", forward * ns, whole * ns),), forward_seconds=forward * MS,
            backward_seconds=backward * MS, num_backward_passes=1, peak_bytes=None,
            added_bytes=None,
        )  # fmt: skip

    steps = [step(1, 24, 15), step(2, 33, 178), step(3, 8, 148), step(4, 19, 30), step(5, 26, 32)]
    root = module("", "Net", [], [], typical_steps=TypicalSteps.of(steps), warmup_steps=frozenset())
    lines = str(summary(made_up(root=root, steps=steps), width=160)).splitlines()
    backward = (
        next(line for line in lines if line.startswith("backward:"))
        .split(":")[1]
        .split("(")[0]
        .strip()
    )
    whole = next(line for line in lines if line.startswith("a whole step:"))
    assert f"backward {backward}" in whole


def test_names_are_whole_as_long_as_there_is_another_column_to_leave_out():
    calls = [
        call(step, "transformer", forward_seconds=1.0, backward_seconds=2.0) for step in (2, 3)
    ]
    inner = module("transformer", "GPT2ForConditionalGeneration", calls, [])
    long = module("resid_dropout_of_attention", "NewGELUActivation", calls, [])
    root = module("", "Net", calls, [inner, long])
    for width in (80, 100, 160):
        text = str(summary(made_up(root=root), width=width))
        assert "…" not in text
        assert "backward" in text.split("\n\n")[1].splitlines()[0]


def test_a_number_stays_with_its_unit_in_a_narrow_table():
    text = "a whole step:      1.18 s: forward 353 ms, loss 230 µs, backward 827 ms, other 1.01 ms"
    for width in range(40, 90):
        lines = wrapped(text, width, " " * 19)
        assert all(len(line) <= width for line in lines)
        assert not any(line.strip().startswith(("s:", "ms", "µs")) for line in lines)
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())


class Uses(nn.Module):
    """Calls a module, and multiplies its result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ torch.eye(8)


def test_the_modules_of_a_type_are_added_up_without_those_inside():
    """A module that two others call has its FLOPs inside both."""
    shared = nn.Sequential(nn.Linear(8, 8))
    model = nn.Sequential(Uses(shared), Uses(shared), nn.Linear(8, 100))
    p = torchlens.profile(model, torch.rand(4, 8), repeats=1, warmup=0)
    columns: dict[Any, tuple[str, list[str]]] = {
        "flops": ("FLOPs", ["7.42 k", "1.02 k", "-"]),
        "param_bytes": ("parameter memory", ["3.8 KB", "0 B", "0 B"]),
        "gradient_bytes": ("gradient memory", ["3.8 KB", "0 B", "0 B"]),
        "output_bytes": (
            "output memory",
            ["1.6 KB", "128 B", "1.6 KB"],
        ),  # the largest: like peaks, they do not add up
    }
    for quantity, (heading, expected) in columns.items():
        text = str(p.summary(by="type", sort_by=quantity, width=200))
        assert [
            listed(text, name)[heading] for name in ("Linear", "Uses", "Sequential")
        ] == expected


@pytest.mark.parametrize("word", ["forward", "backward", "total"])
def test_the_own_times_of_a_type_are_those_it_shows_anyway(word: Any):
    quantity: Any = f"{word}_self_time"
    text = str(summary(made_up(), by="type", sort_by=quantity, width=200))
    heading = "own time, forward + backward" if word == "total" else f"own {word} time"
    for name in ("Net", "Sequential", "Conv2d"):
        assert listed(text, name)[word] == listed(text, name)[heading]


@pytest.mark.parametrize("word", ["params", "calls", "saved_bytes", "peak_bytes_backward"])
def test_operations_are_not_sorted_by_a_quantity_of_modules(word: Any):
    measurements = made_up(level="operation", operations=operations())
    with pytest.raises(
        ValueError,
        match=rf"With by='operation', sort_by must be .*, got '{word}' .* only modules have",
    ):
        summary(measurements, by="operation", sort_by=word)


def test_a_profile_of_no_steps_has_no_operations_to_list():
    empty = made_up(level="operation", root=module("", "Net", [], []), steps=[], calls=[])
    assert "operation level" in str(summary(empty, by="operation"))


@pytest.mark.parametrize(
    ("word", "meant"), [("Time", "time"), ("memroy", "memory"), ("para", "params")]
)
def test_the_short_words_are_suggested_too(word: Any, meant: str):
    with pytest.raises(ValueError, match=rf"'time', .*, got '{word}' .* Did you mean '{meant}'"):
        summary(made_up(), sort_by=word)
