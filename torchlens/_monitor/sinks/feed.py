"""Sends a run to a sink: while it is recorded, in a thread of its own, or later from its folder."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from time import time
from typing import Any

from torchlens._health.finding import RunFinding
from torchlens._monitor.read.views import Scalars
from torchlens._monitor.sinks.sink import RecordedStep, Sink, StepRecord, step_records
from torchlens._monitor.store.columns import Step
from torchlens._text.problems import Problems

# The steps that may wait. One of a large model takes some hundred kilobytes.
MOST_WAITING = 64
# Seconds that the end of a run waits for a sink.
_PATIENCE = 120.0


class SinkFeed:
    """Hands recorded steps to one sink. A slow server holds up neither training nor the files.
    `key_of` gives the module, kind and name of a series by its number.
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


def send(
    sink: Sink,
    info: Mapping[str, Any],
    steps: Sequence[Step],
    key_of: Callable[[int], Any],
    scalars: Mapping[str, Scalars],
    findings: Sequence[RunFinding],
) -> None:
    """Opens the sink, sends all of it in the order of steps, and closes it. What fails is
    raised.
    """
    ends = [step.last for step in steps]
    batches = [
        RecordedStep(None if place % sink.every else step, [], [])
        for place, step in enumerate(steps)
    ]
    batches.append(RecordedStep(None, [], []))  # what came after the last step
    for name, own in scalars.items():
        for step, value in zip(own.steps.tolist(), own.values.tolist(), strict=True):
            batches[bisect_left(ends, step)].scalars.append((name, step, value))
    for finding in findings:
        batches[bisect_left(ends, finding.step)].findings.append(finding)
    sink.begin(info)
    try:
        for batch in batches:
            if batch.step is not None or batch.scalars or batch.findings:
                sink.write(record_of(batch, key_of))
    finally:
        sink.close()
