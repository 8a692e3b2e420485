"""A run that is being recorded: what `torchlens.monitor` returns."""

import atexit
import os
import uuid
import weakref
from collections.abc import Callable
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchlens.capture.compiled import begin_eager, end_eager, is_compiler_there
from torchlens.capture.current import add_watcher, remove_watcher
from torchlens.capture.parts import named_modules
from torchlens.capture.patching import apply_module_patches, undo_patches
from torchlens.capture.session import CaptureOptions
from torchlens.capture.user_code import warn_caller
from torchlens.foreign_names import no_such_name
from torchlens.health.thresholds import THRESHOLDS
from torchlens.history.base_history import BaseHistory
from torchlens.history.log import Log
from torchlens.monitoring.clock import StepClock
from torchlens.monitoring.collector import Collector
from torchlens.monitoring.folder import GRAPH_FILE, RUN_FILE, is_run, write_json_file
from torchlens.monitoring.graph import GraphMaker
from torchlens.monitoring.health import Health
from torchlens.monitoring.options import MonitorOptions
from torchlens.monitoring.parameters import ParameterWatch
from torchlens.monitoring.process import own_rank, run_record, session_record
from torchlens.monitoring.quiet import quietly
from torchlens.monitoring.reader import last_step_of
from torchlens.monitoring.samples import to_host
from torchlens.monitoring.scalars import PendingScalars, scalar_value
from torchlens.monitoring.series import WATCHED, SeriesNames
from torchlens.monitoring.sinks.feed import SinkFeed
from torchlens.monitoring.sinks.sink import Sink
from torchlens.monitoring.statistics import Observation
from torchlens.monitoring.tracking import Track, all_tracks, embed_options, unseen_names, video_options
from torchlens.monitoring.watcher import ModuleWatcher, hide_from_compiler
from torchlens.monitoring.worker import WorkCounts
from torchlens.monitoring.writer import Counts, Part, RecordedStep, Writer
from torchlens.problems import Problems
from torchlens.watch_names import RUN_NAMES, refuse_video_options
from torchlens.wording import check_choice, check_count, got

__all__ = ["Run", "last_run"]

# Scalars of steps that are not recorded otherwise are handed over so often (in seconds), or when there are so many.
_SCALARS_EVERY = 0.2
_MANY_SCALARS = 500
_OTHER_THREAD = (
    "The model was called in one thread and the optimizer stepped in another: of each step, only the calls of the thread "
    "that called first are recorded"
)
# Those that were started, the last one last. Weakly: who drops a run drops it.
_STARTED: "list[weakref.ref[Run]]" = []


