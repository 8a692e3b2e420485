"""The thing that is proved: a log, and the evidence of its making."""

from dataclasses import dataclass
from typing import Any

from torchlens.graph.edges import located
from torchlens.history.log import Log
from torchlens.validation.snapshots import Snapshot, frozen_tensors
from torchlens.validation.witness import Call, Evidence

__all__ = ["Subject"]


@dataclass(slots=True)
class Subject:
    """A log with the evidence gathered while it was made."""

    log: Log
    evidence: Evidence

    def label(self, number: int) -> str:
        """The label of a row of the recording; rows that the log leaves out are named by what they are."""
        entry = self.log.graph.entry_of.get(number)
        if entry is not None:
            return self.log.label(entry)
        return f"{self.log.recording.rows[number].operation.layer_type} (step {number}, left out of the log)"

    def value(self, number: int) -> Any:
        """What the log saved for a row."""
        return self.log.recording.values[number]

    def reads(self, number: int) -> dict[Any, list[int]]:
        """By location of the argument, the rows that the log says a row reads there."""
        found: dict[Any, list[int]] = {}
        reads = self.log.graph.located_reads.get(number)
        for location, source in located(self.log.recording.rows[number].references) if reads is None else reads:
            if source >= 0:
                found.setdefault(location, []).append(source)
        return found

    def given(self, number: int) -> dict[Any, int]:
        """By location of the argument, the row (or -1 - k) that the tensor there is, written to since or not."""
        return dict(located(self.log.recording.rows[number].references))

    def arguments(self, call: Call) -> dict[Any, Snapshot]:
        """The tensors that a call was given, by location as the log writes it."""
        found = {}
        for frozen in (call.args, call.kwargs):
            for path, snapshot in frozen_tensors(frozen):
                found[path[0] if len(path) == 1 else path] = snapshot
        return found
