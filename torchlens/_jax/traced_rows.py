"""Writes the rows of a traced program: one for each result of each step, and the source of its
value.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import primitives as known_primitives

from torchlens._jax.arrays import is_array, number_of, shape_and_dtype
from torchlens._jax.module_calls import Turns
from torchlens._jax.primitive_recorder import PrimitiveRecorder
from torchlens._jax.primitives import operation_of
from torchlens._jax.programs import Body, Path, Tap, loop_parts
from torchlens._jax.user_lines import Place
from torchlens._recording.recording import make_row

# Makes the result of a step from its argument, in the same memory if possible.
View = Callable[[torch.Tensor], torch.Tensor]
_DEEPEST = 8  # the longest chain of views of one array


class Source(NamedTuple):
    """Where a value comes from: a tap, or an array that is available anyway (`("given", 2)`), and
    the indices and views that lead from there to the value.
    """

    whole: Tap | tuple[str, int]
    steps: tuple[int | slice | View, ...] = ()

    @property
    def is_at_hand(self) -> bool:
        """True if the whole is available without a tap."""
        return isinstance(self.whole[0], str)

    def part_at(self, step: int | slice | View) -> "Source":
        return Source(self.whole, (*self.steps, step))

    def part_in(self, whole: torch.Tensor) -> torch.Tensor:
        """The value, from that of the whole."""
        index: list[int | slice] = []
        for step in self.steps:
            if isinstance(step, int | slice):
                index.append(step)
            else:
                whole, index = step(whole[tuple(index)]), []
        return whole[tuple(index)] if index else whole


class Number:
    """A constant without dimensions: a literal argument, not an entry."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Around(NamedTuple):
    """A step with an inner program, in which scopes and transformations begin anew."""

    name: str
    place: Place
    is_backward: bool
    running: int  # the module call before the step


class _Look(NamedTuple):
    """The view that one row's value is of another's: the base row, the function, a meta tensor of
    the result, and the length of the chain of views.
    """

    base: int
    view: View
    memory: torch.Tensor
    depth: int


