"""Measures a profile: watches every call of a model's modules, and each step to its end.

The model gets no hook and no attribute. Calls of modules are reported by the patched
`nn.Module._call_impl`, backward passes by hooks on the nodes of autograd's graph, memory by the
allocators, all in the thread that started the profile. On CUDA, the profile waits for each module
and each backward node to finish, so that each is charged with its own time.

A failure here ends the measuring, never the training: see `_give_up`.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from torchlens._capture.current import add_watcher, remove_watcher
from torchlens._capture.gradients.backward_hooks import (
    BackwardWatch,
    NodeInfo,
    next_sequence,
    node_of,
    sequence_of,
)
from torchlens._capture.patches.patching import apply_module_patches, undo_patches
from torchlens._health.checker import HealthChecker
from torchlens._profile.allocators import CAN_READ_SAVED, AllocatorWatch, saved_storages
from torchlens._profile.checks import Checks
from torchlens._profile.ledger import (
    Ledger,
    MeasuredCall,
    MeasuredStep,
    TensorFacts,
    bytes_of,
    charge_step,
    of_the_model,
)
from torchlens._profile.logged_steps import NO_RESULT, LoggedSteps
from torchlens._profile.outside import OutsideWatch
from torchlens._profile.profile_options import ProfileOptions, StepPlan
from torchlens._profile.records import Signature
from torchlens._recording.garbage_collector import pause_collector, resume_collector
from torchlens._recording.regions import shape_of
from torchlens._recording.trees import named_tensors, plain_tensors
from torchlens._recording.unseen import NoTorchFunction
from torchlens._text.problems import Problems
from torchlens.errors import NonFiniteError

Tensor = torch.Tensor
# torch overflows its stack when it frees a chain of very many nodes that Python has seen.
_MOST_CALLS = 5_000
_num_modes = torch._C._len_torch_function_stack


class ModelWatcher:
    """Measures the calls of one model from `start` to `stop`; a `Watcher` of
    _capture/current.py.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: ProfileOptions,
        checker: HealthChecker | None,
        problems: Problems,
    ) -> None:
        self.ledger = Ledger(model, options, problems)
        self.checks = None if checker is None else Checks(self.ledger, checker)
        self.logged = LoggedSteps(self.ledger, self.checks)
        self._problems = problems
        self._modules = self.ledger.modules
        self._plan = StepPlan(options)
        self._backward = BackwardWatch()
        self._outside = OutsideWatch(self.ledger.keep)
        self._allocators = AllocatorWatch()
        self._step: MeasuredStep | None = None  # begun last, and not over
        self._first_call = 0  # of that step
        self._called_step: MeasuredStep | None = None  # of the call from outside that is running
        self._is_inside = False  # whether one is
        self._is_on = False
        self._is_asynchronous = False
        self._position = 0  # of the last step of the loop

    def why_nothing(self) -> str:
        """The reason why there are no steps."""
        if not self._position:
            return "The model was not called while it was measured"
        calls = f"{self._position} call{'s' * (self._position != 1)}"
        return (
            f"No step was measured: the loop made {calls} of the model, and "
            f"skip={self.ledger.options.skip} leaves them out"
        )

    # -- beginning and end

    def start(self) -> None:
        """Begins to measure this thread."""
        self._guard(self._start)

    def _start(self) -> None:
        self._modules.refresh()
        apply_module_patches(self)
        add_watcher(self)
        self._outside.start()
        self.ledger.start = perf_counter()
        self._modules.show_compiled()
        self._is_asynchronous = self._modules.uses_cuda()
        has_hooks = self._is_asynchronous or self.checks is not None
        self._backward = BackwardWatch(
            self._before_node if has_hooks else None,
            self._after_node if has_hooks else None,
            (NonFiniteError,),
        )
        self._is_on = True

    def stop(self) -> None:
        """Ends measuring and removes everything that was added. May be called again, also after an
        interrupt.
        """
        self._is_on = False
        try:
            self._guard(self._end_step)
            self._guard(self._charge_late_runs)
            self.ledger.left_out |= self._backward.left_out
        finally:
            self._allocators.stop()
            self._backward.stop()
            self._outside.stop()
            self._modules.hide_compiled()
            remove_watcher(self)
            undo_patches(self)
        for failure in self._backward.failures:
            self._problems.add(
                f"A hook in a backward pass failed ({failure}): its numbers are incomplete"
            )
        self._backward.failures.clear()

    def let_go(self) -> None:
        """Releases the model and the logs, once the records are made."""
        self._modules.forget()
        self.ledger.let_go()

    # -- steps

    def begins_with(self, module: Any) -> bool:
        """Whether the module is one of the model's, and called from outside."""
        return not self._is_inside and self._is_on and id(module) in self._modules.modules

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module that is called from outside: in a capture session, if that is wanted."""
        address = self._modules.modules[id(module)].address
        self._is_inside = True
        try:
            is_logged = self._begin_call(address, module, args, kwargs)
            result = self.logged.run(module, args, kwargs) if is_logged else NO_RESULT
            if result is not NO_RESULT:
                return result
            # The records would make the garbage collector run more often, inside some module.
            pause_collector(self)
            # Not `module(...)`: a `__call__` of its class has already run.
            return module._wrapped_call_impl(*args, **kwargs)
        finally:
            self._is_inside, self._called_step, self.ledger.current = False, None, None
            try:
                resume_collector(self)
            finally:  # again, because an interrupt may have cut the first short
                resume_collector(self)

    def _begin_call(
        self, address: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Finds the step that the call belongs to. Returns whether it is to run in a capture
        session.
        """
        try:
            if _is_in_backward() and (address or self._position):
                return False  # run again for the backward pass of an earlier step
            with NoTorchFunction():
                given = plain_tensors((args, kwargs))
                shapes = tuple(tuple(shape_of(tensor)) for _, tensor in given)
            signature = self.ledger.model.training, torch.is_grad_enabled(), shapes
            step = self._step
            if step is None or not self._continues(step, address, signature):
                step = self._begin_step(signature)
            self._called_step = step
            return step is not None and self.logged.wants(step, module, shapes)
        except Exception as error:
            self._give_up(error)
            return False

    def _continues(self, step: MeasuredStep, address: str, signature: Signature) -> bool:
        """Whether a call from outside belongs to the step that is running.

        A call of the model begins a new step. So does one of a part of it that was called before,
        or that follows a backward pass, or whose training mode or gradient mode is another.
        """
        if not address or self._backward.runs or step.signature[:2] != signature[:2]:
            return False
        return "" in step.passes or address not in step.passes

    def _begin_step(self, signature: Signature) -> MeasuredStep | None:
        """A new step; None if it is not to be measured."""
        self._end_step()
        options, ledger = self.ledger.options, self.ledger
        self._position += 1
        role = options.role_of(self._position)
        if role == "skip":
            return None
        if len(ledger.steps) >= options.max_steps:
            self._problems.add(
                f"Only the first {options.max_steps} steps were measured (max_steps=)"
            )
            return None
        self._modules.refresh()
        self._modules.show_compiled()  # what was compiled since
        is_warmup = role == "warmup"
        wanted = self._plan.wanted(signature, is_warmup, self._modules.is_compiled)
        step = MeasuredStep(
            number=len(ledger.steps) + 1,
            signature=signature,
            phase="training" if signature[0] else "evaluation",
            has_grad=signature[1],
            input_shapes=signature[2],
            is_warmup=is_warmup,
            is_cold=self._is_cold(),
            position=self._position,
            wants_log=wanted.log,
            checking=wanted.checking,
        )
        ledger.steps.append(step)
        self._outside.take()  # what came before it
        self._charge_late_runs()
        step.start = perf_counter()
        self._step, self._first_call = step, len(ledger.calls)
        if wanted.memory:
            self._listen(step)
        if self.checks is not None:
            self.checks.begin(step)
        return step

    def _is_cold(self) -> bool:
        """Whether the step that begins directly follows one that ran under the log."""
        before = self.ledger.steps[-1] if self.ledger.steps else None
        return before is not None and before.has_log and before.position == self._position - 1

    def _listen(self, step: MeasuredStep) -> None:
        try:
            step.has_memory = self._allocators.start()
        except Exception as error:  # everything else can be measured without it
            self._allocators.stop()
            self._problems.add_failure(error, "Memory was not measured")
            return
        if not step.has_memory:
            self._problems.add(
                "Memory was not measured in some steps: another profiler was running "
                "(torch.profiler, or a profile of another model in this thread), and only one "
                "can run at a time"
            )

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.end = perf_counter()
        if not step.is_warmup and any(call.raised for call in step.outermost_calls):
            self._plan.repeat(step.signature)
        step.outside = self._outside.take()
        self._allocators.stop()
        runs, self._backward.runs = self._backward.runs, []
        own_spans, self.ledger.own_spans = self.ledger.own_spans, []
        timeline = self._allocators.timeline(own_spans) if step.has_memory else None
        if self.checks is not None:
            self.checks.let_go()
        charge_step(self.ledger, step, runs, timeline, self._first_call)

    def _charge_late_runs(self) -> None:
        """Charges the backward nodes that ran since the last measured step ended to that step, if
        their backward pass went through measured steps.
        """
        runs, self._backward.runs = of_the_model(self.ledger, self._backward.runs), []
        steps = [step for step in self.ledger.steps if step.end]
        if runs and steps:
            charge_step(self.ledger, steps[-1], runs, None, len(self.ledger.calls))

    # -- calls of modules

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], time: float
    ) -> MeasuredCall | None:
        """A module is called. The time since `time` is the profile's own."""
        call, backward = None, self._backward
        if self._is_on and self._is_inside:
            try:
                call = self._enter(module, args, kwargs)
            except NonFiniteError:  # in its inputs
                raise
            except Exception as error:
                self._give_up(error)
        if call is None:
            backward.own_seconds += perf_counter() - time
            return None
        self.ledger.current = call
        call.sequence = next_sequence()
        if self._is_asynchronous:
            torch.cuda.synchronize()
        call.start = perf_counter()
        call.own_start = backward.own_seconds = backward.own_seconds + call.start - time
        return call

    def end(self, watched: MeasuredCall) -> None:
        """A module has run, or raised."""
        if self._is_asynchronous:
            torch.cuda.synchronize()
        watched.end = perf_counter()
        watched.own_end = self._backward.own_seconds
        self.ledger.current = watched.around

    def leave(
        self, watched: MeasuredCall, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module returned."""
        if watched.around is None:
            self.logged.keep_result(result)
            self._guard(self._modules.note_whole_parameters)
        try:
            self._leave(watched, result, args, kwargs)
        except NonFiniteError:
            raise
        except Exception as error:
            self._give_up(error)
        # Since the end of the call, all time is the profile's own.
        self._backward.own_seconds = watched.own_end + perf_counter() - watched.end

    def fail(
        self,
        watched: MeasuredCall,
        error: BaseException,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """A module raised."""
        watched.raised = type(error).__name__
        self._guard(self._leave, watched, None, args, kwargs)

    def _enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> MeasuredCall | None:
        """Notes that a module of the model begins.

        No module is charged with the time of `_enter` and `_leave`, but what they run and allocate
        takes the place of the model in the processor's caches, and that slows down the model: in a
        MobileNet, each microsecond here adds about half a microsecond to the module. So the usual
        case, one plain tensor and no mode of torch, takes the shortest way.
        """
        ledger = self.ledger
        named, around = self._modules.modules.get(id(module)), ledger.current
        if named is None:
            return None
        step = self._called_step if around is None else around.measured_step
        original = None
        if around is None or around.original is not None:
            original = self._repeated_call(named.address)
            if original is not None:
                step, around = original.measured_step, around or original.around
        if step is None:
            return None
        call = MeasuredCall(len(ledger.calls), step, named, around, original)
        call.inputs = self._facts_of(args, kwargs, call, around)
        if self.checks is not None:
            with NoTorchFunction():
                self.checks.entered(call, args, kwargs)
        ledger.calls.append(call)
        step.calls.append(call)
        return call

    def _facts_of(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: MeasuredCall,
        maker: MeasuredCall | None,
    ) -> Sequence[TensorFacts]:
        """What is noted of the tensors that a call is given."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and not _num_modes():
            return (self._fact_of(args[0], call, maker),)
        with NoTorchFunction():
            given = plain_tensors((args, kwargs))
            return [self._fact_of(tensor, call, maker) for _, tensor in given]

    def _repeated_call(self, address: str) -> MeasuredCall | None:
        """The call that a call inside a backward pass repeats, for checkpointing."""
        if self._step is None or not _is_in_backward():
            return None
        return self.ledger.repeated_call(address)

    def _leave(
        self, call: MeasuredCall, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Notes what a module returned; see `_enter`."""
        if type(result) is Tensor and not _num_modes():
            call.outputs = (self._fact_of(result, call, call),)
            outputs = [result]
        else:
            with NoTorchFunction():
                outputs = [tensor for _, tensor in named_tensors(result)]
                call.outputs = [self._fact_of(tensor, call, call) for tensor in outputs]
        if self.checks is not None:
            with NoTorchFunction():
                self.checks.outputs(call, outputs, (args, kwargs))

    def _fact_of(
        self, tensor: Tensor, call: MeasuredCall, maker: MeasuredCall | None
    ) -> TensorFacts:
        """What is noted of a tensor that a call is given or returns. Its backward nodes, which
        `maker` or a call around it has made, are watched from now on.
        """
        key = self._arrival_of(tensor, call, maker) if tensor.requires_grad else None
        if type(tensor) is Tensor:
            try:
                return tensor.shape, tensor.nbytes, key
            except (RuntimeError, NotImplementedError):  # of some layouts, one is not known
                pass
        return shape_of(tensor), bytes_of(tensor), key

    def _arrival_of(
        self, tensor: Tensor, call: MeasuredCall, maker: MeasuredCall | None
    ) -> int | None:
        """Where the gradient of a tensor arrives, as in `TensorFacts`; watches it."""
        if self._is_deep(call.measured_step):
            return None
        node = node_of(tensor)
        if node is None:
            return -1 - id(tensor) if tensor.is_leaf else None
        number = self._backward.number_of(node)
        return self._watch(node, call, maker) if number is None else number

    def _watch(self, top: Any, call: MeasuredCall, maker: MeasuredCall | None) -> int | None:
        """Watches the nodes of autograd's graph that were made since the last time; returns the
        number of the top one.

        Nodes that lead to the inputs of the model are not the model's: another thread, whose nodes
        have the same sequence numbers, may have made or share them.
        """
        pending, has_saved = [top], call.original is None and not call.measured_step.is_light
        while pending:
            node = pending.pop()
            number = self._backward.watch_node(node)
            if number is None:
                continue
            own = self.ledger.makers[number] = _maker_of(sequence_of(node), maker)
            if maker is not None:
                pending.extend([below for below, _ in node.next_functions if below is not None])
                if has_saved and own is not None:
                    self._note_saved(own, node)
        return self._backward.number_of(top)

    def _is_deep(self, step: MeasuredStep) -> bool:
        """Whether a step has called so many modules that backward nodes of the others are not
        watched.
        """
        if len(step.calls) <= _MOST_CALLS:
            return False
        step.is_deep = True
        self._problems.add(
            f"Step {step.number} calls more than {_MOST_CALLS:,} modules: of the others, forward "
            "was measured"
        )
        return True

    def _note_saved(self, call: MeasuredCall, node: Any) -> None:
        if CAN_READ_SAVED:
            self.ledger.note_saved(call, saved_storages(node))
        else:
            self._problems.add(
                "Activations kept for backward were not measured: this version of torch does not "
                "report them"
            )

    # -- backward

    def _before_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        if self.checks is not None:
            self.checks.before_node(info, gradients)
        if self._is_asynchronous:
            torch.cuda.synchronize()

    def _after_node(self, info: NodeInfo, gradients: tuple[Any, ...]) -> None:
        if self._is_asynchronous:  # the node has only been started: its run ends now
            torch.cuda.synchronize()
            runs = self._backward.runs
            runs[-1] = runs[-1]._replace(end=perf_counter())
        if self.checks is not None:
            self.checks.after_node(info, gradients)

    # -- failures

    def _guard(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except NonFiniteError:
            raise
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The one place where failures of the profile end: training goes on, `problems` has the
        reason.
        """
        self._is_on = False
        self._problems.add_failure(error, "Measuring ended")


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _maker_of(sequence: int, call: MeasuredCall | None) -> MeasuredCall | None:
    """The innermost call, of this one and those around it, that a backward node was made in."""
    while call is not None and sequence < call.sequence:
        call = call.around
    return call
