"""Biases that one model has as two and the other as one: `bias_ih + bias_hh` of torch's recurrent
networks.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torchlens._recording.relative_error import relative_error

_NEIGHBOURS = 8  # places by which the two may be apart in the order of the weights
_MOST_PARTS = 8

Values = Sequence[torch.Tensor | None]


class Sum(NamedTuple):
    """Two weights of one side, and those of the other that are their sum, or parts of it one after
    the other.
    """

    terms: tuple[int, int]
    wholes: list[int]


def sums_of(
    values: Values, free: Sequence[int], others: Values, other_free: Sequence[int], close: float
) -> list[Sum]:
    """What the other side has as a sum of two vectors, which nothing else is: `free` are those
    without a partner.
    """
    found: list[Sum] = []
    gone: set[int] = set()
    taken: set[int] = set()
    for first, second in _neighbours(values, free):
        if first in gone or second in gone:
            continue
        one, two = values[first], values[second]
        assert one is not None
        assert two is not None
        left = [number for number in other_free if number not in taken]
        wholes = _wholes(one + two, others, left, close)
        if wholes:
            found.append(Sum((first, second), wholes))
            gone.update((first, second))
            taken.update(wholes)
    return found


def _neighbours(values: Values, free: Sequence[int]) -> Iterator[tuple[int, int]]:
    vectors = [
        (number, value)
        for number in free
        if (value := values[number]) is not None and value.dim() == 1
    ]
    for place, (first, one) in enumerate(vectors):
        for second, two in vectors[place + 1 :]:
            if second - first > _NEIGHBOURS:
                break
            if one.shape == two.shape and len(one) > 1 and float(one.norm()) and float(two.norm()):
                yield first, second


def _wholes(total: torch.Tensor, others: Values, free: Sequence[int], close: float) -> list[int]:
    for count in range(1, _MOST_PARTS + 1):
        if len(total) % count or len(total) == count:
            continue
        found: list[int] = []
        for piece in total.chunk(count):
            for number in free:
                other = others[number]
                is_of_size = (
                    other is not None and other.numel() == len(piece) and number not in found
                )
                if (
                    is_of_size
                    and other is not None
                    and relative_error(piece, other.reshape(-1)) <= close
                ):
                    found.append(number)
                    break
            else:
                break
        if len(found) == count:
            return found
    return []
