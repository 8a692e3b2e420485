"""A ring buffer in a mapped file: one process puts, another gets, and nobody ever waits.

    0   8 bytes  magic
    8   u64      capacity: how many bytes the ring has, after the header of 4,096
    16  u64      head: how many bytes were put, ever
    24  u64      tail: how many bytes were taken, ever
    32  u64      how many records were taken and dealt with

A record is `u32 length | u32 CRC-32 | payload`, padded to 8 bytes, and never lies across the end of
the ring: a length of 0xFFFFFFFF says that the rest up to the end is empty. What does not fit is
refused.
"""

import mmap
import struct
import zlib
from pathlib import Path

_MAGIC = b"TLRING1\n"
_HEADER = 4096
_U64 = struct.Struct("<Q")
_RECORD = struct.Struct("<II")
_CAPACITY, _HEAD, _TAIL, _DONE = 8, 16, 24, 32
_EMPTY = 0xFFFFFFFF


class Ring:
    """One end of a ring. `create` makes the file; the other process opens it by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._capacity = self._read(_CAPACITY)
        if self._map[:8] != _MAGIC or self._capacity != size - _HEADER or self._capacity % 8:
            self._map.close()
            raise ValueError(f"{path.name} is not a ring buffer")

    @classmethod
    def create(cls, path: Path, capacity: int) -> "Ring":
        """Makes the file of a ring, empty."""
        capacity = max(capacity // 8 * 8, 64)
        with path.open("xb") as file:
            file.write(_MAGIC + _U64.pack(capacity))
            file.truncate(_HEADER + capacity)
        return cls(path)

    def put(self, payload: bytes) -> bool:
        """Adds a record; False if there is no room for it."""
        size = _padded(_RECORD.size + len(payload))
        head, tail = self._read(_HEAD), self._read(_TAIL)
        place = head % self._capacity
        rest = self._capacity - place
        skipped = rest if size > rest else 0
        if len(payload) >= _EMPTY or head + skipped + size - tail > self._capacity:
            return False
        if skipped:
            if rest >= _RECORD.size:
                _RECORD.pack_into(self._map, _HEADER + place, _EMPTY, 0)
            place = 0
        start = _HEADER + place
        _RECORD.pack_into(self._map, start, len(payload), zlib.crc32(payload))
        self._map[start + _RECORD.size : start + _RECORD.size + len(payload)] = payload
        self._write(_HEAD, head + skipped + size)  # last: from now on it is there
        return True

    def get(self) -> bytes | None:
        """The next record; None if there is none. ValueError if what is there makes no sense."""
        while True:
            head, tail = self._read(_HEAD), self._read(_TAIL)
            if tail >= head:
                return None
            place = tail % self._capacity
            rest = self._capacity - place
            length, checksum = (
                _RECORD.unpack_from(self._map, _HEADER + place)
                if rest >= _RECORD.size
                else (_EMPTY, 0)
            )
            if length != _EMPTY:
                break
            self._write(_TAIL, tail + rest)
        start = _HEADER + place + _RECORD.size
        if _padded(_RECORD.size + length) > min(rest, head - tail):
            raise ValueError("a record that is longer than the ring")
        payload = bytes(self._map[start : start + length])
        self._write(_TAIL, tail + _padded(_RECORD.size + length))
        if zlib.crc32(payload) != checksum:
            raise ValueError("a record that does not have its checksum")
        return payload

    @property
    def num_done(self) -> int:
        """How many records were taken and dealt with."""
        return self._read(_DONE)

    def mark_done(self) -> None:
        """One more was dealt with."""
        self._write(_DONE, self._read(_DONE) + 1)

    def close(self) -> None:
        """Lets go of the memory. May be called again."""
        if not self._map.closed:
            self._map.close()

    def _read(self, place: int) -> int:
        found: int = _U64.unpack_from(self._map, place)[0]
        return found

    def _write(self, place: int, value: int) -> None:
        _U64.pack_into(self._map, place, value)


def _padded(size: int) -> int:
    return (size + 7) // 8 * 8
