"""Simplifies a drawing that would be too large to read or to lay out."""

from collections.abc import Iterator
from dataclasses import replace

from torchlens._draw.folding import find_repeats
from torchlens._draw.items import Choices, Grouping, ItemKind, group_entries
from torchlens._history.log import Log

# A drawing with fewer nodes than this says too little to stand for thousands of operations.
_MIN_NODES = 10


def group_within(
    log: Log, choices: Choices, max_nodes: int, reason: str | None = None
) -> tuple[Grouping, str | None]:
    """The items to draw, and, where they had to be made fewer, a sentence that says what was done,
    and why.

    Tried in turn: folding repeats, drawing inner modules as one box, rolling loops, both, and at
    last drawing runs of consecutive operations as one box, which always gets there.
    """
    grouping = group_entries(log, choices)
    num_wanted = len(grouping.items)
    if num_wanted <= max_nodes:
        return grouping, None
    why = f"as {reason or f'{num_wanted:,} nodes would be too many to read'}"
    for tried in _simpler(log, choices):
        grouping = group_entries(log, tried)
        if len(grouping.items) <= max_nodes and (
            tried.is_rolled or len(grouping.items) >= min(_MIN_NODES, max_nodes)
        ):
            return grouping, f"Simplified, {why}: {_done(choices, grouping)}."
    run_length = 2
    while True:
        grouping = group_entries(
            log, replace(choices, is_rolled=False, folding=None, run_length=run_length)
        )
        if len(grouping.items) <= max_nodes or run_length > num_wanted:
            return (
                grouping,
                f"Simplified, {why}: runs of up to {run_length} operations are drawn as one box.",
            )
        run_length *= 2


def _simpler(log: Log, choices: Choices) -> Iterator[Choices]:
    deepest = max((len(chain) for chain in log.graph.module_chains), default=0)
    depths = range(min(deepest, choices.depth - 1), 0, -1)
    for is_rolled in (False, True) if not choices.is_rolled else (True,):
        folding = choices.folding if is_rolled == choices.is_rolled else None
        folded = replace(
            choices, is_rolled=is_rolled, folding=folding or find_repeats(log, is_rolled)
        )
        if is_rolled != choices.is_rolled:
            yield replace(choices, is_rolled=is_rolled, folding=folding)
        yield folded
        for depth in depths:
            yield replace(folded, depth=depth)


def _done(wanted: Choices, grouping: Grouping) -> str:
    """What was drawn otherwise than wanted, and shows in the drawing."""
    choices, words = grouping.choices, []
    if choices.is_rolled != wanted.is_rolled and any(
        len(item.passes) > 1 for item in grouping.items
    ):
        words.append("passes of one layer are drawn as one node")
    if wanted.folding is None and choices.folding is not None and choices.folding.folds:
        words.append("repeated modules are folded")
    if choices.depth != wanted.depth and any(
        item.kind is ItemKind.MODULE for item in grouping.items
    ):
        words.append(f"modules at level {choices.depth} are one box")
    return ", ".join(words)
