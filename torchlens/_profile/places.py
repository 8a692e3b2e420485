"""The rows of the module tree: calls of a module are shown below the module that called it.

A module has its row at its place in the model. If another module calls it too, those calls have a
row below that module, so that the rows below a row never add up to more than it. If the user's code
calls a module directly, those calls have a row beside the model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchlens._profile.records import CallRecord, Measurements, ModuleRecord

# The depth to which a module that calls itself is shown; deeper calls count in the rows above. (The
# recursion limit of Python is not much higher.)
_DEEPEST = 100
_NO_PARAMETERS: dict[str, Any] = dict.fromkeys(
    (
        f"{own}{what}"
        for own in ("", "own_")
        for what in ("num_parameters", "num_learnable", "param_bytes", "gradient_bytes")
    ),
    0,
)


def placed(measurements: Measurements) -> list[ModuleRecord]:
    """The modules as trees of rows: the model, then what was called by itself. Parameters count in
    the model's rows.
    """
    made: dict[int | None, list[CallRecord]] = {}
    for call in measurements.calls:
        if not call.is_recomputed:
            made.setdefault(call.parent, []).append(call)
    root = measurements.root
    places = _Places(made, measurements.modules, bool(root.calls))
    alone = [
        places.row(
            record,
            [call for call in record.calls if places.is_alone(call)],
            root.depth,
            set(),
            is_home=False,
        )
        for record in called_by_itself(measurements)
    ]
    return [places.row(root, root.calls, root.depth, set(), is_home=True), *alone]


def called_by_itself(measurements: Measurements) -> list[ModuleRecord]:
    """Modules that the user's code calls besides the model; none if it never calls the model."""
    if not measurements.root.measured_calls:
        return []
    inside = [record for record in measurements.root.walk() if record.address]
    return [
        record for record in inside if any(_is_outermost(call) for call in record.measured_calls)
    ]


def named_rows(root: ModuleRecord) -> list[tuple[ModuleRecord, str]]:
    """Each row with its name: its address relative to the row above."""

    def named(record: ModuleRecord) -> Iterator[tuple[ModuleRecord, str]]:
        above = f"{record.address}." if record.address else ""
        for child in record.children:
            yield child, child.address.removeprefix(above)
            yield from named(child)

    return [(root, root.address), *named(root)]


def called_from_elsewhere(measurements: Measurements) -> list[ModuleRecord]:
    """Modules that are called by another module than the one above them."""
    by_index = {call.index: call for call in measurements.calls}
    found: list[ModuleRecord] = []
    pending = [
        (measurements.root, "")
    ]  # each with the innermost module around it that is called itself
    while pending:
        record, address = pending.pop()
        callers = {
            by_index[call.parent].address
            for call in record.measured_calls
            if call.parent in by_index
        }
        if not callers <= {address}:
            found.append(record)
        inner = record.address if record.calls else address
        pending += [(child, inner) for child in reversed(record.children)]
    return found


@dataclass(frozen=True, slots=True)
class _Places:
    made: dict[int | None, list[CallRecord]]  # which calls each call made
    modules: dict[str, ModuleRecord]
    has_model: bool  # whether the model itself was called

    def is_alone(self, call: CallRecord) -> bool:
        """Whether the user's code made the call, besides calling the model."""
        return self.has_model and bool(call.address) and _is_outermost(call)

    def is_stray(self, call: CallRecord) -> bool:
        """Whether no module made the call, and it has no row of its own: checkpointing made it, or
        the user's code, which never called the model.
        """
        return call.is_recomputed or (call.parent is None and not self.is_alone(call))

    def row(
        self,
        record: ModuleRecord,
        calls: list[CallRecord],
        depth: int,
        around: set[int],
        is_home: bool,
    ) -> ModuleRecord:
        """A module with some of its calls. `around` are the calls of the innermost module around it
        that is called.
        """
        callers = {call.index for call in calls} if record.calls else around
        children = [
            self.row(child, own, depth + 1, callers, is_home)
            for child, own in self._calls_of_children(record, callers, is_home)
        ]
        guests = self._guests(record, calls) if record.calls and depth < _DEEPEST else []
        children += [self.row(guest, own, depth + 1, set(), False) for guest, own in guests]
        placed = replace(record, calls=calls, children=children, depth=depth)
        return placed if is_home else replace(placed, **_NO_PARAMETERS)

    def _calls_of_children(
        self, record: ModuleRecord, callers: set[int], is_home: bool
    ) -> Iterator[tuple[ModuleRecord, list[CallRecord]]]:
        """Each module inside that has a row here, with those of its calls that belong in it."""
        for child in record.children:
            own = [
                call
                for call in child.calls
                if call.parent in callers or (is_home and self.is_stray(call))
            ]
            if is_home or own or not child.calls:
                yield child, own

    def _guests(
        self, record: ModuleRecord, calls: list[CallRecord]
    ) -> list[tuple[ModuleRecord, list[CallRecord]]]:
        """Modules outside this one that these calls of it call."""
        expected = {child.address for child in _called_first(record)}
        found: dict[str, list[CallRecord]] = {}
        for inner in (inner for call in calls for inner in self.made.get(call.index, ())):
            # a module that was removed from the model since has no record
            if inner.address not in expected and inner.address in self.modules:
                found.setdefault(inner.address, []).append(inner)
        return [(self.modules[address], own) for address, own in found.items()]


def _is_outermost(call: CallRecord) -> bool:
    return call.parent is None and not call.is_recomputed


def _called_first(record: ModuleRecord) -> Iterator[ModuleRecord]:
    """The outermost modules inside that are called."""
    for child in record.children:
        if child.calls:
            yield child
        else:
            yield from _called_first(child)
