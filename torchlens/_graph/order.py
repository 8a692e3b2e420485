"""The order in which a log lists what several threads did at once: that of the program, the same in
every run.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from torchlens._graph.connections import children_of
from torchlens._recording.recording import Recording, in_program_order


def order_of_rows(recording: Recording, parents: Sequence[Sequence[int]]) -> list[int]:
    """The rows as if each thread had run to its end where it began, except that what a row reads
    comes before it.
    """
    order = in_program_order(recording.branches, len(parents))
    if not recording.branches:
        return order
    place_of = {number: place for place, number in enumerate(order)}
    children = children_of(parents)
    num_awaited = [len(own) for own in parents]
    ready = [place_of[number] for number, count in enumerate(num_awaited) if not count]
    heapify(ready)
    found = []
    while ready:
        number = order[heappop(ready)]
        found.append(number)
        for child in children[number]:
            num_awaited[child] -= 1
            if not num_awaited[child]:
                heappush(ready, place_of[child])
    return found
