"""A JAX function compiled so that it also returns what happens inside: one program, run once a call.

The function is traced as jit traces it, once for each kind of argument. The program becomes a recording without values, and
is compiled anew with the values that are wanted as further results.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from torchlens.capture.operations import OUTPUT
from torchlens.capture.recording import Recording, Row
from torchlens.capture.session import CaptureOptions
from torchlens.capture.trees import Path
from torchlens.jax.arrays import is_array, number_of, shape_and_dtype, to_torch
from torchlens.jax.internals import concrete
from torchlens.jax.jaxprs import walk_program
from torchlens.jax.modules import ModuleTracker
from torchlens.jax.places import Place
from torchlens.jax.primitives import operation_of
from torchlens.jax.session import JaxSession
from torchlens.jax.trees import key_word

__all__ = ["CompiledRun", "Program", "unjitted"]

Choice = Callable[[Recording], Iterable[int]]


def unjitted(model: Any) -> Any:
    """What a jitted function (JAX's, Equinox's) compiles; the same object where nobody jits it."""
    while hasattr(model, "lower") and hasattr(model, "__wrapped__"):
        model = model.__wrapped__
    return model


class CompiledRun:
    """Runs a jitted function; gives its result and a recording. `choose` says which rows of that get their values."""

    def __init__(self, model: Any, name: str, choose: Choice, keeps_params: bool = False) -> None:
        self._model = unjitted(model)
        self._name = name
        self._choose = choose
        self._keeps_params = keeps_params
        self._programs: dict[Any, Program] = {}
        self._traces_numbers = True  # until the function turns out to need some of them as they are

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Recording]:
        """The result of the call, and what happened in it."""
        key = self._kind_of(args, kwargs)
        program = self._programs.get(key)
        if program is None:
            program = self._trace(args, kwargs)
            program.compile(self._choose(program.recording))
            self._programs[self._kind_of(args, kwargs)] = program
        return program.run(args, kwargs)

    def _trace(self, args: list[Any], kwargs: dict[str, Any]) -> "Program":
        """Numbers are arrays to a jitted function, unless it was told otherwise (`static_argnums`), which does not show."""
        if self._traces_numbers:
            try:
                return Program(self._model, self._name, args, kwargs, _is_array_or_number, self._keeps_params)
            except (TypeError, ValueError, IndexError):  # a number that decides what is computed, or how large it is
                self._traces_numbers = False
        return Program(self._model, self._name, args, kwargs, is_array, self._keeps_params)

    def _kind_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        return tree, self._traces_numbers, tuple(map(self._leaf_kind, leaves))

    def _leaf_kind(self, leaf: Any) -> Any:
        if is_array(leaf):
            return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
        return type(leaf) if self._traces_numbers and _is_array_or_number(leaf) else (type(leaf), leaf)


def _is_array_or_number(leaf: Any) -> bool:
    return is_array(leaf) or (isinstance(leaf, int | float | complex) and not isinstance(leaf, bool))


class Program:
    """One trace of a function: a recording without values, and what it takes to fill in the values of a call."""

    def __init__(
        self,
        model: Any,
        name: str,
        args: list[Any],
        kwargs: dict[str, Any],
        is_given: Callable[[Any], bool],
        keeps_params: bool,
    ) -> None:
        self._is_given = is_given
        self._session = _Tracing(model, name, CaptureOptions(saves=False))
        leaves, self._tree = jax.tree_util.tree_flatten((args, kwargs))
        self._leaves = [None if is_given(leaf) else leaf for leaf in leaves]
        self._is_array = [is_given(leaf) for leaf in leaves]
        arrays = [leaf for leaf in leaves if is_given(leaf)]
        self._program = self._session.trace(lambda given: self._call(model, given), arrays, args, kwargs)
        self._session.take_params(keeps_params)
        self._row_of_array: dict[int, int] = {}  # place among the arrays given → row
        self._row_of_constant: list[tuple[int, Any]] = []  # rows of arrays that the function itself holds
        self._made: list[int | None] = []  # rows of what the program makes, in order
        self._results: list[tuple[int, int]] = []  # rows of the outputs, and their places among the results
        self.recording = self._write_down(arrays)

    def _call(self, model: Any, arrays: list[Any]) -> list[Any]:
        """Calls the function; what it returns beside arrays is the same each time, as under jit."""
        args, kwargs = self._arguments(arrays)
        result = model(*args, **kwargs)
        leaves, self._result_tree = jax.tree_util.tree_flatten(result)
        self._returned = [None if _is_result(leaf) else leaf for leaf in leaves]
        self._is_returned_array = [_is_result(leaf) for leaf in leaves]
        return [leaf for leaf in leaves if _is_result(leaf)]

    def _arguments(self, arrays: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        given = iter(arrays)
        leaves = [next(given) if is_own else leaf for leaf, is_own in zip(self._leaves, self._is_array, strict=True)]
        args, kwargs = jax.tree_util.tree_unflatten(self._tree, leaves)
        return args, kwargs

    # -- the recording ---------------------------------------------------------------------------------------------

    def _write_down(self, arrays: list[Any]) -> Recording:
        """Rows for what goes in, for each step, and for what comes out; none has a value."""
        session = self._session
        recorder, tracker = session.recorder, session.tracker
        given = [recorder.number_of(array) if is_array(array) else _Number(array) for array in arrays]
        self._row_of_array = {place: row for place, row in enumerate(given) if isinstance(row, int) and row >= 0}
        outer: list[tuple[int, str, Place]] = []
        of_var: dict[int, int] = {}

        def constant(value: Any) -> Any:
            if not is_array(value) or not value.ndim:
                return _Number(number_of(value) if is_array(value) else value)
            number = recorder.find(value)
            if number is not None and number >= 0 and number not in known:
                known.add(number)
                self._row_of_constant.append((number, value))
            return number

        def place_of(equation: Any) -> Place:
            """Where a step was written. JAX traces a function of its own (`relu`) once, for whoever calls it first."""
            traceback = equation.source_info.traceback
            place: Place = recorder.places.traced(traceback) if traceback is not None else (None, 0)
            is_own = not outer or (place[0] is not None and outer[-1][1] in place[0].co_qualname)
            return place if is_own else outer[-1][2]

        def step(equation: Any, items: list[Any]) -> list[Any]:
            passed_on = _passed_on(equation, items)
            if passed_on is not None:
                self._made.append(None)
                return [passed_on]
            dtypes = tuple(getattr(atom.aval, "dtype", None) for atom in equation.invars)
            call = recorder.module_call_of(equation.source_info)
            operation = operation_of(equation.primitive, dtypes, recorder.is_backward)
            references = tuple(None if isinstance(item, _Number) else item for item in items)
            numbers = tuple(item.value if isinstance(item, _Number) else None for item in items)
            params = {name: value for name, value in equation.params.items() if not _holds_program(value)}
            place = place_of(equation)
            rows = []
            for index, var in enumerate(equation.outvars):
                rows.append(len(recorder.rows))
                of_var[id(var)] = rows[-1]
                shape, dtype = shape_and_dtype(var.aval)
                several = index if len(equation.outvars) > 1 else None
                head = (operation, numbers, params, references, call, *place, 0.0)
                recorder.rows.append(Row(*head, several, shape, dtype, None))
            self._made += rows
            return rows

        def enter(equation: Any, items: list[Any]) -> list[Any]:
            if equation is None:
                recorder.running = outer.pop()[0]
            else:
                outer.append((recorder.running, str(equation.params.get("name", "")), place_of(equation)))
                recorder.running = recorder.module_call_of(equation.source_info)
            return []

        known = set(self._row_of_array.values())
        results = walk_program(self._program, given, constant, step, enter)
        for place, (path, number) in enumerate(zip(self._result_paths(), results, strict=True)):
            if isinstance(number, _Number):
                continue
            row = len(recorder.rows)
            source = recorder.rows[number] if number >= 0 else None
            shape, dtype = source[-3:-1] if source is not None else shape_and_dtype(session.parts.params[-1 - number])
            recorder.rows.append(Row(OUTPUT, (), None, (number,), 0, None, 0, 0.0, None, shape, dtype, None))
            session.outputs.append((path, row))
            self._results.append((row, place))
        recorder.values += [None] * (len(recorder.rows) - len(recorder.values))
        for calls in (tracker.entries, tracker.exits):
            calls[:] = [(call, [of_var[id(var)] for var in found if id(var) in of_var]) for call, found in calls]
        return session.recording

    def _result_paths(self) -> list[Path]:
        tree = jax.tree_util.tree_unflatten(self._result_tree, range(len(self._returned)))
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        paths = [tuple(key_word(key) for key in keys) for keys, _ in flat]
        return [path for path, is_own in zip(paths, self._is_returned_array, strict=True) if is_own]

    # -- running ---------------------------------------------------------------------------------------------------

    def compile(self, chosen: Iterable[int]) -> None:
        """Decides on the rows that get their values."""
        self._chosen = frozenset(chosen)
        places = [place for place, row in enumerate(self._made) if row in self._chosen]
        self._tapped = [row for row in self._made if row in self._chosen]
        program = ClosedJaxpr(self._program.jaxpr, self._program.consts)

        def run(constants: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            made: list[Any] = []

            def step(equation: Any, items: list[Any]) -> list[Any]:
                params = equation.primitive.get_bind_params(equation.params)
                result = equation.primitive.bind(*items, **params)
                results = list(result) if equation.primitive.multiple_results else [result]
                made.extend(results)
                return results

            closed = ClosedJaxpr(program.jaxpr, constants)
            results = walk_program(closed, arrays, lambda value: value, step, lambda equation, items: [])
            return results, [made[place] for place in places]

        self._compiled = jax.jit(run)

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Recording]:
        """The result, and the recording with the values of this call."""
        arrays = [leaf for leaf in jax.tree_util.tree_leaves((args, kwargs)) if self._is_given(leaf)]
        results, tapped = self._compiled(list(self._program.consts), arrays)
        values: list[Any] = [None] * len(self.recording.rows)
        for row, array in zip(self._tapped, tapped, strict=True):
            values[row] = array
        own = [(row, arrays[place]) for place, row in self._row_of_array.items()]
        own += [(row, results[place]) for row, place in self._results]
        for row, array in (*own, *self._row_of_constant):
            if row in self._chosen:
                values[row] = array
        tensors = [None if array is None else to_torch(array) for array in values]
        versions = [-1 if tensor is None else tensor._version for tensor in tensors]
        returned = iter(results)
        filled = [
            next(returned) if is_own else leaf for leaf, is_own in zip(self._returned, self._is_returned_array, strict=True)
        ]
        result = jax.tree_util.tree_unflatten(self._result_tree, filled)
        return result, replace(self.recording, values=tensors, versions=versions)


class _Number:
    """A constant without dimensions: an argument, not an entry."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Tracing(JaxSession):
    """A session in which the function is traced, not run: it learns the inputs, weights and modules."""

    def take_params(self, keeps_values: bool) -> None:
        """The weights as they are now, or their shapes and types."""
        tensors = [to_torch(array) for array in self.parts.params]
        own = tensors if keeps_values else [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self.params = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in own]

    def trace(self, call: Callable[[list[Any]], Any], arrays: list[Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.prepare(args, kwargs, TracedModules)
        tracker = self.tracker

        def traced(given: list[Any]) -> Any:
            assert isinstance(tracker, TracedModules)
            tracker.know(arrays, given)
            return call(given)

        with ExitStack() as around:
            self.watch_modules(around)
            return jax.make_jaxpr(traced)(arrays)


class TracedModules(ModuleTracker):
    """Modules that are called while a function is traced: what goes in and comes out are variables of the program."""

    def know(self, arrays: list[Any], tracers: list[Any]) -> None:
        """Which variables stand for which weights."""
        for array, tracer in zip(arrays, tracers, strict=True):
            address = self.weight_addresses.get(id(array))
            if address is not None:
                self.weight_addresses[id(concrete(tracer))] = address

    def _entries_in(self, tree: Any) -> list[Any]:
        found = [concrete(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
        return [var for var in found if isinstance(var, Var)]


def _passed_on(equation: Any, items: list[Any]) -> Any:
    """What comes out of a step that is no operation to a log: a number of another type, or an array of the same."""
    if equation.primitive.name not in ("convert_element_type", "broadcast_in_dim") or len(items) != 1:
        return None
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    if isinstance(items[0], _Number):
        return None if after.shape else _Number(number_of(np.asarray(items[0].value).astype(after.dtype)))
    return items[0] if (before.shape, before.dtype) == (after.shape, after.dtype) else None


def _is_result(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.core.Tracer)


def _holds_program(value: Any) -> bool:
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, Jaxpr | ClosedJaxpr) or callable(item) for item in items)
