"""How one argument of a call leads to its result."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchlens._history.argument_words import argument_position, given_arguments
from torchlens._history.log import Log
from torchlens._recording.recording import located
from torchlens._replay.replay import filled

Tensor = torch.Tensor
Shape = tuple[int, ...]


class Axis(NamedTuple):
    """Unit u along dimension `dim` of a result reads stride * u + low to stride * u + high."""

    dim: int
    stride: Fraction = Fraction(1)
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)


class Reading(NamedTuple):
    """How an argument leads to a result.

    `run` is linear and takes a tensor of the argument's shape to one that broadcasts to the
    result's: a number is other than zero if a number that it depends on is. `axes` says for each
    dimension of the argument what a unit reads along it; along those that are missing, it reads
    everything. None if elements only move: then running it on coordinates shows the axes.
    """

    run: Callable[[Tensor], Tensor]
    axes: Mapping[int, Axis] | None
    is_known: bool = True


def everything(is_known: bool = True) -> Reading:
    """Every number of the result depends on every number of the argument."""
    return Reading(lambda tensor: tensor.sum(), {}, is_known)


def same(tensor: Tensor) -> Tensor:
    """The `run` of what works on each element by itself."""
    return tensor


class ReadCall:
    """A recorded call, and one of its tensor arguments."""

    def __init__(self, log: Log, entry: int, location: Any, given: int) -> None:
        self.row = row = log.row(entry)
        self._number = log.graph.recorded[entry]
        self.kind = row.operation.layer_type
        self.location = location
        self.shape = sizes(log.recording.rows[given].shape)
        self.out = sizes(row.shape)
        self._log = log

    @cached_property
    def place(self) -> tuple[Any, ...]:
        """The position of the argument (its name if it has none), then the path inside it."""
        return tuple(argument_position(self.row, self.location))

    @cached_property
    def options(self) -> dict[str, Any]:
        """The arguments that are no tensors, without those that have their default."""
        return dict(given_arguments(self.row))

    def option(self, *names: str, default: Any = None) -> Any:
        """The argument with one of these names."""
        return next((self.options[name] for name in names if name in self.options), default)

    def dims(self, *names: str) -> list[int] | None:
        """The dimensions in an argument, counted from 0; None if it was not given."""
        found = self.option(*names)
        if found is None or isinstance(found, bool):
            return None
        listed = found if isinstance(found, list | tuple) else [found]
        return [int(dim) % max(len(self.shape), 1) for dim in listed]

    def other_shape(self, position: int) -> Shape:
        """The shape of another tensor argument; LookupError if there is none."""
        for location, number in located(self.row.references):
            if tuple(argument_position(self.row, location)) == (position,):
                return self._shape(number)
        raise LookupError(f"argument {position} is no tensor")

    def _shape(self, number: int) -> Shape:
        """The shape of an entry or a parameter; IndexError for a tensor from elsewhere."""
        recording = self._log.recording
        if number >= 0:
            return sizes(recording.rows[number].shape)
        return sizes(recording.params[-1 - number].shape)

    def shapes_before(self) -> list[Shape]:
        """The shapes of the tensors before this one in a list of them."""
        before = []
        for location, number in located(self.row.references):
            head, *rest = argument_position(self.row, location)
            if head == self.place[0] and rest < list(self.place[1:]):
                before.append(self._shape(number))
        return before

    def index_at(self, position: int) -> Tensor:
        """The logged value of a tensor argument of indices; LookupError if there is none."""
        for location, number in located(self.row.references):
            if tuple(argument_position(self.row, location)) == (position,):
                return self._index(number)
        raise LookupError(f"argument {position} is no tensor")

    def again(self, tensor: Tensor) -> Tensor:
        """The call with this argument replaced: indices are those that were logged, other tensors
        are zero.
        """
        row, recording = self.row, self._log.recording
        kept = recording.saved_args.get(self._number)
        places: dict[Any, Tensor] = {}
        for location, number in located(row.references):
            if location == self.location:
                places[location] = tensor
            elif self._is_index(number):
                places[location] = self._index(number)
            elif not kept or number >= -len(recording.params):
                places[location] = tensor.new_zeros(self._shape(number))
        given, named = kept or (row.args, row.kwargs)
        args, kwargs = filled(given, named, places)
        kwargs.pop("out", None)
        for place in row.operation.written:
            args[place] = args[place].clone()
        result = row.operation.func(*args, **kwargs)
        if row.operation.written and not isinstance(result, Tensor):
            result = args[row.operation.written[0]]
        return result if isinstance(result, Tensor) else result[row.output_index or 0]

    def _is_index(self, number: int) -> bool:
        return number >= 0 and not self._log.recording.rows[number].dtype.is_floating_point

    def _index(self, number: int) -> Tensor:
        entry = self._log.graph.entry_of.get(number)
        if entry is None or not self._log.is_saved(entry):
            raise LookupError("the indices were not saved")
        value = self._log.value(entry)
        if not isinstance(value, Tensor) or value.is_floating_point():
            raise LookupError("these are no indices")
        return value


def sizes(shape: Sequence[Any]) -> Shape:
    """The sizes as plain numbers; ValueError for a nested tensor, whose sizes vary."""
    found = tuple(map(int, shape))
    if any(size < 0 for size in found):
        raise ValueError("Nested tensors have no receptive or projective fields.")
    return found


def narrow(tensor: Tensor) -> Tensor:
    """A tensor that was expanded, with size 1 along those dimensions."""
    return tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
