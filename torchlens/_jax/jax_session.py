"""One logged call of a JAX callable (`JaxSession`), and the adapter for the public functions."""

import sys
from contextlib import ExitStack
from time import perf_counter, time
from typing import Any

import jax
import numpy as np
import torch

from torchlens._capture.memory.process_memory import freed_memory
from torchlens._capture.options import CaptureOptions
from torchlens._capture.session import seed_generators
from torchlens._jax.arrays import is_array, to_torch, with_jax_arrays
from torchlens._jax.call_parts import parts_of_call
from torchlens._jax.callables import called, is_jitted, name_of
from torchlens._jax.internals import check_internals
from torchlens._jax.module_calls import JaxModuleTracker, fill_in, settled_calls, unused_calls
from torchlens._jax.patches import apply_patches, undo_patches
from torchlens._jax.primitive_recorder import CURRENT, PrimitiveRecorder
from torchlens._jax.pytrees import array_leaves
from torchlens._recording.frameworks import OtherModel
from torchlens._recording.operations import BUFFER, INPUT
from torchlens._recording.origin import InputTensor, LiveOrigin, version_of
from torchlens._recording.recording import Failure, Recording
from torchlens._recording.trees import Path, named_data, path_text
from torchlens.errors import NestedLogError, TorchLensError


