"""Merges steps that were recorded, so that a long run keeps to its budget.

Recorded steps are merged in blocks of 2, 4, 8, ... that begin at the same numbers in every file:
what two ranks have merged differs in how coarse it is, never in where it is cut. So ranks can be
joined again when they are read.

Files of several sessions become one, too: a run that was killed and resumed a thousand times keeps
to its budget. What a later session supersedes is left out, and what the earlier ones had offered is
told at the beginning of the file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchlens._monitor.store.columns import Columns, merged
from torchlens._monitor.store.frames import (
    Frame,
    Kind,
    Step,
    frame_bytes,
    json_frame,
    pack_step,
    parse_json,
    unpack_step,
)

NEVER = 1 << 62


class Source(NamedTuple):
    """A segment that is to be merged: its frames, and what its first one says."""

    frames: Sequence[Frame]
    session: str  # the last one in it
    before: tuple[int, int]  # what the sessions before that one had offered and dropped


class Merged(NamedTuple):
    """What stands in the file after its first frame."""

    level: int
    num_steps: int
    before: tuple[int, int]
    frames: bytes


@dataclass(slots=True, eq=False)
class _Contents:
    names: dict[int, list[Any]] = field(default_factory=dict)
    others: list[Frame] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    scalars: list[list[Any]] = field(default_factory=list)
    dropped: list[dict[str, int]] = field(default_factory=list)
    first_step: int = NEVER  # of its sessions, the smallest
    end: Frame | None = None


def merged_frames(sources: Sequence[Source], level: int, every: int) -> Merged:
    """Several segments, one after the other, in one: with about half the steps, and half the
    numbers of each scalar.

    Of every so many steps one is recorded; 2 ** level of those make a block, or more, until any two
    fall into the same. Counts stay exact.
    """
    ended: dict[
        str, tuple[int, int]
    ] = {}  # what sessions before the last one have offered and dropped
    numbers: dict[tuple[str, ...], int] = {}  # by module, kind and name
    rows: list[list[Any]] = []
    others: list[bytes] = []
    steps: list[Step] = []
    scalars: dict[str, list[list[Any]]] = {}
    drops: list[dict[str, int]] = []
    all_contents = [_contents(source.frames) for source in sources]
    for place, (source, own) in enumerate(zip(sources, all_contents, strict=True)):
        is_over = source.session != sources[-1].session
        later = zip(sources[place + 1 :], all_contents[place + 1 :], strict=True)
        limit = min(
            (each.first_step for other, each in later if other.session != source.session),
            default=NEVER,
        )
        own_steps = own.steps
        if is_over:
            ended[source.session] = max(ended.get(source.session, (0, 0)), _totals(own))
            own_steps = [replace(step, offered=0, dropped=0) for step in own_steps]
        new: dict[int, int] = {}
        for number, row in own.names.items():
            key = tuple(map(str, row[1:4]))
            if key not in numbers:
                numbers[key] = len(rows)
                rows.append([len(rows), *row[1:]])
            new[number] = numbers[key]
        steps += [cut(renumbered(step, new), limit) for step in own_steps if step.first < limit]
        for row in cut_scalars(own.scalars, own.steps, limit):
            scalars.setdefault(row[0], []).append(row)
        drops += own.dropped
        others += [frame_bytes(frame.kind, frame.payload) for frame in own.others]
        if own.end is not None and not is_over:
            others.append(frame_bytes(Kind.END, own.end.payload))
    parts = [json_frame(Kind.NAMES, rows), *dict.fromkeys(others)]
    scalar_rows = [row for own_rows in scalars.values() for row in _merged_scalars(own_rows)]
    if scalar_rows:
        parts.append(json_frame(Kind.SCALARS, scalar_rows))
    if drops:
        total = sum(each["observations"] for each in drops)
        parts.append(json_frame(Kind.DROPPED, {"step": drops[-1]["step"], "observations": total}))
    level, blocks = _blocks(steps, level, every)
    parts += [frame_bytes(Kind.STEP, pack_step(as_one(block))) for block in blocks]
    counts = [*ended.values(), *(source.before for source in sources)]
    before = sum(offered for offered, _ in counts), sum(dropped for _, dropped in counts)
    return Merged(level, len(blocks), before, b"".join(parts))


def _contents(frames: Iterable[Frame]) -> _Contents:
    found = _Contents()
    for frame in frames:
        kind, payload, _ = frame
        if kind == Kind.STEP:
            found.steps.append(unpack_step(payload))
        elif kind == Kind.NAMES:
            found.names.update({row[0]: row for row in parse_json(payload, list)})
        elif kind == Kind.SCALARS:
            found.scalars += parse_json(payload, list)
        elif kind == Kind.DROPPED:
            found.dropped.append(parse_json(payload, dict))
        elif kind == Kind.END:
            found.end = frame
        elif kind != Kind.SEGMENT:
            if kind == Kind.SESSION:
                found.first_step = min(
                    found.first_step, int(parse_json(payload, dict)["first_step"])
                )
            found.others.append(frame)
    return found


def _totals(own: _Contents) -> tuple[int, int]:
    """What a session that is over has offered and dropped, as far as its files go."""
    if own.end is not None:
        told = parse_json(own.end.payload, dict)
        return int(told["offered"]), int(told["dropped"])
    return max(((step.offered, step.dropped) for step in own.steps), default=(0, 0))


def renumbered(step: Step, numbers: Mapping[int, int]) -> Step:
    """With other numbers for its series; empty if it has some without."""
    columns = step.columns
    old = columns.series.tolist()
    if not old or any(number not in numbers for number in old):
        # A file that does not tell its names is damaged in a way that no checksum shows.
        return replace(step, columns=merged([]))
    new = [numbers[number] for number in old]
    if new == old:
        return step
    changed = Columns(**{name: getattr(columns, name) for name in Columns.__slots__})
    changed.series = columns.series.copy()
    changed.series[:] = new
    return replace(step, columns=merged([changed]))


def cut(step: Step, limit: int) -> Step:
    """A step that was merged from several, the last of which are superseded, stands for the first
    of them.
    """
    return (
        step
        if step.last < limit
        else replace(step, last=limit - 1, count=min(step.count, limit - step.first))
    )


def cut_scalars(rows: Iterable[list[Any]], steps: Sequence[Step], limit: int) -> list[list[Any]]:
    """The same for the scalars of a segment: of those merged from several, it is known only where
    they end.
    """
    begins_before = any(step.first < limit for step in steps)
    found: list[list[Any]] = []
    last: dict[str, int] = {}
    for row in rows:
        name, step = row[0], row[1]
        if step >= limit:
            if row[5] == 1 or not begins_before or last.get(name, -1) >= limit - 1:
                continue
            step = limit - 1
        last[name] = step
        found.append([name, step, *row[2:]])
    return found


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
        yield [
            pair[0][0],
            pair[-1][1],
            mean,
            min(row[3] for row in pair),
            max(row[4] for row in pair),
            count,
        ]
