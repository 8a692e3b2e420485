"""A recorder that also sets aside what is needed to make each call again, on its own and without the log's help."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from torchlens.capture.operations import Kind, Operation, operation_of
from torchlens.capture.recorder import Recorder
from torchlens.capture.recording import References
from torchlens.capture.session import Session
from torchlens.capture.trees import plain_tensors
from torchlens.validation.modes import Modes, current_modes
from torchlens.validation.snapshots import Frozen, Snapshot, Snapshots, frozen_tensors
from torchlens.validation.values import difference, same

__all__ = ["Call", "CallKind", "Evidence", "WitnessSession"]

Tensor = torch.Tensor
# Functions that reach beyond the elements of the tensor they are given, into the memory around them.
_REACHES_BEYOND = frozenset({"as_strided", "as_strided_", "set_", "resize_", "resize_as_"})


class CallKind(Enum):
    """How a call is made again."""

    FUNCTION = "function"  # func(*args, **kwargs)
    OPAQUE = "opaque"  # args is ((args, kwargs, ...),): func(*args, **kwargs)
    AUTOGRAD = "autograd"  # an autograd.Function: func.apply(*args)
    IDENTITY = "identity"  # nothing runs: the tensor is handed on


@dataclass(slots=True, eq=False)
class Call:
    """One call, and the rows it left in the log: `first` up to `last`."""

    kind: CallKind
    args: Frozen
    kwargs: Frozen
    modes: Modes
    generators: tuple[Tensor, ...]
    first: int = 0
    last: int = 0
    # What the call wrote to according to the log, as it was afterwards.
    written: list[Snapshot] = field(default_factory=list)
    # Arguments that were changed although the log does not say so: where, and how.
    changed: list[tuple[Any, str]] = field(default_factory=list)
    # The storages of both.
    written_storages: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Evidence:
    """What the witness saw. `tensors` has the tensor of each row when its operation ended, -1 - k as in Recording."""

    calls: list[Call] = field(default_factory=list)
    tensors: dict[int, Snapshot] = field(default_factory=dict)


class Witness(Recorder):
    """Records as ever, and gathers evidence beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.evidence = Evidence()
        self.snapshots = Snapshots()
        self._generators: tuple[Tensor, ...] = ()

    # -- calls -----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = operation_of(func)
        if self.collected is not None or operation.kind is not Kind.OPERATION:
            return super().__torch_function__(func, types, args, kwargs)
        if self.operator is not None:
            operation = self.operator
        written = self._written(operation, args, kwargs)
        call = self._begin(CallKind.FUNCTION, args, kwargs, operation.name in _REACHES_BEYOND)
        result = super().__torch_function__(func, types, args, kwargs)
        self._end(call, written, (args, kwargs or {}), result)
        return result

    def record_opaque(self, name: str, func: Callable[..., Any], run: Callable[[], Any], arguments: Any) -> Any:
        """As in Recorder."""
        with torch._C.DisableTorchFunction():
            call = self._begin(CallKind.OPAQUE, (arguments,), None)
        result = super().record_opaque(name, func, run, arguments)
        self._end(call, [], None)
        return result

    def record_identity(self, tensor: Tensor) -> int:
        """As in Recorder."""
        with torch._C.DisableTorchFunction():
            call = self._begin(CallKind.IDENTITY, (tensor,), None)
        entry = super().record_identity(tensor)
        self._end(call, [], None)
        return entry

    def tie_function(self, name: str, func: Any, args: tuple[Any, ...], outputs: Sequence[Tensor], first: int) -> None:
        """As in Recorder. The function has run: its arguments are as it left them."""
        with torch._C.DisableTorchFunction():
            call = self._begin(CallKind.AUTOGRAD, args, None)
        super().tie_function(name, func, args, outputs, first)
        self._end(call, [], None)

    def _begin(self, kind: CallKind, args: Any, kwargs: Any, reaches_beyond: bool = False) -> Call:
        frozen_args = self.snapshots.freeze(tuple(args), reaches_beyond)
        frozen_kwargs = self.snapshots.freeze(dict(kwargs or {}), reaches_beyond)
        return Call(kind, frozen_args, frozen_kwargs, current_modes(), self._current_generators(), first=len(self.rows))

    def _end(self, call: Call, written: Sequence[Tensor], arguments: Any, result: Any = None) -> None:
        call.last = len(self.rows)
        if call.last == call.first:
            return
        if call.first not in self.evidence.tensors:  # the recorder's short way, which has no `_append`
            self.evidence.tensors[call.first] = self.snapshots.take(result)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            call.written = [self.snapshots.take(tensor) for tensor in written]
            call.written_storages = {snapshot.storage for snapshot in call.written}
            before = {
                path: snapshot
                for frozen in (call.args, call.kwargs)
                for path, snapshot in frozen_tensors(frozen)
                if snapshot.storage not in call.written_storages
            }
            for tree in arguments or ():
                for path, tensor in plain_tensors(tree):
                    # Parameters are left to the dispatcher's check: comparing them after every call costs a pass.
                    if path in before and type(tensor) is not torch.nn.Parameter and not same(before[path].value, tensor):
                        call.changed.append((path, difference(before[path].value, tensor)))
                        call.written_storages.add(before[path].storage)
        self.evidence.calls.append(call)

    def _current_generators(self) -> tuple[Tensor, ...]:
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += torch.cuda.get_rng_state_all()
        last = self._generators
        if len(last) != len(states) or not all(map(torch.equal, last, states)):
            self._generators = tuple(states)
        return self._generators

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _append(self, call: tuple[Any, ...], tensor: Tensor, output_index: int | None, is_written: bool = False) -> None:
        entry = len(self.rows)
        super()._append(call, tensor, output_index, is_written)
        self.evidence.tensors[entry] = self.snapshots.take(tensor)

    def _add_boundary(self, operation: Operation, tensor: Tensor, references: References) -> int:
        entry = super()._add_boundary(operation, tensor, references)
        self.evidence.tensors[entry] = self.snapshots.take(tensor)
        return entry

    def add_outside(self, tensor: Tensor) -> int:
        """As in Recorder."""
        number = super().add_outside(tensor)
        if self.collected is None:  # what is met inside an opaque call may be no tensor one can copy
            self.evidence.tensors[number] = self.snapshots.take(tensor)
        return number


class WitnessSession(Session):
    """A session whose recorder is a witness."""

    recorder_type = Witness

    def know(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies of tensors that somebody else has made already."""
        assert isinstance(self._recorder, Witness)
        for tensor, copy in tensors:
            self._recorder.snapshots.know(tensor, copy)

    @property
    def evidence(self) -> Evidence:
        assert isinstance(self._recorder, Witness)
        return self._recorder.evidence
