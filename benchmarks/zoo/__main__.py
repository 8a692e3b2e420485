"""Runs the zoo: `python -m benchmarks.zoo [filter ...] [--jobs N] [--resume]`.

Each model is checked in a process of its own, so that one that crashes or hangs is named and the
rest goes on. Results are kept as they come in output/zoo.jsonl, and `--resume` takes up from there:
the zoo can be run in parts, and stopped at any time. docs/zoo.md is written once all models have a
result, or with `--table`.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

# Before torch is imported, here and in the workers: one thread each, and no log lines from the
# profiler.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from benchmarks.zoo import SPECIMENS
from benchmarks.zoo.check import Result
from benchmarks.zoo.processes import check_all
from benchmarks.zoo.table import write_table

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "output" / "zoo.jsonl"
_TABLE = _ROOT / "docs" / "zoo.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description="Logs and validates hundreds of models."
    )
    parser.add_argument(
        "filter",
        nargs="*",
        help="only models whose name contains one of these: bert, timm/, torch.nn/LSTM",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="models at a time (default: one per core)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds after which a model counts as hanging"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the results there are, and check only the others",
    )
    parser.add_argument(
        "--failed", action="store_true", help="like --resume, but check those that failed again"
    )
    parser.add_argument(
        "--table", action="store_true", help="write docs/zoo.md although some have no result yet"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    options = parser.parse_args()
    chosen = [
        name
        for name in SPECIMENS
        if not options.filter or any(part in name for part in options.filter)
    ]
    if options.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        print(f"No model's name contains {' or '.join(options.filter)}; --list prints them all.")
        return 2
    known = _read_results()
    kept = {}
    if options.resume or options.failed:
        kept = {
            name: result
            for name, result in known.items()
            if not options.failed or result.passed or result.absence
        }
    todo = [name for name in chosen if name not in kept]
    # What is not checked now stays as it was, so that a filter refreshes its part of the table.
    results = {
        name: result for name, result in known.items() if name in SPECIMENS and name not in todo
    }
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text("".join(_line(result) for result in results.values()))
    start = time.monotonic()
    for result in check_all(todo, options.jobs, options.timeout):
        results[result.name] = result
        with _RESULTS.open("a") as file:
            file.write(_line(result))
        num_done = sum(name in results for name in todo)
        print(
            f"[{num_done}/{len(todo)} {time.monotonic() - start:.0f} s] {_describe(result)}",
            flush=True,
        )
    unchecked = [name for name in SPECIMENS if name not in results]
    if options.table or not unchecked:
        write_table(_TABLE, [results[name] for name in SPECIMENS if name in results], unchecked)
        print(f"Written: {_TABLE.relative_to(_ROOT)}")
    else:
        print(f"{len(unchecked)} models have no result yet, so docs/zoo.md stays as it is.")
    failed = [results[name] for name in chosen if name in results and results[name].reasons]
    absent = [name for name in chosen if name in results and results[name].absence]
    print(
        f"{len(chosen) - len(failed) - len(absent)} of {len(chosen)} hold, {len(failed)} fail, "
        f"{len(absent)} absent."
    )
    for result in failed:
        print(f"  {result.name}: {'; '.join(result.reasons)[:400]}")
    return 1 if failed else 0


def _describe(result: Result) -> str:
    if result.absence:
        return f"absent {result.name}: {result.absence}"
    if result.reasons:
        return f"FAIL   {result.name}: {'; '.join(result.reasons)[:400]}"
    trained = f", trained ({result.gradients} gradients)" if result.trained else ""
    return (
        f"holds  {result.name}: {result.entries} entries, {result.layers} layers, time "
        f"×{result.time_ratio}, memory ×{result.memory_ratio}{trained} ({result.seconds:.1f} s)"
    )


# -- results
# --------------------------------------------------------------------------------------------------


def _line(result: Result) -> str:
    return json.dumps(result.to_dict()) + "\n"


def _read_results() -> dict[str, Result]:
    if not _RESULTS.exists():
        return {}
    names = {field.name for field in fields(Result)}
    rows = [json.loads(line) for line in _RESULTS.read_text().splitlines()]
    return {
        row["name"]: Result(**{name: value for name, value in row.items() if name in names})
        for row in rows
    }


if __name__ == "__main__":
    sys.exit(main())
