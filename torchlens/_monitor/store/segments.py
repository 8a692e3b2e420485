"""Writes the segments of one rank, and keeps them within their budget."""

import os
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from time import time
from typing import Any, NamedTuple

from torchlens._monitor.store.folder import (
    replaced_files,
    segment_files,
    segment_path,
    unfinished_files,
)
from torchlens._monitor.store.frames import (
    Damage,
    Frame,
    Kind,
    before_of,
    json_frame,
    parse_json,
    read_frames,
)
from torchlens._monitor.store.merging import Source, merged_frames

# A budget is this many segments.
_SEGMENTS_IN_BUDGET = 16
# What reading frames raises that are whole but make no sense.
_NONSENSE = (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError)
# A file that was being merged so many seconds ago never will be: its process was killed.
_LONG_AGO = 60.0


class _Closed(NamedTuple):
    """A segment that is not written to any more."""

    first: int
    number: int
    level: int  # its steps are merged in blocks of 2 ** level (see merging.py)
    session: str  # the last one in it; "" if nothing is in it
    size: int
    before: tuple[int, int] = (0, 0)  # what the sessions before that one had offered and dropped
    is_readable: bool = True
    has_steps: bool = True  # more than one, or perhaps


class SegmentWriter:
    """Appends frames. Each call of `write` is one `write` of the system: what it returned from
    survives the process.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        session: str,
        budget: int,
        every: int,
        names: Callable[[], Iterable[Any]],
    ) -> None:
        self.folder, self.rank, self.session = folder, rank, session
        self._budget = budget
        self._every = every
        self._segment_bytes = max(budget // _SEGMENTS_IN_BUDGET, 1 << 14)
        self._names = names  # all that are known so far, for the beginning of a segment
        self._closed: list[_Closed] = []
        self._number = 0
        self._file = -1
        self._has_name = False
        self._size = 0
        self._largest = 0  # bytes that were written at once

    def open(self) -> None:
        """Begins the first segment, after those that earlier processes left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        existing = [each for each in segment_files(self.folder) if each.rank == self.rank]
        for path in unfinished_files(self.folder, self.rank, time() - _LONG_AGO):
            path.unlink(missing_ok=True)
        for path in replaced_files(self.folder, self.rank):
            path.unlink(missing_ok=True)
        self._closed = [_described(each.path, each.first, each.number) for each in existing]
        self._number = existing[-1].number if existing else 0
        self._begin()

    @property
    def total_bytes(self) -> int:
        """What the files of this rank take."""
        return self._size + sum(each.size for each in self._closed)

    def write(self, frames: bytes) -> None:
        """Appends frames, and begins a new segment if this one is large enough, or is gone."""
        if self._file >= 0 and self._is_removed():
            self.close()
        elif self._file >= 0 and self._size > self._segment_bytes:
            self._end()
        if self._file < 0:
            self._begin()
        self._append(frames)
        self._largest = max(self._largest, len(frames))

    def keep_budget(self) -> bool:
        """Merges what is oldest until the files take no more than they may. False if nothing is
        left to merge.
        """
        # There is room for a step, which is written before anything is merged, and for a segment
        # with one step more: it is written before those that it was merged from are removed. The
        # process may be killed in between.
        room = self._segment_bytes + 2 * self._largest
        while self.total_bytes > self._budget - room:
            if not self._merge_once():
                return self.total_bytes <= self._budget
        return True

    def close(self) -> None:
        """No more is written. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin(self) -> None:
        number = self._number
        while True:  # somebody else may have begun one meanwhile
            number += 1
            path = segment_path(self.folder, self.rank, number, number)
            try:
                self._file = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644
                )
                break
            except FileExistsError:
                continue
        self._size = 0
        head = _segment_frame(self.rank, number, number, 0, self.session)
        try:
            self._append(head + json_frame(Kind.NAMES, list(self._names())))
        except OSError:  # frames without those before them mean nothing
            self.close()
            path.unlink(missing_ok=True)
            raise
        self._number = number
        self._has_name = (
            os.fstat(self._file).st_nlink > 0
        )  # there are file systems that do not count them

    def _is_removed(self) -> bool:
        """Whether somebody removed the file: what is written to it, nobody would ever read."""
        return self._has_name and os.fstat(self._file).st_nlink == 0

    def _end(self) -> None:
        self.close()
        self._closed.append(_Closed(self._number, self._number, 0, self.session, self._size))

    def _append(self, data: bytes) -> None:
        """Writes all of it or, where the disk is full, nothing: after a part of a frame no other
        could be read.
        """
        view, start = memoryview(data), self._size
        try:
            while view:
                written = os.write(self._file, view)
                self._size += written
                view = view[written:]
        except OSError:
            if self._size > start:
                os.ftruncate(self._file, start)
                self._size = start
            raise

    # -- the budget
    # ----------------------------------------------------------------------------------------------

    def _merge_once(self) -> bool:
        """Merges two neighbours, the oldest of those merged least; or the steps of one. False if
        nothing is left.
        """
        closed = self._closed
        pairs = [
            (one.level + two.level, place)
            for place, (one, two) in enumerate(pairwise(closed))
            if one.is_readable
            and two.is_readable
            # Of a session that is over, all is in the first of them: what it had offered is told
            # once.
            and (
                one.session == two.session
                or not two.session
                or not place
                or closed[place - 1].session != one.session
            )
        ]
        singles = [
            (each.level, place)
            for place, each in enumerate(closed)
            if each.is_readable and each.has_steps
        ]
        if pairs:
            place, count = min(pairs)[1], 2
        elif singles:
            place, count = min(singles)[1], 1
        else:
            return False
        self._closed[place : place + count] = self._merged(closed[place : place + count])
        return True

    def _merged(self, chosen: list[_Closed]) -> list[_Closed]:
        first, number, session = (
            chosen[0].first,
            chosen[-1].number,
            chosen[-1].session or chosen[0].session,
        )
        paths = [segment_path(self.folder, self.rank, each.first, each.number) for each in chosen]
        sources = []
        for path, each in zip(paths, chosen, strict=True):
            frames = [frame for frame in read_frames(path.read_bytes()) if isinstance(frame, Frame)]
            sources.append(Source(frames, each.session or session, each.before))
        try:
            level, num_steps, before, merged = merged_frames(
                sources, max(each.level for each in chosen) + 1, self._every
            )  # fmt: skip
        except _NONSENSE:  # the reader tells about it
            return [each._replace(is_readable=False) for each in chosen]
        data = _segment_frame(self.rank, first, number, level, session, before) + merged
        target = segment_path(self.folder, self.rank, first, number)
        beside = target.with_name(f"{target.name}.tmp")
        try:
            beside.write_bytes(data)
            beside.replace(target)
        except OSError:  # on a full disk, a part of it is in the way
            beside.unlink(missing_ok=True)
            raise
        for path in paths:
            if path != target:
                path.unlink(missing_ok=True)
        return [_Closed(first, number, level, session, len(data), before, has_steps=num_steps > 1)]


def _segment_frame(
    rank: int, first: int, number: int, level: int, session: str, before: tuple[int, int] = (0, 0)
) -> bytes:
    head = {
        "format": 1,
        "rank": rank,
        "first": first,
        "number": number,
        "level": level,
        "session": session,
    }
    return json_frame(Kind.SEGMENT, head | ({"before": before} if any(before) else {}))


def _described(path: Path, first: int, number: int) -> _Closed:
    """A segment that an earlier process left."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4096)
    head = next(read_frames(start), None)
    if head is None or (isinstance(head, Damage) and head.is_torn and size <= len(start)):
        return _Closed(
            first, number, 0, "", size, has_steps=False
        )  # its process was killed before it wrote anything
    try:
        told = (
            parse_json(head.payload, dict)
            if isinstance(head, Frame) and head.kind == Kind.SEGMENT
            else {}
        )
        level, session, before = told["level"], told["session"], before_of(told)
        if not isinstance(level, int) or not isinstance(session, str) or not session:
            raise ValueError("a segment without its session")
    except _NONSENSE:
        return _Closed(first, number, 0, "", size, is_readable=False)
    return _Closed(first, number, level, session, size, before)
