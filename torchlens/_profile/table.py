"""A profile as a printed table that fits the terminal."""

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
    first_few,
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


# The columns of each table: quantities and other texts of a row, with a rank. The higher it is, the
# sooner a column is left out of a narrow terminal.
_COLUMNS: dict[str, dict[str, int]] = {
    "module": {
        "type": 1, "output": 3, "calls": 10, "parameters": 5, "flops": 6, "flops_per_second": 11,
        "forward_time": 0, "forward_self_time": 9, "backward_time": 2, "backward_self_time": 12,
        "total_time": 8, "share": 4, "saved_bytes": 8, "peak_bytes": 7, "peak_bytes_backward": 10,
    },
    "operation": {
        "module": 1, "output": 3, "output_bytes": 5, "flops": 6, "flops_per_second": 9,
        "forward_time": 0, "backward_time": 2, "total_time": 8, "share": 4, "peak_bytes": 7,
    },
    "type": {
        "modules": 3, "calls": 4, "parameters": 5, "flops": 6, "forward_time": 0,
        "backward_time": 2, "total_time": 8, "share": 1, "saved_bytes": 7,
    },
}  # fmt: skip
_HEADINGS = {"operation": {"forward_time": "logged fwd", "peak_bytes": "peak"}}
_WORDS = ("type", "output", "module")  # columns of text


@dataclass(frozen=True, slots=True)
class _TableRow:
    name: str
    texts: dict[str, str]  # by the name of a column
    value_of: Callable[[str], float | None]  # the number of a quantity

    def text(self, column: str) -> str:
        quantity = QUANTITIES.get(column)
        if quantity is None:
            return self.texts[column]
        value = self.value_of(column)
        if value is None or (value == 0 and quantity.unit in ("", "FLOPs")):
            return "-"
        return quantity.text(value)


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
    limit, rows = request.limit, _ROWS[request.by](measurements, request, notes)
    sort_by = request.sort_by or ("total_time" if request.by == "type" else None)
    if sort_by is not None:
        rows.sort(key=partial(_descending, sort_by))
    if limit is not None and len(rows) > limit:
        notes[f"The first {limit} of {len(rows)}."] = None
    return _laid_out(request, rows[:limit], room)


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """The text in lines, broken at spaces, but not between a number and its unit."""
    tied = re.sub(r"(?<=\d) (?=[A-Za-zµ])", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(tied, width, subsequent_indent=indent)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _descending(name: str, row: _TableRow) -> float:
    value = row.value_of(name)
    return float("inf") if value is None else -value


# -- rows


_Notes = dict[str, None]


def _module_rows(measurements: Measurements, request: _Request, notes: _Notes) -> list[_TableRow]:
    """The modules as a list, if the rows are to be sorted, or as a tree."""
    is_list, times = request.sort_by is not None, request.times
    rows = _named_modules(measurements, is_list, notes)
    depth = _depth_shown([record for record, _ in rows], request, notes)
    whole = _value_in(measurements.root, times, "total_time")
    found = []
    for record, name in rows:
        if record.depth <= depth:
            value_of, calls = partial(_value_in, record, times), record.measured_calls
            texts = {
                "type": record.module_type,
                "output": _shapes_text(calls[-1].output_shapes) if calls else "",
                "share": _share_text(value_of("total_time"), whole),
            }
            indent = "" if is_list else "  " * record.depth
            found.append(_TableRow(indent + (name or measurements.model_name), texts, value_of))
    return found


def _value_in(record: ModuleRecord, times: Times, quantity: str) -> float | None:
    return module_value(record, QUANTITIES[quantity], times)


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


def _type_rows(measurements: Measurements, request: _Request, _: _Notes) -> list[_TableRow]:
    """One row for each type of module that was called."""
    by_type: dict[str, list[ModuleRecord]] = {}
    for record in measurements.root.walk():
        if record.measured_calls:
            by_type.setdefault(record.module_type, []).append(record)
    inside, times = calls_inside(measurements), request.times
    whole = _value_in(measurements.root, times, "total_time")
    rows = []
    for kind, records in by_type.items():

        def value_of(name: str, records: list[ModuleRecord] = records) -> float | None:
            return own_value(records, QUANTITIES[name], inside, times)

        share = _share_text(value_of("total_time"), whole)
        rows.append(_TableRow(kind, {"modules": str(len(records)), "share": share}, value_of))
    return rows


def _operation_rows(measurements: Measurements, request: _Request, _: _Notes) -> list[_TableRow]:
    @cache
    def values(name: str) -> dict[str, float]:
        return operation_values(measurements, QUANTITIES[name], request.times)

    whole = sum(values("total_time").values())
    rows = []
    for record in last_operations(measurements):

        def value_of(name: str, label: str = record.label or "") -> float | None:
            return values(name).get(label)

        texts = {
            "module": record.address,
            "output": _shapes_text([record.shape]),
            "share": _share_text(value_of("total_time"), whole),
        }
        rows.append(_TableRow(record.label or "", texts, value_of))
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


def _laid_out(request: _Request, rows: list[_TableRow], room: int) -> list[str]:
    """Heading, rule and rows, without empty columns and those that do not fit."""
    shown = [Column(request.by, [row.name for row in rows], is_number=False)]
    shown += [column for column in _columns(request, rows) if not column.is_empty]
    last = max(shown, key=lambda column: column.rank)
    while last.rank > _DISPENSABLE and _width(shown) > room:
        shown.remove(last)
        last = max(shown, key=lambda column: column.rank)
    return laid_out(shown, room)


def _columns(request: _Request, rows: list[_TableRow]) -> Iterator[Column]:
    """All columns; the one by which the rows are sorted is never left out."""
    ranks, headings = _COLUMNS[request.by], _HEADINGS.get(request.by, {})
    sort_by = request.sort_by
    if sort_by is not None and sort_by not in ranks:
        headings = {**headings, sort_by: QUANTITIES[sort_by].title}
    for name, rank in {**ranks, **({} if sort_by is None else {sort_by: 0})}.items():
        title = headings.get(name) or (QUANTITIES[name].heading if name in QUANTITIES else name)
        texts = [row.text(name) for row in rows]
        yield Column(title, texts, rank, is_number=name not in _WORDS)


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
    return first_few(names, _MOST_NAMES)


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
    texts = first_few([f"{kind} ({number})" for kind, number in kinds], _MOST_TYPES)
    return f"FLOPs of these are not counted (calls in a step): {texts}." if kinds else ""


def _not_called(measurements: Measurements) -> str:
    modules = [record for record in measurements.root.walk() if record.address]
    unused = [record for record in modules if record.own_num_parameters and not record.calls]
    names = _listed(unused, measurements)
    return f"Modules with parameters that were not called: {names}." if unused else ""


def _raised(steps: list[ProfiledStep]) -> str:
    names = sorted({step.raised for step in steps if step.raised})
    return f"A step ended with {', '.join(names)}." if names else ""
