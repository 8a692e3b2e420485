"""Jitted functions in `tl.tail`: compiled so that they also return the values to record.

A function is traced as jit traces it, once for each combination of argument types. The traced
program becomes a recording without values, and is compiled with the chosen values as further
results.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
from jax.extend.core import Var

from torchlens._capture.options import CaptureOptions
from torchlens._jax.arrays import as_known_type, is_array, shape_and_dtype, to_torch
from torchlens._jax.callables import unjitted
from torchlens._jax.internals import concrete
from torchlens._jax.jax_session import JaxSession
from torchlens._jax.module_calls import (
    JaxModuleTracker,
    Turn,
    fill_in,
    order_of_leaving,
    settled_calls,
    unused_calls,
)
from torchlens._jax.programs import tapped, walk_program
from torchlens._jax.pytrees import key_word
from torchlens._jax.traced_rows import Number, Source, TracedRows
from torchlens._recording.operations import OUTPUT
from torchlens._recording.recording import Recording, Row
from torchlens._recording.trees import Path

# From a recording and its modules by address.
Choice = Callable[[Recording, dict[str, Any]], Iterable[int]]


class CallTrees:
    """Flattens arguments as `jax.jit` does; changes of objects among the arguments are lost."""

    def flatten(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten((args, kwargs))

    def rebuild(self, tree: Any, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        return args, kwargs

    def state_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A tree of the arrays that the call may have changed."""
        return ()

    def update(self, args: list[Any], kwargs: dict[str, Any], state: Any) -> None:
        """Applies the changes to the caller's objects."""


