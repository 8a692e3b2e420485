"""Sees every call of a model's modules, and what follows it until the next: the measuring itself.

The model gets no hook and no attribute. Modules are seen where all of them are called, backward passes by hooks on the
nodes of autograd's graph, memory by the allocators; all of it in the thread that began to measure. On CUDA each module
and each backward node is waited for, so that its time is its own.

Whatever goes wrong here ends the measuring, never the training: see `_give_up`.
"""

from collections.abc import Callable
from time import perf_counter, time_ns
from typing import Any

import torch

from torchlens.capture.backward import BackwardWatch, NodeInfo, next_sequence, node_of
from torchlens.capture.patching import CURRENT, apply_patches, undo_patches
from torchlens.capture.patching import Watcher as AnyWatcher
from torchlens.capture.trees import named_tensors, plain_tensors
from torchlens.errors import NonFiniteError
from torchlens.profiling.measuring.allocators import AllocatorWatch
from torchlens.profiling.measuring.calls import Call, Step, note_tensors
from torchlens.profiling.measuring.checks import Checks
from torchlens.profiling.measuring.kept_tensors import CAN_TELL, saved_storages
from torchlens.profiling.measuring.ledger import Ledger
from torchlens.profiling.measuring.logged_steps import NO_RESULT, LoggedSteps
from torchlens.profiling.measuring.model_modules import NamedModule
from torchlens.profiling.measuring.windows import Window, settle
from torchlens.profiling.options import ProfileOptions
from torchlens.profiling.problems import Problems
from torchlens.profiling.records import Checker

__all__ = ["Watcher"]

Tensor = torch.Tensor
# torch overflows its stack when it frees a chain of tens of thousands of nodes that were looked at from Python.
_MOST_CALLS = 5_000
Run = Callable[..., Any]
_MOST_WAITING = 100_000  # events of the allocators


