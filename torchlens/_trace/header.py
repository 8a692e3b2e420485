"""The header of a safetensors file: the names of its tensors, what they are, and where in the file
they lie.

A header of ten thousand tensors takes longer to read than all else when a trace is opened. So one
that is written as the stock library and torchlens write them is taken apart by a pattern and
checked by columns; any other goes through `json`, entry by entry, and there it is found out what is
wrong with it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchlens._text.plain_text import shown
from torchlens._trace.format import LONGEST_NAME, Place, checked_place
from torchlens.errors import TraceError

_METADATA = '{"__metadata__":'
_SPAN = '"data_offsets":['
_NUM_QUOTES = 10  # of an entry: those around its name, its dtype, and the three words of the format
_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_KIND = re.compile(rf':\{{("dtype":"[A-Z0-9_]+","shape":\[(?:{_NUMBER}(?:,{_NUMBER})*)?\]),')
_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


class Header:
    """The tensors of one file by name, in the order of their bytes. `data` is where in the file the
    first of them is.

    `kinds` are dtype, shape and number of bytes of each, `ends` where its bytes end.
    """

    def __init__(
        self,
        names: Sequence[str],
        kinds: Sequence[tuple[str, tuple[int, ...], int]],
        ends: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]],
        metadata: dict[str, str],
        data: int,
    ) -> None:
        self.metadata = metadata
        self.data = data
        self._numbers = dict(zip(names, range(len(names)), strict=True))
        self._kinds = kinds
        self._ends = ends

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    @property
    def names(self) -> list[str]:
        return list(self._numbers)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(num_bytes for _, _, num_bytes in self._kinds)

    def place(self, name: str) -> Place:
        """Where a tensor lies, and what it is."""
        number = self._numbers[name]
        dtype, shape, num_bytes = self._kinds[number]
        end = int(self._ends[number])
        return Place(dtype, shape, end - num_bytes, end)


def header_of_places(places: dict[str, Place], metadata: dict[str, str], data: int) -> Header:
    """A header of what was looked at entry by entry."""
    kinds = [(dtype, shape, end - start) for dtype, shape, start, end in places.values()]
    return Header(list(places), kinds, [place.end for place in places.values()], metadata, data)


def parse_header(content: bytes, data_bytes: int) -> Header:
    """The header of a file that has `data_bytes` behind it, after seeing that all of it makes
    sense.
    """
    if not content.startswith(b"{"):
        raise TraceError("Its header is not a JSON object.")
    found = _header_by_columns(content, data_bytes)
    return _header_by_entries(content, data_bytes) if found is None else found


def _header_by_columns(content: bytes, data_bytes: int) -> Header | None:
    """The header, if it is written as most are, tensors in the order of their bytes, and all is as
    it should be.
    """
    try:
        text = content.decode().rstrip(" ")
        metadata, start = _metadata_at_start(text)
        letters = np.frombuffer(text.encode("utf-32-le"), np.uint32)[start:]
        if letters.min() < ord(" ") or text.find("\\", start) >= 0:
            return None
        quotes = np.flatnonzero(letters == ord('"')).reshape(-1, _NUM_QUOTES) + start
        # An entry is  "name":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},  and what is in it
        # lies between quotes.
        begins, name_ends, spans = (quotes[:, column].tolist() for column in (0, 1, 8))
        names = [text[begin + 1 : end] for begin, end in zip(begins, name_ends, strict=True)]
        described = [text[end + 1 : span] for end, span in zip(name_ends, spans, strict=True)]
        known = {text: _checked_kind(text) for text in set(described)}
        kinds = list(map(known.__getitem__, described))
        ends = np.cumsum(np.array([num_bytes for _, _, num_bytes in kinds], np.int64))
        where = "".join(
            [text[span:end] for span, end in zip(spans, [*begins[1:], len(text)], strict=True)]
        )
    except (ValueError, TypeError, OverflowError, RecursionError, TraceError):
        return None
    is_whole = (
        len(begins) and begins[0] == start and text.endswith("]}}") and ends[-1] == data_bytes
    )
    if not is_whole or not _are_spans(where[:-1], ends) or max(map(len, names)) > LONGEST_NAME:
        return None
    found = Header(names, kinds, ends, metadata, len(content) + 8)
    return (
        found if len(found.names) == len(names) and "__metadata__" not in found else None
    )  # none of them twice


def _are_spans(text: str, ends: "np.ndarray[Any, np.dtype[np.int64]]") -> bool:
    """Whether a text is  "data_offsets":[0,16]},"data_offsets":[16,32]}  and so on, as the tensors
    end.
    """
    spans = text.removeprefix(_SPAN).removesuffix("]}").replace(f"]}},{_SPAN}", ";").encode()
    if spans.translate(None, b"0123456789") != b",;" * (len(ends) - 1) + b",":
        return False
    numbers = spans.replace(b";", b",")
    expected = np.append(0, np.repeat(ends, 2)[:-1])
    num_digits = len(expected) + int(np.searchsorted(_POWERS, expected, "right").sum())
    if len(numbers) != num_digits + len(expected) - 1 or b",," in b",%b," % numbers:
        return False  # zeros in front of a number, or none at all
    return np.array_equal(np.fromstring(numbers.decode(), np.int64, sep=","), expected)


def _metadata_at_start(text: str) -> tuple[dict[str, str], int]:
    """The metadata, and where what comes behind it begins."""
    if not text.startswith(_METADATA):
        return {}, 1
    metadata, end = json.JSONDecoder(object_pairs_hook=_without_twins).raw_decode(
        text, len(_METADATA)
    )
    if text[end : end + 1] != ",":
        raise ValueError("There is nothing behind it.")
    return _checked_metadata(metadata), end + 1


def _checked_kind(text: str) -> tuple[str, tuple[int, ...], int]:
    """The dtype, the shape, and the bytes of a tensor that is described so, from behind its name up
    to where it lies.
    """
    found = _KIND.fullmatch(text)
    if found is None:
        raise ValueError("It is written in another way.")
    place = checked_place("", json.loads(f"{{{found[1]}}}"))
    return place.dtype, place.shape, place.end


def _header_by_entries(content: bytes, data_bytes: int) -> Header:
    try:
        entries = json.loads(content, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"Its header is not JSON: {shown(str(error))}.") from None
    metadata = _checked_metadata(entries.pop("__metadata__", {}))
    places = {name: checked_place(name, entry, data_bytes) for name, entry in entries.items()}
    places = dict(sorted(places.items(), key=lambda item: item[1][2:]))
    end = 0
    for name, place in places.items():
        if place.start != end:
            what = (
                "overlaps the tensor before it" if place.start < end else "leaves a hole before it"
            )
            raise TraceError(
                f"The tensor {shown(name)} {what}: it starts at {place.start}, which should be "
                f"{end}."
            )
        end = place.end
    if end != data_bytes:
        raise TraceError(
            f"{data_bytes - end} bytes after the last tensor belong to none; the file may be "
            "damaged."
        )
    return header_of_places(places, metadata, len(content) + 8)


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise TraceError("The metadata in its header must be text by name.")
    return metadata


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise TraceError(
            "Its header has the name "
            f"{shown(next(name for name in found if names.count(name) > 1))} twice."
        )
    return found
