"""What stands above and below the table of a profile: totals, and what was not measured."""

from torchlens._profile.output.quantities import QUANTITIES, module_value
from torchlens._profile.records import Measurements, ModuleRecord
from torchlens._profile.steps import StepRecord
from torchlens._text.numbers import bytes_text, count_text, seconds_text

# What a step consists of, in its order.
_PARTS = (
    ("forward", "forward"),
    ("loss", "loss"),
    ("backward", "backward_call"),
    ("optimizer", "optimizer"),
    ("waiting for data", "data"),
    ("other", "other"),
)


def headline(measurements: Measurements) -> str:
    measured = len(measurements.measured_steps)
    warmup = len(measurements.steps) - measured
    steps = f"{measured} step{'s' * (measured != 1)}"
    note = f" after {warmup} to warm up" if warmup else ""
    return f"Profile of {measurements.model_name}: {steps}{note}, {measurements.level} level"


def totals(measurements: Measurements) -> list[str]:
    root = measurements.root
    frozen = root.num_parameters - root.num_learnable
    params = f"{count_text(root.num_parameters)} ({bytes_text(root.param_bytes)})"
    params += f", {count_text(frozen)} of them frozen" if frozen else ""
    lines = [("parameters", params)]
    if root.gradient_bytes:
        lines.append(("gradients", bytes_text(root.gradient_bytes)))
    flops, flops_backward = (
        module_value(root, QUANTITIES[name]) for name in ("flops", "flops_backward")
    )
    if flops:
        both = f", backward {count_text(flops_backward)}" if flops_backward else ""
        speed = module_value(root, QUANTITIES["flops_per_second"])
        rate = "" if speed is None else f" ({count_text(speed)}FLOP/s)"
        lines.append(("FLOPs", f"forward {count_text(flops)}{rate}{both}"))
    steps = measurements.measured_steps
    for name in ("forward", "backward"):
        seconds = _seconds(root, steps, f"{name}_seconds")
        if seconds is not None:
            lines.append((name, seconds))
    wall = _wall_text(root, steps)
    if wall:
        lines.append(("a whole step", wall))
    kept = module_value(root, QUANTITIES["saved_bytes"])
    if kept is not None:
        lines.append(("kept for backward", bytes_text(kept)))
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    if peaks:
        lines.append(
            (
                "peak memory",
                f"{bytes_text(max(peaks))} above what was allocated when the step began",
            )
        )
    return [f"{name + ':':<19}{text}" for name, text in lines]


def _seconds(root: ModuleRecord, steps: list[StepRecord], field: str) -> str | None:
    """A typical time of a step, and how much they differ, if there are several."""
    values = {step.number: value for step in steps if (value := getattr(step, field)) is not None}
    typical, statistic = (
        root.typical_steps.mean(field, values),
        root.typical_steps.statistic(values),
    )
    if typical is None or statistic is None:
        return None
    if statistic.num == 1:
        return seconds_text(typical)
    each = ", ".join(
        f"{name} {seconds_text(getattr(statistic, name))}" for name in ("minimum", "median", "p95")
    )
    return f"{seconds_text(typical)} ({each})"


def _wall_text(root: ModuleRecord, steps: list[StepRecord]) -> str:
    """Where the time between two calls of the model goes; nothing for a profile of one step without
    anything outside.
    """
    typical = [step for step in steps if step.number in root.typical_steps.forward] or steps
    if not any(step.outside_spans for step in typical):
        return ""

    def mean(field: str) -> float:
        return sum(getattr(step, field) or 0.0 for step in typical) / len(typical)

    parts = [(name, mean(f"{field}_seconds")) for name, field in _PARTS]
    listed = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts if seconds)
    return f"{seconds_text(mean('wall_seconds'))}: {listed}"


def listed(records: list[ModuleRecord], measurements: Measurements) -> str:
    """The first of some modules, by name."""
    names = ", ".join(record.address or measurements.model_name for record in records[:6])
    return f"{names} and {len(records) - 6} more" if len(records) > 6 else names


def _which_steps(measurements: Measurements) -> str:
    """What was measured in some of the steps alone."""
    steps = measurements.measured_steps
    num_listened, num_counted = (
        sum(step.peak_bytes is not None for step in steps),
        sum(step.has_flops for step in steps),
    )
    num_logged = len(
        {operation.step for operation in measurements.operations} & {step.number for step in steps}
    )
    parts = [("memory is that", num_listened), ("FLOPs are those", num_counted)]
    if measurements.level == "operation":
        parts.append(("operations, with the time of the log, are those", num_logged))
    texts = [f"{what} of {number}" for what, number in parts if 0 < number < len(steps)]
    timed = measurements.root.typical_steps.timed
    num_timed = sum(step.is_light and step.number in timed for step in steps)
    if 0 < num_timed < len(steps):
        texts.insert(0, f"times are those of {num_timed}, in which nothing else was measured")
    joined = ", ".join(texts)
    return f"Of {len(steps)} steps, {joined}." if texts else ""


def not_measured(measurements: Measurements) -> list[str]:
    """What a reader of the table might take for zero."""
    notes: list[str] = []
    steps = measurements.measured_steps
    if not steps:
        return (
            [] if measurements.problems else ["The model was not called, so nothing was measured."]
        )
    if all(step.backward_seconds is None for step in steps):
        notes.append("No backward pass ran.")
    if all(step.peak_bytes is None for step in steps):
        notes.append("Memory was not measured.")
    if not any(step.is_light for step in steps):
        notes.append(
            "Times contain what measuring took: every step was detailed. Measure more steps, "
            "without stop=True."
        )
    which = _which_steps(measurements)
    if which:
        notes.append(which)
    if any(call.is_recomputed for call in measurements.calls):
        notes.append("What checkpointing ran again is in the backward time and in no FLOPs.")
    if measurements.flops_not_counted:
        kinds = sorted(measurements.flops_not_counted.items(), key=lambda item: -item[1])
        first = ", ".join(f"{kind} ({number})" for kind, number in kinds[:8])
        more = f" and {len(kinds) - 8} more" if len(kinds) > 8 else ""
        notes.append(f"FLOPs of these are not counted (calls in a step): {first}{more}.")
    uncalled = [
        record for record in measurements.root.walk() if record.address and not record.calls
    ]
    unused = [record for record in uncalled if record.own_num_parameters]
    if unused:
        notes.append(
            f"Modules with parameters that were not called: {listed(unused, measurements)}."
        )
    raised = sorted({step.raised for step in steps if step.raised})
    if raised:
        notes.append(f"A step ended with {', '.join(raised)}.")
    return notes
