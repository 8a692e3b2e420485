"""The safetensors format: eight bytes that say how long the header is, the header (JSON), then the
tensors back to back.

A file may come from a stranger. So every size is compared with the size of the file before memory
is taken for it, and tensors must follow each other without overlap, hole or rest, as the stock
library demands it too.
"""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from torchlens._text.plain_text import shown
from torchlens.errors import TraceError

HEADER_LIMIT = 100_000_000  # bytes, as in the stock library
LONGEST_NAME = 4096  # letters
_MOST_SIZES = 64  # as torch has it
_ALIGNED = 8  # bytes: where the first tensor starts, as the stock library has it
quoted: Callable[[str], str] = json.encoder.encode_basestring  # text as it stands in JSON

# What safetensors calls the data types, and which of torch those are. torch's 4-bit type has two
# numbers to an item.
NAMES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, word) for name, word in NAMES.items() if hasattr(torch, word)
}
_BITS = {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


class Place(NamedTuple):
    """Where in the data of a file a tensor lies, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def dtype_named(word: Any) -> torch.dtype:
    """The dtype that a file names: 'float32'."""
    found = getattr(torch, word, None) if isinstance(word, str) else None
    if not isinstance(found, torch.dtype):
        raise TraceError(f"There is no dtype {shown(word)} in torch {torch.__version__}.")
    return found


def description(place: Place) -> str:
    """What a header and a journal say of a tensor, without the braces around it."""
    dtype, shape, start, end = place
    return f'"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":[{start},{end}]'


def header_bytes(descriptions: Iterable[tuple[str, str]], metadata: dict[str, str]) -> bytes:
    """The header with its length in front, of names and what `description` says."""
    entries = [f"{quoted(name)}:{{{described}}}" for name, described in descriptions]
    if metadata:
        entries.insert(
            0, f'"__metadata__":{json.dumps(metadata, separators=(",", ":"), ensure_ascii=False)}'
        )
    text = f"{{{','.join(entries)}}}".encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def filled_up(header: bytes, room: int) -> bytes:
    """A header that takes all the room there is, with blanks behind it."""
    if len(header) > room:
        raise ValueError(f"the header takes {len(header)} bytes, and there is room for {room}")
    return (room - 8).to_bytes(8, "little") + header[8:].ljust(room - 8)


def checked_place(name: str, entry: Any, data_bytes: int | None = None) -> Place:
    """Where a tensor lies, as a header or a journal says, after seeing that it makes sense.

    Without `data_bytes` it lies at the start of a file that has nothing else, wherever the entry
    says that it does.
    """
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        start, end = entry["data_offsets"] if data_bytes is not None else (0, 0)
    except (KeyError, TypeError, ValueError):
        raise TraceError(
            f"The tensor {shown(name)} must have a dtype, a shape and two data_offsets."
        ) from None
    if type(dtype) is not str or dtype not in _BITS:
        raise TraceError(
            f"The tensor {shown(name)} has the dtype {shown(dtype)}, which is unknown here."
        )
    if len(name) > LONGEST_NAME:
        raise TraceError(f"The name {shown(name)} is longer than {LONGEST_NAME} letters.")
    numbers = (*shape, start, end) if type(shape) is list else (None,)
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or len(shape) > _MOST_SIZES:
        raise TraceError(
            f"The tensor {shown(name)} must have sizes and offsets from 0 on, at most "
            f"{_MOST_SIZES} sizes."
        )
    num_bits = math.prod(shape) * _BITS[dtype]
    if data_bytes is None:
        end = data_bytes = num_bits // 8
    if not start <= end <= data_bytes:
        raise TraceError(
            f"The tensor {shown(name)} goes from byte {shown(start)} to {shown(end)}, and the file "
            f"has {data_bytes}."
        )
    if max(shape, default=0) >> 63 or num_bits != (end - start) * 8:
        raise TraceError(
            f"The tensor {shown(name)} has {end - start} bytes, which is not what its shape and "
            "dtype take."
        )
    return Place(dtype, tuple(shape), start, end)
