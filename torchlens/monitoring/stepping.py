"""Follows the steps of a training: arms what sees the modules, and hands over what was seen when a step is over."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchlens.capture.compiled import begin_eager, end_eager, is_compiler_there
from torchlens.capture.current import add_watcher, remove_watcher
from torchlens.capture.parts import named_modules
from torchlens.capture.patching import apply_module_patches, undo_patches
from torchlens.monitoring.clock import StepClock
from torchlens.monitoring.collector import Collector
from torchlens.monitoring.folder import GRAPH_FILE, write_json_file
from torchlens.monitoring.options import MonitorOptions
from torchlens.monitoring.parameters import ParameterWatch
from torchlens.monitoring.quiet import quietly
from torchlens.monitoring.samples import to_host
from torchlens.monitoring.scalars import PendingScalars
from torchlens.monitoring.statistics import Observation
from torchlens.monitoring.watcher import ModuleWatcher, hide_from_compiler
from torchlens.monitoring.writer import Part, Writer

__all__ = ["Steps"]

# Scalars of steps that are not recorded otherwise are handed over so often (in seconds), or when there are so many.
_SCALARS_EVERY = 0.2
_MANY_SCALARS = 500
_OTHER_THREAD = (
    "The model was called in one thread and the optimizer stepped in another: of each step, only the calls of the thread "
    "that called first are recorded"
)


class Steps:
    """The steps of one run. Whatever fails in here, the training goes on: the writer's `problems` say so."""

    def __init__(
        self, model: torch.nn.Module, folder: Path, options: MonitorOptions, first: int, collector: Collector,
        watcher: ModuleWatcher, writer: Writer,
    ) -> None:  # fmt: skip
        self.clock = StepClock(first)
        self.collector, self.watcher, self.writer = collector, watcher, writer
        self.scalars = PendingScalars()
        self.is_on = True
        self.is_finished = False
        self.when_gone: Callable[[], None] = self.take_away  # what is done when the model is
        # Weakly: a run that nobody finishes does not keep the model.
        self.model = weakref.ref(model, lambda _: self._give_up())
        self.pid = os.getpid()
        self._folder = folder
        self._options = options
        self._parameters = ParameterWatch(options, collector)
        self._settled: list[Observation] = []  # of the current step, for certain
        self._late_step: int | None = None  # the step before, if it was recorded
        self._handles: list[Any] = []
        self._is_manual = False  # steps are told by `end_by_hand`
        self._has_optimizer = False  # one was seen in this step
        self._has_ended_step = False
        self._logs_after = self._logs_after_known = False
        self._last_offer = 0.0
        self._is_ending = False
        self._is_in_place = False  # the calls of modules are seen
        self._start = monotonic()

    @property
    def has_begun(self) -> bool:
        """Whether optimizers are followed."""
        return bool(self._handles)

    def follow_optimizers(self) -> None:
        """From now on, what optimizers do ends steps."""
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def begin(self) -> None:
        """Begins the first step."""
        self.collector.on_full = self._hand_over_part
        self.arm_or_disarm()

    def end_by_hand(self) -> None:
        """Ends a step. Once it was called, optimizers end no steps any more."""
        if not self.is_finished and os.getpid() == self.pid:
            self._is_manual = True
            self.guard(self._step_by_hand)

    def end_last(self) -> None:
        """Hands over what was seen of the step that is running: no other comes."""
        self._is_ending = True
        self._settled += self.collector.take_all()
        settled, self._settled = self._settled, []
        self._offer(self.clock.step, settled)
        self._write_graph()

    def take_away(self) -> None:
        """Leaves nothing behind in torch. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._disarm()
        self.collector.remove_hooks()
        self.watcher.forget()
        self._parameters.forget()

    def _give_up(self) -> None:
        """The model is gone."""
        if not self.is_finished and os.getpid() == self.pid:
            self.when_gone()

    # -- one after the other -------------------------------------------------------------------------------------------

    def step_of_log(self) -> int:
        """A loop logs before the optimizer's step or after: in a recorded step one sees whether the model has run yet."""
        if self.collector.is_armed or not self._logs_after_known:
            has_run = self.collector.is_armed and (self.watcher.num_calls > 0 or not self._has_ended_step)
            self._logs_after = not has_run and self._has_ended_step
            self._logs_after_known = True
        return self.clock.step - 1 if self._logs_after else self.clock.step

    def _is_wanted(self, step: int) -> bool:
        if not self.is_on or self.is_finished or step % self._options.every:
            return False
        limit = self._options.seconds
        if limit is not None and monotonic() - self._start > limit:
            self.writer.problems.add(f"The time limit was reached: nothing is recorded after {limit:g} seconds (seconds=)")
            self.is_on = False
            return False
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.guard(self._note_before_step, optimizer, _has_closure(args, kwargs))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.guard(self._note_after_step, optimizer, _has_closure(args, kwargs))

    def _note_before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not self._owns(optimizer):
            return
        if not self._is_manual and self.clock.begins_new(optimizer):
            self._end_step()
        if self._records_now():
            self._has_optimizer = True
            if self.watcher.thread not in (None, get_ident()) and not self.clock.is_late:
                self.writer.problems.add(_OTHER_THREAD)
            quietly(self._parameters.note_before, optimizer, not has_closure)

    def _note_after_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not self._owns(optimizer):
            return
        if self._records_now():
            quietly(self._parameters.note_after, optimizer, has_closure)
        if self._is_manual:
            return
        is_over = self.clock.has_stepped(optimizer)
        seen = self.collector.take_all()
        if self.clock.is_late:
            self.clock.is_late = False
            if self._late_step is not None and seen:
                self._offer(self._late_step, seen)
            return
        self._settled += seen
        if is_over:
            self._end_step()

    def _records_now(self) -> bool:
        """Whether what the optimizer that is stepping does is recorded."""
        return self._late_step is not None if self.clock.is_late else self.collector.is_armed

    def _step_by_hand(self) -> None:
        if self.collector.is_armed and not self._has_optimizer:
            quietly(self._parameters.note_after, None)
            quietly(self._parameters.note_before, None)
        self._settled += self.collector.take_all()
        self._end_step()

    def _end_step(self) -> None:
        """The step is over: what was seen of it is handed over, and the next one is recorded or not."""
        step = self.clock.step
        was_armed = self.collector.is_armed
        self._late_step = step if was_armed else None
        self.collector.forget()
        settled, self._settled = self._settled, []
        self._offer(step, settled if was_armed else [])
        self.clock.advance()
        self._has_ended_step, self._has_optimizer = True, False
        if was_armed:
            self._write_graph()
        self.arm_or_disarm()

    def _offer(self, step: int, observations: list[Observation], is_end: bool = True) -> None:
        now = monotonic()
        is_soon = now - self._last_offer < _SCALARS_EVERY and len(self.scalars) < _MANY_SCALARS and not self._is_ending
        captures = self.collector.take_captures()
        if not observations and not captures and (not self.scalars or is_soon):
            return
        self._last_offer = now
        scalars, self.scalars = self.scalars, PendingScalars()
        quietly(_start_copies, observations, scalars)
        if not self.writer.offer(Part(step, observations, scalars, is_end, captures)):
            self.scalars[:0] = scalars  # they are small, and wait for the next step

    def _hand_over_part(self) -> None:
        """So much was seen of a step that has not ended (a model that is only evaluated has none) that it does not wait."""
        self._settled += self.collector.take_all()
        settled, self._settled = self._settled, []
        self._offer(self.clock.step, settled, is_end=False)

    # -- being armed ---------------------------------------------------------------------------------------------------

    def arm_or_disarm(self) -> None:
        """Sees to it that the step is recorded, if it is to be, and otherwise that it costs nothing."""
        if self._is_wanted(self.clock.step):
            self._arm()
        else:
            self._disarm()

    def _arm(self) -> None:
        """From now on calls of modules are seen, in whichever thread the next step runs."""
        model = self.model()
        if model is None:
            return
        modules = named_modules(model)
        self.watcher.refresh(modules)
        self._parameters.refresh(modules)
        if self._options.compiled == "eager" and is_compiler_there():
            begin_eager(self)
        self.collector.is_armed = True
        if self._is_manual or not self._has_ended_step:
            quietly(self._parameters.remember)
        if not self._is_in_place:
            hide_from_compiler(True)
            apply_module_patches(self)
            add_watcher(self.watcher, is_everywhere=True)
            self._is_in_place = True

    def _disarm(self) -> None:
        self.collector.is_armed = self._is_in_place = False
        self.collector.pending.clear()
        remove_watcher(self.watcher)
        undo_patches(self)
        end_eager(self)
        hide_from_compiler(False)

    def guard(self, function: Callable[..., Any], *args: Any) -> None:
        """Does something of ours. If it fails, the training goes on."""
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
        """As soon as a recorded step has called the model."""
        model, graph = self.model(), self.watcher.graph
        if model is not None and graph is not None and self.watcher.num_calls:
            self.watcher.graph = None
            make = graph.finished(model)
            path = self._folder / GRAPH_FILE
            self.writer.do(lambda: write_json_file(path, make()))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the optimizer is given a function that computes loss and gradients: they come within its step (Lightning)."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _start_copies(observations: list[Observation], scalars: list[tuple[str, int, Any]]) -> None:
    if any(type(sample.values) is not np.ndarray for _, sample, _ in observations):
        samples = {id(each): each for _, sample, before in observations for each in (sample, before) if each is not None}
        to_host(list(samples.values()))
    for place, (name, step, value) in enumerate(scalars):
        if isinstance(value, torch.Tensor):
            scalars[place] = name, step, value.to("cpu", non_blocking=True)
