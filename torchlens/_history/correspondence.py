"""Which operations of two histories correspond, by structure; the only values used are some of the
parameters'.

>>> match(before, after).entries    # pairs of numbers: before.layer_list[3] is after.layer_list[4]
[(0, 0), (1, 1), (3, 4), (4, 5)]

Modules are matched from the outside in. Inside two that are matched, what they did (operations,
calls of modules) is aligned in order, such that names, classes, operations, shapes and arguments
agree as far as possible; so a module with another name, one layer more or one less does not shift
what comes after it. Of several that could be meant, as blocks of equal structure are, it is the one
with the same weights, or else at the same place. What is left over between two matches is opened
and aligned again: a model that was wrapped, or an operation that became a module, finds its
counterpart.
"""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import log2
from typing import NamedTuple

import torch

from torchlens._history.align_items import AlignedItem, align
from torchlens._history.argument_words import argument_words
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._recording.recording import Row
from torchlens._recording.wrappers import holds_others, local_value, why_valueless

# Classes whose names do not say what a module does.
_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict"})
_OPERATION, _CALL = 1, 2
# Of the size of the largest unmatched module: modules from this size on are opened together.
_OPENED_SHARE = 0.75
_TRACED = 8  # numbers of a parameter
_LONGEST_EXCHANGE = 3  # operations in a row that became others


class Matching(NamedTuple):
    """Pairs of entries, and of calls of modules, of the two histories, by their numbers; each is in
    one pair at most.
    """

    entries: list[tuple[int, int]]
    calls: list[tuple[int, int]]


def match(a: ModelHistory, b: ModelHistory) -> Matching:
    """Matches the entries and module calls of two histories."""
    return _Matcher(a._log, b._log).match()


