"""Runs the operations of a history again, with some values replaced.

Everything runs in its own order on memory of its own, so that views and writes in place do what
they did. What cannot run again (random numbers, a function that did not come along, an argument
that was not kept) keeps its saved value.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchlens._recording.functions import StandIn
from torchlens._recording.operations import BUFFER, IDENTITY, INPUT, OUTPUT, Kind
from torchlens._recording.recording import Row, located
from torchlens._recording.trees import SLICE_BOUNDS, plain_tensors
from torchlens._replay.side import Side

Tensor = torch.Tensor
# What to call in place of an operation: it is given the function, its arguments and keywords.
Instead = Callable[[Callable[..., Any], list[Any], dict[str, Any]], Any]


class NotReplayableError(Exception):
    """An operation that cannot run again, and why."""


class Replay:
    """The operations of one side, to be run again. `pinned` has the entries that cannot, and
    why.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self.pinned: dict[int, str] = {}
        self._recording = side.log.recording
        self._entry_of = side.graph.entry_of
        self._has_writes = bool(self._recording.writes)
        self._is_checked = False

    @property
    def is_live(self) -> bool:
        """Whether there are functions to run again at all."""
        rows = [row for entry, row in enumerate(self.side.rows) if self.side.is_operation(entry)]
        return (
            bool(rows)
            and not all(isinstance(row.operation.func, StandIn) for row in rows)
            and self._has_weights
        )

    @property
    def _has_weights(self) -> bool:
        return not any(param.is_meta for param in self._recording.params)

    def run(
        self,
        put_in: Callable[[int, Tensor], Tensor | None] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[int, Tensor | None]:
        """The values of all entries. `put_in` is told each, and may give another to go on with.

        With a `dtype`, all that is a fraction goes in as that.
        """
        live: dict[int, Tensor] = {}
        values: dict[int, Tensor | None] = {}
        params = enumerate(self._recording.params)
        weights = (
            {}
            if dtype is None
            else {number: _cast(param.detach(), dtype) for number, param in params}
        )
        with torch.no_grad(), _without_patches():
            for entry, row in enumerate(self.side.rows):
                result = self._result(entry, row, live, weights)
                if result is None:
                    values[entry] = None
                    continue
                if dtype is not None and (entry in self.pinned or row.operation in (INPUT, BUFFER)):
                    result = _cast(result, dtype)
                other = put_in(entry, result) if put_in is not None else None
                if other is not None:
                    result = _put(result, other, self._is_alone(entry, row, result, live))
                live[entry] = result
                values[entry] = result.clone() if self._has_writes else result
        return values

    def part(
        self,
        entries: Iterable[int],
        given: dict[int, Tensor],
        weights: dict[int, Tensor] | None = None,
        instead: dict[int, Instead] | None = None,
    ) -> Tensor:
        """The value of the last of `entries` when only these run again, on the values `given`.

        `instead` are functions to be called in place of an entry's own; they are given that and the
        arguments.
        """
        entries = sorted(entries)
        # What is given belongs to the history.
        writes = any(self.side.rows[entry].operation.written for entry in entries)
        live = {
            entry: value.detach().clone() if writes else value.detach()
            for entry, value in given.items()
        }
        result: Tensor | None = None
        with torch.no_grad(), _without_patches():
            for entry in entries:
                if entry in given:
                    continue
                if entry in self.pinned:
                    raise NotReplayableError(self.pinned[entry])
                result = self._again(
                    entry, self.side.rows[entry], live, weights or {}, (instead or {}).get(entry)
                )
                live[entry] = result
        if result is None:
            raise NotReplayableError("nothing to run")
        return result

    # -- one operation
    # ---------------------------------------------------------------------------------------------

    def _result(
        self, entry: int, row: Row, live: dict[int, Tensor], weights: dict[int, Tensor]
    ) -> Tensor | None:
        saved = self.side.log.value(entry)
        if row.operation in (INPUT, BUFFER):
            return saved.detach().clone() if isinstance(saved, Tensor) else None
        if entry not in self.pinned and self.side.is_random(entry):
            self.pinned[entry] = "it draws random numbers"
        if entry not in self.pinned:
            try:
                return self._again(entry, row, live, weights)
            except NotReplayableError as reason:
                self.pinned[entry] = str(reason)
        return saved.detach().clone() if isinstance(saved, Tensor) else None

    def _again(
        self,
        entry: int,
        row: Row,
        live: dict[int, Tensor],
        weights: dict[int, Tensor],
        instead: Instead | None = None,
    ) -> Tensor:
        operation = row.operation
        if operation in (INPUT, BUFFER):
            saved = self.side.log.value(entry)
            if not isinstance(saved, Tensor):
                raise NotReplayableError("its value was not saved")
            return saved.detach().clone()
        places = self._tensors(entry, row, live, weights)
        if operation in (OUTPUT, IDENTITY):
            return next(iter(places.values()))
        if isinstance(operation.func, StandIn):
            raise NotReplayableError("its function was not stored")
        if operation.kind is Kind.COLLECTIVE:
            raise NotReplayableError("other processes took part in it")
        given = self._recording.saved_args.get(self.side.graph.recorded[entry])
        args, kwargs = (row.args, row.kwargs or {}) if given is None else given
        args, kwargs = _filled(args, kwargs, places)
        try:
            result = (
                operation.func(*args, **kwargs)
                if instead is None
                else instead(operation.func, args, kwargs)
            )
        except Exception as error:  # whatever the operation has to say to other values
            raise NotReplayableError(
                f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            ) from error
        outputs = [tensor for _, tensor in plain_tensors(result)]
        if not outputs:
            outputs = [args[position] for position in operation.written if position < len(args)]
        index = 0 if instead is not None and len(outputs) == 1 else row.output_index or 0
        if index >= len(outputs) or not isinstance(outputs[index], Tensor):
            raise NotReplayableError("it gave no tensor")
        found: Tensor = outputs[index].detach()
        return found

    def _tensors(
        self, entry: int, row: Row, live: dict[int, Tensor], weights: dict[int, Tensor]
    ) -> dict[Any, Tensor]:
        """The tensors among the arguments, by location."""
        params = self._recording.params
        kept = self._recording.saved_args.get(self.side.graph.recorded[entry])
        found: dict[Any, Tensor] = {}
        for location, number in located(row.references):
            if number >= 0:
                source = self._entry_of.get(number)
                if source is None or source not in live:
                    raise NotReplayableError("one of its arguments is not in the history")
                found[location] = live[source]
            elif -1 - number < len(params):
                found[location] = weights.get(-1 - number, params[-1 - number]).detach()
                if row.operation.written:
                    found[location] = found[location].clone()
            elif kept is None:
                raise NotReplayableError(
                    "it reads a tensor that the history does not hold; log with "
                    "save_function_args=True"
                )
        if row.operation.written and row.output_index:
            # All results of a call that writes come from one call; here each has a call of its own.
            found = {location: tensor.clone() for location, tensor in found.items()}
        return found

    def _is_alone(self, entry: int, row: Row, result: Tensor, live: dict[int, Tensor]) -> bool:
        """Whether the result has memory of its own, or is what was written."""
        if row.operation.written:
            return True
        parents = [live[parent] for parent in self.side.parents[entry] if parent in live]
        return all(
            parent.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()
            for parent in parents
        )


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _put(result: Tensor, other: Tensor, is_alone: bool) -> Tensor:
    """`other` in place of `result`: in its memory where something may look at that, or as a tensor
    of its own.
    """
    other = other.to(result.dtype) if result.dtype.is_floating_point else other
    if is_alone and result.shape == other.shape and 0 not in result.stride():
        return result.copy_(other)
    return other.clone()


def _filled(args: Any, kwargs: Any, places: dict[Any, Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with each tensor in its place again."""
    own, named = list(args), dict(kwargs)
    for location, tensor in places.items():
        path = location if isinstance(location, tuple) else (location,)
        target: Any = own if isinstance(path[0], int) else named
        target[path[0]] = _placed(
            target[path[0]] if isinstance(path[0], int) else named.get(path[0]), path[1:], tensor
        )
    return own, named


def _placed(tree: Any, path: tuple[Any, ...], tensor: Tensor) -> Any:
    if not path:
        return tensor
    key, rest = path[0], path[1:]
    if isinstance(tree, slice):
        return slice(
            *(
                _placed(getattr(tree, n), rest, tensor) if n == key else getattr(tree, n)
                for n in SLICE_BOUNDS
            )
        )
    if isinstance(tree, dict):
        return {**tree, key: _placed(tree[key], rest, tensor)}
    items = [
        _placed(item, rest, tensor) if place == key else item for place, item in enumerate(tree)
    ]
    return tuple(items) if isinstance(tree, tuple) else items


@contextlib.contextmanager
def _without_patches() -> Iterator[None]:
    """Generators stay as they are, whatever runs."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
