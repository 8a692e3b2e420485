"""What the files of one rank say, read while they are written or later."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlens._health.finding import RunFinding
from torchlens._monitor.store.columns import SeriesKey, Step
from torchlens._monitor.store.folder import StepsFile, log_path, steps_path
from torchlens._monitor.store.lines import End, LineFile, ScalarRow, parse_event, parse_record

Record = Step | list[ScalarRow] | End


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
    """Everything in the files of one rank. `read_on` reads what was added."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._folder = folder
        self._log = LineFile(log_path(folder, rank), parse_event)
        self._files: dict[StepsFile, LineFile[Record]] = {}

    def read_on(self, files: Sequence[StepsFile]) -> bool:
        """Reads what was added to the files; whether there was anything. FileNotFoundError if one
        has gone: it was merged meanwhile.
        """
        is_other = list(files) != list(self._files)
        self._files = {
            file: self._files.get(file)
            or LineFile(steps_path(self._folder, self.rank, file), parse_record)
            for file in files
        }
        # A series is named before a step has it: so the names are read last.
        has_grown = [each.read_on() for each in (*self._files.values(), self._log)]
        return is_other or any(has_grown)

    @property
    def steps(self) -> list[Step]:
        """The recorded steps, in order."""
        return [each for each in self._records() if isinstance(each, Step)]

    @property
    def scalars(self) -> list[ScalarRow]:
        """The logged numbers, in order."""
        return [row for each in self._records() if isinstance(each, list) for row in each]

    @property
    def series(self) -> dict[int, SeriesKey]:
        """What the numbers of series mean."""
        return dict(each for each in self._log.values if isinstance(each, tuple))

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """Each process that recorded, in order."""
        return [each for each in self._log.values if isinstance(each, dict)]

    @property
    def findings(self) -> list[RunFinding]:
        """What looked wrong."""
        return [each for each in self._log.values if isinstance(each, RunFinding)]

    @property
    def problems(self) -> list[str]:
        """What could not be recorded."""
        return [each for each in self._log.values if isinstance(each, str)]

    @property
    def is_finished(self) -> bool:
        """Whether the last session ended properly."""
        last = next((each for each in reversed(self._records()) if isinstance(each, End)), None)
        sessions = self.sessions
        return last is not None and bool(sessions) and last.session == sessions[-1]["session"]

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
        """How many tensors were sampled in all sessions, as far as the files go."""
        records = [each for each in self._records() if not isinstance(each, list)]
        sessions = self.sessions
        offered = [each.offered for each in records] + [each["offered"] for each in sessions]
        dropped = [each.dropped for each in records] + [each["dropped"] for each in sessions]
        total, lost = max(offered, default=0), max(dropped, default=0)
        return Counts(total, total - lost, lost)

    def drops(self) -> list[tuple[int, int]]:
        """(step, number of tensors): what was dropped before a recorded step, or before the end."""
        found: list[tuple[int, int]] = []
        step = known = 0
        for each in self._records():
            if isinstance(each, list):
                continue
            step = each.last if isinstance(each, Step) else step
            if each.dropped > known:
                found.append((step, each.dropped - known))
                known = each.dropped
        return found

    def _records(self) -> list[Record]:
        return [record for file in self._files.values() for record in file.values]
