"""What stands above and below the table of a profile: totals, and what was not measured."""

from torchlens.history.units import count_text, seconds_text
from torchlens.profiling.output.quantities import QUANTITIES, module_value
from torchlens.profiling.output.units import bytes_text
from torchlens.profiling.records import Measurements, Statistic, StepRecord

__all__ = ["headline", "not_measured", "totals"]


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
    flops, flops_backward = (module_value(root, QUANTITIES[name]) for name in ("flops", "flops_backward"))
    if flops:
        both = f", backward {count_text(flops_backward)}" if flops_backward else ""
        lines.append(("FLOPs", f"forward {count_text(flops)}{both}"))
    steps = measurements.measured_steps
    for name, seconds in (
        ("forward", _seconds(steps, "forward_seconds")),
        ("backward", _seconds(steps, "backward_seconds")),
    ):
        if seconds is not None:
            lines.append((name, f"{seconds_text(seconds.median)}{_spread_text(seconds)}"))
    kept = module_value(root, QUANTITIES["saved_bytes"])
    if kept is not None:
        lines.append(("kept for backward", bytes_text(kept)))
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    if peaks:
        lines.append(("peak memory", f"{bytes_text(max(peaks))} above what was allocated when the step began"))
    return [f"{name + ':':<19}{text}" for name, text in lines]


def _seconds(steps: list[StepRecord], field: str) -> Statistic | None:
    return Statistic.of([value for step in steps if (value := getattr(step, field)) is not None])


def _spread_text(seconds: Statistic) -> str:
    """The median of one step has no spread."""
    return f" (spread {seconds_text(seconds.spread)})" if seconds.num > 1 else ""


def not_measured(measurements: Measurements) -> list[str]:
    """What a reader of the table might take for zero."""
    notes: list[str] = []
    steps = measurements.measured_steps
    if not steps:
        return [] if measurements.problems else ["The model was not called, so nothing was measured."]
    if all(step.backward_seconds is None for step in steps):
        notes.append("No backward pass ran.")
    if all(step.peak_bytes is None for step in steps):
        notes.append("Memory was not measured.")
    if measurements.flops_not_counted:
        kinds = sorted(measurements.flops_not_counted.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{kind} ({number})" for kind, number in kinds[:8])
        more = f" and {len(kinds) - 8} more" if len(kinds) > 8 else ""
        notes.append(f"FLOPs of these are not counted (calls in a step): {listed}{more}.")
    uncalled = [record for record in measurements.root.walk() if record.address and not record.calls]
    unused = [record for record in uncalled if record.own_num_parameters]
    if unused:
        names = ", ".join(record.address for record in unused[:6])
        more = f" and {len(unused) - 6} more" if len(unused) > 6 else ""
        notes.append(f"Modules with parameters that were not called: {names}{more}.")
    raised = sorted({step.raised for step in steps if step.raised})
    if raised:
        notes.append(f"A step ended with {', '.join(raised)}.")
    return notes
