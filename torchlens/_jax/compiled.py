"""A JAX function compiled so that it also returns what happens inside: one program, run once a
call.

The function is traced as jit traces it, once for each kind of argument. The program becomes a
recording without values, and is compiled anew with the values that are wanted as further results.
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
from torchlens._jax.modules import (
    ModuleTracker,
    fill_in,
    order_of_leaving,
    settled_calls,
    unused_calls,
)
from torchlens._jax.programs import tapped, walk_program
from torchlens._jax.pytrees import key_word
from torchlens._jax.session import JaxSession
from torchlens._jax.traced_rows import Number, Source, TracedRows
from torchlens._recording.operations import OUTPUT
from torchlens._recording.recording import Recording, Row
from torchlens._recording.trees import Path

Choice = Callable[[Recording], Iterable[int]]


class CallTrees:
    """As `jax.jit` takes arguments apart. What a function does to an object that it is given is
    lost.
    """

    def flatten(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten((args, kwargs))

    def rebuild(self, tree: Any, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
        return args, kwargs

    def state_of(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A tree of what the call may have changed."""
        return ()

    def update(self, args: list[Any], kwargs: dict[str, Any], state: Any) -> None:
        """Changes the caller's objects as the call changed its own."""


class NnxTrees(CallTrees):
    """As `nnx.jit` does it: modules and optimizers are updated, and what is the same object stays
    one.
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
    """How the arguments of this jitted function are taken apart."""
    return NnxTrees() if type(model).__module__.startswith("flax.nnx.") else CallTrees()


class CompiledRun:
    """Runs a jitted function; gives its result and what is recorded. `choose` says which rows get
    their values.
    """

    def __init__(self, model: Any, name: str, choose: Choice, keeps_params: bool = False) -> None:
        self._trees = trees_of(model)
        self._model = unjitted(model)
        self._name = name
        self._choose = choose
        self._keeps_params = keeps_params
        self._programs: dict[Any, Program] = {}
        self._traces_numbers = True  # until the function turns out to need some of them as they are

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, "CompiledCall"]:
        """The result of the call, and what happened in it."""
        key = self._kind_of(args, kwargs)
        program = self._programs.get(key)
        if program is None:
            program = self._trace(args, kwargs)
            program.compile(self._choose(program.recording))
            self._programs[self._kind_of(args, kwargs)] = program
        return program.run(args, kwargs)

    def _trace(self, args: list[Any], kwargs: dict[str, Any]) -> "Program":
        """Numbers are arrays to a jitted function, unless it was told otherwise (`static_argnums`),
        which does not show.
        """
        if self._traces_numbers:
            try:
                return self._program(args, kwargs, _is_array_or_number)
            except (
                TypeError,
                ValueError,
                IndexError,
            ):  # a number that decides what is computed, or how large it is
                program = self._program(
                    args, kwargs, is_array
                )  # which raises what is the function's own error
                self._traces_numbers = False
                return program
        return self._program(args, kwargs, is_array)

    def _program(
        self, args: list[Any], kwargs: dict[str, Any], is_given: Callable[[Any], bool]
    ) -> "Program":
        return Program(
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


class Program:
    """One trace of a function: a recording without values, and what it takes to fill in the values
    of a call.
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
        self.num_bytes = 0  # of the values of a call, once there was one
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
        """Calls the function; what it returns beside arrays is the same each time, as under jit."""
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

    # -- the recording
    # ---------------------------------------------------------------------------------------------

    def _write_down(self, arrays: list[Any]) -> Recording:
        """Rows for what goes in, for each step, and for what comes out; none has a value."""
        session, rows = self._session, self._rows
        recorder = session.recorder
        # What the function returns need not come out twice.
        self._returned_as: dict[Any, tuple[str, int]] = {}
        given = [
            recorder.number_of(array) if is_array(array) else Number(array) for array in arrays
        ]
        for place, number in enumerate(given):
            if isinstance(number, int) and number >= 0:
                rows.sources[number] = Source(("given", place))
        results = walk_program(self._program, given, rows)
        for place, (path, number) in enumerate(
            zip(self._result_paths(), results[: self._num_returned], strict=True)
        ):
            if isinstance(number, Number):
                continue
            row = len(recorder.rows)
            source = recorder.rows[number] if number >= 0 else None
            shape, dtype = (
                source[-3:-1]
                if source is not None
                else shape_and_dtype(session.parts.params[-1 - number])
            )
            recorder.rows.append(
                Row(OUTPUT, (), None, (number,), 0, None, 0, 0.0, None, shape, dtype, None)
            )
            session.outputs.append((path, row))
            rows.sources[row] = Source(("result", place))
            made = rows.sources.get(number)
            if made is not None and not made.part:
                self._returned_as.setdefault(made.whole, ("result", place))
        recorder.values += [None] * (len(recorder.rows) - len(recorder.values))
        self._settle_calls()
        return session.recording

    def _settle_calls(self) -> None:
        """Gives the calls of modules their places, and what goes into each and comes out of it."""
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
            (tracker.entries, range(len(calls))),
            (tracker.exits, order_of_leaving(calls)),
        ):
            own = [
                (
                    new[at],
                    [
                        row
                        for row in (rows.row_of(var, turn) for var in variables)
                        if row is not None
                    ],
                )
                for call, variables in found
                for turn, at in rows.turns.calls_of(call)
                if at not in gone
            ]
            found[:] = sorted(own, key=lambda pair: places[pair[0]])
        fill_in(calls, recorder.rows, tracker.entries, tracker.exits)

    def _result_paths(self) -> list[Path]:
        tree = jax.tree_util.tree_unflatten(self._result_tree, range(len(self._returned)))
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        paths = [tuple(key_word(key) for key in keys) for keys, _ in flat]
        return [path for path, is_own in zip(paths, self._is_returned_array, strict=True) if is_own]

    # -- running
    # ----------------------------------------------------------------------------------------------

    def compile(self, chosen: Iterable[int]) -> None:
        """Decides on the rows that get their values."""
        rows = self._rows
        own = {
            row: self._at_hand(rows.sources[row])
            for row in sorted(set(chosen))
            if row in rows.sources
        }
        taps = {
            source.whole
            for row, source in own.items()
            if not source.is_at_hand and not rows.is_view(row)
        }
        for row in own:
            if rows.is_view(row) and not own[row].is_at_hand:
                seen = self._at_hand(rows.view_source(row))
                own[row] = seen if seen.is_at_hand or seen.whole in taps else own[row]
        wholes = list(dict.fromkeys(source.whole for source in own.values()))
        number_of = {whole: number for number, whole in enumerate(wholes)}
        self._chosen = {row: (number_of[source.whole], source) for row, source in own.items()}
        made: list[Any] = [whole for whole in wholes if not isinstance(whole[0], str)]
        place_of = {whole: ("made", place) for place, whole in enumerate(made)}
        self._wholes: list[Any] = [place_of.get(whole, whole) for whole in wholes]
        self._compiled = tapped(self._program, made)

    def _at_hand(self, source: Source) -> Source:
        """The same value in what the function returns, if it is there."""
        return Source(self._returned_as.get(source.whole, source.whole), source.part)

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, "CompiledCall"]:
        """The result, and what is recorded of this call."""
        arrays = [leaf for leaf in self._trees.flatten(args, kwargs)[0] if self._is_given(leaf)]
        results, made = self._compiled(list(self._program.consts), arrays)
        there: dict[str, Any] = {"given": arrays, "result": results, "held": self._rows.held}
        wholes = [
            made[place] if kind == "made" else _kept(there[kind][place])
            for kind, place in self._wholes
        ]
        if not self.num_bytes:
            self.num_bytes = sum(whole.nbytes for whole in wholes)
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

    def filled(self, wholes: list[torch.Tensor]) -> Recording:
        """The recording with the values of a call."""
        values: list[Any] = [None] * len(self.recording.rows)
        for row, (number, source) in self._chosen.items():
            values[row] = source.part_in(wholes[number])
        versions = [-1 if tensor is None else tensor._version for tensor in values]
        return replace(self.recording, values=values, versions=versions)


