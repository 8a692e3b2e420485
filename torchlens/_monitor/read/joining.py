"""Joins what the ranks of a run wrote, by series and step.

Ranks may have merged their oldest steps differently (see `in_blocks`): steps that overlap become
one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from torchlens._monitor.read.views import Scalars, Series
from torchlens._monitor.store.columns import (
    SeriesKey,
    Step,
    as_one,
    empty_columns,
    merged,
)
from torchlens._monitor.store.lines import ScalarRow
from torchlens._monitor.store.rank_contents import RankContents


class Joined:
    """All ranks as one. A series has one number, its place in `keys`."""

    def __init__(self, ranks: Sequence[RankContents]) -> None:
        self.keys: list[SeriesKey] = []
        self._numbers: dict[tuple[str, str, str], int] = {}
        steps: list[tuple[int, Step]] = []
        for rank in ranks:
            numbers = {own: self._number(key) for own, key in rank.series.items()}
            steps += [(rank.rank, _renumbered(step, numbers)) for step in rank.steps]
        self.steps = [_together(group) for group in _overlapping(steps)]
        self.by_module: dict[str, dict[str, dict[str, Series]]] = {}
        for number, key in enumerate(self.keys):
            series = Series(key, number, self.steps)
            self.by_module.setdefault(key.module, {}).setdefault(key.kind, {})[key.name] = series
        rows: dict[str, dict[int, ScalarRow]] = {}
        for row in ranks[0].scalars if ranks else ():  # all ranks log the same
            rows.setdefault(row.name, {})[row.step] = row
        self.scalars = {
            name: Scalars(name, [own[step] for step in sorted(own)]) for name, own in rows.items()
        }

    def _number(self, key: SeriesKey) -> int:
        short = key[:3]
        if short not in self._numbers:
            self._numbers[short] = len(self.keys)
            self.keys.append(key)
        return self._numbers[short]


def _renumbered(step: Step, numbers: Mapping[int, int]) -> Step:
    """With the numbers that all ranks share. Without its rows if some have no name: the line that
    names them is damaged.
    """
    columns = step.columns
    old = columns.series.tolist()
    if any(number not in numbers for number in old):
        return replace(step, columns=empty_columns())
    new = [numbers[number] for number in old]
    if new == old:
        return step
    changed = replace(columns, series=np.array(new, columns.series.dtype))
    return replace(step, columns=merged([changed]))


def _overlapping(steps: Iterable[tuple[int, Step]]) -> Iterable[list[tuple[int, Step]]]:
    """Groups of steps, each with its rank, that have numbers in common; in order."""
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
    """One step in place of those that several ranks have, or of its parts."""
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
