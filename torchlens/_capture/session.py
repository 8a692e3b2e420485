"""One forward pass under the recorder: set up, run, tear down, whatever happens in between."""

import asyncio
import inspect
import random
import weakref
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from time import perf_counter, time
from typing import Any, Protocol, cast

import numpy as np
import torch

from torchlens._capture.current import CURRENT
from torchlens._capture.distributed.collectives import finish_collectives, record_functional
from torchlens._capture.distributed.sharding import ShardedPair, know_whole, parameter_pairs
from torchlens._capture.exchange import exchange_results
from torchlens._capture.gradients.backward_calls import gradients_left
from torchlens._capture.gradients.backward_hooks import next_sequence
from torchlens._capture.gradients.entry_gradients import GradientHooks
from torchlens._capture.memory.outflow import Outflow, OutflowWatch
from torchlens._capture.memory.process_memory import Afterwards, MemoryWatch, freed_memory
from torchlens._capture.memory.saved_values import Memory
from torchlens._capture.model_parts import Attributes, parts_of
from torchlens._capture.module_tracker import ModuleTracker
from torchlens._capture.observer import Observer
from torchlens._capture.options import CaptureOptions, named_inputs
from torchlens._capture.patches.mode_stack import hidden_from_user, push_below, remove_mode
from torchlens._capture.patches.patching import (
    apply_patches,
    begin_eager,
    end_eager,
    is_compiler_there,
    is_distributed,
    undo_patches,
)
from torchlens._capture.recorder import Recorder
from torchlens._capture.selection import Selection
from torchlens._capture.threads import (
    end_branches,
    is_over,
    order_module_calls,
    row_branches,
)
from torchlens._capture.unreported import UnseenTensors, came_back
from torchlens._recording.called_model import CalledModel
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.operations import BUFFER, INPUT
from torchlens._recording.origin import InputTensor, LiveOrigin, version_of
from torchlens._recording.recording import Failure, Recording
from torchlens._recording.regions import storage_of
from torchlens._recording.trees import (
    Path,
    holds_data,
    named_data,
    named_tensors,
    path_text,
)
from torchlens.errors import NestedLogError


