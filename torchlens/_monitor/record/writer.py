"""The thread that turns samples into statistics and writes them, so that the training does not
wait.

The training thread passes its samples to `offer`, which returns at once. If the writer is too far
behind, they are dropped and counted: recorded + dropped = offered.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, time
from typing import Any

from torchlens._health.thresholds import THRESHOLDS
from torchlens._monitor.record.monitor_options import MonitorOptions
from torchlens._monitor.record.run_health import RunHealth
from torchlens._monitor.record.samples import value_of
from torchlens._monitor.record.series import SeriesNames, UnitActivity
from torchlens._monitor.record.statistics import Observation, summarized
from torchlens._monitor.sinks.sink import StepRecord
from torchlens._monitor.store.columns import Columns, Step, merged
from torchlens._monitor.store.lines import ScalarRow, line_of, step_line
from torchlens._monitor.store.rank_files import Counts, RankFiles
from torchlens._text.problems import Problems

# The most that may wait to be written: about 80 MB of samples.
MOST_PARTS = 1_000
MOST_OBSERVATIONS = 20_000
# A loop that is faster than the writer loses what waits if its process is killed: beyond a few
# parts, none may wait longer than this (in seconds).
FEW_PARTS, LONGEST_WAIT = 10, 0.5


@dataclass(slots=True, eq=False)
class StepPart:
    """The observations of a step, or of a part of one. `scalars` are (name, step, value)."""

    step: int
    observations: list[Observation]
    scalars: list[tuple[str, int, Any]] = field(default_factory=list)
    is_end: bool = True  # nothing more of this step will come
    offered_at: float = field(default_factory=monotonic)


class Writer:
    """Writes one session of one rank. All public methods but `offer` may be called from any
    thread.
    """

    def __init__(
        self, folder: Path, rank: int, session: dict[str, Any], options: MonitorOptions,
        names: SeriesNames,
        health: RunHealth | None,
    ) -> None:  # fmt: skip
        self.problems = Problems("the monitor")
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.at_end: list[
            Callable[[], None]
        ] = []  # done after the last step, in the writer's thread
        self.last_step: int | None = None  # the last step that is in the file
        self._names = names
        self._health = health
        self._activity = UnitActivity(names.units, THRESHOLDS["min_values"])
        self._num_names = 0
        self._session = session
        self._files = RankFiles(folder, rank, options.budget, options.every)
        self._queue: SimpleQueue[StepPart | Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # held for the time of an addition
        self._offered = self._recorded = self._dropped = 0
        self._num_told = 0  # of the dropped, in the files
        self._num_waiting_parts = 0
        self._num_waiting = 0
        self._last_wait = 0.0  # of the part that was taken last, in seconds
        self._parts: list[Columns] = []  # of the step that is being put together
        self._part_size = 0
        self._num_problems = 0
        self._thread = threading.Thread(target=self._run, name="torchlens monitor", daemon=True)

    def start(self) -> None:
        """Opens the files and starts the thread. Only then must `finish` be called."""
        self._names.go_on(self._files.open(self._session["first_step"]).series)
        self._num_names = len(self._names.rows)
        self._files.tell(line_of("session", self._session))
        self._thread.start()

    @property
    def counts(self) -> Counts:
        """How many of the offered tensors were recorded and dropped."""
        with self._lock:
            return Counts(self._offered, self._recorded, self._dropped)

    # -- for the training thread -------------------------------------------------------------------

    def offer(self, part: StepPart) -> bool:
        """Queues observations; False if they were dropped, because too many wait."""
        size = len(part.observations)
        with self._lock:
            self._offered += size
            is_full = (
                self._num_waiting_parts >= MOST_PARTS
                or self._num_waiting + size > MOST_OBSERVATIONS
                or (self._num_waiting_parts > FEW_PARTS and self._last_wait > LONGEST_WAIT)
            )
            if is_full and (size or self._num_waiting_parts >= 2 * MOST_PARTS):
                self._dropped += size
                return False
            self._num_waiting_parts += 1
            self._num_waiting += size
        self._queue.put(part)
        return True

    def do(self, task: Callable[[], None]) -> None:
        """Runs a task in the writer's thread, after what was queued before."""
        self._queue.put(task)

    def finish(self) -> None:
        """Writes what is queued, and ends the thread. May be called again."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, StepPart):
                    self._take(item)
                else:
                    item()
                self._write_problems()
            except (
                Exception
            ) as error:  # the next step is tried again; the loss is counted and reported
                self.problems.add_failure(error, "A step could not be written")
            self._keep_budget()
            del item
        try:
            if self._part_size:
                self._write_step(self._open_step, [])
            for task in self.at_end:
                task()
            self._write_problems()
            dropped = self.counts.dropped - self._num_told
            end = {"session": self._session["session"], "dropped": dropped}
            self._files.write(line_of("end", end))
            self._keep_budget()
        except Exception as error:
            self.problems.add_failure(error, "The end could not be written")

    _open_step = 0

    def _keep_budget(self) -> None:
        try:
            if not self._files.keep_budget():
                self.problems.add(
                    "The files take more than their budget (budget=), and what is left cannot be "
                    "merged"
                )
        except OSError as error:  # what was recorded is as it was
            self.problems.add_failure(error, "The files take more than their budget (budget=)")

    def _take(self, part: StepPart) -> None:
        size = len(part.observations)
        self._last_wait = monotonic() - part.offered_at
        try:
            if size:
                self._parts.append(
                    summarized(part.observations, self._names.limits, self._activity)
                )
                self._part_size += size
                self._open_step = part.step
            part.observations = []
            scalars = [(name, step, float(value_of(value))) for name, step, value in part.scalars]
            if part.is_end and self._part_size:
                self._write_step(part.step, scalars)
            elif scalars:
                self._files.write(_scalars_line(scalars))
                number = max(step for _, step, _ in scalars)
                self._tell(StepRecord(number, time(), scalars))
        except BaseException:
            with self._lock:
                lost = self._part_size or size
                self._dropped += lost
            self._parts, self._part_size = [], 0
            raise
        finally:
            with self._lock:
                self._num_waiting_parts -= 1
                self._num_waiting -= size

    def _write_step(self, number: int, scalars: list[tuple[str, int, float]]) -> None:
        columns, size = merged(self._parts), self._part_size
        dropped = self.counts.dropped
        step = Step(number, number, 1, time(), dropped - self._num_told, columns)
        found = [] if self._health is None else self._health.after_step(step)
        names = list(enumerate(self._names.rows[self._num_names :], self._num_names))
        lines = [line_of("series", [series, *key]) for series, key in names]
        lines += [line_of("finding", finding.as_json()) for finding in found]
        if lines:
            self._files.tell(b"".join(lines))
        self._num_names += len(names)
        self._files.write((_scalars_line(scalars) if scalars else b"") + step_line(step))
        with self._lock:
            self._recorded += size
        self._num_told = dropped
        self._parts, self._part_size = [], 0
        self.last_step = number
        self._tell(StepRecord(number, step.time, scalars, found, columns, self._names.rows))

    def _tell(self, record: StepRecord) -> None:
        for listener in list(self.listeners):
            try:
                listener(record)
            except Exception as error:
                self.listeners.remove(listener)
                self.problems.add_failure(
                    error, f"{getattr(listener, '__qualname__', listener)} listens no longer"
                )

    def _write_problems(self) -> None:
        for text in self.problems[self._num_problems :]:
            self._num_problems += 1
            self._files.tell(line_of("problem", text))


def _scalars_line(scalars: list[tuple[str, int, float]]) -> bytes:
    rows = [ScalarRow(name, step, step, value, value, value, 1) for name, step, value in scalars]
    return line_of("scalars", rows)
