"""A model in at most one screen: the tree of its modules, with what repeats folded."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from torchlens._history.log import Log
from torchlens._history.summary import SummaryRow, module_rows, num_params_of
from torchlens._recording.operations import BUFFER, INPUT, OUTPUT
from torchlens._text.error_wording import check_count
from torchlens._text.grid import Column, laid_out
from torchlens._text.numbers import count_text, counted, shape_text

if TYPE_CHECKING:
    from torchlens._history.model_history import ModelHistory

_MOST_TYPES = 8
_WIDTH = 100


@dataclass(eq=False)
class Part:
    """A module, or several of a kind that follow each other, with what is inside one of them."""

    rows: list[SummaryRow]
    inside: list["Part"] = field(default_factory=list)
    depth: int = 0

    @property
    def name(self) -> str:
        """`h.0`, or `h.0 … h.11`; relative to the module around it."""
        names = [row.shown.strip() for row in self.rows]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"

    @property
    def type(self) -> str:
        count = len(self.rows)
        return self.rows[0].type if count == 1 else f"{count} × {self.rows[0].type}"

    def facts(self, log: Log) -> list[str]:
        """Its output, parameters and FLOPs as text; those of several together."""
        shapes = {row.output_shape for row in self.rows}
        known = [shape_text(shape) for shape in shapes if shape is not None]
        params = num_params_of(log, set[int]().union(*(row.params for row in self.rows)))
        flops = sum(row.flops for row in self.rows)
        is_unknown = any(row.num_unknown for row in self.rows)
        flops_text = count_text(flops) if flops else ""
        return [
            known[0] if len(known) == 1 else "",
            count_text(params) if params else "",
            f"≥ {flops_text}" if is_unknown and flops else flops_text,
        ]


def describe(history: "ModelHistory", lines: int = 40) -> str:
    """The description as text of so many lines at most."""
    check_count("lines", lines, 16)
    log = history._log
    head, tail = _head(history), _tail(history)
    parts, num_cut = _listed(history, lines - len(head) - len(tail) - 5)
    if num_cut:
        tail = [f"… and {counted(num_cut, 'more module')}", *tail]
    if not parts:
        return "\n".join([*head, *tail])
    facts = [part.facts(log) for part in parts]
    columns = [
        Column("module", ["  " * part.depth + part.name for part in parts], is_number=False),
        Column("type", [part.type for part in parts], is_number=False),
        *(
            Column(name, [own[place] for own in facts], rank=place + 1)
            for place, name in enumerate(("output", "params", "FLOPs"))
        ),
    ]
    return "\n".join([*head, "", *laid_out(columns, _WIDTH), "", *tail])


def to_markdown(history: "ModelHistory", lines: int = 40) -> str:
    """The description as Markdown, with the receipt below."""
    check_count("lines", lines, 16)
    log = history._log
    head, tail = _head(history), _tail(history)
    parts, num_cut = _listed(history, lines - len(head) - len(tail) - 9)
    if num_cut:
        tail = [f"… and {counted(num_cut, 'more module')}", *tail]
    text = [f"**{_cell(head[0])}**", "", *(_cell(line) for line in head[1:]), ""]
    if parts:
        text += ["| module | type | output | params | FLOPs |", "|---|---|---|---|---|"]
        for part in parts:
            name = "&nbsp;&nbsp;" * part.depth + _cell(part.name)
            text.append(f"| {name} | {' | '.join(map(_cell, (part.type, *part.facts(log))))} |")
        text.append("")
    text += [*map(_cell, tail), "", f"<sub>{_cell(str(history.receipt))}</sub>"]
    return "\n".join(text) + "\n"


def _cell(text: str) -> str:
    """Text that neither ends a cell nor is markup."""
    return re.sub(r"([\\|<*_`])", r"\\\1", text)


def _head(history: "ModelHistory") -> list[str]:
    log = history._log
    graph = log.graph
    totals = count_text(history.total_flops, "FLOP"), counted(history.num_operations, "operation")
    lines = [
        f"{history.model_name}: {history.total_params:,} parameters, " + ", ".join(totals),
    ]
    lines += [
        f"{word}: {_named_shapes(log, entries)}"
        for word, entries in (("input", graph.inputs), ("output", graph.outputs))
        if entries
    ]
    return lines


def _named_shapes(log: Log, entries: Sequence[int]) -> str:
    texts: list[str] = []
    for entry in entries:
        row = log.row(entry)
        dtype = str(row.dtype).removeprefix("torch.")
        name = log.boundary_addresses[entry][0].partition(".")[2]
        text = f"{name} {shape_text(row.shape)} {dtype}".lstrip()
        if texts and len(", ".join([*texts, text])) > _WIDTH - 20:
            return f"{', '.join(texts)} and {len(entries) - len(texts)} more"
        texts.append(text)
    return ", ".join(texts)


def _tail(history: "ModelHistory") -> list[str]:
    log = history._log
    rows = log.rows(range(len(log.graph.recorded)))
    counts = Counter(
        row.operation.layer_type for row in rows if row.operation not in (INPUT, BUFFER, OUTPUT)
    )
    shown = [f"{count} {name}" for name, count in counts.most_common(_MOST_TYPES)]
    rest = len(counts) - _MOST_TYPES
    more = f" and {counted(rest, 'other type')}" if rest > 0 else ""
    lines = [f"operations: {', '.join(shown) or 'none'}{more}"]
    if history.model_is_recurrent:
        lines.append(f"recurrent: a layer has up to {history.model_max_recurrent_loops} passes")
    failure = log.recording.failure
    if failure is not None:
        lines.append(f"the pass failed: {failure.message.partition(chr(10))[0][:80]}")
    return lines


# -- the tree --------------------------------------------------------------------------------------


def _listed(history: "ModelHistory", room: int) -> tuple[list[Part], int]:
    """The parts to list, in order, and how many are left out. Parts are opened from the outside in,
    the largest first, as long as there is room for all that is inside.
    """
    found = _tree(history)
    opened: set[Part] = set()
    waiting: list[tuple[int, int, int, Part]] = []
    count = len(found)

    def wait(parts: list[Part]) -> None:
        for part in parts:
            if part.inside:
                flops = sum(row.flops for row in part.rows)
                heappush(waiting, (part.depth, -flops, id(part), part))

    wait(found)
    while waiting:
        part = heappop(waiting)[-1]
        if count + len(part.inside) <= room:
            opened.add(part)
            count += len(part.inside)
            wait(part.inside)
    most = max(room, 1)
    return _walked(found, opened)[:most], max(len(found) - most, 0)


def _walked(parts: list[Part], opened: set[Part]) -> list[Part]:
    listed = []
    for part in parts:
        listed.append(part)
        if part in opened:
            listed += _walked(part.inside, opened)
    return listed


def _tree(history: "ModelHistory") -> list[Part]:
    rows = module_rows(history)[1:]
    children: dict[str, list[SummaryRow]] = {}
    around: list[SummaryRow] = []
    for row in rows:
        del around[row.depth - 1 :]
        children.setdefault(around[-1].name if around else "", []).append(row)
        around.append(row)
    kinds: dict[str, Any] = {}  # equal for modules of one class with equal modules inside
    for row in reversed(rows):
        inside = tuple([kinds[child.name] for child in children.get(row.name, ())])
        kinds[row.name] = hash((row.type, inside))

    def parts_of(name: str, depth: int) -> list[Part]:
        parts: list[Part] = []
        for row in children.get(name, ()):
            is_alike = parts and kinds[parts[-1].rows[0].name] == kinds[row.name]
            if is_alike and row.name in children:
                parts[-1].rows.append(row)
            else:
                parts.append(Part([row], depth=depth))
        for part in parts:
            part.inside = parts_of(part.rows[0].name, depth + 1)
        return parts

    return parts_of("", 0)
