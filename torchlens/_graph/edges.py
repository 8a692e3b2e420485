"""Finds which entry reads which.

An operation that is given a tensor reads the entry that made it, unless the memory was written
since: then it reads the last writer of each byte. A view always counts as read, because the reader
reached the memory through it. An operation that makes a view reads only the part of the base that
the view covers.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchlens._graph.last_writers import Answer, Question, last_writers
from torchlens._graph.paths import children_of, topological_order
from torchlens._recording.operations import BUFFER
from torchlens._recording.recording import Recording, Row, Write, in_program_order, located
from torchlens._recording.regions import Region


class Edges(NamedTuple):
    """Which entry reads which, in numbers of the recording.

    `parents` lists for every entry the entries it reads, in the order of its arguments; one read
    twice is listed twice. `located_reads` has the same with locations, for the entries that read
    something else than what their call was given. If `is_exact` is False, memory was written in too
    irregular a pattern, and `parents` may list entries that are not read.
    """

    parents: list[tuple[int, ...]]
    located_reads: dict[int, list[tuple[Any, int]]]
    is_exact: bool = True


def find_edges(recording: Recording) -> Edges:
    """Finds what each entry reads: without writes, what it was given."""
    parents = [tuple(entries_given(row)) for row in recording.rows]
    located_reads = {
        entry: own_references(row)
        for entry, row in enumerate(recording.rows)
        if row.output_index is not None and _reads_its_own(row)
    }
    for entry, given in located_reads.items():
        parents[entry] = tuple([read for _, read in given if read >= 0])
    is_exact = not recording.writes or _note_writers(recording, parents, located_reads)
    return Edges(parents, located_reads, is_exact)


def _note_writers(
    recording: Recording,
    parents: list[tuple[int, ...]],
    located_reads: dict[int, list[tuple[Any, int]]],
) -> bool:
    """Replaces entries whose memory was written since by the writers; returns whether that is
    exact.
    """
    memory = _WrittenMemory(recording)
    unanswered = {
        entry: memory.reads_of(entry, row)
        for entry, row in enumerate(recording.rows)
        if memory.may_differ(row)
    }
    memory.answer()
    for entry, reads in unanswered.items():
        read = [(location, source) for location, own in reads for source in memory.sources(own)]
        sources = tuple([source for _, source in read])
        if sources != parents[entry]:
            parents[entry] = sources
            located_reads[entry] = read
    return memory.is_exact


def entries_given(row: Row) -> list[int]:
    """The entries among the arguments of a call, in their order."""
    references = row.references
    found = references.values() if isinstance(references, dict) else references
    return [entry for entry in found if entry is not None and entry >= 0]


# Operations on lists, each of whose results is computed from the elements at its own index.
_OWN_ELEMENTS = frozenset({
    "_to_cpu", "align_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors",
    "meshgrid", "unflatten_dense_tensors",
})  # fmt: skip


def _reads_its_own(row: Row) -> bool:
    name = row.operation.name
    return name in _OWN_ELEMENTS or name.startswith("_foreach_") or name == "swap_tensors"


def own_references(row: Row) -> list[tuple[Any, int]]:
    """The references of a call that this one of its results is computed from."""
    references = located(row.references)
    if row.output_index is None or not _reads_its_own(row):
        return references
    if row.operation.name == "swap_tensors":
        return [(place, entry) for place, entry in references if place == 1 - row.output_index]
    return [
        (location, entry)
        for location, entry in references
        if not isinstance(location, tuple) or location[-1] == row.output_index
    ]


class _Read(NamedTuple):
    """What is read by reading an argument: its own entry (if it has one), the last writers, or
    both.
    """

    own: tuple[int, ...]
    is_view: bool = True
    # Already answered, or a question about a storage; None if nothing was written.
    writers: Answer | tuple[int, Question] | None = None


class _WrittenMemory:
    """The storages that were written. All questions about a storage are collected, then answered
    together.
    """

    def __init__(self, recording: Recording) -> None:
        self.is_exact = True
        self._recording = recording
        self._writes: dict[int, list[Write]] = {}
        for write in sorted(recording.writes, key=lambda write: write.entry):
            self._writes.setdefault(write.storage, []).append(write)
        self._times = {
            storage: [write.entry for write in own] for storage, own in self._writes.items()
        }
        self._writers = {(write.entry, write.storage) for write in recording.writes}
        self._questions: dict[int, dict[Question, None]] = {}
        self._answers: dict[int, dict[Question, Answer]] = {}

    def may_differ(self, row: Row) -> bool:
        """Whether the memory of one of the arguments was ever written."""
        return any(self._storage_of(own) in self._writes for _, own in located(row.references))

    def reads_of(self, entry: int, row: Row) -> list[tuple[Any, _Read]]:
        """What an entry reads by each argument."""
        time = entry - (row.output_index or 0)  # a call reads before it makes its first result
        return [(location, self._read(own, time, entry)) for location, own in own_references(row)]

    def _read(self, argument: int, time: int, reader: int) -> _Read:
        """What entry `reader` reads by reading `argument` just before entry `time` was made."""
        own = (argument,) if argument >= 0 else ()
        storage = self._storage_of(argument)
        last = self._last_write(storage, time)
        # A buffer existed before the first operation, wherever it comes in the recording.
        since = -1 if own and self._recording.rows[argument].operation is BUFFER else argument
        region = self._region_read(argument, reader, storage)
        if last is None or last.entry <= since or region is None or not region.num_elements:
            return _Read(own)
        is_view = bool(own) and self._is_view(argument, storage)
        if last.region.covers(region):
            return _Read(own, is_view, Answer((last.entry,), True, True))
        question = Question(region, since, time)
        self._questions.setdefault(storage, {})[question] = None
        return _Read(own, is_view, (storage, question))

    def _last_write(self, storage: int, time: int) -> Write | None:
        """The last write to a storage before entry `time` was made."""
        num_before = bisect_left(self._times.get(storage, ()), time)
        return self._writes[storage][num_before - 1] if num_before else None

    def _region_read(self, argument: int, reader: int, storage: int) -> Region | None:
        """The part of an argument that is read: all of it, or what a view of it shows. None if it
        is not known, as the memory was never written while it was in use.
        """
        regions = self._recording.regions
        region = regions.get(argument)
        if region is not None and self._is_view(reader, storage):
            return regions.get(reader, region)
        return region

    def answer(self) -> None:
        """Answers the questions that `reads_of` has collected."""
        for storage, questions in self._questions.items():
            self._answers[storage] = last_writers(self._writes[storage], questions)
            self.is_exact = self.is_exact and all(
                answer.is_exact for answer in self._answers[storage].values()
            )

    def sources(self, read: _Read) -> tuple[int, ...]:
        """The entries that are read, after `answer`."""
        writers = read.writers
        if writers is None:
            return read.own
        answer = writers if isinstance(writers, Answer) else self._answers[writers[0]][writers[1]]
        return (
            answer.writers if answer.is_covered and not read.is_view else read.own + answer.writers
        )

    def _storage_of(self, entry: int) -> int:
        return (
            self._recording.storages[entry]
            if entry >= 0
            else self._recording.outside_storages[entry]
        )

    def _is_view(self, entry: int, storage: int) -> bool:
        """Whether an entry shows memory that an earlier entry made."""
        if self._recording.storages[entry] != storage or (entry, storage) in self._writers:
            return False
        return any(
            storage == self._storage_of(parent)
            for _, parent in located(self._recording.rows[entry].references)
        )


# -- the order of the log --------------------------------------------------------------------------


def order_of_rows(recording: Recording, parents: Sequence[Sequence[int]]) -> list[int]:
    """The rows in an order that is the same in every run: as if each thread had run to its end
    when it was started, except that what a row reads comes before it.
    """
    order = in_program_order(recording.branches, len(parents))
    if not recording.branches:
        return order
    place_of = {number: place for place, number in enumerate(order)}
    children = children_of(parents)
    by_place = [[place_of[child] for child in children[number]] for number in order]
    return [order[place] for place in topological_order(by_place)]