class NnxTrees(CallTrees):
    """Flattens arguments as `nnx.jit` does: updates modules and optimizers, keeps shared objects
    shared.
    """

    def __init__(self) -> None:
        self._nnx = sys.modules["flax.nnx"]

    def flatten(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten(self._nnx.split((args, kwargs)))

    def rebuild(self, tree: Any, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = self._nnx.merge(*jax.tree_util.tree_unflatten(tree, leaves))
        return args, kwargs

    def state_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _, variables, _ = self._nnx.split((args, kwargs), self._nnx.Variable, ...)
        return variables

    def update(self, args: list[Any], kwargs: dict[str, Any], state: Any) -> None:
        self._nnx.update((args, kwargs), state)


def trees_of(model: Any) -> CallTrees:
    """The kind of trees that this jitted function flattens its arguments to."""
    return NnxTrees() if type(model).__module__.startswith("flax.nnx.") else CallTrees()


class CompiledRun:
    """Runs a jitted function and records its calls. `choose` selects the rows whose values are
    recorded.
    """

    def __init__(self, model: Any, name: str, choose: Choice, keeps_params: bool = False) -> None:
        self._trees = trees_of(model)
        self._model = unjitted(model)
        self._name = name
        self._choose = choose
        self._keeps_params = keeps_params
        self._programs: dict[Any, CompiledProgram] = {}
        self._traces_numbers = True  # until the function fails with traced numbers

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, "CompiledCall"]:
        """The result of the call, and its recorded values."""
        key = self._kind_of(args, kwargs)
        program = self._programs.get(key)
        if program is None:
            program = self._trace(args, kwargs)
            program.compile(self._choose(program.recording, program.taken_modules()))
            self._programs[self._kind_of(args, kwargs)] = program
        return program.run(args, kwargs)

    def _trace(self, args: list[Any], kwargs: dict[str, Any]) -> "CompiledProgram":
        """jit traces numbers, except static arguments (`static_argnums`), which it does not show:
        if the function fails with traced numbers, all numbers count as static.
        """
        if self._traces_numbers:
            try:
                return self._program(args, kwargs, _is_array_or_number)
            except (TypeError, ValueError, IndexError):  # Python code needs the number's value
                # An error of the function itself is raised again here.
                program = self._program(args, kwargs, is_array)
                self._traces_numbers = False
                return program
        return self._program(args, kwargs, is_array)

    def _program(
        self, args: list[Any], kwargs: dict[str, Any], is_given: Callable[[Any], bool]
    ) -> "CompiledProgram":
        return CompiledProgram(
            self._model, self._name, args, kwargs, self._trees, is_given, self._keeps_params
        )

    def _kind_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        leaves, tree = self._trees.flatten(args, kwargs)
        return tree, self._traces_numbers, tuple(map(self._leaf_kind, leaves))

    def _leaf_kind(self, leaf: Any) -> Any:
        if is_array(leaf):
            return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
        return (
            type(leaf) if self._traces_numbers and _is_array_or_number(leaf) else (type(leaf), leaf)
        )


def _is_array_or_number(leaf: Any) -> bool:
    return is_array(leaf) or (
        isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    )


class CompiledProgram:
    """One traced program: its recording without values, and the compiled function that returns the
    values of a call.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        args: list[Any],
        kwargs: dict[str, Any],
        trees: CallTrees,
        is_given: Callable[[Any], bool],
        keeps_params: bool,
    ) -> None:
        self.num_bytes = 0  # of the recorded values; known after the first call
        self._is_given = is_given
        self._session = _Tracing(model, name, CaptureOptions(saves=False))
        self._trees = trees
        leaves, self._tree = trees.flatten(args, kwargs)
        self._leaves = [None if is_given(leaf) else leaf for leaf in leaves]
        self._is_array = [is_given(leaf) for leaf in leaves]
        arrays = [leaf for leaf in leaves if is_given(leaf)]
        self._program = self._session.trace(
            lambda given: self._call(model, given), arrays, args, kwargs
        )
        self._session.take_params(keeps_params)
        self._rows = TracedRows(self._session.recorder)
        self.recording = self._write_down(arrays)

    def _call(self, model: Any, arrays: list[Any]) -> list[Any]:
        """Calls the function; its results other than arrays are constants, as under jit."""
        args, kwargs = self._arguments(arrays)
        result = model(*args, **kwargs)
        leaves, self._result_tree = jax.tree_util.tree_flatten(result)
        self._returned = [None if _is_result(leaf) else leaf for leaf in leaves]
        self._is_returned_array = [_is_result(leaf) for leaf in leaves]
        changed, self._state_tree = jax.tree_util.tree_flatten(self._trees.state_of(args, kwargs))
        returned = [leaf for leaf in leaves if _is_result(leaf)]
        self._num_returned = len(returned)
        return [*returned, *changed]

    def _arguments(self, arrays: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        given = iter(arrays)
        leaves = [
            next(given) if is_own else leaf
            for leaf, is_own in zip(self._leaves, self._is_array, strict=True)
        ]
        return self._trees.rebuild(self._tree, leaves)

    def taken_modules(self) -> dict[str, Any]:
        """The modules that were called, by address; the program forgets them."""
        modules, self._session.tracker.modules = self._session.tracker.modules, {}
        return modules

    # -- the recording
    # ---------------------------------------------------------------------------------------------

    def _write_down(self, arrays: list[Any]) -> Recording:
        """Writes rows without values for the inputs, the steps and the results."""
        recorder, rows = self._session.recorder, self._rows
        # Values that are results of the function, which need no tap.
        self._returned_as: dict[Any, tuple[str, int]] = {}
        given = [
            recorder.number_of(array) if is_array(array) else Number(array) for array in arrays
        ]
        for place, number in enumerate(given):
            if isinstance(number, int) and number >= 0:
                rows.sources[number] = Source(("given", place))
        results = walk_program(self._program, given, rows)[: self._num_returned]
        for place, (path, number) in enumerate(zip(self._result_paths(), results, strict=True)):
            if not isinstance(number, Number):
                self._add_result(place, path, number)
        recorder.values += [None] * (len(recorder.rows) - len(recorder.values))
        self._settle_calls()
        return self._session.recording

    def _add_result(self, place: int, path: Path, number: int) -> None:
        """Writes the output row of one result, which is another row or a parameter."""
        session, rows = self._session, self._rows
        all_rows = session.recorder.rows
        if number >= 0:
            shape, dtype = all_rows[number].shape, all_rows[number].dtype
        else:
            shape, dtype = shape_and_dtype(session.parts.params[-1 - number])
        session.outputs.append((path, len(all_rows)))
        rows.sources[len(all_rows)] = Source(("result", place))
        all_rows.append(Row(OUTPUT, (), None, (number,), 0, None, 0, 0.0, None, shape, dtype, None))
        made = rows.sources.get(number)
        if made is not None and not made.steps:
            self._returned_as.setdefault(made.whole, ("result", place))

    def _settle_calls(self) -> None:
        """Orders the calls of modules, and finds the rows that enter and leave each of them."""
        recorder, tracker, rows = self._session.recorder, self._session.tracker, self._rows
        of_turns = rows.turns.traced
        num_calls = len(recorder.module_calls)
        gone = {*of_turns, *unused_calls(recorder.module_calls, recorder.rows, range(1, num_calls))}
        calls, new = settled_calls(
            recorder.module_calls, recorder.rows, gone, in_order_of_rows=bool(of_turns)
        )
        recorder.module_calls = calls
        recorder.rows[:] = [row._replace(module_call=new[row.module_call]) for row in recorder.rows]
        for found, places in (
            (tracker.entries, list(range(len(calls)))),
            (tracker.exits, order_of_leaving(calls)),
        ):
            own = [
                (new[at], self._rows_of(variables, turn))
                for call, variables in found
                for turn, at in rows.turns.calls_of(call)
                if at not in gone
            ]
            found[:] = sorted(own, key=lambda pair: places[pair[0]])
        fill_in(calls, recorder.rows, tracker.entries, tracker.exits)

    def _rows_of(self, variables: Iterable[Any], turn: Turn) -> list[int]:
        found = (self._rows.row_of(var, turn) for var in variables)
        return [row for row in found if row is not None]

    def _result_paths(self) -> list[Path]:
        tree = jax.tree_util.tree_unflatten(self._result_tree, range(len(self._returned)))
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        paths = [tuple(key_word(key) for key in keys) for keys, _ in flat]
        return [path for path, is_own in zip(paths, self._is_returned_array, strict=True) if is_own]

    # -- running
    # ----------------------------------------------------------------------------------------------

    def compile(self, chosen: Iterable[int]) -> None:
        """Compiles the program with the values of the chosen rows."""
        self._chosen = self._chosen_sources(set(chosen))
        self._wholes = list(dict.fromkeys(source.whole for source in self._chosen.values()))
        self._taps: list[Any] = [whole for whole in self._wholes if not Source(whole).is_at_hand]
        self._compiled = tapped(self._program, self._taps)

    def _chosen_sources(self, chosen: set[int]) -> dict[int, Source]:
        """The source of each row. A view takes its value from its base if that is available."""
        rows = self._rows
        found = {n: self._at_hand(rows.sources[n]) for n in sorted(chosen) if n in rows.sources}
        views = [n for n, source in found.items() if rows.is_view(n) and not source.is_at_hand]
        bases = {source.whole for n, source in found.items() if n not in views}
        for n in views:
            base = self._at_hand(rows.view_source(n))
            if base.is_at_hand or base.whole in bases:
                found[n] = base
        return found

    def _at_hand(self, source: Source) -> Source:
        """The source among the results of the function, if the value is one of them."""
        return Source(self._returned_as.get(source.whole, source.whole), source.steps)

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, "CompiledCall"]:
        """The result of a call, and its recorded values."""
        arrays = [leaf for leaf in self._trees.flatten(args, kwargs)[0] if self._is_given(leaf)]
        results, made = self._compiled(list(self._program.consts), arrays)
        tapped_values = dict(zip(self._taps, made, strict=True))
        there: dict[Any, Any] = {"given": arrays, "result": results, "held": self._rows.held}
        wholes = {
            whole: tapped_values[whole]
            if whole in tapped_values
            else _kept(there[whole[0]][whole[1]])
            for whole in self._wholes
        }
        if not self.num_bytes:
            self.num_bytes = sum(whole.nbytes for whole in wholes.values())
        returned = iter(results)
        filled = [
            next(returned) if is_own else leaf
            for leaf, is_own in zip(self._returned, self._is_returned_array, strict=True)
        ]
        result = jax.tree_util.tree_unflatten(self._result_tree, filled)
        self._trees.update(
            args,
            kwargs,
            jax.tree_util.tree_unflatten(self._state_tree, results[self._num_returned :]),
        )
        return result, CompiledCall(self, wholes)

    def filled(self, wholes: dict[Any, torch.Tensor]) -> Recording:
        """The recording with the values of a call."""
        values: list[Any] = [None] * len(self.recording.rows)
        for row, source in self._chosen.items():
            values[row] = source.part_in(wholes[source.whole])
        versions = [-1 if tensor is None else tensor._version for tensor in values]
        return replace(self.recording, values=values, versions=versions)


class CompiledCall:
    """The values of one call of a program; JAX may still be computing them."""

    def __init__(self, program: CompiledProgram, wholes: dict[Any, Any]) -> None:
        self.program = program
        self._wholes = wholes

    @property
    def num_bytes(self) -> int:
        return self.program.num_bytes

    @property
    def num_rows(self) -> int:
        return len(self.program.recording.rows)

    def recording(self) -> Recording:
        """The call as a recording."""
        tensors = {whole: to_torch(array) for whole, array in self._wholes.items()}
        return self.program.filled(tensors)


def _kept(array: Any) -> Any:
    """The array, protected against later changes: NumPy arrays are copied; a NumPy view of a JAX
    array prevents the donation of its memory (`donate_argnums`).
    """
    if isinstance(array, np.ndarray):
        return np.array(array, order="C")
    return np.asarray(as_known_type(array))


class _Tracing(JaxSession):
    """A session that traces the function instead of running it."""

    def take_params(self, keeps_values: bool) -> None:
        """Takes the values of the weights, or only their shapes and types."""
        tensors = [to_torch(array) for array in self.parts.params]
        own = (
            tensors
            if keeps_values
            else [torch.empty_like(tensor, device="meta") for tensor in tensors]
        )
        self.params = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in own]

    def trace(
        self,
        call: Callable[[list[Any]], Any],
        arrays: list[Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        self.prepare(args, kwargs, TracedModules)
        tracker = self.tracker

        def traced(given: list[Any]) -> Any:
            assert isinstance(tracker, TracedModules)
            tracker.know(arrays, given)
            return call(given)

        with ExitStack() as around:
            self.watch_modules(around)
            return jax.make_jaxpr(traced)(arrays)


class TracedModules(JaxModuleTracker):
    """Records the calls of modules in a trace, with variables of the program as their arguments and
    results.
    """

    def know(self, arrays: list[Any], tracers: list[Any]) -> None:
        """Gives the variables that represent weights the addresses of the weights."""
        for array, tracer in zip(arrays, tracers, strict=True):
            address = self.weight_addresses.get(id(array))
            if address is not None:
                self.weight_addresses[id(concrete(tracer))] = address

    def _entries_in(self, tree: Any) -> list[Any]:
        found = [concrete(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
        return [var for var in found if isinstance(var, Var)]


def _is_result(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.core.Tracer)
