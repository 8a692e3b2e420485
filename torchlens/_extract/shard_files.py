"""The files of stored features, written so that a kill at any moment leaves whole shards or none.

    features/
      manifest.json           what was extracted, and how
      shards/00000.json       a shard that is done: its ids, sizes and checksums
      layer4.1.relu/00000.npy the rows of one layer in that shard
      layer4.1.relu/00000.lengths.npy    the tokens of each input, for ragged text

An array is written to a temporary name, synced and renamed; the shard is marked done last.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote
from uuid import uuid4

import numpy as np
from numpy.lib import format as npy

from torchlens._extract.pools import LayerRows
from torchlens.errors import FeaturesError

try:
    import fcntl
except ImportError:  # Windows: no advisory locks
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"


def layer_folder(folder: Path, name: str) -> Path:
    """The folder of a layer: its name, with characters that a file name cannot have escaped."""
    return folder / quote(name, safe=" ,()[]=+@")


def array_path(folder: Path, name: str, shard: str, kind: str = "") -> Path:
    """The file of one layer in one shard; `kind` is "" or ".lengths"."""
    return layer_folder(folder, name) / f"{shard}{kind}.npy"


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def whole_file(path: Path, tag: str) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name once all of it is on the disk."""
    temporary = path.with_name(f"{path.name}.{tag}-{uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, content: Any, tag: str) -> None:
    """Writes a file whole, or not at all."""
    text = json.dumps(content, indent=1 if path.name == MANIFEST else None)
    with whole_file(path, tag) as file:
        file.write(text.encode())


def bytes_of(array: np.ndarray[Any, Any]) -> Any:
    """The bytes of an array, without a copy if it is contiguous."""
    whole: Any = np.ascontiguousarray(array)
    return memoryview(whole).cast("B") if array.size else b""


class _ArrayFile:
    """A `.npy` file that grows by rows, under a temporary name."""

    def __init__(self, path: Path, like: np.ndarray[Any, Any], tag: str) -> None:
        self.path = path
        self.num = 0
        self.crc = 0
        self._header: dict[str, Any] = {
            "descr": npy.dtype_to_descr(like.dtype),
            "fortran_order": False,
            "shape": (0, *like.shape[1:]),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f"{path.name}.{tag}-{uuid4().hex[:8]}.tmp")
        self._file: IO[bytes] = self._temporary.open("wb")
        npy.write_array_header_1_0(self._file, self._header)
        self._start = self._file.tell()

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        data = bytes_of(rows)
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.num += len(rows)

    def finish(self) -> dict[str, Any]:
        """Writes the number of rows, syncs and renames; returns what the done mark says of it."""
        self._file.seek(0)
        # numpy leaves room in the header for the first axis to grow.
        self._header["shape"] = (self.num, *self._header["shape"][1:])
        npy.write_array_header_1_0(self._file, self._header)
        assert self._file.tell() == self._start
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        size = self._temporary.stat().st_size
        self._temporary.replace(self.path)
        return {"rows": self.num, "bytes": size, "crc32": self.crc}

    def drop(self) -> None:
        with suppress(OSError):  # a full disk cannot take what is buffered
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class ShardFile:
    """The arrays of one shard, while they are written. `name` is '00000', or names the inputs."""

    def __init__(self, folder: Path, name: str, tag: str) -> None:
        self.name = name
        self._folder = folder
        self._tag = tag
        self._files: dict[tuple[str, str], _ArrayFile] = {}
        self._ids: list[Any] = []
        self._skipped: list[tuple[Any, str]] = []
        self._batches: list[tuple[int, int]] = []  # the numbers of rows and of skipped inputs

    def append(
        self, rows: Mapping[str, LayerRows], ids: list[Any], skipped: list[tuple[Any, str]]
    ) -> None:
        """Adds a batch."""
        for name, own in rows.items():
            self._file(name, "", own.values).append(own.values)
            if own.lengths is not None:
                self._file(name, ".lengths", own.lengths).append(own.lengths)
        self._ids += ids
        self._skipped += skipped
        self._batches.append((len(ids), len(skipped)))

    def _file(self, name: str, kind: str, like: np.ndarray[Any, Any]) -> _ArrayFile:
        file = self._files.get((name, kind))
        if file is None:
            path = array_path(self._folder, name, self.name, kind)
            file = self._files[name, kind] = _ArrayFile(path, like, self._tag)
        return file

    def finish(self) -> None:
        """Renames all arrays into place and marks the shard done."""
        arrays = {f"{name}{kind}": file.finish() for (name, kind), file in self._files.items()}
        for folder in {file.path.parent for file in self._files.values()}:
            sync_folder(folder)
        mark = {
            "ids": self._ids,
            "skipped": self._skipped,
            "batches": self._batches,
            "arrays": arrays,
        }
        write_json(done_path(self._folder, self.name), mark, self._tag)

    def drop(self) -> None:
        """Removes the temporary files."""
        for file in self._files.values():
            file.drop()


def done_path(folder: Path, shard: str) -> Path:
    """The file that marks a shard as done."""
    return folder / "shards" / f"{shard}.json"


def done_shards(folder: Path) -> list[str]:
    """The shards that are done, by name."""
    return sorted(path.stem for path in (folder / "shards").glob("*.json"))


def read_json(path: Path) -> Any:
    """The content of a file of a feature folder."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FeaturesError(f"Cannot read {path.name} of {str(path.parent)!r}: {error}") from error


# -- two runs on one folder ------------------------------------------------------------------------


class FolderLock:
    """Holds a folder for one process: the rank `tag` of a run. Another one with it is refused."""

    def __init__(self, folder: Path, tag: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "shards").mkdir(exist_ok=True)
        self._folder, self._tag = folder, tag
        self._file: IO[str] | None = _locked(folder / f".lock-{tag}")
        if self._file is None:
            raise FeaturesError(
                f"Another process is extracting into {str(folder)!r} now. Wait for it, or name "
                "another folder. (Several processes of one run: start them with torchrun.)"
            )

    def remove_leftovers(self) -> None:
        """Removes temporary files of killed processes, whose locks are free."""
        stale = {self._tag: True}
        for path in self._folder.glob("**/*.tmp"):
            other = path.name.removesuffix(".tmp").rpartition(".")[2].rpartition("-")[0]
            if other not in stale:
                lock = _locked(self._folder / f".lock-{other}")
                stale[other] = lock is not None
                if lock is not None:
                    lock.close()
            if stale[other]:
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Lets other processes use the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(path: Path) -> IO[str] | None:
    """The file, locked; None if another process holds it."""
    file = path.open("a")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
