"""The thread that turns samples into statistics and writes them: whatever the training does not
have to wait for.

The training thread hands over what it has seen (`offer`) and never waits. If the writer is too far
behind, what is offered is refused and counted: recorded + dropped = offered.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import time
from typing import Any

from torchlens._health.finding import RunFinding
from torchlens._health.thresholds import THRESHOLDS
from torchlens._monitor.read.health import RunHealth
from torchlens._monitor.read.statistics import Observation, summarized
from torchlens._monitor.record.options import MonitorOptions
from torchlens._monitor.record.samples import value_of
from torchlens._monitor.record.series import SeriesNames
from torchlens._monitor.record.units import UnitActivity
from torchlens._monitor.store.columns import Columns, merged
from torchlens._monitor.store.frames import Kind, Step, frame_bytes, json_frame, pack_step
from torchlens._monitor.store.segments import SegmentWriter
from torchlens._text.problems import Problems

# So much may wait to be written: some 80 MB of samples.
MOST_PARTS = 1_000
MOST_OBSERVATIONS = 20_000


@dataclass(frozen=True, slots=True)
class Counts:
    """How many tensors were looked at: recorded + dropped + pending = offered, and nothing is
    pending after `finish`.
    """

    offered: int
    recorded: int
    dropped: int

    @property
    def pending(self) -> int:
        """What waits to be written."""
        return self.offered - self.recorded - self.dropped


@dataclass(slots=True, eq=False)
class Part:
    """What was seen of a step, or of a part of one. `scalars` are (name, step, value)."""

    step: int
    observations: list[Observation]
    scalars: list[tuple[str, int, Any]] = field(default_factory=list)
    is_end: bool = True  # nothing more of this step will come


@dataclass(slots=True, eq=False)
class RecordedStep:
    """What those who listen to a run are told, in the writer's thread, once it is in the file."""

    step: Step | None  # None if only scalars were logged
    scalars: list[tuple[str, int, float]]
    findings: list[RunFinding]


class Writer:
    """Writes one session of one rank. All that is public but `offer` may be called from any
    thread.
    """

    def __init__(
        self, folder: Path, rank: int, session: dict[str, Any], options: MonitorOptions,
        names: SeriesNames,
        health: RunHealth | None,
    ) -> None:  # fmt: skip
        self.problems = Problems("the monitor")
        self.listeners: list[Callable[[RecordedStep], None]] = []
        self.at_end: list[
            Callable[[], None]
        ] = []  # done after the last step, in the writer's thread
        self.last_step: int | None = None  # the last step that is in the file
        self._names = names
        self._health = health
        self._activity = UnitActivity(names.units, THRESHOLDS["min_values"])
        self._num_names = 0
        self._session = session
        self._segments = SegmentWriter(
            folder, rank, session["session"], options.budget, options.every, names.as_json
        )
        self._queue: SimpleQueue[Part | Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()  # held for the time of an addition
        self._offered = self._recorded = self._dropped = 0
        self._num_waiting_parts = 0
        self._num_waiting = 0
        self._parts: list[Columns] = []  # of the step that is being put together
        self._part_size = 0
        self._num_problems = 0
        self._thread = threading.Thread(target=self._run, name="torchlens monitor", daemon=True)

    def start(self) -> None:
        """Begins the file and the thread: before, there is nothing that must be ended."""
        self._segments.open()
        self._segments.write(json_frame(Kind.SESSION, self._session))
        self._thread.start()

    @property
    def counts(self) -> Counts:
        """What has become of everything that was offered."""
        with self._lock:
            return Counts(self._offered, self._recorded, self._dropped)

    # -- for the training thread
    # ---------------------------------------------------------------------------------------

    def offer(self, part: Part) -> bool:
        """Hands over what was seen; False if it is refused, and counted as dropped."""
        size = len(part.observations)
        with self._lock:
            self._offered += size
            is_full = (
                self._num_waiting_parts >= MOST_PARTS
                or self._num_waiting + size > MOST_OBSERVATIONS
            )
            if is_full and (size or self._num_waiting_parts >= 2 * MOST_PARTS):
                self._dropped += size
                if size:
                    self._queue.put(lambda: self._tell_dropped(part.step, size))
                return False
            self._num_waiting_parts += 1
            self._num_waiting += size
        self._queue.put(part)
        return True

    def do(self, task: Callable[[], None]) -> None:
        """Has something done in the writer's thread, in turn."""
        self._queue.put(task)

    def finish(self) -> None:
        """Writes what waits, and ends. May be called again."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()
        self._segments.close()

    def abandon(self) -> None:
        """In a forked process, which has the file but not the thread."""
        self._segments.close()

    # -- the thread
    # ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, Part):
                    self._take(item)
                else:
                    item()
                self._write_problems()
            except (
                Exception
            ) as error:  # the next step may do better; what is lost is counted and told
                self.problems.add_failure(error, "A step could not be written")
            self._keep_budget()
            del item
        try:
            if self._part_size:
                self._write_step(self._open_step, [])
            for task in self.at_end:
                task()
            counts = self.counts
            self._write_problems()
            end = {
                "offered": counts.offered,
                "recorded": counts.recorded,
                "dropped": counts.dropped,
                "time": time(),
            }
            self._segments.write(json_frame(Kind.END, end))
            self._keep_budget()
        except Exception as error:
            self.problems.add_failure(error, "The end could not be written")

    _open_step = 0

    def _keep_budget(self) -> None:
        try:
            if not self._segments.keep_budget():
                self.problems.add(
                    "The files take more than their budget (budget=), and what is left cannot be "
                    "merged"
                )
        except OSError as error:  # what was recorded is as it was
            self.problems.add_failure(error, "The files take more than their budget (budget=)")

    def _take(self, part: Part) -> None:
        size = len(part.observations)
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
                self._segments.write(_scalars_frame(scalars))
                self._tell(RecordedStep(None, scalars, []))
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
        with self._lock:
            recorded, dropped = self._recorded + size, self._dropped
        step = Step(number, number, 1, time(), recorded + dropped, dropped, columns)
        found = [] if self._health is None else self._health.look(step)
        rows = self._names.as_json(self._num_names)
        data = json_frame(Kind.NAMES, rows) if rows else b""
        data += _scalars_frame(scalars) if scalars else b""
        data += b"".join(json_frame(Kind.FINDING, finding.as_json()) for finding in found)
        self._segments.write(data + frame_bytes(Kind.STEP, pack_step(step)))
        self._num_names += len(rows)
        with self._lock:
            self._recorded += size
        self._parts, self._part_size = [], 0
        self.last_step = number
        self._tell(RecordedStep(step, scalars, found))

    def _tell(self, recorded: RecordedStep) -> None:
        for listener in list(self.listeners):
            try:
                listener(recorded)
            except Exception as error:
                self.listeners.remove(listener)
                self.problems.add_failure(
                    error, f"{getattr(listener, '__qualname__', listener)} listens no longer"
                )

    def _tell_dropped(self, step: int, size: int) -> None:
        self._segments.write(json_frame(Kind.DROPPED, {"step": step, "observations": size}))

    def _write_problems(self) -> None:
        for text in self.problems[self._num_problems :]:
            self._num_problems += 1
            self._segments.write(json_frame(Kind.PROBLEM, {"text": text, "step": self.last_step}))


def _scalars_frame(scalars: list[tuple[str, int, float]]) -> bytes:
    rows = [[name, step, value, value, value, 1] for name, step, value in scalars]
    return json_frame(Kind.SCALARS, rows)
