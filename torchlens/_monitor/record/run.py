"""A run that is being recorded: what `torchlens.monitor` returns."""

import atexit
import os
import platform
import uuid
import weakref
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from time import time
from typing import Any, Literal

import numpy as np
import torch

from torchlens._capture.model_parts import named_modules
from torchlens._compat.monitor_names import RUN_NAMES, refuse_video_options
from torchlens._compat.torchlens_names import no_such_name
from torchlens._health.thresholds import THRESHOLDS
from torchlens._monitor.films.film_worker import FilmWorker, WorkCounts
from torchlens._monitor.films.tracks import (
    Basis,
    Films,
    Method,
    Show,
    Track,
    embed_options,
    video_options,
)
from torchlens._monitor.read.reader import last_step_of
from torchlens._monitor.record.collector import Collector
from torchlens._monitor.record.graph import GraphMaker
from torchlens._monitor.record.monitor_options import MonitorOptions
from torchlens._monitor.record.run_health import RunHealth
from torchlens._monitor.record.series import WATCHED, SeriesNames
from torchlens._monitor.record.stepping import Steps
from torchlens._monitor.record.watcher import ModuleWatcher
from torchlens._monitor.record.writer import Writer
from torchlens._monitor.sinks.sink import Sink, SinkFeed
from torchlens._monitor.store.folder import FORMAT, GRAPH_FILE, RUN_FILE, is_run, write_json_file
from torchlens._monitor.store.rank_files import Counts
from torchlens._recording.origin import versions_now
from torchlens._recording.unseen import call_unseen
from torchlens._recording.user_code import warn_caller
from torchlens._text.error_wording import check_choice, check_count, got
from torchlens._text.problems import Problems

# Those that were started, the last one last. Weakly: who drops a run drops it.
_STARTED: "list[weakref.ref[Run]]" = []


def last_run() -> "Run | None":
    """The unfinished run that was started last."""
    _STARTED[:] = [each for each in _STARTED if (run := each()) is not None and not run.is_finished]
    return _STARTED[-1]() if _STARTED else None


def _finish_earlier(folder: Path) -> None:
    """Finishes the unfinished runs of this process in a folder: a cell of a notebook that is run
    again goes on after what it has recorded.
    """
    for each in list(_STARTED):
        run = each()
        if run is not None and run.folder.resolve() == folder.resolve():
            run.finish()


