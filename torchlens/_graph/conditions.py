"""What an `if` read: the entries that were computed only to decide it."""

from collections.abc import Iterable, Sequence


def find_conditions(
    booleans: Iterable[int], parents: Sequence[Sequence[int]], is_output_ancestor: Sequence[bool]
) -> tuple[set[int], list[tuple[int, int]]]:
    """Entries that lead to a condition and not to the output, and the edges by which one gets to
    them.
    """
    branch: set[int] = set()
    pending = [entry for entry in booleans if not is_output_ancestor[entry]]
    while pending:
        entry = pending.pop()
        if entry not in branch:
            branch.add(entry)
            pending += [parent for parent in parents[entry] if not is_output_ancestor[parent]]
    edges = [
        (parent, entry)
        for entry in sorted(branch)
        for parent in parents[entry]
        if parent not in branch
    ]
    return branch, edges
