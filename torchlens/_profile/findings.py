"""Findings of a profile: problems that values, gradients and parameters reveal."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from torchlens._health.activations import Activity, dead_units, saturation
from torchlens._health.checker import HealthChecker
from torchlens._health.finding import Finding, Findings
from torchlens._health.gradients import WeightNorms, gradient_findings
from torchlens._health.nonfinite import NonFinite
from torchlens._health.thresholds import checked_thresholds
from torchlens._profile.records import Measurements, ParameterRecord
from torchlens._text.numbers import count_text, first_few

_MOST_NAMES = 4
_UNUSED_ADVICE = (
    "They do not contribute to the loss, or a detach() or no_grad() lies in between. Remove or "
    "freeze them (requires_grad_(False)), or connect them."
)
_CONTAINED = (
    "All that was computed from it is finite: the value was discarded later, and may be intended."
)
_SCALED = (
    "A GradScaler skipped this step while it searched for its scale, and made a later one. This is "
    "normal."
)


def find(
    measurements: Measurements, checker: Any, thresholds: Mapping[str, Any] | None = None
) -> Findings:
    """All findings of a profile."""
    limits = checked_thresholds(thresholds)
    health = checker if isinstance(checker, HealthChecker) else None
    found: list[Finding] = []
    notes: list[str] = []
    if health is None:
        notes.append("Values and gradients were not checked; profile(..., check='health') does so.")
    else:
        scaled = _steps_of_a_search(measurements)
        found += [
            _nonfinite_finding(record, is_lasting, scaled)
            for record, is_lasting in health.origins.reported()
        ]
        if health.is_full:
            for name, activity in health.activities():
                found += _activity_findings(name, activity, limits, notes)
            found += _gradient_findings(measurements, health, limits)
        else:
            notes.append(
                "Only NaN and Inf were checked for; profile(..., check='health') checks for more."
            )
    found += unused_findings(measurements, notes)
    found += frozen_findings(measurements)
    return Findings(found, dict.fromkeys(notes))


_NONFINITE_ADVICE = {
    "forward": "Check the ranges of its arguments: log of 0, sqrt of a negative number, a division "
    "by 0, exp of a large number, a result above the maximum of half precision (65504).",
    "backward": "The derivative is infinite or undefined there: sqrt or norm at 0, a power below 1 "
    "at 0, the branch of torch.where that is not taken. Keep the operand away from that point "
    "(clamp, eps) before the operation.",
}


def _steps_of_a_search(measurements: Measurements) -> set[int]:
    """The steps that a GradScaler skipped before it found its scale, that is, before a later step
    that it made.
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
    module = activity.place.address
    if activity.is_comparable and activity.num_dead:
        share = activity.num_dead / activity.num_units
        text = (
            f"{activity.num_dead} of {activity.num_units} units ({share:.0%}) were zero in all "
            f"{activity.values_per_unit} values of each that were checked."
        )
        dead = dead_units(name, module, share, limits, text)
        if dead and activity.values_per_unit < limits["min_values"]:
            notes.append(
                f"Dead units are reported from {limits['min_values']:.0f} values of each unit on; "
                "some layers had fewer. Measure more steps or larger batches."
            )
        else:
            found += dead
    return found + saturation(
        name, module, activity.kind, activity.saturated_share, activity.num_sampled, limits
    )


# -- gradients


def _gradient_findings(
    measurements: Measurements, health: HealthChecker, limits: Mapping[str, float]
) -> list[Finding]:
    norms = {address: median(own) for address, own in health.gradient_norms.items()}
    weights = [
        WeightNorms(
            record.address,
            record.module,
            norms[record.address],
            health.parameter_norms[record.address],
            record.num_elements,
        )
        for record in _in_order_of_use(measurements)
        if _is_matrix(record) and record.address in norms
    ]
    outer = {address for address, module in measurements.modules.items() if module.children}
    return gradient_findings(weights, outer, limits)


def _is_matrix(record: ParameterRecord) -> bool:
    """Whether it is a weight matrix: not a bias, a scale or a single vector."""
    return sum(size > 1 for size in record.shape) > 1


def _in_order_of_use(measurements: Measurements) -> list[ParameterRecord]:
    """Parameters in the order in which their modules were called; those of modules that were not
    called keep their place.
    """
    first: dict[str, int] = {}
    for call in measurements.calls:
        first.setdefault(call.address, call.index)
    last = 0
    order: list[tuple[int, int, ParameterRecord]] = []
    for number, record in enumerate(measurements.parameters):
        last = first.get(record.module, last)
        order.append((last, number, record))
    return [record for _, _, record in sorted(order, key=lambda item: item[:2])]


# -- parameters


def unused_findings(measurements: Measurements, notes: list[str]) -> list[Finding]:
    if not any(step.num_backward_passes for step in measurements.steps):
        notes.append("No backward pass ran, so gradients and unused parameters were not checked.")
        return []
    learnable = [record for record in measurements.parameters if record.is_learnable]
    unused = [record for record in learnable if not record.num_gradients]
    if len(unused) == len(learnable) > 0:
        notes.append(
            "The backward passes added no gradient to any parameter (torch.autograd.grad returns "
            "them instead), so unused parameters were not checked."
        )
        return []
    return [
        _parameter_finding(
            "unused parameters",
            "warning",
            where,
            own,
            "got no gradient in any backward pass",
            threshold=0,
            advice=_UNUSED_ADVICE,
        )
        for where, own in _grouped(unused, measurements.parameters)
    ]


def frozen_findings(measurements: Measurements) -> list[Finding]:
    frozen = [record for record in measurements.parameters if not record.is_learnable]
    return [
        _parameter_finding(
            "frozen parameters",
            "info",
            where,
            own,
            f"{'does' if len(own) == 1 else 'do'} not require gradients",
        )
        for where, own in _grouped(frozen, measurements.parameters)
    ]


def _parameter_finding(
    kind: str,
    severity: str,
    where: str,
    own: list[ParameterRecord],
    text: str,
    threshold: float | None = None,
    advice: str = "",
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        where=where,
        module=own[0].module if len(own) == 1 else where,
        number=sum(record.num_elements for record in own),
        threshold=threshold,
        text=f"{_parameters(own)} {text}.",
        advice=advice,
    )


def _parameters(records: list[ParameterRecord]) -> str:
    names = first_few([record.address for record in records], _MOST_NAMES)
    return f"{names} ({count_text(sum(record.num_elements for record in records))} numbers)"


def _grouped(
    chosen: list[ParameterRecord], everything: list[ParameterRecord]
) -> list[tuple[str, list[ParameterRecord]]]:
    """Groups parameters by the outermost module whose parameters are all chosen."""
    total: dict[str, int] = {}
    inside: dict[str, int] = {}
    for counts, records in ((total, everything), (inside, chosen)):
        for record in records:
            for above in _above(record.address):
                counts[above] = counts.get(above, 0) + 1
    groups: dict[str, list[ParameterRecord]] = {}
    for record in chosen:
        whole = next(
            (above for above in _above(record.address) if inside[above] == total[above]),
            record.address,
        )
        groups.setdefault(whole, []).append(record)
    return [(where or "the model", own) for where, own in groups.items()]


def _above(address: str) -> list[str]:
    """The modules that a parameter is in, the model ('') first."""
    parts = address.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]
