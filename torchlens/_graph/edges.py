"""Which entry reads which.

An operation that is given a tensor reads the entry that made it, unless the memory was written
since: then it reads the writers, each byte's last one. An entry that only looks at memory (a view)
is read in any case: it is how the reader got there. A view itself reads of the tensor it is made
from what it looks at, and no more.
"""

from bisect import bisect_left
from typing import Any, NamedTuple

from torchlens._graph.last_writers import Answer, Question, last_writers
from torchlens._recording.operations import BUFFER
from torchlens._recording.recording import Recording, Write, located


class Edges(NamedTuple):
    """Who reads whom, in numbers of the recording.

    `parents` has for every entry the entries it reads, in the order of its arguments; one read
    twice is listed twice. `located_reads` has the same with locations, for the entries that read
    something else than what they were given. Where `is_exact` is False, memory was written in so
    irregular a way that some may be listed that are not read.
    """

    parents: list[tuple[int, ...]]
    located_reads: dict[int, list[tuple[Any, int]]]
    is_exact: bool = True


def find_edges(recording: Recording) -> Edges:
    """Finds whom each entry reads. A recording without writes says so itself."""
    parents: list[tuple[int, ...]] = []
    located_reads: dict[int, list[tuple[Any, int]]] = {}
    if not recording.writes:
        for row in recording.rows:
            references = row.references
            found = references.values() if isinstance(references, dict) else references
            parents.append(tuple([entry for entry in found if entry is not None and entry >= 0]))
        return Edges(parents, located_reads)
    memory = _WrittenMemory(recording)
    unanswered: list[tuple[int, list[tuple[Any, _Read]]]] = []
    for entry, row in enumerate(recording.rows):
        given = located(row.references)
        parents.append(tuple([argument for _, argument in given if argument >= 0]))
        if memory.may_differ(given):
            # All results of one call were read for before the first of them was there.
            time = entry - (row.output_index or 0)
            unanswered.append(
                (
                    entry,
                    [
                        (location, memory.read(argument, time, entry))
                        for location, argument in given
                    ],
                )
            )
    memory.answer()
    for entry, reads in unanswered:
        read = [(location, source) for location, own in reads for source in memory.sources(own)]
        sources = tuple([source for _, source in read])
        if sources != parents[entry]:
            parents[entry] = sources
            located_reads[entry] = read
    return Edges(parents, located_reads, memory.is_exact)


class _Read(NamedTuple):
    """What is read by reading an entry: the entry itself (if it is one), the last writers, or
    both.
    """

    own: tuple[int, ...]
    is_view: bool
    writers: (
        Answer | tuple[int, Question] | None
    )  # a question with the storage that it is about; None for nobody


class _WrittenMemory:
    """The storages that were written. What is read of them is asked for all at once, then
    answered.
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

    def may_differ(self, given: list[tuple[Any, int]]) -> bool:
        """Whether memory that one of the arguments looks at was ever written."""
        return any(self._storage_of(argument) in self._writes for _, argument in given)

    def read(self, argument: int, time: int, reader: int) -> _Read:
        """What entry `reader` reads by reading entry `argument` just before entry `time` was
        made.
        """
        own = (argument,) if argument >= 0 else ()
        storage = self._storage_of(argument)
        writes = self._writes.get(storage, ())
        num_before = bisect_left(self._times[storage], time) if writes else 0
        # A buffer was there before the first operation, whenever it was met.
        since = (
            -1 if argument >= 0 and self._recording.rows[argument].operation is BUFFER else argument
        )
        if not num_before or writes[num_before - 1].entry <= since:
            return _Read(own, True, None)
        # An entry that was never looked at while its memory was written was not written.
        regions = self._recording.regions
        region = regions.get(argument)
        if region is not None and self._is_view(reader, storage):
            region = regions.get(reader, region)
        if region is None or not region.num_elements:
            return _Read(own, True, None)
        is_view = argument >= 0 and self._is_view(argument, storage)
        last = writes[num_before - 1]
        if last.region.covers(region):
            return _Read(own, is_view, Answer((last.entry,), True, True))
        question = Question(region, since, time)
        self._questions.setdefault(storage, {})[question] = None
        return _Read(own, is_view, (storage, question))

    def answer(self) -> None:
        """Answers what `read` has asked."""
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
            else self._recording.outside_storages[-1 - entry]
        )

    def _is_view(self, entry: int, storage: int) -> bool:
        """Whether the entry looks at memory that something before it made."""
        if self._recording.storages[entry] != storage or (entry, storage) in self._writers:
            return False
        return any(
            storage == self._storage_of(parent)
            for _, parent in located(self._recording.rows[entry].references)
        )
