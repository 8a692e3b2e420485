"""Sends a run that is in its folder to a sink, as if it were being recorded."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchlens._health.finding import RunFinding
from torchlens._monitor.read.views import Scalars
from torchlens._monitor.sinks.feed import record_of
from torchlens._monitor.sinks.sink import Sink
from torchlens._monitor.sinks.step_record import RecordedStep
from torchlens._monitor.store.columns import Step


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
    waiting = [
        (int(step), name, float(value))
        for name, own in scalars.items()
        for step, value in zip(own.steps, own.values, strict=True)
    ]
    waiting.sort(key=lambda each: each[0])
    told = list(findings)
    sink.begin(info)
    try:
        for place, step in enumerate(steps):
            due = _taken(waiting, lambda each, last=step.last: each[0] <= last)
            found = _taken(told, lambda each, last=step.last: each.step <= last)
            recorded = None if place % sink.every else step
            if recorded is not None or due or found:
                sink.write(
                    record_of(
                        RecordedStep(
                            recorded, [(name, at, value) for at, name, value in due], found
                        ),
                        key_of,
                    )
                )
        if waiting or told:
            sink.write(
                record_of(
                    RecordedStep(None, [(name, at, value) for at, name, value in waiting], told),
                    key_of,
                )
            )
    finally:
        sink.close()


def _taken(rows: list[Any], is_due: Callable[..., bool]) -> list[Any]:
    """Takes away from the front what is due."""
    count = next((place for place, each in enumerate(rows) if not is_due(each)), len(rows))
    found = rows[:count]
    del rows[:count]
    return found
