"""Describes a trace as text: one line for each module or operation, with statistics of its
numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchlens._health.tensor_statistics import stored_values
from torchlens._history.log import Log
from torchlens._history.model_history import ModelHistory
from torchlens._history.printing import entry_text
from torchlens._recording.unseen import NoTorchFunction, unseen
from torchlens._recording.wrappers import local_value, why_valueless
from torchlens._text.error_wording import check_count, did_you_mean
from torchlens._text.numbers import bytes_text, shape_text
from torchlens._text.plain_text import printable
from torchlens._trace.files import TraceFiles
from torchlens._trace.load import (
    calls_of,
    entry_named,
    load_call,
    missing_from,
    read_named,
)
from torchlens._trace.names import without_own
from torchlens.errors import TraceError

_NARROWEST = 40


class Line(NamedTuple):
    """One module or operation: its name, type, shape and statistics; `is_bad` if there are NaN or
    Inf.
    """

    name: str
    kind: str
    shape: str
    numbers: str
    is_bad: bool = False


class Overview(NamedTuple):
    """The text: a line about the file, a table, and what to do next."""

    title: str
    lines: list[Line]
    hints: list[str]
    body: str = ""

    def text(self, width: int, paint: Callable[[str, str], str] = lambda text, style: text) -> str:
        """All of it, at most `width` letters wide. `paint` makes text 'bold', 'dim' or 'red'."""
        parts = [paint(_cut(self.title, width), "bold")]
        if self.body:
            parts += [_cut(line, width) for line in self.body.splitlines()]
        parts += _table(self.lines, max(width, _NARROWEST), paint)
        parts += [paint(_cut(hint, width), "dim") for hint in self.hints]
        return "\n".join(parts)


def overview(
    files: TraceFiles, key: str | None = None, depth: int = 1, call: int | None = None
) -> Overview:
    """What the trace holds, or, with a key, a module or an operation in it. `depth` counts modules
    inside each other.
    """
    check_count("depth", depth, 0)
    calls = calls_of(files) if "torchlens" in files.metadata else []
    if not calls:
        return _plain_overview(files, key)
    number = calls[0] if call is None else call
    if number not in calls:
        raise TraceError(
            f"There is no call {number} in {printable(files.path.name)}: there are {_span(calls)}."
        )
    history = load_call(files, number)
    log, count = history._log, _count(len(calls), "call")
    title = f"{_title(files, log)}   {count}, {_sizes(files)}   {_state(files)}"
    hints = [f"Missing: {printable(reason)}" for reason in missing_from(files)]
    if len(calls) > 1:
        hints.append(f"This is call {number} of {_span(calls)}: choose with --call N.")
    if key is None:
        lines = list(_lines(log, (), depth))
        return Overview(title, lines, [*hints, _next_steps(files, history, lines)])
    chain = _module_named(log, key)
    if chain is not None:
        return Overview(title, list(_lines(log, chain, depth)), hints)
    return Overview(title, [], hints, _entry_body(history, key, number))


def _next_steps(files: TraceFiles, history: ModelHistory, lines: Sequence[Line]) -> str:
    modules = [line.name for line in lines if line.name in history.module_addresses]
    key, name = modules[-1] if modules else "KEY", printable(files.path.name)
    return f"Look closer: torchlens show {name} {key}      As a page: --html trace.html"


def _entry_body(history: ModelHistory, key: str, call: int) -> str:
    """The text of one entry."""
    entry = entry_named(history, key, call)
    if entry is None:
        raise TraceError(_no_such(key, history))
    lines = entry_text(history._log, entry).expandtabs(4).splitlines()
    return "\n".join(map(printable, lines))


def _span(calls: Sequence[int]) -> str:
    return f"{calls[0]}" if len(calls) == 1 else f"{calls[0]} to {calls[-1]}"


def _no_such(key: str, history: ModelHistory) -> str:
    near = did_you_mean(key, [*history.module_addresses, *history.layer_labels_w_pass])
    text = f"There is no module or operation {printable(key)!r} in this trace. {printable(near)}"
    return text.rstrip()


def _title(files: TraceFiles, log: Log) -> str:
    framework = log.recording.framework
    made_by = (
        f"{framework} {files.metadata.get('torch', '?')}" if framework == "torch" else framework
    )
    return (
        f"{printable(files.path.name)}   {printable(log.recording.model_name)} "
        f"({printable(made_by, 40)})"
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _sizes(files: TraceFiles) -> str:
    return f"{_count(len(without_own(files.names)), 'tensor')}, {bytes_text(files.num_bytes)}"


def _state(files: TraceFiles) -> str:
    return "complete" if files.is_closed else "unfinished"


# -- lines -----------------------------------------------------------------------------------------


def _module_named(log: Log, key: str) -> tuple[int, ...] | None:
    """The chain of module calls that a key names: `h.0`, or `h.0:2` for its second pass."""
    for number, name in enumerate(log.module_names):
        if number and (key == name or (key == log.recording.module_calls[number].address)):
            return log.graph.module_chains[number]
    return None


def _lines(log: Log, inside: tuple[int, ...], depth: int) -> Iterator[Line]:
    """What was done inside a chain of module calls; modules that are `depth` deep in it, or hold no
    others, as one line.
    """
    children, calls = log.graph.module_tree.children, log.recording.module_calls
    seen: set[int] = set()
    for entry in range(len(log.graph.recorded)):
        chain = log.module_chain(entry)
        if chain[: len(inside)] != inside:
            continue
        below = chain[len(inside) : len(inside) + max(depth, 0)]
        if not below or (len(below) < depth and children[calls[below[-1]].address]):
            yield _entry_line(log, entry)
        elif below[-1] not in seen:
            seen.add(below[-1])
            yield _module_line(log, below[-1])


def _module_line(log: Log, call: int) -> Line:
    record = log.recording.module_calls[call]
    passes = log.graph.module_tree.num_passes[record.address]
    name = log.module_pass(call) if passes > 1 else record.address
    result = log.graph.first_exit.get(call)
    kind = log.recording.module_classes[record.address]
    if result is None:
        return Line(printable(name), printable(kind), "", "returned no tensor")
    return _line(log, result, name, kind)


def _entry_line(log: Log, entry: int) -> Line:
    return _line(log, entry, log.label(entry), log.row(entry).operation.name)


def _line(log: Log, entry: int, name: str, kind: str) -> Line:
    row = log.row(entry)
    shape = shape_text(row.shape)
    value = log.value(entry) if log.is_saved(entry) else None
    words, is_bad = tensor_words(value)
    return Line(printable(name), printable(kind), printable(shape), words, is_bad)


def tensor_words(value: Any) -> tuple[str, bool]:
    """Statistics of a saved value as text, and whether some numbers are NaN or infinite."""
    if value is None:
        return "not saved", False
    if not isinstance(value, torch.Tensor):
        return printable(repr(value), 60), False
    with unseen(), NoTorchFunction():
        value = local_value(value.detach())
        if why_valueless(value) is not None:
            return "no values", False
        return _words(value)


def _words(value: torch.Tensor) -> tuple[str, bool]:
    if value.is_quantized:
        value = value.dequantize()
    numbers = stored_values(value)
    if not numbers.numel():
        return "empty", False
    if value.dtype is torch.bool:
        return f"true {100 * numbers.float().mean().item():.0f} %", False
    if not (value.is_floating_point() or value.is_complex()):
        return f"from {numbers.min().item():g} to {numbers.max().item():g}", False
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers.resolve_conj())
    if numbers.dtype not in (torch.float32, torch.float64):
        numbers = numbers.float()
    return _float_words(numbers)


def _float_words(numbers: torch.Tensor) -> tuple[str, bool]:
    """Mean and standard deviation, or how many numbers are NaN or infinite."""
    std, mean = torch.std_mean(numbers, correction=0)
    words = f"mean {mean.item():< 9.3g} std {std.item():<8.3g}".rstrip()
    if torch.isfinite(mean):
        return words, False
    num_nan, num_inf = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    if not num_nan and not num_inf:  # the sum of large numbers overflowed
        return words, False
    return f"{num_nan:,} NaN, {num_inf:,} Inf of {numbers.numel():,}", True


# -- files that torchlens did not write ------------------------------------------------------------


def _plain_overview(files: TraceFiles, key: str | None) -> Overview:
    title = f"{printable(files.path.name)}   tensors without a history   {_sizes(files)}"
    lines = []
    for name in without_own(files.names):
        if key is None or key in name:
            dtype, shape = files.kind(name)
            words, is_bad = tensor_words(read_named(files, name))
            lines.append(Line(printable(name), dtype, shape_text(shape), words, is_bad))
    if not lines and key is not None:
        raise TraceError(f"There is no tensor {printable(key)!r} in {printable(files.path.name)}.")
    return Overview(title, lines, [])


# -- the table -------------------------------------------------------------------------------------


def _table(lines: Sequence[Line], width: int, paint: Callable[[str, str], str]) -> Iterator[str]:
    if not lines:
        return
    kind, shape = max(len(line.kind) for line in lines), max(len(line.shape) for line in lines)
    numbers = max(len(line.numbers) for line in lines)
    kind, shape = min(kind, width // 4), min(shape, width // 4)
    room = width - 2 - 6 - kind - shape - numbers
    longest = max(len(line.name) for line in lines)
    name = max(min(longest, room), min(longest, width // 4))
    for line in lines:
        start = (
            f"  {_cut(line.name, name):<{name}}  {_cut(line.kind, kind):<{kind}}  "
            f"{_cut(line.shape, shape):<{shape}}  "
        )
        rest = _cut(line.numbers, max(width - len(start), 0))
        yield (start + (paint(rest, "red") if line.is_bad else rest)).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"
