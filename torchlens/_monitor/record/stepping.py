"""Follows the steps of a training: arms what sees the modules, and hands over what was seen when a
step is over.
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
from torchlens._monitor.films.film_worker import Capture, FilmWorker
from torchlens._monitor.record.clock import StepClock
from torchlens._monitor.record.collector import Collector
from torchlens._monitor.record.options import MonitorOptions
from torchlens._monitor.record.parameters import ParameterWatch
from torchlens._monitor.record.samples import to_host
from torchlens._monitor.record.statistics import Observation
from torchlens._monitor.record.watcher import ModuleWatcher, hide_from_compiler
from torchlens._monitor.record.writer import StepPart, Writer
from torchlens._monitor.store.folder import GRAPH_FILE, write_json_file
from torchlens._recording.unseen import call_unseen

# Scalars of steps that are not recorded otherwise are handed over so often (in seconds), or when
# there are so many.
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
# Counts the nodes of autograd's graphs that a thread has made: if there are more than before, it
# has computed something.
_num_nodes: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Steps:
    """The steps of one run. Whatever fails in here, the training goes on: the writer's `problems`
    say so.
    """

    def __init__(
        self, model: torch.nn.Module, folder: Path, options: MonitorOptions, first: int,
        collector: Collector,
        watcher: ModuleWatcher, writer: Writer, films: FilmWorker,
    ) -> None:  # fmt: skip
        self.clock = StepClock(first)
        self.collector, self.watcher, self.writer = collector, watcher, writer
        self._films = films
        self.scalars: list[tuple[str, int, Any]] = []  # name, step, value: not handed over yet
        self.is_on = True
        self.is_finished = False
        self.when_gone: Callable[[], None] = self.take_away  # what is done when the model is
        # Weakly: a run that is never finished does not keep the model.
        self.model = weakref.ref(model, lambda _: self._give_up())
        self.pid = os.getpid()
        self._folder = folder
        self._options = options
        self._parameters = ParameterWatch(options, collector)
        self._is_recorded = False  # the current step
        # Of the current step, for certain. What is still in the collector may be of the next one
        # (see `StepClock`).
        self._settled: list[Observation] = []
        self._settled_captures: list[Capture] = []
        self._unsettled_scalars: list[tuple[str, Any]] = []
        self._late_step: int | None = None  # the step before, if it was recorded
        self._handles: list[Any] = []
        self._is_manual = False  # steps are told by `end_by_hand`
        self._has_optimizer = False  # one was seen in this step
        self._has_ended_step = False
        self._logs_before: dict[
            str, bool
        ] = {}  # whether a scalar is logged before the optimizer's step, as far as known
        # At the last step of an optimizer: its thread with the nodes it had made, and how often
        # modules were called.
        self._nodes_before = get_ident(), 0
        self._nodes_of_step = 0  # made between the last two steps of optimizers
        self._calls_before = 0
        self._stepping: dict[
            int, weakref.ref[Any]
        ] = {}  # the outermost optimizer that is stepping, by thread
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
        self.watcher.on_unknown = lambda: self.guard(self._look_again)
        self._mark_nodes()
        self.arm_or_disarm()

    def end_by_hand(self) -> None:
        """Ends a step. Once it was called, optimizers end no steps any more."""
        if not self.is_finished and os.getpid() == self.pid:
            self.guard(self._step_by_hand)

    def end_last(self) -> None:
        """Hands over what was seen of the step that is running: no other comes."""
        self._is_ending = True
        self._settle()
        self._offer(self.clock.step, *self._take_settled())
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

    # -- one after the other
    # -------------------------------------------------------------------------------------------

    def add_scalar(self, name: str, value: Any, step: int | None) -> None:
        """Keeps a number that was logged. Without `step`, it is of the running step, or of the one
        that has just ended.
        """
        if step is None and self.clock.is_waiting and self._has_run():
            self._unsettled_scalars.append((name, value))
        else:
            self.scalars.append((name, self._step_of_log(name) if step is None else step, value))
        if len(self.scalars) > _MOST_SCALARS:  # no step ends, so none is handed over
            del self.scalars[: len(self.scalars) - _MOST_SCALARS]
            self.writer.problems.add(
                f"More than {_MOST_SCALARS:,} scalars were logged in one step: only the last are "
                "kept"
            )

    def _step_of_log(self, name: str) -> int:
        """A loop logs before the optimizer's step or after, each number in its place. In a recorded
        step one sees whether the model has run yet; in the others, what was seen then is taken to
        be so.
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
        # A few more operations on the loss, or a norm of the weights, are no run of the model.
        return 0 < self._new_nodes() >= self._nodes_of_step / 2

    def _new_nodes(self) -> int:
        """How many nodes this thread has made since the last step of an optimizer. Costs next to
        nothing.
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
            self.clock.is_late = False
            seen, captures = self.collector.take_all(), self.collector.tracks.take_captures()
            if self._late_step is not None and seen:
                self._offer(self._late_step, seen, captures)
            self.watcher.begin_step()
            return
        self._settle()
        if is_over:
            self._end_step()
        else:  # what comes now may be of the next step
            if not self._is_recorded and self._is_wanted(self.clock.step + 1):
                self._arm()
            self._calls_before = self.watcher.num_calls

    def _is_within_another(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another optimizer, which wraps this one, is calling it: that is part of the
        other's step.
        """
        outermost = self._stepping.get(get_ident())
        other = None if outermost is None else outermost()
        return other is not None and other is not optimizer and _is_stepping(other)

    def _records_now(self) -> bool:
        """Whether what the optimizer that is stepping does is recorded."""
        return self._late_step is not None if self.clock.is_late else self._is_recorded

    def _step_by_hand(self) -> None:
        is_first, self._is_manual = not self._is_manual, True
        if is_first and self._has_ended_step and not self.clock.is_waiting:
            if not self._has_run():  # an optimizer has just ended the step that is meant
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
        """The step is over: what was seen of it is handed over, and the next one is recorded or
        not.

        `has_next_begun`: what was seen since the last step of an optimizer is of the next one.
        """
        step, was_recorded = self.clock.step, self._is_recorded
        self._late_step = step if was_recorded else None
        self.collector.forget()
        self._offer(step, *self._take_settled())
        if was_recorded:
            self._write_graph()
        self.clock.advance()
        self._has_ended_step, self._has_optimizer = True, False
        self._settle_scalars()
        self.arm_or_disarm(has_next_begun)

    def _settle(self) -> None:
        """What was seen until now is of the current step."""
        seen, captures = self.collector.take_all(), self.collector.tracks.take_captures()
        if self._is_recorded:
            self._settled += seen
            self._settled_captures += captures
        self._settle_scalars()

    def _settle_scalars(self) -> None:
        self.scalars += [(name, self.clock.step, value) for name, value in self._unsettled_scalars]
        self._unsettled_scalars.clear()

    def _take_settled(self) -> tuple[list[Observation], list[Capture]]:
        settled, self._settled = self._settled, []
        captures, self._settled_captures = self._settled_captures, []
        return (settled, captures) if self._is_recorded else ([], [])

    def _offer(
        self, step: int, observations: list[Observation], captures: list[Capture],
        is_end: bool = True
    ) -> None:  # fmt: skip
        now = monotonic()
        is_soon = (
            now - self._last_offer < _SCALARS_EVERY
            and len(self.scalars) < _MANY_SCALARS
            and not self._is_ending
        )
        self._films.offer(step, captures)
        if not observations and (not self.scalars or is_soon):
            return
        self._last_offer = now
        scalars, self.scalars = self.scalars, []
        call_unseen(_start_copies, observations, scalars)
        if not self.writer.offer(StepPart(step, observations, scalars, is_end)):
            self.scalars[:0] = scalars  # they are small, and wait for the next step

    def _hand_over_part(self) -> None:
        """So much was seen of a step that has not ended (a model that is only evaluated has none)
        that it does not wait.
        """
        if self._is_recorded:
            self._settle()
            self._offer(self.clock.step, *self._take_settled(), is_end=False)
        else:  # in the midst of optimizers' turns, before a step that is recorded
            self._offer(
                self.clock.step + 1,
                self.collector.take_all(),
                self.collector.tracks.take_captures(),
                is_end=False,
            )

    # -- being armed
    # ----------------------------------------------------------------------------------------------

    def arm_or_disarm(self, has_begun: bool = False) -> None:
        """Sees to it that the step is recorded, if it is to be, and otherwise that it costs
        nothing.

        A step that has begun is recorded only if its beginning was seen.
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
        """From now on calls of modules are seen, in whichever thread the next step runs."""
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
        """Looks at the model as it is now, for it may have changed."""
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
    """Whether the optimizer is given a function that computes loss and gradients: they come within
    its step (Lightning).
    """
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _is_stepping(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of an optimizer is running in this thread; one that raised is not."""
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
