"""A run that is being recorded: what `torchlens.monitor` returns."""

import atexit
import os
import platform
import threading
import uuid
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from time import monotonic, time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchlens.capture.compiled import begin_eager, end_eager, is_compiler_there
from torchlens.capture.current import add_watcher, remove_watcher
from torchlens.capture.patching import apply_module_patches, undo_patches
from torchlens.capture.session import CaptureOptions
from torchlens.capture.user_code import warn_caller
from torchlens.health.thresholds import THRESHOLDS
from torchlens.history.base_history import BaseHistory
from torchlens.history.log import Log
from torchlens.monitoring.clock import StepClock
from torchlens.monitoring.collector import Collector
from torchlens.monitoring.folder import FORMAT, GRAPH_FILE, RUN_FILE, is_run, write_json_file
from torchlens.monitoring.graph import GraphMaker
from torchlens.monitoring.health import Health
from torchlens.monitoring.jobs import JOBS
from torchlens.monitoring.options import MonitorOptions
from torchlens.monitoring.parameters import ParameterWatch
from torchlens.monitoring.quiet import quietly
from torchlens.monitoring.reader import last_step_of
from torchlens.monitoring.samples import to_host
from torchlens.monitoring.series import WATCHED, SeriesNames
from torchlens.monitoring.sinks.feed import SinkFeed
from torchlens.monitoring.sinks.sink import Sink
from torchlens.monitoring.statistics import Observation
from torchlens.monitoring.watcher import ModuleWatcher, hide_from_compiler
from torchlens.monitoring.worker import WorkCounts
from torchlens.monitoring.writer import Counts, Part, RecordedStep, Writer
from torchlens.problems import Problems
from torchlens.wording import check_choice, check_count, did_you_mean, got

__all__ = ["Run"]

_MOST_SCALARS = 100_000
# Scalars of steps that are not recorded otherwise are handed over so often (in seconds), or when there are so many.
_SCALARS_EVERY = 0.2
_MANY_SCALARS = 500


