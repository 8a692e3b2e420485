"""The header of a safetensors file: the names of its tensors, what they are, and where in the file they lie.

A header of ten thousand tensors takes longer to read than all else when a trace is opened. So one that is written as the
stock library and torchlens write them is taken apart by a pattern and checked by columns; any other goes through `json`,
entry by entry, and there it is found out what is wrong with it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchlens.errors import TraceError
from torchlens.trace.format import LONGEST_NAME, Place, checked_place
from torchlens.trace.plain_text import shown

__all__ = ["Header", "header_of_places", "parse_header"]

_METADATA = '{"__metadata__":'
_BETWEEN = len('"":{,"data_offsets":[]},')
_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{'
    rf'("dtype":"[A-Z0-9_]+","shape":\[(?:{_NUMBER}(?:,{_NUMBER})*)?\]),'
    rf'"data_offsets":\[({_NUMBER},{_NUMBER})\]\}}[,}}]'
)


class Header:
    """The tensors of one file by name, in the order of their bytes. `data` is where in the file the first of them is.

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
    """The header of a file that has `data_bytes` behind it, after seeing that all of it makes sense."""
    if not content.startswith(b"{"):
        raise TraceError("Its header is not a JSON object.")
    found = _header_by_columns(content, data_bytes)
    return _header_by_entries(content, data_bytes) if found is None else found


def _header_by_columns(content: bytes, data_bytes: int) -> Header | None:
    """The header, if it is written as most are, tensors in the order of their bytes, and all is as it should be."""
    try:
        text = content.decode().rstrip(" ")
        metadata, start = _metadata_at_start(text)
        names, described, offsets = zip(*_ENTRY.findall(text, start), strict=True)
        if len(text) - start != sum(map(len, map("".join, (names, described, offsets)))) + _BETWEEN * len(names):
            return None  # there is something else between the entries
        known = {text: _checked_kind(text) for text in set(described)}
        kinds = [known[text] for text in described]
        spans = np.fromstring(",".join(offsets), np.int64, sep=",").reshape(-1, 2)
        ends = np.cumsum(np.array([num_bytes for _, _, num_bytes in kinds], np.int64))
    except (ValueError, TypeError, OverflowError, RecursionError, TraceError):  # a UnicodeDecodeError is a ValueError too
        return None
    is_in_order = spans[0, 0] == 0 and np.array_equal(spans[1:, 0], ends[:-1]) and np.array_equal(spans[:, 1], ends)
    if not text.endswith("}}") or ends[-1] != data_bytes or not is_in_order or max(map(len, names)) > LONGEST_NAME:
        return None
    found = Header(names, kinds, ends, metadata, len(content) + 8)
    return found if len(found.names) == len(names) and "__metadata__" not in found else None  # none of them twice


def _metadata_at_start(text: str) -> tuple[dict[str, str], int]:
    """The metadata, and where what comes behind it begins."""
    if not text.startswith(_METADATA):
        return {}, 1
    metadata, end = json.JSONDecoder(object_pairs_hook=_without_twins).raw_decode(text, len(_METADATA))
    if text[end : end + 1] != ",":
        raise ValueError("There is nothing behind it.")
    return _checked_metadata(metadata), end + 1


def _checked_kind(text: str) -> tuple[str, tuple[int, ...], int]:
    """The dtype, the shape, and the bytes of a tensor that is described so."""
    entry = json.loads(f"{{{text}}}")
    place = checked_place("", entry)
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
            what = "overlaps the tensor before it" if place.start < end else "leaves a hole before it"
            raise TraceError(f"The tensor {shown(name)} {what}: it starts at {place.start}, which should be {end}.")
        end = place.end
    if end != data_bytes:
        raise TraceError(f"{data_bytes - end} bytes after the last tensor belong to none; the file may be damaged.")
    return header_of_places(places, metadata, len(content) + 8)


def _checked_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TraceError("The metadata in its header must be text by name.")
    return metadata


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise TraceError(f"Its header has the name {shown(next(name for name in found if names.count(name) > 1))} twice.")
    return found
