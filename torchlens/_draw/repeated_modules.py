"""Folds modules that repeat: twelve identical blocks in a row become one block, `× 12`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchlens._graph.alike import AlikeCalls
from torchlens._history.log import Log


@dataclass(frozen=True, slots=True)
class Fold:
    """Identical module calls, one directly after the other; the first is drawn for all."""

    calls: tuple[int, ...]
    is_chain: bool  # each reads something of another; otherwise they are side by side


@dataclass(frozen=True, slots=True)
class Folding:
    """All folds, outermost first. Each of the `levels` is one depth of folding: entry → (fold,
    number of the copy, entry drawn for it).
    """

    folds: list[Fold]
    fold_of_call: dict[int, int]  # of the first call of each
    levels: list[dict[int, tuple[int, int, int]]]

    def drawn_for(self, entry: int) -> int:
        """The entry that is drawn in place of this one."""
        for level in self.levels:
            if entry in level:
                entry = level[entry][2]
        return entry

    def edge_between(self, parent: int, child: int) -> tuple[int, int] | None:
        """The edge that is drawn for this one; None between two copies, which `× 12` shows."""
        for level in self.levels:
            above, below = level.get(parent), level.get(child)
            if above and below and above[0] == below[0] and above[1] != below[1]:
                return None
            parent = above[2] if above else parent
            child = below[2] if below else child
        return parent, child


def find_repeats(log: Log, is_rolled: bool) -> Folding:
    """Folds all runs of at least two alike modules. In a rolled drawing, passes of one module are
    not copies of it.
    """
    alike = AlikeCalls(log.recording, log.graph)
    below: dict[int, list[int]] = {}
    ran = [call for call, span in alike.spans.items() if span]
    for call in sorted(ran, key=lambda call: alike.spans[call].start):
        below.setdefault(log.recording.module_calls[call].parent, []).append(call)
    folding = Folding([], {}, [])
    pending = [(0, 0)]
    while pending:
        parent, level = pending.pop()
        for run in _runs(log, alike, below.get(parent, ()), is_rolled):
            if len(run) > 1:
                _fold(log, folding, run, alike, level)
            pending.append((run[0], level + (len(run) > 1)))
    return folding


def _runs(log: Log, alike: AlikeCalls, calls: Iterable[int], is_rolled: bool) -> list[list[int]]:
    """The calls in order, in groups of successive copies."""
    records, spans = log.recording.module_calls, alike.spans
    runs: list[list[int]] = []
    for call in calls:
        last = runs[-1][-1] if runs else 0
        is_next = bool(runs) and spans[last].stop == spans[call].start
        is_other_pass = is_rolled and records[last].address == records[call].address
        if (
            is_next
            and not is_other_pass
            # The first is drawn for all, so it must have all operations of the others.
            and len(spans[last]) >= len(spans[call])
            and alike.are_copies(last, call)
        ):
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs


def _fold(log: Log, folding: Folding, calls: Sequence[int], alike: AlikeCalls, level: int) -> None:
    number = len(folding.folds)
    while len(folding.levels) <= level:
        folding.levels.append({})
    drawn = alike.copied_entries(calls[0])
    for copy, call in enumerate(calls):
        for originals, own in zip(drawn, alike.copied_entries(call), strict=True):
            # A later call may hand on fewer tensors.
            for original, entry in zip(originals, own, strict=False):
                folding.levels[level][entry] = number, copy, original
    is_chain = _is_chain(log, alike, calls)
    folding.folds.append(Fold(tuple(calls), is_chain))
    folding.fold_of_call[calls[0]] = number


def _is_chain(log: Log, alike: AlikeCalls, calls: Sequence[int]) -> bool:
    """True if some call reads something made in an earlier one."""
    start = alike.spans[calls[0]].start
    return any(
        start <= parent < alike.spans[call].start
        for call in calls[1:]
        for entry in alike.spans[call]
        for parent in log.graph.parents[entry]
    )