class TracedRows:
    """Writes the rows of a program as a log of its run would have them: each iteration of a loop
    has its own rows.
    """

    def __init__(self, recorder: PrimitiveRecorder) -> None:
        self.sources: dict[int, Source] = {}
        self.held: dict[int, Any] = {}  # arrays that the function holds, by row
        self.turns = Turns(recorder.module_calls)
        self._recorder = recorder
        self._outer: list[_Around] = []  # the steps around the current one
        self._row_of: dict[
            tuple[int, tuple[int, ...]], int
        ] = {}  # a variable of the program, at a turn
        self._views: dict[int, _Look] = {}

    def row_of(self, var: Any, turn: tuple[int, ...]) -> int | None:
        """The row of a variable of the program, in this iteration of the loops around it."""
        return self._row_of.get((id(var), turn))

    def is_view(self, row: int) -> bool:
        """True if the value of the row is a view of another row's."""
        return row in self._views

    def view_source(self, row: int) -> Source:
        """The source of a view's value, from the source of its base."""
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
        # `reshape` may copy; a loop may chain many views.
        if seen.untyped_storage()._cdata == memory.untyped_storage()._cdata and depth < _DEEPEST:
            self._views[row] = _Look(base, found[1], seen, depth + 1)

    def call(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        self._enter(equation)
        results = body(given)
        self._leave()
        return self._made(equation, results)

    repeat = call

    def loop(self, equation: Any, path: Path, given: list[Any], body: Body) -> Sequence[Any]:
        """As JAX runs it with jit off: each iteration slices the sequences, and the results are
        stacked at the end.
        """
        constants, carried, sequences = loop_parts(equation.params, given)
        num_carried, length = len(carried), equation.params["length"]
        avals = [atom.aval for atom in equation.invars[len(given) - len(sequences) :]]
        stacks = [
            Source((path, place), self.turns.current)
            for place in range(num_carried, len(equation.outvars))
        ]
        made: list[list[Any]] = [[]] * length
        self._enter(equation)
        for index in reversed(range(length)) if equation.params["reverse"] else range(length):
            items = [
                self._slice(equation, row, aval, index)
                for row, aval in zip(sequences, avals, strict=True)
            ]
            first = len(self._recorder.rows)
            with self.turns.turn(self._recorder.running, index):
                results = body([*constants, *carried, *items])
            carried, made[index] = results[:num_carried], results[num_carried:]
            for source, row in zip(stacks, made[index], strict=True):
                self._take_from_stack(row, source.part_at(index), first)
        stacked = [
            self._stack(equation, column, source, var.aval)
            for column, source, var in zip(
                zip(*made, strict=True), stacks, equation.outvars[num_carried:], strict=True
            )
        ]
        self._leave()
        return self._made(equation, [*carried, *stacked])

    def _take_from_stack(self, row: Any, source: Source, first: int) -> None:
        """A row that an iteration made needs no tap if the loop returns its value."""
        if isinstance(row, int) and row >= first and row in self.sources:
            self.sources[row] = source

    def _slice(self, equation: Any, row: int, aval: Any, index: int) -> int:
        """The rows of one slice of a sequence. A slice of a weight has no value of its own."""
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
        """True for a step of the backward pass: the last one given to `module_call_of`."""
        return self._recorder.is_backward or (bool(self._outer) and self._outer[-1].is_backward)

    def _place_of(self, equation: Any) -> Place:
        """The line of user code of a step. JAX traces its own functions (`relu`) once, so inside
        those it is the line of the outer step.
        """
        traceback, outer = equation.source_info.traceback, self._outer
        place: Place = (
            self._recorder.places.traced(traceback) if traceback is not None else (None, 0)
        )
        is_own = not outer or (place[0] is not None and outer[-1].name in place[0].co_qualname)
        return place if is_own else outer[-1].place


def _passed_on(equation: Any, given: list[Any]) -> Any:
    """The result of a step that leaves no entry (a converted number, or an array that does not
    change); None for other steps.
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


# -- views
# --------------------------------------------------------------------------------------------------

# Primitives that return each of their arguments unchanged.
_SAME = frozenset({"copy", "copy_p", "name", "optimization_barrier", "pvary", "stop_gradient"})


def _slice_index(params: Any) -> tuple[slice, ...]:
    starts, ends = params["start_indices"], params["limit_indices"]
    return tuple(map(slice, starts, ends, params["strides"] or [1] * len(starts)))


# Primitive → the view that its result at a place is of its only argument, from its parameters and
# the shape of the result.
_VIEWS: dict[str, Callable[[Any, tuple[int, ...], int], View]] = {
    "reshape": lambda params, shape, place: lambda tensor: tensor.reshape(shape),
    "transpose": lambda params, shape, place: (
        lambda tensor: tensor.permute(tuple(params["permutation"]))
    ),
    "squeeze": lambda params, shape, place: (
        lambda tensor: tensor.squeeze(tuple(params["dimensions"]))
    ),
    "broadcast_in_dim": lambda params, shape, place: (
        lambda tensor: _broadcast(tensor, shape, params["broadcast_dimensions"])
    ),
    "slice": lambda params, shape, place: lambda tensor: tensor[_slice_index(params)],
    "split": lambda params, shape, place: (
        lambda tensor: tensor.narrow(
            params["axis"], sum(params["sizes"][:place]), params["sizes"][place]
        )
    ),
}


def view_made_by(equation: Any, place: int) -> tuple[int, View] | None:
    """The argument that the result at `place` is a view of, and the view; None for other steps."""
    name, params = equation.primitive.name, equation.params
    dtypes = [getattr(atom.aval, "dtype", None) for atom in equation.invars]
    if not all(dtype is None or isinstance(dtype, np.dtype) for dtype in dtypes):
        return None  # a random key has hidden dimensions
    if name in _SAME:
        return place, lambda tensor: tensor
    is_reversed = name == "reshape" and params["dimensions"] is not None
    if name not in _VIEWS or is_reversed or len(equation.invars) != 1:  # or of a computed size
        return None
    return 0, _VIEWS[name](params, tuple(equation.outvars[place].aval.shape), place)


def _broadcast(
    tensor: torch.Tensor, shape: tuple[int, ...], sides: tuple[int, ...]
) -> torch.Tensor:
    for side in range(len(shape)):
        if side not in sides:
            tensor = tensor.unsqueeze(side)
    return tensor.expand(shape)