class Session:
    """Runs a model once and holds the recording, even if the model raises.

    After an exception in `run`, `recording` holds everything up to the exception. An observer
    receives more of each call than the log keeps.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: CaptureOptions,
        observer: Observer | None = None,
        outflow: Outflow | None = None,
    ) -> None:
        if CURRENT.tracker is not None and not is_over(CURRENT.tracker):
            raise NestedLogError(
                "This thread is already logging a forward pass, and logs cannot be nested. Log "
                "the inner model on its own, before or after; its modules are part of the outer "
                "log anyway."
            )
        freed_memory().note_use()
        self.model = model
        self.options = options
        self._observer = observer
        self._memory = Memory(
            options.transform, may_save_late=bool(options.keys) and not options.saves
        )
        gradients = GradientHooks(next_sequence()) if options.keeps_gradients else None
        self._parts = parts_of(model)
        selection = None
        if options.keys:
            selection = Selection(
                options.keys,
                self._parts,
                by_operation=options.keeps_args,
                as_returned=options.saves is True,
            )
        attributes = Attributes(self._parts.modules, self._parts.addresses)
        self._unseen = UnseenTensors(attributes)
        self._recorder = Recorder(
            self._memory,
            options.saves,
            options.keeps_args,
            gradients,
            observer,
            options.max_nodes,
            selection,
        )
        exchange_results(self._recorder, [own for own in CURRENT.exchanges if own.model is model])
        self._tracker = ModuleTracker(self._parts, self._recorder, selection)
        if isinstance(model, CalledModel):
            self._tracker.name_tensor = attributes.add
        self._wanted = self._tracker.saved if options.saves is True and options.keys else None
        if outflow is not None:
            self._recorder.watch_memory(
                OutflowWatch(self._recorder, self._memory, outflow, self._wanted)
            )
        elif options.saves is not False or options.keys:
            self._recorder.watch_memory(
                MemoryWatch(self._memory.values, self._recorder.saved_args, options.keeps_gradients)
            )
        self._recorder.on_made_parameter = self._parts.number_of_parameter
        self._recorder.on_collective = record_functional
        self._recorder.on_unseen = self._unseen.meet
        self._inputs: list[tuple[Path, int]] = []
        self._outputs: list[tuple[Path, int]] = []
        self._buffers: list[tuple[str, int]] = []
        self._outside_storages: dict[int, int] = {}
        self._outside_states: dict[int, tuple[int, int]] = {}
        self._generators: tuple[torch.Tensor, ...] = ()
        # Whether values are saved, from which a later replay starts.
        self._may_replay = self.options.saves is not False or bool(self.options.keys)
        self._origin = LiveOrigin()
        self._output: Any = None
        self._returns_data = False
        self._seconds_forward = 0.0
        self._seconds_total = 0.0
        self._seconds_setup = 0.0
        self._started_at = 0.0

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the model and returns what it returns."""
        start = perf_counter()
        self._started_at = time()
        if self.options.random_seed is not None:
            seed_generators(self.options.random_seed)
        with hidden_from_user():
            if self._may_replay:
                self._generators = torch_generators()
            outliving = self._add_sources(args, kwargs)
        try:
            result = self._run_logged(args, kwargs, start)
            with hidden_from_user():
                self._returns_data = holds_data(result)
                outliving += self._finish_collectives()
                for path, tensor in named_tensors(result):
                    self._outputs.append((path, self._recorder.add_output(tensor)))
                    outliving.append(tensor)
            self._recorder.failures.settle(None)
            if self.options.keeps_output or not self._outputs:
                self._output = result
            return result
        except BaseException as error:
            self._recorder.failures.settle(error)
            outliving += self._finish_collectives()
            # The traceback refers to this session, and the session to what was computed.
            self._afterwards = Afterwards()
            raise
        finally:
            try:
                self._settle(outliving)
            except BaseException:  # interrupted by Ctrl-C; `_settle` may be called again
                self._settle(outliving)
                raise
            self._seconds_total = perf_counter() - start

    def _run_logged(self, args: list[Any], kwargs: dict[str, Any], started: float) -> Any:
        """Runs the model while torch is patched.

        The clean-up may be repeated, and is called twice: Ctrl-C can interrupt only one of the two.
        """
        compiled = self._parts.compiled  # compiled modules run eagerly during a log
        # Not bound to self, to avoid a reference cycle.
        self._tracker.on_compile = partial(begin_eager, self._recorder)
        try:
            if is_compiler_there():
                begin_eager(self._recorder)
            apply_patches(self)
            for module, _ in compiled:
                module._compiled_call_impl = None
            CURRENT.tracker = self._tracker
            push_below(self._recorder)
            start = perf_counter()
            self._seconds_setup = start - started
            try:
                if self._observer is None:
                    return self.call_model(args, kwargs)
                with self._observer.around(self._recorder.place):
                    return self.call_model(args, kwargs)
            finally:
                self._seconds_forward = perf_counter() - start
        finally:
            try:
                self._leave(compiled)
            finally:
                self._leave(compiled)

    def _finish_collectives(self) -> list[torch.Tensor]:
        return finish_collectives(self._recorder) if self._recorder.unfinished else []

    def _settle(self, outliving: list[torch.Tensor]) -> None:
        with hidden_from_user():
            self._settle_values(outliving)

    def _settle_values(self, outliving: list[torch.Tensor]) -> None:
        outliving += [pair.whole for pair in self._sharded_pairs() if pair.whole is not None]
        if self._recorder.differentiated:
            outliving += gradients_left(self._recorder)
        if self._tracker.is_shared:
            order_module_calls(self._tracker)
        self._recorder.finish(
            [*outliving, *(tensor for _, _, tensor in self._unseen.met)], self._wanted
        )
        self._outside_storages = self._memory.note_outside(self._recorder.outside)
        if self._may_replay:
            self._outside_states = {
                number: (version_of(tensor), storage_of(tensor))
                for number, tensor in self._recorder.outside.items()
            }
        warning = came_back(self._recorder)
        if warning is not None and warning not in self._recorder.warnings:
            self._recorder.warnings.append(warning)

    def call_model(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the model and computes lazy results; subclasses override it to run a model
        differently.
        """
        return finished(self.model(*args, **kwargs))

    def _leave(self, compiled: list[tuple[Any, Any]]) -> None:
        if self._tracker.is_shared:
            end_branches(self._tracker)
        CURRENT.tracker = None
        remove_mode(self._recorder)
        for module, implementation in compiled:
            module._compiled_call_impl = implementation
        undo_patches(self)
        end_eager(self._recorder)

    def _add_sources(self, args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Registers parameters, and adds inputs and buffers as entries; returns all of these
        tensors.
        """
        recorder, parts = self._recorder, self._parts
        pairs = self._sharded_pairs()
        in_pieces = {id(pair.whole): pair.parameter for pair in pairs}
        parts.params[:] = [in_pieces.get(id(parameter), parameter) for parameter in parts.params]
        for parameter in parts.params:
            recorder.add_parameter(parameter)
        if pairs:
            know_whole(recorder, pairs)
        sources: list[torch.Tensor] = list(parts.params)
        inputs = named_inputs(self.model, args, kwargs)
        for path, tensor in inputs:
            entry = recorder.number_of(tensor)
            if entry is None:
                entry = recorder.add_source(INPUT, tensor)
                sources.append(tensor)
            if entry >= 0:
                self._inputs.append((path, entry))
        for address, buffer in parts.buffers:
            if recorder.number_of(buffer) is None:
                self._buffers.append((address, recorder.add_source(BUFFER, buffer)))
                sources.append(buffer)
        self._origin = self._origin_of(inputs, [args, kwargs])
        return sources

    def _origin_of(self, inputs: list[tuple[Path, torch.Tensor]], data: Any) -> LiveOrigin:
        parts, number_of = self._parts, self._recorder.number_of
        buffers = {id(buffer): (name, buffer) for name, buffer in reversed(parts.buffers)}
        names = [*parts.param_addresses, *(name for name, _ in buffers.values())]
        weights = [*parts.params, *(buffer for _, buffer in buffers.values())]
        given = [
            InputTensor(
                path_text("input", path),
                weakref.ref(tensor),
                version_of(tensor),
                cast(int, number_of(tensor)),
            )
            for path, tensor in inputs
        ]
        return LiveOrigin(
            names,
            weights,
            list(map(version_of, weights)),
            given,
            [(path_text("input", path), value) for path, value in named_data(data)],
        )

    def _sharded_pairs(self) -> list[ShardedPair]:
        return list(parameter_pairs(self._parts.modules)) if is_distributed() else []

    @property
    def failure(self) -> Failure | None:
        """Where the model raised, if it did."""
        return self._recorder.failures.failure

    @property
    def recording(self) -> Recording:
        """The recording of the pass."""
        recorder, memory, tracker, parts = self._recorder, self._memory, self._tracker, self._parts
        return Recording(
            model_name=parts.classes[""],
            rows=recorder.rows,
            values=memory.values,
            versions=memory.versions,
            storages=memory.storages,
            regions=memory.regions,
            writes=memory.writes,
            inputs=self._inputs,
            outputs=self._outputs,
            buffers=[*self._buffers, *((address, entry) for address, entry, _ in self._unseen.met)],
            params=parts.params,
            param_addresses=parts.param_addresses,
            module_params=parts.module_params,
            outside_storages=self._outside_storages,
            module_calls=recorder.module_calls,
            module_classes=parts.classes,
            module_aliases=parts.aliases,
            module_entries=tracker.entries,
            module_exits=tracker.exits,
            module_parts=tracker.parts,
            booleans=recorder.booleans,
            leaves=recorder.leaves,
            saved_args=recorder.saved_args,
            gradients={} if recorder.gradients is None else recorder.gradients.gradients,
            seconds_forward=self._seconds_forward,
            seconds_total=self._seconds_total,
            seconds_setup=self._seconds_setup,
            started_at=self._started_at,
            random_seed=self.options.random_seed,
            failure=recorder.failures.failure,
            warnings=recorder.warnings,
            copies=memory.copies,
            slices=recorder.slices,
            hidden_writes=recorder.hidden_writes,
            reads=recorder.reads,
            returns_data=self._returns_data,
            param_stand_ins=recorder.param_stand_ins,
            branches=row_branches(tracker) if tracker.is_shared else [],
            trained=recorder.trained,
            other_params=recorder.other_params(parts.packed),
            joint_params=recorder.joint_params,
            origin=self._origin,
            constants={
                number: tensor
                for number, tensor in recorder.outside.items()
                if number < -len(parts.params) and number in self._outside_states
            },
            outside_states=self._outside_states,
            generators=self._generators,
            output=self._output,
            received=recorder.received,
            sent=recorder.sent,
            edited=recorder.edited,
        )


class Runnable(Protocol):
    """Runs a model of any framework once and holds the recording."""

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> Any: ...

    @property
    def recording(self) -> Recording: ...


def session_of(model: Any, options: CaptureOptions) -> Runnable:
    """The session that records this model."""
    if isinstance(model, OtherModel):
        session: Runnable = model.session(options)
        return session
    return Session(model, options)


# -- lazy results

_LAZY = (map, filter, zip)


def finished(result: Any) -> Any:
    """Computes a lazy result of a model: a generator becomes the list of its items.

    A model that streams its output computes nothing before the output is read.
    """
    if inspect.isgenerator(result) or isinstance(result, _LAZY):
        return list(result)
    if inspect.isasyncgen(result):
        return _awaited(_list_of(result))
    if inspect.iscoroutine(result):
        return finished(_awaited(result))
    return result


async def _list_of(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a new event loop; inside a running loop (a notebook), without one."""
    if asyncio._get_running_loop() is None:
        loop = asyncio.new_event_loop()  # `asyncio.run` would reset the thread's loop
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    try:
        while coroutine.send(None) is None:
            pass
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(
        "The model awaits something in the event loop that is running here, which the log blocks. "
        "Log it from a thread: `await asyncio.to_thread(torchlens.log_forward_pass, model, x)`."
    )


# -- random numbers


def seed_generators(seed: int) -> None:
    """Seeds python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states() -> tuple[Any, ...]:
    """The state of each generator that `restore_generators` restores."""
    cpu, *devices = torch_generators()
    return random.getstate(), np.random.get_state(), cpu, devices


def torch_generators() -> tuple[torch.Tensor, ...]:
    """The states of torch's generators: the CPU's, then one for each GPU."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), *devices


def restore_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3]:
        torch.cuda.set_rng_state_all(states[3])
