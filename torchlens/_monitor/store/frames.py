"""The frames of a run's files: how they lie in a file, and how they are read from one that nobody
vouches for.

A segment (`rank0-000001.seg`) is a file of frames, one after the other, and is only ever appended
to:

    u32 length of the payload | u32 CRC-32 of kind and payload | u8 kind | payload
    (little-endian)

A frame is written by one `write`: what a reader finds is whole frames and, at the end, perhaps a
part of one that is being written or never was finished. The kinds, and their payloads:

    SEGMENT   JSON: {"format": 1, "rank", "number", "first", "level", "session"}. The first frame of
              every file. A segment with `first` < `number` stands for all segments from `first` to
              `number`: it was merged from them. If some of these are of sessions before `session`,
              "before" is what those had offered and dropped.
    SESSION   JSON: {"session", "first_step", "time", "pid", "host", "options"}. A process begins to
              record. What earlier sessions recorded at `first_step` and later is superseded
              (training went on from a checkpoint before it).
    NAMES     JSON: a list of [series, module, kind, name, shape, dtype]: what the numbers of series
              in later frames mean. Every segment tells all the names that its own frames need.
    STEP      binary, see `pack_step`: the columns of one recorded step (or of several, merged).
    SCALARS   JSON: a list of [name, step, mean, smallest, largest, count], as the user logged them.
    FINDING   JSON: a health finding, see findings.py.
    PROBLEM   JSON: {"text", "step"}: what could not be recorded, in a sentence.
    DROPPED   JSON: {"step", "observations"}: what came too fast to be written.
    END       JSON: {"offered", "recorded", "dropped"} of the session, which ended in good order.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from torchlens._monitor.store.columns import TYPES, Columns

HEADER = struct.Struct("<IIB")
# No frame that we write is larger, so no reader takes more memory for one.
MAX_PAYLOAD = 1 << 28
_STEP_HEADER = struct.Struct("<qqIdQQIIB")
_WIDTHS = ("<u2", "<u4", "<u8")
_ARRAYS = tuple(name for name in TYPES if name not in ("quantiles", "codes", "counts"))
_ROW_BYTES = sum(np.dtype(TYPES[name]).itemsize for name in _ARRAYS) + 9 * 4


class Kind(IntEnum):
    """What a frame holds."""

    SEGMENT = 1
    SESSION = 2
    NAMES = 3
    STEP = 4
    SCALARS = 5
    FINDING = 6
    PROBLEM = 7
    DROPPED = 8
    END = 9


class Frame(NamedTuple):
    """One frame, and where in the file it ends. `kind` may be one that a later version invented."""

    kind: int
    payload: bytes
    end: int


class Damage(NamedTuple):
    """Why reading ended before the end of a file. `is_torn`: a frame that is not all there, as
    after a crash.
    """

    offset: int
    reason: str
    is_torn: bool


@dataclass(slots=True, eq=False)
class Step:
    """The columns of a recorded step, or of several that were merged: `first` to `last`, `count` of
    them recorded.

    `offered` and `dropped` count the observations of the session up to and with this step: recorded
    is what is left.
    """

    first: int
    last: int
    count: int
    time: float
    offered: int
    dropped: int
    columns: Columns


def frame_bytes(kind: int, payload: bytes) -> bytes:
    """A frame as it stands in a file."""
    return HEADER.pack(len(payload), zlib.crc32(payload, kind), kind) + payload


def json_frame(kind: int, value: Any) -> bytes:
    """A frame with JSON in it."""
    return frame_bytes(kind, json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode())


def before_of(head: dict[str, Any]) -> tuple[int, int]:
    """What a SEGMENT frame says of earlier sessions: (offered, dropped). ValueError if that makes
    no sense.
    """
    offered, dropped = map(int, head.get("before", (0, 0)))
    if not 0 <= dropped <= offered:
        raise ValueError("a segment that dropped more than there was")
    return offered, dropped


def read_frames(data: bytes | memoryview, start: int = 0) -> Iterator[Frame | Damage]:
    """The frames from `start` on; last of all, where reading had to end before the end of the data,
    the reason.
    """
    view, size = memoryview(data), len(data)
    while start < size:
        if size - start < HEADER.size:
            yield Damage(start, "a frame is cut off within its header", True)
            return
        length, checksum, kind = HEADER.unpack_from(view, start)
        end = start + HEADER.size + length
        if length > MAX_PAYLOAD:
            yield Damage(start, f"a frame claims to be {length:,} bytes long", False)
            return
        if end > size:
            yield Damage(start, f"a frame of {length:,} bytes is cut off", True)
            return
        payload = bytes(view[start + HEADER.size : end])
        if zlib.crc32(payload, kind) != checksum:
            yield Damage(
                start, "a frame does not have the checksum that it should have", end == size
            )
            return
        yield Frame(kind, payload, end)
        start = end


def parse_json(payload: bytes, kind: type) -> Any:
    """What JSON says, if it is of the kind that it must be. ValueError otherwise, whatever is
    wrong.
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"no JSON: {type(error).__name__}") from None
    if not isinstance(value, kind):
        raise ValueError(f"JSON of another kind: {type(value).__name__}, not {kind.__name__}")
    return value


