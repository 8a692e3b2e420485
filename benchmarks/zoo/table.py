"""The table of results, for people."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.zoo.check import Result

__all__ = ["write_table"]

_INTRODUCTION = """\
# The zoo

Architectures written by others, each logged and compared with a plain run. `make zoo` writes this page;
`make zoo FILTER=bert` checks the models with *bert* in their name, and `make zoo ARGS=--resume` goes on where a run was
stopped. All have random weights and a small input; those of transformers are made of configurations shrunk to tiny sizes.

For each model, in eval mode:

- it returns the same as a plain run from the same seed, and leaves every generator in the same state;
- what plain forward hooks see each module return is what the log has for that module, pass by pass;
- every field of every entry can be read, and the history can be printed and turned into a table;
- torch's namespaces hold the same objects as before, and the model has no hook or attribute that it did not have;
- `validate_forward_pass` finds nothing: outputs, arguments, replay, dependence, completeness (one level below, at the
  dispatcher).

All run in training mode with `save_gradients=True`, too, except the few whose own backward pass raises (they are listed
below): outputs, random numbers, buffers and the gradients of all parameters equal those of a plain step, and so does the
gradient of every tensor that a module returned: a hook on the tensor itself has it in the plain step. *Gradients* counts
these.

*Entries* are logged tensors, *layers* count repeated passes once, and *passes* is the largest number of passes of a layer.
*Time* and *memory* are the cost of logging everything, divided by that of the plain forward pass: the better of two runs,
and the most memory that tensors held at one time (weights and input not counted); the summary has their medians. Time
is the processor's. These models are small and run for milliseconds, so it is a rough figure and mostly the fixed cost of a
call; it is missing where it was not measured.
`make bench` measures the cost on models of real size.
"""


def write_table(path: Path, results: list[Result], unchecked: Sequence[str] = ()) -> None:
    """Writes the page for these results, and names the models that have none yet."""
    failed = [result for result in results if result.reasons]
    absent = [result for result in results if result.absence]
    held = [result for result in results if result.passed]
    lines = [_INTRODUCTION, "## Summary", ""]
    lines += [
        "| source | models | hold | fail | trained | gradients | entries | time | memory |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    sources = list(dict.fromkeys(_source(result) for result in results))
    lines += [
        _summary(source, [result for result in results if _source(result) == source])
        for source in sources
    ]
    lines += [_summary("**all**", results), ""]
    lines += [f"Made with Python {platform.python_version()}, {', '.join(_versions())}.", ""]
    if failed:
        lines += ["## What does not hold, and why", ""]
        lines += [f"- `{result.name}`: {_escaped('; '.join(result.reasons))}" for result in failed]
        lines.append("")
    if absent:
        lines += ["## Not in the installed version of their library", ""]
        lines += [f"- `{result.name}`: {_escaped(result.absence)}" for result in absent]
        lines.append("")
    untrained = [result for result in held if result.untrained]
    if untrained:
        lines += ["## Not trained: a plain step of the model raises", ""]
        lines += [f"- `{result.name}`: {_escaped(result.untrained)}" for result in untrained]
        lines.append("")
    if unchecked:
        lines += ["## Not checked yet", "", ", ".join(f"`{name}`" for name in unchecked), ""]
    for source in sources:
        own = [result for result in results if _source(result) == source and not result.absence]
        lines += [
            f"## {source}",
            "",
            "| model | entries | layers | passes | gradients | time | memory | verdict |",
            "|---|--:|--:|--:|--:|--:|--:|---|",
        ]
        lines += [_row(result) for result in own]
        lines.append("")
    assert len(held) + len(failed) + len(absent) == len(results)
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n")


def _source(result: Result) -> str:
    return result.name.partition("/")[0]


def _summary(source: str, results: list[Result]) -> str:
    times = [result.time_ratio for result in results if result.time_ratio is not None]
    memories = [result.memory_ratio for result in results if result.memory_ratio is not None]
    return (
        f"| {source} | {len(results)} | {sum(result.passed for result in results)} | "
        f"{sum(bool(result.reasons) for result in results)} | "
        f"{sum(result.trained for result in results)} | "
        f"{sum(result.gradients for result in results)} | "
        f"{sum(result.entries for result in results)} | {_times(median(times) if times else None)} "
        f"| {_times(median(memories) if memories else None)} |"
    )


def _row(result: Result) -> str:
    name = result.name.partition("/")[2]
    verdict = (
        "holds, trained"
        if result.passed and result.trained
        else "holds"
        if result.passed
        else "**fails**"
    )
    return (
        f"| {name} | {result.entries} | {result.layers} | {result.passes} | "
        f"{result.gradients or ''} | "
        f"{_times(result.time_ratio)} | {_times(result.memory_ratio)} | {verdict} |"
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"×{ratio:.1f}"


def _escaped(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;")


def _versions() -> list[str]:
    found = [f"torch {torch.__version__.partition('+')[0]}"]
    for name in ("torchvision", "timm", "transformers", "torch_geometric"):
        try:
            found.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return found
