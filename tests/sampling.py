"""Parameters of tests that check many cases: the first few always run, `make soak` runs the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """The cases (tuples: of several parameters); all after the first `number` are marked `soak`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.soak] if place >= number else [],
        )
        for place, case in enumerate(cases)
    ]
