"""A profile as a printed table that fits the terminal."""

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias, get_args

from torchlens._profile.places import named_rows, placed
from torchlens._profile.quantities import (
    QUANTITIES,
    QuantityName,
    calls_inside,
    checked_quantity,
    full_name,
    last_operations,
    module_value,
    operation_values,
    own_value,
)
from torchlens._profile.records import Measurements, ModuleRecord, ProfiledStep, Shape
from torchlens._text.error_wording import check_choice, check_count, got, one_of
from torchlens._text.grid import Column, laid_out
from torchlens._text.numbers import (
    bytes_text,
    count_text,
    counted,
    seconds_text,
    shape_text,
    share_text,
)

# Without a depth, the tree is shown as deep as fits in this many lines.
_MOST_ROWS = 60
# Columns of a higher rank are left out before names of up to this length are cut.
_DISPENSABLE, _LONGEST_NAME = 2, 36

Times: TypeAlias = Literal["typical", "minimum", "median", "p95"]
TableBy: TypeAlias = Literal["module", "operation", "type"]


class _Column(NamedTuple):
    rank: int  # the higher, the sooner it is left out of a narrow terminal
    name: str  # of a quantity, or of another text of the row: 'type', 'output', 'share', ...
    heading: str = ""  # instead of the quantity's

    @property
    def title(self) -> str:
        quantity = QUANTITIES.get(self.name)
        return self.heading or self.name if quantity is None else self.heading or quantity.heading


_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "module": (
        _Column(1, "type"),
        _Column(3, "output"),
        _Column(10, "calls"),
        _Column(5, "parameters"),
        _Column(6, "flops"),
        _Column(11, "flops_per_second"),
        _Column(0, "forward_time"),
        _Column(9, "forward_self_time"),
        _Column(2, "backward_time"),
        _Column(12, "backward_self_time"),
        _Column(8, "total_time"),
        _Column(4, "share"),
        _Column(8, "saved_bytes"),
        _Column(7, "peak_bytes"),
        _Column(10, "peak_bytes_backward"),
    ),
    "operation": (
        _Column(1, "module"),
        _Column(3, "output"),
        _Column(5, "output_bytes"),
        _Column(6, "flops"),
        _Column(9, "flops_per_second"),
        _Column(0, "forward_time", "logged fwd"),
        _Column(2, "backward_time"),
        _Column(8, "total_time"),
        _Column(4, "share"),
        _Column(7, "peak_bytes", "peak"),
    ),
    "type": (
        _Column(3, "modules"),
        _Column(4, "calls"),
        _Column(5, "parameters"),
        _Column(6, "flops"),
        _Column(0, "forward_time"),
        _Column(2, "backward_time"),
        _Column(8, "total_time"),
        _Column(1, "share"),
        _Column(7, "saved_bytes"),
    ),
}
_WORDS = ("type", "output", "module")  # columns of text


@dataclass(slots=True)
class _TableRow:
    name: str
    texts: dict[str, str]  # by the name of a column
    values: dict[str, float | None] = field(default_factory=dict)  # by quantity

    def add_values(
        self, columns: Sequence[_Column], value_of: Callable[[str], float | None]
    ) -> None:
        for column in columns:
            quantity = QUANTITIES.get(column.name)
            if quantity is not None:
                value = self.values[column.name] = value_of(column.name)
                is_nothing = value is None or (value == 0 and quantity.unit in ("", "FLOPs"))
                text = "-" if is_nothing or value is None else quantity.text(value)
                self.texts[column.name] = text


