"""Follows the steps of a training loop: arms the module watcher for recorded steps, and passes
their observations to the writer when they end.
"""

import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchlens._capture.current import add_watcher, remove_watcher
from torchlens._capture.model_parts import named_modules
from torchlens._capture.patches.patching import (
    apply_module_patches,
    begin_eager,
    end_eager,
    is_compiler_there,
    undo_patches,
)
from torchlens._monitor.record.clock import StepClock
from torchlens._monitor.record.collector import Collector
from torchlens._monitor.record.monitor_options import MonitorOptions
from torchlens._monitor.record.parameters import ParameterWatch
from torchlens._monitor.record.samples import to_host
from torchlens._monitor.record.statistics import Observation
from torchlens._monitor.record.watcher import ModuleWatcher, hide_from_compiler
from torchlens._monitor.record.writer import StepPart, Writer
from torchlens._monitor.store.folder import GRAPH_FILE, write_json_file
from torchlens._recording.unseen import call_unseen

# Scalars of steps without other observations go to the writer at this interval (in seconds), or
# once this many are pending. Beyond the maximum, the oldest are discarded.
_SCALARS_EVERY = 0.2
_MANY_SCALARS, _MOST_SCALARS = 500, 100_000
_OTHER_THREAD = (
    "The model was called in one thread and the optimizer stepped in another: of each step, only "
    "the calls of the thread that called first are recorded"
)
_BY_HAND_LATE = (
    "run.step() was called for the first time after optimizers had ended steps, and the model had "
    "run since: those steps count too. Call run.step() at the end of each iteration from the "
    "first on, or leave the steps to the optimizers"
)
# The number of autograd nodes that the current thread has created. If it has grown, the thread has
# computed something that requires gradients.
_num_nodes: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Steps:
    """The steps of one run. Errors in here never stop the training: they are added to the writer's
    `problems`.
    """

    def __init__(
        self, model: torch.nn.Module, folder: Path, options: MonitorOptions, first: int,
        collector: Collector,
        watcher: ModuleWatcher, writer: Writer,
    ) -> None:  # fmt: skip
        self.clock = StepClock(first)
        self.collector, self.watcher, self.writer = collector, watcher, writer
        self.scalars: list[tuple[str, int, Any]] = []  # pending: name, step, value
        self.is_on = True
        self.is_finished = False
        self.when_gone: Callable[[], None] = self.take_away  # called once the model is freed
        # A weak reference: an unfinished run must not keep the model alive.
        self.model = weakref.ref(model, lambda _: self._give_up())
        self.pid = os.getpid()
        self._folder = folder
        self._options = options
        self._parameters = ParameterWatch(options, collector)
        self._is_recorded = False  # the current step
        # Observations known to belong to the current step. Those still in the collector may belong
        # to the next one (see `StepClock`).
        self._settled: list[Observation] = []
        self._unsettled_scalars: list[tuple[str, Any]] = []
        self._late_step: int | None = None  # the previous step, if recorded
        self._handles: list[Any] = []
        self._is_manual = False  # `end_by_hand` ends the steps, not optimizers
        self._has_optimizer = False  # an optimizer of the model has stepped in this step
        self._has_ended_step = False
        # By scalar name: whether it is logged before the optimizer's step, once observed.
        self._logs_before: dict[str, bool] = {}
        # At the last step of an optimizer: the thread with its count of autograd nodes, and the
        # number of module calls.
        self._nodes_before = get_ident(), 0
        self._nodes_of_step = 0  # created between the last two optimizer steps
        self._calls_before = 0
        # By thread: the outermost optimizer whose step is running.
        self._stepping: dict[int, weakref.ref[Any]] = {}
        self._last_offer = 0.0
        self._is_ending = False
        self._is_in_place = False  # the patches of module calls are applied
        self._start = monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether the hooks on optimizers are registered."""
        return bool(self._handles)

    def follow_optimizers(self) -> None:
        """Registers the hooks by which optimizers end steps."""
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def begin(self) -> None:
        """Begins the first step."""
        self.collector.on_full = self._hand_over_part
        self.watcher.on_unknown = lambda: self.guard(self._look_again)
        self._mark_nodes()
        self.arm_or_disarm()

    def end_by_hand(self) -> None:
        """Ends a step. From the first call on, optimizers no longer end steps."""
        if not self.is_finished and os.getpid() == self.pid:
            self.guard(self._step_by_hand)

    def end_last(self) -> None:
        """Passes the observations of the running step to the writer. No step may follow."""
        self._is_ending = True
        self._settle()
        self._offer(self.clock.step, self._take_settled())
        self._write_graph()

    def take_away(self) -> None:
        """Removes all hooks and patches from torch. Calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._disarm()
        self.collector.remove_hooks()
        self.watcher.forget()
        self._parameters.forget()

    def _give_up(self) -> None:
        """Callback for when the model is freed."""
        if not self.is_finished and os.getpid() == self.pid:
            self.when_gone()

    # -- ending steps ------------------------------------------------------------------------------

    def add_scalar(self, name: str, value: Any, step: int | None) -> None:
        """Queues a logged number. Without `step`, it belongs to the running step or to the one that
        has just ended (see `_step_of_log`).
        """
        if step is None and self.clock.is_waiting and self._has_run():
            self._unsettled_scalars.append((name, value))
        else:
            self.scalars.append((name, self._step_of_log(name) if step is None else step, value))
        if len(self.scalars) > _MOST_SCALARS:  # no step ends, so nothing reaches the writer
            del self.scalars[: len(self.scalars) - _MOST_SCALARS]
            self.writer.problems.add(
                f"More than {_MOST_SCALARS:,} scalars were logged in one step: only the last are "
                "kept"
            )

    def _step_of_log(self, name: str) -> int:
        """The step of a scalar that is logged now.

        A training loop logs each scalar either before or after the optimizer's step. In a recorded
        step the module calls show which. Other steps reuse that answer.
        """
        if self.clock.is_waiting:
            return self.clock.step
        if self._is_recorded and (self._has_ended_step or self.watcher.num_calls):
            self._logs_before[name] = self.watcher.num_calls > 0
        is_before = self._logs_before.get(name)
        if is_before is None:
            is_before = self._has_run()
        return self.clock.step if is_before or not self._has_ended_step else self.clock.step - 1

    def _has_run(self) -> bool:
        """Whether the model has run since the last step of an optimizer."""
        if self.collector.is_armed:
            return self.watcher.num_calls > self._calls_before
        # Half the nodes of a step at least: a few operations on the loss, or a norm of the weights,
        # do not count as a run of the model.
        return 0 < self._new_nodes() >= self._nodes_of_step / 2

    def _new_nodes(self) -> int:
        """How many autograd nodes this thread has created since the last optimizer step. 0 if that
        step ran in another thread.
        """
        thread, num_nodes = self._nodes_before
        return _num_nodes() - num_nodes if thread == get_ident() else 0

    def _mark_nodes(self) -> None:
        self._nodes_of_step = self._new_nodes()
        self._nodes_before = get_ident(), _num_nodes()

    def _is_wanted(self, step: int) -> bool:
        if not self.is_on or self.is_finished or step % self._options.every:
            return False
        limit = self._options.seconds
        if limit is not None and monotonic() - self._start > limit:
            self.writer.problems.add(
                f"The time limit was reached: nothing is recorded after {limit:g} seconds "
                "(seconds=)"
            )
            self.is_on = False
            return False
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.guard(self._note_before_step, optimizer, _has_closure(args, kwargs))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.guard(self._note_after_step, optimizer, _has_closure(args, kwargs))

    def _note_before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not self._owns(optimizer) or self._is_within_another(optimizer):
            return
        self._stepping[get_ident()] = weakref.ref(optimizer)
        if not self._is_manual and self.clock.begins_new(optimizer, self._new_nodes() > 0):
            self._end_step(has_next_begun=True)
        if self._records_now():
            self._has_optimizer = True
            if self.watcher.thread not in (None, get_ident()) and not self.clock.is_late:
                self.writer.problems.add(_OTHER_THREAD)
            call_unseen(self._parameters.note_before, optimizer, not has_closure)

    def _note_after_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        outermost = self._stepping.get(get_ident())
        if outermost is None or outermost() is not optimizer:
            return
        del self._stepping[get_ident()]
        if self._records_now():
            call_unseen(self._parameters.note_after, optimizer, has_closure)
        if self._is_manual:
            return
        is_over = self.clock.has_stepped(optimizer, torch._C._current_graph_task_id() != -1)
        self._mark_nodes()
        if self.clock.is_late:
            self._add_to_late_step()
            return
        self._settle()
        if is_over:
            self._end_step()
        else:  # observations from here on may belong to the next step
            if not self._is_recorded and self._is_wanted(self.clock.step + 1):
                self._arm()
            self._calls_before = self.watcher.num_calls

    def _add_to_late_step(self) -> None:
        """The optimizer that has just stepped belongs to the step before."""
        self.clock.is_late = False
        seen = self.collector.take_all()
        if self._late_step is not None and seen:
            self._offer(self._late_step, seen)
        self.watcher.begin_step()

    def _is_within_another(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a wrapping optimizer is calling this one, as part of its own step."""
        outermost = self._stepping.get(get_ident())
        other = None if outermost is None else outermost()
        return other is not None and other is not optimizer and _is_stepping(other)

    def _records_now(self) -> bool:
        """Whether the step of the current optimizer is recorded."""
        return self._late_step is not None if self.clock.is_late else self._is_recorded

    def _step_by_hand(self) -> None:
        is_first, self._is_manual = not self._is_manual, True
        if is_first and self._has_ended_step and not self.clock.is_waiting:
            if not self._has_run():  # an optimizer has just ended this step
                if self._is_recorded:
                    call_unseen(self._parameters.remember)
                return
            self.writer.problems.add(_BY_HAND_LATE)
        if self._is_recorded and not self._has_optimizer:
            call_unseen(self._parameters.note_by_hand)
        self._settle()
        self._mark_nodes()
        self._end_step()

    def _end_step(self, has_next_begun: bool = False) -> None:
        """Ends the step: passes its observations to the writer and arms or disarms the next one.

        `has_next_begun`: observations since the last optimizer step belong to the next step.
        """
        step, was_recorded = self.clock.step, self._is_recorded
        self._late_step = step if was_recorded else None
        self.collector.forget()
        self._offer(step, self._take_settled())
        if was_recorded:
            self._write_graph()
        self.clock.advance()
        self._has_ended_step, self._has_optimizer = True, False
        self._settle_scalars()
        self.arm_or_disarm(has_next_begun)

    def _settle(self) -> None:
        """Assigns all observations so far to the current step."""
        seen = self.collector.take_all()
        if self._is_recorded:
            self._settled += seen
        self._settle_scalars()

    def _settle_scalars(self) -> None:
        self.scalars += [(name, self.clock.step, value) for name, value in self._unsettled_scalars]
        self._unsettled_scalars.clear()

    def _take_settled(self) -> list[Observation]:
        settled, self._settled = self._settled, []
        return settled if self._is_recorded else []

    def _offer(self, step: int, observations: list[Observation], is_end: bool = True) -> None:
        now = monotonic()
        is_soon = (
            now - self._last_offer < _SCALARS_EVERY
            and len(self.scalars) < _MANY_SCALARS
            and not self._is_ending
        )
        if not observations and (not self.scalars or is_soon):
            return
        self._last_offer = now
        scalars, self.scalars = self.scalars, []
        call_unseen(_start_copies, observations, scalars)
        if not self.writer.offer(StepPart(step, observations, scalars, is_end)):
            self.scalars[:0] = scalars  # retry at the next step: scalars are small

    def _hand_over_part(self) -> None:
        """Passes pending observations to the writer before the step ends: there are too many to
        hold. A model that is only evaluated never ends a step.
        """
        if self._is_recorded:
            self._settle()
            self._offer(self.clock.step, self._take_settled(), is_end=False)
        else:  # between the turns of several optimizers, with only the next step recorded
            self._offer(self.clock.step + 1, self.collector.take_all(), is_end=False)

    # -- arming and disarming ----------------------------------------------------------------------

    def arm_or_disarm(self, has_begun: bool = False) -> None:
        """Applies the patches if the step is to be recorded, removes them otherwise.

        A step that has already begun is recorded only if its beginning was observed.
        """
        self._is_recorded = self._is_wanted(self.clock.step) and (
            self.collector.is_armed or not has_begun
        )
        if not self._is_recorded:
            self._disarm()
        elif not has_begun:
            self._arm()
        self._calls_before = 0

    def _arm(self) -> None:
        """Applies the patches that observe module calls, in all threads."""
        if self.model() is None:
            return
        self.watcher.begin_step()
        self._look_again()
        if self._options.compiled == "eager" and is_compiler_there():
            begin_eager(self)
        self.collector.is_armed = True
        if self._is_manual or not self._has_ended_step:
            call_unseen(self._parameters.remember)
        if not self._is_in_place:
            hide_from_compiler(True)
            apply_module_patches(self)
            add_watcher(self.watcher, is_everywhere=True)
            self._is_in_place = True

    def _look_again(self) -> None:
        """Refreshes the known modules and parameters: the model may have changed."""
        model = self.model()
        if model is not None:
            modules = named_modules(model)
            self.watcher.refresh(modules)
            self._parameters.refresh(modules)

    def _disarm(self) -> None:
        self.collector.is_armed = self._is_in_place = False
        self.collector.pending.clear()
        remove_watcher(self.watcher)
        undo_patches(self)
        end_eager(self)
        hide_from_compiler(False)

    def guard(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls a function. An error is added to the problems and does not stop the training."""
        if os.getpid() != self.pid:
            return
        try:
            function(*args)
        except Exception as error:
            self.writer.problems.add_failure(error, f"Step {self.clock.step} is not complete")

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self.model()
        return model is not None and self._parameters.is_in(optimizer, model)

    def _write_graph(self) -> None:
        """Writes graph.json, once a recorded step has called the model."""
        model, graph = self.model(), self.watcher.graph
        if model is not None and graph is not None and self.watcher.num_calls:
            self.watcher.graph = None
            make = graph.finished(model)
            path = self._folder / GRAPH_FILE
            self.writer.do(lambda: write_json_file(path, make()))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the optimizer's step is given a closure, which computes loss and gradients within the
    step (as Lightning does).
    """
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer is on this thread's call stack; False after it raised."""
    file = sys.modules[torch.optim.Optimizer.__module__].__file__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _start_copies(observations: list[Observation], scalars: list[tuple[str, int, Any]]) -> None:
    if any(type(sample.values) is not np.ndarray for _, sample, _ in observations):
        samples = {
            id(each): each
            for _, sample, before in observations
            for each in (sample, before)
            if each is not None
        }
        to_host(list(samples.values()))
    for place, (name, step, value) in enumerate(scalars):
        if isinstance(value, torch.Tensor):
            scalars[place] = name, step, value.to("cpu", non_blocking=True)
