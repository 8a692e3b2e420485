"""Joins what the ranks and sessions of a run wrote: everything by series and step, whoever wrote
it.

Of sessions that overlap (training went on from a checkpoint), the later one counts. Ranks may have
merged their oldest steps differently (see merging.py): where what they have overlaps, it becomes
one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchlens._monitor.read.views import Scalars, Series, SeriesKey
from torchlens._monitor.store.columns import merged
from torchlens._monitor.store.frames import Step
from torchlens._monitor.store.merging import NEVER, as_one, cut, cut_scalars, renumbered
from torchlens._monitor.store.segment_contents import SegmentContents


class Joined:
    """Everything by series and step, whoever wrote it."""

    def __init__(self, segments: Sequence[SegmentContents]) -> None:
        self.by_module: dict[str, dict[str, dict[str, Series]]] = {}
        self.scalars: dict[str, Scalars] = {}
        self._numbers: dict[tuple[str, str, str], int] = {}
        self.keys: list[SeriesKey] = []
        limits = _superseded(segments)
        first_rank = min((segment.rank for segment in segments), default=0)
        steps: list[tuple[int, Step]] = []
        rows: dict[str, dict[int, list[Any]]] = {}
        for segment in segments:
            limit = limits.get((segment.rank, segment.session), NEVER)
            numbers = {own: self._number(key) for own, key in segment.names.items()}
            num_same = next(
                (own for own in range(len(numbers)) if numbers.get(own) != own), len(numbers)
            )
            for step in segment.steps:
                if step.first < limit:
                    is_same = (
                        len(step.columns) > 0 and step.columns.series[-1] < num_same
                    )  # series are in order
                    steps.append(
                        (segment.rank, cut(step if is_same else renumbered(step, numbers), limit))
                    )
            if segment.rank == first_rank:
                for row in cut_scalars(segment.scalars, segment.steps, limit):
                    rows.setdefault(row[0], {})[row[1]] = row
        self.steps = [_together(group) for group in _overlapping(steps)]
        for key, (module, kind, name) in zip(self.keys, self._numbers, strict=True):
            series = Series(key, self._numbers[module, kind, name], self.steps)
            self.by_module.setdefault(module, {}).setdefault(kind, {})[name] = series
        for name, own in rows.items():
            self.scalars[name] = Scalars(name, [own[step] for step in sorted(own)])

    def key_of(self, number: int) -> SeriesKey:
        """What a series is about."""
        return self.keys[number]

    def _number(self, key: SeriesKey) -> int:
        """One number for the series of that name in all files."""
        short = key[:3]
        if short not in self._numbers:
            self._numbers[short] = len(self.keys)
            self.keys.append(key)
        return self._numbers[short]


def _superseded(segments: Iterable[SegmentContents]) -> Mapping[tuple[int, str], int]:
    """For each session of a rank, the step from which on a later one counts."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        by_rank.setdefault(segment.rank, []).extend(segment.sessions)
    limits: dict[tuple[int, str], int] = {}
    for rank, sessions in by_rank.items():
        limit = NEVER
        for session in sorted(sessions, key=lambda each: float(each["time"]), reverse=True):
            limits[rank, session["session"]] = limit
            limit = min(limit, session["first_step"])
    return limits


def _overlapping(steps: Iterable[tuple[int, Step]]) -> Iterable[list[tuple[int, Step]]]:
    """Those that have steps in common, in order of time."""
    group: list[tuple[int, Step]] = []
    end = -1
    for rank, step in sorted(steps, key=lambda each: (each[1].first, each[1].last)):
        if group and step.first > end:
            yield group
            group = []
        group.append((rank, step))
        end = max(end, step.last)
    if group:
        yield group


def _together(group: Sequence[tuple[int, Step]]) -> Step:
    """One step for what several ranks have of it, or for its parts."""
    if len(group) == 1:
        return group[0][1]
    by_rank: dict[int, list[Step]] = {}
    for rank, step in group:
        by_rank.setdefault(rank, []).append(step)
    ranks = [as_one(own) for own in by_rank.values()]
    return replace(
        ranks[0],
        first=min(step.first for step in ranks),
        last=max(step.last for step in ranks),
        count=max(step.count for step in ranks),
        columns=merged([step.columns for step in ranks]),
    )
