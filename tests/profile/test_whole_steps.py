"""What a step as a whole is made of."""

from typing import Any

import pytest

from torchlens._profile.records import ProfiledStep


def step(*spans: tuple[str, int, int]) -> ProfiledStep:
    """A step of 100 seconds, the first 10 of them the forward pass."""
    second = 1_000_000_000
    return ProfiledStep(
        number=1, is_warmup=False, start_ns=0, forward_end_ns=10 * second, end_ns=100 * second,
        outside_spans=tuple((kind, start * second, end * second) for kind, start, end in spans),
        forward_seconds=10.0,
        backward_seconds=30.0, num_backward_passes=1, peak_bytes=None, added_bytes=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        pytest.param([("backward", 20, 60), ("optimizer", 70, 80)], {"loss": 10,
        "backward_call": 40, "optimizer": 10},
                     id="one after the other"),
        pytest.param([("data", 12, 18), ("backward", 20, 60)], {"loss": 4, "data": 6,
        "backward_call": 40},
                     id="the next batch is fetched before the backward pass"),
        pytest.param([("optimizer", 30, 35), ("optimizer", 40, 45), ("backward", 20, 60)],
                     {"loss": 10, "backward_call": 30, "optimizer": 10}, id="the optimizer steps "
                                                                            "in the backward pass"),
        pytest.param([("backward", 20, 60), ("optimizer", -5, 80)], {"loss": 10,
        "backward_call": 40, "optimizer": 20},
                     id="a closure runs it all"),
        pytest.param([("data", 2, 5), ("backward", 20, 60)], {"loss": 10, "data": 0,
        "backward_call": 40},
                     id="data in the forward pass"),
        pytest.param([("optimizer", 30, 40)], {"optimizer": 10}, id="no backward pass"),
    ],
)  # fmt: skip
def test_every_moment_of_a_step_counts_once(spans: Any, expected: dict[str, float]) -> None:
    whole = step(*spans)
    parts = {
        name: getattr(whole, f"{name}_seconds")
        for name in ("loss", "backward_call", "optimizer", "data")
    }
    assert {name: value for name, value in parts.items() if value is not None} == expected
    assert (
        whole.forward_seconds + sum(expected.values()) + whole.other_seconds == whole.wall_seconds
    )
