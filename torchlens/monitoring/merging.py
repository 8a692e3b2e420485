"""Merges steps that were recorded, so that a long run keeps to its budget.

Recorded steps are merged in blocks of 2, 4, 8, ... that begin at the same numbers in every file: what two ranks have merged
differs in how coarse it is, never in where it is cut. So ranks can be joined again when they are read.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torchlens.monitoring.columns import merged
from torchlens.monitoring.frames import Frame, Kind, Step, frame_bytes, json_frame, pack_step, parse_json, unpack_step

__all__ = ["as_one", "merged_frames"]


def merged_frames(frames: Iterable[Frame], level: int, every: int) -> tuple[int, int, bytes]:
    """(level, number of steps, frames): the same with about half the steps, and half the numbers of each scalar.

    Of every so many steps one is recorded; 2 ** level of those make a block, or more, until any two fall into the same.
    Counts stay exact.
    """
    names: dict[Any, Any] = {}
    others: list[bytes] = []
    steps: list[Step] = []
    scalars: dict[str, list[list[Any]]] = {}
    dropped: list[dict[str, int]] = []
    for kind, payload, _ in frames:
        if kind == Kind.STEP:
            steps.append(unpack_step(payload))
        elif kind == Kind.NAMES:
            names.update({row[0]: row for row in parse_json(payload, list)})
        elif kind == Kind.SCALARS:
            for row in parse_json(payload, list):
                scalars.setdefault(row[0], []).append(row)
        elif kind == Kind.DROPPED:
            dropped.append(parse_json(payload, dict))
        elif kind != Kind.SEGMENT:
            others.append(frame_bytes(kind, payload))
    parts = [json_frame(Kind.NAMES, list(names.values())), *others]
    rows = [row for own in scalars.values() for row in _merged_scalars(own)]
    if rows:
        parts.append(json_frame(Kind.SCALARS, rows))
    if dropped:
        total = sum(each["observations"] for each in dropped)
        parts.append(json_frame(Kind.DROPPED, {"step": dropped[-1]["step"], "observations": total}))
    level, blocks = _blocks(steps, level, every)
    parts += [frame_bytes(Kind.STEP, pack_step(as_one(block))) for block in blocks]
    return level, len(blocks), b"".join(parts)


def _blocks(steps: Sequence[Step], level: int, every: int) -> tuple[int, list[list[Step]]]:
    while True:
        found: dict[int, list[Step]] = {}
        for step in steps:
            found.setdefault(step.first // every >> level, []).append(step)
        if len(found) < len(steps) or len(steps) < 2:
            return level, list(found.values())
        level += 1


def as_one(steps: Sequence[Step]) -> Step:
    """One step that stands for several of one rank: neighbours, or parts of the same."""
    if len(steps) == 1:
        return steps[0]
    last = steps[-1]
    return Step(
        first=min(step.first for step in steps),
        last=max(step.last for step in steps),
        count=sum({(step.first, step.last): step.count for step in steps}.values()),
        time=last.time,
        offered=last.offered,
        dropped=last.dropped,
        columns=merged([step.columns for step in steps]),
    )


def _merged_scalars(rows: list[list[Any]]) -> Iterable[list[Any]]:
    for place in range(0, len(rows), 2):
        pair = rows[place : place + 2]
        count = sum(row[5] for row in pair)
        mean = sum(row[2] * row[5] for row in pair) / count
        yield [pair[0][0], pair[-1][1], mean, min(row[3] for row in pair), max(row[4] for row in pair), count]
