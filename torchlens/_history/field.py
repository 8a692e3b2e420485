"""How a field of an entry is declared: once, as a method that computes it for many entries.

>>> class EntryLabels(EntryFields):
...     @field
...     def pass_num(self) -> list[int]:
...         '''Which pass of its layer it is, from 1.'''
...         return picked(self._log.graph.pass_of, self._numbers)

`entry.pass_num` is the value of one entry, `LayerEntry.pass_num.of(entries)` the list of many: a
table of a million entries calls each method a few hundred times instead of a million. The attribute
of the entry, the column of the table, the JSON and docs/fields.md all come from this one place.

In such a method, `self` is one entry (`EntryFields`) or many (`ManyEntries`). Both have `_log`,
`_numbers` (of the entries in the log) and `_rows` (what was recorded of them, by field). What all
entries share is looked up before the loop, and what many of them share is computed once: half a
microsecond per value is half a minute per table. Lists and dicts are new for every entry, because
they belong to the caller.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Never,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from torchlens._history.log import Log
from torchlens._recording.recording import Row, RowFields
from torchlens._recording.symbolic import SymbolicInt
from torchlens._text.lazy_import import lazy_function
from torchlens._text.numbers import bytes_text

if not TYPE_CHECKING:
    classic_field = lazy_function("torchlens._history.classic", "classic_field")

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_ENTRIES_PER_PART = 4_000


class ManyEntries:
    """Many entries of a log."""

    def __init__(self, log: Log, numbers: Sequence[int]) -> None:
        self._log = log
        self._numbers = numbers

    @cached_property
    def _rows(self) -> RowFields:
        return RowFields.of(self._log.rows(self._numbers))

    def in_parts(self) -> "Iterator[ManyEntries]":
        """The same entries, a few thousand at a time: what one column reads is still in the cache
        for the next.
        """
        for start in range(0, len(self._numbers), _ENTRIES_PER_PART):
            yield ManyEntries(self._log, self._numbers[start : start + _ENTRIES_PER_PART])


class EntryFields:
    """One entry of a log."""

    __slots__ = ("_entry", "_log")

    def __init__(self, log: Log, entry: int) -> None:
        self._log = log
        self._entry = entry

    @property
    def _numbers(self) -> Sequence[int]:
        return (self._entry,)

    @property
    def _row(self) -> Row:
        return self._log.row(self._entry)

    @property
    def _rows(self) -> RowFields:
        return RowFields.of((self._row,))

    def _labels(self, entries: Iterable[int]) -> list[str]:
        return self._log.labels(list(entries))


class ClassicAccess:
    """Looks up a field that the class itself does not have among those of the classic."""

    __slots__ = ()

    if not TYPE_CHECKING:  # so that a type checker still reports fields that do not exist

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") and not hasattr(
                type(self), name
            ):  # what copy, IPython, numpy ask every object for
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return classic_field(self, name)


class field(property, Generic[_Value]):  # noqa: N801 (a decorator, like property)
    """A field that is computed for many entries at once, and a column of `to_pandas()`. Read from
    one entry, it is one value.
    """

    def __init__(self, compute: Callable[[Any], list[_Value]]) -> None:
        super().__init__(lambda entry: compute(entry)[0])
        self.__doc__ = compute.__doc__
        self._compute = compute

    def of(self, entries: ManyEntries | EntryFields) -> list[_Value]:
        """The values of these entries, in their order."""
        return self._compute(entries)

    @property
    def type(self) -> Any:
        """The type of one value without its parameters: `list` for `list[str]`, `int | None`."""
        (kind,) = get_args(get_type_hints(self._compute)["return"])
        return get_origin(kind) or kind

    if TYPE_CHECKING:

        @overload
        def __get__(self, entry: None, owner: Any = None) -> "field[_Value]": ...

        @overload
        def __get__(self, entry: EntryFields, owner: Any = None) -> _Value: ...

        def __get__(self, entry: Any, owner: Any = None) -> Any: ...

        def __set__(self, entry: Any, value: Never) -> None: ...


def once(keys: Iterable[_Key], make: Callable[[_Key], _Value]) -> list[_Value]:
    """The result of `make` for each key, computed once for equal keys."""
    keys = list(keys)
    known = {key: make(key) for key in dict.fromkeys(keys)}
    return list(map(known.__getitem__, keys))


def size_texts(sizes: list[int]) -> list[str]:
    """Bytes as text."""
    if SymbolicInt in set(map(type, sizes)):  # may be equal to a number, and reads differently
        return list(map(bytes_text, sizes))
    return once(sizes, bytes_text)
