"""Joins what the ranks and sessions of a run wrote: everything by series and step, whoever wrote it.

Of sessions that overlap (training went on from a checkpoint), the later one counts. Ranks may have merged their oldest
steps differently (see merging.py): where what they have overlaps, it becomes one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchlens.monitoring.columns import Columns, merged
from torchlens.monitoring.frames import Step
from torchlens.monitoring.merging import as_one
from torchlens.monitoring.segment_contents import SegmentContents
from torchlens.monitoring.views import Scalars, Series, SeriesKey

__all__ = ["Joined"]

_NEVER = 1 << 62


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
            limit = limits.get((segment.rank, segment.session), _NEVER)
            numbers = {own: self._number(key) for own, key in segment.names.items()}
            num_same = next((own for own in range(len(numbers)) if numbers.get(own) != own), len(numbers))
            for step in segment.steps:
                if step.first < limit:
                    steps.append((segment.rank, _cut(_renumbered(step, numbers, num_same), limit)))
            if segment.rank == first_rank:
                for row in segment.scalars:
                    if row[1] < limit:
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


def _renumbered(step: Step, numbers: dict[int, int], num_same: int) -> Step:
    """With the numbers that series have in all files. The first `num_same` have those already."""
    columns = step.columns
    if len(columns) and columns.series[-1] < num_same:  # series are in order
        return step
    unknown = [number for number in columns.series.tolist() if number not in numbers]
    if unknown or not len(columns):
        # A file that does not tell its names is damaged in a way that no checksum shows.
        return Step(step.first, step.last, step.count, step.time, step.offered, step.dropped, merged([]))
    new = [numbers[number] for number in columns.series.tolist()]
    if new == columns.series.tolist():
        return step
    changed = Columns(**{name: getattr(columns, name) for name in Columns.__slots__})
    changed.series = columns.series.copy()
    changed.series[:] = new
    if new != sorted(new):
        changed = merged([changed, merged([])]) if len(set(new)) == len(new) else merged([changed])
    return Step(step.first, step.last, step.count, step.time, step.offered, step.dropped, changed)


def _superseded(segments: Iterable[SegmentContents]) -> Mapping[tuple[int, str], int]:
    """For each session of a rank, the step from which on a later one counts."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        by_rank.setdefault(segment.rank, []).extend(segment.sessions)
    limits: dict[tuple[int, str], int] = {}
    for rank, sessions in by_rank.items():
        limit = _NEVER
        for session in sorted(sessions, key=lambda each: float(each["time"]), reverse=True):
            limits[rank, session["session"]] = limit
            limit = min(limit, session["first_step"])
    return limits


def _cut(step: Step, limit: int) -> Step:
    """A step that was merged from several, the last of which are superseded, stands for the first of them."""
    return step if step.last < limit else replace(step, last=limit - 1, count=min(step.count, limit - step.first))


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