class Run:
    """Records what the modules of a model compute over a training run, to a folder.

    >>> run = torchlens.monitor(model, 'runs/a', every=10)
    >>> ...                                        # the training loop, unchanged
    >>> run.log(loss=loss)
    >>> run.finish()

    If recording fails, training continues: `problems` says what is missing, and `counts` how much
    was dropped.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        folder: Path,
        options: MonitorOptions,
    ) -> None:
        missing = options.check_modules([address for address, _ in named_modules(model)])
        _finish_earlier(folder)
        self.folder = folder
        self.options = options
        self.rank = _own_rank()
        self.id = uuid.uuid4().hex[:12]
        is_resumed = is_run(folder)
        first = (
            options.step
            if options.step is not None
            else last_step_of(folder) + 1
            if is_resumed
            else 0
        )
        self._first_step = first
        self._names = SeriesNames()
        self._writer = Writer(
            folder,
            self.rank,
            _session_record(self.id, self.rank, first, options),
            options,
            self._names,
            RunHealth(self._names, model),
        )
        for each in missing:
            self.problems.add(f"modules: no module has an address like {each!r}")
        self._collector = Collector(self._names, self.problems)
        self._watched_names: set[str] = set()
        wants_graph = self.rank == 0 and not (folder / GRAPH_FILE).exists()
        graph = (
            GraphMaker(model, options.graph == "operations", self.problems) if wants_graph else None
        )
        self._watcher = ModuleWatcher(
            model, options, self._collector, THRESHOLDS["saturation_margin"], graph
        )
        self._steps = Steps(
            model, folder, options, first, self._collector, self._watcher, self._writer
        )
        self._steps.when_gone = self._take_away

    # -- beginning and end -------------------------------------------------------------------------

    def start(self) -> "Run":
        """Starts recording; `torchlens.monitor` has already done so."""
        model = self._steps.model()
        if self._steps.has_begun or self.is_finished or model is None:
            return self
        try:
            self._begin(model)
            return self
        except BaseException:  # even Ctrl-C: the caller has no run yet that could be finished
            self.finish()
            raise

    def _begin(self, model: torch.nn.Module) -> None:
        self._writer.start()
        if self.rank == 0 and not (self.folder / RUN_FILE).exists():
            write_json_file(self.folder / RUN_FILE, _run_record(self.id, model, self.options))
        self._steps.follow_optimizers()
        multiprocessing_util.register_after_fork(self, Run._forget_in_fork)
        for sink in (
            self.options.sinks
        ):  # before ours is told of the end: packages tell theirs in reverse order
            self.add_sink(sink)
        atexit.register(self.finish)
        _STARTED.append(weakref.ref(self))
        self._steps.begin()

    def finish(self) -> None:
        """Writes the rest and removes everything that was added. May be called again, from any
        thread.
        """
        steps = self._steps
        if self.is_finished or os.getpid() != steps.pid:
            return
        try:
            steps.guard(steps.end_last)
            steps.guard(self._tell_unseen)
        finally:
            try:
                self._take_away()
            finally:  # once more, for an interrupt may cut the first short
                self._take_away()
        if self._films is not None:
            self._films.worker.finish()
        self._writer.finish()
        steps.is_finished = True

    def _take_away(self) -> None:
        """Leaves nothing behind. May be called again."""
        self._steps.take_away()
        atexit.unregister(self.finish)

    def _forget_in_fork(self) -> None:
        """In a forked process (a DataLoader's worker): nothing is recorded there, and nothing is
        left.
        """
        self._steps.is_finished = True
        self._collector.is_armed = False
        self._take_away()
        if self._films is not None:
            self._films.worker.abandon()

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
        listing = f"Available: {', '.join(own)}."
        raise AttributeError(
            no_such_name("'Run'", "attribute", name, RUN_NAMES, own, listing), name=name
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RUN_NAMES:  # `run.enabled = False` would do nothing, and say nothing
            raise AttributeError(
                no_such_name("'Run'", "attribute", name, RUN_NAMES, (), ""), name=name
            )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        counts = self.counts
        state = "finished" if self.is_finished else "recording" if self._steps.is_on else "paused"
        numbers = f"{counts.recorded:,} tensors recorded, {counts.dropped:,} dropped"
        if self.work_counts.dropped:
            numbers += (
                f"; {self.work_counts.dropped:,} of {self.work_counts.offered:,} pictures or "
                "projections dropped"
            )
        return f"<Run {str(self.folder)!r}, {state}, step {self._steps.clock.step}: {numbers}>"

    # -- calls by the user -------------------------------------------------------------------------

    def log(self, *, step: int | None = None, **scalars: Any) -> None:
        """Records numbers, or tensors of one element, for a step: `run.log(loss=loss,
        accuracy=0.9)`.

        Without `step`, they belong to the running step, or to the one that has just ended if the
        loop logs after the optimizer's step. Recording does not wait for a tensor on another
        device.
        """
        if step is not None:
            check_count("step", step, 0)
        for name, value in scalars.items():
            number = _scalar_value(name, value)
            if not self.is_finished and number is not None:
                self._steps.add_scalar(name, number, step)

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Records any tensor and its gradient under a name, in recorded steps, and returns the
        tensor.

        >>> z = run.watch('latent', encoder(x))

        The name must not be that of a module: what modules return is recorded anyway.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a text, such as 'latent', got {got(name)}.")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a tensor, got {got(tensor)}.")
        if self._collector.is_armed and not torch.compiler.is_compiling():
            if name not in self._watched_names:
                if name in self._addresses():
                    raise ValueError(
                        "name must not be the address of a module, whose output and gradient are "
                        f"recorded as {name!r} anyway. Say another, such as {name + ' watched'!r}."
                    )
                self._watched_names.add(name)
            self._steps.guard(call_unseen, self._watch, name, tensor)
        return tensor

    def _watch(self, name: str, tensor: torch.Tensor) -> None:
        films = self._films
        if films is not None:
            films.capture(films.outputs, name, tensor)
        self._collector.note(name, WATCHED, "", tensor)
        self._collector.follow_gradient(name, "", tensor)

    def embed(
        self, address: str, method: Method = "pca", *, basis: Basis = "aligned", rows: int = 256,
        every: int = 1,
        seconds: float | None = None, name: str | None = None, **foreign: Any,
    ) -> Track:  # fmt: skip
        """Projects the output of a module, or a watched tensor, to two dimensions: a point for each
        of the first `rows` rows.

        >>> run.embed('encoder')                                # principal components
        >>> run.embed('latent', 'tsne', every=100)  # what run.watch('latent', z) is given
        >>> torchlens.open_run('runs/a').projections['encoder']

        Points do not jump from step to step. For principal components, basis='fixed' keeps the
        directions of the first step; 'aligned' computes them in each step and rotates them so that
        points move as little as possible. 'tsne' starts each step from its previous result. A
        separate process does the work. `name` is the key in `projections`; by default, it is the
        address.
        """
        refuse_video_options("embed", foreign, "method, basis, rows, every, seconds, name")
        tracks = () if self._films is None else self._films.tracks
        options = embed_options(address, self._addresses(), method, basis, name, tracks)
        return self._track("points", options, rows, every, seconds)

    def video(
        self, address: str, path: str | os.PathLike[str], *, what: Literal["outputs",
        "gradients"] = "outputs",
        show: Show = "auto", every: int = 1, seconds: float | None = None, fps: int = 10,
        size: tuple[int, int] = (640, 480), rows: int = 256, basis: Basis = "aligned",
        **foreign: Any,
    ) -> Track:  # fmt: skip
        """Films the output of a module, its gradient, or a watched tensor: one picture for each
        recorded step.

        >>> run.video('layer1', 'layer1.mp4')
        >>> run.video('layer1', 'gradient.mp4', what='gradients')
        >>> run.video('layer1.*', 'videos/{module}.mp4', show='histogram', every=10, seconds=600)
        >>> film = run.video('latent', 'latent.mp4', show='tsne')
        >>> film.pause(); film.resume(); film.stop()

        show: 'images' (the channels of the first example, or a matrix), 'histogram', 'pca' or
        'tsne' (see `embed`); 'auto' chooses images if there are two dimensions. every, seconds: how
        often, and for how long. rows: how many rows of each tensor to film. A separate process
        draws the pictures; the file plays at any time, even if the run is killed. Colours and
        scales take all pictures so far into account. A resumed run starts another file.
        """
        refuse_video_options("video", foreign, "what, show, every, seconds, fps, size, rows, basis")
        check_choice("what", what, ("outputs", "gradients"))
        if what == "gradients" and what not in self.options.log:
            raise ValueError(
                "what='gradients' films recorded gradients, so monitor(..., log=) must include "
                "'gradients'."
            )
        is_resumed = self._first_step > 0
        options = video_options(
            address, path, self._addresses(), show, fps, size, basis, is_resumed
        )
        return self._track("video", options, rows, every, seconds, what)

    def _track(
        self, job: str, options: dict[str, dict[str, Any]], rows: int, every: int,
        seconds: float | None,
        what: Literal["outputs", "gradients"] = "outputs",
    ) -> Track:  # fmt: skip
        infos = {info.address: info for info in self._watcher.infos.values()}
        for address in options:
            if address in infos and not infos[address].is_wanted:
                raise ValueError(
                    "address must be that of a module that is recorded (modules=), got "
                    f"{got(address)}."
                )
        track = Track(job, options, rows, every, seconds)
        if self.rank == 0:  # the files of several would be the same
            films = self._films
            if films is None:
                clock, worker = self._steps.clock, FilmWorker(self.folder, self.problems)
                films = self._collector.films = Films(worker, lambda: clock.step)
            films.add(track, what)
        return track

    @property
    def _films(self) -> Films | None:
        return self._collector.films

    def _addresses(self) -> list[str]:
        return [info.address for info in self._watcher.infos.values()]

    def _tell_unseen(self) -> None:
        if self._films is not None:
            for sentence in self._films.unseen(self._addresses()):
                self.problems.add(sentence)

    def step(self) -> None:
        """Ends a step, for loops without a torch optimizer. Once it has been called, optimizers no
        longer end steps.
        """
        self._steps.end_by_hand()

    def pause(self) -> None:
        """Records nothing until `resume`. Steps are counted, and scalars kept."""
        self._steps.is_on = False
        self._steps.guard(self._steps.arm_or_disarm)

    def resume(self) -> None:
        """Records again, from the next step on."""
        self._steps.is_on = True

    def add_sink(self, sink: Sink) -> None:
        """Sends what is recorded from now on to a sink, too: see `torchlens.sinks`. Of several
        ranks, the first sends.
        """
        if not isinstance(sink, Sink):
            raise TypeError(f"sink must be one of torchlens.sinks, got {got(sink)}.")
        if self.rank != 0 or self.is_finished:
            return
        model = self._steps.model()
        name = type(sink).__name__
        try:
            sink.begin(
                {
                    "name": self.folder.name, "folder": str(self.folder),
                    "model": type(model).__name__,
                    "options": self.options.as_json(),
                }
            )  # fmt: skip
        except Exception as error:
            # A server that is away is no reason not to train.
            self.problems.add_failure(error, f"The sink {name} could not be opened")
            warn_caller(
                f"The sink {name} could not be opened, and gets nothing: {type(error).__name__}: "
                f"{error}"
            )
            return
        feed = SinkFeed(sink, self.problems)
        self._writer.listeners.append(feed.tell)
        self._writer.at_end.append(feed.finish)

    # -- properties --------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """The step that is running."""
        return self._steps.clock.step

    @property
    def num_steps_made(self) -> int:
        """How many steps were made, those before a checkpoint included; optimizers may still have
        turns in the last.
        """
        return self._steps.clock.num_made

    @property
    def last_step(self) -> int | None:
        """The last step in the file, which stays there whatever happens to the process."""
        return self._writer.last_step

    @property
    def counts(self) -> Counts:
        """How many tensors were offered, recorded and dropped."""
        return self._writer.counts

    @property
    def work_counts(self) -> WorkCounts:
        """How many arrays were offered to the worker process, done and dropped."""
        return WorkCounts() if self._films is None else self._films.worker.counts

    @property
    def problems(self) -> Problems:
        """What could not be recorded."""
        return self._writer.problems

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended."""
        return self._steps.is_finished


# -- numbers that the user logs --------------------------------------------------------------------


def _scalar_value(name: str, value: Any) -> Any:
    """A number, or a copy of a tensor on another device; None if a tensor has no value (inside a
    transform).
    """
    expected = f"{name} must be a number or a tensor of one real element, got"
    if isinstance(value, torch.Tensor):
        if (wrong := _why_no_number(value)) is not None:
            raise ValueError(f"{expected} {wrong}.")
        return call_unseen(_copied, value)
    if isinstance(value, bool) or not hasattr(type(value), "__float__") or np.iscomplexobj(value):
        raise TypeError(f"{expected} {got(value)}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} must be a number that fits in a float, at most 1.8e308, got a larger one."
        ) from None
    except (TypeError, ValueError):  # NumPy's arrays of several elements
        raise TypeError(f"{expected} {got(value)}.") from None


def _why_no_number(value: torch.Tensor) -> str | None:
    for kind, is_so in (("complex", value.is_complex()), ("meta", value.is_meta)):
        if is_so:
            return got(value).replace("a ", f"a {kind} ", 1)
    return None if value.numel() == 1 else got(value)


def _copied(value: torch.Tensor) -> Any:
    """The number, if the tensor is on the CPU; otherwise a copy on its device, to be read later."""
    return float(value) if value.device.type == "cpu" else value.detach().float().reshape(1).clone()


# -- descriptions of the process and the run -------------------------------------------------------


def _own_rank() -> int:
    """Which of the processes that train together this is."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def _session_record(
    session: str, rank: int, first_step: int, options: MonitorOptions
) -> dict[str, Any]:
    """The record of the session in the files."""
    return {
        "session": session, "first_step": first_step, "rank": rank, "time": time(),
        "pid": os.getpid(),
        "host": platform.node(), "options": options.as_json(),
    }  # fmt: skip


def _run_record(run: str, model: torch.nn.Module, options: MonitorOptions) -> dict[str, Any]:
    """The content of run.json."""
    return {
        "format": FORMAT, "run": run, "model": type(model).__name__, "time": time(),
        "versions": versions_now(), "options": options.as_json(),
    }  # fmt: skip
