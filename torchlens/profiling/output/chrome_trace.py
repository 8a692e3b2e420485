"""A profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: what ran when.

Unlike the tables, a timeline shows time as it passed, with what measuring itself took.
"""

import os
from typing import Any

from torchlens.history.json_text import write_json
from torchlens.profiling.records import CallRecord, Measurements

__all__ = ["to_chrome_trace", "trace_events"]

_PROCESS = 1
# One track for each of these; backward passes of modules have one for each depth, as they need not lie inside each other.
_STEPS, _MODULES, _OPERATIONS, _OUTSIDE, _BACKWARD = 1, 2, 3, 4, 10
_NAMES = {_STEPS: "steps", _MODULES: "modules, forward", _OPERATIONS: "operations", _OUTSIDE: "outside the model"}


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
        events += [_event(_OUTSIDE, kind, start, end, {"step": step.number}) for kind, start, end in step.outside_spans]
    for call in measurements.calls:
        name = call.address or measurements.model_name
        if call.end_ns > call.start_ns:
            events.append(_event(_MODULES, name, call.start_ns, call.end_ns, _arguments(call)))
        for start, end in call.backward_spans:
            events.append(_event(_BACKWARD + call.depth, name, start, end, {"type": call.module_type, "step": call.step}))
    for operation in measurements.operations:
        arguments = {"type": operation.layer_type, "shape": list(operation.shape), "module": operation.address}
        label = operation.label or operation.layer_type
        events.append(_event(_OPERATIONS, label, operation.start_ns, operation.end_ns, arguments))
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    tracks = dict.fromkeys(event["tid"] for event in events)
    names = [(track, _NAMES.get(track, f"modules, backward, depth {track - _BACKWARD}")) for track in sorted(tracks)]
    return [
        _named("process_name", 0, f"Profile of {measurements.model_name}"),
        *(_named("thread_name", track, name) for track, name in names),
        *events,
    ]


def _arguments(call: CallRecord) -> dict[str, Any]:
    known = {"FLOPs": call.flops, "peak bytes": call.peak_bytes, "raised": call.raised}
    return {
        "type": call.module_type,
        "step": call.step,
        "output": [list(shape) for shape in call.output_shapes],
        **{name: value for name, value in known.items() if value is not None},
    }


def _event(track: int, name: str, start_ns: int, end_ns: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        "ts": start_ns / 1000,
        "dur": max(end_ns - start_ns, 0) / 1000,
        "args": arguments,
    }


def _named(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