class CompiledCall:
    """The values of one call of a program. What the arrays hold may still be being computed."""

    def __init__(self, program: Program, wholes: list[Any]) -> None:
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
        return self.program.filled(list(map(to_torch, self._wholes)))


def _kept(array: Any) -> Any:
    """An array as it is now. Before it is written, its owner may write to it (numpy's), or let
    another function have its memory (`donate_argnums`), which JAX prevents as long as numpy looks
    at it."""
    if isinstance(array, np.ndarray):
        return np.array(array, order="C")
    return np.asarray(as_known_type(array))


class _Tracing(JaxSession):
    """A session in which the function is traced, not run: it learns the inputs, weights and
    modules.
    """

    def take_params(self, keeps_values: bool) -> None:
        """The weights as they are now, or their shapes and types."""
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


class TracedModules(ModuleTracker):
    """Modules that are called while a function is traced: what goes in and comes out are variables
    of the program.
    """

    def know(self, arrays: list[Any], tracers: list[Any]) -> None:
        """Which variables stand for which weights."""
        for array, tracer in zip(arrays, tracers, strict=True):
            address = self.weight_addresses.get(id(array))
            if address is not None:
                self.weight_addresses[id(concrete(tracer))] = address

    def _entries_in(self, tree: Any) -> list[Any]:
        found = [concrete(leaf) for leaf in jax.tree_util.tree_leaves(tree)]
        return [var for var in found if isinstance(var, Var)]


def _is_result(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.core.Tracer)
