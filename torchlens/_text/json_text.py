"""Data as JSON: text, or a file.

What there is much of is written by columns: all values of a field at once, which Python does
several times as fast as one record after the other. The text is what `json.dumps` writes.
"""

import json
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, repeat
from json.encoder import encode_basestring
from marshal import dumps
from typing import Any, TypeAlias

from torchlens._recording.collector import without_collector
from torchlens._text.wording import check_count, checked_file

# Records that have the same fields, as the values of each field, which are equally many.
Columns: TypeAlias = "Mapping[str, Sequence[Any] | Lists]"

_FIRST = 400
_BY_VALUE = 2  # the newest way of `marshal` by which equal values become equal bytes
_LIKE_NOTHING_ELSE = (
    str,
    type(None),
)  # equal to no value that reads differently, as 1, 1.0 and True are
_SCALARS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring,
    int: int.__repr__,
    float: float.__repr__,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists of records: the records of the first list, then those of the second, and so
    on.
    """

    members: Columns
    sizes: list[int]


def records_of(columns: Columns) -> list[dict[str, Any]]:
    """The records as they are after reading the JSON."""
    values = [
        _lists(column) if isinstance(column, Lists) else column for column in columns.values()
    ]
    return [dict(zip(columns, own, strict=True)) for own in zip(*values, strict=True)]


def _lists(column: Lists) -> list[list[dict[str, Any]]]:
    members = iter(records_of(column.members))
    return [list(islice(members, size)) for size in column.sizes]


def write_json(
    data: dict[str, Any], path: str | os.PathLike[str] | None, indent: int | None
) -> str | None:
    """The text, or, with a path, nothing: it is in that file then.

    A field that is an iterator of columns becomes one long list of records. Only one of its parts
    is in memory at a time.
    """
    if indent is not None:
        check_count("indent", indent, 0)
    if path is None:
        return "".join(_pieces(data, indent))
    target = checked_file("path", path, "model.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate, as in the name of a file that is no proper text, has no bytes in UTF-8, but
    # an escape in JSON.
    with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_pieces(data, indent))
        file.write("\n")
    return None


def _pieces(data: dict[str, Any], indent: int | None) -> Iterator[str]:
    """The text, field by field and part by part."""
    writer = _Writer(indent)
    start, comma, end = writer.around(0)
    yield "{"
    for number, (name, value) in enumerate(data.items()):
        yield f"{comma if number else start}{encode_basestring(name)}: "
        yield from (
            writer.parts(value, 1) if isinstance(value, Iterator) else (writer.one(value, 1),)
        )
    yield f"{end if data else ''}}}"


class _Writer:
    """Values as text, at a depth: how many lists and records are around them."""

    def __init__(self, indent: int | None) -> None:
        self._indent = None if indent is None else " " * indent
        self._encode = json.JSONEncoder(
            indent=indent, ensure_ascii=False, allow_nan=False, check_circular=False
        ).encode

    def around(self, depth: int) -> tuple[str, str, str]:
        """What stands before, between and after the members of a list or record."""
        if self._indent is None:
            return "", ", ", ""
        line = "\n" + self._indent * (depth + 1)
        return line, f",{line}", "\n" + self._indent * depth

    def one(self, value: Any, depth: int) -> str:
        """A value as the json module writes it."""
        text = self._encode(value)
        return (
            text if self._indent is None else text.replace("\n", "\n" + self._indent * depth)
        )  # none is inside a string

    def parts(self, parts: Iterator[Columns], depth: int) -> Iterator[str]:
        """A list of records, some of which come at a time."""
        start, comma, end = self.around(depth)
        is_empty = True
        for part in parts:
            yield f"[{start}" if is_empty else comma
            yield comma.join(without_collector(partial(self.records, part, depth + 1)))
            is_empty = False
        yield "[]" if is_empty else f"{end}]"

    def records(self, columns: Columns, depth: int) -> list[str]:
        """Each record: its values, with the text between them, which is the same in all records."""
        start, comma, end = self.around(depth)
        pieces: list[Iterable[str]] = []
        between = "{" + start
        for name, values in columns.items():
            texts = self.texts(values, depth + 1)
            between += encode_basestring(name) + ": "
            if texts.count(texts[0]) == len(texts):
                between += texts[0]
            else:
                pieces += [repeat(between), texts]
                between = ""
            between += comma
        pieces.append(repeat(between.removesuffix(comma) + end + "}", len(texts)))
        return list(map("".join, zip(*pieces, strict=False)))

    def texts(self, values: Sequence[Any] | Lists, depth: int) -> list[str]:
        """Each of the values."""
        if isinstance(values, Lists):
            members = self.records(values.members, depth + 1) if any(values.sizes) else []
            return self._gathered("[", members, values.sizes, "]", depth)
        if not values:
            return []
        if type(values[0]) in _LIKE_NOTHING_ELSE and values.count(values[0]) == len(values):
            return [_SCALARS[type(values[0])](values[0])] * len(values)
        types = set(map(type, values))
        if len(types) != 1:
            parts = {
                own: iter(self.texts([value for value in values if type(value) is own], depth))
                for own in types
            }
            return [next(parts[type(value)]) for value in values]
        own = types.pop()
        if own in (list, dict) and not any(values):
            return ["[]" if own is list else "{}"] * len(values)
        if own is list:
            return self._lists(values, depth)
        if own is dict and _has_names(values):
            return _each_alike_once(values, lambda dicts: self._dicts(dicts, depth))
        if own is str:
            return _each_once(values, lambda strings: list(map(encode_basestring, strings)))
        if own in _SCALARS and (own is not float or all(map(math.isfinite, values))):
            return list(map(_SCALARS[own], values))
        return [self.one(value, depth) for value in values]

    def _lists(self, values: Sequence[list[Any]], depth: int) -> list[str]:
        def written(lists: Sequence[Sequence[Any]]) -> list[str]:
            members = self.texts(list(chain.from_iterable(lists)), depth + 1)
            return self._gathered("[", members, list(map(len, lists)), "]", depth)

        return _each_alike_once(values, written)

    def _dicts(self, values: Sequence[dict[str, Any]], depth: int) -> list[str]:
        names = list(values[0])
        if names and all(names == list(value) for value in values):
            return self.records(
                dict(zip(names, zip(*map(dict.values, values), strict=True), strict=True)), depth
            )
        keys = map(encode_basestring, chain.from_iterable(values))
        members = self.texts(list(chain.from_iterable(map(dict.values, values))), depth + 1)
        members = [f"{key}: {text}" for key, text in zip(keys, members, strict=True)]
        return self._gathered("{", members, list(map(len, values)), "}", depth)

    def _gathered(
        self, opening: str, members: list[str], sizes: list[int], closing: str, depth: int
    ) -> list[str]:
        """Lists or dicts; `members` are those of the first, then those of the second, and so on."""
        empty = opening + closing
        if not members:
            return [empty] * len(sizes)
        start, comma, end = self.around(depth)
        first, last = opening + start, end + closing
        if sizes.count(sizes[0]) == len(sizes):
            groups = zip(*[iter(members)] * sizes[0], strict=True)
            return [first + comma.join(group) + last for group in groups]
        return [
            first + comma.join(members[stop - size : stop]) + last if size else empty
            for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]


def _each_once(
    values: Sequence[Hashable], write: Callable[[Sequence[Any]], list[str]]
) -> list[str]:
    """What `write` makes of the values; where the first of them are much the same, of those that
    are equal only once.
    """
    if len(set(values[:_FIRST])) > len(values[:_FIRST]) / 4:
        return write(values)
    different = list(set(values))
    known = dict(zip(different, write(different), strict=True))
    return list(map(known.__getitem__, values))


def _each_alike_once(
    values: Sequence[Any], write: Callable[[Sequence[Any]], list[str]]
) -> list[str]:
    """The same for lists and dicts, which have no hash; and 1, 1.0 and True in them are equal, but
    read differently.
    """
    try:
        if len({dumps(value, _BY_VALUE) for value in values[:_FIRST]}) > len(values[:_FIRST]) / 4:
            return write(values)
        keys = [dumps(value, _BY_VALUE) for value in values]
    except ValueError:  # they hold something that only the json module knows what to do with
        return write(values)
    different = dict(zip(keys, values, strict=True))
    known = dict(zip(different, write(list(different.values())), strict=True))
    return list(map(known.__getitem__, keys))


def _has_names(values: Sequence[dict[Any, Any]]) -> bool:
    """Whether all keys are text; of others, the json module knows what becomes of them."""
    return {str}.issuperset(map(type, chain.from_iterable(values)))
