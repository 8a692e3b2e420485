"""t-SNE over steps: each step begins where the last one ended, so that points move only as far as
what they stand for.

Exact, for some hundred points. No random numbers: the first step begins with the two directions of
most variance.
"""

import numpy as np

_FIRST, _EXAGGERATED, _LATER = (
    400,
    100,
    60,
)  # iterations: of the first step, of those exaggerated, of the following
_TINY = 1e-12


class WarmTSNE:
    """Projects one array after the other (one row a point) to two dimensions."""

    def __init__(self, perplexity: float = 30.0) -> None:
        self._perplexity = perplexity
        self._features: np.ndarray | None = None
        self._points: np.ndarray | None = None

    def project(self, features: np.ndarray) -> np.ndarray:
        """The points of an array. Rows need not stand for the same things as before, nor be as
        many.
        """
        if len(features) < 4:
            return np.zeros((len(features), 2))
        distances = _squared_distances(features, features)
        targets = _affinities(distances, min(self._perplexity, (len(features) - 1) / 3))
        if (
            self._points is None
            or self._features is None
            or self._features.shape[1] != features.shape[1]
        ):
            start = _principal(features)
            points = _descend(start, targets * 12, _EXAGGERATED)
            points = _descend(points, targets, _FIRST)
        else:
            start = self._from_neighbours(features)
            points = _turned_to(_descend(start, targets, _LATER), start)
        self._features, self._points = features.copy(), points
        return points

    def _from_neighbours(self, features: np.ndarray) -> np.ndarray:
        """Each point begins among those of the last step that were most like it: where it was, if
        it has not changed.
        """
        assert self._features is not None
        assert self._points is not None
        distances = _squared_distances(features, self._features)
        nearest = np.argsort(distances, 1, kind="stable")[:, :3]
        near = np.take_along_axis(distances, nearest, 1)
        weights = 1 / (near + 1e-6 * distances.mean() + _TINY)
        weights /= weights.sum(1, keepdims=True)
        return np.einsum("ij,ijk->ik", weights, self._points[nearest])


def _squared_distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    found = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    return np.maximum(found, 0)


def _principal(features: np.ndarray) -> np.ndarray:
    centred = features - features.mean(0)
    left, sizes, right = np.linalg.svd(centred, full_matrices=False)
    found = np.zeros((len(features), 2))
    width = min(2, len(sizes))
    signs = np.sign(right[np.arange(width), np.abs(right[:width]).argmax(1)])
    found[:, :width] = left[:, :width] * sizes[:width] * np.where(signs < 0, -1, 1)
    spread = found[:, 0].std()
    return (
        found / spread * 1e-2
        if spread
        else np.stack([np.arange(len(found)), np.zeros(len(found))], 1) * 1e-4
    )


def _affinities(distances: np.ndarray, perplexity: float) -> np.ndarray:
    """How near each pair is, by the width of each point's surroundings that gives it `perplexity`
    neighbours.
    """
    count = len(distances)
    scaled = distances / max(float(distances.mean()), _TINY)
    target = np.log(perplexity)
    low, high = np.full(count, 1e-4), np.full(count, 1e7)
    off = ~np.eye(count, dtype=bool)
    nearest = np.where(off, scaled, np.inf).min(1, keepdims=True)
    beyond = np.where(
        off, scaled - nearest, 0
    )  # a point is nearer to itself than the nearest: that would overflow
    for _ in range(50):
        middle = np.sqrt(low * high)
        weights = np.exp(-beyond * middle[:, None]) * off
        total = weights.sum(1)
        entropy = np.log(total) + middle * (beyond * weights).sum(1) / total
        is_wide = entropy > target
        low, high = np.where(is_wide, middle, low), np.where(is_wide, high, middle)
    shares = weights / total[:, None]
    both = (shares + shares.T) / (2 * count)
    return np.maximum(both, _TINY)


def _descend(points: np.ndarray, targets: np.ndarray, iterations: int) -> np.ndarray:
    points = points.copy()
    speed, gains = np.zeros_like(points), np.ones_like(points)
    rate = max(len(points) / 48, 50.0)
    for number in range(iterations):
        kernel = 1 / (1 + _squared_distances(points, points))
        np.fill_diagonal(kernel, 0)
        pull = (targets - np.maximum(kernel / kernel.sum(), _TINY)) * kernel
        gradient = 4 * (pull.sum(1)[:, None] * points - pull @ points)
        agrees = np.sign(gradient) == np.sign(speed)
        gains = np.maximum(np.where(agrees, gains * 0.8, gains + 0.2), 0.01)
        speed = (0.5 if number < 20 else 0.8) * speed - rate * gains * gradient
        points += speed
        points -= points.mean(0)
    return points


def _turned_to(points: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Turned (or mirrored) and moved so that they lie as near to others as they can: orthogonal
    Procrustes.
    """
    centre = goal.mean(0)
    left, _, right = np.linalg.svd(points.T @ (goal - centre))
    found: np.ndarray = points @ (left @ right) + centre
    return found
