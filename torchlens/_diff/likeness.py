"""How similar two entries are, apart from their values: what they do, with which weights, and
where.
"""

import numpy as np

from torchlens._diff.subject import Features


def scores_of(
    a: Features, row: int, b: Features, columns: np.ndarray, both_last: np.ndarray
) -> np.ndarray:
    """How well an entry of the reference goes with each of several of the candidate; -inf where it
    does not at all.
    """
    same_size = (b.size[columns] == a.size[row]) & (b.nonfinite[columns] == a.nonfinite[row])
    larger = np.maximum(b.scale[columns], a.scale[row])
    apart = np.abs(b.features[columns] - a.features[row]).max(axis=1)
    apart = np.maximum(
        apart, np.abs(b.scale[columns] - a.scale[row]) / np.where(larger > 0, larger, 1.0)
    )
    close = np.where(same_size, np.clip(1.0 - 2.0 * apart, 0.0, 1.0), 0.0)
    same_dims = b.dims[columns] == a.dims[row]
    same_type = b.type[columns] == a.type[row]
    same_family = b.family[columns] == a.family[row]
    both_act = b.acts[columns] & a.acts[row]
    same_own = (b.own[columns] == a.own[row]) & a.has_own[row]
    both_exit = b.exits[columns] & a.exits[row] & (b.digits[columns] == a.digits[row])
    allowed = same_size & (
        same_family | both_act | (close > 0.8) | same_own | both_exit | both_last
    )
    allowed |= same_own & same_family
    allowed &= (b.main[columns] == a.main[row]) | (b.main[columns] < 0) | (a.main[row] < 0)
    score = (
        1.0 * same_dims
        + 0.3 * same_size
        + 1.5 * close**2
        + 0.3 * same_type
        + 0.4 * (same_family | both_act)
    )
    score = score + 0.8 * same_own + 0.7 * both_exit + 0.5 * both_last
    return np.where(allowed, score, -np.inf)


def is_alike(a: Features, row: int, b: Features, column: int) -> bool:
    """Whether two entries do the same kind of thing with the same weights, or are what modules
    return.
    """
    if (
        b.family[column] == a.family[row]
        or (a.acts[row] and b.acts[column])
        or (a.has_own[row] and a.own[row] == b.own[column])
    ):
        return True
    return bool(a.exits[row] and b.exits[column] and a.digits[row] == b.digits[column])