class Watcher:
    """Measures the calls of one model from `start` to `stop`."""

    def __init__(
        self, model: torch.nn.Module, options: ProfileOptions, checker: Checker | None, problems: Problems
    ) -> None:
        self.ledger = Ledger(model, options, problems)
        self.checks = Checks(self.ledger, checker)
        self.logged = LoggedSteps(self.ledger, None if checker is None else self.checks)
        self.backward = BackwardWatch()
        self.outer: AnyWatcher | None = None
        self._options = options
        self._problems = problems
        self._modules = self.ledger.modules
        self._memory = AllocatorWatch(time_ns)
        self._window: Window | None = None
        self._waiting: list[Window] = []
        self._is_on = False
        self._is_asynchronous = False

    # -- beginning and end -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to measure what this thread does."""
        self._guard(self._start)

    def _start(self) -> None:
        self._modules.refresh()
        apply_patches(self)
        self.outer, CURRENT.watcher = CURRENT.watcher, self
        self._modules.show_compiled()
        self._is_asynchronous = self._modules.uses_cuda()
        looks = self._is_asynchronous or self.checks.is_on
        self.backward = BackwardWatch(
            self._before_node if looks else None, self._after_node if looks else None, (NonFiniteError,)
        )
        self._is_on = True

    def stop(self) -> None:
        """Ends measuring and takes everything away. May be called again, and after an interrupted call."""
        self._is_on = False
        try:
            self._guard(self._end_window)
            self._guard(self._settle_all)
        finally:
            self._memory.stop()
            self.backward.stop()
            self._modules.hide_compiled()
            _unlink(self)
            undo_patches(self)
        for failure in self.backward.failures:
            self._problems.add(f"A look at a backward pass failed ({failure}): its numbers are incomplete")
        self.backward.failures.clear()

    def let_go(self) -> None:
        """Forgets the model, once its records are made."""
        self._modules.forget()

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, original: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module and measures it, if it is one of the model's."""
        named = self._modules.modules.get(id(module))
        if named is None or not self._is_on:
            return self._run(original, module, args, kwargs)
        if self.logged.expected is module:
            return self._run_expected(original, module, args, kwargs)
        enter = perf_counter()
        parent = self.ledger.current
        try:
            call = self._enter(named, args, kwargs)
        except Exception as error:
            self._give_up(error)
            return self._run(original, module, args, kwargs)
        if call is None:
            return self._run(original, module, args, kwargs)
        self.ledger.current = call
        try:
            if parent is None and self.logged.wants(call, module):
                result = self.logged.run(call, module, args, kwargs)
                if result is NO_RESULT:
                    result = self._run_entered(call, original, module, args, kwargs)
            else:
                self._stamp_start(call, enter, parent)
                result = self._run(original, module, args, kwargs)
                self._stamp_end(call)
        except BaseException as error:
            if not call.end:
                self._stamp_end(call)
            call.raised = type(error).__name__
            self._guard(self._leave, call, parent, None, args, kwargs)
            raise
        finally:
            self.ledger.current = parent
        self._guard(self._leave, call, parent, result, args, kwargs)
        return result

    def _run_entered(self, call: Call, original: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module that has been entered."""
        self._stamp_start(call, perf_counter(), None)
        result = self._run(original, module, args, kwargs)
        self._stamp_end(call)
        return result

    def _run_expected(self, original: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call that a capture session makes, of the module that was entered already."""
        self.logged.expected = None
        call = self.ledger.current
        assert call is not None
        try:
            return self.logged.keep_result(self._run_entered(call, original, module, args, kwargs))
        except BaseException:
            self._stamp_end(call)
            raise

    def _run(self, original: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.outer is not None:
            return self.outer.call(original, module, args, kwargs)
        return original(module, *args, **kwargs)

    def _stamp_start(self, call: Call, enter: float, parent: Call | None) -> None:
        call.sequence = next_sequence()
        self.ledger.owners.enter(call.sequence, call)
        if self._is_asynchronous:
            torch.cuda.synchronize()
        call.start_ns = time_ns()
        call.start = perf_counter()
        if parent is not None:
            parent.overhead += call.start - enter

    def _stamp_end(self, call: Call) -> None:
        if self._is_asynchronous:
            torch.cuda.synchronize()
        call.end = perf_counter()
        call.end_ns = time_ns()

    def _enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        address, module_type, _ = named
        parent = self.ledger.current
        is_recomputed = torch._C._current_graph_task_id() != -1
        original = (
            self.ledger.repeated_call(address)
            if is_recomputed and (parent is None or parent.original is not None)
            else None
        )
        if original is not None:
            step, parent = original.step, parent or original.parent
        elif parent is None:
            begun = self._begin_step(address)
            if begun is None:
                return None
            step = begun
        else:
            step = parent.step
        call = Call(len(self.ledger.calls), step, address, module_type, parent, original)
        if original is None:
            call.pass_num = step.passes[address] = step.passes.get(address, 0) + 1
        with torch._C.DisableTorchFunction():
            is_one = len(args) == 1 and not kwargs and type(args[0]) is Tensor
            inputs = args if is_one else [tensor for _, tensor in plain_tensors((args, kwargs))]
            note_tensors(call.inputs, inputs, not self._is_deep(step))
        self.checks.entered(call)
        self.ledger.calls.append(call)
        step.calls.append(call)
        return call

    def _leave(self, call: Call, parent: Call | None, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.sequence_end = next_sequence()
        self.ledger.owners.enter(call.sequence_end, parent)
        with torch._C.DisableTorchFunction():
            outputs = [result] if type(result) is Tensor else [tensor for _, tensor in named_tensors(result)]
            is_deep = self._is_deep(call.step)
            note_tensors(call.outputs, outputs, not is_deep)
            nodes = [] if is_deep else self._watch(outputs)
            if call.original is None:
                self._note_saved(call, nodes)
            self.checks.outputs(call, outputs, (args, kwargs))
        if parent is not None:
            parent.inside += call.seconds
            parent.overhead += call.overhead + perf_counter() - call.end

    def _is_deep(self, step: Step) -> bool:
        """Whether a step has called so many modules that the backward nodes of further ones are better left alone."""
        if len(step.calls) <= _MOST_CALLS:
            return False
        self._problems.add(
            f"Step {step.number} calls more than {_MOST_CALLS:,} modules: of the others, forward was measured"
        )
        return True

    def _watch(self, outputs: list[Tensor]) -> list[Any]:
        """The nodes of autograd's graph that have come up since the last time; their runs will be seen."""
        found = []
        pending = [node for node in map(node_of, outputs) if node is not None]
        while pending:
            node = pending.pop()
            if self.backward.watch_node(node) is not None:
                found.append(node)
                pending.extend([below for below, _ in node.next_functions if below is not None])
        return found

    def _note_saved(self, call: Call, nodes: list[Any]) -> None:
        if not CAN_TELL:
            self._problems.add("Activations kept for backward were not measured: this version of torch does not tell")
            return
        for node in nodes:
            maker = self.ledger.owners.of(node._sequence_nr()) or call
            for storage, num_bytes in saved_storages(node):
                if storage not in self._modules.storages:
                    if maker.saved is None:
                        maker.saved = {}
                    maker.saved[storage] = num_bytes

    def _before_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        self.checks.before_node(info, gradients)
        if self._is_asynchronous:
            torch.cuda.synchronize()

    def _after_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        if self._is_asynchronous:  # it has begun its work, and the run ends when that is done
            torch.cuda.synchronize()
            self.backward.runs[-1] = self.backward.runs[-1]._replace(end=perf_counter(), end_ns=time_ns())
        self.checks.after_node(info, gradients)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _begin_step(self, address: str) -> Step | None:
        """The step that a call from outside belongs to; None if there are enough.

        The model begins a new one. A part that is called by itself does so if it was called before, or if there has been a
        backward pass since.
        """
        window = self._window
        if window is not None and address and not self.backward.runs:
            passes = window.step.passes
            if "" in passes or address not in passes:
                return window.step
        self._end_window()
        if len(self.ledger.steps) >= self._options.max_steps:
            self._problems.add(f"Only the first {self._options.max_steps} steps were measured (max_steps=)")
            return None
        self._modules.refresh()
        step = Step(len(self.ledger.steps) + 1)
        self.ledger.steps.append(step)
        self._window = Window(step, len(self.ledger.calls))
        if self._options.memory:
            try:
                self._window.has_memory = self._memory.start()
            except Exception as error:  # everything else can be measured all the same
                self._memory.stop()
                self._problems.add_failure(error, "Memory was not measured")
                return step
            if not self._window.has_memory:
                self._problems.add(
                    "Memory was not measured in some steps: another profiler (torch.profiler) was running, "
                    "and there is room for one"
                )
        return step

    def _end_window(self) -> None:
        """A step is over: what it left is put in its place."""
        window, self._window = self._window, None
        if window is None:
            return
        window.events = self._memory.stop()
        window.runs, self.backward.runs = self.backward.runs, []
        window.ignored = self.ledger.overheads.take_spans()
        window.last_call = len(self.ledger.calls)
        self.logged.close(window.step)
        self.checks.let_go()
        # Putting things in their place can wait until the user's code is done, unless there is too much of it.
        self._waiting.append(window)
        if sum(each.events.num_events for each in self._waiting) > _MOST_WAITING:
            self._settle_all()

    def _settle_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for window in waiting:
            settle(self.ledger, window, self._memory.timeline(window.events, window.ignored))

    # -- failures --------------------------------------------------------------------------------------------------

    def _guard(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except NonFiniteError:
            raise
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The one place where the profile's own failures end: the training goes on, and the report tells."""
        self._is_on = False
        self._problems.add_failure(error, "Measuring ended")


def _unlink(watcher: Watcher) -> None:
    """Takes a watcher out of the chain of those of this thread."""
    link: Any = CURRENT.watcher
    if link is watcher:
        CURRENT.watcher = watcher.outer
        return
    while link is not None and getattr(link, "outer", None) is not watcher:
        link = getattr(link, "outer", None)
    if link is not None:
        link.outer = watcher.outer
