"""Parameters that do not learn: unused ones and frozen ones."""

from torchlens._health.finding import Finding
from torchlens._profile.records import Measurements, ParameterRecord
from torchlens._text.units import count_text

_MOST_NAMES = 4


def unused_findings(measurements: Measurements, notes: list[str]) -> list[Finding]:
    if not any(step.num_backward_passes for step in measurements.steps):
        notes.append(
            "No backward pass ran, so nothing is said about gradients and unused parameters."
        )
        return []
    learnable = [record for record in measurements.parameters if record.is_learnable]
    unused = [record for record in learnable if not record.num_gradients]
    if len(unused) == len(learnable) > 0:
        notes.append(
            "The backward passes added no gradient to any parameter (torch.autograd.grad returns "
            "them instead), so nothing is said about unused parameters."
        )
        return []
    return [
        Finding(
            kind="unused parameters",
            severity="warning",
            where=where,
            module=own[0].module if len(own) == 1 else where,
            number=sum(record.num_elements for record in own),
            threshold=0,
            text=f"{_parameters(own)} got no gradient in any backward pass.",
            advice="They do not contribute to the loss, or a detach() or no_grad() lies in "
            "between. Remove or freeze them "
            "(requires_grad_(False)), or connect them.",
        )
        for where, own in _grouped(unused, measurements.parameters)
    ]


def frozen_findings(measurements: Measurements) -> list[Finding]:
    frozen = [record for record in measurements.parameters if not record.is_learnable]
    return [
        Finding(
            kind="frozen parameters",
            severity="info",
            where=where,
            module=own[0].module if len(own) == 1 else where,
            number=sum(record.num_elements for record in own),
            threshold=None,
            text=f"{_parameters(own)} {'does' if len(own) == 1 else 'do'} not require gradients.",
            advice="",
        )
        for where, own in _grouped(frozen, measurements.parameters)
    ]


def _parameters(records: list[ParameterRecord]) -> str:
    names = ", ".join(record.address for record in records[:_MOST_NAMES])
    more = f" and {len(records) - _MOST_NAMES} more" if len(records) > _MOST_NAMES else ""
    return f"{names}{more} ({count_text(sum(record.num_elements for record in records))} numbers)"


def _grouped(
    chosen: list[ParameterRecord], everything: list[ParameterRecord]
) -> list[tuple[str, list[ParameterRecord]]]:
    """By the outermost module of which all parameters are chosen, or alone."""
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
