"""Gradients that vanish or explode on their way through the model."""

from collections.abc import Mapping
from math import sqrt
from statistics import median

from torchlens.profiling.health.checker import Health
from torchlens.profiling.health.finding import Finding
from torchlens.profiling.records import Measurements, ParameterRecord

__all__ = ["gradient_findings"]

# A weight whose numbers are smaller than this is compared as if they were this large: it may start at nearly zero.
_SMALLEST_WEIGHT = 1e-2


def gradient_findings(measurements: Measurements, health: Health, limits: Mapping[str, float]) -> list[Finding]:
    norms = {address: median(own) for address, own in health.gradient_norms.items()}
    weights = [record for record in _in_order_of_use(measurements) if _is_matrix(record) and record.address in norms]
    finite = [record for record in weights if norms[record.address] < float("inf")]  # false for NaN, too
    largest = max((norms[record.address] for record in finite), default=0.0)
    if largest == 0:
        return []
    # Tokens and positions that a module with modules inside has learned are no layer that the others wait for.
    modules = measurements.modules
    layers = [record for record in finite if record.module not in modules or not modules[record.module].children]
    return [
        *_vanishing(layers or finite, norms, largest, limits["vanishing_ratio"]),
        *_exploding(finite, norms, health.parameter_norms, limits["exploding_ratio"]),
    ]


def _is_matrix(record: ParameterRecord) -> bool:
    """Weights in the proper sense: no biases, scales, or single vectors that are learned."""
    return sum(size > 1 for size in record.shape) > 1


def _in_order_of_use(measurements: Measurements) -> list[ParameterRecord]:
    """In the order in which their modules were called; those whose module was not called stand where they were made."""
    first: dict[str, int] = {}
    for call in measurements.calls:
        first.setdefault(call.address, call.index)
    last = 0
    order: list[tuple[int, int, ParameterRecord]] = []
    for number, record in enumerate(measurements.parameters):
        last = first.get(record.module, last)
        order.append((last, number, record))
    return [record for _, _, record in sorted(order, key=lambda item: item[:2])]


def _vanishing(
    weights: list[ParameterRecord], norms: Mapping[str, float], largest: float, threshold: float
) -> list[Finding]:
    """The weights from the model's first on that get next to nothing: what comes later gets its gradient."""
    starved: list[ParameterRecord] = []
    for record in weights:
        if norms[record.address] >= threshold * largest:
            break
        starved.append(record)
    if not starved:
        return []
    if all(norms[record.address] == 0 for record in starved):
        return [_zero_gradients(starved)]
    worst = min(starved, key=lambda record: norms[record.address])
    ratio = norms[worst.address] / largest
    return [
        Finding(
            kind="vanishing gradient",
            severity="warning",
            where=worst.address,
            module=worst.module,
            number=ratio,
            threshold=threshold,
            text=f"The gradients of the first {len(starved)} of {len(weights)} weights vanish: that of {worst.address} has "
            f"the norm {norms[worst.address]:.2g}, {ratio:.1g} of the largest.",
            advice="The first layers learn next to nothing. Residual connections, normalisation, ReLU-like activations or "
            "another initialisation help.",
        )
    ]


def _zero_gradients(starved: list[ParameterRecord]) -> Finding:
    first = starved[0]
    return Finding(
        kind="zero gradients",
        severity="info",
        where=first.address,
        module=first.module,
        number=0.0,
        threshold=0.0,
        text=f"The gradients of {len(starved)} weights from {first.address} on are exactly zero in all backward passes.",
        advice="A layer after them may start at zero, which the first optimizer step ends, or the units there are dead.",
    )


def _exploding(
    weights: list[ParameterRecord], norms: Mapping[str, float], own_norms: Mapping[str, float], threshold: float
) -> list[Finding]:
    found: list[tuple[float, float, ParameterRecord]] = []
    for record in weights:
        size = max(own_norms[record.address], _SMALLEST_WEIGHT * sqrt(record.num_elements))
        ratio = norms[record.address] / size
        if ratio > threshold:
            found.append((ratio, norms[record.address], record))
    if not found:
        return []
    ratio, norm, worst = max(found, key=lambda item: item[0])
    return [
        Finding(
            kind="exploding gradient",
            severity="warning",
            where=worst.address,
            module=worst.module,
            number=ratio,
            threshold=threshold,
            text=f"The gradients of {len(found)} of {len(weights)} weights explode: that of {worst.address} has the norm "
            f"{norm:.2g}, {ratio:.2g} times that of the weight.",
            advice="Clip the gradients, lower the learning rate or the initial weights, normalise, or use gates in a "
            "recurrent layer. (Where the loss is scaled for half precision, gradients are as many times larger.)",
        )
    ]
