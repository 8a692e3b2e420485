"""The files of a trace, for reading: one safetensors file, several with an index, or what an
unfinished one left behind.
"""

import glob
import json
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchlens._text.plain_text import printable, shown
from torchlens._trace.format import HEADER_LIMIT, Place
from torchlens._trace.header import Header, parse_header
from torchlens.errors import TraceError, ValueChangedError

INDEX_SUFFIX = ".index.json"
_MOST_SHARDS = 100_000


class OpenFile:
    """One file that is open for reading, at most as long as somebody holds this.

    What is replaced by another file of the same name stays readable. What is changed while it is
    open is an error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = (
            os.O_RDONLY
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_CLOEXEC", 0)
            | getattr(os, "O_BINARY", 0)
        )
        try:
            self._number = os.open(path, flags)
        except OSError as error:
            raise _could_not_open(path, error) from None
        weakref.finalize(self, os.close, self._number).atexit = False
        self._state = self._look()
        if not stat.S_ISREG(self._state[0]):
            raise TraceError(f"{printable(str(path))} cannot be read at arbitrary positions.")
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._state[1]

    def _look(self) -> tuple[int, int, int]:
        found = os.fstat(self._number)
        return found.st_mode, found.st_size, found.st_mtime_ns

    def read(self, start: int, end: int) -> Tensor:
        """The bytes from `start` to `end`, in memory of their own. There must be as many."""
        memory = torch.empty(end - start, dtype=torch.uint8)
        rest = memoryview(memory.numpy())  # type: ignore[arg-type]
        self._check()
        while rest:
            count = self._read_into(rest[: 1 << 30], start)
            if not count:
                raise self._changed()
            start, rest = start + count, rest[count:]
        self._check()
        return memory

    def _read_into(self, memory: memoryview, start: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._number, [memory], start)
        with self._lock:  # Windows
            os.lseek(self._number, start, os.SEEK_SET)
            piece = os.read(self._number, min(len(memory), 1 << 20))
        memory[: len(piece)] = piece
        return len(piece)

    def _check(self) -> None:
        if self._look() != self._state:
            raise self._changed()

    def _changed(self) -> ValueChangedError:
        return ValueChangedError(
            f"The file {printable(str(self.path))} was changed after it was opened, so what it "
            "held is lost. Load it again."
        )


def _could_not_open(path: Path, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError):
        others = (
            sorted(other.name for other in path.parent.glob("*.safetensors*"))[:5]
            if path.parent.is_dir()
            else []
        )
        there = f" Available: {', '.join(map(printable, others))}." if others else ""
        return FileNotFoundError(f"There is no file {printable(str(path))}.{there}")
    return error


def read_header(file: OpenFile) -> Header:
    """The header of a safetensors file."""
    try:
        if file.num_bytes < 10:
            raise TraceError(f"It has {file.num_bytes} bytes, fewer than the shortest header.")
        length = int.from_bytes(file.read(0, 8).numpy().tobytes(), "little")
        if length > HEADER_LIMIT:
            raise TraceError(
                f"Its header would take {length} bytes; at most {HEADER_LIMIT} are read."
            )
        if length > file.num_bytes - 8:
            raise TraceError(
                f"Its header would take {length} bytes, and the file has {file.num_bytes}."
            )
        return parse_header(file.read(8, 8 + length).numpy().tobytes(), file.num_bytes - 8 - length)
    except TraceError as error:
        raise TraceError(
            f"{printable(str(file.path))} is not a readable safetensors file. {error}"
        ) from None


class TraceFiles:
    """All tensors of a trace by name, in the order in which they were written; in one file or
    several.
    """

    def __init__(
        self, path: Path, files: Sequence[tuple[OpenFile, Header]], metadata: dict[str, str]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self._files = files
        self._file_of = (
            {name: own for own in files for name in own[1].names} if len(files) > 1 else {}
        )
        # Of a trace that was not closed: what it lacks, in words, and what is known of calls that
        # are not complete.
        self.missing: list[str] = []
        self.unfinished: dict[int, list[dict[str, Any]]] = {}

    def __contains__(self, name: object) -> bool:
        return any(name in header for _, header in self._files)

    @property
    def names(self) -> list[str]:
        return list(self._file_of) or [name for _, header in self._files for name in header.names]

    @property
    def num_bytes(self) -> int:
        return sum(header.num_bytes for _, header in self._files)

    def place(self, name: Any) -> Place:
        """Where a tensor lies."""
        return self._home(name)[1].place(name)

    def _home(self, name: Any) -> tuple[OpenFile, Header]:
        """The file that has a tensor."""
        if type(name) is not str or name not in self:
            raise TraceError(f"{printable(self.path.name)} has no tensor {shown(name)}.")
        return self._file_of[name] if self._file_of else self._files[0]

    def read(self, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """The bytes of a tensor, or some of them."""
        file, header = self._home(name)
        place, data = header.place(name), header.data
        last = place.end if end is None else place.start + end
        return file.read(data + place.start + start, data + last)

    def text(self, name: str) -> Any:
        """What JSON says that was written as a tensor of bytes."""
        try:
            return json.loads(self.read(name).numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise TraceError(
                f"{printable(self.path.name)} is damaged: {shown(name)} is no JSON "
                f"({shown(str(error))})."
            ) from None


def partial_path(path: str | Path, number: int) -> str:
    """Where file `number` of a trace is written."""
    return f"{path}.partial" if number == 1 else f"{path}.{number}.partial"


def shard_glob(path: Path, number: int) -> list[Path]:
    """The file with this number of a trace that has its final name."""
    stem, _, suffix = path.name.rpartition(".")
    return sorted(path.parent.glob(f"{glob.escape(stem)}-{number:05}-of-*.{glob.escape(suffix)}"))


def open_finished(target: Path) -> TraceFiles:
    """Opens a file, or those of an index; reads nothing but headers."""
    index = (
        target
        if target.name.endswith(INDEX_SUFFIX)
        else target.with_name(target.name + INDEX_SUFFIX)
    )
    if not target.exists() and index.exists():
        target = index
    if target == index:
        return _open_shards(index)
    file = OpenFile(target)
    header = read_header(file)
    return TraceFiles(target, [(file, header)], header.metadata)


def _open_shards(index: Path) -> TraceFiles:
    file = OpenFile(index)
    where = printable(str(index))
    if file.num_bytes > HEADER_LIMIT:
        raise TraceError(
            f"{where} has {file.num_bytes} bytes; at most {HEADER_LIMIT} are read of an index."
        )
    try:
        content = json.loads(file.read(0, file.num_bytes).numpy().tobytes())
        shards: dict[str, str] = content["weight_map"]
        names = dict.fromkeys(shards.values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{where} is not an index of safetensors files: {shown(str(error))}."
        ) from None
    if len(names) > _MOST_SHARDS:
        raise TraceError(f"{where} names {len(names)} files; at most {_MOST_SHARDS} are read.")
    found: list[tuple[OpenFile, Header]] = []
    num_found = 0
    metadata: dict[str, str] = {}
    for name in names:
        shard = OpenFile(_shard_path(index, name))
        header = read_header(shard)
        metadata |= header.metadata
        for key in header.names:
            if shards.get(key) != name:
                raise TraceError(
                    f"{where} does not say that {shown(key)} is in {shown(name)}; the files do not "
                    "belong together."
                )
        found.append((shard, header))
        num_found += len(header.names)
    if num_found != len(shards):
        lost = next(key for key in shards if not any(key in header for _, header in found))
        raise TraceError(
            f"{where} names {shown(lost)}, which is in no file; the files do not belong together."
        )
    return TraceFiles(index, found, metadata)


def _shard_path(index: Path, name: Any) -> Path:
    """The path of a file that an index names: one beside it, and nowhere else."""
    is_plain = (
        type(name) is str
        and name not in ("", ".", "..")
        and not any(sign in name for sign in "/\\:\0")
    )
    path = index.with_name(name) if is_plain else index
    try:
        is_beside = is_plain and path.resolve().parent in (
            index.parent.resolve(),
            index.resolve().parent,
        )
        is_there = is_beside and path.exists()
    except (OSError, ValueError):  # a name that no file can have
        is_beside = is_there = False
    if not is_beside:
        raise TraceError(
            f"An index must name files beside it; {printable(str(index))} names {shown(name)}."
        )
    if not is_there:
        raise TraceError(
            f"{printable(str(index))} names {shown(name)}, which is not there. Copy the files "
            "together."
        )
    return path