class Table:
    """A text to print.

    >>> print(profile.summary(depth=2, sort_by='backward_time'))
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


class _Request(NamedTuple):
    """The arguments of `summary`, checked."""

    by: TableBy
    depth: int | None
    sort_by: str | None
    limit: int | None
    times: Times


def summary(
    measurements: Measurements,
    depth: int | None = None,
    sort_by: QuantityName | None = None,
    width: int | None = None,
    by: TableBy = "module",
    limit: int | None = None,
    times: Times = "typical",
) -> Table:
    """See `Profile.summary`."""
    check_choice("by", by, tuple(_COLUMNS))
    check_choice("times", times, get_args(Times))
    for name, value, least in (("depth", depth, 0), ("limit", limit, 1), ("width", width, 1)):
        if value is not None:
            check_count(name, value, least)
    _check_sorting(measurements, by, sort_by)
    room = shutil.get_terminal_size((100, 24)).columns if width is None else width
    sorted_by = None if sort_by is None else full_name(sort_by)
    request = _Request(by, depth, sorted_by, limit, times)
    return Table(_text(measurements, request, room))


def _check_sorting(measurements: Measurements, by: str, sort_by: object) -> None:
    if by == "operation" and measurements.level == "module":
        raise ValueError(
            "This profile has no operations: it was made at module level. Use profile(..., "
            "level='operation')."
        )
    is_known = sort_by is None or checked_quantity(sort_by, "sort_by").operation
    if by == "operation" and not is_known:
        words = one_of(name for name, each in QUANTITIES.items() if each.operation)
        raise ValueError(
            f"With by='operation', sort_by must be {words}, got {got(sort_by)}, which only modules "
            "have."
        )


def _text(measurements: Measurements, request: _Request, room: int) -> str:
    """A table for each kind of steps, and the notes below them."""
    kinds, width = measurements.by_kind(), max(room, 40)
    lines = textwrap.wrap(_headline(measurements), width)
    notes: dict[str, None] = {}
    for name, own in kinds.items():
        if len(kinds) > 1:
            lines += ["", f"{name}: {counted(len(own.measured_steps), 'step')}"]
        lines += ["", *_section(own, request, room, notes), ""]
        for text in _totals(own) if request.limit is None else ():
            lines += wrapped(text, width, " " * 19)
    found = [*notes, *(_not_measured(measurements) if request.limit is None else ())]
    if request.times != "typical":
        found.append(
            f"Times are the {request.times} of each row on its own: those of inner modules need "
            "not add up."
        )
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    for text in [*found, *measurements.problems]:
        lines += wrapper.wrap(f"- {text}")
    return "\n".join(line.rstrip() for line in lines)


def _section(
    measurements: Measurements, request: _Request, room: int, notes: dict[str, None]
) -> list[str]:
    """The table of steps of one kind. Adds to `notes`."""
    by, limit = request.by, request.limit
    columns = _columns(by, request.sort_by)
    rows = _ROWS[by](measurements, columns, request, notes)
    sort_by = request.sort_by or ("total_time" if by == "type" else None)
    if sort_by is not None:
        rows.sort(key=partial(_descending, sort_by))
    if limit is not None and len(rows) > limit:
        notes[f"The first {limit} of {len(rows)}."] = None
    return _laid_out(by, columns, rows[:limit], room)


def _columns(by: str, sort_by: str | None) -> list[_Column]:
    """The columns of a table; the one by which it is sorted is never left out."""
    columns = [
        column._replace(rank=0) if column.name == sort_by else column for column in _COLUMNS[by]
    ]
    if sort_by is not None and all(column.name != sort_by for column in columns):
        columns.append(_Column(0, sort_by, QUANTITIES[sort_by].title))
    return columns


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """The text in lines, broken at spaces, but not between a number and its unit."""
    tied = re.sub(r"(?<=\d) (?=[A-Za-zµ])", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(tied, width, subsequent_indent=indent)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _descending(name: str, row: _TableRow) -> float:
    value = row.values.get(name)
    return float("inf") if value is None else -value


# -- rows


_Notes = dict[str, None]


def _module_rows(
    measurements: Measurements, columns: Sequence[_Column], request: _Request, notes: _Notes
) -> list[_TableRow]:
    """The modules as a list, if the rows are to be sorted, or as a tree."""
    is_list, times = request.sort_by is not None, request.times
    rows = _named_modules(measurements, is_list, notes)
    depth = _depth_shown([record for record, _ in rows], request, notes)
    whole = module_value(measurements.root, QUANTITIES["total_time"], times)
    found = []
    for record, name in rows:
        if record.depth <= depth:
            indent = "" if is_list else "  " * record.depth
            name = indent + (name or measurements.model_name)
            found.append(_module_row(record, name, columns, whole, times))
    return found


def _module_row(
    record: ModuleRecord, name: str, columns: Sequence[_Column], whole: float | None, times: Times
) -> _TableRow:
    def value_of(name: str) -> float | None:
        return module_value(record, QUANTITIES[name], times)

    calls = record.measured_calls
    texts = {
        "type": record.module_type,
        "output": _shapes_text(calls[-1].output_shapes) if calls else "",
        "share": _share_text(value_of("total_time"), whole),
    }
    row = _TableRow(name, texts)
    row.add_values(columns, value_of)
    return row


def _named_modules(
    measurements: Measurements, is_list: bool, notes: _Notes
) -> list[tuple[ModuleRecord, str]]:
    """The modules with the names of their rows, in the order of a list or of a tree."""
    rows = placed(measurements)
    if rows.shared:
        where = "all its calls in one row" if is_list else "a row below every one of them"
        names = _listed(rows.shared, measurements)
        notes[f"Called by several modules, each with {where}: {names}."] = None
    if is_list:
        return [(record, record.address) for record in measurements.root.walk()]
    if rows.alone:
        names = _listed(rows.alone, measurements)
        notes[f"Also called by your code, beside the model, with a row for that: {names}."] = None
    return [row for tree in rows.trees for row in named_rows(tree)]


def _depth_shown(records: list[ModuleRecord], request: _Request, notes: _Notes) -> int:
    """The depth that was asked for, or in a tree the largest with which the rows fit."""
    deepest = max(record.depth for record in records)
    if request.depth is not None or request.sort_by is not None:
        return deepest if request.depth is None else request.depth
    per_depth = Counter(record.depth for record in records)
    sizes = accumulate(per_depth[depth] for depth in range(deepest + 1))
    fitting = [depth for depth, size in enumerate(sizes) if size <= _MOST_ROWS]
    depth = max([min(deepest, 1), *fitting])
    if depth < deepest:
        notes[f"Shown to depth {depth} of {deepest}; summary(depth={deepest}) shows all."] = None
    return depth


def _type_rows(
    measurements: Measurements, columns: Sequence[_Column], request: _Request, _: _Notes
) -> list[_TableRow]:
    """One row for each type of module that was called."""
    by_type: dict[str, list[ModuleRecord]] = {}
    for record in measurements.root.walk():
        if record.measured_calls:
            by_type.setdefault(record.module_type, []).append(record)
    inside = calls_inside(measurements)
    whole = module_value(measurements.root, QUANTITIES["total_time"], request.times)
    rows = []
    for kind, records in by_type.items():

        def value_of(name: str, records: list[ModuleRecord] = records) -> float | None:
            return own_value(records, QUANTITIES[name], inside, request.times)

        share = _share_text(value_of("total_time"), whole)
        row = _TableRow(kind, {"modules": str(len(records)), "share": share})
        row.add_values(columns, value_of)
        rows.append(row)
    return rows


def _operation_rows(
    measurements: Measurements, columns: Sequence[_Column], request: _Request, _: _Notes
) -> list[_TableRow]:
    names = {column.name for column in columns if column.name in QUANTITIES} | {"total_time"}
    found = {
        name: operation_values(measurements, QUANTITIES[name], request.times) for name in names
    }
    whole = sum(found["total_time"].values())
    rows = []
    for record in last_operations(measurements):
        label = record.label or ""
        texts = {
            "module": record.address,
            "output": _shapes_text([record.shape]),
            "share": _share_text(found["total_time"].get(label), whole),
        }
        row = _TableRow(label, texts)
        values = {name: own.get(label) for name, own in found.items()}
        row.add_values(columns, values.__getitem__)
        rows.append(row)
    return rows


_ROWS = {"module": _module_rows, "type": _type_rows, "operation": _operation_rows}


def _shapes_text(shapes: Sequence[Shape]) -> str:
    """`8x64x56x56 +1`: the first shape, and the number of others."""
    if not shapes:
        return ""
    others = f" +{len(shapes) - 1}" if len(shapes) > 1 else ""
    return f"{shape_text(shapes[0])}{others}"


def _share_text(value: float | None, whole: float | None) -> str:
    return "-" if value is None or not whole else share_text(value, whole)


def _laid_out(by: str, columns: Iterable[_Column], rows: list[_TableRow], room: int) -> list[str]:
    """Heading, rule and rows, without empty columns and those that do not fit."""
    shown = [Column(by, [row.name for row in rows], is_number=False)]
    for each in columns:
        texts, is_number = [row.texts[each.name] for row in rows], each.name not in _WORDS
        column = Column(each.title, texts, each.rank, is_number=is_number)
        if not column.is_empty:
            shown.append(column)
    last = max(shown, key=lambda column: column.rank)
    while last.rank > _DISPENSABLE and _width(shown) > room:
        shown.remove(last)
        last = max(shown, key=lambda column: column.rank)
    return laid_out(shown, room)


def _width(columns: Sequence[Column]) -> int:
    return sum(min(column.width, _LONGEST_NAME) + 2 for column in columns) - 2


# -- above and below the table

# The parts of a step, in order.
_PARTS = (
    ("forward", "forward"),
    ("loss", "loss"),
    ("backward", "backward_call"),
    ("optimizer", "optimizer"),
    ("waiting for data", "data"),
    ("other", "other"),
)
_MOST_NAMES, _MOST_TYPES = 6, 8


def _headline(measurements: Measurements) -> str:
    measured = len(measurements.measured_steps)
    warmup = len(measurements.steps) - measured
    note = f" after {warmup} to warm up" if warmup else ""
    steps = f"{counted(measured, 'step')}{note}"
    return f"Profile of {measurements.model_name}: {steps}, {measurements.level} level"


# -- totals


def _totals(measurements: Measurements) -> list[str]:
    root, steps = measurements.root, measurements.measured_steps
    lines = {
        "parameters": _parameters_text(root),
        "gradients": bytes_text(root.gradient_bytes) if root.gradient_bytes else "",
        "FLOPs": _flops_text(root),
        "forward": _seconds_text(root, steps, "forward_seconds"),
        "backward": _seconds_text(root, steps, "backward_seconds"),
        "a whole step": _wall_text(root, steps),
    }
    kept = module_value(root, QUANTITIES["saved_bytes"])
    if kept is not None:
        lines["kept for backward"] = bytes_text(kept)
    peaks = [step.peak_bytes for step in steps if step.peak_bytes is not None]
    if peaks:
        above = "above what was allocated when the step began"
        lines["peak memory"] = f"{bytes_text(max(peaks))} {above}"
    return [f"{name + ':':<19}{text}" for name, text in lines.items() if text]


def _parameters_text(root: ModuleRecord) -> str:
    frozen = root.num_parameters - root.num_learnable
    text = f"{count_text(root.num_parameters)} ({bytes_text(root.param_bytes)})"
    return f"{text}, {count_text(frozen)} of them frozen" if frozen else text


def _flops_text(root: ModuleRecord) -> str:
    names = ("flops", "flops_per_second", "flops_backward")
    flops, speed, backward = (module_value(root, QUANTITIES[name]) for name in names)
    if not flops:
        return ""
    rate = "" if speed is None else f" ({count_text(speed)}FLOP/s)"
    also = f", backward {count_text(backward)}" if backward else ""
    return f"forward {count_text(flops)}{rate}{also}"


def _seconds_text(root: ModuleRecord, steps: list[ProfiledStep], field: str) -> str:
    """A typical time of a step, and the spread if there are several steps."""
    values = {step.number: value for step in steps if (value := getattr(step, field)) is not None}
    typical = root.typical_steps.mean(field, values)
    statistic = root.typical_steps.statistic(field, values)
    if typical is None or statistic is None:
        return ""
    if statistic.num == 1:
        return seconds_text(typical)
    numbers = ("minimum", "median", "p95")
    each = ", ".join(f"{name} {seconds_text(getattr(statistic, name))}" for name in numbers)
    return f"{seconds_text(typical)} ({each})"


def _wall_text(root: ModuleRecord, steps: list[ProfiledStep]) -> str:
    """The parts of the time between two calls of the model; empty if that is the model alone."""
    typical = [step for step in steps if step.number in root.typical_steps.forward] or steps
    if not any(step.outside_spans for step in typical):
        return ""

    def mean(field: str) -> float:
        return sum(getattr(step, field) or 0.0 for step in typical) / len(typical)

    parts = [(name, mean(f"{field}_seconds")) for name, field in _PARTS]
    each = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts if seconds)
    return f"{seconds_text(mean('wall_seconds'))}: {each}"


# -- notes


def _listed(records: list[ModuleRecord], measurements: Measurements) -> str:
    """The names of the first few modules."""
    names = [record.address or measurements.model_name for record in records]
    return _first(names, _MOST_NAMES)


def _first(texts: list[str], most: int) -> str:
    first = ", ".join(texts[:most])
    return f"{first} and {len(texts) - most} more" if len(texts) > most else first


def _not_measured(measurements: Measurements) -> list[str]:
    """Notes on what was not measured, and could be mistaken for zero."""
    steps = measurements.measured_steps
    if not steps:
        is_explained = bool(measurements.problems)
        return [] if is_explained else ["The model was not called, so nothing was measured."]
    notes = {
        "No backward pass ran.": all(step.backward_seconds is None for step in steps),
        "Memory was not measured.": all(step.peak_bytes is None for step in steps),
        "Times contain what measuring took: every step was detailed. Measure more steps, without "
        "stop=True.": not any(step.is_light for step in steps),
        _which_steps(measurements): True,
        "What checkpointing ran again is in the backward time and in no FLOPs.": any(
            call.is_recomputed for call in measurements.calls
        ),
        _not_counted(measurements): True,
        _not_called(measurements): True,
        _raised(steps): True,
    }
    return [note for note, is_true in notes.items() if note and is_true]


def _which_steps(measurements: Measurements) -> str:
    """What was measured in only some of the steps."""
    steps, timed = measurements.measured_steps, measurements.root.typical_steps.timed
    logged = {operation.step for operation in measurements.operations}
    times = "times are those of {}, in which nothing else was measured"
    numbers = {
        times: sum(step.is_light and step.number in timed for step in steps),
        "memory is that of {}": sum(step.peak_bytes is not None for step in steps),
        "FLOPs are those of {}": sum(step.has_flops for step in steps),
        "operations, with the time of the log, are those of {}": sum(
            step.number in logged for step in steps
        ),
    }
    texts = [text.format(number) for text, number in numbers.items() if 0 < number < len(steps)]
    return f"Of {len(steps)} steps, {', '.join(texts)}." if texts else ""


def _not_counted(measurements: Measurements) -> str:
    kinds = sorted(measurements.flops_not_counted.items(), key=lambda item: -item[1])
    texts = _first([f"{kind} ({number})" for kind, number in kinds], _MOST_TYPES)
    return f"FLOPs of these are not counted (calls in a step): {texts}." if kinds else ""


def _not_called(measurements: Measurements) -> str:
    modules = [record for record in measurements.root.walk() if record.address]
    unused = [record for record in modules if record.own_num_parameters and not record.calls]
    names = _listed(unused, measurements)
    return f"Modules with parameters that were not called: {names}." if unused else ""


def _raised(steps: list[ProfiledStep]) -> str:
    names = sorted({step.raised for step in steps if step.raised})
    return f"A step ended with {', '.join(names)}." if names else ""
