"""The cost of a model, layer by layer or module by module, as a table to print."""

import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchlens._history.field import ManyEntries
from torchlens._history.layer_entry import LayerEntry
from torchlens._history.log import Log
from torchlens._history.printing import valueless_text
from torchlens._history.receipt import exported_receipt
from torchlens._history.tables import with_symbols
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT, Operation
from torchlens._text.error_wording import check_choice, check_count
from torchlens._text.grid import Column, laid_out
from torchlens._text.measures import MEASURES, Measure, short_word
from torchlens._text.numbers import bytes_text, count_text, seconds_text, shape_text

if TYPE_CHECKING:
    import pandas

    from torchlens._history.model_history import ModelHistory


@dataclass(slots=True)
class SummaryRow:
    """One layer, summed over its passes, or one module, summed over its calls and with all that is
    inside it.
    """

    name: str
    type: str
    module: str | None = None
    depth: int = 0
    shown: str = ""  # its name in a tree: relative to the module around it
    output_shape: tuple[int, ...] | None = None
    calls: int = 0
    # Numbers of the parameters, so that a shared one counts once.
    params: set[int] = field(default_factory=set)
    flops: int = 0
    flops_backward: int = 0
    num_unknown: int = 0  # calls whose FLOPs are not known
    time: float = 0.0
    backward_time: float | None = None
    memory: int = 0

    @property
    def total_time(self) -> float:
        """Forward and backward."""
        return self.time + (self.backward_time or 0.0)

    def add(self, cost: "_Cost") -> None:
        """Adds the cost of one operation."""
        self.flops += cost.flops or 0
        self.flops_backward += cost.flops_backward or 0
        self.num_unknown += cost.flops is None
        self.memory += cost.memory
        if not cost.output_index:  # the time of a call with several results counts once
            self.time += cost.time
            if cost.backward_time is not None:
                self.backward_time = (self.backward_time or 0.0) + cost.backward_time


class _Cost(NamedTuple):
    """The cost of one entry."""

    entry: int
    flops: int | None
    flops_backward: int | None
    memory: int
    output_index: int | None
    time: float
    backward_time: float | None


