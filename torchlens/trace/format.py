"""The safetensors format: eight bytes that say how long the header is, the header (JSON), then the tensors back to back.

A file may come from a stranger. So every size is compared with the size of the file before memory is taken for it, and
tensors must follow each other without overlap, hole or rest, as the stock library demands it too.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torchlens.errors import TraceError
from torchlens.trace.plain_text import shown

__all__ = [
    "DTYPES",
    "HEADER_LIMIT",
    "NAMES",
    "Header",
    "Place",
    "checked_place",
    "dtype_named",
    "filled_up",
    "header_bytes",
    "parse_header",
]

HEADER_LIMIT = 100_000_000  # bytes, as in the stock library
_LONGEST_NAME = 4096  # letters
_MOST_SIZES = 64  # as torch has it
_ALIGNED = 8  # bytes: where the first tensor starts, as the stock library has it

# What safetensors calls the data types, and which of torch those are. torch's 4-bit type has two numbers to an item.
NAMES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, word) for name, word in NAMES.items() if hasattr(torch, word)}
_BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Place(NamedTuple):
    """Where in the data of a file a tensor lies, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """What a file says it holds, in the order of the bytes; `data` is where in the file the first of them is."""

    places: dict[str, Place]
    metadata: dict[str, str]
    data: int


def dtype_named(word: Any) -> torch.dtype:
    """The dtype that a file names: 'float32'."""
    found = getattr(torch, word, None) if isinstance(word, str) else None
    if not isinstance(found, torch.dtype):
        raise TraceError(f"There is no dtype {shown(word)} in torch {torch.__version__}.")
    return found


def header_bytes(places: Iterable[tuple[str, Place]], metadata: dict[str, str]) -> bytes:
    """The header with its length in front."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name, (dtype, shape, start, end) in places:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def filled_up(header: bytes, room: int) -> bytes:
    """A header that takes all the room there is, with blanks behind it."""
    if len(header) > room:
        raise ValueError(f"the header takes {len(header)} bytes, and there is room for {room}")
    return (room - 8).to_bytes(8, "little") + header[8:].ljust(room - 8)


def parse_header(text: bytes, data_bytes: int) -> Header:
    """The header of a file that has `data_bytes` behind it, after seeing that all of it makes sense."""
    if not text.startswith(b"{"):
        raise TraceError("Its header is not a JSON object.")
    try:
        entries = json.loads(text)
        if text.count(b'"data_offsets"') != len(entries) - ("__metadata__" in entries):  # or a name looks like that
            entries = json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError too
        raise TraceError(f"Its header is not JSON: {shown(str(error))}.") from None
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TraceError("The metadata in its header must be text by name.")
    return Header(_places_in_order(entries, data_bytes) or _places(entries, data_bytes), metadata, len(text) + 8)


def _places_in_order(entries: dict[str, Any], data_bytes: int) -> dict[str, Place] | None:
    """Where the tensors lie, if all is as it should be and they are listed in the order of their bytes; None otherwise.

    A tenth of the time that it takes to find out what is wrong.
    """
    found: dict[str, Place] = {}
    known: dict[
        tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int]
    ] = {}  # shapes that were looked at, and their bytes
    last, new = 0, tuple.__new__
    try:
        for name, entry in entries.items():
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            seen = known.get((dtype, shape))
            if seen is None:
                place = checked_place(name, entry, data_bytes)
                seen = known[dtype, shape] = place.shape, place.end - place.start
            shape, num_bytes = seen
            if start != last or end != start + num_bytes or type(start) is not int or type(end) is not int:
                return None
            last = end
            found[name] = new(Place, (dtype, shape, start, end))
    except (KeyError, TypeError, ValueError, TraceError):
        return None
    is_in_order = last == data_bytes and max(map(len, found), default=0) <= _LONGEST_NAME
    return found if is_in_order else None


def _places(entries: dict[str, Any], data_bytes: int) -> dict[str, Place]:
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
    return places


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twins = [name for name, _ in pairs]
        raise TraceError(f"Its header has the name {shown(next(name for name in found if twins.count(name) > 1))} twice.")
    return found


def checked_place(name: str, entry: Any, data_bytes: int) -> Place:
    """Where a tensor lies, as a header or a journal says, after seeing that it makes sense."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise TraceError(f"The tensor {shown(name)} must have a dtype, a shape and two data_offsets.") from None
    if type(dtype) is not str or dtype not in _BITS:
        raise TraceError(f"The tensor {shown(name)} has the dtype {shown(dtype)}, which is unknown here.")
    if len(name) > _LONGEST_NAME:
        raise TraceError(f"The name {shown(name)} is longer than {_LONGEST_NAME} letters.")
    numbers = (*shape, start, end) if type(shape) is list else (None,)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or len(shape) > _MOST_SIZES:
        raise TraceError(f"The tensor {shown(name)} must have sizes and offsets from 0 on, at most {_MOST_SIZES} sizes.")
    if not start <= end <= data_bytes:
        raise TraceError(
            f"The tensor {shown(name)} goes from byte {shown(start)} to {shown(end)}, and the file has {data_bytes}."
        )
    if max(shape, default=0) >> 63 or math.prod(shape) * _BITS[dtype] != (end - start) * 8:
        raise TraceError(f"The tensor {shown(name)} has {end - start} bytes, which is not what its shape and dtype take.")
    return Place(dtype, tuple(shape), start, end)
