"""The rows of a program that is traced, not run: one for each result of each step, and where its
value will be.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import primitives as known_primitives

from torchlens._jax.arrays import is_array, number_of, shape_and_dtype
from torchlens._jax.modules import Turns
from torchlens._jax.primitives import operation_of
from torchlens._jax.programs import Body, Path, Tap, loop_parts
from torchlens._jax.recorder import Recorder
from torchlens._jax.user_lines import Place
from torchlens._recording.recording import make_row

# Makes the value of a step from that of its argument, in the same memory if possible.
View = Callable[[torch.Tensor], torch.Tensor]
_DEEPEST = 8  # views of views of one array
# How to come from a whole to a part of it, step by step.
Part = tuple[int | slice | View, ...]


class Source(NamedTuple):
    """Where a value is: in what a tap gives or in an array that is at hand (`("given", 2)`), and
    which part of that.
    """

    whole: Tap | tuple[str, int]
    part: Part = ()

    @property
    def is_at_hand(self) -> bool:
        """Whether the whole is an array that there is in any case."""
        return isinstance(self.whole[0], str)

    def part_at(self, step: int | slice | View) -> "Source":
        return Source(self.whole, (*self.part, step))

    def part_in(self, whole: torch.Tensor) -> torch.Tensor:
        """The value, made of that of the whole."""
        index: list[int | slice] = []
        for step in self.part:
            if isinstance(step, int | slice):
                index.append(step)
            else:
                whole, index = step(whole[tuple(index)]), []
        return whole[tuple(index)] if index else whole


class Number:
    """A constant without dimensions: an argument, not an entry."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Around(NamedTuple):
    """A step that others stand in. What JAX says of those (scopes, transformations) begins anew
    inside it.
    """

    name: str
    place: Place
    is_backward: bool
    running: int  # the module call that ran before it


class _Look(NamedTuple):
    """A row whose value looks at that of another: which one, how, the memory as it sees it, and
    over how many others.
    """

    base: int
    view: View
    memory: torch.Tensor
    depth: int


