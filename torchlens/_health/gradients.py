"""Gradients that vanish or explode on their way through a model: the rules."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from torchlens._health.finding import Finding

# A weight whose numbers are smaller than this is compared as if they were this large: it may start
# at nearly zero.
_SMALLEST_WEIGHT = 1e-2


class WeightNorms(NamedTuple):
    """A weight: its address and its module's, the norm of its gradient, and its own."""

    address: str
    module: str
    gradient_norm: float
    own_norm: float
    num_elements: int


def vanishing(weights: Sequence[WeightNorms], largest: float, threshold: float) -> list[Finding]:
    """The weights from the model's first on that get next to nothing: what comes later gets its
    gradient.

    `weights` in the order in which they are used; `largest` is the largest norm of a gradient in
    the model.
    """
    starved: list[WeightNorms] = []
    for weight in weights:
        if weight.gradient_norm >= threshold * largest:
            break
        starved.append(weight)
    if not starved:
        return []
    if all(weight.gradient_norm == 0 for weight in starved):
        return [_zero_gradients(starved)]
    worst = min(starved, key=lambda weight: weight.gradient_norm)
    ratio = worst.gradient_norm / largest
    return [
        Finding(
            kind="vanishing gradient",
            severity="warning",
            where=worst.address,
            module=worst.module,
            number=ratio,
            threshold=threshold,
            text=f"The gradients of the first {len(starved)} of {len(weights)} weights vanish: "
            f"that of {worst.address} has "
            f"the norm {worst.gradient_norm:.2g}, {ratio:.1g} of the largest.",
            advice="The first layers learn next to nothing. Residual connections, normalisation, "
            "ReLU-like activations or "
            "another initialisation help.",
        )
    ]


def _zero_gradients(starved: list[WeightNorms]) -> Finding:
    first = starved[0]
    return Finding(
        kind="zero gradients",
        severity="info",
        where=first.address,
        module=first.module,
        number=0.0,
        threshold=0.0,
        text=f"The gradients of {len(starved)} weights from {first.address} on are exactly zero "
        "in all backward passes.",
        advice="A layer after them may start at zero, which the first optimizer step ends, or the "
        "units there are dead.",
    )


def exploding(weights: Sequence[WeightNorms], threshold: float) -> list[Finding]:
    """The weight whose gradient is largest beside it, if that is too large."""
    found: list[tuple[float, WeightNorms]] = []
    for weight in weights:
        size = max(weight.own_norm, _SMALLEST_WEIGHT * sqrt(weight.num_elements))
        ratio = weight.gradient_norm / size
        if ratio > threshold:
            found.append((ratio, weight))
    if not found:
        return []
    ratio, worst = max(found, key=lambda item: item[0])
    return [
        Finding(
            kind="exploding gradient",
            severity="warning",
            where=worst.address,
            module=worst.module,
            number=ratio,
            threshold=threshold,
            text=f"The gradients of {len(found)} of {len(weights)} weights explode: that of "
            f"{worst.address} has the norm "
            f"{worst.gradient_norm:.2g}, {ratio:.2g} times that of the weight.",
            advice="Clip the gradients, lower the learning rate or the initial weights, "
            "normalise, or use gates in a "
            "recurrent layer. (Where the loss is scaled for half precision, gradients are as many "
            "times larger.)",
        )
    ]
