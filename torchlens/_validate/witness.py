"""The witness: an observer that copies what each call is given and makes, independently of the log.

`Subject` puts the log and this evidence side by side, for the checks.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchlens._capture.distributed.collectives import num_collectives
from torchlens._capture.observer import CallKind, ObservedCall, Observer
from torchlens._history.log import Log
from torchlens._recording.operations import INPUT, Kind, Operation
from torchlens._recording.recording import References, located
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import Path as TreePath
from torchlens._recording.trees import plain_tensors
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._recording.wrappers import inner_of
from torchlens._replay.replay import Modes, current_modes
from torchlens._replay.values import difference, has_elements, same
from torchlens._validate.exemptions import CONSTANT, DISTRIBUTED, GRADIENT
from torchlens._validate.snapshots import Frozen, Snapshot, Snapshots, frozen_tensors

Tensor = torch.Tensor
# Functions that read memory around the elements of the tensor they are given.
_REACHES_BEYOND = frozenset({"as_strided", "as_strided_", "set_", "resize_", "resize_as_"})
# Calls that leave no row.
NO_ROW = (CallKind.READ, CallKind.ASIDE)
_OURS = str(Path(__file__).parents[1])
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")


class UnexplainedTensors:
    """Finds tensors that an operation is given or the model returns, but no logged operation made.

    A tensor that is the same object in two runs existed before the pass: a constant of the model.
    One that is a new object each time was made during the pass, unseen by the log. The tensors are
    kept, so that their ids stay unique. Of the numbers below 0, the first `num_params` are
    parameters.
    """

    def __init__(self, num_params: int) -> None:
        # By the row that is being made, and the path among the arguments.
        self.found: dict[tuple[int, TreePath], Tensor] = {}
        # Why some of them are exempt.
        self.reasons: dict[tuple[int, TreePath], str] = {}
        self._from_numbers: dict[int, Tensor] = {}
        self._known_ids: set[int] = set()
        self._leaves: list[Tensor] = []
        self._num_params = num_params

    def know(self, number: int, tensor: Tensor) -> None:
        """Notes that `tensor` is entry `number`, a parameter, or a tensor from outside the log."""
        if number >= -self._num_params:
            self._known_ids.add(id(tensor))
        if not is_lazy(tensor) and tensor.requires_grad and tensor.is_leaf:
            self._leaves.append(tensor)

    def look(self, row: int, arguments: Any, references: References) -> None:
        """Examines the arguments of the call that makes `row`.

        Arguments that the log takes for an entry or a parameter are skipped: other checks verify
        those.
        """
        claimed = {
            location for location, number in located(references) if number >= -self._num_params
        }
        for path, tensor in plain_tensors(arguments):
            if id(tensor) not in self._known_ids and location_of(path) not in claimed:
                self._known_ids.add(id(tensor))
                self.found[row, path] = tensor
                reason = self._reason(tensor)
                if reason is not None:
                    self.reasons[row, path] = reason

    def note_from_numbers(self, tensor: Tensor) -> None:
        """Notes a tensor that torch made from Python numbers."""
        self._from_numbers[storage_of(tensor)] = tensor

    def made_since(self, other: "UnexplainedTensors") -> list[tuple[int, TreePath]]:
        """The places where another run had another tensor."""
        return [
            place
            for place, tensor in self.found.items()
            if tensor is not other.found.get(place, tensor)
        ]

    def _reason(self, tensor: Tensor) -> str | None:
        if storage_of(tensor) in self._from_numbers:
            return CONSTANT
        if any(leaf.grad is tensor for leaf in self._leaves):
            return GRADIENT
        return DISTRIBUTED if _DISTRIBUTED in _caller() else None


def _caller() -> str:
    """The file outside torchlens that made the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def location_of(path: TreePath) -> Any:
    """The path to an argument as the log writes it: without the tuple if it is one step."""
    return path[0] if len(path) == 1 else path


@dataclass(slots=True, eq=False)
class WitnessedCall:
    """One call, and the rows it left in the log: `first` up to `last`."""

    kind: CallKind
    operation: Operation
    args: Frozen
    kwargs: Frozen
    modes: Modes
    generators: tuple[Tensor, ...]
    modules: tuple[int, ...]  # ids of the modules that were running, outermost first
    first: int = 0
    last: int = 0
    # What the call wrote to according to the log, as it was afterwards.
    written: list[Snapshot] = field(default_factory=list)
    # Arguments that the call changed although the log does not say so: where, and how.
    changed: list[tuple[TreePath, str]] = field(default_factory=list)
    # The storages of both.
    written_storages: set[int] = field(default_factory=set)
    # Storages of arguments that another thread wrote to during the call.
    contended: set[int] = field(default_factory=set)
    # Whether other processes took part in it, or may have.
    is_collective: bool = False
    # Whether it was given memory that a collective was still writing.
    is_early: bool = False
    # The tensors among its arguments.
    tensors: list[tuple[TreePath, Snapshot]] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [*frozen_tensors(self.args), *frozen_tensors(self.kwargs)]


