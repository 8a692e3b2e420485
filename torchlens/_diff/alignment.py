"""Pairing two sequences in order: the pairs that together score highest."""

import numpy as np


def aligned(scores: np.ndarray) -> list[tuple[int, int]]:
    """Pairs (row, column), both rising, whose scores add up to the most; -inf is no pair, and
    leaving out costs nothing.
    """
    rows, columns = scores.shape
    best = np.zeros((rows + 1, columns + 1))
    for row in range(rows):
        diagonal = best[row, :-1] + scores[row]
        best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], diagonal))
    found = []
    row, column = rows, columns
    while row and column:
        here = best[row, column]
        if here == best[row - 1, column]:
            row -= 1
        elif here == best[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            found.append((row, column))
    return found[::-1]
