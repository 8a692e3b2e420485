"""Mistakes that are planted into ports are located; `python -m benchmarks.planted` plants all of
them.
"""

from typing import Any

import pytest

from benchmarks.planted.__main__ import PORTS, clean, trial

# A few of each port, of different kinds; the name of the mistake, and a word that its reason must
# have.
PLANTED = [
    ("transformer", "no causal mask", "without a mask"),
    ("transformer", "softmax over the wrong axis", "softmax over the heads"),
    ("transformer", "a residual left out", "leaves out add_4_41"),
    ("transformer", "positions off by one", "add_1_2 is not in the reference"),
    ("convnet", "BatchNorm in training mode", "running_var"),
    ("convnet", "BGR for RGB", ""),
    ("convnet", "padding at the end, as 'SAME' with stride 2", ""),
    ("convnet", "two kernels swapped", "other weights"),
    (
        "recurrent",
        "the LSTM's gates in the order i f o g",
        "gates are in another order: in the order 1 2 4 3",
    ),
    ("recurrent", "sigmoid for tanh in the LSTM", "tanh in place of"),
    ("unet", "align_corners", "align_corners False in the reference, True in the candidate"),
    ("unet", "concatenated in the other order", "in another order"),
]


@pytest.mark.parametrize("name", PORTS)
def test_a_clean_port_has_no_culprits(name: str) -> None:
    diff = clean(PORTS[name])
    assert diff.ok
    assert diff.largest_own < 8.5


@pytest.mark.parametrize(("name", "mistake", "reason"), PLANTED)
def test_a_planted_mistake_is_located(name: str, mistake: str, reason: str) -> None:
    done: Any = trial(PORTS[name], mistake)
    assert done.is_located
    assert done.num_extra <= 1
    assert done.first_is_it
    assert reason in done.reason
    assert done.diff.outputs.mended < 1e-5 < done.diff.outputs.error