class JaxSession:
    """Runs a JAX callable once, with jit off, and holds the recording, even if it raised.

    The counterpart of `capture.session.Session`, with the same `run` and `recording`.
    """

    def __init__(self, model: Any, name: str, options: CaptureOptions) -> None:
        check_internals()
        if CURRENT.recorder is not None:
            raise NestedLogError(
                "This thread is already logging a function, and logs cannot be nested. Log the "
                "inner function on its own, before or after; its operations are part of the outer "
                "log anyway."
            )
        freed_memory().note_use()
        self.model = model
        self.options = options
        self.recorder = PrimitiveRecorder(options.saves, options.keeps_args, options.transform)
        self._name = name
        self._inputs: list[tuple[Path, int]] = []
        self.outputs: list[tuple[Path, int]] = []
        self._buffers: list[tuple[str, int]] = []
        self.params: list[torch.nn.Parameter] = []
        self._versions: list[int] = []
        self._origin = LiveOrigin()
        self._output: Any = None
        self._returns_data = False
        self._seconds_forward = self._seconds_total = self._seconds_setup = self._started_at = 0.0

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the function and returns what it returns."""
        start = perf_counter()
        self._started_at = time()
        if self.options.random_seed is not None:
            seed_generators(self.options.random_seed)
        recorder = self.recorder
        if is_jitted(self.model):  # jit would convert NumPy arrays; with jit off, it does not
            args, kwargs = with_jax_arrays(args), with_jax_arrays(kwargs)
        self.prepare(args, kwargs)
        try:
            result = self._run_logged(args, kwargs, start)
            self._add_outputs(result)
            if self.options.keeps_output:
                self._output = result
            self._settle_traced_calls()
            if not recorder.num_seen:
                raise TorchLensError(
                    f"{self._name} ran no JAX operation, so there is nothing to log. Give it JAX "
                    "arrays, or pass its NumPy arrays to jax.numpy: operations of NumPy itself are "
                    "not logged."
                )
            return result
        finally:
            self._versions = recorder.finish()
            self.params = [
                torch.nn.Parameter(to_torch(array), requires_grad=False)
                for array in self.parts.params
            ]
            self._seconds_total = perf_counter() - start
            self._origin = self._origin_of([args, kwargs])

    def _origin_of(self, data: Any) -> LiveOrigin:
        given = [
            InputTensor(path_text("input", path), lambda: None, -1, entry)
            for path, entry in self._inputs
        ]
        text = [
            (path_text("input", path), value)
            for path, value in named_data(data)
            if not is_array(value)
        ]
        versions = list(map(version_of, self.params))
        return LiveOrigin(self.parts.param_addresses, self.params, versions, given, text, "jax")

    def prepare(
        self,
        args: list[Any],
        kwargs: dict[str, Any],
        modules: type[JaxModuleTracker] = JaxModuleTracker,
    ) -> None:
        """Registers inputs, weights, buffers and modules."""
        self.parts = parts_of_call(self.model, self._name, args, kwargs)
        self.tracker = modules(self.parts, self.recorder)
        self._add_sources()

    def watch_modules(self, around: ExitStack) -> None:
        """Reports the calls of modules to the tracker until `around` is left."""
        around.callback(self._leave)
        self._intercept_linen(around)
        apply_patches(self, self.parts.modules)
        CURRENT.tracker = self.tracker

    def _run_logged(self, args: list[Any], kwargs: dict[str, Any], started: float) -> Any:
        """Runs the model with JAX patched. Undoes the patches twice: Ctrl-C may interrupt one."""
        _torchlens_log_began = True  # the frames above are not the model's (see `user_lines.py`)
        recorder = self.recorder
        try:
            with ExitStack() as around:
                around.enter_context(jax.disable_jit())
                self.watch_modules(around)
                CURRENT.recorder = recorder
                start = perf_counter()
                self._seconds_setup = start - started
                try:
                    return jax.block_until_ready(self.model(*args, **kwargs))
                except BaseException as error:
                    recorder.fail_outside(error, _end_of(error, recorder))
                    raise
                finally:
                    self._seconds_forward = perf_counter() - start
        finally:
            try:
                self._leave()
            finally:
                self._leave()

    def _leave(self) -> None:
        CURRENT.recorder = CURRENT.tracker = None
        undo_patches(self)

    def _intercept_linen(self, around: ExitStack) -> None:
        """Reports the calls of linen modules, by flax's own interceptor."""
        linen = sys.modules.get("flax.linen")
        if linen is None:
            return
        tracker = self.tracker

        def intercept(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if context.method_name != "__call__" or CURRENT.tracker is not tracker:
                return run(*args, **kwargs)
            address = ".".join(context.module.path)
            return tracker.call_at(address, context.module, run, args, kwargs)

        around.enter_context(linen.intercept_methods(intercept))

    def _add_sources(self) -> None:
        recorder, parts = self.recorder, self.parts
        for number, array in enumerate(parts.params):
            recorder.know(array, -1 - number)
        for array, number in parts.aliases:
            recorder.know(array, -1 - number)
        for path, array in parts.inputs:
            entry = recorder.number_of(array)
            if entry is None:
                entry = recorder.add_source(INPUT, array)
            if entry >= 0:
                self._inputs.append((path, entry))
        for address, array in parts.buffers:
            if recorder.number_of(array) is None:
                self._buffers.append((address, recorder.add_source(BUFFER, array)))
        recorder.names = {id(array): name for name, array in parts.named}

    def _add_outputs(self, result: Any) -> None:
        for path, array, _ in array_leaves(result):
            self.outputs.append((path, self.recorder.add_output(array)))
        leaves = jax.tree_util.tree_leaves(result)
        self._returns_data = any(
            isinstance(leaf, bool | int | float | complex | str | np.generic) for leaf in leaves
        )

    def _settle_traced_calls(self) -> None:
        """Removes the module calls of the extra trace that flax makes of a loop body."""
        recorder, tracker = self.recorder, self.tracker
        if not tracker.traced:
            return
        gone = unused_calls(recorder.module_calls, recorder.rows, tracker.traced)
        recorder.module_calls, new = settled_calls(
            recorder.module_calls, recorder.rows, gone, in_order_of_rows=False
        )
        recorder.rows[:] = [row._replace(module_call=new[row.module_call]) for row in recorder.rows]
        for found in (tracker.entries, tracker.exits):
            found[:] = [(new[call], rows) for call, rows in found if call not in gone]
        fill_in(recorder.module_calls, recorder.rows, tracker.entries, tracker.exits)

    @property
    def failure(self) -> Failure | None:
        """The operation or line at which the function raised, if it did."""
        return self.recorder.failure

    @property
    def recording(self) -> Recording:
        """The recording of the run."""
        recorder, parts, tracker = self.recorder, self.parts, self.tracker
        return Recording(
            model_name=self._name,
            rows=recorder.rows,
            values=recorder.values,
            versions=self._versions,
            storages=list(range(len(recorder.rows))),
            regions={},
            writes=[],
            inputs=self._inputs,
            outputs=self.outputs,
            buffers=[*self._buffers, *recorder.constants],
            params=self.params,
            param_addresses=parts.param_addresses,
            module_params=parts.module_params,
            outside_storages={-1 - number: -1 for number in range(len(self.params))},
            module_calls=recorder.module_calls,
            module_classes=tracker.classes,
            module_entries=tracker.entries,
            module_exits=tracker.exits,
            booleans=recorder.booleans,
            leaves=set(),
            saved_args=recorder.saved_args,
            gradients={},
            seconds_forward=self._seconds_forward,
            seconds_total=self._seconds_total,
            seconds_setup=self._seconds_setup,
            started_at=self._started_at,
            random_seed=self.options.random_seed,
            failure=recorder.failure,
            reads=recorder.reads,
            returns_data=self._returns_data,
            framework="jax",
            origin=self._origin,
            output=self._output,
        )


def _end_of(error: BaseException, recorder: PrimitiveRecorder) -> tuple[Any, int]:
    """The innermost line of the user's code in the traceback."""
    found: tuple[Any, int] = (None, 0)
    place = error.__traceback__
    while place is not None:
        own = recorder.places.here(place.tb_frame)
        if own[0] is place.tb_frame.f_code:
            found = own[0], place.tb_lasti
        place = place.tb_next
    return found


class JaxModel(OtherModel):
    """A function (jitted or not), a module of Equinox or nnx, the `apply` of a linen module, or a
    dict or list of layers.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.forward = called(model)
        self.name = name_of(self.forward)

    def run_plainly(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the callable without a log, with jit off as in a log."""
        with jax.disable_jit():
            return jax.block_until_ready(self.forward(*args, **kwargs))

    def session(self, options: CaptureOptions) -> JaxSession:
        return JaxSession(self.forward, self.name, options)