class Witness(Observer):
    """Copies the arguments and results of every call.

    `tensors` has the tensor of each row as it was when its operation ended (-1 - k as in
    Recording).
    """

    def __init__(self, num_params: int) -> None:
        self.snapshots = Snapshots()
        self.calls: list[WitnessedCall] = []
        self.tensors: dict[int, Snapshot] = {}
        # Each `if tensor:`: how many rows there were, the tensor's identity, and its value.
        self.booleans: list[tuple[int, int, bool]] = []
        self.unexplained = UnexplainedTensors(num_params)
        # By id, the modules that ran: each with the outermost one and its name in that as it was.
        self.running_modules: dict[int, tuple[Any, Any, str]] = {}
        # The call in progress. An opaque one may contain others, which are not seen.
        self._call: WitnessedCall | None = None
        self._generators: tuple[Tensor, ...] = ()
        # Storages that calls wrote to, in the order they began, and those that calls in progress
        # write to; in all threads.
        self._writes: list[int] = []
        self._writing: Counter[int] = Counter()
        self._num_writes = 0
        # How many operations with other processes preceded the call, and the last row of one.
        self._num_collectives: int | None = 0
        self._last_collective = -1

    def know(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Takes over copies that exist already."""
        with unseen(), NoTorchFunction():
            for tensor, value in tensors:
                self.snapshots.know(tensor, value)

    def for_thread(self) -> "Witness":
        """A witness of another thread, with the same evidence."""
        return copy(self)

    def finish(self) -> None:
        """The run is over: releases the tensors, keeps the copies."""
        self.snapshots.forget()

    def begin(self, call: ObservedCall) -> None:
        """Copies what the call is given. A custom autograd function has run: its arguments are as
        it left them.
        """
        if call.kind in NO_ROW:
            return
        modes, running = current_modes(), _running_modules(sys._getframe(1))
        self._name_modules(running)
        modules = tuple(map(id, running))
        for arguments in (call.args, call.kwargs or {}):
            self.unexplained.look(call.first, arguments, call.references)
        reaches_beyond = call.operation.name in _REACHES_BEYOND
        with unseen(), NoTorchFunction():
            args = self.snapshots.freeze(tuple(call.args), reaches_beyond)
            kwargs = self.snapshots.freeze(dict(call.kwargs or {}), reaches_beyond)
            generators = self._current_generators()
        self._call = mine = WitnessedCall(
            call.kind, call.operation, args, kwargs, modes, generators, modules, call.first
        )
        mine.is_early = call.is_early
        mine.written_storages.update(map(storage_of, call.written))
        mine.contended.update(storage for storage, count in self._writing.items() if count)
        self._writes += mine.written_storages
        self._writing.update(mine.written_storages)
        self._num_writes = len(self._writes)
        self._num_collectives = num_collectives()

    def end(self, call: ObservedCall, result: Any) -> None:
        """Copies what the call wrote to, and notes whether it changed another argument."""
        mine = self._call
        if call.operation.kind is Kind.BOOLEAN:
            self.booleans.append((call.first, id(call.args[0]), bool(result)))
        if call.kind in NO_ROW or mine is None:
            return
        self._end_writing(mine)
        if call.last == call.first and call.kind is CallKind.AUTOGRAD:  # its operations left rows
            return
        mine.first, mine.last = call.first, call.last
        mine.is_collective = self._is_collective(call)
        if mine.is_collective:
            self._last_collective = call.last - 1
        with unseen(), NoTorchFunction():
            mine.written = [self.snapshots.take(tensor) for tensor in call.written]
            # `set_` gives a tensor another storage
            mine.written_storages.update(snapshot.storage for snapshot in mine.written)
            if call.kind is CallKind.FUNCTION:
                self._note_changes(mine, call)
        self.calls.append(mine)

    def abandon(self, call: ObservedCall) -> None:
        """The call raised, and writes no more."""
        if call.kind not in NO_ROW and self._call is not None:
            self._end_writing(self._call)

    def add(self, number: int, tensor: Tensor) -> None:
        """Copies the tensor of a row."""
        self.unexplained.know(number, tensor)
        with unseen(), NoTorchFunction():
            self.tensors[number] = self.snapshots.take(tensor)

    def add_boundary(
        self, number: int, tensor: Tensor, operation: Operation, references: References
    ) -> None:
        """Likewise; an output or a tensor that the model keeps may come from an unseen place."""
        if operation is not INPUT:
            self.unexplained.look(number, (tensor,), references)
        self.add(number, tensor)

    def _end_writing(self, mine: WitnessedCall) -> None:
        self._writing.subtract(mine.written_storages)
        mine.contended.update(self._writes[self._num_writes :])
        mine.contended &= {snapshot.storage for _, snapshot in mine.tensors}

    def _is_collective(self, call: ObservedCall) -> bool:
        """Whether other processes took part in the call; if torch does not tell, whether they may
        have.
        """
        if call.kind is CallKind.COLLECTIVE:
            return True
        if call.inside is not None:
            return self._last_collective >= call.inside
        count = num_collectives()
        if count is None or self._num_collectives is None:
            given = plain_tensors((call.args, call.kwargs))
            return any(inner_of(tensor) is not None for _, tensor in given)
        return count > self._num_collectives

    def _note_changes(self, mine: WitnessedCall, call: ObservedCall) -> None:
        declared = mine.written_storages | mine.contended
        before = {p: snapshot for p, snapshot in mine.tensors if snapshot.storage not in declared}
        now = [*plain_tensors(call.args), *plain_tensors(call.kwargs or {})]
        for path, tensor in now:
            # Parameters are left to the dispatcher's check: comparing them after every call costs
            # a pass.
            if path not in before or type(tensor) is torch.nn.Parameter:
                continue
            if has_elements(tensor) and not same(before[path].value, tensor):
                mine.changed.append((path, difference(before[path].value, tensor)))
                mine.written_storages.add(before[path].storage)

    def _name_modules(self, running: list[Any]) -> None:
        if all(id(module) in self.running_modules for module in running):
            return
        outermost = running[0]
        for name, module in outermost.named_modules():
            self.running_modules.setdefault(id(module), (module, outermost, name))
        for module in running:  # those that are not in it have no name
            self.running_modules.setdefault(id(module), (module, outermost, ""))

    def _current_generators(self) -> tuple[Tensor, ...]:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        last = self._generators
        if len(last) != len(states) or not all(map(torch.equal, last, states)):
            self._generators = tuple(states)
        return self._generators


def _running_modules(frame: FrameType | None) -> list[Any]:
    """The modules on Python's stack. (The log's own list of them is what the check verifies.)"""
    call = torch.nn.Module._call_impl.__code__
    found = []
    while frame is not None:
        if frame.f_code is call:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


@dataclass(slots=True)
class Subject:
    """A log, and the evidence that the witness gathered in the same run.

    `calls` are those whose rows the log has, and `written` what each (by first row) wrote to.
    `inexact` has those (by first row) that do not give the very same bits when replayed.
    """

    log: Log
    witness: Witness
    calls: list[WitnessedCall] = field(init=False)
    written: dict[int, list[Snapshot]] = field(init=False)
    inexact: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        num_rows = len(self.log.recording.rows)
        self.calls = [call for call in self.witness.calls if call.first < call.last <= num_rows]
        self.written = {call.first: call.written for call in self.witness.calls if call.written}

    def label(self, number: int) -> str:
        """The label of a row of the recording, or a description if the log leaves it out."""
        entry = self.log.graph.entry_of.get(number)
        if entry is not None:
            return self.log.label(entry)
        if not 0 <= number < len(self.log.recording.rows):
            return f"step {number}"
        kind = self.log.recording.rows[number].operation.layer_type
        return f"{kind} (step {number}, left out of the log)"

    def value(self, number: int) -> Any:
        """What the log saved for a row."""
        return self.log.recording.values[number]

    def reads(self, number: int) -> dict[Any, list[int]]:
        """By location of the argument, the rows that a row reads there according to the log."""
        found: dict[Any, list[int]] = {}
        reads = self.log.graph.located_reads.get(number)
        references = self.log.recording.rows[number].references
        for location, source in located(references) if reads is None else reads:
            if source >= 0:
                found.setdefault(location, []).append(source)
        return found

    def given(self, number: int) -> dict[Any, int]:
        """By location of the argument, the row (or -1 - k) whose tensor was given, whether written
        to since or not.
        """
        return dict(located(self.log.recording.rows[number].references))

    def arguments(self, call: WitnessedCall) -> dict[Any, Snapshot]:
        """By location, the tensors that a call was given to read; `out=` is written, not read."""
        return {location_of(path): own for path, own in call.tensors if path[0] != "out"}

    def is_view(self, number: int, argument: Snapshot, call: WitnessedCall | None) -> bool:
        """Whether the row's result is a view of the argument that `call` did not write to."""
        if call is None or argument.region is None:
            return False
        result = self.witness.tensors[number]
        written = {snapshot.storage for snapshot in call.written}
        return result.region is not None and result.storage == argument.storage not in written
