"""What each call of a module did, in order: operations, and calls of other modules."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torchlens._graph.repeats import UnionFind
from torchlens._graph.rolling import roll
from torchlens._history.log import Log
from torchlens._page.loop_tree import LoopTree, find_loops
from torchlens._page.parts import FailedCall
from torchlens._recording.recording import ModuleCall, Row


class Event(NamedTuple):
    """One step of a module call: an operation, by its first entry, or a call of another module."""

    time: float
    entry: int  # -1 for a call
    call: int  # -1 for an operation


class ModuleEvents:
    """The entries of a log by the module call that they ran in; a failed call is the last entry.

    `aside` has the entries that are not steps of the program: inputs, outputs and buffers.
    """

    def __init__(self, log: Log, failed: FailedCall | None) -> None:
        self.log = log
        graph = log.graph
        self.parents: list[Sequence[int]] = list(graph.parents)
        self.call_of = [log.row(entry).module_call for entry in range(len(graph.recorded))]
        self.order = [float(entry) for entry in range(len(graph.recorded))]
        rolled = roll(log.recording, graph)
        self.layer_of = rolled.first_of
        self.aside = {*graph.inputs, *graph.outputs, *graph.buffers}
        self._place_buffers()
        if failed is not None:
            self.parents.append(failed.parents)
            self.call_of.append(failed.module_call)
            self.layer_of.append(len(self.order))
            self.order.append(float(len(self.order)))
        self.head_of = self._heads()
        self.entries_of_call: dict[int, list[int]] = {}
        for entry, call in enumerate(self.call_of):
            self.entries_of_call.setdefault(call, []).append(entry)
        self.calls_in: dict[int, list[int]] = {}
        for number, record in enumerate(log.recording.module_calls):
            if number:
                self.calls_in.setdefault(record.parent, []).append(number)
        self.layers_in, self.time_of_call = self._look_into_calls()

    def of(self, call: int) -> list[Event]:
        """The steps of a call, in order."""
        heads, aside, order = self.head_of, self.aside, self.order
        own = self.entries_of_call.get(call, ())
        found = [
            Event(order[entry], entry, -1)
            for entry in own
            if heads[entry] == entry and entry not in aside
        ]
        inner = [other for other in self.calls_in.get(call, ()) if other in self.layers_in]
        if inner:
            found += [Event(self.time_of_call[other], -1, other) for other in inner]
            found.sort()
        return found

    def loop_tree(self, events: list[list[Event]]) -> LoopTree:
        """The loops in the steps of several calls of one module."""
        places: dict[Hashable, int] = {}
        symbols: dict[Hashable, int] = {}
        symbol_of: list[int] = []
        module_of = self._same_modules(
            [event.call for own in events for event in own if event.call >= 0]
        )
        rows, recorded, calls = (
            self.log.recording.rows,
            self.log.graph.recorded,
            self.log.recording.module_calls,
        )
        sequences = []
        for own in events:
            sequence = []
            for event in own:
                symbol: Hashable
                source: ModuleCall | Row | None
                if event.call >= 0:
                    symbol, source = (module_of[event.call],), calls[event.call]
                elif event.entry < len(recorded):
                    symbol, source = self.layer_of[event.entry], rows[recorded[event.entry]]
                else:
                    symbol, source = "failed", None
                place = symbol if source is None else (symbol, source.code, source.instruction)
                number = places.setdefault(place, len(places))
                if number == len(symbol_of):
                    symbol_of.append(symbols.setdefault(symbol, len(symbols)))
                sequence.append(number)
            sequences.append(sequence)
        return find_loops(sequences, symbol_of)

    def _same_modules(self, calls: Sequence[int]) -> dict[int, int]:
        """For each call, the first call of the same module that shares a layer with it: they are
        passes of one part.
        """
        joined = UnionFind()
        first_of: dict[tuple[str, int], int] = {}
        for call in calls:
            address = self.log.recording.module_calls[call].address
            for layer in self.layers_in[call]:
                joined.join(call, first_of.setdefault((address, layer), call))
        return {call: joined.find(call) for call in calls}

    def entries_under(self, call: int) -> list[int]:
        """The operations of a call and of all calls inside it."""
        found, pending = [], [call]
        while pending:
            one = pending.pop()
            found += [
                entry for entry in self.entries_of_call.get(one, ()) if entry not in self.aside
            ]
            pending += self.calls_in.get(one, ())
        return found

    def _place_buffers(self) -> None:
        """Puts a buffer before the first operation that reads it, in the innermost module that all
        its readers share.
        """
        calls, chains = self.log.recording.module_calls, self.log.graph.module_chains
        for entry in self.log.graph.buffers:
            readers = self.log.graph.children[entry]
            if not readers:
                continue
            first = min(readers)
            shared = chains[self.call_of[first]]
            for reader in readers:
                chain = chains[self.call_of[reader]]
                same = 0
                while (
                    same < min(len(chain), len(shared))
                    and calls[chain[same]].address == calls[shared[same]].address
                ):
                    same += 1
                shared = shared[:same]
            self.call_of[entry] = shared[-1] if shared else 0
            self.order[entry] = first - 0.5

    def _heads(self) -> list[int]:
        """For each entry, the first result of the same call: `split` has several."""
        heads = list(range(len(self.parents)))
        rows, recorded = self.log.recording.rows, self.log.graph.recorded
        for entry in range(1, len(recorded)):
            row = rows[recorded[entry]]
            if row.output_index:
                before = rows[recorded[entry - 1]]
                if before.output_index is not None and row.operation is before.operation:
                    step = row.output_index - before.output_index
                    if step > 0 and recorded[entry] - recorded[entry - 1] == step:
                        heads[entry] = heads[entry - 1]
        return heads

    def _look_into_calls(self) -> tuple[dict[int, set[int]], dict[int, float]]:
        """The layers and the time of the first operation in each call of a module."""
        layers: dict[int, set[int]] = {}
        times: dict[int, float] = {}
        chains = self.log.graph.module_chains
        for call, entries in self.entries_of_call.items():
            own = {self.layer_of[self.head_of[entry]] for entry in entries}
            first = min(self.order[entry] for entry in entries)
            for above in chains[call]:
                layers.setdefault(above, set()).update(own)
                times[above] = min(times.get(above, first), first)
        return layers, times
