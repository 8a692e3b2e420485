"""A history as a pandas table."""

from typing import TYPE_CHECKING, Any

import numpy

from torchlens._history.field import ManyEntries
from torchlens._history.layer_entry import COLUMNS
from torchlens._history.receipt import exported_receipt
from torchlens._recording.garbage_collector import without_collector
from torchlens._recording.symbolic import SymbolicInt

if TYPE_CHECKING:
    import pandas


# The dtype of a column with values of one type. pandas would find the same, in three to five times
# the time.
_DTYPES: dict[type, Any] = {
    int: "int64",
    float: "float64",
    bool: "bool",
    list: object,
    tuple: object,
    dict: object,
}
_NUMBERS = (int, float)


def entries_to_pandas(entries: ManyEntries) -> "pandas.DataFrame":
    """One row per entry, one column per field that is declared with `@field`."""
    import pandas  # slow to import, so imported only for a table

    def table() -> pandas.DataFrame:
        cells = {name: ColumnCells(column.type) for name, column in COLUMNS.items()}
        for part in entries.in_parts():
            for name, column in COLUMNS.items():
                cells[name].add(column.of(part))
        # Without copy=False, pandas would group the columns by dtype, and touch every list of a
        # million again.
        frame = pandas.DataFrame({name: cells.pop(name).series() for name in COLUMNS}, copy=False)
        frame.attrs["receipt"] = exported_receipt(entries._log).to_dict()
        return frame

    return without_collector(table)


class ColumnCells:
    """A column that comes in parts. Parts of numbers and of lists become arrays at once, while they
    are in the cache.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind if kind in _DTYPES else None
        self._parts: list[Any] = []

    def add(self, values: list[Any]) -> None:
        self._parts.append(self._array(values))

    def _array(self, values: list[Any]) -> Any:
        if self._kind is None or (
            self._kind in _NUMBERS and set(map(type, values)) != {self._kind}
        ):
            return values
        try:
            return numpy.fromiter(values, _DTYPES[self._kind], len(values))
        except OverflowError:  # beyond 64 bits: pandas knows what to do
            return values

    def series(self) -> "pandas.Series[Any]":
        import pandas

        if self._parts and all(isinstance(part, numpy.ndarray) for part in self._parts):
            return pandas.Series(numpy.concatenate(self._parts), copy=False)
        return with_symbols([value for part in self._parts for value in _listed(part)])


def _listed(part: Any) -> list[Any]:
    return part.tolist() if isinstance(part, numpy.ndarray) else part


def with_symbols(cells: list[Any]) -> "pandas.Series[Any]":
    """A column; one with symbolic numbers stays as it is, and is not made one of plain numbers."""
    import pandas

    column = pandas.Series(cells)
    has_symbols = column.dtype.kind in "if" and SymbolicInt in set(map(type, cells))
    return pandas.Series(cells, dtype=object) if has_symbols else column
