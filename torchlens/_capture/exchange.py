"""Exchanges results of calls while a model runs under the log: what interventions need of it.

A log has no part in this unless something is to be exchanged: then its recorder gets another class.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from torchlens._capture.entries import written_by
from torchlens._capture.recorder import Recorder
from torchlens._recording.operations import IDENTITY, KNOWN_OPERATIONS, Kind, Operation
from torchlens._recording.recording import Recording
from torchlens._recording.trees import plain_tensors, same_with

Tensor = torch.Tensor


class Spot(NamedTuple):
    """A call in the program of a model: the `ordinal`-th call of an operation in one call of a
    module.

    Unlike the number of a row, it stays the same if other modules do something else.
    """

    address: str
    pass_num: int
    name: str
    ordinal: int


# The new value for a result, given its index among the results and its value; None leaves it.
Change = Callable[[int, Tensor], Tensor | None]


class Exchange(Protocol):
    """Exchanges results of one model's calls."""

    @property
    def model(self) -> torch.nn.Module: ...

    def change_at(self, spot: Spot) -> Change | None:
        """How to change the results of a call; None if they stay."""


def spot_of(recording: Recording, number: int) -> Spot:
    """The call that made row `number`."""
    row = recording.rows[number]
    call = recording.module_calls[row.module_call]
    first = number - (row.output_index or 0)
    same = (
        other.module_call == row.module_call and other.operation.name == row.operation.name
        for other in recording.rows[:first]
        if not other.output_index
    )
    return Spot(call.address, call.pass_num, row.operation.name, sum(same))


class ExchangingRecorder(Recorder):
    """A recorder whose calls may return something else than their function does."""

    _exchanges: tuple[Exchange, ...]
    _counts: dict[tuple[int, str], int]
    _num_counted: int

    def exchange_with(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = tuple(exchanges)
        self._counts, self._num_counted = {}, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = self.operator or KNOWN_OPERATIONS[func]
        changes = []
        if operation.kind is Kind.OPERATION and self.collected is None:
            changes = self.changes_of(operation)
        if not changes:
            return super().__torch_function__(func, types, args, kwargs)

        def changed(*args: Any, **kwargs: Any) -> Any:
            written = written_by(operation, args, kwargs)
            copies = _copies_for_autograd(written)
            args, kwargs = same_with((args, kwargs), lambda own: copies.get(id(own), own))
            result = func(*args, **kwargs)
            return self._changed(operation, changes, result, written, copies)

        KNOWN_OPERATIONS[changed] = operation
        try:
            return super().__torch_function__(changed, types, args, kwargs)
        finally:
            del KNOWN_OPERATIONS[changed]

    def changes_of(self, operation: Operation) -> list[Change]:
        """The changes to the results of the operation that is about to run."""
        for row in self.rows[self._num_counted :]:
            if not row[8]:  # the first result of its call
                key = row[4], row[0].name
                self._counts[key] = self._counts.get(key, 0) + 1
        self._num_counted = len(self.rows)
        call = self.module_calls[self.module_call]
        ordinal = self._counts.get((self.module_call, operation.name), 0)
        spot = Spot(call.address, call.pass_num, operation.name, ordinal)
        found = (exchange.change_at(spot) for exchange in self._exchanges)
        return [change for change in found if change is not None]

    def _changed(
        self,
        operation: Operation,
        changes: list[Change],
        result: Any,
        written: Sequence[Tensor],
        copies: dict[int, Tensor],
    ) -> Any:
        """The result with its tensors changed. What was written in place is written again, so that
        all who hold that memory see the change.
        """
        at = {id(copies.get(id(own), own)): own for own in written}
        tensors = [tensor for _, tensor in plain_tensors(result)] or [
            copies.get(id(own), own) for own in written
        ]
        new = list(tensors)
        for index, tensor in enumerate(tensors):
            target = at.get(id(tensor))
            value = tensor.clone() if target is tensor else tensor
            for change in changes:
                other = change(index, value)
                value = value if other is None else other
                if other is not None:
                    self.edited.add(len(self.rows) + index)
            new[index] = value if target is None else target.copy_(value)
        return _with_tensors(result, iter(new))


def _copies_for_autograd(written: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies for a call to write to, by the id of the tensor: the call may keep its result for the
    backward pass, and an edit must not write into that.
    """
    if not torch.is_grad_enabled():
        return {}
    return {id(tensor): tensor.clone() for tensor in written if not tensor.is_leaf}


def _with_tensors(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """`tree` (lists, tuples, dicts) with other tensors in the order of `plain_tensors`."""
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: _with_tensors(item, tensors) for key, item in tree.items()}
    if not isinstance(tree, list | tuple) or isinstance(tree, torch.Size):
        return tree
    items = [_with_tensors(item, tensors) for item in tree]
    if hasattr(tree, "_fields"):
        return type(tree)(*items)
    return type(tree)(items)


def changed_result(result: Any, change: Change) -> Any:
    """What a module returned, with its tensors changed by their numbers."""
    found = [tensor for _, tensor in plain_tensors(result)]
    new = [change(number, tensor) for number, tensor in enumerate(found)]
    kept = [old if other is None else other for old, other in zip(found, new, strict=True)]
    return _with_tensors(result, iter(kept))


def changed_identity(recorder: Recorder, change: Change | None, tensor: Tensor) -> Tensor | None:
    """A new tensor for one that the running module returns unchanged, with the entry `identity`
    that it gets; None if nothing changes.
    """
    before = recorder.entry_of(tensor)
    new = None if change is None else change(0, tensor)
    if new is None:
        return None
    recorder.edited.add(len(recorder.rows))
    call = recorder.made_call(IDENTITY, (tensor,), None, (before,), (None, 0))
    recorder.append(call, new, None)
    return new


def exchange_results(recorder: Recorder, exchanges: Sequence[Exchange]) -> None:
    """Lets a recorder exchange results from now on, if there is anything to exchange."""
    if not exchanges:
        return
    recorder.__class__ = ExchangingRecorder
    assert isinstance(recorder, ExchangingRecorder)
    recorder.exchange_with(exchanges)
