"""The entries of a log, as columns for the page."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchlens._graph.costs import flops_of
from torchlens._history.argument_words import argument_words
from torchlens._history.backward import backward_times
from torchlens._history.log import Log
from torchlens._page.parts import FailedCall, Selection
from torchlens._page.statistics import Statistics
from torchlens._recording.recording import Failure
from torchlens._recording.stored import opened
from torchlens._recording.user_code import SourceLine, source_line, source_text
from torchlens._recording.wrappers import local_value, why_valueless
from torchlens._text.error_wording import got

# The row of statistics of a tensor without values, such as a meta tensor.
_VALUELESS = -2


class Strings:
    """Text → its number; the empty string has the number 0."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.found.setdefault(text, len(self.found))


class Places:
    """Lines of source code → their numbers; `lines` has the place and the text of each."""

    def __init__(self, strings: Strings) -> None:
        self.lines: list[list[int]] = []
        self._strings = strings
        self._number_of: dict[Any, int] = {}

    def __call__(self, code: Any, instruction: int) -> int:
        """The number of a line; -1 without code."""
        if code is None:
            return -1
        key = (code, instruction)
        if key not in self._number_of:
            self._number_of[key] = len(self.lines)
            place = place_text(source_line(code, instruction))
            self.lines.append([self._strings(place), self._strings(source_text(code, instruction))])
        return self._number_of[key]


def place_text(line: SourceLine) -> str:
    """A place in the code; files below the working directory have relative paths."""
    file = Path(line.file)
    here = Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return f"{shown}:{line.line} in {line.function}"


def shape_text(shape: Any) -> str:
    """`1×384`, `(384,)` or `scalar`. (`× 8` alone would read like a number of passes.)"""
    if len(shape) == 1:
        return f"({shape[0]},)"
    return "×".join(map(str, shape)) if len(shape) else "scalar"


class EntryValues(NamedTuple):
    """What the page shows of one entry. Text, types and lines of code are numbers of `Strings` and
    `Places`, `stat` and `grad` are rows of `Statistics`.
    """

    label: int
    shape: int
    dtype: int
    bytes: int
    micros: float
    flops: int
    place: int
    stat: int
    grad: int
    args: int
    parents: Sequence[int]
    backward: float | None
    gradnorm: float | None


class EntryColumns:
    """The columns with what the page shows of each entry, and the costs of single entries. A failed
    call costs nothing.
    """

    def __init__(self, log: Log, strings: Strings, places: Places, statistics: Statistics) -> None:
        self._log, self._strings, self._places, self._statistics = log, strings, places, statistics
        self._valueless = log.valueless_entries()
        self._dtypes: dict[torch.dtype, int] = {}
        self._sizes: dict[Any, int] = {}
        self._flops: dict[Any, int] = {}
        self._backward_seconds = backward_times(log).seconds

    @property
    def reasons_for_no_values(self) -> str:
        """Why tensors have no values, as text; empty if all have some."""
        return ", ".join(dict.fromkeys(self._valueless.values()))

    def columns(
        self, chosen: Selection, failure: Failure | None, failed: FailedCall | None
    ) -> dict[str, list[Any]]:
        """Name → one value per entry that the page carries. The failed call is the last."""
        num_entries = len(self._log.graph.recorded)
        rows = [self._values(entry, chosen) for entry in chosen.entries if entry < num_entries]
        if failure is not None and failed is not None:
            rows.append(self._failed_values(failure, failed, chosen))
        return {name: [row[at] for row in rows] for at, name in enumerate(EntryValues._fields)}

    def _values(self, entry: int, chosen: Selection) -> EntryValues:
        log, strings = self._log, self._strings
        row, gradient = log.row(entry), log.gradient(entry)
        if row.dtype not in self._dtypes:
            self._dtypes[row.dtype] = strings(str(row.dtype).removeprefix("torch."))
        return EntryValues(
            label=strings(log.label(entry)),
            shape=strings(shape_text(row.shape)),
            dtype=self._dtypes[row.dtype],
            bytes=self.num_bytes(entry),
            micros=self.micros(entry),
            flops=self.flops(entry),
            place=self._places(row.code, row.instruction),
            stat=_VALUELESS
            if entry in self._valueless
            else self._statistics.add(self._value(entry)),
            grad=self._statistics.add(gradient),
            args=strings(self._arguments(entry, row)),
            parents=chosen.numbers(log.graph.parents[entry]),
            backward=self.backward(entry),
            gradnorm=_norm(gradient),
        )

    def _failed_values(
        self, failure: Failure, failed: FailedCall, chosen: Selection
    ) -> EntryValues:
        name = failure.operation.name if failure.operation else "raise"
        place = self._places(failure.code, failure.instruction)
        parents = chosen.numbers(failed.parents)
        label = self._strings(name)
        return EntryValues(label, 0, 0, 0, 0, 0, place, -1, -1, 0, parents, None, None)

    def num_bytes(self, entry: int) -> int:
        """The size of an entry's tensor."""
        if entry >= len(self._log.graph.recorded):
            return 0
        row = self._log.row(entry)
        key = (row.shape, row.dtype)
        if key not in self._sizes:
            size = self._log.num_bytes(entry)
            if -1 in row.shape:  # nested tensors of the same shape may differ in size
                return size
            self._sizes[key] = size
        return self._sizes[key]

    def micros(self, entry: int) -> float:
        """Microseconds of the call; 0 for all results of a call but the first."""
        if entry >= len(self._log.graph.recorded):
            return 0
        row = self._log.row(entry)
        return 0 if row.output_index else round(row.seconds * 1e6, 1)

    def flops(self, entry: int) -> int:
        """FLOPs of the call; 0 if they are not known."""
        if entry >= len(self._log.graph.recorded):
            return 0
        row = self._log.row(entry)
        # Passes of one layer with results of the same shape cost the same.
        key = self._log.graph.layer_of[entry], row.shape
        if key not in self._flops:
            self._flops[key] = flops_of(self._log.recording, row) or 0
        return self._flops[key]

    def backward(self, entry: int) -> float | None:
        """Microseconds of the backward pass; None if none reached the entry."""
        seconds = self._backward_seconds.get(entry)
        if seconds is None or self._log.row(entry).output_index:
            return None
        return round(seconds * 1e6, 1)

    def _value(self, entry: int) -> Any:
        """The saved value; None if it was changed in place after the operation."""
        number = self._log.graph.recorded[entry]
        value, version = self._log.recording.values[number], self._log.recording.versions[number]
        if value is not None and version >= 0 and value._version != version:
            return None
        return opened(value)

    def _arguments(self, entry: int, row: Any) -> str:
        if entry in self._log.boundary_addresses:
            return ", ".join(self._log.boundary_addresses.get(entry, []))
        return argument_words(self._log.recording, row)


def _norm(gradient: torch.Tensor | None) -> float | None:
    if gradient is None or why_valueless(gradient) is not None:
        return None
    return finite_number(
        f"{float(torch.linalg.vector_norm(local_value(gradient.detach()).float())):.6g}", ""
    )


def finite_number(value: Any, key: Any) -> float | None:
    """The value as a number; None if it is not finite."""
    try:
        number = float(value)
    # RuntimeError: a tensor of several numbers.
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"An overlay must give a number for {key!r}, got {got(value)}.") from error
    return number if math.isfinite(number) else None
