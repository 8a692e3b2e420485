"""Which operation made each part of each tensor, at each moment of the pass, derived from what the
witness saw.

Nothing here asks the log. A tensor is told by what it is for Python (`is`), memory by its address.
Whoever is given a tensor reads, of each element, the last operation that wrote it since the tensor
was handed out; and the operation that handed it out, if an element is still as that one left it, or
if the tensor is a view, being how the reader got there. Whoever makes a view reads what the view
looks at.
"""

from collections.abc import Iterable

import numpy as np

from torchlens._recording.cells import cells_of
from torchlens._recording.regions import Region
from torchlens._replay.snapshots import Snapshot, frozen_tensors
from torchlens._validate.witness import Call, Evidence

_NOBODY = np.iinfo(np.int64).min


class _Owners:
    """The last row to have written each part of one storage, which some regions divide it into."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self._cells = cells_of(list(dict.fromkeys(regions)))
        self._rows = np.full(self._cells.shape, _NOBODY)
        # False where the regions are so irregular that their parts cannot be told.
        self.is_exact = not self._cells.inexact

    def of(self, region: Region) -> set[int]:
        """The rows that wrote a region; `_NOBODY` among them if a part of it was not written."""
        found: set[int] = set()
        for part in self._cells.parts[region]:
            found.update(np.unique(self._rows[part]).tolist())
        return found

    def write(self, region: Region, row: int) -> None:
        for part in self._cells.parts[region]:
            self._rows[part] = row


class Sources:
    """Answers, call after call in the order they were made, who made what a call was given."""

    def __init__(self, evidence: Evidence) -> None:
        self._tensors = evidence.tensors
        # By identity, the rows (or -1 - k) that handed the tensor out, in order.
        self._rows: dict[int, list[int]] = {}
        self._by_storage: dict[int, list[int]] = {}
        for number, snapshot in sorted(evidence.tensors.items()):
            for identity in (snapshot.identity, *snapshot.inner):
                self._rows.setdefault(identity, []).append(number)
            self._by_storage.setdefault(snapshot.storage, []).append(number)
        self._made = {number for call in evidence.calls for number in range(call.first, call.last)}
        self._views: set[int] = set()
        self._owners = _owners_of_written(evidence)
        self._writers: set[tuple[int, int]] = set()

    def rows_of(self, argument: Snapshot, time: int) -> list[int]:
        """The rows made before row `time` whose result is this very tensor; -1 - k for what came
        from outside.
        """
        return [number for number in self._rows.get(argument.identity, ()) if number < time]

    def looked_at(self, argument: Snapshot, time: int) -> list[int]:
        """The rows before row `time` that look at the same memory."""
        if argument.region is None:
            return []
        return [number for number in self._by_storage.get(argument.storage, ()) if number < time]

    def read(self, argument: Snapshot, row: int, reader: int) -> set[int] | None:
        """Whom row `reader` reads by reading the argument as row `row` handed it out; None if
        nobody can tell.

        Rows from outside the log are not among them.
        """
        itself = {row} if row >= 0 else set()
        owners, region = self._owners.get(argument.storage), self.part_read(argument, reader).region
        # What no call made was there before the pass, whenever the log took it up.
        since = row if row in self._made else _NOBODY
        if region is None and any(
            own == argument.storage and since < writer < reader for writer, own in self._writers
        ):
            return None  # quantized and the like, in parts
        if owners is None or region is None or not region.num_elements:
            return itself
        if not owners.is_exact:
            return None
        found = owners.of(region)
        writers = {writer for writer in found if writer > since}
        return (
            writers if len(writers) == len(found) and row not in self._views else itself | writers
        )

    def part_read(self, argument: Snapshot, reader: int) -> Snapshot:
        """What row `reader` reads of an argument: what it looks at itself, if it is a view of
        it.
        """
        result = self._tensors[reader]
        is_of_it = result.region is not None and result.storage == argument.storage
        return result if is_of_it and reader in self._views else argument

    def is_view(self, row: int) -> bool:
        """Whether the row's result looks at memory that was there before it."""
        return row in self._views

    def begin(self, call: Call, arguments: Iterable[Snapshot]) -> None:
        """The next call: takes note of which of its results are views."""
        self._writers.update(
            (self._writer_of(call, snapshot), snapshot.storage) for snapshot in call.written
        )
        storages = {argument.storage for argument in arguments}
        for number in range(call.first, call.last):
            storage = self._tensors[number].storage
            if storage in storages and (number, storage) not in self._writers:
                self._views.add(number)

    def end(self, call: Call) -> None:
        """It was made: takes note of what it wrote."""
        for snapshot in call.written:
            owners = self._owners.get(snapshot.storage)
            if owners is not None and snapshot.region is not None:
                owners.write(snapshot.region, self._writer_of(call, snapshot))

    def _writer_of(self, call: Call, written: Snapshot) -> int:
        """The row of a tensor that was written: the call's first where it is no result."""
        own = [
            n for n in range(call.first, call.last) if self._tensors[n].identity == written.identity
        ]
        return own[-1] if own else call.first


def _owners_of_written(evidence: Evidence) -> dict[int, _Owners]:
    """For each storage that is ever written, divided by all that is ever seen of it."""
    regions: dict[int, list[Region]] = {}
    for call in evidence.calls:
        for snapshot in call.written:
            if snapshot.region is not None:
                regions.setdefault(snapshot.storage, [])
    for snapshot in _all_snapshots(evidence) if regions else ():
        if snapshot.storage in regions and snapshot.region is not None:
            regions[snapshot.storage].append(snapshot.region)
    return {storage: _Owners(own) for storage, own in regions.items()}


def _all_snapshots(evidence: Evidence) -> Iterable[Snapshot]:
    yield from evidence.tensors.values()
    for call in evidence.calls:
        yield from call.written
        for frozen in (call.args, call.kwargs):
            yield from (snapshot for _, snapshot in frozen_tensors(frozen))
