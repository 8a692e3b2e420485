"""The rows of the module tree: calls of a module are shown below the module that called it.

A module has its row at its place in the model. If another module calls it too, those calls have a
row below that module, so that the rows below a row never add up to more than it. If the user's code
calls a module directly, those calls have a row beside the model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchlens._profile.records import CallRecord, Measurements, ModuleRecord

# The depth to which a module that calls itself is shown; deeper calls count in the rows above. (The
# recursion limit of Python is not much higher.)
_DEEPEST = 100
_NO_PARAMETERS: dict[str, Any] = {
    f"{own}{what}": 0
    for own in ("", "own_")
    for what in ("num_parameters", "num_learnable", "param_bytes", "gradient_bytes")
}


class PlacedRows(NamedTuple):
    """The rows as trees: the model, then what the user's code called beside it. Parameters count in
    the model's rows.
    """

    trees: list[ModuleRecord]
    shared: list[ModuleRecord]  # the modules with a row below another module than their own
    alone: list[ModuleRecord]  # the modules that the user's code called beside the model


@dataclass(slots=True)
class _Row:
    """The calls of one module that one row shows, and the rows of what they call, by address."""

    calls: list[CallRecord] = field(default_factory=list)
    inside: dict[str, "_Row"] = field(default_factory=dict)


def placed(measurements: Measurements) -> PlacedRows:
    """The modules as rows."""
    modules, root = measurements.modules, measurements.root
    shared: dict[str, ModuleRecord] = {}

    def built(record: ModuleRecord, row: _Row, depth: int, is_home: bool) -> ModuleRecord:
        left = dict(row.inside)
        children = [*inside(record, left, depth + 1, is_home)]
        for address, own in left.items():
            if address in modules:  # else it was removed from the model since
                shared[address] = modules[address]
                children.append(built(modules[address], own, depth + 1, is_home=False))
        return _as_row(record, row.calls, children, depth, is_home)

    def inside(
        record: ModuleRecord, left: dict[str, _Row], depth: int, is_home: bool
    ) -> Iterator[ModuleRecord]:
        """The rows of the modules inside one; those that it calls are removed from `left`."""
        for child in record.children:
            if not child.calls:  # a container, such as a ModuleList
                children = [*inside(child, left, depth + 1, is_home)]
                yield _as_row(child, [], children, depth, is_home)
            elif is_home or child.address in left:
                yield built(child, left.pop(child.address, _Row()), depth, is_home)

    top = _call_tree(measurements)
    if not root.measured_calls:  # the user's code calls parts of the model alone
        return PlacedRows([built(root, top, 0, is_home=True)], [*shared.values()], [])
    trees = [built(root, top.inside.pop("", _Row()), 0, is_home=True)]
    alone = [modules[address] for address in top.inside if address in modules]
    trees += [built(each, top.inside[each.address], 0, is_home=False) for each in alone]
    return PlacedRows(trees, [*shared.values()], alone)


def _as_row(
    record: ModuleRecord,
    calls: list[CallRecord],
    children: list[ModuleRecord],
    depth: int,
    is_home: bool,
) -> ModuleRecord:
    row = replace(record, calls=calls, children=children, depth=depth)
    return row if is_home else replace(row, **_NO_PARAMETERS)


def _call_tree(measurements: Measurements) -> _Row:
    """The calls from outside, with what they call in turn."""
    top = _Row()
    rows: dict[int | None, _Row] = {}
    for call in measurements.calls:  # those inside a call come after it
        if not call.is_recomputed:
            row = rows.get(call.parent, top)
            if call.depth <= _DEEPEST:
                row = row.inside.setdefault(call.address, _Row())
                row.calls.append(call)
            rows[call.index] = row
    return top


def named_rows(root: ModuleRecord) -> list[tuple[ModuleRecord, str]]:
    """Each row with its name: its address relative to the row above."""

    def named(record: ModuleRecord) -> Iterator[tuple[ModuleRecord, str]]:
        above = f"{record.address}." if record.address else ""
        for child in record.children:
            yield child, child.address.removeprefix(above)
            yield from named(child)

    return [(root, root.address), *named(root)]
