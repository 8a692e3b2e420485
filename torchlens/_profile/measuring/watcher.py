"""Sees every call of a model's modules, and what follows it until the next: the measuring itself.

The model gets no hook and no attribute. Modules are seen where all of them are called, backward
passes by hooks on the nodes of autograd's graph, memory by the allocators; all of it in the thread
that began to measure. On CUDA each module and each backward node is waited for, so that its time is
its own.

Whatever goes wrong here ends the measuring, never the training: see `_give_up`.
"""

from collections.abc import Callable
from time import perf_counter, time_ns
from typing import Any

import torch

from torchlens._capture.current import add_watcher, remove_watcher
from torchlens._capture.gradients.backward_hooks import (
    BackwardWatch,
    NodeInfo,
    next_sequence,
    node_of,
)
from torchlens._capture.patches.patching import apply_patches, undo_patches
from torchlens._health.checking import Checker
from torchlens._profile.measuring.calls import Call, Signature, Step, note_tensors
from torchlens._profile.measuring.checks import Checks
from torchlens._profile.measuring.kept_tensors import CAN_TELL, saved_storages
from torchlens._profile.measuring.ledger import Ledger
from torchlens._profile.measuring.logged_steps import NO_RESULT, LoggedSteps
from torchlens._profile.measuring.model_modules import NamedModule
from torchlens._profile.measuring.windows import Windows
from torchlens._profile.options import ProfileOptions
from torchlens._recording.collector import pause_collector, resume_collector
from torchlens._recording.regions import shape_of
from torchlens._recording.trees import named_tensors, plain_tensors
from torchlens._text.problems import Problems
from torchlens.errors import NonFiniteError

Tensor = torch.Tensor
# torch overflows its stack when it frees a chain of tens of thousands of nodes that were looked at
# from Python.
_MOST_CALLS = 5_000


