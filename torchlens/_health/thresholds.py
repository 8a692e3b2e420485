"""The limits beyond which something is a finding."""

from collections.abc import Mapping
from typing import Any

from torchlens._text.error_wording import did_you_mean, got

THRESHOLDS: dict[str, float] = {
    # The share of a layer's units that gave nothing but zero in all steps.
    "dead_share": 0.4,
    # How many values of a unit, or of a saturated activation, must have been seen before anything
    # is said of it.
    "min_values": 64,
    # The share of an activation's values that lie at its limits.
    "saturated_share": 0.5,
    # How near to a limit that is, of the distance between the limits.
    "saturation_margin": 0.01,
    # The norm of a weight's gradient, to that of the weight with the largest: less is vanishing.
    "vanishing_ratio": 1e-4,
    # The root mean square of a weight's gradient, to that of the weight itself: more is exploding.
    "exploding_ratio": 1e4,
}


def checked_thresholds(given: Mapping[str, Any] | None) -> dict[str, float]:
    """All thresholds, with the caller's values in place of the defaults."""
    found = dict(THRESHOLDS)
    for name, value in (given or {}).items():
        if name not in THRESHOLDS:
            hint = did_you_mean(name, THRESHOLDS)
            raise ValueError(
                f"There is no threshold {name!r}. {hint}Available: "
                f"{', '.join(map(repr, THRESHOLDS))}."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ValueError(
                f"The threshold {name!r} must be a number of at least 0, got {got(value)}."
            )
        found[name] = float(value)
    return found