class TracedRows:
    """Writes the rows of a program, as a log of its run would have them: each turn of a loop has
    rows of its own.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.sources: dict[int, Source] = {}
        self.held: dict[int, Any] = {}  # arrays that the function itself holds, by row
        self.turns = Turns(recorder.module_calls)
        self._recorder = recorder
        self._outer: list[_Around] = []  # the steps that this one stands in
        self._row_of: dict[
            tuple[int, tuple[int, ...]], int
        ] = {}  # a variable of the program, at a turn
        self._views: dict[int, _Look] = {}

    def row_of(self, var: Any, turn: tuple[int, ...]) -> int | None:
        """The row that a variable of the program is, at this turn of the loops around it."""
        return self._row_of.get((id(var), turn))

    def is_view(self, row: int) -> bool:
        """Whether the value of a row looks at the memory of another's."""
        return row in self._views

    def view_source(self, row: int) -> Source:
        """Where the value of a view is, if the row that it looks at has one."""
        look = self._views[row]
        source = (
            self.view_source(look.base) if look.base in self._views else self.sources[look.base]
        )
        return source.part_at(look.view)

    # -- steps
    # ----------------------------------------------------------------------------------------------

    def constant(self, value: Any) -> Any:
        if not is_array(value) or not value.ndim:
            return Number(number_of(value) if is_array(value) else value)
        number = self._recorder.find(value)
        if number is not None and number >= 0 and number not in self.sources:
            self.sources[number], self.held[number] = Source(("held", number)), value
        return number

    def step(self, equation: Any, path: Path, given: list[Any]) -> Sequence[Any]:
        passed_on = _passed_on(equation, given)
        if passed_on is not None:
            return self._made(equation, [passed_on])
        several = len(equation.outvars) > 1
        head = self._head(
            equation,
            equation.primitive,
            equation.params,
            given,
            [atom.aval for atom in equation.invars],
        )
        rows = [
            self._add(
                head,
                var.aval,
                Source((path, index), self.turns.current),
                index if several else None,
            )
            for index, var in enumerate(equation.outvars)
        ]
        for index, row in enumerate(rows):
            self._note_view(equation, index, row, given)
        return self._made(equation, rows)

    def _note_view(self, equation: Any, index: int, row: int, given: list[Any]) -> None:
        found = view_made_by(equation, index)
        base = given[found[0]] if found is not None else None
        if found is None or not isinstance(base, int) or base not in self.sources:
            return
        memory, depth = torch.empty(self._recorder.rows[base].shape, device="meta"), 0
        if base in self._views:
            _, _, memory, depth = self._views[base]
        seen = found[1](memory)
        # Otherwise it lies in another order, or a loop turns one array around again and again.
        if seen.untyped_storage()._cdata == memory.untyped_storage()._cdata and depth < _DEEPEST:
            self._views[row] = _Look(base, found[1], seen, depth + 1)

    def call(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        self._enter(equation)
        results = body(given)
        self._leave()
        return self._made(equation, results)

    repeat = call

    def loop(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """As JAX runs it where jit is off: each turn takes its slice, and in the end what they made
        is put together.
        """
        constants, carried, along = loop_parts(equation, given)
        num_carried, length = len(carried), equation.params["length"]
        avals = [atom.aval for atom in equation.invars[len(constants) + num_carried :]]
        made: list[list[Any]] = [[]] * length
        stacks = [
            Source((path, place), self.turns.current)
            for place in range(num_carried, len(equation.outvars))
        ]
        self._enter(equation)
        for index in reversed(range(length)) if equation.params["reverse"] else range(length):
            items = [
                self._slice(equation, row, aval, index)
                for row, aval in zip(along, avals, strict=True)
            ]
            first = len(self._recorder.rows)
            with self.turns.turn(self._recorder.running, index):
                results = body([*constants, *carried, *items])
            carried, made[index] = results[:num_carried], results[num_carried:]
            for source, row in zip(
                stacks, made[index], strict=True
            ):  # what the loop returns need not come out twice
                if isinstance(row, int) and row >= first and row in self.sources:
                    self.sources[row] = source.part_at(index)
        stacked = [
            self._stack(equation, column, source, var.aval)
            for column, source, var in zip(
                zip(*made, strict=True), stacks, equation.outvars[num_carried:], strict=True
            )
        ]
        self._leave()
        return self._made(equation, [*carried, *stacked])

    def _slice(self, equation: Any, row: int, aval: Any, index: int) -> int:
        """One item of what a loop goes along. Of a weight it is as little a value of the call as
        the weight is.
        """
        one = aval.update(shape=(1, *aval.shape[1:]))
        zeros = (0,) * (aval.ndim - 1)
        where = {
            "start_indices": (index, *zeros),
            "limit_indices": (index + 1, *aval.shape[1:]),
            "strides": None,
        }
        source = self.sources.get(row)
        head = self._head(equation, known_primitives.slice_p, where, [row], [aval])
        piece = self._add(head, one, source and source.part_at(slice(index, index + 1)))
        head = self._head(
            equation, known_primitives.squeeze_p, {"dimensions": (0,)}, [piece], [one]
        )
        return self._add(head, aval.update(shape=aval.shape[1:]), source and source.part_at(index))

    def _stack(self, equation: Any, items: Sequence[Any], source: Source, aval: Any) -> int:
        one, of_item = aval.update(shape=(1, *aval.shape[1:])), aval.update(shape=aval.shape[1:])
        how = {
            "shape": one.shape,
            "broadcast_dimensions": tuple(range(1, aval.ndim)),
            "sharding": None,
        }
        pieces = []
        for index, item in enumerate(items):
            head = self._head(equation, known_primitives.broadcast_in_dim_p, how, [item], [of_item])
            pieces.append(self._add(head, one, source.part_at(slice(index, index + 1))))
        head = self._head(
            equation, known_primitives.concatenate_p, {"dimension": 0}, pieces, [one] * len(pieces)
        )
        return self._add(head, aval, source)

    # -- rows
    # ----------------------------------------------------------------------------------------------

    def _head(
        self,
        equation: Any,
        primitive: Any,
        params: dict[str, Any],
        given: list[Any],
        avals: list[Any],
    ) -> Any:
        recorder = self._recorder
        call = self.turns.call_at(recorder.module_call_of(equation.source_info))
        dtypes = tuple(getattr(aval, "dtype", None) for aval in avals)
        operation = operation_of(primitive, dtypes, self._is_backward())
        references = tuple(None if isinstance(item, Number) else item for item in given)
        numbers = tuple(item.value if isinstance(item, Number) else None for item in given)
        plain = {name: value for name, value in params.items() if not _holds_program(value)}
        return (operation, numbers, plain, references, call, *self._place_of(equation), 0.0)

    def _add(self, head: Any, aval: Any, source: Source | None, output: int | None = None) -> int:
        row = len(self._recorder.rows)
        self._recorder.rows.append(make_row((*head, output, *shape_and_dtype(aval), None)))
        if source is not None:
            self.sources[row] = source
        return row

    def _made(self, equation: Any, results: Sequence[Any]) -> Sequence[Any]:
        turn = self.turns.current
        for var, row in zip(equation.outvars, results, strict=True):
            if isinstance(row, int):
                self._row_of[id(var), turn] = row
        return results

    def _enter(self, equation: Any) -> None:
        recorder = self._recorder
        name, place, running = (
            str(equation.params.get("name", "")),
            self._place_of(equation),
            recorder.running,
        )
        call = recorder.module_call_of(equation.source_info)
        self._outer.append(_Around(name, place, self._is_backward(), running))
        recorder.running = call

    def _leave(self) -> None:
        self._recorder.running = self._outer.pop().running

    def _is_backward(self) -> bool:
        """Of the step whose module call was asked for last."""
        return self._recorder.is_backward or (bool(self._outer) and self._outer[-1].is_backward)

    def _place_of(self, equation: Any) -> Place:
        """Where a step was written. JAX traces a function of its own (`relu`) once, for whoever
        calls it first.
        """
        traceback, outer = equation.source_info.traceback, self._outer
        place: Place = (
            self._recorder.places.traced(traceback) if traceback is not None else (None, 0)
        )
        is_own = not outer or (place[0] is not None and outer[-1].name in place[0].co_qualname)
        return place if is_own else outer[-1].place


def _passed_on(equation: Any, given: list[Any]) -> Any:
    """What comes out of a step that is no operation to a log: a number of another type, or an array
    of the same.
    """
    if (
        equation.primitive.name not in ("convert_element_type", "broadcast_in_dim")
        or len(given) != 1
    ):
        return None
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    if isinstance(given[0], Number):
        return (
            None
            if after.shape
            else Number(number_of(np.asarray(given[0].value).astype(after.dtype)))
        )
    return given[0] if (before.shape, before.dtype) == (after.shape, after.dtype) else None


def _holds_program(value: Any) -> bool:
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, Jaxpr | ClosedJaxpr) or callable(item) for item in items)


