"""Gradients that vanish or explode on their way through the model."""

from collections.abc import Mapping
from statistics import median

from torchlens._health.finding import Finding
from torchlens._health.gradients import WeightNorms, exploding, vanishing
from torchlens._profile.health.checker import Health
from torchlens._profile.records import Measurements, ParameterRecord


def gradient_findings(
    measurements: Measurements, health: Health, limits: Mapping[str, float]
) -> list[Finding]:
    norms = {address: median(own) for address, own in health.gradient_norms.items()}
    weights = [
        record
        for record in _in_order_of_use(measurements)
        if _is_matrix(record) and record.address in norms
    ]
    finite = [
        record for record in weights if norms[record.address] < float("inf")
    ]  # false for NaN, too
    largest = max((norms[record.address] for record in finite), default=0.0)
    if largest == 0:
        return []
    # Tokens and positions that a module with modules inside has learned are no layer that the
    # others wait for.
    modules = measurements.modules
    layers = [
        record
        for record in finite
        if record.module not in modules or not modules[record.module].children
    ]
    return [
        *vanishing(
            [_norms_of(record, norms, health) for record in layers or finite],
            largest,
            limits["vanishing_ratio"],
        ),
        *exploding(
            [_norms_of(record, norms, health) for record in finite], limits["exploding_ratio"]
        ),
    ]


def _norms_of(record: ParameterRecord, norms: Mapping[str, float], health: Health) -> WeightNorms:
    own_norm = health.parameter_norms[record.address]
    return WeightNorms(
        record.address, record.module, norms[record.address], own_norm, record.num_elements
    )


def _is_matrix(record: ParameterRecord) -> bool:
    """Weights in the proper sense: no biases, scales, or single vectors that are learned."""
    return sum(size > 1 for size in record.shape) > 1


def _in_order_of_use(measurements: Measurements) -> list[ParameterRecord]:
    """In the order in which their modules were called; those whose module was not called stand
    where they were made.
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
