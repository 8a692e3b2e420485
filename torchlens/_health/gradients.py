"""Rules for what trains the weights: vanishing and exploding gradients, and the size of updates."""

from collections.abc import Collection, Mapping, Sequence
from math import inf, isnan, sqrt
from typing import NamedTuple

from torchlens._health.finding import Finding

# A weight whose numbers are smaller than this is compared as if they were this large: it may start
# at nearly zero.
_SMALLEST_WEIGHT = 1e-2
# A usual step changes a weight by so much of its size, by root mean square.
_USUAL_UPDATES = 1e-4, 1e-2


class WeightNorms(NamedTuple):
    """A weight: its address and its module's, the norm of its gradient, and its own."""

    address: str
    module: str
    gradient_norm: float
    own_norm: float
    num_elements: int


def gradient_findings(
    weights: Sequence[WeightNorms], outer: Collection[str], limits: Mapping[str, float]
) -> list[Finding]:
    """Gradients that vanish or explode. `weights` are matrices in the order of their use.

    `outer` are the modules with modules inside: the tokens and positions that such a module has
    learned are no layer that the others wait for.
    """
    finite = [weight for weight in weights if weight.gradient_norm < inf]  # false for NaN, too
    largest = max((weight.gradient_norm for weight in finite), default=0.0)
    layers = [weight for weight in finite if weight.module not in outer]
    return [
        *_vanishing(layers or finite, largest, limits["vanishing_ratio"]),
        *_exploding(finite, limits["exploding_ratio"]),
    ]


def update_finding(address: str, module: str, ratio: float, share: float) -> Finding | None:
    """An update of an unusual size: the change of a weight in a step, by the weight itself. `share`
    is the part of the weight that takes part in the step.
    """
    low, high = _USUAL_UPDATES
    if isnan(ratio) or low <= ratio <= high:
        return None
    is_small = ratio < low
    part = f" where it has a gradient ({share:.1%} of it)" if share < 0.9 else ""
    return Finding(
        kind="small update" if is_small else "large update",
        severity="info",
        where=address,
        module=module,
        number=ratio,
        threshold=low if is_small else high,
        text=f"A step changes {address} by {ratio:.1g} of its size{part} (by root mean "
        "square, sampled).",
        advice="It hardly learns: try a larger learning rate, or find what keeps its gradient "
        "small."
        if is_small
        else "That is a lot: try a smaller learning rate, or a warm-up.",
    )


def _vanishing(weights: Sequence[WeightNorms], largest: float, threshold: float) -> list[Finding]:
    """The first weights of the model, as long as their gradients are tiny beside the largest; all
    of them if all gradients are zero.
    """
    starved: list[WeightNorms] = []
    for weight in weights:
        if weight.gradient_norm >= threshold * largest > 0:
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


def _exploding(weights: Sequence[WeightNorms], threshold: float) -> list[Finding]:
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
