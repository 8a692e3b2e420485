"""Finds calls of modules that did the same, so that a picture can show one of them for all.

Two calls did the same if their modules have one class, and their operations agree: function,
arguments, shape, type, shapes of parameters, name of the module inside the call, and what they read
of each other. Tensors that a call returns unchanged are ignored: what the last block of a row
returns may never be read, and is then not in the log.
"""

from collections.abc import Hashable, Iterator

from torchlens._graph.build import Graph, hashable
from torchlens._recording.operation_kinds import COMMUTATIVE
from torchlens._recording.operations import IDENTITY, OUTPUT
from torchlens._recording.recording import Recording, located

_ADDITIONS = frozenset({"add", "iadd", "radd"})


class AlikeCalls:
    """The calls of modules of one recording, compared on demand.

    `spans` has the entries made in each call, also by the calls in it. They are consecutive, since
    a call ends before the next one begins.
    """

    def __init__(self, recording: Recording, graph: Graph) -> None:
        self._recording, self._graph = recording, graph
        self._numbers: dict[Hashable, int] = {}
        self._rows = [recording.rows[number] for number in graph.recorded]
        self.work_of_entry = list(map(self._work_of_entry, range(len(self._rows))))
        self.spans = self._find_spans()
        self._work_of_call: dict[int, int] = {}
        self._readers: list[list[tuple[Hashable, int]]] | None = None
        self._uses: list[int] = []

    def number(self, key: Hashable) -> int:
        """A number for a key: equal keys have equal numbers."""
        return self._numbers.setdefault(key, len(self._numbers))

    def are_copies(self, one: int, other: int) -> bool:
        """Whether a picture can show the first of two successive calls for both.

        They did the same, and the second reads the first (a chain), or the same things read them in
        the same way: attention's q, k and v are read in different ways.
        """
        return self.work(one) == self.work(other) and (
            self.is_chain(one, other) or self._use_of_call(one) == self._use_of_call(other)
        )

    def is_chain(self, one: int, other: int) -> bool:
        """Whether the second call reads something made in the first."""
        made, parents = self.spans[one], self._graph.parents
        return any(parent in made for entry in self.spans[other] for parent in parents[entry])

    def copied_entries(self, call: int) -> tuple[list[int], list[int]]:
        """The entries of a call: those that are compared, and those that are returned unchanged."""
        found: tuple[list[int], list[int]] = [], []
        for entry in self.spans[call]:
            found[self._is_handed_on(entry)].append(entry)
        return found

    # -- what a call did ---------------------------------------------------------------------------

    def work(self, call: int) -> int:
        """What a call did, as a number that is equal for calls that did the same."""
        if call not in self._work_of_call:
            calls, parents = self._recording.module_calls, self._graph.parents
            home = calls[call].address
            entries, _ = self.copied_entries(call)
            place = {entry: number for number, entry in enumerate(entries)}
            steps = [
                (
                    self.work_of_entry[entry],
                    _name_inside(calls[self._rows[entry].module_call].address, home),
                    *(place.get(self._source(parent)) for parent in parents[entry]),
                )
                for entry in entries
            ]
            key = (self._recording.module_classes[home], self._is_failed(call), *steps)
            self._work_of_call[call] = self.number(key)
        return self._work_of_call[call]

    def _work_of_entry(self, entry: int) -> int:
        row, params = self._rows[entry], self._recording.params
        shapes = tuple([tuple(params[number].shape) for number in self._graph.params[entry]])
        what = row.operation.name, row.output_index, hashable(row.args), hashable(row.kwargs)
        return self.number((*what, row.shape, row.dtype, shapes))

    def _find_spans(self) -> dict[int, range]:
        spans = dict.fromkeys(range(1, len(self._recording.module_calls)), range(0))
        for entry, row in enumerate(self._rows):
            for call in self._graph.module_chains[row.module_call]:
                spans[call] = range(spans[call].start if spans[call] else entry, entry + 1)
        return spans

    def _is_handed_on(self, entry: int) -> bool:
        return self._rows[entry].operation is IDENTITY

    def _source(self, entry: int) -> int:
        """The entry that made a tensor that calls may have returned unchanged."""
        while self._is_handed_on(entry) and self._graph.parents[entry]:
            entry = self._graph.parents[entry][0]
        return entry

    def _is_failed(self, call: int) -> bool:
        failure = self._recording.failure
        return failure is not None and call in self._graph.module_chains[failure.module_call]

    # -- how it is read ----------------------------------------------------------------------------

    def _use_of_call(self, call: int) -> list[tuple[int, Hashable, int]]:
        """The results of a call that are read outside it, and how they are used."""
        if self._readers is None:
            self._find_uses()
        span, readers = self.spans[call], self._readers
        assert readers is not None
        return sorted(
            (number, repr(place), self._uses[child])
            for number, entry in enumerate(span)
            for place, child in readers[entry]
            if child not in span
        )

    def _find_uses(self) -> None:
        """A number for the use of each entry, from the outputs backward: equal for entries that
        equal operations read in the same way. Outputs are all different.
        """
        self._readers = [[] for _ in self._rows]
        for child in range(len(self._rows)):
            for place, parent in self._reads(child):
                self._readers[parent].append((place, child))
        self._uses = [0] * len(self._rows)
        for entry in range(len(self._rows) - 1, -1, -1):
            readers = self._readers[entry]
            if len(readers) == 1 and self._goes_on(entry, readers[0][1]):
                self._uses[entry] = self._uses[readers[0][1]]
            else:
                of_readers = sorted((repr(place), self._uses[child]) for place, child in readers)
                is_output = self._rows[entry].operation is OUTPUT
                what = ("output", entry) if is_output else self.work_of_entry[entry]
                self._uses[entry] = self.number(("use", what, *of_readers))

    def _goes_on(self, entry: int, child: int) -> bool:
        """Whether both are steps of one sum, so that its terms are read in the same way."""
        kinds = {self._rows[one].operation.layer_type for one in (entry, child)}
        return kinds <= _ADDITIONS or self.work_of_entry[entry] == self.work_of_entry[child]

    def _reads(self, entry: int) -> Iterator[tuple[Hashable, int]]:
        """What an entry reads, and as which argument. The terms of a sum and the elements of a list
        are interchangeable.
        """
        row, graph = self._rows[entry], self._graph
        is_ordered = row.operation.layer_type not in COMMUTATIVE
        reads = graph.located_reads.get(graph.recorded[entry]) or located(row.references)
        for location, number in reads:
            if number in graph.entry_of:
                in_list = isinstance(location, tuple) and isinstance(location[-1], int)
                place = location[:-1] if in_list else location
                yield (place if is_ordered else None), graph.entry_of[number]


def _name_inside(address: str, home: str) -> str:
    """The address of a module within another; equal for modules at the same place of two."""
    is_inside = address == home or address.startswith(f"{home}.")
    return address[len(home) :] if is_inside else f" {address}"
