"""A profile as a printed table that fits the terminal."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from torchlens._profile.output.places import (
    called_by_itself,
    called_from_elsewhere,
    named_rows,
    placed,
)
from torchlens._profile.output.quantities import (
    QUANTITIES,
    Quantity,
    QuantityName,
    calls_inside,
    checked_quantity,
    full_name,
    last_operations,
    module_value,
    operation_values,
    own_value,
)
from torchlens._profile.output.totals import (
    headline,
    listed,
    not_measured,
    totals,
)
from torchlens._profile.output.units import shapes_text, text_of
from torchlens._profile.records import Measurements, ModuleRecord
from torchlens._text.grid import Column, laid_out
from torchlens._text.wording import check_choice, check_count, got, one_of

# Without a depth, the deepest that takes no more lines than this.
_MOST_ROWS = 60
# Columns of a higher rank are left out before names of up to this length are cut.
_DISPENSABLE, _LONGEST_NAME = 2, 36


# Columns that are worked out from the others.
_SHARE, _NUM_MODULES = "share", "modules"


class _Column(NamedTuple):
    heading: str
    rank: int  # the higher, the sooner it is left out of a narrow terminal
    quantity: str | None = None


# What tells modules apart stays longest.
_MODULE_COLUMNS = (
    _Column("type", 1),
    _Column("output", 3),
    _Column("calls", 10, "calls"),
    _Column("params", 5, "parameters"),
    _Column("FLOPs", 6, "flops"),
    _Column("FLOP/s", 11, "flops_per_second"),
    _Column("forward", 0, "forward_time"),
    _Column("own fwd", 9, "forward_self_time"),
    _Column("backward", 2, "backward_time"),
    _Column("own bwd", 12, "backward_self_time"),
    _Column("total", 8, "total_time"),
    _Column("share", 4, _SHARE),
    _Column("kept", 8, "saved_bytes"),
    _Column("peak fwd", 7, "peak_bytes"),
    _Column("peak bwd", 10, "peak_bytes_backward"),
)
_OPERATION_COLUMNS = (
    _Column("module", 1),
    _Column("output", 3),
    _Column("size", 5, "output_bytes"),
    _Column("FLOPs", 6, "flops"),
    _Column("FLOP/s", 9, "flops_per_second"),
    _Column("logged fwd", 0, "forward_time"),
    _Column("backward", 2, "backward_time"),
    _Column("total", 8, "total_time"),
    _Column("share", 4, _SHARE),
    _Column("peak", 7, "peak_bytes"),
)
# Modules of one type added up, each without the modules inside.
_TYPE_COLUMNS = (
    _Column("modules", 3, _NUM_MODULES),
    _Column("calls", 4, "calls"),
    _Column("params", 5, "parameters"),
    _Column("FLOPs", 6, "flops"),
    _Column("forward", 0, "forward_time"),
    _Column("backward", 2, "backward_time"),
    _Column("total", 8, "total_time"),
    _Column("share", 1, _SHARE),
    _Column("kept", 7, "saved_bytes"),
)
_TOTAL = QUANTITIES["total_time"]
_COLUMNS = {"module": _MODULE_COLUMNS, "operation": _OPERATION_COLUMNS, "type": _TYPE_COLUMNS}
Times: TypeAlias = Literal["typical", "minimum", "median", "p95"]
TableBy: TypeAlias = Literal["module", "operation", "type"]


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    texts: dict[int, str]  # by column
    values: dict[str, float | None]  # by quantity


class Table:
    """A text to print.

    >>> print(profile.summary(depth=2, sort_by='backward_time'))
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


