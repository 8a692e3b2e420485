"""The files of one rank: reads them, writes them, and merges the oldest steps to keep the budget.

Two neighbouring files become one with about half the steps, and half the numbers of each scalar;
counts stay exact. The merged file is in its place before those that it replaces are removed, and
readers leave those out (see `files_of_ranks`): so the process may be killed at any moment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torchlens._monitor.store.columns import SeriesKey, Step, in_blocks
from torchlens._monitor.store.folder import (
    StepsFile,
    files_of_ranks,
    log_path,
    steps_path,
)
from torchlens._monitor.store.lines import (
    End,
    LineFile,
    ScalarRow,
    Value,
    append,
    line_of,
    parse_event,
    parse_record,
    step_line,
)
from torchlens._text.whole_files import write_whole

# A budget is this many files.
_FILES_IN_BUDGET = 16
_Record = Step | list[ScalarRow] | End


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tensors were sampled: recorded + dropped + pending = offered, and nothing is
    pending after `finish`.
    """

    offered: int
    recorded: int
    dropped: int

    @property
    def pending(self) -> int:
        """How many wait to be written."""
        return self.offered - self.recorded - self.dropped


class RankContents:
    """The data in the files of one rank. `read_on` reads what was added."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder = folder
        self._log = LineFile(log_path(folder, rank), parse_event)
        self._files: dict[StepsFile, LineFile[_Record]] = {}

    def read_on(self, files: Sequence[StepsFile]) -> bool:
        """Reads what was added to the files; returns whether there was anything. Raises
        FileNotFoundError if a file was merged meanwhile.
        """
        is_other = list(files) != list(self._files)
        self._files = {
            file: self._files.get(file)
            or LineFile(steps_path(self._folder, self.rank, file), parse_record)
            for file in files
        }
        # A series is written before the first step that has it, so the names are read last.
        has_grown = [each.read_on() for each in (*self._files.values(), self._log)]
        return is_other or any(has_grown)

    def events(self, kind: type[Value]) -> list[Value]:
        """What happened of one kind (see `parse_event`): sessions are dicts, names of series
        tuples, problems texts.
        """
        return [each for each in self._log.values if isinstance(each, kind)]

    def records(self, kind: type[Value]) -> list[Value]:
        """The steps, the lists of scalars, or the ends of sessions, in order."""
        values = [each for file in self._files.values() for each in file.values]
        return [each for each in values if isinstance(each, kind)]

    @property
    def steps(self) -> list[Step]:
        """The recorded steps, in order."""
        return self.records(Step)

    @property
    def series(self) -> dict[int, SeriesKey]:
        """The keys of the series, by number."""
        return dict(self.events(tuple))

    @property
    def is_finished(self) -> bool:
        """Whether the last session ended properly."""
        sessions, ends = self.events(dict), self.records(End)
        return bool(sessions and ends) and ends[-1].session == sessions[-1]["session"]

    @property
    def damage(self) -> list[str]:
        """Lines that could not be read. The last line of a run may still be being written."""
        files = [*self._files.values(), self._log]
        found = [sentence for each in files for sentence in each.damage]
        for each in files:
            if each.is_torn:
                is_open = each in files[-2:] and not self.is_finished
                state = " (it may be being written)" if is_open else ""
                found.append(f"{each.path.name}: the last line is cut off{state}")
        return found

    @property
    def counts(self) -> Counts:
        """How many tensors were sampled, as far as the files go."""
        recorded = sum(int(step.columns.calls.sum()) for step in self.steps)
        dropped = sum(number for _, number in self.drops())
        return Counts(recorded + dropped, recorded, dropped)

    def drops(self) -> list[tuple[int, int]]:
        """(step, number of tensors) for the tensors that were dropped before a recorded step, or
        before the end.
        """
        step, found = 0, []
        for each in self.records(object):
            if isinstance(each, Step):
                step = each.last
            if isinstance(each, Step | End) and each.dropped:
                found.append((step, each.dropped))
        return found


# -- writing ---------------------------------------------------------------------------------------


class _Closed(NamedTuple):
    """A file that is not written to any more."""

    file: StepsFile
    size: int
    can_shrink: bool = True


class RankFiles:
    """Writes what one process records. Data survives the process once `write` has returned."""

    def __init__(self, folder: Path, rank: int, budget: int, every: int) -> None:
        self.folder, self.rank = folder, rank
        self.budget = budget
        self.file_bytes = max(budget // _FILES_IN_BUDGET, 1 << 14)
        self._every = every
        self._log = log_path(folder, rank)
        self._log_size = 0
        self._closed: list[_Closed] = []
        self._number = 1  # of the file that is written to
        self._size = 0
        self._largest = 0  # bytes that were written at once

    def open(self, first_step: int) -> RankContents:
        """Reads the data of earlier sessions, removes their steps from `first_step` on (training
        resumes from a checkpoint before it), and returns what is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files = files_of_ranks(self.folder).get(self.rank, [])
        kept = {steps_path(self.folder, self.rank, file) for file in files}
        for path in self.folder.glob(f"rank{self.rank}-*.steps*"):
            if path not in kept:  # its process was killed while it merged files
                path.unlink(missing_ok=True)
        # The last line of an earlier session may have no end.
        append(self._log, b"\n" if self._log.exists() and self._log.stat().st_size else b"")
        contents = RankContents(self.folder, self.rank)
        contents.read_on(files)
        for file in files:
            self._cut(file, first_step)
        self._closed = [_Closed(file, self._path(file).stat().st_size) for file in files]
        self._number = files[-1].last + 1 if files else 1
        self._log_size = self._log.stat().st_size
        return contents

    @property
    def total_bytes(self) -> int:
        """The size of the files in bytes."""
        return self._log_size + self._size + sum(each.size for each in self._closed)

    def tell(self, lines: bytes) -> None:
        """Appends to the file of events (`rank0.jsonl`)."""
        append(self._log, lines, creates=False)
        self._log_size += len(lines)

    def write(self, lines: bytes) -> None:
        """Appends to the files of steps."""
        own = StepsFile(self._number, self._number, 0)
        if self._size > self.file_bytes:
            self._closed.append(_Closed(own, self._size))
            self._number, self._size = self._number + 1, 0
            own = StepsFile(self._number, self._number, 0)
        append(self._path(own), lines)
        self._size += len(lines)
        self._largest = max(self._largest, len(lines))

    def keep_budget(self) -> bool:
        """Merges the oldest steps until the files are within the budget. False if they are not, and
        nothing is left to merge.
        """
        # Space for the step and the events that are written before anything is merged, and for a
        # merged file beside those that it replaces.
        room = self.file_bytes + 3 * self._largest
        while self.total_bytes > self.budget - room:
            if not self._merge_once():
                return self.total_bytes <= self.budget
        return True

    def _path(self, file: StepsFile) -> Path:
        return steps_path(self.folder, self.rank, file)

    def _merge_once(self) -> bool:
        """Merges two neighbours, the oldest of those merged least, or the steps of the only file.
        False if there is nothing to merge.
        """
        closed = self._closed
        if len(closed) > 1:
            levels = [one.file.level + two.file.level for one, two in pairwise(closed)]
            place, count = levels.index(min(levels)), 2
        elif closed and closed[0].can_shrink:
            place, count = 0, 1
        else:
            return False
        closed[place : place + count] = [self._merged(closed[place : place + count])]
        return True

    def _merged(self, chosen: Sequence[_Closed]) -> _Closed:
        old = [each.file for each in chosen]
        steps, scalars, num_bad = self._read(old)
        if num_bad:
            text = f"Lines that could not be read were left out when files were merged ({num_bad})"
            self.tell(line_of("problem", text))
        level, steps = in_blocks(steps, max(file.level for file in old) + 1, self._every)
        new = StepsFile(old[0].first, old[-1].last, level)
        data = _lines(steps, _halved(scalars))
        write_whole(self._path(new), data, makes_folder=False)
        for file in old:
            self._path(file).unlink(missing_ok=True)
        return _Closed(new, len(data), can_shrink=len(steps) > 1)

    def _cut(self, file: StepsFile, limit: int) -> None:
        """Removes the steps of a file from a step on."""
        steps, scalars, _ = self._read([file])
        if all(each.last < limit for each in steps) and all(each.step < limit for each in scalars):
            return
        # Merged steps stay if they begin before the limit.
        kept = [
            replace(step, last=min(step.last, limit - 1), count=min(step.count, limit - step.first))
            for step in steps
            if step.first < limit
        ]
        rows = [row._replace(step=min(row.step, limit - 1)) for row in scalars if row.first < limit]
        write_whole(self._path(file), _lines(kept, rows), makes_folder=False)

    def _read(self, files: Iterable[StepsFile]) -> tuple[list[Step], list[ScalarRow], int]:
        steps: list[Step] = []
        scalars: list[ScalarRow] = []
        num_bad = 0
        for file in files:
            lines: LineFile[Any] = LineFile(self._path(file), parse_record)
            lines.read_on()
            num_bad += len(lines.damage)
            steps += [each for each in lines.values if isinstance(each, Step)]
            scalars += [row for each in lines.values if isinstance(each, list) for row in each]
        return steps, scalars, num_bad


def _lines(steps: Iterable[Step], scalars: Sequence[ScalarRow]) -> bytes:
    lines = [step_line(step) for step in steps]
    return b"".join([*lines, line_of("scalars", scalars)] if scalars else lines)


def _halved(scalars: Iterable[ScalarRow]) -> list[ScalarRow]:
    """Neighbours of the same name, two in one."""
    found: list[ScalarRow] = []
    waiting: dict[str, ScalarRow] = {}
    for row in scalars:
        other = waiting.pop(row.name, None)
        if other is None:
            waiting[row.name] = row
            continue
        count = other.num_values + row.num_values
        mean = (other.mean * other.num_values + row.mean * row.num_values) / count
        low, high = min(other.low, row.low), max(other.high, row.high)
        found.append(ScalarRow(row.name, other.first, row.step, mean, low, high, count))
    return [*found, *waiting.values()]
