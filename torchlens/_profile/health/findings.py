"""What is wrong with a model, as far as its values, gradients and parameters tell."""

from collections.abc import Mapping
from typing import Any

from torchlens._health.finding import Finding, Findings
from torchlens._health.nonfinite.record import NonFinite
from torchlens._health.thresholds import checked_thresholds
from torchlens._profile.health.activations import Activity
from torchlens._profile.health.checker import Health
from torchlens._profile.health.gradient_findings import gradient_findings
from torchlens._profile.health.parameter_findings import frozen_findings, unused_findings
from torchlens._profile.records import Measurements

_CONTAINED = (
    "All that was computed from it is finite again: it was thrown away later, and may be meant."
)
_SCALED = (
    "A GradScaler skipped this step while it was looking for its scale, and made a later one: "
    "that is how it works."
)
_SATURATION_ADVICE = {
    "other": "Hardly any gradient comes through there. Smaller weights or inputs, or "
    "normalisation before it, help.",
    "softmax": "One takes all, and hardly any gradient comes through. Fine for a classifier that "
    "is sure; in "
    "attention, scale the scores down.",
}


def find(
    measurements: Measurements, checker: Any, thresholds: Mapping[str, Any] | None = None
) -> Findings:
    """Everything that can be said of what was measured."""
    limits = checked_thresholds(thresholds)
    health = checker if isinstance(checker, Health) else None
    found: list[Finding] = []
    notes: list[str] = []
    if health is None:
        notes.append("Values and gradients were not looked at; profile(..., check='health') does.")
    else:
        scaled = _steps_of_a_search(measurements)
        found += [
            _nonfinite_finding(record, is_lasting, scaled)
            for record, is_lasting in health.nonfinite
        ]
        if health.is_full:
            for name, activity in health.activities():
                found += _activity_findings(name, activity, limits, notes)
            found += gradient_findings(measurements, health, limits)
        else:
            notes.append(
                "Only NaN and Inf were looked for; profile(..., check='health') looks for more."
            )
    found += unused_findings(measurements, notes)
    found += frozen_findings(measurements)
    return Findings(found, dict.fromkeys(notes))


_NONFINITE_ADVICE = {
    "forward": "Look at the ranges of what it was given: log of 0, sqrt of less, a division by 0, "
    "exp of much, "
    "a result beyond what half precision holds (65504).",
    "backward": "The derivative is infinite or not defined there: sqrt or norm at 0, a power "
    "below 1 at 0, the "
    "branch of torch.where that is not taken. Keep the operand away from that point (clamp, eps) "
    "before the operation.",
}


def _steps_of_a_search(measurements: Measurements) -> set[int]:
    """The steps that a GradScaler skipped while it was looking for its scale, which it found: a
    later step was made.
    """
    kinds = {step.number: {kind for kind, *_ in step.outside_spans} for step in measurements.steps}
    last = max((number for number, own in kinds.items() if "optimizer" in own), default=0)
    return {number for number, own in kinds.items() if "skip" in own and number < last}


def _nonfinite_finding(record: NonFinite, is_lasting: bool, scaled: set[int]) -> Finding:
    is_scaled = record.phase == "backward" and record.step in scaled
    return Finding(
        kind="non-finite values" if record.phase == "forward" else "non-finite gradients",
        severity="error" if is_lasting and not is_scaled else "info",
        where=record.label or record.module or record.operation,
        module=record.module,
        number=record.num_nan + record.num_inf,
        threshold=0,
        text=str(record),
        advice=_SCALED if is_scaled else _advice(record, is_lasting),
    )


def _advice(record: NonFinite, is_lasting: bool) -> str:
    if record.is_certain and not is_lasting:
        return _CONTAINED
    return "" if record.note else _NONFINITE_ADVICE[record.phase]


# -- activations
# --------------------------------------------------------------------------------------------------


def _activity_findings(
    name: str, activity: Activity, limits: Mapping[str, float], notes: list[str]
) -> list[Finding]:
    found: list[Finding] = []
    if activity.is_comparable and activity.num_dead:
        share = activity.num_dead / activity.num_units
        if activity.values_per_unit < limits["min_values"]:
            if share >= limits["dead_share"]:
                notes.append(
                    f"Dead units are told from {limits['min_values']:.0f} values of each on; some "
                    "layers had fewer. Measure more steps or larger batches."
                )
        elif share >= limits["dead_share"]:
            found.append(
                Finding(
                    kind="dead units",
                    severity="warning",
                    where=name,
                    module=activity.place.address,
                    number=share,
                    threshold=limits["dead_share"],
                    text=f"{activity.num_dead} of {activity.num_units} units ({share:.0%}) gave "
                    "nothing but zero, in all "
                    f"{activity.values_per_unit} values of each that were seen.",
                    advice="They learn nothing. A lower learning rate, a smaller or zero bias, "
                    "normalisation before the "
                    "activation, or a leaky one helps.",
                )
            )
    if (
        activity.saturated_share > limits["saturated_share"]
        and activity.num_sampled >= limits["min_values"]
    ):
        found.append(
            Finding(
                kind="saturated activation",
                severity="info" if activity.kind == "softmax" else "warning",
                where=name,
                module=activity.place.address,
                number=activity.saturated_share,
                threshold=limits["saturated_share"],
                text=f"{activity.saturated_share:.0%} of the values of {activity.kind} lie at its "
                "limits (within "
                f"{limits['saturation_margin']:.2g} of the range).",
                advice=_SATURATION_ADVICE["softmax" if activity.kind == "softmax" else "other"],
            )
        )
    return found
