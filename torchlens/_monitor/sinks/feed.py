"""Feeds a sink, in a thread of its own: a server that does not answer holds up neither training nor
the run's folder.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import time
from typing import Any

from torchlens._monitor.sinks.sink import Sink
from torchlens._monitor.sinks.step_record import RecordedStep, StepRecord, step_records
from torchlens._text.problems import Problems

# So many steps may wait; a step of a large model is some hundred kilobytes.
MOST_WAITING = 64
# For so long (in seconds) the end of a run waits for a sink.
_PATIENCE = 120.0


class SinkFeed:
    """Hands recorded steps to one sink. `key_of` tells module, kind and name of a series by its
    number.
    """

    def __init__(self, sink: Sink, key_of: Callable[[int], Any], problems: Problems) -> None:
        self._sink = sink
        self._key_of = key_of
        self._problems = problems
        self._queue: SimpleQueue[RecordedStep | None] = SimpleQueue()
        self._num_recorded = self._num_missed = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="torchlens sink", daemon=True)
        self._thread.start()

    def tell(self, recorded: RecordedStep) -> None:
        """Takes a step, unless too many wait. Never blocks."""
        if self._has_failed:
            return
        if recorded.step is not None:
            self._num_recorded += 1
            if (self._num_recorded - 1) % self._sink.every:
                recorded = RecordedStep(None, recorded.scalars, recorded.findings)
        if self._queue.qsize() >= MOST_WAITING:
            self._num_missed += 1
            return
        if recorded.step is not None or recorded.scalars or recorded.findings:
            self._queue.put(recorded)

    def finish(self) -> None:
        """Waits until all is sent and the sink is closed, within reason."""
        self._queue.put(None)
        self._thread.join(_PATIENCE)
        name = type(self._sink).__name__
        if self._thread.is_alive():
            self._problems.add(
                f"{name} did not finish within {_PATIENCE:g} seconds: what it was sent may be "
                "incomplete"
            )
        if self._num_missed:
            self._problems.add(
                f"{name} was too slow: {self._num_missed:,} recorded steps were not sent to it "
                "(every=)"
            )

    def _run(self) -> None:
        try:
            while (recorded := self._queue.get()) is not None:
                self._sink.write(record_of(recorded, self._key_of))
        except Exception as error:
            self._fail(error, "no longer gets what is recorded")
        try:
            self._sink.close()
        except Exception as error:
            self._fail(error, "could not be closed")

    def _fail(self, error: Exception, what: str) -> None:
        self._has_failed = True
        self._problems.add_failure(error, f"The sink {type(self._sink).__name__} {what}")


def record_of(recorded: RecordedStep, key_of: Callable[[int], Any]) -> StepRecord:
    """What a sink is given of a step."""
    step = recorded.step
    if step is None:
        number = max((each for _, each, _ in recorded.scalars), default=0)
        return StepRecord(number, time(), [], recorded.scalars, recorded.findings)
    return StepRecord(
        step.last, step.time, list(step_records(step, key_of)), recorded.scalars, recorded.findings
    )
