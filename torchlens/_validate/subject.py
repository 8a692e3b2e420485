"""What is being proved: a log, and the evidence of how it was made."""

from dataclasses import dataclass, field
from typing import Any

from torchlens._history.log import Log
from torchlens._recording.recording import located
from torchlens._replay.snapshots import Snapshot, frozen_tensors
from torchlens._replay.values import same
from torchlens._validate.witness import Call, Evidence


@dataclass(slots=True)
class Subject:
    """A log, with the evidence gathered in another run of the same model from the same state.

    `calls` are those whose rows the log has, and `side_effects` what each (by its first row) wrote
    to. `unsteady` has the rows that the log saved with another value than the witness saw. The
    checks add the calls, by their first row, that are `varied` (given other numbers in each run) or
    `inexact` (not giving the very same bits when made again).
    """

    log: Log
    evidence: Evidence
    calls: list[Call] = field(init=False)
    side_effects: dict[int, list[Snapshot]] = field(init=False)
    unsteady: set[int] = field(init=False)
    varied: set[int] = field(default_factory=set)
    inexact: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        num_rows = len(self.log.recording.rows)
        self.calls = [call for call in self.evidence.calls if call.first < call.last <= num_rows]
        self.side_effects = {
            call.first: call.written for call in self.evidence.calls if call.written
        }
        self.unsteady = {
            number
            for number, seen in self.evidence.tensors.items()
            if 0 <= number < num_rows and not same(seen.value, self.value(number))
        }

    def label(self, number: int) -> str:
        """The label of a row of the recording; rows that the log leaves out are named by what they
        are.
        """
        entry = self.log.graph.entry_of.get(number)
        if entry is not None:
            return self.log.label(entry)
        if not 0 <= number < len(self.log.recording.rows):
            return f"step {number}"
        return (
            f"{self.log.recording.rows[number].operation.layer_type} (step {number}, left out of "
            "the log)"
        )

    def value(self, number: int) -> Any:
        """What the log saved for a row."""
        return self.log.recording.values[number]

    def seen(self, number: int) -> Any:
        """The value that the witness saw."""
        snapshot = self.evidence.tensors.get(number)
        return None if snapshot is None else snapshot.value

    def reads(self, number: int) -> dict[Any, list[int]]:
        """By location of the argument, the rows that the log says a row reads there."""
        found: dict[Any, list[int]] = {}
        reads = self.log.graph.located_reads.get(number)
        for location, source in (
            located(self.log.recording.rows[number].references) if reads is None else reads
        ):
            if source >= 0:
                found.setdefault(location, []).append(source)
        return found

    def given(self, number: int) -> dict[Any, int]:
        """By location of the argument, the row (or -1 - k) that the tensor there is, written to
        since or not.
        """
        return dict(located(self.log.recording.rows[number].references))

    def arguments(self, call: Call) -> dict[Any, Snapshot]:
        """The tensors that a call was given to read, by location as the log writes it; `out=` is
        written, not read.
        """
        found = {}
        for frozen in (call.args, call.kwargs):
            for path, snapshot in frozen_tensors(frozen):
                if path[0] != "out":
                    found[path[0] if len(path) == 1 else path] = snapshot
        return found