def summary(
    measurements: Measurements,
    depth: int | None = None,
    sort_by: QuantityName | None = None,
    width: int | None = None,
    by: TableBy = "module",
    limit: int | None = None,
    times: Times = "typical",
) -> Table:
    """The modules as a tree, or, with `sort_by`, as a list with the most first.

    `by='operation'` lists operations, `by='type'` adds the modules of each type up, each without
    the modules inside. `depth` is how deep to go: 0 is the model alone, None as deep as fits a
    screen or two. `limit` cuts the list, and leaves out the totals; `width` is the terminal's
    unless given.

    Numbers are per step: times the mean of the middle half of the measured steps, so that they add
    up (or, with `times`, the 'minimum', 'median' or 'p95' of all), anything else the median. A
    module's are with the modules inside, `own` without. Training and evaluation, with and without
    gradients, and inputs of a few different shapes stand apart.

    >>> print(profile.summary(sort_by='total_time', limit=10))
    """
    check_choice("by", by, tuple(_COLUMNS))
    check_choice("times", times, get_args(Times))
    for name, value, least in (("depth", depth, 0), ("limit", limit, 1), ("width", width, 1)):
        if value is not None:
            check_count(name, value, least)
    if by == "operation" and measurements.level == "module":
        raise ValueError(
            "This profile has no operations: it was made at module level. Use profile(..., "
            "level='operation')."
        )
    if sort_by is not None:
        _check_sort(sort_by, by)
    request = _Request(
        by, depth, None if sort_by is None else str(full_name(sort_by)), limit, times
    )
    room = shutil.get_terminal_size((100, 24)).columns if width is None else width
    kinds = measurements.by_kind() if measurements.steps else {"": measurements}
    lines = textwrap.wrap(headline(measurements), max(room, 40))
    notes: list[str] = []
    for name, own in kinds.items():
        if len(kinds) > 1:
            number = len(own.measured_steps)
            lines += ["", f"{name}: {number} step{'s' * (number != 1)}"]
        lines += ["", *_section(own, request, room, notes)]
    wrapper = textwrap.TextWrapper(
        max(room, 40), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    if limit is None:
        notes += [*not_measured(measurements)]
    if times != "typical":
        notes.append(
            f"Times are the {times} of each row by itself: those of modules inside need not add up."
        )
    for text in [*dict.fromkeys(notes), *measurements.problems]:
        lines += wrapper.wrap(f"- {text}")
    return Table("\n".join(line.rstrip() for line in lines))


def _check_sort(sort_by: QuantityName, by: TableBy) -> None:
    """Raises unless what is to be sorted has that quantity."""
    quantity = checked_quantity(sort_by, "sort_by")
    if by == "operation" and quantity.operation is None:
        words = one_of(name for name, each in QUANTITIES.items() if each.operation is not None)
        raise ValueError(
            f"With by='operation', sort_by must be {words}, got {got(sort_by)}, which only modules "
            "have."
        )


class _Request(NamedTuple):
    """What the table is to show."""

    by: str
    depth: int | None
    sort_by: str | None
    limit: int | None
    times: str


def _section(
    measurements: Measurements, request: _Request, room: int, notes: list[str]
) -> list[str]:
    """The table of steps of one kind, and its totals."""
    by, depth, sort_by, limit, times = request
    columns: tuple[_Column, ...] = _COLUMNS[by]
    if sort_by is not None and all(column.quantity != sort_by for column in columns):
        columns = (*columns, _Column(QUANTITIES[sort_by].title, 0, sort_by))
    columns = tuple(
        column._replace(rank=0) if sort_by and column.quantity == sort_by else column
        for column in columns
    )
    if by == "module":
        rows = _module_rows(measurements, columns, depth, sort_by is not None, times, notes)
    elif by == "type":
        rows = _type_rows(measurements, columns, times)
        sort_by = sort_by or "total_time"
    else:
        rows = _operation_rows(measurements, columns, times)
    if sort_by is not None:
        rows.sort(key=lambda row: _descending(row.values.get(sort_by)))
    if limit is not None and len(rows) > limit:
        notes.append(f"The first {limit} of {len(rows)}.")
        rows = rows[:limit]
    lines = [*_laid_out(by, columns, rows, room), ""]
    for text in totals(measurements) if limit is None else ():
        lines += _wrapped(text, max(room, 40), " " * 19)
    return lines


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    """The text in lines, broken at spaces, but not between a number and its unit."""
    tied = re.sub(r"(?<=\d) (?=[A-Za-zµ])", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(tied, width, subsequent_indent=indent)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _descending(value: float | None) -> float:
    return float("inf") if value is None else -value


# -- rows
# --------------------------------------------------------------------------------------------------


def _module_rows(
    measurements: Measurements,
    columns: Sequence[_Column],
    depth: int | None,
    is_flat: bool,
    times: str,
    notes: list[str],
) -> list[_Row]:
    shared, alone = called_from_elsewhere(measurements), called_by_itself(measurements)
    if is_flat:
        rows = [(record, record.address) for record in measurements.root.walk()]
        where = "each with all its calls in one row"
    else:
        trees = placed(measurements) if shared or alone else [measurements.root]
        rows = [row for tree in trees for row in named_rows(tree)]
        where = "each with a row below every one of them"
    deepest = max(record.depth for record, _ in rows)
    if depth is None and not is_flat:
        depth = _fitting_depth([record for record, _ in rows], deepest)
        if depth < deepest:
            notes.append(
                f"Shown to depth {depth} of {deepest}; summary(depth={deepest}) shows all."
            )
    if shared:
        notes.append(f"Called by several modules, {where}: {listed(shared, measurements)}.")
    if alone and not is_flat:
        notes.append(
            "Also called by your code, beside the model, with a row for that: "
            f"{listed(alone, measurements)}."
        )
    return [
        _module_row(
            measurements,
            record,
            ("" if is_flat else "  " * record.depth) + (name or measurements.model_name),
            columns,
            times,
        )
        for record, name in rows
        if depth is None or record.depth <= depth
    ]


def _fitting_depth(records: list[ModuleRecord], deepest: int) -> int:
    for depth in range(deepest, 1, -1):
        if sum(record.depth <= depth for record in records) <= _MOST_ROWS:
            return depth
    return min(deepest, 1)


def _module_row(
    measurements: Measurements,
    record: ModuleRecord,
    name: str,
    columns: Sequence[_Column],
    times: str,
) -> _Row:
    calls = record.measured_calls
    texts: dict[int, str] = {}
    values: dict[str, float | None] = {}
    for number, column in enumerate(columns):
        if column.quantity is None:
            shapes = calls[-1].output_shapes if calls else []
            texts[number] = record.module_type if column.heading == "type" else shapes_text(shapes)
        elif column.quantity == _SHARE:
            texts[number] = _share_text(
                module_value(record, _TOTAL, times), module_value(measurements.root, _TOTAL, times)
            )
        else:
            _add_value(
                texts,
                values,
                number,
                column,
                module_value(record, QUANTITIES[column.quantity], times),
            )
    return _Row(name, texts, values)


def _type_rows(measurements: Measurements, columns: Sequence[_Column], times: str) -> list[_Row]:
    """One row for each type of module that was called."""
    by_type: dict[str, list[ModuleRecord]] = {}
    for record in measurements.root.walk():
        if record.measured_calls:
            by_type.setdefault(record.module_type, []).append(record)
    whole, inside = module_value(measurements.root, _TOTAL, times), calls_inside(measurements)
    rows = []
    for name, records in by_type.items():
        texts: dict[int, str] = {}
        values: dict[str, float | None] = {}
        for number, column in enumerate(columns):
            if column.quantity == _NUM_MODULES:
                texts[number] = str(len(records))
            elif column.quantity == _SHARE:
                texts[number] = _share_text(own_value(records, _TOTAL, inside, times), whole)
            else:
                value = own_value(records, QUANTITIES[column.quantity or ""], inside, times)
                _add_value(texts, values, number, column, value)
        rows.append(_Row(name, texts, values))
    return rows


def _share_text(value: float | None, whole: float | None) -> str:
    return "-" if value is None or not whole else f"{value / whole:.1%}"


def _operation_rows(
    measurements: Measurements, columns: Sequence[_Column], times: str
) -> list[_Row]:
    found = {
        column.quantity: operation_values(measurements, QUANTITIES[column.quantity], times)
        for column in columns
        if column.quantity in QUANTITIES
    }
    totals_of = operation_values(measurements, _TOTAL, times)
    whole = sum(totals_of.values())
    rows = []
    for record in last_operations(measurements):
        texts: dict[int, str] = {}
        values: dict[str, float | None] = {}
        for number, column in enumerate(columns):
            if column.quantity is None:
                texts[number] = (
                    record.address if column.heading == "module" else shapes_text([record.shape])
                )
            elif column.quantity == _SHARE:
                texts[number] = _share_text(totals_of.get(record.label or ""), whole)
            else:
                _add_value(
                    texts, values, number, column, found[column.quantity].get(record.label or "")
                )
        rows.append(_Row(record.label or "", texts, values))
    return rows


def _add_value(
    texts: dict[int, str],
    values: dict[str, float | None],
    number: int,
    column: _Column,
    value: float | None,
) -> None:
    quantity: Quantity = QUANTITIES[column.quantity or ""]
    values[column.quantity or ""] = value
    is_nothing = value is None or (value == 0 and quantity.unit in ("", "FLOPs"))
    texts[number] = "-" if is_nothing or value is None else text_of(quantity.unit)(value)


def _laid_out(by: str, columns: Sequence[_Column], rows: list[_Row], room: int) -> list[str]:
    """Heading, rule and rows; columns that say nothing, or for which there is no room, are left
    out.
    """
    shown = [Column(by, [row.name for row in rows], is_number=False)]
    for number, column in enumerate(columns):
        texts = [row.texts[number] for row in rows]
        if any(text not in ("", "-") for text in texts):
            shown.append(
                Column(column.heading, texts, column.rank, is_number=column.quantity is not None)
            )
    while len(shown) > 1 and _width(shown) > room:
        last = max(shown, key=lambda column: column.rank)
        if last.rank <= _DISPENSABLE:
            break
        shown = [column for column in shown if column is not last]
    return laid_out(shown, room)


def _width(columns: Sequence[Column]) -> int:
    return sum(min(column.width, _LONGEST_NAME) + 2 for column in columns) - 2
