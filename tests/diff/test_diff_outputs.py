"""Outputs: in another order, missing, by their names; whatever `diff` says of them, it is of one
mind.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchlens as tl

X = torch.linspace(-1.0, 1.3, 24).reshape(4, 6).sin()


class Model(nn.Module):
    """Two layers, and what is returned of them."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def compared(ours: Any, theirs: Any, **options: Any) -> tl.Diff:
    return tl.diff(
        tl.log_forward_pass(Model(ours), X), tl.log_forward_pass(Model(theirs), X), **options
    )


def says_they_differ(diff: tl.Diff) -> bool:
    """Whether all that a diff tells says so."""
    text = diff.text(200)
    return (
        not diff.ok
        and diff.first is not None
        and "output    differs" in text
        and "They agree" not in text
    )


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "label"),
    [
        (lambda m, x: m.a(x), lambda m, x: m.a(x).flip(0), "flip_1_2"),
        (lambda m, x: m.a(x), lambda m, x: m.a(x).roll(1, 1), "roll_1_2"),
        (lambda m, x: m.a(x), lambda m, x: m.a(x).reshape(6, 4), "reshape_1_2"),
        (lambda m, x: m.a(x), lambda m, x: m.a(x).reshape(3, 8), "reshape_1_2"),
        (lambda m, x: m.a(x), lambda m, x: m.a(x)[:, [1, 0, 2, 3, 4, 5]], "getitem_1_2"),
        (lambda m, x: m.a(x), lambda m, x: m.a(x).flip(0).t(), "t_1_3"),
        (lambda m, x: m.a(x).flip(0), lambda m, x: m.a(x), "linear_1_1"),
        (lambda m, x: torch.fft.fft(m.a(x)), lambda m, x: torch.fft.fft(m.a(x)).conj(), "conj_1_3"),
        (
            lambda m, x: m.a(x).sort(-1)[0],
            lambda m, x: m.a(x).sort(-1, descending=True)[0],
            "sort_1_2",
        ),
        (lambda m, x: (x, m.a(x)), lambda m, x: (x.flip(0), m.a(x)), "flip_1_1"),
        (lambda m, x: (m.a(x), m.b(x)), lambda m, x: (m.a(x), m.b(x).flip(0)), "flip_1_3"),
    ],
)
def test_an_output_in_another_order_is_a_divergence_at_the_last_operation(
    ours: Any, theirs: Any, label: str, isolate: bool
) -> None:
    diff = compared(ours, theirs, isolate=isolate)
    assert says_they_differ(diff)
    assert [culprit.candidate for culprit in diff.culprits] == [label]
    assert diff.first is not None
    assert diff.first.reason
    assert diff.outputs.mended == (0.0 if isolate else None)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda m, x: m.a(x), lambda m, x: m.a(x).t()),
        (
            lambda m, x: m.a(x).reshape(2, 2, 3, 2),
            lambda m, x: m.a(x).reshape(2, 2, 3, 2).permute(0, 2, 3, 1),
        ),
        (lambda m, x: m.a(x), lambda m, x: m.a(x).reshape(-1)),
        (lambda m, x: m.a(x).flip(0).flip(1), lambda m, x: m.a(x).flip(0, 1)),
        (lambda m, x: m.a(x).flip(0).double(), lambda m, x: m.a(x).flip(0)),
    ],
)
def test_an_output_in_another_layout_is_the_same(ours: Any, theirs: Any, isolate: bool) -> None:
    diff = compared(ours, theirs, isolate=isolate)
    assert diff.ok
    assert diff.outputs.agree
    assert "output    the same" in diff.text(200)


def test_another_order_behind_another_mistake_is_found_with_isolate() -> None:
    diff = compared(
        lambda m, x: torch.tanh(m.a(x)), lambda m, x: torch.relu(m.a(x)).flip(0), isolate=True
    )
    assert [culprit.candidate for culprit in diff.culprits] == ["relu_1_2", "flip_1_3"]
    assert diff.outputs.mended == 0


@pytest.mark.parametrize("isolate", [False, True])
def test_another_value_is_returned_where_the_reference_returns_one_twice(isolate: bool) -> None:
    def twice(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        return h, h

    def once(m: Any, x: torch.Tensor) -> Any:
        h = m.a(x)
        return h, m.b(h)

    for ours, theirs, label in ((twice, once, "linear_2_2"), (once, twice, "linear_1_1")):
        diff = compared(ours, theirs, isolate=isolate)
        assert says_they_differ(diff)
        assert [culprit.candidate for culprit in diff.culprits] == [label]
        assert diff.outputs.mended == (0.0 if isolate else None)


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs", "missing"),
    [
        (lambda m, x: (m.a(x), m.b(x)), lambda m, x: (m.a(x),), ("output.1",)),
        (lambda m, x: (m.a(x), m.b(x)), lambda m, x: (m.a(x), None), ("output.1",)),
        (lambda m, x: (m.a(x), m.b(x)), lambda m, x: m.b(x), ("output.0",)),
        (lambda m, x: {"a": m.a(x), "b": m.b(x)}, lambda m, x: {"b": m.b(x)}, ("output.a",)),
    ],
)
def test_an_output_that_only_one_side_returns_is_a_difference(
    ours: Any, theirs: Any, missing: tuple[str, ...], isolate: bool, tmp_path: Any
) -> None:
    for diff, whose, other in (
        (compared(ours, theirs, isolate=isolate), "candidate", "reference"),
        (compared(theirs, ours, isolate=isolate), "reference", "candidate"),
    ):
        assert says_they_differ(diff)
        assert (diff.outputs.missing, diff.outputs.extra) == (
            (missing, ()) if whose == "candidate" else ((), missing)
        )
        assert [culprit.reason for culprit in diff.culprits] == [
            f"the {whose} does not return {missing[0]}"
        ]
        assert (
            f"output    differs: {missing[0]} only in the {other}; the others: the same"
            in diff.text(200)
        )
        assert diff.to_json()
        diff.explore(tmp_path / "diff.html")
        assert f"does not return {missing[0]}" in (tmp_path / "diff.html").read_text()


def test_nothing_returned_is_a_difference() -> None:
    def nothing(m: Any, x: torch.Tensor) -> None:
        m.a(x)

    diff = compared(lambda m, x: m.a(x), nothing)
    assert says_they_differ(diff)
    assert "output    differs: output only in the reference\n" in diff.text(200)
    assert compared(nothing, nothing).ok


@pytest.mark.parametrize("isolate", [False, True])
def test_outputs_correspond_by_their_keys(isolate: bool) -> None:
    def by_name(m: Any, x: torch.Tensor) -> Any:
        return {"a": m.a(x), "b": [m.b(x), x + 1]}

    def in_another_order(m: Any, x: torch.Tensor) -> Any:
        return {"b": [m.b(x), x + 1], "a": m.a(x)}

    def exchanged(m: Any, x: torch.Tensor) -> Any:
        return {"a": m.b(x), "b": [m.a(x), x + 1]}

    assert compared(by_name, in_another_order, isolate=isolate).ok
    assert says_they_differ(compared(by_name, exchanged, isolate=isolate))
    diff = compared(by_name, lambda m, x: {"b": [m.b(x) * 1.5, x + 1]}, isolate=isolate)
    assert [culprit.reference for culprit in diff.culprits] == ["linear_2_2", "linear_1_1"]
    assert diff.outputs.missing == ("output.a",)


def test_outputs_without_common_keys_correspond_by_their_order() -> None:
    assert compared(lambda m, x: {"a": m.a(x), "b": m.b(x)}, lambda m, x: (m.a(x), m.b(x))).ok
