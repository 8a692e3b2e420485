"""Putting the calls of modules in order when a program is over: which of them ran, and which pass
each is.
"""

from collections.abc import Collection, Iterable, Sequence

from torchlens._jax.primitives import is_backward
from torchlens._recording.recording import ModuleCall, Row

# A call, and the rows that went into it or came out.
CallRows = list[tuple[int, list[int]]]


def unused_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], traced: Iterable[int]
) -> set[int]:
    """Of these calls, which were traced, those that came to nothing: no other operation reads what
    they made.

    JAX and flax trace a function to learn what it returns, and trace it again to run it. A module
    of which there is no other call is kept: what it returns may be what it was given.
    """
    chains: dict[int, frozenset[int]] = {0: frozenset()}

    def chain(call: int) -> frozenset[int]:
        if call not in chains:
            chains[call] = chain(calls[call].parent) | {call}
        return chains[call]

    used: set[int] = set()
    for row in rows:
        for number in row.references:
            if number is not None and number >= 0 and rows[number].module_call != row.module_call:
                used |= chain(rows[number].module_call) - chain(row.module_call)
    counted = {calls[call].address for call in used}
    return {call for call in traced if call not in used and calls[call].address in counted}


def settled_calls(
    calls: Sequence[ModuleCall], rows: Sequence[Row], gone: Collection[int], in_order_of_rows: bool
) -> tuple[list[ModuleCall], list[int]]:
    """The calls that are not `gone`, each with its pass; and every call's new number, or that of
    the one around it.
    """

    def home(call: int) -> int:
        while call in gone:
            call = calls[call].parent
        return call

    kept = [number for number in range(len(calls)) if number not in gone]
    if in_order_of_rows:
        first: dict[int, tuple[int, int]] = {0: (-1, 0)}
        for number, row in enumerate(rows):
            around = [home(row.module_call)]
            while around[-1] not in first:
                around.append(home(calls[around[-1]].parent))
            for depth, call in enumerate(reversed(around)):
                first.setdefault(call, (number, depth))
        kept.sort(key=lambda number: first.get(number, (len(rows), 0)))
    new = {number: place for place, number in enumerate(kept)}
    num_passes: dict[str, int] = {}
    found = [calls[0]]
    for number in kept[1:]:
        record = calls[number]
        num_passes[record.address] = pass_num = num_passes.get(record.address, 0) + 1
        found.append(record._replace(pass_num=pass_num, parent=new[home(record.parent)]))
    return found, [new[home(number)] for number in range(len(calls))]


def order_of_leaving(calls: Sequence[ModuleCall]) -> list[int]:
    """Every call's place among all of them by when it is over: what is inside a call comes before
    it.
    """

    def way(call: int) -> tuple[int, ...]:
        steps = [len(calls), call]
        while calls[call].parent:
            call = calls[call].parent
            steps.append(call)
        return tuple(reversed(steps))

    places = [0] * len(calls)
    for place, call in enumerate(sorted(range(len(calls)), key=way)):
        places[call] = place
    return places


def fill_in(
    calls: Sequence[ModuleCall], rows: Sequence[Row], entries: CallRows, exits: CallRows
) -> None:
    """For calls of which no row went in or came out: what their operations read from outside, and
    the last they made.

    What a module is given and returns while it is traced are variables of a program, which a
    transformation (`grad`, `checkpoint`) may write anew. The operations still tell which call they
    belong to.
    """
    wanted = {call for found in (entries, exits) for call, own in found if not own}
    if not wanted:
        return
    read: dict[int, dict[int, None]] = {call: {} for call in wanted}
    last: dict[int, int] = {}
    for number, row in enumerate(rows):
        call = row.module_call
        if not call or is_backward(row.operation):
            continue
        around = {call}
        while calls[call].parent:
            call = calls[call].parent
            around.add(call)
        for call in around & wanted:
            last[call] = number
            outside = (other for other in row.references if other is not None and other >= 0)
            read[call].update(
                (other, None)
                for other in outside
                if not _is_in(calls, rows[other].module_call, call)
            )
    entries[:] = [(call, own or list(read[call])) for call, own in entries]
    exits[:] = [(call, own or ([last[call]] if call in last else [])) for call, own in exits]


def _is_in(calls: Sequence[ModuleCall], call: int, other: int) -> bool:
    while call and call != other:
        call = calls[call].parent
    return call == other
