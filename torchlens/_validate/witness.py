"""An observer that sets aside what is needed to make each call again, on its own and without the
log's help.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from torchlens._capture.distributed.collectives import num_collectives
from torchlens._capture.observer import CallKind, ObservedCall, Observer
from torchlens._recording.operations import INPUT, Kind, Operation
from torchlens._recording.recording import References
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import unseen
from torchlens._recording.wrappers import inner_of
from torchlens._replay.replay import Modes, current_modes
from torchlens._replay.snapshots import Frozen, Snapshot, Snapshots, frozen_tensors
from torchlens._replay.values import difference, has_elements, same
from torchlens._validate.unexplained import UnexplainedTensors

Tensor = torch.Tensor
# Functions that reach beyond the elements of the tensor they are given, into the memory around
# them.
_REACHES_BEYOND = frozenset({"as_strided", "as_strided_", "set_", "resize_", "resize_as_"})
# Calls that leave no row.
_NO_ROW = (CallKind.READ, CallKind.ASIDE)


@dataclass(slots=True, eq=False)
class Call:
    """One call, and the rows it left in the log: `first` up to `last`."""

    kind: CallKind
    operation: Operation
    args: Frozen
    kwargs: Frozen
    place: tuple[Any, int]  # the user's code, and the instruction in it
    modules: tuple[int, ...]  # ids of the modules that were running, the outermost first
    modes: Modes
    generators: tuple[Tensor, ...]
    first: int = 0
    last: int = 0
    # The tensors it returned, or, where it returns none, those it wrote to: by identity.
    results: list[int] = field(default_factory=list)
    # What the call wrote to according to the log, as it was afterwards.
    written: list[Snapshot] = field(default_factory=list)
    # Arguments that were changed although the log does not say so: where, and how.
    changed: list[tuple[Any, str]] = field(default_factory=list)
    # The storages of both.
    written_storages: set[int] = field(default_factory=set)
    # Storages that another thread wrote to meanwhile: what the call read there, nobody can say.
    contended: set[int] = field(default_factory=set)
    # Whether other processes took part in it, or may have.
    is_collective: bool = False
    # Whether it was given memory that a collective was still writing.
    is_early: bool = False


@dataclass(slots=True)
class Evidence:
    """What the witness saw. `tensors` has the tensor of each row when its operation ended, -1 - k
    as in Recording.
    """

    unexplained: UnexplainedTensors
    calls: list[Call] = field(default_factory=list)
    tensors: dict[int, Snapshot] = field(default_factory=dict)
    # Each `if tensor:`, with the number of rows there were, the tensor's identity, and what it came
    # to.
    booleans: list[tuple[int, int, bool]] = field(default_factory=list)
    # Tensors that could not be copied, by what they are.
    uncopied: dict[str, int] = field(default_factory=dict)


class Witness(Observer):
    """Gathers evidence beside the log."""

    def __init__(self, num_params: int) -> None:
        self.snapshots = Snapshots()
        self.evidence = Evidence(UnexplainedTensors(num_params), uncopied=self.snapshots.uncopied)
        self._generators: tuple[Tensor, ...] = ()
        # The call that is under way. An opaque one may hold others, which are not seen.
        self._call: Call | None = None
        # Storages that calls wrote to, in the order they began, and those that calls under way
        # write to; in all threads.
        self._writes: list[int] = []
        self._writing: Counter[int] = Counter()
        self._num_writes = 0
        # How many operations with other processes there had been when it began, and the last row
        # that came of one.
        self._num_collectives: int | None = 0
        self._last_collective = -1

    def know(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies of tensors that somebody else has made already."""
        with unseen():
            for tensor, value in tensors:
                self.snapshots.know(tensor, value)

    def for_thread(self) -> "Witness":
        """Gathers the same evidence in another thread."""
        return copy(self)

    def finish(self) -> None:
        """The run is over: lets go of the tensors themselves."""
        self.snapshots.forget()

    def begin(self, call: ObservedCall) -> None:
        """Sets aside what the call is given. A custom autograd function has run: its arguments are
        as it left them.
        """
        if call.kind in _NO_ROW:
            return
        modes, modules = current_modes(), _running_modules(sys._getframe(1))
        for arguments in (call.args, call.kwargs or {}):
            self.evidence.unexplained.look(call.first, arguments, call.references)
        reaches_beyond = call.operation.name in _REACHES_BEYOND
        with unseen():
            args = self.snapshots.freeze(tuple(call.args), reaches_beyond)
            kwargs = self.snapshots.freeze(dict(call.kwargs or {}), reaches_beyond)
            generators = self._current_generators()
        place = (call.code, call.instruction)
        self._call = Call(
            call.kind, call.operation, args, kwargs, place, modules, modes, generators, call.first
        )
        self._call.written_storages.update(map(storage_of, call.written))
        self._call.is_early = call.is_early
        self._call.contended.update(storage for storage, count in self._writing.items() if count)
        self._writes += self._call.written_storages
        self._writing.update(self._call.written_storages)
        self._num_writes = len(self._writes)
        self._num_collectives = num_collectives()

    def end(self, call: ObservedCall, result: Any) -> None:
        """Sees what the call wrote to, and whether it changed an argument without saying so."""
        if call.kind in _NO_ROW:
            if call.operation.kind is Kind.BOOLEAN:
                self.evidence.booleans.append((call.first, id(call.args[0]), bool(result)))
            return
        mine = self._call
        if mine is not None:
            self._end_writing(mine)
        if mine is None or (
            call.last == call.first and call.kind is CallKind.AUTOGRAD
        ):  # its operations have left rows
            return
        mine.first, mine.last = call.first, call.last
        mine.is_collective = self._is_collective(call)
        if mine.is_collective:
            self._last_collective = call.last - 1
        mine.results = [id(tensor) for _, tensor in plain_tensors(result)] or list(
            map(id, call.written)
        )
        with unseen():
            mine.written = [self.snapshots.take(tensor) for tensor in call.written]
            mine.written_storages.update(
                snapshot.storage for snapshot in mine.written
            )  # `set_` gives a tensor another
            if call.kind is CallKind.FUNCTION:
                self._see_changes(mine, call)
        self.evidence.calls.append(mine)

    def abandon(self, call: ObservedCall) -> None:
        """It writes no more."""
        if call.kind not in _NO_ROW and self._call is not None:
            self._end_writing(self._call)

    def _end_writing(self, mine: Call) -> None:
        self._writing.subtract(mine.written_storages)
        mine.contended.update(self._writes[self._num_writes :])
        given = {
            snapshot.storage
            for frozen in (mine.args, mine.kwargs)
            for _, snapshot in frozen_tensors(frozen)
        }
        mine.contended &= given

    def add(self, number: int, tensor: Tensor) -> None:
        """Sets aside the tensor as it is now."""
        self.evidence.unexplained.know(number, tensor)
        with unseen():
            self.evidence.tensors[number] = self.snapshots.take(tensor)

    def add_boundary(
        self, number: int, tensor: Tensor, operation: Operation, references: References
    ) -> None:
        """Likewise; an output, or a tensor that the model keeps, may be one that nobody has
        seen.
        """
        if operation is not INPUT:
            self.evidence.unexplained.look(number, (tensor,), references)
        self.add(number, tensor)

    def _is_collective(self, call: ObservedCall) -> bool:
        """Whether other processes took part in the call; if that cannot be told, whether they may
        have.
        """
        if call.kind is CallKind.COLLECTIVE:
            return True
        if call.inside is not None:
            return self._last_collective >= call.inside
        count = num_collectives()
        if count is None or self._num_collectives is None:
            return any(
                inner_of(tensor) is not None
                for _, tensor in plain_tensors((call.args, call.kwargs))
            )
        return count > self._num_collectives

    def _see_changes(self, mine: Call, call: ObservedCall) -> None:
        before = {
            path: snapshot
            for frozen in (mine.args, mine.kwargs)
            for path, snapshot in frozen_tensors(frozen)
            if snapshot.storage not in mine.written_storages | mine.contended
        }
        for tree in (call.args, call.kwargs or {}):
            for path, tensor in plain_tensors(tree):
                if path not in before or not has_elements(tensor):
                    continue
                # Parameters are left to the dispatcher's check: comparing them after every call
                # costs a pass.
                if type(tensor) is not torch.nn.Parameter and not same(before[path].value, tensor):
                    mine.changed.append((path, difference(before[path].value, tensor)))
                    mine.written_storages.add(before[path].storage)

    def _current_generators(self) -> tuple[Tensor, ...]:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        last = self._generators
        if len(last) != len(states) or not all(map(torch.equal, last, states)):
            self._generators = tuple(states)
        return self._generators


def _running_modules(frame: FrameType | None) -> tuple[int, ...]:
    """The modules that are running, read off Python's stack: the log's own count of them is what is
    being proved.
    """
    call = torch.nn.Module._call_impl.__code__
    found = []
    while frame is not None:
        if frame.f_code is call:
            found.append(id(frame.f_locals["self"]))
        frame = frame.f_back
    return tuple(reversed(found))
