"""Runs random programs for some minutes: `python tests/fuzz/run.py --minutes 10`. Ends with 1 at
the first disagreement.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.compare import HOW, check_program
from tests.fuzz.programs import programs
from tests.fuzz.view_programs import check_gradients

_PER_ROUND = 200
_GRADIENTS_PER_ROUND = 50


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compares the log of random programs with their plain runs."
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on (10)")
    parser.add_argument(
        "--seed", type=int, default=None, help="the first seed; by default the time"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    number = int(time.time()) if options.seed is None else options.seed
    end = time.monotonic() + options.minutes * 60
    num_programs = num_entries = num_gradients = 0
    while time.monotonic() < end:

        @seed(number)
        @settings(
            max_examples=_PER_ROUND,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(steps=programs, how=st.sampled_from(HOW), has_grad=st.booleans())
        def agree(steps: list, how: str, has_grad: bool) -> None:
            nonlocal num_programs, num_entries
            num_entries += check_program(steps, how, has_grad)
            num_programs += 1

        agree()
        for program in range(number * _GRADIENTS_PER_ROUND, (number + 1) * _GRADIENTS_PER_ROUND):
            for saves in (True, False):
                num_gradients += check_gradients(program, saves).right
        left = max(0.0, end - time.monotonic())
        done = f"{num_programs} programs, {num_entries} entries, {num_gradients} gradients agree"
        print(f"seed {number}: {done}; {left / 60:.1f} min left", flush=True)
        number += 1
    print(
        f"{num_programs} programs with {num_entries} entries: the log and the plain run agree on "
        f"all of them. {num_gradients} gradients through views are right."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