class Run:
    """Records what a model's modules do over a training run, into a folder.

    >>> run = torchlens.monitor(model, 'runs/a', every=10)
    >>> ...                                        # the training loop, unchanged
    >>> run.log(loss=loss)
    >>> run.finish()

    Whatever fails in here, the training goes on: `problems` says what is missing, `counts` how much was dropped.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        folder: Path,
        options: MonitorOptions,
        history_type: Callable[[Log, CaptureOptions], BaseHistory],
    ) -> None:
        self.folder = folder
        self.options = options
        self.rank = _rank()
        self.id = uuid.uuid4().hex[:12]
        is_resumed = is_run(folder)
        first = options.step if options.step is not None else last_step_of(folder) + 1 if is_resumed else 0
        self._clock = StepClock(first)
        self._names = SeriesNames()
        self._writer = Writer(
            folder, self.rank, self._session(first), options.budget, self._names, Health(self._names, model)
        )
        self._collector = Collector(self._names, self.problems)
        self._parameters = ParameterWatch(options, self._collector)
        wants_graph = self.rank == 0 and not (folder / GRAPH_FILE).exists()
        graph = GraphMaker(model, options.graph == "operations", self.problems, history_type) if wants_graph else None
        self._watcher = ModuleWatcher(model, options, self._collector, THRESHOLDS["saturation_margin"], graph)
        # Weakly: a run that nobody finishes does not keep the model.
        self._model = weakref.ref(model, lambda _: self._give_up())
        self._settled: list[Observation] = []  # of the current step, for certain
        self._late_step: int | None = None  # the step before, if it was recorded
        self._scalars: list[tuple[str, int, Any]] = []
        self._handles: list[Any] = []
        self._pid = os.getpid()
        self._thread = 0
        self._is_manual = False  # steps are told by `step()`
        self._has_optimizer = False  # one was seen in this step
        self._has_ended_step = False
        self._logs_after = self._logs_after_known = False
        self._last_offer = 0.0
        self._is_on = True
        self._is_finished = self._is_ending = False
        self._start = monotonic()
        self._lock = threading.RLock()
        if self.rank == 0 and not (folder / RUN_FILE).exists():
            self._write_run_file(model)

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def start(self) -> "Run":
        """Begins to record; `torchlens.monitor` has done so."""
        model = self._model()
        if self._handles or self._is_finished or model is None:
            return self
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        multiprocessing_util.register_after_fork(self, Run._forget_in_fork)
        for sink in self.options.sinks:  # before ours is told of the end: packages tell theirs in reverse order
            self.add_sink(sink)
        atexit.register(self.finish)
        self._collector.on_full = self._hand_over_part
        self._arm_or_disarm()
        return self

    def finish(self) -> None:
        """Writes what is left and takes everything away. May be called again, from any thread."""
        if self._is_finished or os.getpid() != self._pid:
            return
        try:
            self._guard(self._end_last_step)
        finally:
            try:
                self._take_away()
            finally:  # once more, for an interrupt may cut the first short
                self._take_away()
        self._writer.finish()
        self._is_finished = True

    def __enter__(self) -> "Run":
        return self.start()

    def __exit__(self, *error: object) -> None:
        try:
            self.finish()
        finally:  # once more, as above
            self.finish()

    def __repr__(self) -> str:
        counts = self.counts
        state = "finished" if self._is_finished else "recording" if self._is_on else "paused"
        numbers = f"{counts.recorded:,} tensors recorded, {counts.dropped:,} dropped"
        return f"<Run {str(self.folder)!r}, {state}, step {self._clock.step}: {numbers}>"

    # -- what the user tells -------------------------------------------------------------------------------------------

    def log(self, *, step: int | None = None, **scalars: Any) -> None:
        """Records numbers of a step: `run.log(loss=loss, accuracy=0.9)`. Numbers or tensors of one element.

        Unless `step` says which, it is the step that is running, or the one that has just ended if the loop logs after the
        optimizer's step. A tensor on another device is not waited for.
        """
        if step is not None:
            check_count("step", step, 0)
        elif scalars:
            step = self._step_of_log()
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(f"{name} must be a number or a tensor of one element, got {got(value)}.")
                value = quietly(_copied, value)
            elif isinstance(value, bool) or not hasattr(type(value), "__float__"):
                raise TypeError(f"{name} must be a number or a tensor of one element, got {got(value)}.")
            else:
                value = float(value)
            if not self._is_finished and value is not None and step is not None:
                self._scalars.append((name, step, value))
        if len(self._scalars) > _MOST_SCALARS:
            del self._scalars[: len(self._scalars) - _MOST_SCALARS]
            self.problems.add(f"More than {_MOST_SCALARS:,} scalars were logged in one step: only the last are kept")

    def _step_of_log(self) -> int:
        """A loop logs before the optimizer's step or after: in a recorded step one sees whether the model has run yet."""
        if self._collector.is_armed or not self._logs_after_known:
            has_run = self._collector.is_armed and (self._watcher.num_calls > 0 or not self._has_ended_step)
            self._logs_after = not has_run and self._has_ended_step
            self._logs_after_known = True
        return self._clock.step - 1 if self._logs_after else self._clock.step

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Records any tensor and its gradient under a name, in the steps that are recorded. Returns the tensor.

        >>> z = run.watch('latent', encoder(x))
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a text, such as 'latent', got {got(name)}.")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a tensor, got {got(tensor)}.")
        if self._collector.is_armed and not torch.compiler.is_compiling():
            self._guard(quietly, self._watch, name, tensor)
        return tensor

    def _watch(self, name: str, tensor: torch.Tensor) -> None:
        self._collector.note(name, WATCHED, "", tensor)
        self._collector.follow_gradient(name, "", tensor)

    def embed(self, address: str, method: str = "pca", *, basis: str = "aligned", rows: int = 256) -> None:
        """Projects what a module returns to two dimensions, one point for each of the first `rows`, in every recorded step.

        A process of its own does it. basis: 'fixed' keeps the directions of the first step, 'aligned' finds them anew for
        each and turns them so that points move as little as they can. `open_run(...).projections[address]` has the points.
        """
        check_choice("method", method, JOBS)
        check_choice("basis", basis, ("aligned", "fixed"))
        check_count("rows", rows, 2)
        self.capture(address, method, {"basis": basis}, rows)

    def capture(self, address: str, job: str, options: dict[str, Any], rows: int) -> None:
        """Sends the first `rows` of what a module returns to a job of the worker process (see jobs.py)."""
        known = {info.address for info in self._watcher.infos.values()}
        if address not in known:
            raise ValueError(
                f"address must be that of a module of the model, got {got(address)}. {did_you_mean(address, known)}"
            )
        check_choice("job", job, JOBS)
        self._watcher.captured.setdefault(address, []).append((job, options, rows))

    def step(self) -> None:
        """Ends a step, where no optimizer of torch's does. Once it was called, optimizers end no steps any more."""
        if not self._is_finished and os.getpid() == self._pid:
            self._is_manual = True
            self._guard(self._step_by_hand)

    def pause(self) -> None:
        """Records nothing until `resume`. Steps are counted, and scalars kept."""
        self._is_on = False
        self._guard(self._arm_or_disarm)

    def resume(self) -> None:
        """Records again, from the next step on."""
        self._is_on = True

    def listen(self, listener: Callable[[RecordedStep], None]) -> None:
        """Has `listener` called in the writer's thread with each step that is in the file."""
        self._writer.listeners.append(listener)

    def add_sink(self, sink: Sink) -> None:
        """Sends what is recorded from now on to a sink, too: see `torchlens.sinks`. Of several ranks, the first does."""
        if not isinstance(sink, Sink):
            raise TypeError(f"sink must be one of torchlens.sinks, got {got(sink)}.")
        if self.rank != 0 or self._is_finished:
            return
        model = self._model()
        name = type(sink).__name__
        try:
            sink.begin(
                {
                    "name": self.folder.name, "folder": str(self.folder), "model": type(model).__name__,
                    "options": self.options.as_json(),
                }
            )  # fmt: skip
        except Exception as error:
            # A server that is away is no reason not to train.
            self.problems.add_failure(error, f"The sink {name} could not be opened")
            warn_caller(f"The sink {name} could not be opened, and gets nothing: {type(error).__name__}: {error}")
            return
        rows = self._names.rows
        feed = SinkFeed(sink, lambda number: rows[number], self.problems)
        self._writer.listeners.append(feed.tell)
        self._writer.at_end.append(feed.finish)

    # -- what there is to know -----------------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """The step that is running."""
        return self._clock.step

    @property
    def last_step(self) -> int | None:
        """The last step that is in the file: whatever happens to the process, it is there."""
        return self._writer.last_step

    @property
    def counts(self) -> Counts:
        """How many tensors were offered, recorded and dropped."""
        return self._writer.counts

    @property
    def work_counts(self) -> WorkCounts:
        """How many arrays were offered to the worker process, done and dropped."""
        return self._writer.worker.counts

    @property
    def problems(self) -> Problems:
        """What could not be recorded."""
        return self._writer.problems

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self._is_finished

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _is_wanted(self, step: int) -> bool:
        if not self._is_on or self._is_finished or step % self.options.every:
            return False
        limit = self.options.seconds
        if limit is not None and monotonic() - self._start > limit:
            self.problems.add(f"The time limit was reached: nothing is recorded after {limit:g} seconds (seconds=)")
            self._is_on = False
            return False
        return True

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._guard(self._note_before_step, optimizer, _has_closure(args, kwargs))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._guard(self._note_after_step, optimizer, _has_closure(args, kwargs))

    def _note_before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not self._owns(optimizer):
            return
        if not self._is_manual and self._clock.begins_new(optimizer):
            self._end_step()
        if self._records_now():
            self._has_optimizer = True
            quietly(self._parameters.note_before, optimizer, not has_closure)

    def _note_after_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        if not self._owns(optimizer):
            return
        if self._records_now():
            quietly(self._parameters.note_after, optimizer, has_closure)
        if self._is_manual:
            return
        is_over = self._clock.has_stepped(optimizer)
        seen = self._collector.take_all()
        if self._clock.is_late:
            self._clock.is_late = False
            if self._late_step is not None and seen:
                self._offer(self._late_step, seen)
            return
        self._settled += seen
        if is_over:
            self._end_step()

    def _records_now(self) -> bool:
        """Whether what the optimizer that is stepping does is recorded."""
        return self._late_step is not None if self._clock.is_late else self._collector.is_armed

    def _step_by_hand(self) -> None:
        if self._collector.is_armed and not self._has_optimizer:
            quietly(self._parameters.note_after, None)
            quietly(self._parameters.note_before, None)
        self._settled += self._collector.take_all()
        self._end_step()

    def _end_step(self) -> None:
        """The step is over: what was seen of it is handed over, and the next one is recorded or not."""
        step = self._clock.step
        was_armed = self._collector.is_armed
        self._late_step = step if was_armed else None
        self._collector.forget()
        settled, self._settled = self._settled, []
        self._offer(step, settled if was_armed else [])
        self._clock.advance()
        self._has_ended_step, self._has_optimizer = True, False
        if was_armed:
            self._write_graph()
        self._arm_or_disarm()

    def _end_last_step(self) -> None:
        self._is_ending = True
        self._settled += self._collector.take_all()
        settled, self._settled = self._settled, []
        self._offer(self._clock.step, settled)
        self._write_graph()

    def _offer(self, step: int, observations: list[Observation], is_end: bool = True) -> None:
        now = monotonic()
        is_soon = now - self._last_offer < _SCALARS_EVERY and len(self._scalars) < _MANY_SCALARS and not self._is_ending
        captures = self._collector.take_captures()
        if not observations and not captures and (not self._scalars or is_soon):
            return
        self._last_offer = now
        scalars, self._scalars = self._scalars, []
        quietly(_start_copies, observations, scalars)
        if not self._writer.offer(Part(step, observations, scalars, is_end, captures)):
            self._scalars = scalars + self._scalars  # they are small, and wait for the next step

    def _hand_over_part(self) -> None:
        """So much was seen of a step that has not ended (a model that is only evaluated has none) that it does not wait."""
        self._settled += self._collector.take_all()
        settled, self._settled = self._settled, []
        self._offer(self._clock.step, settled, is_end=False)

    # -- being armed ---------------------------------------------------------------------------------------------------

    def _arm_or_disarm(self) -> None:
        if self._is_wanted(self._clock.step):
            self._arm()
        else:
            self._disarm()

    def _arm(self) -> None:
        """From now on this thread's calls of modules are seen."""
        model = self._model()
        if model is None:
            return
        self._watcher.refresh(model)
        self._watcher.num_calls = 0
        self._parameters.refresh(model)
        if self.options.compiled == "eager" and is_compiler_there():
            begin_eager(self)
        hide_from_compiler(True)
        self._collector.is_armed = True
        if self._is_manual or not self._has_ended_step:
            quietly(self._parameters.remember)
        apply_module_patches(self)
        add_watcher(self._watcher)

    def _disarm(self) -> None:
        self._collector.is_armed = False
        self._collector.pending.clear()
        remove_watcher(self._watcher)
        undo_patches(self)
        end_eager(self)
        hide_from_compiler(False)

    def _take_away(self) -> None:
        """Leaves nothing behind in torch. May be called again."""
        for handle in self._handles:
            handle.remove()
        self._disarm()
        self._collector.remove_hooks()
        self._watcher.forget()
        self._parameters.forget()
        atexit.unregister(self.finish)

    def _give_up(self) -> None:
        """The model is gone."""
        if not self._is_finished and os.getpid() == self._pid:
            self._take_away()

    def _forget_in_fork(self) -> None:
        """In a forked process (a DataLoader's worker): nothing is recorded there, and nothing is left."""
        self._is_finished = True
        self._collector.is_armed = False
        self._take_away()
        self._writer.abandon()

    def _guard(self, function: Callable[..., Any], *args: Any) -> None:
        """Does something of ours. If it fails, the training goes on."""
        if os.getpid() != self._pid:
            return
        try:
            function(*args)
        except Exception as error:
            self.problems.add_failure(error, f"Step {self._clock.step} is not complete")

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self._model()
        return model is not None and self._parameters.is_in(optimizer, model)

    # -- the file ------------------------------------------------------------------------------------------------------

    def _session(self, first_step: int) -> dict[str, Any]:
        return {
            "session": self.id, "first_step": first_step, "rank": self.rank, "time": time(), "pid": os.getpid(),
            "host": platform.node(), "options": self.options.as_json(),
        }  # fmt: skip

    def _write_run_file(self, model: torch.nn.Module) -> None:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        write_json_file(
            self.folder / RUN_FILE,
            {
                "format": FORMAT, "run": self.id, "model": type(model).__name__, "time": time(), "versions": versions,
                "options": self.options.as_json(), "world_size": _world_size(),
            },
        )  # fmt: skip

    def _write_graph(self) -> None:
        """As soon as a recorded step has called the model."""
        model, graph = self._model(), self._watcher.graph
        if model is not None and graph is not None and self._watcher.num_calls:
            self._watcher.graph = None
            make = graph.finished(model)
            path = self.folder / GRAPH_FILE
            self._writer.do(lambda: write_json_file(path, make()))


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the optimizer is given a function that computes loss and gradients: they come within its step (Lightning)."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def _copied(value: torch.Tensor) -> Any:
    """A number now where that costs nothing; on another device a copy, to be sent along."""
    return float(value) if value.device.type == "cpu" else value.detach().float().reshape(1).clone()


def _start_copies(observations: list[Observation], scalars: list[tuple[str, int, Any]]) -> None:
    samples = {id(each): each for row in observations for each in (row.sample, row.before) if each is not None}
    to_host(list(samples.values()))
    for place, (name, step, value) in enumerate(scalars):
        if isinstance(value, torch.Tensor):
            scalars[place] = name, step, value.to("cpu", non_blocking=True)


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1