# -- steps
# --------------------------------------------------------------------------------------------------


def pack_step(step: Step) -> bytes:
    """A header (first, last, count, time, offered, dropped, rows, bins, width of counts), then
    column after column.
    """
    columns = step.columns
    largest = int(columns.counts.max()) if len(columns.counts) else 0
    width = 0 if largest < 1 << 16 else 1 if largest < 1 << 32 else 2
    header = _STEP_HEADER.pack(
        step.first,
        step.last,
        step.count,
        step.time,
        step.offered,
        step.dropped,
        len(columns),
        len(columns.codes),
        width,
    )
    parts = [
        np.ascontiguousarray(getattr(columns, name), TYPES[name]).tobytes() for name in _ARRAYS
    ]
    parts.append(np.ascontiguousarray(columns.quantiles, "<f4").tobytes())
    parts.append(np.ascontiguousarray(columns.codes, "<u2").tobytes())
    parts.append(columns.counts.astype(_WIDTHS[width]).tobytes())
    return b"".join([header, *parts])


def unpack_step(payload: bytes) -> Step:
    """Reads what `pack_step` wrote; ValueError if it is anything else."""
    if len(payload) < _STEP_HEADER.size:
        raise ValueError("a step without its header")
    first, last, count, time, offered, dropped, rows, bins, width = _STEP_HEADER.unpack_from(
        payload
    )
    if width >= len(_WIDTHS):
        raise ValueError("a step with counts of no known width")
    expected = (
        _STEP_HEADER.size + rows * _ROW_BYTES + bins * (2 + np.dtype(_WIDTHS[width]).itemsize)
    )
    if expected != len(payload):
        raise ValueError("a step whose columns are not as long as its header says")
    if not 0 <= first <= last < 2**62 or not 0 < count <= last - first + 1 or dropped > offered:
        raise ValueError("a step with numbers that cannot be")
    found: dict[str, np.ndarray] = {}
    place = _STEP_HEADER.size
    for name in (*_ARRAYS, "quantiles", "codes", "counts"):
        kind = np.dtype(_WIDTHS[width] if name == "counts" else TYPES[name])
        number = bins if name in ("codes", "counts") else rows * 9 if name == "quantiles" else rows
        found[name] = np.frombuffer(payload, kind, number, place)
        place += number * kind.itemsize
    found["quantiles"] = found["quantiles"].reshape(rows, 9)
    if int(found["num_bins"].sum(dtype=np.int64)) != bins or (
        rows and bool((np.diff(found["series"].astype("i8")) <= 0).any())
    ):
        raise ValueError("a step whose rows do not fit its bins")
    if bins and int(found["codes"].max()) >= 1024:
        raise ValueError("a step with bins that do not exist")
    found["counts"] = found["counts"].astype("<u8")
    return Step(first, last, count, time, offered, dropped, Columns(**found))
