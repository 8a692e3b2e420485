"""The order of a program whose threads wrote into one list, each when its turn came."""

from collections.abc import Sequence
from typing import NamedTuple


class Branch(NamedTuple):
    """What one thread, or one job of a pool, wrote into a list. The first branch is the thread that
    the log began in.
    """

    parent: int  # the branch that began it
    at: int  # how long the list was then
    own: list[int]  # the places it wrote, rising; of the first branch: all that no other did


def in_program_order(branches: Sequence[Branch], length: int) -> list[int]:
    """The places of the list as if each branch had run to its end where it began."""
    if not branches:
        return list(range(length))
    begun: dict[int, list[int]] = {}
    claimed: set[int] = set()
    for number, branch in enumerate(branches[1:], start=1):
        begun.setdefault(branch.parent, []).append(number)
        claimed.update(branch.own)
    order: list[int] = []
    # Places still to come, and branches still to be put between them: the last first.
    pending: list[tuple[list[int], list[int]]] = []

    def enter(number: int) -> None:
        own = (
            [place for place in range(length) if place not in claimed]
            if number == 0
            else branches[number].own
        )
        pending.append((own[::-1], begun.get(number, [])[::-1]))

    enter(0)
    while pending:
        own, inside = pending[-1]
        if inside and (not own or branches[inside[-1]].at <= own[-1]):
            enter(inside.pop())
        elif own:
            order.append(own.pop())
        else:
            pending.pop()
    return order