class Watcher:
    """Measures the calls of one model from `start` to `stop`; a `Watcher` as _capture/current.py
    describes it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: ProfileOptions,
        checker: Checker | None,
        problems: Problems,
    ) -> None:
        self.ledger = Ledger(model, options, problems)
        self.checks = Checks(self.ledger, checker)
        self.logged = LoggedSteps(self.ledger, None if checker is None else self.checks)
        self.windows = Windows(self.ledger)
        self._problems = problems
        self._modules = self.ledger.modules
        self._own_time = self.ledger.own_time
        self._step: Step | None = None  # of the call from outside that is running
        self._is_inside = False  # whether one is
        self._is_on = False
        self._is_asynchronous = False
        self._position = 0  # of the last step of the loop

    def why_nothing(self) -> str:
        """Why there are no steps."""
        if not self._position:
            return "The model was not called while it was measured"
        calls = f"{self._position} call{'s' * (self._position != 1)}"
        skip = self.ledger.options.skip
        return (
            f"No step was measured: the loop made {calls} of the model, and skip={skip} leaves "
            "them out"
        )

    # -- beginning and end
    # -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to measure what this thread does."""
        self._guard(self._start)

    def _start(self) -> None:
        self._modules.refresh()
        apply_patches(self)
        add_watcher(self)
        self.windows.outside.start()
        self.ledger.start_ns = time_ns()
        self._modules.show_compiled()
        self._is_asynchronous = self._modules.uses_cuda()
        looks = self._is_asynchronous or self.checks.is_on
        self.windows.backward = BackwardWatch(
            self._before_node if looks else None,
            self._after_node if looks else None,
            (NonFiniteError,),
            own_time=self._own_time,
        )
        self._is_on = True

    def stop(self) -> None:
        """Ends measuring and takes everything away. May be called again, and after an interrupted
        call.
        """
        self._is_on = False
        try:
            self._guard(self._end_step)
            self._guard(self.windows.settle_all)
        finally:
            self.windows.stop()
            self._modules.hide_compiled()
            remove_watcher(self)
            undo_patches(self)

    def let_go(self) -> None:
        """Forgets the model, once its records are made."""
        self._modules.forget()

    # -- calls from outside
    # ----------------------------------------------------------------------------------------

    def begins_with(self, module: Any) -> bool:
        """Whether the module is one of the model's, and called from outside."""
        return not self._is_inside and self._is_on and id(module) in self._modules.modules

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module that is called from outside: in a capture session, if that is wanted."""
        address = self._modules.modules[id(module)].address
        self._is_inside = True
        try:
            is_wanted = self._begin_call(address, module, args, kwargs)
            result = self.logged.run(module, args, kwargs) if is_wanted else NO_RESULT
            if result is not NO_RESULT:
                return result
            # In which module it would run is chance, and it would run more often than without what
            # we write down.
            pause_collector(self)
            # Not `module(...)`: a class may have a `__call__` of its own, which has been through
            # this.
            return module._wrapped_call_impl(*args, **kwargs)
        finally:
            self._is_inside, self._step, self.ledger.current = False, None, None
            try:
                resume_collector(self)
            finally:  # once more, for an interrupt may cut the first short
                resume_collector(self)

    def _begin_call(
        self, address: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Finds the step that the call belongs to. Returns whether it is to run in a capture
        session.
        """
        try:
            if _is_in_backward() and (address or self._position):
                # run again for the backward pass of a step, be it one that is measured or one that
                # is not
                return False
            with torch._C.DisableTorchFunction():
                shapes = tuple(tuple(shape_of(tensor)) for tensor in _tensors_in(args, kwargs))
            self._step = self._begin_step(
                address, (self.ledger.model.training, torch.is_grad_enabled(), shapes)
            )
            return self._step is not None and self.logged.wants(self._step, module, shapes)
        except Exception as error:
            self._give_up(error)
            return False

    def _begin_step(self, address: str, signature: Signature) -> Step | None:
        """The step that a call from outside belongs to; None if there are enough.

        The model begins a new one. A part that is called by itself does so if it was called before,
        if there has been a backward pass since, or if the step is one of evaluation and this is
        training, or the other way round.
        """
        step = self.windows.step
        is_by_itself = step is not None and address and not self.windows.has_backward
        is_same_phase = step is not None and step.signature[:2] == signature[:2]
        if (
            step is not None
            and is_by_itself
            and is_same_phase
            and ("" in step.passes or address not in step.passes)
        ):
            return step
        self._end_step()
        options = self.ledger.options
        self._position += 1
        role = options.role_of(self._position)
        if role == "skip":
            return None
        if len(self.ledger.steps) >= options.max_steps:
            self._problems.add(
                f"Only the first {options.max_steps} steps were measured (max_steps=)"
            )
            return None
        self._modules.refresh()
        self._modules.show_compiled()  # what was compiled since
        step = self.windows.begin(signature, role == "warmup")
        step.position = self._position
        self.checks.begin(step)
        return step

    def _end_step(self) -> None:
        if self.windows.end() is not None:
            self.checks.let_go()

    # -- all calls
    # ----------------------------------------------------------------------------------------------

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], time: float
    ) -> Call | None:
        """A module is going to run; `time` is when we began to take notice."""
        call = None
        if self._is_on and self._is_inside:
            named = self._modules.modules.get(id(module))
            if named is not None:
                try:
                    call = self._enter(named, args, kwargs)
                except NonFiniteError:  # of what goes in
                    raise
                except Exception as error:
                    self._give_up(error)
        own = self._own_time
        own.num_modules += 1
        if call is None:
            own.seconds += perf_counter() - time
            return None
        self.ledger.current = call
        call.sequence = next_sequence()
        self.ledger.owners.enter(call.sequence, call)
        if self._is_asynchronous:
            torch.cuda.synchronize()
        call.start_ns = time_ns()
        call.start = perf_counter()
        own.seconds += call.start - time
        call.clock.begin(own)
        return call

    def end(self, watched: Call) -> None:
        """A module has run, or raised."""
        if self._is_asynchronous:
            torch.cuda.synchronize()
        watched.end = perf_counter()
        watched.end_ns = time_ns()
        watched.clock.end(self._own_time)
        self.ledger.current = watched.parent

    def leave(
        self, watched: Call, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module returned."""
        if watched.parent is None:
            self.logged.keep_result(result)
            self._guard(self._modules.note_whole_parameters)
        self._guard(self._leave, watched, result, args, kwargs)
        # All from the end of the call on is ours, also what the log did meanwhile.
        self._own_time.seconds = watched.clock.seconds_at_end + perf_counter() - watched.end

    def fail(
        self, watched: Call, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module raised."""
        watched.raised = type(error).__name__
        self._guard(self._leave, watched, None, args, kwargs)

    def _enter(
        self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        address, module_type, _ = named
        parent = self.ledger.current
        original = None
        if (
            _is_in_backward()
            and self.windows.step is not None
            and (parent is None or parent.original is not None)
        ):
            original = self.ledger.repeated_call(address)
        if original is not None:
            step, parent = original.step, parent or original.parent
        elif parent is not None:
            step = parent.step
        elif self._step is not None:
            step = self._step
        else:
            return None
        call = Call(len(self.ledger.calls), step, address, module_type, parent, original)
        if original is None:
            call.pass_num = step.passes[address] = step.passes.get(address, 0) + 1
        with torch._C.DisableTorchFunction():
            note_tensors(call.inputs, _tensors_in(args, kwargs), not self._is_deep(step))
            self.checks.entered(call, args, kwargs)
        self.ledger.calls.append(call)
        step.calls.append(call)
        return call

    def _leave(
        self, call: Call, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        call.sequence_end = next_sequence()
        self.ledger.owners.enter(call.sequence_end, call.parent)
        with torch._C.DisableTorchFunction():
            outputs = (
                [result]
                if type(result) is Tensor
                else [tensor for _, tensor in named_tensors(result)]
            )
            is_deep = self._is_deep(call.step)
            note_tensors(call.outputs, outputs, not is_deep)
            nodes = [] if is_deep else self._watch(outputs)
            if call.original is None:
                self._note_saved(call, nodes)
            self.checks.outputs(call, outputs, (args, kwargs))

    def _is_deep(self, step: Step) -> bool:
        """Whether a step has called so many modules that the backward nodes of further ones are
        better left alone.
        """
        if len(step.calls) <= _MOST_CALLS:
            return False
        step.is_deep = True
        self._problems.add(
            f"Step {step.number} calls more than {_MOST_CALLS:,} modules: of the others, forward "
            "was measured"
        )
        return True

    def _watch(self, outputs: list[Tensor]) -> list[Any]:
        """The nodes of autograd's graph that have come up since the last time; their runs will be
        seen.
        """
        found = []
        pending = [node for node in map(node_of, outputs) if node is not None]
        while pending:
            node = pending.pop()
            if self.windows.backward.watch_node(node) is not None:
                found.append(node)
                pending.extend([below for below, _ in node.next_functions if below is not None])
        return found

    def _note_saved(self, call: Call, nodes: list[Any]) -> None:
        if not CAN_TELL:
            self._problems.add(
                "Activations kept for backward were not measured: this version of torch does not "
                "report them"
            )
            return
        outermost = call
        while outermost.parent is not None:
            outermost = outermost.parent
        for node in nodes:
            maker = self.ledger.owners.of(node._sequence_nr())
            if maker is None and node._sequence_nr() < outermost.sequence:
                # it was made before the model was called: what led to its inputs is not the model's
                continue
            self.ledger.note_saved(maker or call, saved_storages(node))

    # -- backward
    # ----------------------------------------------------------------------------------------------

    def _before_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        self.checks.before_node(info, gradients)
        if self._is_asynchronous:
            torch.cuda.synchronize()

    def _after_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        if self._is_asynchronous:  # it has begun its work, and the run ends when that is done
            torch.cuda.synchronize()
            runs = self.windows.backward.runs
            runs[-1] = runs[-1]._replace(end=perf_counter(), end_ns=time_ns())
        self.checks.after_node(info, gradients)

    # -- failures
    # ----------------------------------------------------------------------------------------------

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except NonFiniteError:
            raise
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The one place where the profile's own failures end: the training goes on, and the report
        tells.
        """
        self._is_on = False
        self._problems.add_failure(error, "Measuring ended")


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        return [args[0]]
    return [tensor for _, tensor in plain_tensors((args, kwargs))]