class Summary:
    """A table to print; `to_pandas()` has the plain numbers.

    >>> print(history.summary(depth=2, sort_by='flops'))
    """

    def __init__(
        self,
        history: "ModelHistory",
        rows: list[SummaryRow],
        kind: str,
        width: int | None,
        num_cut: int,
    ) -> None:
        self._log = history._log
        self._rows = rows
        self._kind = kind
        self._text = _text(history, rows, kind, width, num_cut)

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self._rows)

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per line of the table; unknown FLOPs are missing, times are in seconds, memory in
        bytes.
        """
        import pandas  # slow to import

        facts = [self._facts(row) for row in self._rows]
        names = facts[0] if facts else []
        table = pandas.DataFrame(
            {name: with_symbols([fact[name] for fact in facts]) for name in names}
        )
        table.attrs["receipt"] = exported_receipt(self._log).to_dict()
        return table

    def _facts(self, row: SummaryRow) -> dict[str, Any]:
        params = [self._log.recording.params[number] for number in row.params]
        return {
            self._kind: row.name,
            "type": row.type,
            **({"module": row.module} if self._kind == "layer" else {"depth": row.depth}),
            "output_shape": row.output_shape,
            "calls": row.calls,
            "params": sum(parameter.numel() for parameter in params),
            "params_trainable": sum(
                parameter.numel() for parameter in params if parameter.requires_grad
            ),
            "flops": None if row.num_unknown else row.flops,
            "flops_backward": None if row.num_unknown else row.flops_backward,
            "time": row.time,
            "backward_time": row.backward_time,
            "memory": row.memory,
        }


def summarize(
    history: "ModelHistory",
    depth: int | None = None,
    sort_by: Measure | None = None,
    width: int | None = None,
    limit: int | None = None,
) -> Summary:
    """The layers or, with a depth, the modules, in the order they ran; with `sort_by`, the largest
    first.
    """
    for name, value, least in (("depth", depth, 0), ("width", width, 1), ("limit", limit, 1)):
        if value is not None:
            check_count(name, value, least)
    check_choice("sort_by", sort_by, MEASURES, or_none=True)
    log = history._log
    rows = _layer_rows(log) if depth is None else module_rows(history, depth)
    if sort_by is not None:
        rows.sort(key=lambda row: _measure(log, row, sort_by), reverse=True)
        for row in rows:
            row.depth, row.shown = 0, ""  # a sorted list is not a tree
    num_cut = max(0, len(rows) - limit) if limit is not None else 0
    return Summary(history, rows[:limit], "layer" if depth is None else "module", width, num_cut)


def _measure(log: Log, row: SummaryRow, sort_by: str) -> float:
    word = short_word(sort_by)
    value = num_params_of(log, row.params) if word == "params" else getattr(row, word)
    return value or 0


def num_params_of(log: Log, numbers: Iterable[int]) -> int:
    """The number of elements of the parameters with these numbers."""
    return sum(log.recording.params[number].numel() for number in numbers)


# -- rows ------------------------------------------------------------------------------------------


def _costs(log: Log, *left_out: Operation) -> Iterator[_Cost]:
    """The cost of each entry, without those of some operations."""
    everything = range(len(log.graph.recorded))
    entries = [
        entry
        for entry, row in zip(everything, log.rows(everything), strict=True)
        if row.operation not in left_out
    ]
    fields = (
        LayerEntry.flops, LayerEntry.flops_backward, LayerEntry.tensor_fsize,
        LayerEntry.iterable_output_index, LayerEntry.func_time_elapsed,
        LayerEntry.backward_time_elapsed,
    )  # fmt: skip
    return map(_Cost, entries, *(field.of(ManyEntries(log, entries)) for field in fields))


def _layer_rows(log: Log) -> list[SummaryRow]:
    rows: dict[int, SummaryRow] = {}
    for cost in _costs(log, OUTPUT, BUFFER):
        number = log.graph.layer_of[cost.entry]
        row = rows.get(number)
        if row is None:
            entry = LayerEntry(log, cost.entry)
            module = entry.containing_module_origin
            name, kind = entry.layer_label_no_pass, entry.layer_type
            row = rows[number] = SummaryRow(
                name, kind, module.rpartition(":")[0] if module else None
            )
        row.add(cost)
        row.calls += 1
        row.output_shape = tuple(log.row(cost.entry).shape)
        row.params.update(log.graph.params[cost.entry])
    return list(rows.values())


def module_rows(history: "ModelHistory", depth: int | None = None) -> list[SummaryRow]:
    """The model and its modules down to a depth, each before those in it."""
    log = history._log
    recording, graph = log.recording, log.graph
    rows = {"": SummaryRow(history.model_name, recording.module_classes[""], calls=1)}

    def list_modules(parent: str, addresses: list[str], level: int) -> None:
        for address in addresses if depth is None or level <= depth else ():
            if address not in rows:
                shown = "  " * level + address.removeprefix(f"{parent}.")
                calls = graph.module_tree.num_passes[address]
                rows[address] = SummaryRow(
                    address,
                    recording.module_classes[address],
                    depth=level,
                    shown=shown,
                    calls=calls,
                )
                list_modules(address, graph.module_tree.children[address], level + 1)

    list_modules("", graph.module_tree.top_level, 1)
    for cost in _costs(log, INPUT, OUTPUT, BUFFER):
        chain = log.module_chain(cost.entry)
        for address in {
            "",
            *(recording.module_calls[call].address for call in chain),
        } & rows.keys():
            rows[address].add(cost)
    for call, first in graph.first_exit.items():
        address = recording.module_calls[call].address
        if address in rows:
            rows[address].output_shape = tuple(log.row(first).shape)
    if graph.outputs:
        rows[""].output_shape = tuple(log.row(graph.outputs[0]).shape)
    rows[""].params.update(range(len(recording.params)))
    for owner, numbers in recording.module_params.items():
        parts = owner.split(".")
        for end in range(1, len(parts) + 1):
            outer = rows.get(".".join(parts[:end]))
            if outer is not None:
                outer.params.update(numbers)
    return list(rows.values())


# -- text ------------------------------------------------------------------------------------------


def _text(
    history: "ModelHistory", rows: list[SummaryRow], kind: str, width: int | None, num_cut: int
) -> str:
    log = history._log
    room = shutil.get_terminal_size((100, 24)).columns if width is None else width
    columns = _module_columns(rows) if kind == "module" else _layer_columns(rows)
    columns += _number_columns(log, rows)
    failed = "" if log.recording.failure is None else " (the pass failed)"
    lines = [f"{history.model_name}{failed}", "", *laid_out(columns, room)]
    if num_cut:
        lines.append(f"… and {num_cut} more")
    lines.append("")
    for title, text in _totals(history):
        lines += textwrap.wrap(f"{title:<13}{text}", max(room, 40), subsequent_indent=" " * 13)
    return "\n".join(lines)


def _module_columns(rows: list[SummaryRow]) -> list[Column]:
    return [
        Column("module", [row.shown or row.name for row in rows], is_number=False),
        Column("type", [row.type for row in rows], 3, is_number=False),
    ]


def _layer_columns(rows: list[SummaryRow]) -> list[Column]:
    return [
        Column("layer", [row.name for row in rows], is_number=False),
        Column("module", [row.module or "" for row in rows], 3, is_number=False),
    ]


def _number_columns(log: Log, rows: list[SummaryRow]) -> list[Column]:
    def column(heading: str, rank: int, text: Callable[[SummaryRow], str]) -> Column:
        return Column(heading, list(map(text, rows)), rank)

    columns = [
        column("output", 2, _output_text),
        column("params", 1, lambda row: _or_dash(num_params_of(log, row.params))),
        column("FLOPs", 1, _flops_text),
        column("time", 1, lambda row: seconds_text(row.time) if row.time else "-"),
        column("backward", 4, _backward_text),
        column("memory", 5, lambda row: bytes_text(row.memory)),
    ]
    if any(row.calls > 1 for row in rows):
        columns.insert(1, column("calls", 6, lambda row: str(row.calls)))
    return columns


def _output_text(row: SummaryRow) -> str:
    return "" if row.output_shape is None else shape_text(row.output_shape)


def _or_dash(count: int) -> str:
    return count_text(count) if count else "-"


def _flops_text(row: SummaryRow) -> str:
    if row.num_unknown:
        return f"≥ {count_text(row.flops)}" if row.flops else "?"
    return _or_dash(row.flops)


def _backward_text(row: SummaryRow) -> str:
    return "-" if row.backward_time is None else seconds_text(row.backward_time)


def _totals(history: "ModelHistory") -> Iterator[tuple[str, str]]:
    """The totals of the whole model; a parameter that is used in several places counts once."""
    log = history._log
    params = log.recording.params
    num_trainable = sum(parameter.numel() for parameter in params if parameter.requires_grad)
    used = {number for numbers in log.graph.params for number in numbers}
    num_unused = history.total_params - num_params_of(log, used)
    unused = f", {num_unused:,} not used" if num_unused else ""
    size = history.total_params_fsize_nice
    yield "parameters", f"{history.total_params:,} ({size}), {num_trainable:,} trainable{unused}"
    backward = history.total_flops_backward
    yield (
        "FLOPs",
        f"{count_text(history.total_flops)}"
        + (f", backward {count_text(backward)}" if backward else ""),
    )
    unknown = history.flops_not_counted
    if unknown:
        yield "not counted", ", ".join(f"{kind} ×{count}" for kind, count in unknown.items())
    forward = seconds_text(history.elapsed_time_forward_pass)
    yield (
        "time",
        (
            f"{seconds_text(history.elapsed_time_function_calls)} in operations, {forward} in the "
            "forward pass"
        ),
    )
    saved = (
        f"{history.num_tensors_saved:,} saved "
        f"({history.tensor_fsize_saved_nice}){valueless_text(log)}"
    )
    yield "tensors", f"{history.num_tensors_total:,} ({history.tensor_fsize_total_nice}), {saved}"
