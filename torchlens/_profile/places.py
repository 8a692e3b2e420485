"""Where the calls of a module have their row: below the module that made them.

A module stands where the model has it. If another one calls it, too, the calls of that one are a
row of their own below it, so that the rows below a row never add up to more than it does. Likewise,
if the user's code calls a module by itself beside the model, those calls are a row of their own
beside the model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchlens._profile.records import CallRecord, Measurements, ModuleRecord

# Of a module that calls itself, so deep: what is deeper is in the rows above. Python's own stack
# ends not far beyond.
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
    """Modules that the user's code calls beside the model. Where it never calls the model, all
    stand in their places.
    """
    if not measurements.root.measured_calls:
        return []
    inside = [record for record in measurements.root.walk() if record.address]
    return [
        record for record in inside if any(_is_outermost(call) for call in record.measured_calls)
    ]


def named_rows(root: ModuleRecord) -> list[tuple[ModuleRecord, str]]:
    """Each row with its name: the address, less that of the row above it."""

    def named(record: ModuleRecord) -> Iterator[tuple[ModuleRecord, str]]:
        above = f"{record.address}." if record.address else ""
        for child in record.children:
            yield child, child.address.removeprefix(above)
            yield from named(child)

    return [(root, root.address), *named(root)]


def called_from_elsewhere(measurements: Measurements) -> list[ModuleRecord]:
    """Modules that are also called by another than the one whose row is above theirs."""
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
        """Whether the user's code made it, beside the model."""
        return self.has_model and bool(call.address) and _is_outermost(call)

    def is_stray(self, call: CallRecord) -> bool:
        """Whether no module made it, and it has no row of its own: checkpointing did, or the user,
        who has no model.
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
            if is_home or own or not child.calls
        ]
        if record.calls and depth < _DEEPEST:
            children += [
                self.row(guest, own, depth + 1, set(), is_home=False)
                for guest, own in self._guests(record, calls)
            ]
        placed = replace(record, calls=calls, children=children, depth=depth)
        return placed if is_home else replace(placed, **_NO_PARAMETERS)

    def _calls_of_children(
        self, record: ModuleRecord, callers: set[int], is_home: bool
    ) -> Iterator[tuple[ModuleRecord, list[CallRecord]]]:
        """Each module inside, with those of its calls that belong in this row."""
        for child in record.children:
            yield (
                child,
                [
                    call
                    for call in child.calls
                    if call.parent in callers or (is_home and self.is_stray(call))
                ],
            )

    def _guests(
        self, record: ModuleRecord, calls: list[CallRecord]
    ) -> list[tuple[ModuleRecord, list[CallRecord]]]:
        """Modules that these calls of a module call although they are not inside it."""
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
    """The modules inside that are called, but not those inside these."""
    for child in record.children:
        if child.calls:
            yield child
        else:
            yield from _called_first(child)
