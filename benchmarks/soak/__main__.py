"""Runs the soak: `python -m benchmarks.soak [--seconds N] [--interrupts N] [--logs N]`."""

import argparse
import random
import sys

from benchmarks.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Logs under load and interruption; exit code 0 if nothing was lost."
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long the threads run (default 60)"
    )
    parser.add_argument("--logs", type=int, default=1000, help="logs in a row (default 1000)")
    parser.add_argument(
        "--interrupts", type=int, default=400, help="random interrupts, at least (default 400)"
    )
    parser.add_argument(
        "--faults", type=int, default=300, help="faults raised by models (default 300)"
    )
    parser.add_argument(
        "--models", type=int, default=100, help="models of the zoo in one process (default 100)"
    )
    parser.add_argument(
        "--large", type=int, default=3, help="how often a large one at their end (default 3)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="for the random moments; a new one each time by default",
    )
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    random.seed(seed)
    print(f"seed {seed}", flush=True)
    figures = soak(
        options.seconds,
        options.logs,
        options.interrupts,
        options.faults,
        num_models=options.models,
        num_large=options.large,
    )
    print(figures)
    return 1 if figures.problems else 0


if __name__ == "__main__":
    sys.exit(main())
