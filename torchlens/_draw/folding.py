"""Which modules repeat: twelve identical blocks in a row become one block, twelve times."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchlens._history.log import Log
from torchlens._recording.operations import IDENTITY


@dataclass(frozen=True, slots=True)
class Fold:
    """Module calls that do the same, one right after the other; the first is drawn for all."""

    calls: tuple[int, ...]
    is_chain: bool  # each reads something of another; otherwise they stand side by side


@dataclass(frozen=True, slots=True)
class Folding:
    """All folds, outermost first. `levels` has, per depth of folding, entry → (fold, which copy,
    entry drawn for it).
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
        """The edge that is drawn for this one; None between two copies of one module, which is what
        `× 12` says.
        """
        for level in self.levels:
            above, below = level.get(parent), level.get(child)
            if (
                above is not None
                and below is not None
                and above[0] == below[0]
                and above[1] != below[1]
            ):
                return None
            parent = parent if above is None else above[2]
            child = child if below is None else below[2]
        return parent, child


def find_repeats(log: Log, is_rolled: bool) -> Folding:
    """Folds all runs of at least two alike modules. In a rolled drawing, passes of one module are
    not copies of it.
    """
    spans = _spans(log)
    below: dict[int, list[int]] = {}
    for call in sorted(spans, key=lambda call: spans[call].start):
        below.setdefault(log.recording.module_calls[call].parent, []).append(call)
    folding = Folding([], {}, [])
    pending = [(0, 0)]
    while pending:
        parent, level = pending.pop()
        for run in _runs(log, below.get(parent, ()), spans, is_rolled):
            if len(run) > 1:
                _fold(log, folding, run, spans, level)
            pending.append((run[0], level + (len(run) > 1)))
    return folding


def _spans(log: Log) -> dict[int, range]:
    """The entries made in each module call. A call ends before the next begins, so they stand in a
    row.
    """
    spans: dict[int, range] = {}
    for entry in range(len(log.graph.recorded)):
        for call in log.module_chain(entry):
            spans[call] = range(spans[call].start if call in spans else entry, entry + 1)
    return spans


def _runs(
    log: Log, calls: Iterable[int], spans: dict[int, range], is_rolled: bool
) -> list[list[int]]:
    """The calls in order, alike neighbours together."""
    records, classes = log.recording.module_calls, log.recording.module_classes
    runs: list[list[int]] = []
    signature: Any = None
    for call in calls:
        known = signature
        signature = None
        if runs:
            last = runs[-1][-1]
            one, other = records[last].address, records[call].address
            is_candidate = (
                spans[last].stop == spans[call].start
                and len(spans[last]) >= len(spans[call])
                and classes[one] == classes[other]
                and not (is_rolled and one == other)
            )
            if is_candidate:
                known = known or _signature(log, last, spans[last])
                signature = _signature(log, call, spans[call])
                if known == signature:
                    runs[-1].append(call)
                    continue
        runs.append([call])
    return runs


def _signature(log: Log, call: int, span: range) -> list[Any]:
    """What a module call did, said without naming it: equal for two calls that did the same."""
    home = log.recording.module_calls[call].address
    place = {entry: number for number, entry in enumerate(_own_entries(log, span))}
    found = []
    for entry in place:
        row = log.row(entry)
        address = log.recording.module_calls[row.module_call].address
        parents = [place.get(parent) for parent in log.graph.parents[entry]]
        params = [tuple(log.recording.params[number].shape) for number in log.graph.params[entry]]
        address = (
            address[len(home) :]
            if address == home or address.startswith(f"{home}.")
            else f" {address}"
        )
        found.append(
            (
                row.operation.name,
                row.output_index,
                row.shape,
                row.dtype,
                address,
                parents,
                params,
                repr(row.args),
                repr(row.kwargs),
            )
        )
    return found


def _own_entries(log: Log, span: range) -> list[int]:
    """The entries of a call, except tensors that it only passes on: the last of some blocks does
    that for no reader.
    """
    return [
        entry
        for entry in span
        if log.row(entry).operation is not IDENTITY
        or any(other in span for other in (*log.graph.parents[entry], *log.graph.children[entry]))
    ]


def _fold(
    log: Log, folding: Folding, calls: Sequence[int], spans: dict[int, range], level: int
) -> None:
    number = len(folding.folds)
    while len(folding.levels) <= level:
        folding.levels.append({})
    first = spans[calls[0]]
    kept = _own_entries(log, first)
    handed_on = sorted(set(first) - set(kept))
    for copy, call in enumerate(calls):
        own = _own_entries(log, spans[call])
        for entries, drawn in ((own, kept), (sorted(set(spans[call]) - set(own)), handed_on)):
            for entry, drawn_for in zip(
                entries, drawn, strict=False
            ):  # a later call may hand on less
                folding.levels[level][entry] = (number, copy, drawn_for)
    later = range(spans[calls[1]].start, spans[calls[-1]].stop)
    before = range(first.start, later.stop)
    is_chain = any(
        parent in before and folding.levels[level][parent][1] != folding.levels[level][entry][1]
        for entry in later
        for parent in log.graph.parents[entry]
    )
    folding.folds.append(Fold(tuple(calls), is_chain))
    folding.fold_of_call[calls[0]] = number
