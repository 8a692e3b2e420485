"""A profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: what ran when.

Unlike the tables, a timeline shows time as it passed, with what measuring itself took.
"""

import os
from typing import Any

from torchlens._profile.records import CallRecord, Measurements
from torchlens._text.json_text import write_json

_PROCESS = 1
# The tracks, from the top. Backward passes of modules have one for each depth, as they need not lie
# inside each other.
_STEPS, _MODULES, _OPERATIONS, _OUTSIDE, _BACKWARD = range(5)
_CATEGORIES = {_STEPS: "step", _MODULES: "forward", _OPERATIONS: "operation", _OUTSIDE: "outside"}
_NAMES = {
    _STEPS: "steps",
    _MODULES: "modules, forward",
    _OPERATIONS: "operations",
    _OUTSIDE: "outside the model",
}
# Times are multiples of this, which a float of microseconds holds exactly: a viewer that cuts off
# fractions still finds what lies inside what.
_TICK_NS = 125


def to_chrome_trace(measurements: Measurements, path: str | os.PathLike[str] | None) -> str | None:
    """The trace as JSON text, or, with a path, in that file."""
    data = {"traceEvents": trace_events(measurements), "displayTimeUnit": "ms"}
    return write_json(data, path, None)


def trace_events(measurements: Measurements) -> list[dict[str, Any]]:
    """Complete events (`ph: X`), times in microseconds from the beginning of the profile."""
    events: list[dict[str, Any]] = []
    for step in measurements.steps:
        arguments = {"phase": step.phase, "gradients": step.has_grad, "warm-up": step.is_warmup}
        events.append(_event(_STEPS, f"step {step.number}", step.start_ns, step.end_ns, arguments))
        events += [
            _event(_OUTSIDE, kind, start, end, {"step": step.number})
            for kind, start, end in step.outside_spans
        ]
    for call in measurements.calls:
        name = call.address or measurements.model_name
        if call.end_ns > call.start_ns:
            events.append(_event(_MODULES, name, call.start_ns, call.end_ns, _arguments(call)))
        for start, end in call.backward_spans:
            events.append(
                _event(
                    _BACKWARD + call.depth,
                    name,
                    start,
                    end,
                    {"type": call.module_type, "step": call.step},
                )
            )
    for operation in measurements.operations:
        arguments = {
            "type": operation.layer_type,
            "shape": list(operation.shape),
            "module": operation.address,
        }
        label = operation.label or operation.layer_type
        events.append(_event(_OPERATIONS, label, operation.start_ns, operation.end_ns, arguments))
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [
        _metadata("process_name", 0, "name", f"Profile of {measurements.model_name}"),
        *_part_overlapping(events),
        *events,
    ]


def _part_overlapping(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numbers the tracks anew, so that on each all events lie beside or inside each other; returns
    what names them.

    Viewers drop others. In a backward pass, a module may begin while another runs and go on when
    that has ended: the gradient of a weight that a second module borrows is a matter of the module
    that owns it.
    """
    ends: dict[
        tuple[int, int], list[float]
    ] = {}  # track and lane → when the events that are open end
    lanes = []
    for event in events:
        lane = 0
        while not _has_room(
            ends.setdefault((event["tid"], lane), []), event["ts"], event["ts"] + event["dur"]
        ):
            lane += 1
        lanes.append((event["tid"], lane))
    numbers = {lane: number for number, lane in enumerate(sorted(ends), 1)}
    for event, place in zip(events, lanes, strict=True):
        event["tid"] = numbers[place]
    named = []
    for (track, lane), number in numbers.items():
        name = _NAMES.get(track, f"modules, backward, depth {track - _BACKWARD}")
        named.append(
            _metadata("thread_name", number, "name", f"{name} ({lane + 1})" if lane else name)
        )
        named.append(_metadata("thread_sort_index", number, "sort_index", number))
    return named


def _has_room(ends: list[float], start: float, end: float) -> bool:
    """Whether an event lies inside those that are open; opens it, if so."""
    while ends and ends[-1] <= start:
        ends.pop()
    if ends and end > ends[-1]:
        return False
    ends.append(end)
    return True


def _arguments(call: CallRecord) -> dict[str, Any]:
    known = {"FLOPs": call.flops, "peak bytes": call.peak_bytes, "raised": call.raised}
    return {
        "type": call.module_type,
        "step": call.step,
        "output": [list(shape) for shape in call.output_shapes],
        **{name: value for name, value in known.items() if value is not None},
    }


def _event(
    track: int, name: str, start_ns: int, end_ns: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    start, end = start_ns // _TICK_NS, max(start_ns, end_ns) // _TICK_NS
    times = {"ts": start * _TICK_NS / 1000, "dur": (end - start) * _TICK_NS / 1000}
    category = _CATEGORIES.get(track, "backward")
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        **times,
        "args": arguments,
    }


def _metadata(kind: str, track: int, key: str, value: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {key: value}}
