"""What is printed above and below the table of a profile: totals, and what was not measured."""

from torchlens._profile.quantities import QUANTITIES, module_value
from torchlens._profile.records import Measurements, ModuleRecord
from torchlens._profile.steps import StepRecord
from torchlens._text.numbers import bytes_text, count_text, counted, seconds_text

# The parts of a step, in order.
_PARTS = (
    ("forward", "forward"),
    ("loss", "loss"),
    ("backward", "backward_call"),
    ("optimizer", "optimizer"),
    ("waiting for data", "data"),
    ("other", "other"),
)
_MOST_NAMES, _MOST_TYPES = 6, 8


def headline(measurements: Measurements) -> str:
    measured = len(measurements.measured_steps)
    warmup = len(measurements.steps) - measured
    note = f" after {warmup} to warm up" if warmup else ""
    steps = f"{counted(measured, 'step')}{note}"
    return f"Profile of {measurements.model_name}: {steps}, {measurements.level} level"


# -- totals


def totals(measurements: Measurements) -> list[str]:
    root, steps = measurements.root, measurements.measured_steps
    lines = {
        "parameters": _parameters_text(root),
        "gradients": bytes_text(root.gradient_bytes) if root.gradient_bytes else "",
        "FLOPs": _flops_text(root),
        "forward": _seconds_text(root, steps, "forward_seconds"),
        "backward": _seconds_text(root, steps, "backward_seconds"),
        "a whole step": _wall_text(root, steps),
    }
    kept = module_value(root, QUANTITIES["saved_bytes"])
    if kept is not None:
        lines["kept for backward"] = bytes_text(kept)
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    if peaks:
        above = "above what was allocated when the step began"
        lines["peak memory"] = f"{bytes_text(max(peaks))} {above}"
    return [f"{name + ':':<19}{text}" for name, text in lines.items() if text]


def _parameters_text(root: ModuleRecord) -> str:
    frozen = root.num_parameters - root.num_learnable
    text = f"{count_text(root.num_parameters)} ({bytes_text(root.param_bytes)})"
    return f"{text}, {count_text(frozen)} of them frozen" if frozen else text


def _flops_text(root: ModuleRecord) -> str:
    names = ("flops", "flops_per_second", "flops_backward")
    flops, speed, backward = (module_value(root, QUANTITIES[name]) for name in names)
    if not flops:
        return ""
    rate = "" if speed is None else f" ({count_text(speed)}FLOP/s)"
    also = f", backward {count_text(backward)}" if backward else ""
    return f"forward {count_text(flops)}{rate}{also}"


def _seconds_text(root: ModuleRecord, steps: list[StepRecord], field: str) -> str:
    """A typical time of a step, and how much steps differ, if there are several."""
    values = {step.number: value for step in steps if (value := getattr(step, field)) is not None}
    typical = root.typical_steps.mean(field, values)
    statistic = root.typical_steps.statistic(values)
    if typical is None or statistic is None:
        return ""
    if statistic.num == 1:
        return seconds_text(typical)
    numbers = ("minimum", "median", "p95")
    each = ", ".join(f"{name} {seconds_text(getattr(statistic, name))}" for name in numbers)
    return f"{seconds_text(typical)} ({each})"


def _wall_text(root: ModuleRecord, steps: list[StepRecord]) -> str:
    """What the time between two calls of the model consists of; empty if all of it is the model."""
    typical = [step for step in steps if step.number in root.typical_steps.forward] or steps
    if not any(step.outside_spans for step in typical):
        return ""

    def mean(field: str) -> float:
        return sum(getattr(step, field) or 0.0 for step in typical) / len(typical)

    parts = [(name, mean(f"{field}_seconds")) for name, field in _PARTS]
    each = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts if seconds)
    return f"{seconds_text(mean('wall_seconds'))}: {each}"


# -- notes


def listed(records: list[ModuleRecord], measurements: Measurements) -> str:
    """The first of some modules, by name."""
    names = [record.address or measurements.model_name for record in records]
    return _first(names, _MOST_NAMES)


def _first(texts: list[str], most: int) -> str:
    first = ", ".join(texts[:most])
    return f"{first} and {len(texts) - most} more" if len(texts) > most else first


def not_measured(measurements: Measurements) -> list[str]:
    """What a reader of the table might take for zero."""
    steps = measurements.measured_steps
    if not steps:
        is_explained = bool(measurements.problems)
        return [] if is_explained else ["The model was not called, so nothing was measured."]
    notes = {
        "No backward pass ran.": all(step.backward_seconds is None for step in steps),
        "Memory was not measured.": all(step.peak_bytes is None for step in steps),
        "Times contain what measuring took: every step was detailed. Measure more steps, without "
        "stop=True.": not any(step.is_light for step in steps),
        _which_steps(measurements): True,
        "What checkpointing ran again is in the backward time and in no FLOPs.": any(
            call.is_recomputed for call in measurements.calls
        ),
        _not_counted(measurements): True,
        _not_called(measurements): True,
        _raised(steps): True,
    }
    return [note for note, is_true in notes.items() if note and is_true]


def _which_steps(measurements: Measurements) -> str:
    """What was measured in only some of the steps."""
    steps, timed = measurements.measured_steps, measurements.root.typical_steps.timed
    logged = {operation.step for operation in measurements.operations}
    times = "times are those of {}, in which nothing else was measured"
    numbers = {
        times: sum(step.is_light and step.number in timed for step in steps),
        "memory is that of {}": sum(step.peak_bytes is not None for step in steps),
        "FLOPs are those of {}": sum(step.has_flops for step in steps),
        "operations, with the time of the log, are those of {}": sum(
            step.number in logged for step in steps
        ),
    }
    texts = [text.format(number) for text, number in numbers.items() if 0 < number < len(steps)]
    return f"Of {len(steps)} steps, {', '.join(texts)}." if texts else ""


def _not_counted(measurements: Measurements) -> str:
    kinds = sorted(measurements.flops_not_counted.items(), key=lambda item: -item[1])
    texts = _first([f"{kind} ({number})" for kind, number in kinds], _MOST_TYPES)
    return f"FLOPs of these are not counted (calls in a step): {texts}." if kinds else ""


def _not_called(measurements: Measurements) -> str:
    modules = [record for record in measurements.root.walk() if record.address]
    unused = [record for record in modules if record.own_num_parameters and not record.calls]
    names = listed(unused, measurements)
    return f"Modules with parameters that were not called: {names}." if unused else ""


def _raised(steps: list[StepRecord]) -> str:
    names = sorted({step.raised for step in steps if step.raised})
    return f"A step ended with {', '.join(names)}." if names else ""
