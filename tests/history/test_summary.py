"""What a model costs, as a table."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl
from tests.failures import partial_history
from tests.networks import MLP, Model, Recurrent, TinyGPT


def timed(history: tl.ModelHistory) -> tl.ModelHistory:
    """The history with times that are the same everywhere."""
    recording = history._log.recording
    recording.rows[:] = [
        row._replace(seconds=1e-5 * number) for number, row in enumerate(recording.rows)
    ]
    recording.seconds_forward = 0.5
    return history


@pytest.fixture
def gpt() -> tl.ModelHistory:
    return timed(tl.get_model_metadata(TinyGPT(), torch.zeros(1, 6, dtype=torch.long)))


def test_the_layers_of_a_model(gpt: tl.ModelHistory, golden: Callable[[str, str], None]) -> None:
    golden("summary_layers.txt", f"{gpt.summary(width=100)}\n")


def test_the_modules_of_a_model(gpt: tl.ModelHistory, golden: Callable[[str, str], None]) -> None:
    golden("summary_modules.txt", f"{gpt.summary(depth=3, width=100)}\n")


def test_the_most_expensive_come_first(
    gpt: tl.ModelHistory, golden: Callable[[str, str], None]
) -> None:
    golden("summary_sorted.txt", f"{gpt.summary(sort_by='flops', limit=5, width=80)}\n")


@pytest.mark.parametrize("width", [50, 60, 80, 100, 140])
@pytest.mark.parametrize("depth", [None, 3])
def test_the_table_fits(gpt: tl.ModelHistory, width: int, depth: int | None) -> None:
    lines = str(gpt.summary(depth, width=width)).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[2].startswith("layer" if depth is None else "module")
    assert all(name in lines[2] for name in ("params", "FLOPs", "time"))


def test_without_a_width_it_is_the_terminals(
    gpt: tl.ModelHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert str(gpt.summary()) == str(gpt.summary(width=70)) != str(gpt.summary(width=120))


def test_passes_of_a_layer_are_one_row() -> None:
    history = tl.get_model_metadata(Recurrent(), torch.ones(2, 4))
    table = history.summary().to_pandas().set_index("layer")
    assert table.loc["linear_1_1", ["calls", "params", "flops"]].tolist() == [
        4,
        20,
        4 * 2 * 2 * 4 * 4,
    ]


def test_the_rows_add_up_to_the_totals(gpt: tl.ModelHistory) -> None:
    layers, modules = gpt.summary().to_pandas(), gpt.summary(depth=0).to_pandas()
    assert layers["flops"].sum() == modules["flops"][0] == gpt.total_flops
    assert (
        layers["flops_backward"].sum() == modules["flops_backward"][0] == gpt.total_flops_backward
    )
    assert layers["time"].sum() == pytest.approx(modules["time"][0])
    assert modules["params"][0] == gpt.total_params
    top = gpt.summary(depth=1).to_pandas()
    assert (
        top["params"][1:].sum() == gpt.total_params + 88
    )  # the head shares the weights of the embedding
    assert top["flops"][1:].sum() == gpt.total_flops


def test_a_shared_parameter_counts_once() -> None:
    model = Model(
        lambda self, x: self.second(self.first(x)), first=nn.Linear(4, 4), second=nn.Linear(4, 4)
    )
    model.second.weight = model.first.weight
    model.first.bias.requires_grad_(False)
    summary = tl.get_model_metadata(model, torch.rand(2, 4)).summary(depth=1)
    assert summary.to_pandas()["params"].tolist() == [24, 20, 20]
    assert summary.to_pandas()["params_trainable"].tolist() == [20, 16, 20]
    assert "24 (96 B), 20 trainable" in str(summary)


def test_parameters_that_nothing_reads_are_told() -> None:
    model = Model(lambda self, x: self.used(x), used=nn.Linear(4, 4), spare=nn.Linear(4, 2))
    assert "30 (120 B), 30 trainable, 10 not used" in str(
        tl.get_model_metadata(model, torch.rand(2, 4)).summary()
    )


def test_what_is_not_counted_is_told() -> None:
    model = Model(lambda self, x: torch.linalg.matrix_exp(self.fc(x)), fc=nn.Linear(4, 4))
    history = tl.get_model_metadata(model, torch.rand(4, 4))
    text = str(history.summary(depth=1))
    assert "not counted  linalgmatrixexp ×1" in text
    assert "≥ 128" in text
    assert history.summary().to_pandas()["flops"].isna().tolist() == [False, False, True]


def test_backward_times_are_shown_once_there_are_any() -> None:
    history = tl.log_forward_pass(MLP(), torch.rand(2, 4), save_gradients=True)
    assert "backward " not in str(history.summary(width=120)).splitlines()[2]
    history["output_1"].tensor_contents.sum().backward()
    assert "backward" in str(history.summary(width=120)).splitlines()[2]
    assert history.summary(sort_by="backward_time").to_pandas()["backward_time"][0] > 0


def test_a_failed_pass_is_summed_up_as_far_as_it_got() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(RuntimeError) as caught:
        tl.log_forward_pass(model, torch.ones(2, 4))
    summary = partial_history(caught.value).summary(depth=1)
    assert str(summary).startswith("Sequential (the pass failed)")
    assert summary.to_pandas()["flops"].tolist()[:2] == [80, 80]


def test_long_names_keep_their_end() -> None:
    model = Model(lambda self, x: self.a_module_with_quite_a_long_name.and_another_one_inside_it(x))
    model.a_module_with_quite_a_long_name = nn.Module()
    model.a_module_with_quite_a_long_name.and_another_one_inside_it = nn.Linear(4, 4)
    text = str(tl.get_model_metadata(model, torch.rand(2, 4)).summary(width=80))
    assert "inside_it" in text
    assert "a_module_with" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": -1}, "depth must be at least 0, got -1"),
        ({"depth": True}, "depth must be a whole number, got True"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"width": "wide"}, "width must be a whole number, got 'wide'"),
        (
            {"sort_by": "speed"},
            "'parameters' or 'calls', or None, got 'speed'",
        ),
    ],
)
def test_bad_options_say_what_is_accepted(
    gpt: tl.ModelHistory, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        gpt.summary(**options)
