"""Random programs with loops, and the layers that they have by definition, found by trying every
loop at every place.
"""

import random
from collections.abc import Sequence
from typing import Any

from torchlens._graph.repeats import UnionFind

Parents = Sequence[Sequence[int]]


def random_program(rng: random.Random) -> tuple[list[int], list[tuple[int, ...]]]:
    """The keys and the parents of at most 40 operations, which a program with nested loops runs."""
    keys: list[int] = []
    parents: list[tuple[int, ...]] = []
    variables = {number: -1 - number % 3 for number in range(6)}

    def run(statements: list[Any]) -> None:
        for statement in statements:
            if statement[0] == "loop":
                for _ in range(statement[1]):
                    run(statement[2])
            else:
                _, key, written, read = statement
                keys.append(key)
                parents.append(tuple(variables[number] for number in read))
                variables[written] = len(keys) - 1

    def body(depth: int, longest: int) -> list[Any]:
        statements: list[Any] = []
        for _ in range(rng.randint(1, longest)):
            if depth < 2 and rng.random() < 0.35:
                statements.append(("loop", rng.randint(1, 4), body(depth + 1, 3)))
            else:
                read = [rng.randint(0, 5) for _ in range(rng.choice([1, 1, 1, 2]))]
                statements.append(("call", rng.randint(0, 3), rng.randint(0, 3), read))
        return statements

    while not 2 <= len(keys) <= 40:
        keys.clear()
        parents.clear()
        variables.update({number: -1 - number % 3 for number in range(6)})
        run(body(0, 5))
    return keys, parents


def layers_by_definition(keys: Sequence[int], parents: Parents) -> list[int]:
    """For each operation, the first operation of its layer."""
    groups = UnionFind()
    for period in range(1, len(keys) // 2 + 1):
        for start in range(len(keys) - 2 * period + 1):
            stop = start
            while stop + period < len(keys) and _corresponds(stop, start, period, keys, parents):
                stop += 1
            if stop - start >= period and _has_state(start, period, parents):
                for operation in range(start, stop):
                    groups.join(operation, operation + period)
    return [groups.find(operation) for operation in range(len(keys))]


def _corresponds(
    operation: int, start: int, period: int, keys: Sequence[int], parents: Parents
) -> bool:
    """Whether an operation of a loop and that a period later do the same with the same."""
    mine, later = parents[operation], parents[operation + period]
    if keys[operation] != keys[operation + period] or len(mine) != len(later):
        return False
    return all(
        (a == b and a < start)  # from outside the loop
        or (b == a + period and b >= start)  # counterparts
        or (a < start <= b < start + period)  # what the first period reads in place of it
        for a, b in zip(mine, later, strict=True)
    )


def _has_state(start: int, period: int, parents: Parents) -> bool:
    """Whether a value leads to itself in a later period, and all that the first period reads from
    before stands for such a value or one made from it.
    """
    second = range(start + period, start + 2 * period)
    above = {
        operation % period: {parent % period for parent in parents[operation] if parent >= start}
        for operation in second
    }
    for _ in above:
        for own in above.values():
            own |= set().union(*(above[place] for place in own))
    cycle = {place for place, own in above.items() if place in own}
    stateful = {place for place, own in above.items() if place in cycle or own & cycle}
    carried = (
        b % period
        for operation in range(start, start + period)
        for a, b in zip(parents[operation], parents[operation + period], strict=True)
        if a < start <= b
    )
    return bool(cycle) and stateful.issuperset(carried)