class _Numbers:
    """Gives equal things equal numbers, from 1."""

    def __init__(self) -> None:
        self.found: dict[Hashable, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.found.setdefault(thing, len(self.found) + 1)


class _Step(NamedTuple):
    """One step of a module call: an operation, or a call of another module."""

    kind: int
    number: int  # of the entry or of the call


class _Side:
    """One history: the steps of each module call, in order, and their sizes."""

    def __init__(self, log: Log, numbers: _Numbers) -> None:
        self.log = log
        graph, calls = log.graph, log.recording.module_calls
        aside = {*graph.inputs, *graph.outputs, *graph.buffers}
        self.steps: list[list[_Step]] = [[] for _ in calls]
        self.entries: list[list[int]] = [[] for _ in calls]  # in the call and what it called
        self.items: dict[_Step, AlignedItem] = {}
        self.inside: list[list[int]] = [[] for _ in calls]
        self.exact: list[list[int]] = [[] for _ in calls]
        self.weights: list[list[int]] = [[] for _ in calls]
        self.traces = [_trace(param) for param in log.recording.params]
        begun = {0}
        for entry in range(len(graph.recorded)):
            if entry not in aside:
                self._add(entry, begun, numbers)
        for call in begun - {0}:
            self.items[_Step(_CALL, call)] = self._call(call, numbers)

    def _add(self, entry: int, begun: set[int], numbers: _Numbers) -> None:
        """Adds an operation to the calls that it ran in, and the calls that begin with it."""
        row = self.log.row(entry)
        item = self._operation(entry, row, numbers)
        chain = (0, *self.log.graph.module_chains[row.module_call])
        for above, call in pairwise(chain):
            if call not in begun:
                begun.add(call)
                self.steps[above].append(_Step(_CALL, call))
        step = _Step(_OPERATION, entry)
        self.steps[row.module_call].append(step)
        self.items[step] = item
        for call in chain:
            self.entries[call].append(entry)
            self.inside[call].append(item.sort)
            self.exact[call].append(item.exact)
            if item.same:
                self.weights[call].append(item.same)

    def _operation(self, entry: int, row: Row, numbers: _Numbers) -> AlignedItem:
        recording, params = self.log.recording, self.log.graph.params[entry]
        sort = (row.operation.layer_type, row.output_index)
        form = (tuple(map(str, row.shape)), row.dtype)
        settings = argument_words(recording, row)
        holds = tuple(tuple(recording.params[number].shape) for number in params)
        return AlignedItem(
            _OPERATION,
            sort=numbers(("sort", sort)),
            name=0,
            inside=0,
            exact=numbers(("exact", sort, form, settings, holds)),
            form=numbers(form),
            settings=numbers(("settings", settings)),
            holds=numbers(("holds", holds)),
            same=self._same([self.traces[number] for number in params], numbers),
            place=0,
            weight=1.0,
        )

    @staticmethod
    def _same(traces: list[Hashable], numbers: _Numbers) -> int:
        told = tuple(trace for trace in traces if trace is not None)
        return numbers(("same", told)) if told else 0

    def _call(self, call: int, numbers: _Numbers) -> AlignedItem:
        recording = self.log.recording
        address = recording.module_calls[call].address
        name, kind = address.rpartition(".")[2], recording.module_classes.get(address, "")
        return AlignedItem(
            _CALL,
            sort=0 if kind in _CONTAINERS else numbers(("class", kind)),
            # A number in an address is a place in a list: it changes if a module is inserted.
            name=0 if name.isdecimal() else numbers(("name", name)),
            inside=numbers(("inside", *self.inside[call])),
            exact=numbers(("exactly", kind, *self.exact[call])),
            form=0,
            settings=0,
            holds=0,
            same=numbers(("all the same", *self.weights[call])) if self.weights[call] else 0,
            place=numbers(("place", address)),
            weight=1.0 + log2(1 + len(self.entries[call])),
        )


def _trace(param: torch.Tensor) -> Hashable:
    """A few of the numbers in a parameter, by which it is recognised; None if they do not
    distinguish it, as ones and zeros.
    """
    value = local_value(param)
    if (
        why_valueless(value) is not None
        or value.layout is not torch.strided
        or value.is_quantized
        or holds_others(value)
    ):
        return None
    step = max(1, value.numel() // _TRACED)
    numbers = tuple(value.detach().reshape(-1)[::step][:_TRACED].tolist())
    return None if len(set(numbers)) < 2 else (tuple(value.shape), numbers)


class _Matcher:
    def __init__(self, a: Log, b: Log) -> None:
        numbers = _Numbers()
        self.a, self.b = _Side(a, numbers), _Side(b, numbers)
        self.entries: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = [(0, 0)]

    def match(self) -> Matching:
        pending = [(0, 0)]
        while pending:
            one, other = pending.pop()
            pending += self._match_inside(self.a.steps[one], self.b.steps[other])
        self._match_boundaries()
        return Matching(sorted(self.entries.items()), sorted(self.calls))

    def _match_inside(
        self, first: Sequence[_Step], second: Sequence[_Step]
    ) -> list[tuple[int, int]]:
        """Matches the steps of two calls; returns the pairs of inner calls whose steps are to be
        matched next.
        """
        found: list[tuple[int, int]] = []
        pending = [(list(first), list(second))]
        while pending:
            mine, theirs = pending.pop()
            pairs = align(
                [self.a.items[step] for step in mine], [self.b.items[step] for step in theirs]
            )
            last = (-1, -1)
            for a, b in [*pairs, (len(mine), len(theirs))]:
                gap = mine[last[0] + 1 : a], theirs[last[1] + 1 : b]
                if gap[0] and gap[1]:
                    opened = self._opened(*gap)
                    if opened is not None:
                        pending.append(opened)
                last = (a, b)
            for a, b in pairs:
                one, other = mine[a], theirs[b]
                if one.kind == _OPERATION:
                    self.entries[one.number] = other.number
                else:
                    self.calls.append((one.number, other.number))
                    found.append((one.number, other.number))
        return found

    def _opened(
        self, first: list[_Step], second: list[_Step]
    ) -> tuple[list[_Step], list[_Step]] | None:
        """The unmatched steps between two matches, with their largest modules replaced by what
        these did; None if there are no modules left.
        """
        sizes = [
            len(side.entries[step.number])
            for side, own in ((self.a, first), (self.b, second))
            for step in own
            if step.kind == _CALL
        ]
        if not sizes:
            self._exchange(first, second)
            return None
        least = _OPENED_SHARE * max(sizes)

        def opened(side: _Side, own: list[_Step]) -> list[_Step]:
            steps: list[_Step] = []
            for step in own:
                is_large = step.kind == _CALL and len(side.entries[step.number]) >= least
                steps += side.steps[step.number] if is_large else [step]
            return steps

        return opened(self.a, first), opened(self.b, second)

    def _exchange(self, first: list[_Step], second: list[_Step]) -> None:
        """Matches a few operations that were replaced by as many others of the same shapes: `gelu`
        by `relu`.
        """
        if len(first) != len(second) or len(first) > _LONGEST_EXCHANGE:
            return
        pairs = [
            (self.a.items[one], self.b.items[other])
            for one, other in zip(first, second, strict=True)
        ]
        if all(one.form == other.form and one.sort != other.sort for one, other in pairs):
            self.entries.update(
                zip([step.number for step in first], [step.number for step in second], strict=True)
            )

    def _match_boundaries(self) -> None:
        """Matches inputs and outputs by their addresses, the others in order, and buffers by the
        operations that read them.
        """
        mine, theirs = self.a.log.graph, self.b.log.graph
        self._match_readings()
        self._match_addresses(mine.buffers, theirs.buffers)
        for own, other in ((mine.inputs, theirs.inputs), (mine.outputs, theirs.outputs)):
            self._match_addresses(own, other)
            taken = set(self.entries.values())
            left = [entry for entry in own if entry not in self.entries]
            self.entries.update(
                zip(left, [entry for entry in other if entry not in taken], strict=False)
            )

    def _match_addresses(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        taken = set(self.entries.values())
        addresses = self.a.log.boundary_addresses, self.b.log.boundary_addresses
        entry_at = {
            address: entry
            for entry in theirs
            if entry not in taken
            for address in addresses[1].get(entry, ())
        }
        for entry in mine:
            found = [
                entry_at[address] for address in addresses[0].get(entry, ()) if address in entry_at
            ]
            if found and entry not in self.entries and found[0] not in taken:
                self.entries[entry] = found[0]
                taken.add(found[0])

    def _match_readings(self) -> None:
        """Matches buffers that matched operations read, if the last parts of their addresses are
        equal: those of a renamed or moved module.
        """
        free = set(self.b.log.graph.buffers)
        for entry in self.a.log.graph.buffers:
            readers = [
                self.entries[reader]
                for reader in self.a.log.graph.children[entry]
                if reader in self.entries
            ]
            read = dict.fromkeys(
                parent for reader in readers for parent in self.b.log.graph.parents[reader]
            )
            own = _last_names(self.a.log, entry)
            for other in read:
                if other in free and own & _last_names(self.b.log, other):
                    self.entries[entry] = other
                    free.remove(other)
                    break


def _last_names(log: Log, entry: int) -> set[str]:
    return {address.rpartition(".")[2] for address in log.boundary_addresses.get(entry, ())}