def last_run() -> "Run | None":
    """The run that was started last, of those that are not finished."""
    _STARTED[:] = [each for each in _STARTED if (run := each()) is not None and not run.is_finished]
    return _STARTED[-1]() if _STARTED else None


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
        self.rank = own_rank()
        self.id = uuid.uuid4().hex[:12]
        is_resumed = is_run(folder)
        first = options.step if options.step is not None else last_step_of(folder) + 1 if is_resumed else 0
        self._clock = StepClock(first)
        self._first_step = first
        self._names = SeriesNames()
        self._writer = Writer(
            folder,
            self.rank,
            session_record(self.id, self.rank, first, options),
            options,
            self._names,
            Health(self._names, model),
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
        self._scalars = PendingScalars()
        self._handles: list[Any] = []
        self._pid = os.getpid()
        self._is_manual = False  # steps are told by `step()`
        self._has_optimizer = False  # one was seen in this step
        self._has_ended_step = False
        self._logs_after = self._logs_after_known = False
        self._last_offer = 0.0
        self._is_on = True
        self._is_finished = self._is_ending = False
        self._start = monotonic()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def start(self) -> "Run":
        """Begins to record; `torchlens.monitor` has done so."""
        model = self._model()
        if self._handles or self._is_finished or model is None:
            return self
        try:
            self._begin(model)
        except BaseException:  # Ctrl-C among them: nobody has the run yet who could end it
            self.finish()
            raise
        return self

    def _begin(self, model: torch.nn.Module) -> None:
        self._writer.start()
        if self.rank == 0 and not (self.folder / RUN_FILE).exists():
            write_json_file(self.folder / RUN_FILE, run_record(self.id, model, self.options))
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        multiprocessing_util.register_after_fork(self, Run._forget_in_fork)
        for sink in self.options.sinks:  # before ours is told of the end: packages tell theirs in reverse order
            self.add_sink(sink)
        atexit.register(self.finish)
        self._collector.on_full = self._hand_over_part
        _STARTED.append(weakref.ref(self))
        self._arm_or_disarm()

    def finish(self) -> None:
        """Writes what is left and takes everything away. May be called again, from any thread."""
        if self._is_finished or os.getpid() != self._pid:
            return
        try:
            self._guard(self._end_last_step)
            self._guard(self._tell_unseen)
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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'Run' object has no attribute {name!r}")
        own = [each for each in dir(type(self)) if not each.startswith("_")]
        listing = f"There are: {', '.join(own)}."
        raise AttributeError(no_such_name("'Run'", "attribute", name, RUN_NAMES, own, listing), name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RUN_NAMES:  # `run.enabled = False` would do nothing, and say nothing
            raise AttributeError(no_such_name("'Run'", "attribute", name, RUN_NAMES, (), ""), name=name)
        object.__setattr__(self, name, value)

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
            number = scalar_value(name, value)
            if not self._is_finished and number is not None and step is not None:
                self._scalars.append((name, step, number))
        self._scalars.keep_small(self.problems)

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
        self._collector.capture("outputs", name, tensor)
        self._collector.note(name, WATCHED, "", tensor)
        self._collector.follow_gradient(name, "", tensor)

    def embed(
        self, address: str, method: str = "pca", *, basis: str = "aligned", rows: int = 256, every: int = 1,
        seconds: float | None = None, name: str | None = None, **foreign: Any,
    ) -> Track:  # fmt: skip
        """Projects what a module returns, or a watched tensor, to two dimensions: a point for each of the first `rows`.

        >>> run.embed('encoder')                                # principal components
        >>> run.embed('latent', 'tsne', every=100)              # what run.watch('latent', z) is given
        >>> torchlens.open_run('runs/a').projections['encoder']

        Points do not jump from step to step. Of principal components, basis='fixed' keeps the directions of the first step;
        with 'aligned' those of each, turned so that points move as little as they can. 'tsne' begins each step where
        the last one ended. A process of its own does it; `projections` knows it by `name`: the address, if not given.
        """
        refuse_video_options("embed", foreign, "method, basis, rows, every, seconds, name")
        options = embed_options(address, self._addresses(), method, basis, name, all_tracks(self._collector.tracks))
        return self._track("points", options, rows, every, seconds)

    def video(
        self, address: str, path: str | os.PathLike[str], *, what: str = "outputs", show: str = "auto", every: int = 1,
        seconds: float | None = None, fps: int = 10, size: tuple[int, int] = (640, 480), rows: int = 256,
        basis: str = "aligned", **foreign: Any,
    ) -> Track:  # fmt: skip
        """Films what a module returns, or a watched tensor, one picture for each recorded step; or its gradient.

        >>> run.video('layer1', 'layer1.mp4')
        >>> run.video('layer1', 'gradient.mp4', what='gradients')
        >>> run.video('layer1.*', 'videos/{module}.mp4', show='histogram', every=10, seconds=600)
        >>> film = run.video('latent', 'latent.mp4', show='tsne'); film.pause(); film.resume(); film.stop()

        show: 'images' (the channels of the first example, or a matrix), 'histogram', 'pca' or 'tsne' (see `embed`); 'auto'
        takes images where there are two dimensions. every, seconds: how often, and for how long. rows: of each tensor, the
        first so many are filmed. A process of its own paints; the file plays at any time, also if the run is killed.
        The range of colours and scales is that of all pictures so far. A run that is resumed begins another file.
        """
        refuse_video_options("video", foreign, "what, show, every, seconds, fps, size, rows, basis")
        check_choice("what", what, ("outputs", "gradients"))
        if what == "gradients" and what not in self.options.log:
            raise ValueError("what='gradients' films what is recorded: monitor(..., log=) must have 'gradients' in it.")
        is_resumed = self._first_step > 0
        options = video_options(address, path, self._addresses(), show, fps, size, basis, is_resumed)
        return self._track("video", options, rows, every, seconds, what)

    def _track(
        self, job: str, options: dict[str, dict[str, Any]], rows: int, every: int, seconds: float | None,
        what: str = "outputs",
    ) -> Track:  # fmt: skip
        infos = {info.address: info for info in self._watcher.infos.values()}
        for address in options:
            if address in infos and not infos[address].is_wanted:
                raise ValueError(f"address must be that of a module that is recorded (modules=), got {got(address)}.")
        clock = self._clock
        track = Track(job, options, rows, every, seconds, lambda: clock.step)
        if self.rank == 0:  # the files of several would be the same
            for address in options:
                self._collector.tracks[what].setdefault(address, []).append(track)
        return track

    def _addresses(self) -> list[str]:
        return [info.address for info in self._watcher.infos.values()]

    def _tell_unseen(self) -> None:
        for sentence in unseen_names(all_tracks(self._collector.tracks), self._addresses()):
            self.problems.add(sentence)

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
            if self._watcher.thread not in (None, get_ident()) and not self._clock.is_late:
                self.problems.add(_OTHER_THREAD)
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
        scalars, self._scalars = self._scalars, PendingScalars()
        quietly(_start_copies, observations, scalars)
        if not self._writer.offer(Part(step, observations, scalars, is_end, captures)):
            self._scalars[:0] = scalars  # they are small, and wait for the next step

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
        """From now on calls of modules are seen, in whichever thread the next step runs."""
        model = self._model()
        if model is None:
            return
        modules = named_modules(model)
        self._watcher.refresh(modules)
        self._parameters.refresh(modules)
        self._collector.sampler.refresh()
        if self.options.compiled == "eager" and is_compiler_there():
            begin_eager(self)
        hide_from_compiler(True)
        self._collector.is_armed = True
        if self._is_manual or not self._has_ended_step:
            quietly(self._parameters.remember)
        apply_module_patches(self)
        add_watcher(self._watcher, is_everywhere=True)

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


def _start_copies(observations: list[Observation], scalars: list[tuple[str, int, Any]]) -> None:
    samples = {id(each): each for _, sample, before in observations for each in (sample, before) if each is not None}
    to_host(list(samples.values()))
    for place, (name, step, value) in enumerate(scalars):
        if isinstance(value, torch.Tensor):
            scalars[place] = name, step, value.to("cpu", non_blocking=True)
