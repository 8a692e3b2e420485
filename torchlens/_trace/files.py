"""The files of a trace, for reading: one safetensors file, several with an index, or the shards of
a recording that was not closed.

A file may come from anyone. The safetensors package checks its header against its size before any
memory is allocated; the checks here are that an index names only files beside it.
"""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchlens._portable.stored_tensors import TensorSource
from torchlens._text.error_wording import got
from torchlens._text.plain_text import printable, shown
from torchlens.errors import TraceError, ValueChangedError

INDEX_SUFFIX = ".index.json"
PARTIAL_SUFFIX = ".partial"
_MOST_SHARDS = 100_000
_MOST_INDEX_BYTES = 100_000_000
_BACKEND = "pread"  # tensors in memory of their own, which does not change with the file


def safetensors_package() -> Any:
    """The package safetensors, which is an optional one."""
    try:
        import safetensors
        from safetensors import TensorSpec  # noqa: F401 (since 0.8)
    except ImportError:
        raise ImportError(
            "Traces need the package safetensors, 0.8 or newer: pip install 'torchlens[trace]'.",
            name="safetensors",
        ) from None
    return safetensors


class TraceFile:
    """One safetensors file, open for reading.

    A file that is replaced or deleted after that stays readable; reading one that was changed in
    place raises an error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        package = safetensors_package()
        facts = _facts_of(path)
        self.num_bytes = facts.st_size
        self._facts = facts
        try:
            self._file = package.safe_open(path, "pt", backend=_BACKEND)
        except package.SafetensorError as error:
            raise TraceError(
                f"{printable(str(path))} is not a readable safetensors file: "
                f"{printable(str(error), 300)}."
            ) from None
        self.names: list[str] = self._file.offset_keys()
        self.metadata: dict[str, str] = self._file.metadata() or {}

    def read(self, name: str) -> Tensor:
        self._check_unchanged()
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (safetensors_package().SafetensorError, OSError, AttributeError) as error:
            self._check_unchanged()
            raise TraceError(f"{shown(name)} cannot be read: {shown(str(error))}.") from None
        self._check_unchanged()
        return tensor

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The dtype, as safetensors names it, and the shape of a tensor."""
        found = self._file.get_slice(name)
        return str(found.get_dtype()), tuple(found.get_shape())

    def _check_unchanged(self) -> None:
        try:
            now, then = self.path.stat(), self._facts
        except OSError:
            return
        is_same_file = (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)
        if is_same_file and (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise ValueChangedError(
                f"The file {printable(str(self.path))} was changed after it was opened, so what "
                "it held is lost. Load it again."
            )


class TraceFiles(TensorSource):
    """All tensors of a trace by name, in one file or several."""

    def __init__(self, path: Path, files: Sequence[TraceFile], is_closed: bool = True) -> None:
        self.path = path
        self.is_closed = is_closed
        self.metadata = {key: value for file in files for key, value in file.metadata.items()}
        self.num_bytes = sum(file.num_bytes for file in files)
        self._file_of = {name: file for file in files for name in file.names}

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: Any) -> Tensor:
        """A tensor, in memory of its own."""
        return self._file(name).read(name)

    def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._file(name).kind(name)

    def _file(self, name: Any) -> TraceFile:
        if type(name) is not str or name not in self._file_of:
            raise TraceError(f"{printable(self.path.name)} has no tensor {shown(name)}.")
        return self._file_of[name]

    def json(self, name: str) -> Any:
        """A JSON document that was written as a tensor of bytes."""
        try:
            return json.loads(self.read(name).numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{shown(name)} is not JSON ({shown(str(error))}).") from None


def open_trace(path: str | os.PathLike[str]) -> TraceFiles:
    """Opens a trace by its name: finished, still being recorded, or left behind by a process that
    was killed.
    """
    target = _checked_path(path)
    folder = partial_folder(target)
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return TraceFiles(target, list(map(TraceFile, shards)), is_closed=False)
    index = target.with_name(target.name + INDEX_SUFFIX)
    if target.name.endswith(INDEX_SUFFIX):
        index = target
    if target == index or (index.exists() and not target.exists()):
        return TraceFiles(index, _shards_of(index))
    if folder.is_dir() and not target.exists():
        raise TraceError(f"The trace {printable(str(target))} was begun; nothing is in it yet.")
    return TraceFiles(target, [TraceFile(target)])


def _checked_path(path: str | os.PathLike[str]) -> Path:
    """The path of the trace; the folder of an unfinished one also names it."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must name a file, such as 'trace.safetensors', got {got(path)}.")
    target = Path(path).expanduser()
    target = target.with_name(target.name.removesuffix(PARTIAL_SUFFIX)) if target.name else target
    if target.is_dir():
        raise TraceError(
            f"{printable(str(target))} is a folder; name a file in it, such as trace.safetensors."
        )
    return target


def partial_folder(target: Path) -> Path:
    """The folder with the shards of a trace that is being written."""
    return target.with_name(target.name + PARTIAL_SUFFIX)


def _facts_of(path: Path) -> os.stat_result:
    try:
        facts = path.stat()
    except FileNotFoundError:
        beside = path.parent.glob("*.safetensors*") if path.parent.is_dir() else ()
        others = sorted(other.name for other in beside)[:5]
        there = f" Available: {', '.join(map(printable, others))}." if others else ""
        raise FileNotFoundError(f"There is no file {printable(str(path))}.{there}") from None
    if not stat.S_ISREG(facts.st_mode):
        raise TraceError(f"{printable(str(path))} is not a regular file.")
    return facts


def _shards_of(index: Path) -> list[TraceFile]:
    """The files that an index names, after checking that they are those that it was written for."""
    where = printable(str(index))
    if _facts_of(index).st_size > _MOST_INDEX_BYTES:
        raise TraceError(f"{where} is larger than the {_MOST_INDEX_BYTES} bytes that are read.")
    try:
        shard_of: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = dict.fromkeys(shard_of.values())
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"{where} is not an index of safetensors files: {shown(str(error))}."
        ) from None
    if len(shards) > _MOST_SHARDS:
        raise TraceError(f"{where} names {len(shards)} files; at most {_MOST_SHARDS} are read.")
    files = [TraceFile(_path_beside(index, name)) for name in shards]
    found = {name: file.path.name for file in files for name in file.names}
    if found != shard_of:
        odd = next(iter(found.items() ^ shard_of.items()))[0]
        raise TraceError(f"{where} and its files do not agree where {shown(odd)} is.")
    return files


def _path_beside(index: Path, name: Any) -> Path:
    """The path of a file that an index names: one beside it, and nowhere else."""
    is_plain = (
        type(name) is str and name not in ("", ".", "..") and not any(c in name for c in "/\\:\0")
    )
    folders = (index.parent.resolve(), index.resolve().parent)
    try:
        path = index.with_name(name) if is_plain else index
        is_beside = is_plain and path.resolve().parent in folders
        is_there = is_beside and path.exists()
    except (OSError, ValueError):  # a name that no file can have
        is_beside = False
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
