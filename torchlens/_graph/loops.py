"""Which operations are passes of one layer.

Two operations are passes of one layer if they do the same thing and belong to a repeated structure.
What an operation does is its key: the function and its parameters, or, without parameters, the
function, its other arguments, the shapes of its inputs and its module. There are two kinds of
repeated structure; both are found in near-linear time and joined by union-find:

- shared parameters: operations with parameters and equal keys are passes of one layer; so are all
  operations in calls of one module with parameters that did the same, and, step by step, operations
  that are connected in the same way to passes of one layer (the `relu` after each call of the same
  `linear`);
- repetition: the sequence of keys repeats back to back (`add sin add sin ...`), every operation
  reads the counterparts of what its counterpart one period earlier read, and each period reads from
  the one before it. Nested loops are found from the inside out.
"""

import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import itemgetter

from torchlens._graph.repeats import Repetition, UnionFind, next_occurrences, stretches
from torchlens._recording.operation_kinds import INDEXING

# Operations that take a part of a tensor, in a loop often with another index in each step.
TAKING_A_PART = INDEXING | {
    "chunk", "getitem", "narrow", "select", "slice", "split", "splitwithsizes", "tensorsplit",
    "unbind",
}  # fmt: skip


def group_into_layers(
    keys: Sequence[int],
    has_params: Sequence[bool],
    kinds: Sequence[int],
    parents: Sequence[Sequence[int]],
    steps: Sequence[int],
    calls: Sequence[int],
    repeated: Iterable[Sequence[Sequence[int]]],
) -> list[int]:
    """For each operation, in order of execution, the first operation of its layer.

    `kinds` are coarser keys (without parameters, the function alone). Negative numbers in `parents`
    are inputs and buffers. `steps` are the keys by which repetition is found: that of `x[:, t]` at
    one place in the source is the same for each `t`, so that the operations around it become passes
    of one layer, although it does not. `calls` are the innermost calls of modules in which the
    operations ran, and `repeated` are the operations in each call of a module called repeatedly.
    """
    groups = UnionFind()
    _join_repetitions(keys, steps, parents, groups)
    for operations in repeated:
        _join_calls(operations, keys, has_params, parents, groups)
    _join_around_parameters(keys, has_params, kinds, parents, calls, groups)
    return [groups.find(operation) for operation in range(len(keys))]


# -- repetition ------------------------------------------------------------------------------------


def _join_repetitions(
    keys: Sequence[Hashable],
    steps: Sequence[int],
    parents: Sequence[Sequence[int]],
    groups: UnionFind,
) -> None:
    known: set[Repetition] = set()
    pairs = _candidates(steps, parents)
    while True:
        repeating: dict[int, list[int]] = {}  # period → operations whose key comes again after it
        for before, operation in pairs:
            repeating.setdefault(operation - before, []).append(before)
        runs: list[Repetition] = []
        for period, operations in repeating.items():
            for start, end in stretches(steps, period, sorted(operations)):
                if end - start >= period:
                    runs += _join_run(start, end, period, keys, parents, groups)
        # In a loop around loops, where each operation occurs several times, the period of the outer
        # loop does not show in single operations, but the inner loops repeat.
        new = sorted(set(runs) - known)
        if len(new) < 2:
            return
        known.update(new)
        pairs = iter(sorted(set(_loops_that_come_again(new, steps))))


