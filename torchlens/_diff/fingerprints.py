"""Fingerprints of values that do not depend on the order of their elements: moments and
quantiles.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchlens._recording.tolerance import numbers

# Sorting takes long: larger tensors have no quantiles.
_MOST_SORTED = 1 << 17
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_EXACT = 1e-12


class Fingerprint(NamedTuple):
    """The number of elements of a value, their root mean square, the number of elements that are
    not finite, and features relative to the root mean square.
    """

    size: int
    scale: float
    nonfinite: int
    features: np.ndarray

    @property
    def is_constant(self) -> bool:
        """True if all elements are the same, or there are none."""
        return bool(
            self.size == 0 or self.scale == 0.0 or self.features[4] - self.features[5] < _EXACT
        )

    def apart(self, other: "Fingerprint") -> float:
        """The distance: 0 for the same values in any order, 1 and more for unrelated ones."""
        if self.size != other.size or self.nonfinite != other.nonfinite:
            return float("inf")
        larger = max(self.scale, other.scale)
        if not larger:
            return 0.0
        ratio = abs(self.scale - other.scale) / larger
        return max(ratio, float(np.abs(self.features - other.features).max()))


class Shelf:
    """An index of fingerprints, to find those near a given one."""

    def __init__(self, prints: Sequence[tuple[int, Fingerprint]]) -> None:
        self._by_size: dict[int, tuple[list[int], np.ndarray, np.ndarray]] = {}
        sizes: dict[int, list[tuple[int, Fingerprint]]] = {}
        for number, print_ in prints:
            sizes.setdefault(print_.size, []).append((number, print_))
        for size, own in sizes.items():
            own.sort(key=lambda item: item[1].scale)
            scales = np.array([print_.scale for _, print_ in own])
            features = np.array([[print_.nonfinite, *print_.features] for _, print_ in own])
            self._by_size[size] = ([number for number, _ in own], scales, features)

    def near(self, own: Fingerprint, limit: float, feature_limit: float) -> list[tuple[float, int]]:
        """(distance, number) of those whose scale and features are within the limits."""
        if own.size not in self._by_size:
            return []
        numbers_, scales, features = self._by_size[own.size]
        first, last = np.searchsorted(
            scales, [own.scale * (1 - limit), own.scale * (1 + limit) + 1e-300]
        )
        if first == last:
            return []
        chosen = features[first:last]
        apart = np.abs(chosen[:, 1:] - own.features).max(axis=1)
        apart = np.maximum(apart, np.abs(scales[first:last] - own.scale) / (own.scale or 1.0))
        places = np.flatnonzero((apart <= feature_limit) & (chosen[:, 0] == own.nonfinite))
        return [(float(apart[place]), numbers_[int(first) + int(place)]) for place in places]


def fingerprint(value: torch.Tensor) -> Fingerprint:
    flat = numbers(value).flatten()
    size, nonfinite = flat.numel(), 0
    if not size:
        return Fingerprint(0, 0.0, 0, np.zeros(11))
    squares = float(flat.dot(flat))
    if squares != squares or squares == float("inf"):
        # Masks use -inf or the lowest number: both count as not finite.
        finite = flat[flat.isfinite() & (flat.abs() < 1e150)]
        nonfinite, flat = size - finite.numel(), finite
        if not flat.numel():
            return Fingerprint(size, 0.0, nonfinite, np.zeros(11))
        squares = float(flat.dot(flat))
    scale = (squares / flat.numel()) ** 0.5
    if not scale:
        return Fingerprint(size, 0.0, nonfinite, np.zeros(11))
    flat = flat / scale
    if flat.numel() <= _MOST_SORTED:
        ordered = flat.sort().values
        places = [round(part * (flat.numel() - 1)) for part in _QUANTILES]
        quantiles = ordered[places].tolist()
        high, low = float(ordered[-1]), float(ordered[0])
    else:
        quantiles = [0.0] * len(_QUANTILES)
        low, high = (float(end) for end in flat.aminmax())
    mean, magnitude = float(flat.mean()), float(flat.abs().mean())
    cube = float(flat.dot(flat * flat)) / flat.numel()
    fourth = float((flat * flat).dot(flat * flat)) / flat.numel()
    # A single large element changes the higher moments more than the norm: roots reduce that.
    features = [mean, magnitude, np.cbrt(cube), fourth**0.25, high, low, *quantiles]
    return Fingerprint(size, scale, nonfinite, np.array(features))
