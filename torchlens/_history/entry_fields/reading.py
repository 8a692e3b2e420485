"""An entry as a place in a log, and how its fields are read from the columns."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torchlens._history.log import Log

_Value = TypeVar("_Value")


class EntryReading:
    """A log and a number in it: all that an entry holds."""

    __slots__ = ("_entry", "_log")

    def __init__(self, log: Log, entry: int) -> None:
        self._log = log
        self._entry = entry

    def _one(self, column: Callable[[Log, Sequence[int]], list[_Value]]) -> _Value:
        return column(self._log, (self._entry,))[0]

    def _labels(self, entries: Iterable[int]) -> list[str]:
        return self._log.labels(list(entries))