def _candidates(
    steps: Sequence[int], parents: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Pairs of operations that may be one period apart: each with the next equal one. If a body has
    several equal steps, what they read tells them apart, or one reads its own result.
    """
    yield from next_occurrences(enumerate(steps))
    reads = [
        (step, *(steps[parent] if parent >= 0 else parent for parent in own))
        for step, own in zip(steps, parents, strict=True)
    ]
    yield from next_occurrences(enumerate(reads))
    for operation, own in enumerate(parents):
        for parent in own:
            if parent >= 0 and steps[parent] == steps[operation]:
                yield parent, operation


def _loops_that_come_again(
    runs: Sequence[Repetition], steps: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Operations at the same place of a loop and of the next equal loop.

    An operation directly before or after a loop may look like a part of it at one occurrence and
    not at another, so the first operation of a loop is not a reliable place. Reliable are the first
    and the last start of one chosen rotation of its body.
    """
    ends: tuple[list[tuple[int, Hashable]], ...] = [], []
    for run in runs:
        body = steps[run.start : run.start + run.period]
        turn = _least_rotation(body)
        first = run.start + turn
        last = first + (run.stop - run.period - first) // run.period * run.period
        loop = *body[turn:], *body[:turn]
        for own, place in zip(ends, (first, last), strict=True):
            own += [(place, loop), (place, (last - first, loop))]
    for own in ends:
        yield from next_occurrences(sorted(own, key=itemgetter(0)))


def _least_rotation(body: Sequence[int]) -> int:
    """Where the smallest rotation of a sequence begins: the same rotation for all sequences that
    are rotations of each other.
    """
    size, one, other, same = len(body), 0, 1, 0
    while one < size and other < size and same < size:
        a, b = body[(one + same) % size], body[(other + same) % size]
        if a == b:
            same += 1
            continue
        if a > b:
            one = max(one + same + 1, other)
            other = one + 1
        else:
            other += same + 1
        same = 0
    return min(one, other)


def _join_run(
    start: int,
    end: int,
    period: int,
    keys: Sequence[Hashable],
    parents: Sequence[Sequence[int]],
    groups: UnionFind,
) -> list[Repetition]:
    """Joins operations one period apart if their parents are one period apart, too. Returns the
    runs.

    Reads from outside the loop bound its beginning from below, and reads from inside bound it from
    above: `v = sin(x)` before `for ...: x = sin(x + v)` looks like a part of the loop, but every
    step reads `v`.
    """
    runs = []
    origins = _Origins()

    def join(stop: int) -> None:
        first = _beginning_of_loop(start, stop, period, parents)
        if first is not None:
            for operation in range(first, stop):
                if keys[operation] == keys[operation + period]:
                    groups.join(operation, operation + period)
            runs.append(Repetition(first, stop + period, period))

    latest = _LatestBeginnings()
    for operation in range(start, end):
        mine, later = parents[operation], parents[operation + period]
        # A fast path for the most frequent case.
        if len(mine) == 1 == len(later) and later[0] == mine[0] + period:
            first, last = 0, later[0]
        else:
            first, last = _beginnings(mine, later, period)
        if last < start or last < first or origins.differ(mine, later, start):
            join(operation)
            origins.note(operation, operation + period, later)
            start = operation + 1
            latest = _LatestBeginnings()
            continue
        if first > start:
            join(operation)
            start = latest.first_from(first)
        if last < operation:
            latest.note(operation, last)
    join(end)
    return runs


class _LatestBeginnings:
    """Operations, each with the last operation at which a loop that contains it can begin."""

    def __init__(self) -> None:
        self._bounds: deque[tuple[int, int]] = deque()  # both ascending

    def note(self, operation: int, last: int) -> None:
        """Adds the bound of an operation, and drops those that it makes superfluous."""
        while self._bounds and self._bounds[-1][1] >= last:
            self._bounds.pop()
        self._bounds.append((operation, last))

    def first_from(self, start: int) -> int:
        """The first operation from `start` on at which a loop can begin."""
        while self._bounds and min(self._bounds[0]) < start:
            start = max(start, self._bounds.popleft()[0] + 1)
        return start


class _Origins:
    """Operations a period apart that are computed from different tensors outside the loop.

    In `p[0].exp() + p[1].exp() + r[0].exp() + r[1].exp()`, the second `exp` and the third are a
    period apart, but read `p` and `r`. A loop cannot begin between `p[1]` and its `exp`: what the
    third `exp` reads is no result of the step before.
    """

    def __init__(self) -> None:
        self._first = 0  # what is before is outside
        self._later: set[int] = set()  # the later operation of each two

    def note(self, operation: int, later: int, parents: Sequence[int]) -> None:
        """Notes that an operation and a later one read different tensors."""
        if not self._later:
            self._first = operation
        if all(parent < self._first or parent in self._later for parent in parents):
            self._later.add(later)

    def differ(self, mine: Sequence[int], later: Sequence[int], start: int) -> bool:
        """True if two operations read such operations, the first one before the loop's `start`."""
        return bool(self._later) and any(
            a < start and b in self._later for a, b in zip(mine, later, strict=True)
        )


def _beginnings(mine: Sequence[int], later: Sequence[int], period: int) -> tuple[int, int]:
    """The first and the last operation at which a loop can begin, given the parents of an operation
    and of the same one a period later; (0, -1) if there is no such loop.
    """
    if len(mine) != len(later):
        return 0, -1
    first, last = 0, sys.maxsize
    for a, b in zip(mine, later, strict=True):
        if a == b:  # from outside
            first = max(first, a + 1)
        else:
            last = min(last, b)
            if b != a + period:  # only the first step reads something else
                first = max(first, a + 1, b - period + 1)
    return first, last


def _beginning_of_loop(
    start: int, stop: int, period: int, parents: Sequence[Sequence[int]]
) -> int | None:
    """Where the loop in a run begins; None if it is no loop.

    A loop has a state: a value that leads to itself one or more periods later. What a period reads
    from the one before must depend on the state. In `f(p[0]), f(p[1]), f(r[0]), f(r[1])`, each
    index after a call of `f` looks like the start of a period that reads the one before.
    """
    if stop - start < period:
        return None
    stateful = _depending_on_state(start, period, parents)
    operation = start
    while operation < start + period <= stop:
        for mine, later in zip(parents[operation], parents[operation + period], strict=True):
            if mine < start <= later and later % period not in stateful:
                start = operation + 1
        operation += 1
    return start if stateful and start + period <= stop else None


def _depending_on_state(start: int, period: int, parents: Sequence[Sequence[int]]) -> set[int]:
    """The operations of a loop, modulo its period, that are on a cycle of reads or behind one."""
    reads: dict[int, list[int]] = {}  # operation → the operations in the loop that it reads
    readers: dict[int, list[int]] = {}
    for operation in range(start + period, start + 2 * period):
        place = operation % period
        reads[place] = [parent % period for parent in parents[operation] if parent >= start]
        for parent in reads[place]:
            readers.setdefault(parent, []).append(place)
    unread = {place: len(own) for place, own in reads.items()}
    free = [place for place, count in unread.items() if not count]
    for place in free:
        for reader in readers.get(place, ()):
            unread[reader] -= 1
            if not unread[reader]:
                free.append(reader)
    return unread.keys() - set(free)


# -- calls of one module ---------------------------------------------------------------------------


def _join_calls(
    calls: Sequence[Sequence[int]],
    keys: Sequence[int],
    has_params: Sequence[bool],
    parents: Sequence[Sequence[int]],
    groups: UnionFind,
) -> None:
    """Joins the operations in those calls of a module with parameters that did the same."""
    first: dict[Hashable, Sequence[int]] = {}
    for operations in calls:
        if any(map(has_params.__getitem__, operations)):
            start = operations[0]
            work = tuple([
                (keys[operation], *(max(parent - start, -1) for parent in parents[operation]))
                for operation in operations
            ])  # fmt: skip
            for one, other in zip(first.setdefault(work, operations), operations, strict=True):
                groups.join(one, other)


# -- shared parameters -----------------------------------------------------------------------------


def _join_around_parameters(
    keys: Sequence[Hashable],
    has_params: Sequence[bool],
    kinds: Sequence[int],
    parents: Sequence[Sequence[int]],
    calls: Sequence[int],
    groups: UnionFind,
) -> None:
    """Joins operations that share parameters and then, step by step, those of their neighbours that
    do the same.
    """
    sharing = _sharing_parameters(keys, has_params)
    if not sharing:
        return
    children = _children_with_positions(parents)
    pending = [
        alike
        for operations in sharing
        for alike in _split_by_use(operations, kinds, parents, children, calls)
    ]
    grown_from: set[int] = set()
    for operations in pending:
        groups.join_all(operations)
    while pending:
        operations = pending.pop()
        neighbours = [
            *_children_by_role(operations, children, keys).values(),
            *_parents_by_role(operations, parents, keys).values(),
        ]
        for found in neighbours:
            candidates = sorted({operation for operation in found if not has_params[operation]})
            for alike in _split_by_origin(candidates, kinds, parents, operations):
                groups.join_all(alike)
                # Continue only from groups with an operation that was not a start before.
                if len(alike) > 1 and not grown_from.issuperset(alike):
                    grown_from.update(alike)
                    pending.append(alike)


def _sharing_parameters(keys: Sequence[Hashable], has_params: Sequence[bool]) -> list[list[int]]:
    """Groups of at least two operations with the same parameters."""
    sharing: dict[Hashable, list[int]] = {}
    for operation, key in enumerate(keys):
        if has_params[operation]:
            sharing.setdefault(key, []).append(operation)
    return [operations for operations in sharing.values() if len(operations) > 1]


def _split_by_use(
    operations: Sequence[int],
    kinds: Sequence[int],
    parents: Sequence[Sequence[int]],
    children: Sequence[Sequence[tuple[int, int]]],
    calls: Sequence[int],
) -> Iterable[list[int]]:
    """Splits operations with the same parameters: those in one call of a module are one layer only
    if they read, or are read by, the same kind of operation.

    Spectral norm multiplies its weight twice in a call: once to find a singular vector, and once to
    find the singular value.
    """
    alike = UnionFind()
    first: dict[Hashable, int] = {}
    times: dict[int, int] = {}  # call → how many of its operations were seen
    for operation in operations:
        call = calls[operation]
        times[call] = times.get(call, 0) + 1
        read = tuple([kinds[parent] if parent >= 0 else -1 for parent in parents[operation]])
        readers = [(call, position, kinds[child]) for position, child in children[operation]]
        for use in (times[call], (call, read), *readers):
            alike.join(first.setdefault(use, operation), operation)
    return alike.sets(operations).values()


def _children_with_positions(parents: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """For each operation, the argument position and the operation of each read of it."""
    children: list[list[tuple[int, int]]] = [[] for _ in parents]
    for operation, own in enumerate(parents):
        for position, parent in enumerate(own):
            if parent >= 0:
                children[parent].append((position, operation))
    return children


def _children_by_role(
    operations: Sequence[int],
    children: Sequence[Sequence[tuple[int, int]]],
    keys: Sequence[Hashable],
) -> dict[Hashable, list[int]]:
    """Children of the passes of a layer, by what they do, the position of the argument, and their
    number among the children alike.
    """
    roles: dict[Hashable, list[int]] = {}
    for operation in operations:
        count: dict[Hashable, int] = {}
        for position, child in children[operation]:
            role = (keys[child], position)
            count[role] = count.get(role, 0) + 1
            roles.setdefault((role, count[role]), []).append(child)
    return roles


def _parents_by_role(
    operations: Sequence[int], parents: Sequence[Sequence[int]], keys: Sequence[Hashable]
) -> dict[Hashable, list[int]]:
    roles: dict[Hashable, list[int]] = {}
    for operation in operations:
        for position, parent in enumerate(parents[operation]):
            if parent >= 0:
                roles.setdefault((keys[parent], position), []).append(parent)
    return roles


def _split_by_origin(
    candidates: list[int],
    kinds: Sequence[int],
    parents: Sequence[Sequence[int]],
    via: Sequence[int],
) -> list[list[int]]:
    """Splits operations by the origin of what they read: `x + attention(x)` is not `+ mlp(x)`.

    What reads one input alone is the same for any input, and the first step of a loop may have
    another origin than the later ones.
    """
    if len(candidates) < 2:
        return [candidates]
    own = set(candidates)
    linked = set(via)

    def origin(parent: int) -> Hashable:
        if parent in own:
            return "itself"
        if parent in linked:
            return "link"
        return kinds[parent] if parent >= 0 else parent

    split: dict[Hashable, list[int]] = {}
    for operation in candidates:
        read = parents[operation]
        reads_input = len(read) == 1 and read[0] < 0
        origins = "input" if reads_input else tuple(map(origin, read))
        split.setdefault(origins, []).append(operation)
    return _with_first_step(list(split.values()), candidates[0], parents)


def _with_first_step(
    split: list[list[int]], first: int, parents: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Adds the first operation, if it is alone, to the later steps of the loop that it starts."""
    following = next((members for members in split if members[0] != first), None)
    if [first] not in split or following is None or not _starts_loop(first, following[0], parents):
        return split
    following.insert(0, first)
    return [members for members in split if members != [first]]


def _starts_loop(first: int, second: int, parents: Sequence[Sequence[int]]) -> bool:
    """Whether wherever the two operations read different things, the second reads an argument of
    the first or something computed from the first.
    """
    if len(parents[first]) != len(parents[second]):
        return False
    pairs = zip(parents[first], parents[second], strict=True)
    return all(a == b or b in parents[first] or _leads_to(first, b, parents) for a, b in pairs)


def _leads_to(source: int, target: int, parents: Sequence[Sequence[int]]) -> bool:
    """Whether `target` is `source`, or was computed from it."""
    pending, seen = [target], {target}
    while pending:
        operation = pending.pop()
        if operation == source:
            return True
        for parent in parents[operation] if operation > source else ():
            if parent not in seen:
                seen.add(parent)
                pending.append(parent)
    return False