# -- steps that only give their argument another shape
# --------------------------------------------------------------------------------------------------

# What gives each of its arguments as it is.
_SAME = frozenset({"copy", "copy_p", "name", "optimization_barrier", "pvary", "stop_gradient"})


def view_made_by(equation: Any, place: int) -> tuple[int, View] | None:
    """Which argument the result at `place` looks at, and how; None where a step makes numbers of
    its own.
    """
    name, params = equation.primitive.name, equation.params
    if not all(
        isinstance(atom.aval.dtype, np.dtype)
        for atom in equation.invars
        if hasattr(atom.aval, "dtype")
    ):
        return None  # a random key has sides that its shape does not tell
    if name in _SAME:
        return place, lambda tensor: tensor
    if len(equation.invars) != 1:
        return None  # a side of a size that is computed
    shape = tuple(equation.outvars[place].aval.shape)
    if name == "reshape" and params["dimensions"] is None:
        return 0, lambda tensor: tensor.reshape(shape)
    if name == "transpose":
        return 0, lambda tensor: tensor.permute(tuple(params["permutation"]))
    if name == "squeeze":
        return 0, lambda tensor: tensor.squeeze(tuple(params["dimensions"]))
    if name == "broadcast_in_dim":
        return 0, lambda tensor: _broadcast(tensor, shape, params["broadcast_dimensions"])
    if name == "slice":
        starts, ends = params["start_indices"], params["limit_indices"]
        index = tuple(map(slice, starts, ends, params["strides"] or [1] * len(starts)))
        return 0, lambda tensor: tensor[index]
    if name == "split":
        axis, sizes = params["axis"], params["sizes"]
        return 0, lambda tensor: tensor.narrow(axis, sum(sizes[:place]), sizes[place])
    return None


def _broadcast(
    tensor: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...]
) -> torch.Tensor:
    for side in range(len(shape)):
        if side not in sides:
            tensor = tensor.unsqueeze(side)
    return tensor.expand(shape)
