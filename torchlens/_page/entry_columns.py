"""The entries of a log, as columns for the page."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchlens._graph.costs import flops_of_all
from torchlens._history.argument_words import argument_words
from torchlens._history.backward import backward_times
from torchlens._history.log import Log, picked
from torchlens._page.parts import ChosenParts, FailedCall
from torchlens._page.value_columns import Statistics
from torchlens._recording.recording import Failure
from torchlens._recording.user_code import source_line, source_text
from torchlens._recording.wrappers import local_value, why_valueless
from torchlens._text.error_wording import got
from torchlens.errors import ValueChangedError

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
            place = str(source_line(code, instruction))
            self.lines.append([self._strings(place), self._strings(source_text(code, instruction))])
        return self._number_of[key]


def shape_text(shape: Any) -> str:
    """`1×384`, `(384,)` or `scalar`. (`× 8` alone would read like a number of passes.)"""
    if len(shape) == 1:
        return f"({shape[0]},)"
    return "×".join(map(str, shape)) if len(shape) else "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


class Costs(NamedTuple):
    """Costs of all entries: bytes of the tensor, microseconds and FLOPs of the call, microseconds
    of its backward pass (None if none reached it). A call with several results has them at the
    first. A failed call, the last entry, costs nothing.
    """

    bytes: list[int]
    micros: list[float]
    flops: list[int]
    backward: list[float | None]


def costs_of(log: Log) -> Costs:
    entries = range(len(log.graph.recorded))
    rows, seconds = log.rows(entries), backward_times(log).seconds
    forward = [0.0 if row.output_index else row.seconds for row in rows]
    back = [None if row.output_index else seconds.get(at) for at, row in enumerate(rows)]
    return Costs(
        [*log.sizes(entries), 0],
        [*(round(own * 1e6, 1) for own in forward), 0.0],
        [*(own or 0 for own in flops_of_all(log.recording, rows)), 0],
        [*(None if own is None else round(own * 1e6, 1) for own in back), None],
    )


class EntryColumns:
    """The columns with what the page shows of each entry. Text, types and lines of code are numbers
    of `Strings` and `Places`, `stat` and `grad` are rows of `Statistics`.
    """

    def __init__(self, log: Log, strings: Strings, places: Places, statistics: Statistics) -> None:
        self._log, self._strings, self._places, self._statistics = log, strings, places, statistics
        self._valueless = log.valueless_entries()

    @property
    def reasons_for_no_values(self) -> str:
        """Why tensors have no values, as text; empty if all have some."""
        return ", ".join(dict.fromkeys(self._valueless.values()))

    def columns(
        self, chosen: ChosenParts, costs: Costs, failure: Failure | None, failed: FailedCall | None
    ) -> dict[str, list[Any]]:
        """Name → one value per entry that the page carries. The failed call is the last."""
        log, strings, add = self._log, self._strings, self._statistics.add
        entries = [entry for entry in chosen.entries if entry < len(log.graph.recorded)]
        rows, gradients = log.rows(entries), log.gradients(entries)
        found: dict[str, list[Any]] = {
            "label": list(map(strings, log.labels(entries))),
            "shape": [strings(shape_text(row.shape)) for row in rows],
            "dtype": [strings(dtype_text(row.dtype)) for row in rows],
            "place": [self._places(row.code, row.instruction) for row in rows],
            "stat": list(map(self._stat, entries)),
            "grad": list(map(add, gradients)),
            "args": list(map(strings, map(self._arguments, entries))),
            "parents": [chosen.numbers(log.graph.parents[entry]) for entry in entries],
            "gradnorm": list(map(_norm, gradients)),
        }
        if failure is not None and failed is not None:
            self._append_failed(found, failure, chosen.numbers(failed.parents))
        own_costs = {name: picked(getattr(costs, name), chosen.entries) for name in costs._fields}
        return found | own_costs

    def _append_failed(
        self, columns: dict[str, list[Any]], failure: Failure, parents: Sequence[int]
    ) -> None:
        """Adds the call that raised to the columns, which are in the order of `columns`."""
        name = failure.operation.name if failure.operation else "raise"
        place = self._places(failure.code, failure.instruction)
        values = (self._strings(name), 0, 0, place, -1, -1, 0, parents, None)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)

    def _stat(self, entry: int) -> int:
        """The row of statistics of a saved value; -1 without one, or if it was changed in place
        after the operation.
        """
        if entry in self._valueless:
            return _VALUELESS
        try:
            return self._statistics.add(self._log.value(entry))
        except ValueChangedError:
            return -1

    def _arguments(self, entry: int) -> str:
        if entry in self._log.boundary_addresses:
            return ", ".join(self._log.boundary_addresses[entry])
        return argument_words(self._log.recording, self._log.row(entry))


def _norm(gradient: torch.Tensor | None) -> float | None:
    if gradient is None or why_valueless(gradient) is not None:
        return None
    norm = torch.linalg.vector_norm(local_value(gradient.detach()).float())
    return finite_number(f"{float(norm):.6g}", "")


def finite_number(value: Any, key: Any) -> float | None:
    """The value as a number; None if it is not finite."""
    try:
        number = float(value)
    # RuntimeError: a tensor of several numbers.
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"An overlay must give a number for {key!r}, got {got(value)}.") from error
    return number if math.isfinite(number) else None
